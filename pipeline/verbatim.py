"""Parsing of options as written, on the command line or in a file: scalars stay text until the schema gives a type.

YAML would read `1e3`, `3:4` and `no` as numbers and a boolean, but in a name they are text.
"""

import json
import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

import yaml

from data.checked import DEEPEST, NODES, CorruptFileError, check_tree
from pipeline.console import make_printable
from pipeline.options import Options

# The first line of a file that `haed` wrote: nothing in it is interpolated.
RESOLVED = "# Every option, as it was resolved. Values are taken as they stand: ${...} is text here."
TEXTS = (str, str | None)
PATTERNS = (
    "source.valid_pattern",
    "source.test_pattern",
)  # regular expressions, where `\\$` and `${` have another meaning
_CORE = "tag:yaml.org,2002:"


def is_option(word: str) -> bool:
    """Return whether a word changes an option: it has the form key=value, and the key exists."""
    key, equals, _ = word.partition("=")
    return bool(equals) and type_of(key) is not None


@cache
def type_of(key: str) -> Any:
    """Return the type of an option in the schema; None: no such option exists."""
    kind: Any = Options
    for part in key.split("."):
        kind = get_type_hints(kind).get(part) if is_dataclass(kind) else None
    return kind


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML with every scalar as written, and nulls as None.

    Raises:
        YAMLError: the text is not YAML, repeats a key, or has an unknown tag.
        ValueError: it holds too many values, those of expanded aliases included.
    """
    left = NODES

    def plain(node: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {NODES:,} values")
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(None, None, "a key that is no word", key.start_mark)
                if key.value in found:
                    raise yaml.MarkedYAMLError(None, None, f"{key.value} stands here a second time", key.start_mark)
                found[key.value] = plain(value)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [plain(each) for each in node.value]
        if not node.tag.startswith(_CORE) or "python" in node.tag:
            raise yaml.MarkedYAMLError(None, None, f"the tag {node.tag} is not known", node.start_mark)
        return None if node.tag == f"{_CORE}null" and not node.style else _join_surrogates(node.value)

    root = yaml.compose(text, yaml.SafeLoader)
    return None if root is None else plain(root)


def _join_surrogates(text: str) -> str:
    """Join the surrogate pairs that JSON writes for characters beyond U+FFFF."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def parse_override(word: str) -> tuple[str, Any]:
    """Split key=value into the key and its value: text, None, or nested lists and dictionaries of these.

    The value of a text option is used as typed, except that `null` is None and a quoted text is unquoted.

    Raises:
        CorruptFileError: the value is nested too deeply.
    """
    key, typed = word.split("=", 1)
    if key.count(".") > DEEPEST:
        raise CorruptFileError(f"{key[:40]}… is no option")
    if type_of(key) in TEXTS:
        return key, None if typed == "null" else _strip_quotes(typed)
    check_tree(typed, key, fast=False)
    return key, parse_yaml(typed) if typed.strip() else typed


def _strip_quotes(typed: str) -> str:
    """Return text without surrounding quotes."""
    if typed[:1] in ("'", '"'):
        try:
            check_tree(typed, "", fast=False)
            node = yaml.compose(typed, yaml.SafeLoader)
        except (yaml.YAMLError, ValueError):
            return typed
        if isinstance(node, yaml.ScalarNode):
            return _join_surrogates(node.value)
    return typed


def write_override(key: str, value: Any) -> str:
    """Return the key=value that sets an option to exactly this value, whatever characters it holds."""
    if isinstance(value, str) and type_of(key) in TEXTS and key not in PATTERNS:
        value = _REFERENCE.sub(lambda found: f"{found[1] * 2}\\${{", value)
    return f"{key}={json.dumps(value)}"


_REFERENCE = re.compile(r"(\\*)\$\{")  # would be read as a reference to an option


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text with characters that must be escaped."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_CORE}str", text, style='"' if make_printable(text) != text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Return options as YAML that `parse_yaml` reads back, without characters that could control a terminal."""
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    return f"{RESOLVED}\n{make_printable(text)}"
