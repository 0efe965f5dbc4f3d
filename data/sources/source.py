"""Sources: they list and read documents, and tell the split of each.

A source lists *inputs*. An input is what one worker reads in one go: a file, a range of a file, or rows of a data set.
The source reads its documents as a stream of pieces. Listing needs no pass over the data, reading needs memory for one
piece, and neither depends on the number of workers.

A whole document belongs to one split, see `data.sources.splits`. Only a source of a few texts may divide them among
splits.
"""

import hashlib
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, ClassVar

from data.filesystem import add_path_to_errors
from data.options import SOURCES, SourceOptions
from data.processes import available_threads
from data.sources.files import (
    File,
    is_about,
    is_beside,
    is_compressed,
    is_tar,
    iterate_members,
    list_files,
    open_stream,
    read_blocks,
)
from data.sources.splits import (
    SPLITS,
    Places,
    Record,
    assign_splits,
    digested_split,
    hashed_split,
    named_split,
    split_rule,
)

log = logging.getLogger(__name__)
UNIFIED = "line ends (CRLF or CR) became LF"
Form = tuple[str, dict[str, int]]  # name of a document, and its shape or rate
_MANY_FILES, _MANY_BYTES = 10_000, 1 << 32  # whose reading takes so long that it is said
_HASHED = 32 << 20
_BEGINNING = 1 << 16  # bytes, after CRLF became LF, by which files are compared before they are read as a whole
_THREADS = 8  # maximum threads that read files in parallel


@dataclass(frozen=True, slots=True)
class Input:
    """The documents that one worker reads in one go.

    Attributes:
        name: of the document, or of the file that holds several.
        path: where it lies.
        size: approximate bytes that it gives.
        splits: splits that its documents may go to; a single one: all go there.
        start: first byte or row.
        stop: end of the range, None for the end of the file.
        continues: the range begins inside a document that an earlier input began.
        stated: for a tar whose members' paths state their splits: the splits for documents of each stated split.
    """

    name: str
    path: str
    size: int
    splits: tuple[str, ...] = SPLITS
    start: int = 0
    stop: int | None = None
    continues: bool = False
    stated: Mapping[str, Places] | None = None


@dataclass(slots=True)
class Piece:
    """A document, or the next part of one.

    Attributes:
        name: of the document.
        split: train, valid or test.
        data: its bytes; a few megabytes at most.
        continues: it continues the document of the piece before, of the same split.
    """

    name: str
    split: str
    data: bytes
    continues: bool = False


