"""Sources of text: a document per file, a text cut by offset, JSON lines and WikiText.

Plain files are divided into ranges, so that many workers share one file. Compressed files are read from start to end.
"""

import codecs
import json
import math
import os
import re
import reprlib
import shlex
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import IO, Any

from data.sources.file_type import CONTINUATION_BYTES, HEAD, check_head, convert_by, describe_doubt, display_path
from data.sources.files import (
    ANY,
    LARGEST_DOCUMENT,
    File,
    LeftOut,
    is_about,
    is_compressed,
    list_files,
    open_stream,
    read_blocks,
)
from data.sources.source import Input, Piece, Source, as_lf
from data.sources.splits import SPLITS, Places, some_of

_WINDOW = 1 << 16  # bytes to search for a good place to cut
INFLATED = 4  # assumed compression ratio, only used to balance the work
_MODULES = "**/*.py"  # what is read of the standard library, but for files in these folders
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "__pycache__"}
_TEXT = re.compile(rb"[\n\r](?=\S)")  # where chunkers of words and sentences begin a chunk anyway
_WORD = re.compile(rb"\s(?=\S)")
_BLANK = re.compile(rb"\n\r?\n|\r\r(?=[^\n])")  # lines may end in LF, CRLF or CR; an LF may follow the window
_LONGEST_HEADING = 1100
_JSON = re.compile(r"\.(json|jsonl|ndjson|jsonlines)(?:\.|$)", re.IGNORECASE)
_VALUE = re.compile(rb'[{\["\-0-9]|true|false|null|NaN|Infinity')  # beginnings of a JSON value
_COMPACT = "jq -c ."
# A title between blank lines. Headings of sections have more = signs. Lines may end in CRLF.
_HEADING = re.compile(rb"(?<=\n) ?\r?\n ?= (?!=)[^\n]{1,1000}(?<!=) = ?\r?\n(?= ?\r?\n)")


