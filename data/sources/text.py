"""Sources of text whose files are documents: files, enwik8, the Python standard library's own sources.

Plain files are divided into ranges, so that many workers share one file. Compressed files are read from start to end.
"""

import io
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO

from data.sources.file_type import HEAD, check_text
from data.sources.files import File, is_about, is_compressed, open_stream, read_blocks
from data.sources.source import Input, Piece, Source
from data.sources.splits import SPLITS, Places, some_of

_WINDOW = 1 << 16  # bytes to search for a good place to cut
_HELD = 32 << 20  # bytes of a compressed file that are kept while its size is found
INFLATED = 4  # assumed compression ratio, only used to balance the work
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
_INSIDE = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_TEXT = re.compile(rb"[\n\r](?=\S)")  # every chunker begins a chunk at text after a line ending
_BLANK = re.compile(rb"\n\r?\n|\r\r(?!\n)")  # lines may end in LF, CRLF or CR


class Texts(Source):
    """A source of text files. The same content is read once, and files that are no text are refused."""

    once = is_text = True

    def check_chunker(self, kind: str, text: bool) -> None:
        """Check as every source does, and refuse `pixels`: text is no raster."""
        super().check_chunker(kind, text)
        if kind == "pixels":
            raise ValueError(
                f"source.kind={self.options.kind} gives text, and chunker.kind=pixels cuts pictures: set chunker.kind=words, or "
                "fixed"
            )

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Refuse files that are no text, then assign splits as every source does."""
        files = self.without_notes(list(files))
        self.look_at(files)
        found = super().places(files)
        about = [file.name for file in found if is_about(file.name)]
        if 0 < len(about) < len(found):
            self.record.notes.append(
                f"{some_of(about, len(about))}: taken for texts of the corpus, which source.pattern= prevents"
            )
        return found

    def look_at(self, files: list[File]) -> None:
        """Refuse files that are no text, and note those that are not UTF-8."""
        odd = defaultdict[str, list[str]](list)
        for file in files:
            if what := check_text(file.path, self.options.expansion):
                odd[what].append(file.name)
        for what, names in odd.items():
            self.record.notes.append(f"{some_of(names, len(names))}: {what}; the bytes are read as they are")


class TextSource(Texts):
    """A source with a document per file.

    If paths of files state splits, these are used; else a hash of the content decides. If the hash would leave a split
    empty (few files), every file is cut in three, 90/5/5, between paragraphs if it has any.
    """

    looked_at, whole_files = HEAD, True

    def is_single_file(self, file: File) -> bool:
        """Return True: every file is a document."""
        return True

    def share_out(self, files: list[File], places: Mapping[str, Places]) -> dict[str, Places]:
        """Return the splits as every source does, or nothing if files are to be cut."""
        wanted = {split for file in files for split in places[file.name]}
        cut, enough = self.options.cut, len(files) >= len(wanted) or not self.options.valid_percent
        shared = super().share_out(files, places) if enough and not cut else {}
        if cut or (cut is None and self.options.valid_percent and wanted > {split for (split,) in shared.values()}):
            shared = {}
            if self.record.by == "hashed":
                self.record.by = "cut"
            else:
                self.record.notes.append("valid is the end of every file of train")
        return shared

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield whole files, or ranges of a file that is large or cut among splits. Compressed files stay whole."""
        for file, splits in self.places(self.files).items():
            whole = len(splits) == 1
            if is_compressed(file.path):
                total = None if whole else self.totals.get(file)  # if unknown, the worker measures it
                yield Input(file.name, file.path, file.size * INFLATED, splits, 0, total)
                continue
            parts = [(splits[0], 0, file.size)] if whole else list(self._split_parts(file, splits))
            for part, start, stop in parts:
                name = file.name if whole else f"{file.name}@{start}"
                # If line endings lose a byte, multiples of `align` are unknown before reading.
                loses = align > 1 and self.options.newlines == "lf"
                for a, b in [(start, stop)] if loses else split_into_ranges(file.path, start, stop, size, align):
                    yield Input(name, file.path, b - a, (part,), a, b, a > start)

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield a file or its range in pieces. Of a file that several splits share, yield its parts."""
        return self.convert_piece_newlines(self._read_pieces(item))

    def _read_pieces(self, item: Input) -> Iterator[Piece]:
        if len(item.splits) > 1:
            yield from self._read_compressed(item)
            return
        with open_stream(item.path, self.options.expansion) as stream:
            if item.start:
                stream.seek(item.start)
            continues, passed = item.continues, 0
            for block in read_blocks(stream, None if item.stop is None else item.stop - item.start):
                yield Piece(item.name, item.splits[0], block, continues)
                continues, passed = True, passed + len(block)
        if item.stop is not None and passed != item.stop - item.start:
            raise ValueError(f"{item.path} changed while it was being read: run `haed shard` again")

    def split_targets(self, total: int, splits: Places) -> list[int]:
        """Return the approximate offsets where the splits after the first begin."""
        percent = self.options.valid_percent
        return [total * (100 - left * percent) // 100 for left in range(len(splits) - 1, 0, -1)]

    def find_cut(self, window: bytes) -> int:
        """Return the exact place to cut in the bytes from a target on.

        It is after a blank line; without one, after a line; without one, after a character.
        """
        blank = _BLANK.search(window)
        return blank.end() if blank else _after_line(window)

    def _split_parts(self, file: File, splits: Places) -> Iterator[tuple[str, int, int]]:
        """Yield split, start and end of the parts of a plain file."""
        start = 0
        with open(file.path, "rb") as stream:
            for split, target in zip(splits, (*self.split_targets(file.size, splits), file.size), strict=True):
                stream.seek(max(start, target))
                stop = max(start, target) + self.find_cut(stream.read(_WINDOW)) if target < file.size else file.size
                if stop > start:
                    yield split, start, stop
                start = stop

    def _read_compressed(self, item: Input) -> Iterator[Piece]:
        """Yield the parts of a compressed file, whose size decides where it is cut.

        Only a large one is read twice for this.
        """
        total = item.stop
        if total is None:
            with open_stream(item.path, self.options.expansion) as stream:
                content = stream.read(_HELD)
                if len(content) < _HELD:
                    yield from self._read_parts(io.BytesIO(content), item, len(content))
                    return
                total = len(content) + sum(len(block) for block in read_blocks(stream))
                del content
        with open_stream(item.path, self.options.expansion) as stream:
            yield from self._read_parts(stream, item, total)

    def _read_parts(self, stream: IO[bytes], item: Input, total: int) -> Iterator[Piece]:
        """Yield the parts of a stream of known size."""
        start = position = 0
        rest = b""
        for split, target in zip(item.splits, (*self.split_targets(total, item.splits), total), strict=True):
            title = f"{item.name}@{start}"
            head, rest = rest[: max(0, target - position)], rest[max(0, target - position) :]
            continues = False
            for block in chain((head,), read_blocks(stream, max(0, target - position - len(head)))):
                if block:
                    yield Piece(title, split, block, continues)
                    continues, position = True, position + len(block)
            if target < total:
                rest += stream.read(_WINDOW - len(rest))
                cut = self.find_cut(rest)
                if cut:
                    yield Piece(title, split, rest[:cut], continues)
                rest, position = rest[cut:], position + cut
            start = position


def _after_line(window: bytes) -> int:
    """Return the end of the first line; without a line, the end of a UTF-8 character that was cut at the beginning."""
    line = window.find(b"\n")
    if line < 0:
        line = window.find(b"\r", 0, -1)  # an old Mac's; an LF may follow the last byte
    if line >= 0:
        return line + 1
    rest = len(window) - len(window.lstrip(_INSIDE))
    return rest if rest < 4 else 0  # four in a row are no UTF-8


def split_into_ranges(path: str, start: int, stop: int, size: int, align: int) -> Iterator[tuple[int, int]]:
    """Split a document of a plain file into ranges of about `size` bytes, after a line if it may be cut anywhere."""
    count = max(1, -(-(stop - start) // size))
    before = start
    with open(path, "rb") as file:
        for number in range(1, count):
            cut = start + (stop - start) * number // count
            if align > 1:
                cut -= (cut - start) % align
            else:
                file.seek(cut)
                window = file.read(_WINDOW)
                found = _TEXT.search(window)
                cut += found.end() if found else _after_line(window)
            if before < cut < stop:
                yield before, cut
                before = cut
    yield before, stop


class StdlibSource(TextSource):
    """The Python standard library's own source files, split by a hash of the relative path."""

    @cached_property
    def files(self) -> list[File]:
        """The source files, except for tests and installed packages."""
        root = Path(self.options.path or sysconfig.get_paths()["stdlib"])
        if not root.exists():
            raise FileNotFoundError(f"source.path={root}: no such file or folder")
        found = [
            File(path.relative_to(root).as_posix(), str(path), path.stat().st_size)
            for path in root.glob("**/*.py")
            if not _SKIPPED.intersection(path.relative_to(root).parts[:-1])
        ]
        if not found:
            raise FileNotFoundError(f"no Python sources in {root}: give a text with source.kind=text source.path=")
        return sorted((file for file in found if file.size), key=lambda file: file.name)

    def stated_split(self, name: str) -> str | None:
        """Return None: a module may be called test."""
        return None

    def share_out(self, files: list[File], places: Mapping[str, Places]) -> dict[str, Places]:
        """Return splits by path, so that another version of Python has the same files in a split."""
        return {file.name: (self.split_of(file.name, places[file.name]),) for file in files}