class Source(ABC):
    """A base class that lists and reads documents. Packages add their sources as entry points of `haed.sources`.

    A worker creates the source anew from the same options, and calls only `read`.

    Attributes:
        options_class: dataclass of its options, with those of its own kind.
        record: files by split, as `inputs` found them.
        remarks: what `read` changed or left out, and how often.
        form: name of a document, and the form that all documents have (see `check_consistent_format`).
        once: files with the same content are read once.
        unlike: advice for documents of several forms.
        needs: for sources other than text, the chunker to set.
        gives: what documents are that are no pictures, such as text, so that `pixels` is refused.
        is_text: gives text, which is checked while it is read.
        looked_at: bytes at the beginning of a document that were checked before, and are not checked again.
        whole_files: a document is a file, or its part `NAME@OFFSET` if the file is divided among splits.
        prose: a file such as README.md can be a document of this kind.
    """

    options_class: ClassVar[type[SourceOptions]] = SourceOptions
    once = False
    unlike = "give documents of one form"
    needs = ""
    gives = ""
    is_text = False
    looked_at = 0
    whole_files = False
    prose = True

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.record = Record()
        self.remarks: Counter[str] = Counter()
        self.form: Form | None = None
        self._contents: dict[File, bytes] = {}

    @cached_property
    def files(self) -> list[File]:
        """The files of the source. Their names and contents make its digest."""
        chosen = self.options
        return list_files(chosen.path, chosen.pattern, chosen.kind, chosen.follow_links, self.record.left_out)

    @abstractmethod
    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield all inputs, in the order of the documents.

        Args:
            size: maximum bytes of an input. A large file is divided at document boundaries, and a large document where
                that does no harm.
            align: a document may be divided only after a multiple of this number of bytes (1: anywhere).

        Raises:
            FileNotFoundError: the source is not there.
            ValueError: it holds nothing of this kind.
        """

    @abstractmethod
    def read(self, item: Input) -> Iterator[Piece]:
        """Yield the documents of an input, in pieces.

        Raises:
            ValueError: something in it cannot be read; the message names the file.
        """

    @property
    def value_bytes(self) -> int:
        """Number of bytes of a value, of which `restore_original` takes whole ones."""
        return 1

    def restore_original(self, data: bytes) -> bytes:
        """Return the source bytes from which the bytes of a document were made; by default they are the same."""
        return data

    def decoder_versions(self) -> dict[str, str]:
        """Return the versions of packages that decode the source: another version may give other bytes."""
        return {}

    def fingerprint(self) -> list[str]:
        """Return names, sizes and times of the source's files, which tell cheaply if it is unchanged.

        The names are relative to the source, whose path may be written in several ways. The change time of a file's
        entry is included, since nobody can set it back.
        """
        return [stamp_source_file(file.path, file.name) for file in self.files]

    def convert_newlines(self, data: bytes) -> bytes:
        """Return a whole document with the line endings that `source.newlines` sets."""
        if self.options.newlines == "keep" or b"\r" not in data:
            return data
        self.remarks[UNIFIED] += data.count(b"\r")
        return as_lf(data)

    def read_pieces(self, item: Input) -> Iterator[Piece]:
        """Yield what `read` does; text with the line endings that `source.newlines` sets, also between two pieces."""
        if self.options.newlines == "keep":
            yield from self._read_checked(item)
            return
        held: Piece | None = None  # the piece before
        for piece in chain(self._read_checked(item), [None]):
            if held and self.is_text:
                if piece and piece.continues and held.data.endswith(b"\r"):  # an LF may follow
                    held.data, piece.data = held.data[:-1], b"\r" + piece.data
                    piece.continues = held.continues or bool(held.data)
                held.data = self.convert_newlines(held.data)
            if held and held.data:
                yield held
            held = piece

    def _read_checked(self, item: Input) -> Iterator[Piece]:
        """Yield what `read` does, and check that these are pieces as `Piece` describes them."""
        before: tuple[str, str] | None = None
        pieces, where = self.read(item), f"source.kind={self.options.kind}: read"
        if not isinstance(pieces, Iterable):
            raise TypeError(f"{where} returned {pieces!r:.100}. It must yield a Piece for each document")
        for piece in pieces:
            if not isinstance(piece, Piece):
                raise TypeError(f"{where} yielded {piece!r:.100}, expected a Piece")
            if not isinstance(piece.data, bytes):
                raise TypeError(f"{where} gave {piece.name} data of type {type(piece.data).__name__}, expected bytes")
            if piece.split not in SPLITS:
                raise ValueError(f"{where} gave {piece.name} split {piece.split!r}, expected {', '.join(SPLITS)}")
            begun = item.continues if before is None else before == (piece.name, piece.split)
            if piece.continues and not begun:
                raise ValueError(
                    f"{where} gave {piece.name} a piece that continues another document or split, or none. "
                    "Leave out continues=True for the first piece of a document"
                )
            before = piece.name, piece.split
            yield piece

    def compute_digest(self, threads: int) -> str:
        """Return the sha256 of names and contents of all files, independent of their location."""
        ranges = [(file, at) for file in self.files for at in range(0, file.size, _HASHED)]
        size = sum(file.size for file in self.files)
        if len(self.files) > _MANY_FILES or size > _MANY_BYTES:
            sizes = f"{len(self.files):,} files, {size / 1e9:,.1f} GB"
            log.info("reading the source once, to notice changes later: %s", sizes)
        with ThreadPoolExecutor(threads) as pool:
            hashes = list(pool.map(lambda each: _hash_range(each[0].path, each[1]), ranges))
        whole = hashlib.sha256()
        for (file, at), content in zip(ranges, hashes, strict=True):
            whole.update(f"{file.name}\0{at}\0{content}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Map files to the splits that their documents may go to, and keep the result in `record`.

        See `data.sources.splits`. `inputs` calls it. A file that holds one document (`is_single_file`) gets one split.
        A tar gets none if its members' paths state splits: its input then has `stated`. Repeated files are left out if
        `once` is set.

        Raises:
            ValueError: some files state a split and some do not, or nothing is for training.
        """
        files = self.without_notes(list(files))
        names: dict[str, str | None] = {}
        for file in files:
            split = self.stated_split(file.name)
            inside = self._list_tar_documents(file) if split is None and is_tar(file.path) else []
            names |= dict(inside) if any(split for _, split in inside) else {file.name: split}
        places = assign_splits(names, self.options, self.record)
        if self.record.by == "patterns":
            places |= {file.name: (self.split_of(file.name),) for file in files if self.is_single_file(file)}
        if self.once:
            files = self._drop_repeated(files, places)
        shared = [file for file in files if len(places.get(file.name, ())) > 1 and self.is_single_file(file)]
        if shared:
            places |= self.share_out(shared, places)
        self.stated = split_rule((split for split in names.values() if split), self.options.valid_percent)
        self.record.add_places(places, f"source.path={self.options.path}")
        return {file: places.get(file.name, ()) for file in files}

    def without_notes(self, files: list[File]) -> list[File]:
        """Return the files without those that describe the others, such as README.md and LICENSE.

        They are left out if the others are no such texts (`prose` is False), or if the others state a split and they do
        not. Beside stated splits, names such as download.sh and metadata.json are left out too. If there is nothing
        else, they are the data.
        """
        left_out = {file for file in files if is_about(file.name) and self.is_note(file)}
        others = [file for file in files if file not in left_out]
        patterns = self.options.valid_pattern or self.options.test_pattern  # then patterns decide for all names
        if not patterns and any(self.stated_split(file.name) for file in others):
            left_out |= {file for file in others if is_beside(file.name) and self.stated_split(file.name) is None}
            others = [file for file in files if file not in left_out]
        elif self.prose:
            return files
        if not others:
            return files
        for file in files:
            if file in left_out:
                self.record.left_out["about the data, by their names"].append(file.name)
        return others

    def is_note(self, file: File) -> bool:
        """Return if a file such as README.md may be a note: no such is prose, or its folder states no split."""
        folder = file.name.rpartition("/")[0]
        return not self.prose or self.stated_split(f"{folder}/-" if folder else "-") is None

    def stated_split(self, name: str) -> str | None:
        """Return the split that a relative path states, if it states one."""
        return named_split(name)

    def is_single_file(self, file: File) -> bool:
        """Return if the file is one document as a whole."""
        return False

    def accepts(self, name: str) -> bool:
        """Return if a member of a tar is a document of this kind, by its name."""
        return False

    def _list_tar_documents(self, file: File) -> list[tuple[str, str | None]]:
        """Return the names of the documents of a tar, and the splits that they state."""
        if self.options.valid_pattern or self.options.test_pattern:
            return []  # patterns alone decide
        inside = iterate_members(file.path, self.options.expansion)
        members = [f"{file.name}/{name}" for name, _, _ in inside if self.accepts(name)]
        return [(name, self.stated_split(name)) for name in members]

    def _drop_repeated(self, files: list[File], places: dict[str, Places]) -> list[File]:
        """Return the files without repeated ones. Of copies, one that is held out is kept; else the first."""
        is_hashed = self.record.by == "hashed" and len(files) > 1  # then the contents of all documents are needed
        some = [file for file in files if is_hashed and self.is_single_file(file)] or self._find_alike(files)
        kept: dict[bytes, File] = {}
        for file, digest in sorted(self._hash_files(some), key=lambda each: -SPLITS.index(places[each[0].name][0])):
            first = kept.setdefault(digest, file)
            if first is not file:
                self.record.left_out["repeated"].append(f"{file.name} (the same as {first.name})")
                del places[file.name]
        return [file for file in files if file.name in places]

    def _find_alike(self, files: list[File]) -> list[File]:
        """Return the files that may have the contents of another one, by their sizes, or by how they begin."""
        keys: list[object] = [file.size for file in files]
        if self._is_unified or any(is_compressed(file.path) for file in files):  # copies may have other sizes
            with ThreadPoolExecutor(min(_THREADS, available_threads())) as pool:
                keys = list(pool.map(self._read_beginning, files))
        counts = Counter(keys)
        return [file for file, key in zip(files, keys, strict=True) if counts[key] > 1]

    def _read_beginning(self, file: File) -> bytes:
        with open_stream(file.path, self.options.expansion) as stream:
            head = stream.read(2 * _BEGINNING)
        return hashlib.sha256((as_lf(head) if self._is_unified else head)[:_BEGINNING]).digest()

    @property
    def _is_unified(self) -> bool:
        """True if CRLF and CR become LF. Then copies are equal whatever their line endings."""
        return self.is_text and self.options.newlines == "lf"

    def _hash_files(self, files: list[File]) -> list[tuple[File, bytes]]:
        """Return the files with the sha256 of the decompressed contents of each."""
        unknown = [file for file in files if file not in self._contents]
        with ThreadPoolExecutor(min(_THREADS, available_threads())) as pool:
            self._contents |= zip(unknown, pool.map(self._hash_content, unknown), strict=True)
        return [(file, self._contents[file]) for file in files]

    def _hash_content(self, file: File) -> bytes:
        content = hashlib.sha256()
        with open_stream(file.path, self.options.expansion) as stream:
            for block in read_blocks(stream):
                while self._is_unified and block.endswith(b"\r") and (after := stream.read(1)):
                    block += after
                content.update(as_lf(block) if self._is_unified else block)
        return content.digest()

    def share_out(self, files: list[File], places: Mapping[str, Places]) -> dict[str, Places]:
        """Return the split of each of these files, which are one document each, by a hash of its content."""
        splits = {file.name: digested_split(key, self.options.valid_percent) for file, key in self._hash_files(files)}
        return {name: (split if split in places[name] else "train",) for name, split in splits.items()}

    def split_of(self, name: str, splits: Places = SPLITS, content: bytes | None = None) -> str:
        """Return the split of a document: by the patterns of the options, else its only one, else by a hash.

        Args:
            name: of the document.
            splits: those it may go to.
            content: hash this instead of the name. Then the same document is in the same split under every name.
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

    def places_in(self, item: Input, name: str) -> Places:
        """Return the splits that a document of an input may go to; used for members of tars."""
        return item.stated[self.stated_split(name) or ""] if item.stated else item.splits

    def check_chunker(self, kind: str, text: bool) -> None:
        """Check that the chunker suits the documents.

        Raises:
            ValueError: the chunker of this kind is for text, and the documents are no text, or for pictures, and they
                are none; the message says which to set.
        """
        if self.gives and kind == "pixels":
            raise ValueError(
                f"source.kind={self.options.kind} gives {self.gives}, but chunker.kind=pixels cuts pictures. Set "
                f"{self.needs or 'chunker.kind=words or chunker.kind=fixed'}"
            )
        if self.needs and text:
            raise ValueError(
                f"source.kind={self.options.kind} gives no text, but chunker.kind={kind} cuts text. Set {self.needs}"
            )

    def check_consistent_format(self, name: str, **form: int) -> None:
        """Check that a document has the same form, such as shape or rate, as all others. See `compare_forms`."""
        self.form = self.form or (name, form)
        self.compare_forms(self.form, (name, form))

    def compare_forms(self, first: Form, other: Form) -> None:
        """Raise FormatMismatchError if two documents differ in form; the message names both."""
        if first[1] != other[1]:
            forms = [
                f"{name} has {', '.join(f'{key} {value:,}' for key, value in form.items())}"
                for name, form in (first, other)
            ]
            raise FormatMismatchError(f"documents differ in form: {'; '.join(forms)}. To fix it, {self.unlike}")


class MediaSource(Source):
    """A source whose documents are files of certain suffixes, or such members of tars. One worker reads a tar.

    Attributes:
        suffixes: of the files that are documents.
        noun: the documents, for people.
        missing: end of the error where there is no such file.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    noun: ClassVar[str]
    missing: ClassVar[str]

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield every file that holds documents. Others are left out."""
        files = []
        for file in self.files:
            if self.is_chosen(file):
                files.append(file)
            else:
                self.record.left_out[f"no {self.noun}"].append(file.name)
        if not files:
            raise ValueError(f"source.path={self.options.path} has {self.missing}")
        for file, splits in self.places(files).items():
            yield Input(file.name, file.path, file.size, splits or SPLITS, stated=None if splits else self.stated)

    def is_chosen(self, file: File) -> bool:
        """Return if the file holds documents."""
        return self.is_single_file(file) or is_tar(file.path)

    def is_single_file(self, file: File) -> bool:
        """Return if the file is a document, by its suffix."""
        return file.path.lower().endswith(self.suffixes)

    def accepts(self, name: str) -> bool:
        """Return if a member of a tar is a document by its suffix, and not hidden like the notes that macOS adds."""
        path = PurePosixPath(name)
        return path.suffix.lower() in self.suffixes and not path.name.startswith(".")

    def iterate_documents(self, item: Input) -> Iterator[tuple[str, IO[bytes], int, str]]:
        """Yield name, content, size, and place for errors, of a file or the documents of a tar. Others are counted."""
        if not is_tar(item.path):
            with open(item.path, "rb") as file:
                yield item.name, file, item.size, item.path
            return
        for name, content, size in iterate_members(item.path, self.options.expansion, self.remarks):
            if self.accepts(name):
                yield f"{item.name}/{name}", content, size, f"{item.path}: {name}"
            else:
                self.remarks[f"members of tars were left out: they are hidden, or not {self.noun}"] += 1


class FormatMismatchError(ValueError):
    """An error: two documents differ in form. The message says what to do."""


def stamp_source_file(path: str, name: str | None = None) -> str:
    """Return name or path, number, size and times of a file, which tell cheaply if it is unchanged."""
    status = os.stat(path)
    return f"{name or path}\0{status.st_ino}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"


def as_lf(data: bytes) -> bytes:
    """Convert all line endings of a text to LF."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _hash_range(path: str, start: int) -> str:
    digest = hashlib.sha256()
    with add_path_to_errors(path), open(path, "rb", buffering=0) as file:
        file.seek(start)
        for block in read_blocks(file, _HASHED):
            digest.update(block)
    return digest.hexdigest()


def make_source(options: SourceOptions) -> Source:
    """Create the source of `options`.

    Raises:
        ValueError: there is no source of that kind.
    """
    return SOURCES.load_class(options.kind)(options)


def source_title(options: SourceOptions) -> str:
    """Return a short name of a source for folders: the name of its path, or of the Python whose library it is."""
    if options.kind == "stdlib" and options.path is None:
        return f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
    name = Path(options.path or "").resolve().name
    title = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    return title[:200] or options.kind  # a digest follows, and a file's name has at most 255 bytes
