"""Interpolation of options into the texts that users write: `name=run-${seed}`.

OmegaConf substitutes the values. Other texts that mean something to OmegaConf, with `${` in them or equal to `???`, are
hidden from it: a mark stands in for each of them until the end. Only options can be referred to, environment variables
cannot.
"""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from pipeline.verbatim import PATTERNS, TEXTS, type_of

PLACES = ("source.path", "runs_dir", "shards_dir", "loader.cache_dir", "finetune.start_from", "analyse.against")
_BEGIN = re.compile(r"(\\*)\$\{")
_OPTION = re.compile(r"(\.*)([A-Za-z_]\w*(?:\.\w+)*)\}")
_MARK = re.compile("\0(\\d+)\0")


class InterpolationError(ValueError):
    """A `${…}` that does not refer to an option that can be substituted."""


def split_references(key: str, text: str) -> Iterator[tuple[bool, str]]:
    r"""Split a text at its references to options; `\${` stands for `${` itself.

    Yields:
        Whether the part is a reference, and the part, in order.

    Raises:
        InterpolationError: a `${…}` does not refer to an option that can be substituted.
    """
    end = 0
    for found in _BEGIN.finditer(text):
        slashes = len(found[1])
        yield False, text[end : found.start()] + "\\" * (slashes // 2)
        end = found.end()
        if slashes % 2:
            yield False, "${"
            continue
        option = _OPTION.match(text, end)
        place = text[end - 2 : text.find("}", end) + 1 or None]
        itself = f"write \\{place} for the text itself"
        if option is None:
            raise InterpolationError(
                f"{key}={text[:200]}: {place} is not the name of an option, and nothing else is put in, no environment "
                f"variable either: {itself}"
            )
        if not option[1] and type_of(option[2]) is None:
            raise InterpolationError(f"{key}={text[:200]}: there is no option {option[2]} to put in: {itself}")
        if not option[1] and is_dataclass(type_of(option[2])) and not is_dataclass(type_of(key)):
            raise InterpolationError(f"{key}={text[:200]}: {option[2]} is a section of options, no text: {itself}")
        yield True, place
        end = option.end()
    yield False, text[end:]


def has_references(key: str, text: Any) -> bool:
    """Return whether the text of an option refers to other options."""
    if not isinstance(text, str) or "${" not in text or _is_verbatim(key, text):
        return False
    return any(is_place for is_place, _ in split_references(key, text))


def _is_verbatim(key: str, text: str) -> bool:
    """Return whether nothing is substituted in a text.

    That holds for an unknown option, for a regular expression, and for a path that exists exactly as written.
    """
    kind = type_of(key)
    if kind is None or key in PATTERNS:
        return True
    if kind in (list[str], list[int]):
        return not (text.startswith("${") and _OPTION.fullmatch(text, 2))
    return key in PLACES and "\\${" not in text and (os.path.lexists(text) or any(True for _ in glob.iglob(text)))


class TextProtector:
    """A store of the texts that OmegaConf must not interpret."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def protect_tree(self, tree: Any, resolved: bool = False, key: str = "") -> Any:
        """Copy a tree of options with marks in place of texts.

        Args:
            tree: nested dictionaries and lists of text, as `parse_yaml` returns them.
            resolved: nothing is substituted in any of them.
            key: dotted key of the option or section that the tree belongs to.

        Raises:
            InterpolationError: a reference cannot be substituted.
        """
        if isinstance(tree, dict):
            above = f"{key}." if key else ""
            return {name: self.protect_tree(value, resolved, f"{above}{name}") for name, value in tree.items()}
        if isinstance(tree, list):
            return [self.protect_tree(each, True, key) for each in tree]
        if not isinstance(tree, str):
            return tree
        if "${" in tree and not resolved and not _is_verbatim(key, tree):
            parts = list(split_references(key, tree))
            if any(is_place for is_place, _ in parts):
                is_text = type_of(key) in TEXTS  # other types are converted, which fails for a mark
                kept = [is_place or not (is_text or "${" in part) for is_place, part in parts]
                return "".join(
                    part if keep else self._mark_text(part) for keep, (_, part) in zip(kept, parts, strict=True)
                )
            tree = "".join(part for _, part in parts)
        return self._mark_text(tree) if "${" in tree or "\0" in tree or tree.strip() == "???" else tree

    def _mark_text(self, text: str) -> str:
        self._kept.append(text)
        return f"\0{len(self._kept) - 1}\0" if text else ""

    def restore_texts(self, value: Any) -> Any:
        """Replace marks by the stored texts, in a text or in nested dictionaries and lists."""
        if isinstance(value, str):
            return _MARK.sub(lambda found: self._kept[int(found[1])], value)
        if isinstance(value, list):
            return [self.restore_texts(each) for each in value]
        if isinstance(value, dict):
            return {name: self.restore_texts(each) for name, each in value.items()}
        return value
