"""Sources of text: files, JSON lines, WikiText, enwik8, the Python standard library's own sources.

Plain files are cut into ranges, so that many workers share one file; compressed ones are read from start to end.
"""

import json
import re
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO

from data.files import LARGEST_DOCUMENT, File, blocks, is_compressed, open_stream
from data.sources import SPLITS, Input, Piece, Source, named_split

_WINDOW = 1 << 16  # where a good place to cut is looked for
_INFLATED = 4  # guess at what compression saves, only to share out the work
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
_LONGEST_HEADING = 1100
# Between blank lines, unlike the headings of sections, which have more signs.
_HEADING = re.compile(rb"(?<=\n) ?\n ?= (?!=)[^\n]{1,1000}(?<!=) = ?\n(?= ?\n)")


class TextSource(Source):
    """A document per file.

    If every file's path states a split, that is its split; else a hash of the path decides. Where the hash would leave
    valid or test empty (few files), every file is cut in three, 90/5/5, between paragraphs if it has any.
    """

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """See `Source.inputs`."""
        splits = self.splits()
        for file in self.files:
            split = splits.get(file.name)
            if is_compressed(file.path):
                total = None if split else self.total(file)
                yield Input(file.name, file.path, file.size * _INFLATED, (split,) if split else SPLITS, 0, total)
                continue
            parts = [(split, 0, file.size)] if split else list(self._thirds(file))
            for part, start, stop in parts:
                name = file.name if split else f"{file.name}@{start}"
                for a, b in ranges(file.path, start, stop, size, align):
                    yield Input(name, file.path, b - a, (part,), a, b, a > start)

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        with open_stream(item.path, self.options.expansion) as stream:
            if len(item.splits) > 1 and item.stop is not None:
                yield from self._read_thirds(stream, item.name, item.stop)
                return
            if item.start:
                stream.seek(item.start)
            continues, passed = item.continues, 0
            for block in blocks(stream, None if item.stop is None else item.stop - item.start):
                yield Piece(item.name, item.splits[0], block, continues)
                continues, passed = True, passed + len(block)
        if item.stop is not None and passed != item.stop - item.start:
            raise ValueError(f"{item.path} changed while it was being read: run `haed shard` again")

    def splits(self) -> dict[str, str]:
        """Split of each file by name; none where files are cut in three."""
        names = [file.name for file in self.files]
        if self.options.test_pattern or self.options.valid_pattern:
            return {name: self.split_of(name) for name in names}
        stated = {name: split for name in names if (split := named_split(name))}
        if len(stated) == len(names):
            return stated
        hashed = {name: self.split_of(name) for name in names}
        return hashed if not self.options.valid_percent or {"valid", "test"} <= set(hashed.values()) else {}

    def total(self, file: File) -> int:
        """Size of a compressed file's content; reads it once."""
        with open_stream(file.path, self.options.expansion) as stream:
            return sum(len(block) for block in blocks(stream))

    def targets(self, total: int) -> tuple[int, int]:
        """Where valid and test should begin."""
        percent = self.options.valid_percent
        return total * (100 - 2 * percent) // 100, total * (100 - percent) // 100

    def cut(self, window: bytes) -> int:
        """Where to cut exactly, in the bytes from a target on: after a blank line, else a line, else at once."""
        blank, line = window.find(b"\n\n"), window.find(b"\n")
        return blank + 2 if blank >= 0 else line + 1

    def _thirds(self, file: File) -> Iterator[tuple[str, int, int]]:
        """Split, start and end of the three parts of a plain file."""
        start = 0
        with open(file.path, "rb") as stream:
            for split, target in zip(SPLITS, (*self.targets(file.size), file.size), strict=True):
                stream.seek(max(start, target))
                stop = max(start, target) + self.cut(stream.read(_WINDOW)) if target < file.size else file.size
                if stop > start:
                    yield split, start, stop
                start = stop

    def _read_thirds(self, stream: IO[bytes], name: str, total: int) -> Iterator[Piece]:
        """The same three parts of a stream of known size."""
        start = position = 0
        rest = b""
        for split, target in zip(SPLITS, (*self.targets(total), total), strict=True):
            title = f"{name}@{start}"
            head, rest = rest[: max(0, target - position)], rest[max(0, target - position) :]
            continues = False
            for block in chain((head,), blocks(stream, max(0, target - position - len(head)))):
                if block:
                    yield Piece(title, split, block, continues)
                    continues, position = True, position + len(block)
            if target < total:
                rest += stream.read(_WINDOW - len(rest))
                cut = self.cut(rest)
                if cut:
                    yield Piece(title, split, rest[:cut], continues)
                rest, position = rest[cut:], position + cut
            start = position


