"""What is odd about texts, found while they pass: ends of lines, NUL bytes, bytes that are no UTF-8, marks."""

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from data.sources.magic import foreign
from data.sources.source import Piece
from data.sources.splits import Listed, some_of

_SHOWN = 3  # names of documents that are kept of each kind
_LF, _CRLF, _CR = "LF", "CRLF", "CR"
_ENDS = {_CRLF: "CRLF (Windows)", _CR: "CR alone (old Mac)"}
_NOTES = {
    "nul": "NUL bytes, which no text has; the bytes are read as they are",
    "encoding": "bytes that are no UTF-8: another encoding, or binary; the bytes are read as they are",
    "mark": "a byte order mark of UTF-8 at the beginning, which is read as three bytes of text",
    "foreign": "a beginning as of a file that is no text (a PDF, a zip, a picture, …); the bytes are read as they are",
}


@dataclass
class Looked:
    """What was found in some documents.

    Attributes:
        lines: number of lines by how they end.
        odd: number of documents by what is odd about them, and the first names. A document that began in an earlier part
            is named, but not counted.
    """

    lines: Counter[str] = field(default_factory=Counter)
    odd: dict[str, Listed] = field(default_factory=dict)

    def add(self, reason: str, name: str, count: int = 1) -> None:
        """Adds a document."""
        found = self.odd.setdefault(reason, {"count": 0, "names": []})
        found["count"] += count
        if len(found["names"]) < _SHOWN and name not in found["names"]:
            found["names"].append(name)


class Look:
    """Looks at the documents of a part, piece by piece.

    Args:
        skip: bytes of each document's beginning that were looked at before; ends of lines are counted there as well.
    """

    def __init__(self, skip: int) -> None:
        self.found, self.skip = Looked(), skip
        self._is_first = True
        self._begin(False)

    def _begin(self, continues: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._reasons = set[str]()
        self._position = 0
        self._began_before, self._ends_in_cr = continues, False

    def at(self, piece: Piece) -> None:
        """Looks at the next piece."""
        continues_here = piece.continues and not self._is_first
        if not continues_here:
            self._begin(piece.continues)
        self._is_first = False
        data = piece.data
        for reason in self._odd(data):
            if reason not in self._reasons:
                self._reasons.add(reason)
                self.found.add(reason, piece.name, 0 if self._began_before else 1)
        self._position += len(data)

    def _odd(self, data: bytes) -> Iterator[str]:
        yield from self._count_ends(data)
        begins = not self._position and not self._began_before
        if begins and data.startswith(codecs.BOM_UTF8):
            yield "mark"
        if begins and not self.skip and not data[:1].isalnum() and foreign(data[:16]):
            yield "foreign"
        rest = data[max(0, self.skip - self._position) :] if not self._began_before else data
        if b"\0" in rest:
            yield "nul"
        if "encoding" in self._reasons or (data.isascii() and not self._decoder.getstate()[0]):
            return
        if self._began_before and not self._position:
            data = data.lstrip(bytes(range(0x80, 0xC0)))  # a range may begin inside of a character
        try:
            self._decoder.decode(data)
        except UnicodeDecodeError as error:
            if self._began_before or self._position + error.end > self.skip:
                yield "encoding"
            else:
                self._reasons.add("encoding")  # said before

    def _count_ends(self, data: bytes) -> Iterator[str]:
        lines = self.found.lines
        feeds = data.count(b"\n")
        if b"\r" in data or self._ends_in_cr:
            pairs = data.count(b"\r\n")
            alone = data.count(b"\r") - pairs
            if self._ends_in_cr and data.startswith(b"\n"):  # the pair lies between two pieces
                lines[_CR] -= 1
                lines[_CRLF] += 1
                feeds -= 1
            lines[_CRLF] += pairs
            lines[_CR] += alone
            feeds -= pairs
            if pairs or alone:
                yield "ends"
        lines[_LF] += feeds
        self._ends_in_cr = data.endswith(b"\r")


def describe_looks(looks: Iterable[Looked], documents: int) -> Iterator[str]:
    """A sentence for each thing that is odd about the documents of all parts.

    Args:
        looks: what was found in each part, in their order.
        documents: their number.
    """
    whole, numbers = Looked(), Counter[str]()
    for each in looks:
        whole.lines += each.lines
        for reason, listed in each.odd.items():
            numbers[reason] += listed["count"]
            for name in listed["names"]:
                whole.add(reason, name, 0)
    for reason, listed in whole.odd.items():
        count = max(numbers[reason], len(listed["names"]))
        names = some_of(listed["names"], len(listed["names"])) + (", …" if count > len(listed["names"]) else "")
        many = f"{count:,} of {documents:,} documents ({names})"
        if reason != "ends":
            yield f"{many} have {_NOTES[reason]}"
            continue
        total = whole.lines.total()
        ends = " and ".join(f"{whole.lines[end]:,} in {said}" for end, said in _ENDS.items() if whole.lines[end])
        yield (
            f"{many} have lines that do not end in LF: of {total:,} lines {ends}. Words before them make other chunks than "
            "before LF; source.newlines=lf makes all ends LF"
        )
