"""Sources: where documents come from and which split each belongs to.

A source lists *references*, cheap descriptions of documents in a fixed order, and reads the documents of one reference.
Splits never cut a document, except where a single text has to serve for all three; then it is cut between paragraphs.
"""

import hashlib
import mmap
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.options import SourceOptions

SPLITS = ("train", "valid", "test")
_SPLIT_NAME = re.compile(r"(?:^|[^a-z])(train|valid|val|dev|test)(?:[^a-z]|$)")
_CANONICAL = {"val": "valid", "dev": "valid"}
_HEADING = re.compile(rb"(?m)^ ?\n ?= (?!=)[^\n]*(?<!=) = ?\n ?\n")  # between blank lines, unlike sections
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}


@dataclass(frozen=True)
class Reference:
    """A document, or several that are read together.

    Attributes:
        name: relative path, with an offset or row range where a file holds several documents.
        split: train, valid or test.
        file: where it lies.
        start: first byte, or first row of an image file.
        size: number of bytes, or of rows.
    """

    name: str
    split: str
    file: Path
    start: int
    size: int


@dataclass(frozen=True)
class Document:
    """One document: its name and its bytes."""

    name: str
    data: bytes


def hashed_split(name: str, percent: int) -> str:
    """Split of a document by a hash of its name: `percent` of them in valid, and as many in test."""
    bucket = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") % 100
    return "valid" if bucket < percent else "test" if bucket < 2 * percent else "train"


def named_split(file: Path) -> str | None:
    """Split that a file's name states (train, valid, val, dev or test between non-letters), if it states one."""
    found = _SPLIT_NAME.search(file.name.lower())
    return _CANONICAL.get(found[1], found[1]) if found else None


def _files(options: SourceOptions) -> list[tuple[str, Path]]:
    """Non-empty files of the source with their relative names, in the order of the names."""
    if options.path is None:
        raise ValueError(f"source.kind={options.kind} needs source.path=, a file or folder")
    root = Path(options.path)
    if root.is_file():
        found = [(root.name, root)]
    elif root.is_dir():
        found = [(path.relative_to(root).as_posix(), path) for path in root.glob(options.pattern) if path.is_file()]
    else:
        raise FileNotFoundError(f"source.path={options.path}: no such file or folder")
    found = sorted(item for item in found if item[1].stat().st_size > 0 and not item[1].name.startswith("."))
    if not found:
        raise ValueError(f"source.path={options.path} has no data: no non-empty file matches {options.pattern!r}")
    return found


def _stdlib(options: SourceOptions) -> list[Reference]:
    """The Python standard library's own source files, split by a hash of the relative path."""
    root = Path(options.path or sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.glob("**/*.py")):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts[:-1]) and path.stat().st_size:
            found.append(("/".join(parts), path))
    if not found:
        raise FileNotFoundError(f"no Python sources in {root}: give a text with source.kind=text source.path=")
    return [
        Reference(name, hashed_split(name, options.valid_percent), path, 0, path.stat().st_size) for name, path in found
    ]


def _text(options: SourceOptions) -> list[Reference]:
    """Text files, one document each.

    If every file's name states a split, that is its split; else a hash of the relative path decides. Where the hash
    would leave valid or test empty (few files), every file is cut in three, 90/5/5, between paragraphs if it has any.
    """
    files = _files(options)
    named = [named_split(path) for _, path in files]
    splits = [split or "" for split in named] if all(named) else []
    if not splits:
        splits = [hashed_split(name, options.valid_percent) for name, _ in files]
        if options.valid_percent and not {"valid", "test"} <= set(splits):
            return [part for name, path in files for part in _thirds(name, path, options.valid_percent)]
    return [
        Reference(name, split, path, 0, path.stat().st_size) for (name, path), split in zip(files, splits, strict=True)
    ]


