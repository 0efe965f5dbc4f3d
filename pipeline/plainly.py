"""What is wrong with an option, in a sentence: OmegaConf's messages without its terms, and where a name belongs."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from pipeline.options import Options
from pipeline.trees import leaves


def keys_like(name: str) -> list[str]:
    """The full keys of options whose last part is this name or, if there is none, is like it."""
    last = {key: key.rpartition(".")[2] for key in _keys()}
    close = [name] if name in last.values() else difflib.get_close_matches(name, dict.fromkeys(last.values()), 1, 0.8)
    return [key for key, each in last.items() if each in close]


def _keys() -> list[str]:
    return [key for key, _ in leaves(asdict(Options()))]


def unequal(word: str) -> str:
    """What is wrong with a word that should change an option but has no `=`."""
    return f"{word!r} is not of the form key=value" + (f": give {word}= a value" if word in _keys() else "")


def _elsewhere(found: "re.Match[str]") -> str:
    keys = keys_like(found[1].replace("-", "_"))
    hint = f"; did you mean {' or '.join(f'{key}=' for key in keys[:4])}?" if keys else found[2] or ""
    return f"there is no option {found[1]}{hint}"


def _section(found: "re.Match[str]") -> str:
    """Says of a section that it is one, where it was given a value."""
    names = {type(part).__name__: key for key, part in _sections(Options())}
    key = names.get(found[1], found[1])
    return f"{key}={found[2]}: {key} is a section of options; set one of those in it, {key}.…="


def _sections(part: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(part):
        if is_dataclass(inner := getattr(part, field.name)):
            yield f"{above}{field.name}", inner
            yield from _sections(inner, f"{above}{field.name}.")


def short(value: Any) -> str:
    """A value as Python writes it, cut if it is long."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:50]}…"


_PLAINLY: tuple[tuple[str, Any], ...] = (
    (r"Key '([^']+)' not in 'Options'(\. Did you mean.*)?", _elsewhere),
    (r"Merge error: \w+ is not a subclass of (\w+)\. value: (.{0,60}).*", _section),
    (r"Invalid value assigned: \w+ is not a ListConfig.*", "expected a list, such as [a, b]"),
    (r"Invalid type assigned: NoneType is not a subclass of \w+\. value: None", "null is no value here"),
    (r"field '([\w.]+)' is not Optional", r"\1=null: expected a value"),
    (r" of type '\w+' could not be converted to Integer", " is not a whole number"),
    (r" of type '\w+' could not be converted to Float", " is not a number"),
)


def explain(error: OmegaConfBaseException) -> str:
    """What is wrong with an option: one line of what OmegaConf says, with the full key where it has only the last part."""
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    for pattern, plain in _PLAINLY:
        message = re.sub(pattern, plain, message)
    key = getattr(error, "full_key", None)
    return f"{key}: {message}" if key and key not in message else message
