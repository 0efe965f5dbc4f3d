"""Checks of texts while they are read: line endings, NUL bytes, bytes that are not UTF-8, byte order marks."""

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data.sources.file_type import detect_foreign_format
from data.sources.source import Piece
from data.sources.splits import Listed, some_of

_KEPT = 100  # maximum names of a kind that a part keeps
_LF, _CRLF, _CR, _ENDS = "LF", "CRLF", "CR", "ends"
_CUT = re.compile(r"@\d+$")
_INSIDE = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_NOTES = {
    "NUL": "NUL bytes, which no text has; the bytes are read as they are",
    "encoding": "bytes that are no UTF-8 (another encoding, or binary); the bytes are read as they are",
    "mark": "a byte order mark of UTF-8 at the beginning, which is read as text",
    "foreign": "begins as a file that is no text (a PDF, a zip, …); the bytes are read as they are",
}


@dataclass
class TextFindings:
    """The findings in the texts of a part.

    Attributes:
        lines: number of lines by line ending.
        odd: by oddity, the number of texts that have it and their first names. A text that began in an earlier part is
            named, but counted only while names are few.
    """

    lines: Counter[str] = field(default_factory=Counter)
    odd: dict[str, Listed] = field(default_factory=dict)

    def add_text(self, reason: str, name: str, is_new: bool) -> None:
        """Add a text, unless its name is known."""
        found = self.odd.setdefault(reason, {"count": 0, "names": []})
        if name not in found["names"]:
            if len(found["names"]) < _KEPT:
                found["names"].append(name)
                found["count"] += 1
            else:
                found["count"] += is_new


class TextInspector:
    """A checker of the texts of a part, piece by piece.

    Args:
        skip: bytes at the beginning of each text that were checked before; there only line endings are counted.
        whole_files: a text is a file, whose name may end in an offset.
    """

    def __init__(self, skip: int, whole_files: bool) -> None:
        self.found, self.skip, self.whole_files = TextFindings(), skip, whole_files
        self._begin_text(None, False)

    def _begin_text(self, name: str | None, goes_on: bool) -> None:
        self._name, self._goes_on = name, goes_on  # it began in an earlier part
        self._decoder: codecs.IncrementalDecoder | None = None  # set from the first piece on that alone is not UTF-8
        self._known: set[str] = set()
        self._position, self._ends_in_cr = 0, False

    def inspect_piece(self, piece: Piece) -> None:
        """Check the next piece."""
        if not piece.continues or self._name is None:
            self._begin_text(_CUT.sub("", piece.name) if self.whole_files else piece.name, piece.continues)
        odd: list[str] = []
        self._count_ends(piece.data, odd)
        self._find_oddities(piece.data, odd)
        for reason in odd:
            if reason not in self._known:
                self._known.add(reason)
                self.found.add_text(reason, str(self._name), not self._goes_on)
        self._position += len(piece.data)

    def _find_oddities(self, data: bytes, odd: list[str]) -> None:
        """Add the oddities of a piece, except for line endings."""
        seen = 0 if self._goes_on else max(0, self.skip - self._position)  # bytes checked and reported before
        if b"\0" in data:
            if b"\0" in data[:seen]:
                self._known.add("NUL")
            odd.append("NUL")
        if not self._position and not self._goes_on:
            if data.startswith(codecs.BOM_UTF8):
                odd.append("mark")
            if not self.skip and detect_foreign_format(data[:64]):
                odd.append("foreign")
        if "encoding" in self._known or (not self._decoder and _is_utf8(data)):
            return
        self._decoder = self._decoder or codecs.getincrementaldecoder("utf-8")()
        try:
            # A range of a file may begin inside of a character.
            self._decoder.decode(data.lstrip(_INSIDE) if self._goes_on and not self._position else data)
        except UnicodeDecodeError as error:
            if error.end <= seen:
                self._known.add("encoding")
            odd.append("encoding")

    def _count_ends(self, data: bytes, odd: list[str]) -> None:
        lines, feeds = self.found.lines, data.count(b"\n")
        if self._ends_in_cr and data.startswith(b"\n"):  # the pair lies between two pieces
            lines[_CR] -= 1
            lines[_CRLF] += 1
            feeds -= 1
        if b"\r" in data:
            pairs = data.count(b"\r\n")
            lines[_CRLF] += pairs
            lines[_CR] += data.count(b"\r") - pairs
            feeds -= pairs
            odd.append(_ENDS)
        lines[_LF] += feeds
        self._ends_in_cr = data.endswith(b"\r")


def _is_utf8(data: bytes) -> bool:
    try:
        return data.isascii() or bool(data.decode())
    except UnicodeDecodeError:
        return False


def describe_findings(looks: Sequence[TextFindings]) -> Iterator[str]:
    """Yield a sentence for each oddity in the texts of all parts, in their order."""
    lines = sum((each.lines for each in looks), Counter[str]())
    for reason in dict.fromkeys(reason for each in looks for reason in each.odd):
        found = [each.odd[reason] for each in looks if reason in each.odd]
        names = list(dict.fromkeys(name for each in found for name in each["names"]))
        all_named = all(each["count"] == len(each["names"]) for each in found)
        count = len(names) if all_named else sum(each["count"] for each in found)
        what = some_of(names, count, "texts")
        if reason != _ENDS:
            yield f"{what}: {_NOTES[reason]}"
            continue
        total = lines.total()
        ends = [f"{lines[_CRLF]:,} end in CRLF (Windows)"] * bool(lines[_CRLF])
        ends += [f"{lines[_CR]:,} end in CR alone (old Mac)"] * bool(lines[_CR])
        yield (
            f"{what}: of all {total:,} lines {' and '.join(ends)}. A word before them makes another chunk than before LF, and "
            "prompts have LF: source.newlines=lf makes all ends LF"
        )
