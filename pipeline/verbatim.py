"""Options as they are typed, or stand in a file: every scalar is a text until the schema says what it is.

In `1e3`, `3:4` and `no` YAML sees numbers and truth; in a name they are text.
"""

import json
import re
from dataclasses import is_dataclass
from functools import cache
from typing import Any, get_type_hints

import yaml

from pipeline.options import Options
from pipeline.shown import printable

# The first line of a file that `haed` wrote: nothing in it is put in from elsewhere.
RESOLVED = "# Every option, as it was resolved. Values are taken as they stand: ${...} is text here."
TEXTS = (str, str | None)
PATTERNS = (
    "source.valid_pattern",
    "source.test_pattern",
)  # regular expressions, where `\\$` and `${` mean something else
_MOST_NODES = 100_000  # of a file, once its aliases are followed
_CORE = "tag:yaml.org,2002:"


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


def parse_yaml(text: str | bytes) -> Any:
    """Read YAML with every scalar as it is written, and nulls as None.

    Raises:
        YAMLError: it is no YAML, names a key twice, or has a tag.
        ValueError: its aliases stand for too much.
    """
    left = _MOST_NODES

    def plain(node: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"it has more than {_MOST_NODES:,} values")
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
        return None if node.tag == f"{_CORE}null" and not node.style else _joined(node.value)

    root = yaml.compose(text, yaml.SafeLoader)
    return None if root is None else plain(root)


def _joined(text: str) -> str:
    """Text in which JSON wrote a character beyond U+FFFF as two, with that character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def parse_override(word: str) -> tuple[str, Any]:
    """The key of a key=value, and its value: text, None, or lists and dictionaries of these.

    The value of a text option is taken as it is typed, unless it stands in quotes.
    """
    key, typed = word.split("=", 1)
    if type_of(key) in TEXTS:
        return key, None if typed == "null" else _unquoted(typed)
    return key, parse_yaml(typed) if typed.strip() else typed


def _unquoted(typed: str) -> str:
    """Text without the quotes around it."""
    if typed[:1] in ("'", '"'):
        try:
            node = yaml.compose(typed, yaml.SafeLoader)
        except (yaml.YAMLError, ValueError):
            return typed
        if isinstance(node, yaml.ScalarNode):
            return _joined(node.value)
    return typed


def write_override(key: str, value: Any) -> str:
    """The key=value that gives an option exactly this value, whatever text it is."""
    if isinstance(value, str) and type_of(key) in TEXTS and key not in PATTERNS:
        value = _REFERENCE.sub(lambda found: f"{found[1] * 2}\\${{", value)
    return f"{key}={json.dumps(value)}"


_REFERENCE = re.compile(r"(\\*)\$\{")  # what would be read as the place of another option's value


class _Dumper(yaml.SafeDumper):
    """One that puts text into quotes in which signs are to be escaped."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_CORE}str", text, style='"' if printable(text) != text else None)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(tree: dict[str, Any]) -> str:
    """Nested dictionaries of options as YAML that `parse_yaml` reads back, without signs that would steer a terminal."""
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)
    return f"{RESOLVED}\n{printable(text)}"
