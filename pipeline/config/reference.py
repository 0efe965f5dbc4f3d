"""Explanations of the options: meaning, unit, range and default, all read from the declarations of the schema.

`haed config` prints them as comments and searches them. `dev/generate_reference.py` writes docs/reference/options.md.
"""

import re
import textwrap
from dataclasses import dataclass, replace
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Unit
from pydantic.fields import FieldInfo

from haed.options import SYSTEMS
from pipeline.config.loading import ConfigError, dump_options, format_value
from pipeline.config.schema import KINDS, Options, applies_to, get_option, option_names, schema_options

_WIDTH = 100  # of a comment
_BOUNDS = ("ge", "gt", "le", "lt", "max_length", "pattern")  # attributes of what Pydantic makes of a Field's bounds


@dataclass(frozen=True)
class Explanation:
    """The declaration of an option.

    Attributes:
        key: dotted key.
        meaning: its description, and the kinds of its section that use it if not all do.
        unit: unit of its numbers, or empty.
        range: the values that it accepts.
        default: its default as it is written on the command line.
        value: its value, of an option that `search_options` found.
    """

    key: str
    meaning: str
    unit: str
    range: str
    default: str
    value: Any = None

    @property
    def paragraphs(self) -> tuple[str, str]:
        """The meaning, and a line of facts."""
        return self.meaning, f"Range: {self.range}.{f' Unit: {self.unit}.' if self.unit else ''}"


def explain_option(key: str) -> Explanation:
    """Return the meaning, unit, range and default of an option, given as a dotted key.

    An option of another package may lack a meaning and bounds.
    """
    option = schema_options()[key]
    metadata = getattr(option.annotated, "__metadata__", ())
    meaning = next((each.description or "" for each in metadata if isinstance(each, FieldInfo)), "")
    if option.kinds:
        meaning = f"{meaning} Only with kind={', '.join(option.kinds)}.".lstrip()
    accepted = describe_range(option.annotated)
    if table := KINDS.get(key):
        accepted = f"{', '.join(table)}, or a kind of another package"
    elif key == "model.kind":
        accepted = ", ".join(SYSTEMS)
    unit = next((each.unit for each in metadata if isinstance(each, Unit)), "")
    return Explanation(key, meaning, unit, accepted, format_value(option.default))


def explain_section(key: str) -> str:
    """Return the meaning of a section of options, given as a dotted key."""
    return (schema_options()[key].type.__doc__ or "").partition("\n")[0]


def describe_range(annotated: Any, bounds: dict[str, Any] | None = None) -> str:
    """Return the values that a type accepts, such as `null, or 1 to 1,024`.

    Args:
        annotated: the type, with the bounds that Pydantic checks.
        bounds: bounds that are declared around the type, by the names of `_BOUNDS`.
    """
    bounds, origin, arguments = bounds or {}, get_origin(annotated), get_args(annotated)
    if origin is Annotated:
        inner, *metadata = arguments
        for info in [each for each in metadata if isinstance(each, FieldInfo)]:
            if isinstance(info.json_schema_extra, dict):
                extra, keywords = info.json_schema_extra, {"ge": "minimum", "le": "maximum"}
                bounds |= {name: extra[keyword] for name, keyword in keywords.items() if keyword in extra}
            metadata += info.metadata
        bounds |= {name: getattr(each, name) for each in metadata for name in _BOUNDS if hasattr(each, name)}
        return describe_range(inner, bounds)
    if NoneType in arguments:
        return f"null, {'' if arguments[0] is bool else 'or '}{describe_range(arguments[0], bounds)}"
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is list:
        most = f" of at most {bounds['max_length']}" if "max_length" in bounds else ""
        return f"list{most}, each {describe_range(arguments[0] if arguments else Any)}"
    if annotated is bool:
        return "true or false"
    if annotated is str:
        most = f" of at most {bounds['max_length']:,} characters" if "max_length" in bounds else ""
        pattern = f" that matches {bounds['pattern']}" if "pattern" in bounds else ""
        return f"text{most}{pattern}"
    if annotated not in (int, float):
        return getattr(annotated, "__name__", str(annotated))
    words = {"ge": "", "gt": "above ", "le": "to ", "lt": "to below "}
    limits = [f"{word}{_format_number(bounds[name])}" for name, word in words.items() if name in bounds]
    return " ".join(limits) or "any number"


def _format_number(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else str(number)


def comment_options(options: Options) -> str:
    """Return the YAML of `dump_options`, with a comment above each option and section that explains it."""
    first, *rest = dump_options(options, scheduler=True).splitlines()
    lines, path = [first], list[str]()
    for line in rest:
        if match := re.match(r"( *)(\w+):(.*)", line):
            indent, name, value = match.groups()
            path[len(indent) // 2 :] = [name]
            key = ".".join(path)
            is_section = key not in option_names()
            lines += [""] if is_section and not indent else []
            for text in [explain_section(key)] if is_section else explain_option(key).paragraphs:
                lines += textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(line)
    return "\n".join(lines)


def search_options(options: Options, words: str) -> list[Explanation]:
    """Return the options with all words in their key or meaning. The beginning of a word is enough.

    Options that the kind of model does not use are left out.

    Raises:
        ConfigError: no option has the words.
    """
    patterns = [re.compile(rf"(?<!\w){re.escape(word)}", re.IGNORECASE) for word in words.split()]
    matches = []
    for key in filter(lambda key: applies_to(key, options.model.kind), option_names()):
        explained = explain_option(key)
        text = f"{key} {key.replace('_', ' ')} {explained.meaning}"
        if all(pattern.search(text) for pattern in patterns):
            matches.append(replace(explained, value=get_option(options, key)))
    if not matches:
        raise ConfigError(f"no option has {words!r} in its name or meaning. Search for one word, such as --search rate")
    return matches


def format_options(matches: list[Explanation]) -> str:
    """Return options as text: each as it is typed, then its meaning and facts."""
    lines = []
    for each in matches:
        meaning, facts = each.paragraphs
        lines.append(f"{each.key}={format_value(each.value)}")
        for text in (meaning, f"{facts} Default: {each.default}."):
            lines += textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