class Enwik8Source(TextSource):
    """A source of a single text, cut by offset: 90/5/5 percent, or at `source.offsets`."""

    prose = False

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Map the one file to all splits, whatever its name.

        Raises:
            ValueError: there are several files, or patterns are set.
        """
        files = self.without_notes(list(files))
        names = [file.name for file in files]
        if given := [f"source.{name}" for name in ("valid_pattern", "test_pattern") if getattr(self.options, name)]:
            raise ValueError(
                f"source.kind={self.options.kind} cuts one text by offset, whatever its name, so {' and '.join(given)} would "
                "change nothing: leave that out, or give source.offsets="
            )
        if len(names) > 1:
            raise ValueError(
                f"source.kind={self.options.kind} cuts one text by offset, and source.path={self.options.path} has "
                f"{len(names):,} files ({', '.join(names[:3])}): give the file, or source.pattern="
            )
        self.look_at(files)
        self.record.by, self.record.files = "offsets", {SPLITS: names}
        return dict.fromkeys(files, SPLITS)

    def split_targets(self, total: int, splits: Places) -> list[int]:
        """Return the given offsets, or else those at 90 and 95 %."""
        given = self.options.offsets
        if given and not (len(given) == 2 and 0 <= given[0] <= given[1] <= total):
            raise ValueError(f"source.offsets={given}: expected two, ascending, in a text of {total:,} bytes")
        return given or [total * 90 // 100, total * 95 // 100]

    def find_cut(self, window: bytes) -> int:
        """Return 0: the cut is exactly at the target."""
        return 0