def _thirds(name: str, path: Path, percent: int) -> Iterator[Reference]:
    """Cuts a text into train, valid and test, in this order, after a blank line, else a line, else anywhere."""
    size = path.stat().st_size
    content = np.memmap(path, np.uint8, "r")
    cuts = [0]
    for share in (100 - 2 * percent, 100 - percent):
        wanted = max(cuts[-1], size * share // 100)
        near = bytes(content[wanted : wanted + (1 << 16)])
        blank, line = near.find(b"\n\n"), near.find(b"\n")
        cuts.append(min(size, wanted + (blank + 2 if blank >= 0 else line + 1)))
    for split, start, end in zip(SPLITS, cuts, [*cuts[1:], size], strict=True):
        if end > start:
            yield Reference(f"{name}@{start}", split, path, start, end - start)


def _wikitext(options: SourceOptions) -> list[Reference]:
    """WikiText, tokenised or raw: a document from each ` = Title = ` heading to the next; files name the splits."""
    found = []
    for name, path in _files(options):
        split = named_split(path)
        if split is None:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cuts = sorted({0, *(match.start() for match in _HEADING.finditer(content)), len(content)})
        found += [Reference(f"{name}@{a}", split, path, a, b - a) for a, b in zip(cuts, cuts[1:], strict=False)]
    if not found:
        raise ValueError(f"source.path={options.path} has no file with train, valid or test in its name")
    return found


def _images(options: SourceOptions) -> list[Reference]:
    """ImageNet32 batch files; where there is no test file, val is test and a hash takes valid out of train."""
    found = []
    files = [(name, path) for name, path in _files(options) if path.suffix == ".npz"]
    if not files:
        raise ValueError(f"source.path={options.path} has no .npz batch files")
    named = {path: named_split(path) or "train" for _, path in files}
    no_test = "test" not in named.values()
    for name, path in files:
        split = "test" if no_test and named[path] == "valid" else named[path]
        rows = len(_rasters(path))
        for row in range(0, rows, 256):
            block = f"{name}@{row}"
            chosen = "valid" if no_test and split == "train" and hashed_split(block, 5) == "valid" else split
            found.append(Reference(block, chosen, path, row, min(256, rows - row)))
    return found


def _rasters(path: Path) -> np.ndarray:
    """Images (N, 3072) of a batch file, in raster order R, G, B of each pixel."""
    try:
        with np.load(path, allow_pickle=False) as file:
            planes = file["data"]
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not an ImageNet32 batch file: {error}") from error
    if planes.ndim != 2 or planes.shape[1] % 3 or planes.dtype != np.uint8:
        raise ValueError(f"{path}: expected uint8 data of shape (N, 3·pixels), got {planes.dtype} {planes.shape}")
    return planes.reshape(len(planes), 3, -1).transpose(0, 2, 1).reshape(len(planes), -1)


_LISTERS: dict[str, Callable[[SourceOptions], list[Reference]]] = {
    "stdlib": _stdlib,
    "text": _text,
    "wikitext": _wikitext,
    "images": _images,
}


def references(options: SourceOptions) -> list[Reference]:
    """Everything a source holds, in its order.

    Raises:
        FileNotFoundError: the path is not there.
        ValueError: it holds nothing of this kind.
    """
    return _LISTERS[options.kind](options)


def read(kind: str, reference: Reference) -> Iterator[Document]:
    """Reads the documents of a reference.

    Raises:
        ValueError: the file has shrunk since it was listed.
    """
    if kind == "images":
        for row in range(reference.start, reference.start + reference.size):
            yield Document(f"{reference.file.name}@{row}", _cached_rasters(reference.file)[row].tobytes())
        return
    with open(reference.file, "rb") as file:
        file.seek(reference.start)
        content = file.read(reference.size)
    if len(content) != reference.size:
        raise ValueError(f"{reference.file} changed while it was being read: run `haed shard` again")
    yield Document(reference.name, content)


_last_rasters: tuple[Path, np.ndarray] | None = None


def _cached_rasters(path: Path) -> np.ndarray:
    """`_rasters` of the file read last is kept, since references to one file come in a row."""
    global _last_rasters
    if _last_rasters is None or _last_rasters[0] != path:
        _last_rasters = (path, _rasters(path))
    return _last_rasters[1]


def title(options: SourceOptions) -> str:
    """Short name of a source for folders: that of the path, or of the Python whose library it is."""
    if options.path is not None:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(options.path).resolve().name) or options.kind
    return f"{options.kind}-{sys.version_info.major}.{sys.version_info.minor}"
