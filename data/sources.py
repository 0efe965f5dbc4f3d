"""Sources: where documents come from, and which split each belongs to.

A source lists *inputs*, cheap descriptions of what one worker reads in one go (a file, a range of a file, rows of a data
set), and reads the documents of an input as a stream of pieces. Listing needs no pass over the data, reading needs memory
for a piece, and neither depends on the number of workers.

A document belongs to one split as a whole. Where a folder or file names a split, that is it; else a hash of the document's
name decides, so that more documents never move old ones. Where there is only one text for all three, it is cut.
"""

import hashlib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath

from data.files import File, blocks, list_files
from data.options import SOURCES, SourceOptions, known

SPLITS = ("train", "valid", "test")
_NAMES = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
_STATED = re.compile(rf"(?:^|[^a-z])({'|'.join(sorted(_NAMES, key=len, reverse=True))})(?:[^a-z]|$)")
_HASHED = 32 << 20


@dataclass(frozen=True, slots=True)
class Input:
    """What one worker reads in one go.

    Attributes:
        name: of the document, or of the file that holds several.
        path: where it lies.
        size: about how many bytes it gives.
        splits: where its documents may go; one: all of them.
        start: first byte or row.
        stop: end of the range, None for the end of the file.
        continues: the range begins inside a document, which an earlier input began.
    """

    name: str
    path: str
    size: int
    splits: tuple[str, ...] = SPLITS
    start: int = 0
    stop: int | None = None
    continues: bool = False


@dataclass(slots=True)
class Piece:
    """A document, or the next part of one.

    Attributes:
        name: of the document.
        split: train, valid or test.
        data: its bytes; a few megabytes at most.
        continues: it goes on with the document of the piece before, of the same split.
    """

    name: str
    split: str
    data: bytes
    continues: bool = False


class Source(ABC):
    """Lists and reads the documents of a kind of source. Packages add theirs as entry points of `haed.sources`.

    A worker makes the source anew from the same options, and calls `read` only.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    @cached_property
    def files(self) -> list[File]:
        """The files of the source; what they hold and their names make its digest."""
        return list_files(self.options.path, self.options.pattern, self.options.kind)

    @abstractmethod
    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Everything there is to read, in the order of the documents.

        Args:
            size: bytes an input should have at most; a large file is cut into several where documents begin, and a
                large document where that does no harm.
            align: a document may be cut only after a multiple of so many bytes (1: anywhere).

        Raises:
            FileNotFoundError: the source is not there.
            ValueError: it holds nothing of this kind.
        """

    @abstractmethod
    def read(self, item: Input) -> Iterator[Piece]:
        """Documents of an input, in pieces.

        Raises:
            ValueError: something in it cannot be read; the message names the file.
        """

    def original(self, data: bytes) -> bytes:
        """The bytes of the source that a document was made from, where they differ from the document's."""
        return data

    def fingerprint(self) -> list[str]:
        """Says without reading it all whether the source is still the same: names, sizes and times of its files."""
        return [f"{file.path}\0{file.size}\0{Path(file.path).stat().st_mtime_ns}" for file in self.files]

    def digest(self, threads: int) -> str:
        """sha256 over names and contents of all files, wherever they lie."""
        ranges = [(file, at) for file in self.files for at in range(0, file.size, _HASHED)]
        with ThreadPoolExecutor(threads) as pool:
            hashes = list(pool.map(lambda each: _hash_range(each[0].path, each[1]), ranges))
        whole = hashlib.sha256()
        for (file, at), content in zip(ranges, hashes, strict=True):
            whole.update(f"{file.name}\0{at}\0{content}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def split_of(self, name: str, splits: tuple[str, ...] = SPLITS, content: bytes | None = None) -> str:
        """Split of a document: by the patterns of the options, else its only one, else by a hash.

        Args:
            name: of the document.
            splits: those it may go to.
            content: hash this instead of the name, where names are mere positions.
        """
        if self.options.test_pattern or self.options.valid_pattern:
            for split, pattern in (("test", self.options.test_pattern), ("valid", self.options.valid_pattern)):
                if pattern and re.search(pattern, name):
                    return split
            return "train"
        if len(splits) == 1:
            return splits[0]
        key = name.encode("utf-8", "surrogateescape") if content is None else content
        split = hashed_split(key, self.options.valid_percent)
        return split if split in splits else "train"


def _hash_range(path: str, start: int) -> str:
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        for block in blocks(file, _HASHED):
            found.update(block)
    return found.hexdigest()


def hashed_split(key: bytes, percent: int) -> str:
    """Split of a document by a hash: `percent` of them in valid, and as many in test."""
    bucket = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % 100
    return "valid" if bucket < percent else "test" if bucket < 2 * percent else "train"


def named_split(name: str) -> str | None:
    """Split that a relative path states, if it states one.

    A folder of just that name (train, valid, validation, val, dev, test) says it, else the file's name, where such a word
    stands between other characters than letters.
    """
    *folders, file = PurePosixPath(name.lower()).parts
    for folder in folders:
        if folder in _NAMES:
            return _NAMES[folder]
    found = _STATED.search(file)
    return _NAMES[found[1]] if found else None


def make_source(options: SourceOptions) -> Source:
    """The source of `options`.

    Raises:
        ValueError: there is no source of that kind, or a pattern is not a regular expression.
    """
    for name in ("valid_pattern", "test_pattern"):
        try:
            re.compile(getattr(options, name) or "")
        except re.error as error:
            raise ValueError(
                f"source.{name}={getattr(options, name)!r} is not a regular expression: {error}"
            ) from error
    made: Source = load(options.kind, SOURCES, "haed.sources")(options)
    return made


def load(name: str, table: dict[str, str], group: str) -> type:
    """The class of that name, ours or an entry point's.

    Raises:
        ValueError: there is none.
    """
    known(table, group)(name)
    if name in table:
        module, _, attribute = table[name].partition(":")
        found: type = getattr(import_module(module), attribute)
        return found
    (entry, *_) = entry_points(group=group, name=name)
    loaded: type = entry.load()
    return loaded


def title(options: SourceOptions) -> str:
    """Short name of a source for folders: that of the path, or of the Python whose library it is."""
    if options.kind == "stdlib" and options.path is None:
        return f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
    name = Path(options.path or "").resolve().name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or options.kind