class Texts(Source):
    """A source of text files. The same content is read once, and files that are no text are refused."""

    once = is_text = True
    gives = "text"

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Refuse files that are no text, then assign splits as every source does."""
        places = super().places(self.look_at(self.without_notes(list(files))))
        about_data = [file.name for file in places if is_about(file.name)]
        if 0 < len(about_data) < len(places):
            self.record.notes.append(
                f"{some_of(about_data, len(about_data))}: read as texts of the corpus. Use source.pattern= to leave them out"
            )
        return places

    def look_at(self, files: list[File]) -> list[File]:
        """Refuse files that are no text, note those that are not UTF-8, and return those that have contents.

        Raises:
            ValueError: a file is no text, or all are empty.
        """
        odd, read = defaultdict[str, list[str]](list), []
        for file in files:
            with open_stream(file.path, self.options.expansion) as stream:
                head = stream.read(HEAD)
            if not head:  # compressed
                self.record.left_out["empty"].append(file.name)
                continue
            read.append(file)
            if oddity := self.check_beginning(head, file.path):
                odd[oddity].append(file.name)
        for oddity, names in odd.items():
            self.record.notes.append(f"{some_of(names, len(names))}: {oddity}; the bytes are read as they are")
        if not read:
            names = [file.name for file in files]
            raise ValueError(
                f"source.path={self.options.path} has no text: nothing is inside {some_of(names, len(names))}"
            )
        return read

    def check_beginning(self, head: bytes, path: str) -> str | None:
        """Check the first bytes of a file. See `check_head`."""
        return check_head(head, display_path(path), path)

    def open_range(self, item: Input) -> IO[bytes]:
        """Open the file of an input, decompressed, at the beginning of its range."""
        stream = open_stream(item.path, self.options.expansion)
        if item.start:
            stream.seek(item.start)
        return stream


class TextSource(Texts):
    """A source with a document per file.

    If paths of files state splits, these are used; else a hash of the content decides. If the hash would leave a split
    empty (few files), every file is cut in three, 90/5/5, between paragraphs if it has any.
    """

    looked_at, whole_files = HEAD, True

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Assign splits, and note JSON lines, which are seldom meant to be one document."""
        places = super().places(files)
        if lines := [file.name for file in places if (kind := _JSON.search(file.name)) and kind[1].lower() != "json"]:
            self.record.notes.append(
                f"{some_of(lines, len(lines))}: JSON lines, read as text with their braces. With source.kind=jsonl, the "
                "field source.field of each line is a document"
            )
        return places

    def is_single_file(self, file: File) -> bool:
        """Return True: every file is a document."""
        return True

    def share_out(self, files: list[File], places: Mapping[str, Places]) -> dict[str, Places]:
        """Return the splits as every source does, or nothing if files are to be cut."""
        wanted = {split for file in files for split in places[file.name]}
        cut = self.options.cut
        enough = cut is False or len(files) >= len(wanted) or not self.options.valid_percent
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
                yield Input(file.name, file.path, file.size * INFLATED, splits)
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
        if len(item.splits) > 1:
            yield from self._read_compressed(item)
            return
        with self.open_range(item) as stream:
            continues = item.continues
            for block in read_blocks(stream, None if item.stop is None else item.stop - item.start):
                yield Piece(item.name, item.splits[0], block, continues)
                continues = True

    def split_targets(self, total: int, splits: Places) -> list[int]:
        """Return the approximate offsets where the splits after the first begin."""
        percent = self.options.valid_percent
        return [total * (100 - left * percent) // 100 for left in range(len(splits) - 1, 0, -1)]

    def find_cut(self, window: bytes, left: int, room: int, before: bytes) -> int:
        """Return the exact place to cut in the bytes from a target on.

        It is after the first of these that the window has near the target: a blank line, a line, a word, a character.
        Near is within half of the next split, which would else be left with too little.

        Args:
            window: the bytes from the target on, or the first of them.
            left: number of bytes from the target to the end of the file.
            room: number of bytes from the target to the next one, or to the end.
            before: the byte before the target, if there is one.
        """
        if len(window) >= left:
            left = len(window[:left].rstrip())  # nothing but blanks is no text for the next split
        near = min(left, room // 2 + 1)
        blank = _BLANK.search(window)
        cut = blank.end() if blank and blank.end() < near else _after_line(window, near)
        return self.after_crlf(cut, window, before)

    def after_crlf(self, cut: int, window: bytes, before: bytes) -> int:
        """Return the place of a cut, or behind it if it is within a CRLF that becomes LF; see `find_cut`."""
        last = window[cut - 1 : cut] if cut else before
        return cut + (self.options.newlines == "lf" and last == b"\r" and window[cut : cut + 1] == b"\n")

    def _split_parts(self, file: File, splits: Places) -> Iterator[tuple[str, int, int]]:
        """Yield split, start and end of the parts of a plain file."""
        start = 0
        with open(file.path, "rb") as stream:
            targets = [*self.split_targets(file.size, splits), file.size]
            for split, target, after in zip(splits, targets, [*targets[1:], file.size], strict=True):
                stop = file.size
                if target < file.size:
                    stop = max(start, target)
                    begin = stream.seek(max(0, stop - 1))
                    before = stream.read(stop - begin)
                    stop += self.find_cut(stream.read(_WINDOW), file.size - stop, after - stop, before)
                if stop > start:
                    yield split, start, stop
                start = stop

    def _read_compressed(self, item: Input) -> Iterator[Piece]:
        """Yield the parts of a compressed file. It is read twice, since its size decides where it is cut."""
        with open_stream(item.path, self.options.expansion) as stream:
            total = sum(len(block) for block in read_blocks(stream))
        with open_stream(item.path, self.options.expansion) as stream:
            position, rest, before = 0, b"", b""
            targets = [*self.split_targets(total, item.splits), total]
            for split, target, after in zip(item.splits, targets, [*targets[1:], total], strict=True):
                title, continues = f"{item.name}@{position}", False
                head, rest = rest[: max(0, target - position)], rest[max(0, target - position) :]
                for block in chain((head,), read_blocks(stream, max(0, target - position - len(head)))):
                    if block:
                        yield Piece(title, split, block, continues)
                        continues, position, before = True, position + len(block), block[-1:]
                if target < total:
                    rest += stream.read(_WINDOW - len(rest))
                    cut = self.find_cut(rest, total - position, after - position, before)
                    if cut:
                        yield Piece(title, split, rest[:cut], continues)
                        before = rest[cut - 1 : cut]
                    rest, position = rest[cut:], position + cut


def _after_line(window: bytes, left: float = math.inf) -> int:
    """Return the end of the first line, else of the first word, else of a UTF-8 character that was cut at the beginning.

    The end of a line or word counts only if it is less than `left`.
    """
    line = window.find(b"\n")
    if line < 0:
        line = window.find(b"\r", 0, -1)  # an old Mac's; an LF may follow the last byte
    if 0 <= line and line + 1 < left:
        return line + 1
    if (word := _WORD.search(window)) and word.end() < left:
        return word.end()
    rest = len(window) - len(window.lstrip(CONTINUATION_BYTES))
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
                match = _TEXT.search(window)
                cut += match.end() if match else _after_line(window)
            if before < cut < stop:
                yield before, cut
                before = cut
    yield before, stop


def _is_module_of_library(name: str) -> bool:
    return not _SKIPPED.intersection(name.split("/")[:-1])


class StdlibSource(TextSource):
    """The Python standard library's own source files, or those of a folder, split by a hash of the relative path."""

    @cached_property
    def files(self) -> list[File]:
        """The source files, except for tests and installed packages."""
        options, left_out = self.options, LeftOut(list)
        root = options.path or sysconfig.get_paths()["stdlib"]
        pattern = _MODULES if options.pattern == ANY else options.pattern
        hint = f"source.kind=stdlib reads {pattern} of it. For other texts add source.kind=text"
        try:
            listed = list_files(root, pattern, options.kind, options.follow_links, left_out)
        except ValueError as error:
            raise ValueError(f"{error}. {hint}") from error
        files = [file for file in listed if _is_module_of_library(file.name)]
        if not files:
            raise ValueError(f"there are no Python sources in {root}. {hint}")
        for reason, names in left_out.items():
            if of_library := list(filter(_is_module_of_library, names)):
                self.record.left_out[reason] += of_library
        if options.path is not None:
            self.record.notes.append(hint)
        return files

    def stated_split(self, name: str) -> str | None:
        """Return None: a module may be called test."""
        return None

    def share_out(self, files: list[File], places: Mapping[str, Places]) -> dict[str, Places]:
        """Return splits by path, so that another version of Python has the same files in a split."""
        return {file.name: (self.split_of(file.name, places[file.name]),) for file in files}


class Enwik8Source(TextSource):
    """A source of a single text, cut by offset: by `source.valid_percent`, or at `source.offsets`."""

    prose = False

    def places(self, files: Iterable[File]) -> dict[File, Places]:
        """Map the one file to all splits, whatever its name.

        Raises:
            ValueError: there are several files, or patterns are set.
        """
        files = self.without_notes(list(files))
        names = [file.name for file in files]
        if unused := [f"source.{name}" for name in ("valid_pattern", "test_pattern") if getattr(self.options, name)]:
            raise ValueError(
                f"source.kind={self.options.kind} cuts one text by offset, so {' and '.join(unused)} would "
                "have no effect. Leave that out, or use source.offsets="
            )
        if len(names) > 1:
            raise ValueError(
                f"source.kind={self.options.kind} cuts one text by offset, but source.path={self.options.path} "
                f"has {len(names):,} files ({', '.join(names[:3])}). Give one file, or use source.pattern="
            )
        files = self.look_at(files)
        self.record.by, self.record.files = "offsets", {SPLITS: names}
        return dict.fromkeys(files, SPLITS)

    def split_targets(self, total: int, splits: Places) -> list[int]:
        """Return the given offsets, or else those of `source.valid_percent`."""
        positions = self.options.offsets
        if positions and not (len(positions) == 2 and 0 <= positions[0] <= positions[1] <= total):
            raise ValueError(f"source.offsets={positions}: expected two ascending offsets in a text of {total:,} bytes")
        return positions or super().split_targets(total, splits)

    def find_cut(self, window: bytes, left: int, room: int, before: bytes) -> int:
        """Return 0, as the cut is exactly at the target; 1 within a CRLF that becomes LF."""
        return self.after_crlf(0, window, before)


class _Documents(Texts):
    """A source whose files hold several documents each. A plain file is divided into ranges at document boundaries."""

    prose = False

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield ranges of plain files that begin where documents do. A compressed file is read by one worker."""
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
        """Return the offset of the first document that begins after `at`, or the end of the file."""
        raise NotImplementedError


class JsonLinesSource(_Documents):
    """A source of JSON lines: an object per line, with the text in the field `source.field`.

    A document's split is a hash of its text, so the same text is never in two splits. Lone surrogates, which JSON can
    write and UTF-8 cannot, become the three bytes that they would have.
    """

    def is_note(self, file: File) -> bool:
        """Return False for files of JSON; see `Source.is_note` for others."""
        return not _JSON.search(file.name) and super().is_note(file)

    def check_beginning(self, head: bytes, path: str) -> None:
        """Refuse also files that are not UTF-8, and JSON that is not in lines."""
        if odd := super().check_beginning(head, path):
            raise ValueError(f"{display_path(path)} is {odd}. JSON must be UTF-8")
        check_lines(head, path, self.options.field)

    def next_document(self, stream: IO[bytes], at: int) -> int:
        """Return the offset of the next line."""
        stream.seek(at)
        stream.readline(LARGEST_DOCUMENT + 1)
        return stream.tell()

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield a document per line."""
        with self.open_range(item) as stream:
            at = item.start
            while (item.stop is None or at < item.stop) and (line := stream.readline(LARGEST_DOCUMENT + 1)):
                if line.strip():
                    name = f"{item.name}@{at}"
                    where = f"{item.path}, the line at byte {at:,}"
                    if len(line) > LARGEST_DOCUMENT:
                        raise ValueError(f"{where} is longer than {LARGEST_DOCUMENT:,} bytes, the limit of a document")
                    text = extract_json_text(line, self.options.field, where, self.remarks, path=item.path)
                    text = self.convert_newlines(text)
                    if text:
                        yield Piece(name, self.split_of(name, item.splits, text), text)
                    self.remarks["lines of empty text were left out"] += not text
                at += len(line)


def check_lines(head: bytes, path: str, field: str) -> None:
    """Refuse a JSON file that begins with `head` and has no object per line.

    Raises:
        ValueError: it is one array, or an object over several lines. The message has the command that converts it into
            lines.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    first, end, rest = text.partition(b"\n")
    value, is_array, is_long = _parse_line(first), False, False
    if value is None:
        is_array = text[:1] == b"["
        is_long = text[:1] == b"{" and bool(end) and first.rstrip()[-1:] in (b"{", b"[", b",", b":")
    elif isinstance(value, list):
        is_array = not rest.strip() or any(isinstance(each, dict) for each in value)
    if is_array and re.fullmatch(rb"\[\s*\]\s*", text):
        raise ValueError(f"{display_path(path)} is an empty JSON array")
    if is_long and isinstance(_parse_line(first.rstrip().removesuffix(b",")), dict):
        problem = "has commas between its JSON objects instead of one object per line"
        command = "sed 's/,[[:space:]]*$//'"
    elif text[:1] == b"\x1e":
        problem, command = "has a separator (0x1E) before each JSON object", "tr -d '\\036'"
    elif text and not _VALUE.match(text):
        raise ValueError(
            f"{display_path(path)} is not JSON: it begins with {reprlib.repr(first[:40].decode(errors='replace'))}. "
            "Select files with source.pattern=, or use source.kind=text (for CSV, source.kind=datasets)"
        )
    elif is_array:
        strings = re.match(rb'\[(\s*\[)?\s*"', text)
        items = ".[][]" if strings and strings[1] else ".[]"
        command = f"jq -c {shlex.quote(f'{items} | {_wrap_in_field(field)}')}" if strings else "jq -c '.[]'"
        problem = "is one JSON array instead of one object per line"
    elif is_long:
        problem, command = "has a JSON object over several lines instead of one per line", _COMPACT
    else:
        return
    raise ValueError(f"{display_path(path)} {problem}. Convert it with `{convert_by(command, path)}`")


def _parse_line(line: bytes) -> Any:
    """Return the JSON value of a line; None also if it has none."""
    with suppress(ValueError, RecursionError):
        return json.loads(line, parse_int=float)


def _wrap_in_field(field: str) -> str:
    """Return a jq expression that wraps a string as a field of an object."""
    return f"{{{json.dumps(field)}: .}}"


def extract_json_text(
    content: bytes, field: str, where: str, remarks: Counter[str], option: str = "source.field=", path: str = ""
) -> bytes:
    """Return the text in a field of a JSON object, as UTF-8; empty for null.

    Args:
        content: the object, as it is written.
        field: name of the field.
        where: the object's place, for errors.
        remarks: counts objects that have the field twice.
        option: option to change for another field, for errors.
        path: of a file of JSON lines, for commands that convert it.

    Raises:
        ValueError: it is no JSON, has no such field, or no text in it.
    """
    record = _read_json(content, where, path)
    if not isinstance(record, dict):
        advice = f'write objects such as {{"{field}": "…"}}'
        if isinstance(record, str) and path:
            advice = f"convert it with `{convert_by(f'jq -c {shlex.quote(_wrap_in_field(field))}', path)}`"
        raise ValueError(f"{where} has no field {field!r}, because it is not an object: {advice}")
    if field not in record:
        fields = ", ".join(map(repr, list(record)[:10])) or "none"
        lists = [
            name for name, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        advice = ""
        if path and lists:
            command = f"jq -c {shlex.quote(f'.[{json.dumps(lists[0])}][]')}"
            advice = f"; or make a line of each in {lists[0]!r} with `{convert_by(command, path)}`"
        raise ValueError(f"{where} has no field {field!r} (it has {fields}): set {option}{advice}")
    text = record[field]
    if not isinstance(text, str | None):
        others = [name for name, value in record.items() if isinstance(value, str)]
        advice = f"set {option}" + (f" to {' or '.join(map(repr, others[:5]))}" if others else ", or write texts there")
        raise ValueError(f"{where} has no text in the field {field!r}, but {reprlib.repr(text)}: {advice}")
    if content.count(b'"%s"' % field.encode("utf-8", "surrogatepass")) > 1:
        pairs = json.loads(content, object_pairs_hook=list, parse_int=float)
        remarks["lines have the field twice; the last value was used"] += [key for key, _ in pairs].count(field) > 1
    return (text or "").encode("utf-8", "surrogatepass")


def _read_json(content: bytes, where: str, path: str) -> Any:
    try:
        try:
            return json.loads(content)
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise
        except ValueError:  # an integer, in any field, of more digits than Python parses
            return json.loads(content, parse_int=float)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8, as JSON must be: {describe_doubt(content)}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise ValueError(f"{where} is nested too deeply. Flatten the JSON") from error
        several = path and isinstance(error, json.JSONDecodeError) and error.msg == "Extra data"
        advice = f"; if values follow each other without line ends, convert it with `{convert_by(_COMPACT, path)}`"
        raise ValueError(f"{where} is not JSON: {error}{advice if several else ''}") from error


class WikiTextSource(_Documents):
    """A source of WikiText, tokenised or raw: a document from each ` = Title = ` to the next.

    File names state the splits, or else a hash decides.
    """

    def next_document(self, stream: IO[bytes], at: int) -> int:
        """Return the offset of the next heading."""
        stream.seek(at)
        while stream.readline(1 << 20)[-1:] not in (b"\n", b""):  # a line may be as long as the file
            pass
        begin = stream.tell()
        for start, first, _ in split_at_headings(read_blocks(stream), begin):
            if first and start > begin:
                return start
        return stream.tell()

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield a document from each heading to the next, in pieces. A hash of its beginning decides its split."""
        with self.open_range(item) as stream:
            size = None if item.stop is None else item.stop - item.start
            split, titles = "", 0
            for at, first, data in split_at_headings(read_blocks(stream, size), item.start):
                name = f"{item.name}@{at}"
                if first:
                    head = data[:_LONGEST_HEADING]  # the same whatever line endings are, if they become LF
                    key = as_lf(head)[: _LONGEST_HEADING // 2] if self.options.newlines == "lf" else head
                    split = self.split_of(name, item.splits, key)
                    titles += _HEADING.search(b"\n\n" + head) is not None
                yield Piece(name, split, data, not first)
        whole = not item.start and item.stop in (None, os.path.getsize(item.path))
        self.remarks["files have no heading such as ` = Title = `, so each is one document"] += whole and not titles


def split_at_headings(stream: Iterator[bytes], start: int) -> Iterator[tuple[int, bool, bytes]]:
    """Split WikiText, given in blocks, at its headings. Its first byte, at the offset `start`, begins a line.

    Yield for each piece the offset of its document, whether it is the document's first, and its bytes.
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
        if first and block is not None and safe - at < _LONGEST_HEADING:
            safe = at  # keep a first piece long enough to hash, wherever blocks end
        if safe > at:
            yield begin, first, buffer[at:safe]
            first = False
        base, buffer = base + safe - 1, buffer[safe - 1 :]
