"""Sources of text whose files hold many documents: JSON lines and WikiText.

Plain files are cut into ranges where documents begin, so that many workers share one file; compressed ones are read from start
to end.
"""

import json
import os
import re
import reprlib
from collections.abc import Iterator
from typing import IO, NamedTuple

from data.sources.files import LARGEST_DOCUMENT, blocks, is_compressed, open_stream
from data.sources.source import Input, Piece
from data.sources.text import INFLATED, Texts

_LONGEST_HEADING = 1100
# Between blank lines, unlike the headings of sections, which have more signs. Lines may end as in Windows.
_HEADING = re.compile(rb"(?<=\n) ?\r?\n ?= (?!=)[^\n]{1,1000}(?<!=) = ?\r?\n(?= ?\r?\n)")


class _Documents(Texts):
    """Files with several documents each; a plain file is cut into ranges where documents begin."""

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Ranges of plain files that begin where documents do; a compressed file is read by one worker."""
        for file, splits in self.places(self.files).items():
            if is_compressed(file.path):
                yield Input(file.name, file.path, file.size * INFLATED, splits)
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


class JsonLinesSource(_Documents):
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
        """A document a line."""
        with self._open(item) as stream:
            at = item.start
            while item.stop is None or at < item.stop:
                line = stream.readline(LARGEST_DOCUMENT + 1)
                if not line:
                    return
                if line.strip():
                    name = f"{item.name}@{at}"
                    where = f"{item.path}, the line at byte {at:,}"
                    if len(line) > LARGEST_DOCUMENT:
                        raise ValueError(
                            f"{where} is longer than the {LARGEST_DOCUMENT:,} bytes that one document may have"
                        )
                    text = text_in(line, self.options.field, where)
                    if text:
                        yield Piece(name, self.split_of(name, item.splits, text), text)
                    self.remarks["lines of empty text were left out"] += not text
                at += len(line)


def text_in(content: bytes, field: str, where: str, option: str = "source.field=") -> bytes:
    """The text in a field of a JSON object, as UTF-8; nothing of null.

    Args:
        content: the object, as it is written.
        field: its name.
        where: the object's place, for errors.
        option: what is to be set to another field.

    Raises:
        ValueError: it is no JSON, there is no such field, or no text in it.
    """
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or field not in record:
        fields = f"it has {', '.join(map(repr, list(record)[:10]))}" if isinstance(record, dict) else "no object"
        raise ValueError(f"{where} has no field {field!r} ({fields}): set {option}")
    text = record[field]
    if not isinstance(text, str | None):
        raise ValueError(f"{where} has no text in the field {field!r}, but {reprlib.repr(text)}: set {option}")
    return (text or "").encode("utf-8", "surrogatepass")


class WikiTextSource(_Documents):
    """WikiText, tokenised or raw: a document from each ` = Title = ` to the next; files name the splits, or a hash does."""

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
        """A document from each heading to the next, in pieces; its heading decides on its split."""
        with self._open(item) as stream:
            size = None if item.stop is None else item.stop - item.start
            split, titles = "", 0
            for at, first, data in headed(blocks(stream, size), item.start):
                name = f"{item.name}@{at}"
                if first:
                    split = self.split_of(name, item.splits, data[:_LONGEST_HEADING])
                    titles += _HEADING.search(b"\n\n" + data[:_LONGEST_HEADING]) is not None
                yield Piece(name, split, data, not first)
        whole = not item.start and item.stop in (None, os.path.getsize(item.path))
        self.remarks["files have no heading such as ` = Title = `: each is one document"] += whole and not titles


class Section(NamedTuple):
    """A piece of a document: the offset of the document, whether this is its first piece, and the piece."""

    document: int
    first: bool
    data: bytes


def headed(stream: Iterator[bytes], start: int) -> Iterator[Section]:
    """Cuts WikiText at its headings.

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
                yield Section(begin, first, buffer[at : match.start()])
            elif first:
                continue  # at the very start: no other document before it
            begin, first, at = base + match.start(), True, match.start()
        if first and block is not None and safe - at < _LONGEST_HEADING:
            safe = at  # a first piece is long enough to know the document by, wherever the blocks end
        if safe > at:
            yield Section(begin, first, buffer[at:safe])
            first = False
        base, buffer = base + safe - 1, buffer[safe - 1 :]
