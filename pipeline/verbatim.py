"""Options of text as they are typed, or stand in a file: in `1e3`, `3:4` and `no` YAML sees numbers and truth."""

import json
import re
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from yaml import BaseLoader, YAMLError
from yaml import load as load_yaml

from data.checked import DEEPEST, DamagedFile, check_tree
from pipeline.options import Options

_ESCAPES = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)", re.DOTALL)


def is_option(word: str) -> bool:
    """Whether a word changes an option: it is key=value, and there is such a key."""
    key, equals, _ = word.partition("=")
    return bool(equals) and type_of(key) is not None


@cache
def type_of(key: str) -> Any:
    """What the schema says of an option, or None if there is none of that name."""
    kind: Any = Options
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind


def verbatim(override: str) -> str:
    """A key=value with the value of a text option in quotes, unless it has some, and the items of a list of texts.

    JSON writes a character beyond U+FFFF as two, of which YAML, where values are read as such, wants one.

    Raises:
        DamagedFile: it is nested so deeply that a parser could choke on it.
    """
    key, value = override.split("=", 1)
    kind = type_of(key)
    if key.count(".") > DEEPEST:
        raise DamagedFile(f"{key[:40]}… is no option")
    if kind not in (str, str | None) or value[:1] in ("'", '"'):
        with suppress(YAMLError):  # which is said when it is parsed
            check_tree(_ESCAPES.sub(_joined, value), "its value")
    if kind in (str, str | None) and value[:1] not in ("'", '"') and value != "null":
        value = json.dumps(value)
    elif kind == list[str]:
        value = _ESCAPES.sub(_joined, value)
        read: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"items={value}"]))
        if isinstance(read["items"], list):
            value = json.dumps(_texts(read["items"], load_yaml(value, BaseLoader)))
    return f"{key}={_ESCAPES.sub(_joined, value)}"


def _joined(escape: re.Match[str]) -> str:
    """Two escapes of UTF-16 as one of a character; any other escape as it is."""
    if escape[1] is None:
        return escape[0]
    return f"\\U{0x10000 + ((int(escape[1], 16) - 0xD800) << 10) + int(escape[2], 16) - 0xDC00:08x}"


def _texts(items: list[Any], written: list[Any]) -> list[Any]:
    """Items of a list as they are written, but for nulls, which are an error of the user's."""
    return [each if each is None else text for each, text in zip(items, written, strict=True)]


def as_written(tree: Any, content: str) -> None:
    """Has numbers and truth that YAML sees in options of text stand as they are written in a file.

    Args:
        tree: what YAML makes of it, as nested dictionaries; changed.
        content: of the file.
    """
    _restore(tree, load_yaml(content, BaseLoader), "")


def _restore(tree: Any, raw: Any, above: str) -> None:
    for key, value in tree.items() if isinstance(tree, dict) and isinstance(raw, dict) else ():
        was, kind = raw.get(key), type_of(f"{above}{key}")
        if kind in (str, str | None) and isinstance(value, int | float):
            tree[key] = was
        elif kind == list[str] and isinstance(value, list) and isinstance(was, list):
            tree[key] = _texts(value, was)
        _restore(value, was, f"{above}{key}.")