def ranges(path: str, start: int, stop: int, size: int, align: int) -> Iterator[tuple[int, int]]:
    """Cuts a document of a plain file into ranges of about `size` bytes, after a line if it may be cut anywhere."""
    count = max(1, -(-(stop - start) // size))
    before = start
    with open(path, "rb") as file:
        for number in range(1, count):
            cut = start + (stop - start) * number // count
            if align > 1:
                cut -= (cut - start) % align
            else:
                file.seek(cut)
                cut += file.read(_WINDOW).find(b"\n") + 1
            if before < cut < stop:
                yield before, cut
                before = cut
    yield before, stop


class StdlibSource(TextSource):
    """The Python standard library's own source files, split by a hash of the relative path."""

    @cached_property
    def files(self) -> list[File]:
        """All but tests and what was installed beside."""
        root = Path(self.options.path or sysconfig.get_paths()["stdlib"])
        found = [
            File(path.relative_to(root).as_posix(), str(path), path.stat().st_size)
            for path in root.glob("**/*.py")
            if not _SKIPPED.intersection(path.relative_to(root).parts[:-1])
        ]
        if not found:
            raise FileNotFoundError(f"no Python sources in {root}: give a text with source.kind=text source.path=")
        return sorted((file for file in found if file.size), key=lambda file: file.name)

    def splits(self) -> dict[str, str]:
        """See `TextSource.splits`."""
        return {file.name: self.split_of(file.name) for file in self.files}


class Enwik8Source(TextSource):
    """One text, cut by offset: 90/5/5 percent, or where `source.offsets` says."""

    def splits(self) -> dict[str, str]:
        """None is stated: every file is cut."""
        return {}

    def targets(self, total: int) -> tuple[int, int]:
        """See `TextSource.targets`."""
        given = self.options.offsets
        if given and not (len(given) == 2 and 0 <= given[0] <= given[1] <= total):
            raise ValueError(f"source.offsets={given}: expected two, ascending, in a text of {total:,} bytes")
        return (given[0], given[1]) if given else (total * 90 // 100, total * 95 // 100)

    def cut(self, window: bytes) -> int:
        """Exactly at the target."""
        return 0


class _ManySource(Source):
    """Files with several documents each; a plain file is cut into ranges where documents begin."""

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """See `Source.inputs`. Where some files state a split, those that state none are left out."""
        stated = {file.name: named_split(file.name) for file in self.files}
        for file in self.files:
            split = stated[file.name]
            if split is None and any(stated.values()):
                continue
            splits = (split,) if split else SPLITS
            if is_compressed(file.path):
                yield Input(file.name, file.path, file.size * _INFLATED, splits)
                continue
            with open(file.path, "rb") as stream:
                start = 0
                while start < file.size:
                    stop = self.next_document(stream, start + size) if start + size < file.size else file.size
                    yield Input(file.name, file.path, stop - start, splits, start, stop)
                    start = stop

    def next_document(self, stream: IO[bytes], at: int) -> int:
        """Where the first document begins that begins after `at`, or the end of the file."""
        raise NotImplementedError

    def _open(self, item: Input) -> IO[bytes]:
        stream = open_stream(item.path, self.options.expansion)
        if item.start:
            stream.seek(item.start)
        return stream


class JsonLinesSource(_ManySource):
    """A JSON object per line; the text is in the field `source.field`. A document's split is a hash of its text.

    So the same text is never in two splits. Lone surrogates, which JSON can write and UTF-8 cannot, become the three bytes
    they would have.
    """

    def next_document(self, stream: IO[bytes], at: int) -> int:
        """The next line."""
        stream.seek(at)
        stream.readline(LARGEST_DOCUMENT + 1)
        return stream.tell()

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        with self._open(item) as stream:
            at = item.start
            while item.stop is None or at < item.stop:
                line = stream.readline(LARGEST_DOCUMENT + 1)
                if not line:
                    return
                if line.strip():
                    name = f"{item.name}@{at}"
                    text = self._text(line, f"{item.path}, the line at byte {at:,}")
                    if text:
                        yield Piece(name, self.split_of(name, item.splits, text), text)
                at += len(line)

    def _text(self, line: bytes, where: str) -> bytes:
        if len(line) > LARGEST_DOCUMENT:
            raise ValueError(f"{where} is longer than the {LARGEST_DOCUMENT:,} bytes that one document may have")
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        text = record.get(self.options.field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            fields = f"it has {', '.join(map(repr, list(record)[:10]))}" if isinstance(record, dict) else "no object"
            raise ValueError(f"{where} has no text in the field {self.options.field!r} ({fields}): set source.field=")
        return text.encode("utf-8", "surrogatepass")


class WikiTextSource(_ManySource):
    """WikiText, tokenised or raw: a document from each ` = Title = ` heading to the next; files name the splits."""

    def next_document(self, stream: IO[bytes], at: int) -> int:
        """The next heading."""
        stream.seek(at)
        stream.readline()
        begin = stream.tell()
        for start, first, _ in headed(blocks(stream), begin):
            if first and start > begin:
                return start
        return stream.tell()

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        with self._open(item) as stream:
            size = None if item.stop is None else item.stop - item.start
            for at, first, data in headed(blocks(stream, size), item.start):
                name = f"{item.name}@{at}"
                yield Piece(name, self.split_of(name, item.splits), data, not first)


def headed(stream: Iterator[bytes], start: int) -> Iterator[tuple[int, bool, bytes]]:
    """Cuts WikiText at its headings: offset of the document, whether this is its first piece, and the piece.

    Args:
        stream: the text in blocks; its first byte begins a line.
        start: offset of that byte.
    """
    buffer, base, begin, first = b"\n", start - 1, start, True  # buffer[0] is the byte before, for the look-behind
    block: bytes | None = b""
    while block is not None:
        block = next(stream, None)
        buffer += block or b""
        safe = len(buffer) if block is None else max(1, len(buffer) - _LONGEST_HEADING)
        at = 1
        for match in _HEADING.finditer(buffer, 1):
            if match.start() >= safe:
                break
            if match.start() > at:
                yield begin, first, buffer[at : match.start()]
            elif first:
                continue  # at the very start: no other document before it
            begin, first, at = base + match.start(), True, match.start()
        if safe > at:
            yield begin, first, buffer[at:safe]
            first = False
        base, buffer = base + safe - 1, buffer[safe - 1 :]
