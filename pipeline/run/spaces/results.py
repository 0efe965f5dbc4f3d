"""Search results for people, programs and data frames."""

import csv
import io
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pipeline.console import escape_control_characters

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)
PIXELS = "pixels"


@dataclass
class Neighbour:
    """A chunk near to a query: its readable text, exact bytes, score, and count in the split."""

    text: str
    hex: str
    score: float
    count: int


@dataclass
class Passage(Neighbour):
    """A place in the text whose context is near to a query's; `hex` is of `text`, and `count` is 1.

    Attributes:
        text: stored text before the place.
        after: stored text after it.
        name: name of the document.
        document: number of the document in the split.
        chunk: number of the chunk after the place, in the document.
        offset: bytes of the document before the place.
    """

    after: str
    name: str
    document: int
    chunk: int
    offset: int


@dataclass
class QueryResult:
    """A query, its exact bytes, and its neighbours, the nearest first.

    Attributes:
        note: why there are fewer neighbours than requested; None if there are enough.
    """

    query: str
    hex: str
    neighbours: list[Neighbour]
    note: str | None = None

    def as_record(self) -> dict[str, Any]:
        """Return all fields for programs, with `note` only if there is one."""
        return {name: value for name, value in asdict(self).items() if name != "note" or value}


def log_notes(found: Iterable[QueryResult]) -> None:
    """Log the notes of query results, each once."""
    for note in dict.fromkeys(each.note for each in found if each.note):
        log.warning("%s", note)


class SearchResults(list[QueryResult]):
    """Results of several queries, which print as a table.

    Attributes:
        about: description of the searched rows and of the scores.
        score: name of the score.
    """

    def __init__(self, found: Iterable[QueryResult], about: str = "", score: str = "cosine") -> None:
        super().__init__(found)
        self.about, self.score = about, score

    def __str__(self) -> str:
        lines = [self.about] if self.about else []
        for item in self:
            lines.append(escape_control_characters(item.query))
            lines += [f"  {n.score:6.3f}  {_format_place(n)}" for n in item.neighbours] or ["  nothing"]
        return "\n".join(lines)

    __repr__ = __str__

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each neighbour, with its query."""
        return [{"query": item.query} | asdict(each) for item in self for each in item.neighbours]

    def csv(self) -> str:
        """Return the rows as comma-separated values with a header."""
        file, rows = io.StringIO(), self.rows()
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["query"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue().removesuffix("\n")

    def to_frame(self) -> "pandas.DataFrame":
        """Return the rows as a data frame.

        Raises:
            ImportError: pandas is not installed.
        """
        return data_frame(self.rows())


def data_frame(columns: Any) -> "pandas.DataFrame":
    """Return a data frame of rows or columns.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError("data frames need pandas: pip install 'haed[pandas]'") from None
    return pandas.DataFrame(columns)


def _format_place(near: Neighbour) -> str:
    if isinstance(near, Passage):
        return f"{near.name} at {near.offset:,}: …{escape_control_characters(near.text)} ▸ {escape_control_characters(near.after)}…"
    return f"{near.count:>9,}  {escape_control_characters(near.text)}"


def display_chunk(chunk: bytes, chunker: str) -> str:
    """Return a readable form of a chunk: its text, or the colours of its pixels."""
    if chunker != PIXELS:
        return chunk.decode(errors="backslashreplace")
    return ",".join(f"#{chunk[i : i + 3].hex()}" for i in range(0, len(chunk), 3))
