"""Assignment of files and documents to splits: one rule for every source, and the record of the result.

1. `source.valid_pattern` and `source.test_pattern` overrule everything.
2. If the path of any file states a split, the stated splits are used. A file that states none beside them is an error:
   it might be anything, and a licence must not turn the test set into training. If only train and one of valid and test
   are stated, that one is test. Valid is then taken out of train. `source.valid_percent=0` switches both off.
3. If no path does, a hash of each document decides. If there are too few texts, a source may cut them in three instead.

An empty train split is refused. The split of each file, and what was left out and why, are logged and kept in the
manifest.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from typing_extensions import TypedDict

from data.options import SourceOptions

SPLITS = ("train", "valid", "test")
LISTED = 10_000  # maximum names of a kind in a manifest; their count is always exact
_SHOWN = 3  # maximum names of a kind that are printed
_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
_STATED = re.compile(rf"(?:^|[^a-z])({'|'.join(sorted(_NAMES, key=len, reverse=True))})(?:[^a-z]|$)")
_ALMOST = re.compile(rf"(?:^|[^a-z])({'|'.join(SPLITS)})[a-z]+")
_BY = {
    "patterns": "by source.valid_pattern and source.test_pattern",
    "stated": "as stated by the paths",
    "hashed": "by a hash of each document",
    "cut": "every file cut in consecutive parts (source.cut=true, or too few files for a hash)",
    "offsets": "cut by offset",
    "own": "as stated by the source",
}

Places = tuple[str, ...]


def named_split(name: str) -> str | None:
    """Return the split that a relative path states, if it states one.

    A folder with exactly such a name (train, valid, validation, val, dev, test) states it. Else the file's name does,
    if such a word stands in it without letters beside it.
    """
    *folders, file = PurePosixPath(name.lower()).parts
    for folder in folders:
        if folder in _NAMES:
            return _NAMES[folder]
    match = _STATED.search(file)
    return _NAMES[match[1]] if match else None


def hashed_split(key: bytes, percent: int) -> str:
    """Return the split of a document by a hash: `percent` of the documents are valid, and as many are test."""
    return digested_split(hashlib.sha256(key).digest(), percent)


def digested_split(digest: bytes, percent: int) -> str:
    """Return the split of a document by the sha256 of its key. See `hashed_split`."""
    bucket = int.from_bytes(digest[:8], "big") % 100
    return "valid" if bucket < percent else "test" if bucket < 2 * percent else "train"


def split_rule(stated: Iterable[str], percent: int) -> dict[str, Places]:
    """Map each stated split to the splits that its documents go to."""
    names = set(stated)
    if percent and len(names) == 2 and "train" in names:
        (held_out,) = names - {"train"}
        return {"train": ("train", "valid"), held_out: ("test",)}
    return {split: (split,) for split in SPLITS if split in names}


class Listed(TypedDict):
    """A number of names, and the first of them."""

    count: int
    names: list[str]


class Allotted(TypedDict):
    """A `Record` in the manifest."""

    by: str
    files: dict[str, Listed]
    left_out: dict[str, Listed]
    notes: list[str]


@dataclass
class Record:
    """A record of the assignment to splits.

    Attributes:
        by: how it was decided, a key of `_BY`.
        files: names, by the splits that their documents may go to.
        left_out: names of files that were not read, by the reason.
        notes: further sentences.
    """

    by: str = "own"
    files: dict[Places, list[str]] = field(default_factory=dict)
    left_out: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    notes: list[str] = field(default_factory=list)

    def add_places(self, places_by_name: Mapping[str, Places], where: str) -> None:
        """Add the splits that documents may go to.

        Raises:
            ValueError: none of them may go to train.
        """
        for name, places in places_by_name.items():
            self.files.setdefault(places, []).append(name)
        if not any("train" in places for places in self.files):
            others = " and ".join(sorted({split for places in self.files for split in places}))
            empty = self.left_out.get("empty", [])
            but = f" ({some_of(empty, len(empty))}: 0 bytes)" if empty else ""
            repeated = self.left_out.get("repeated", [])
            but += f" (left out, repeated: {some_of(repeated, len(repeated))})" if repeated else ""
            raise ValueError(
                f"{where}: nothing is left for training, because everything goes to {others}{but}. Add documents, "
                "or assign them with source.valid_pattern= and source.test_pattern="
            )

    def to_manifest(self) -> Allotted:
        """Return the record as JSON for the manifest; of very many names, only the first ones."""
        files = {", ".join(places): _list_names(names) for places, names in self.files.items()}
        left_out = {reason: _list_names(names) for reason, names in self.left_out.items()}
        return {"by": self.by, "files": files, "left_out": left_out, "notes": self.notes}


def _list_names(names: list[str]) -> Listed:
    return {"count": len(names), "names": names[:LISTED]}


def describe_splits(record: Allotted) -> Iterator[str]:
    """Yield a line for each entry of the value of `Record.to_manifest`."""
    yield f"splits: {_BY.get(record['by'], record['by'])}"
    for places, names in record["files"].items():
        yield f"  {places}: {some_of(names['names'], names['count'])}"
    for reason, names in record["left_out"].items():
        yield f"  left out, {reason}: {some_of(names['names'], names['count'])}"
    for note in record["notes"]:
        yield f"  {note}"


def some_of(names: list[str], count: int, kind: str = "files") -> str:
    """Return the first names of `count`, for a message."""
    more = f", … ({count:,} {kind})" if count > _SHOWN else ""
    return ", ".join(repr(name)[1:-1] for name in names[:_SHOWN]) + more


def assign_splits(names: Mapping[str, str | None], options: SourceOptions, record: Record) -> dict[str, Places]:
    """Return the splits that the documents of each file may go to, by the rule above.

    Args:
        names: of files or of members of tars, and the split that each states, if any.
        options: the patterns and the share of a hash.
        record: receives how it was decided.

    Raises:
        ValueError: some state a split and some do not.
    """
    where = f"source.path={options.path}"
    if options.test_pattern or options.valid_pattern:
        record.by = "patterns"
        return dict.fromkeys(names, SPLITS)
    silent = [name for name, split in names.items() if split is None]
    if len(silent) == len(names):
        record.by = "hashed"
        almost = {near[1]: name for name in names if (near := _ALMOST.search(PurePosixPath(name.lower()).name))}
        if "train" in almost and len(almost) > 1:
            record.notes.append(
                f"{' and '.join(sorted(almost.values()))} state no split. Name files train.txt, valid.txt and "
                "test.txt, or use source.valid_pattern= and source.test_pattern="
            )
        return dict.fromkeys(names, SPLITS)
    if silent:
        stating = [f"{name} ({split})" for name, split in names.items() if split]
        raise ValueError(
            f"{where}: these names state a split: {some_of(stating, len(stating))}; but these do not: "
            f"{some_of(silent, len(silent))}. Move them away, select files with source.pattern=, or use "
            "source.valid_pattern= and source.test_pattern="
        )
    record.by = "stated"
    stated = {split for split in names.values() if split}
    places = split_rule(stated, options.valid_percent)
    if places.get("train", ("train",)) != ("train",):
        (other,) = stated - {"train"}
        renamed = "valid is used as test, and " if other == "valid" else ""
        record.notes.append(f"only train and {other} are stated: {renamed}valid is taken out of train")
    return {name: places[split] for name, split in names.items() if split}
