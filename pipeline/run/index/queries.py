"""Queries and results of indexes: what a query may be, and results for people, programs and data frames.

A query is a chunk of text. For pictures it is a colour, the values of a chunk, or a place in one of them.
"""

import csv
import io
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.chunkers import Chunker
from data.corpus import Corpus
from pipeline.console import escape_control_characters

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)
PIXELS = "pixels"
_SHOWN = 6  # chunks of a query that is several
_NOTES = 20  # on many queries that are shown
START = "‹beginning of a document›"
PLACE = re.compile(r"(\d{1,12}):(\d{1,12})")
Text = str | bytes | bytearray | memoryview
Texts = Text | Sequence[Text]


def check_count(name: str, value: int, least: int = 1) -> int:
    """Return a whole number, such as a number of results or a layer, as an int, after checking it.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than `least`.
    """
    advice = f"Use {name}={least}."
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}. {advice}")
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}. {advice}")
    return int(value)


def to_bytes(text: Text, example: str = 'run.neighbours("return ")') -> bytes:
    """Return the bytes of a text: a str is encoded as UTF-8, and its lone surrogates are bytes, as in file names.

    The error shows the call `example`.

    Raises:
        TypeError: it is neither a str nor bytes.
        ValueError: it has a surrogate that stands for no byte.
    """
    if isinstance(text, str):
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} is not a text: {error.reason} at character {error.start}") from None
    if isinstance(text, bytes | bytearray | memoryview):
        return bytes(text)
    raise TypeError(f"a text must be a str or bytes, not {type(text).__name__}. Use {example}.")


def to_texts(texts: Texts, example: str) -> list[bytes]:
    """Return the bytes of one or several texts; see `to_bytes`."""
    if isinstance(texts, Text):
        return [to_bytes(texts, example)]
    if not isinstance(texts, Iterable):
        raise TypeError(f"texts must be a list of str or bytes, not {type(texts).__name__}. Use {example}.")
    return [to_bytes(text, example) for text in texts]


def parse_chunk(query: Text, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> tuple[bytes, str | None]:
    """Return the chunk that a query stands for, and a note if it is truncated or would be cut by the run's chunker.

    Args:
        query: a chunk of text, taken unchanged but for bytes beyond K. For pictures: a colour (`#4080c0`) for a chunk
            of that colour, `12:340` for chunk 340 of picture 12 of the split (both from 0), or K values in hexadecimal.
        chunker: the run's chunker.
        corpus: opens the run's corpus, for a place in a picture.
        split: split whose pictures are counted.

    Raises:
        ValueError: the query is empty, or no chunk of pixels, or there is no such picture.
    """
    raw = to_bytes(query)
    if chunker.name == PIXELS:
        return _parse_pixels(raw.decode(errors="backslashreplace"), chunker, corpus, split), None
    if not raw:
        raise ValueError(f"the query '' is empty. A chunk has 1 to {chunker.k} bytes")
    pieces, advice = chunker.cut_text(raw), "Passages take longer texts"
    listed = " ".join(_show_chunk(piece) for piece in pieces[:_SHOWN]) + (" …" if len(pieces) > _SHOWN else "")
    if len(raw) > chunker.k:
        size = f"{len(raw)} bytes, but a chunk of this run has at most {chunker.k}"
        first = f"{_show_chunk(pieces[0])}, the first of its {len(pieces)} chunks ({listed})"
        return pieces[0], f"the query {_show_chunk(raw)} has {size}. Using {first}. {advice}"
    if len(pieces) > 1:
        several = f"{len(pieces)} chunks of this run ({listed}). It is embedded as one chunk"
        return raw, f"the query {_show_chunk(raw)} is {several}. {advice}"
    return raw, None


def _show_chunk(chunk: bytes) -> str:
    return escape_control_characters(chunk.decode(errors="backslashreplace"))


def _parse_pixels(query: str, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> bytes:
    k = chunker.k
    digits = re.sub(r"[#,\s]", "", query)
    if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) in (6, 2 * k):
        pixels = bytes.fromhex(digits)
        return (pixels * k)[:k] if len(digits) == 6 else pixels
    if place := PLACE.fullmatch(query.strip()):
        return picture_chunks(corpus(), split, int(place[1]), int(place[2]))[-1]
    raise ValueError(
        f"the query {query!r} is not a chunk of pixels. Give a colour such as #4080c0, or all {k} values of a "
        "chunk in hexadecimal, or PICTURE:CHUNK such as 12:340. Without queries, chunks of the corpus are used"
    )


def picture_chunks(corpus: Corpus, split: str, number: int, chunk: int) -> list[bytes]:
    """Return the chunks of a picture of a split, up to and including one; pictures and chunks are counted from 0.

    Raises:
        ValueError: there is no such picture or chunk.
    """
    pictures = corpus.split_counts(split).documents
    if number >= pictures:
        raise ValueError(f"there is no picture {number}. The {split} split has {pictures:,}, counted from 0")
    tokens, lengths = next(itertools.islice(corpus.iterate_documents(split), number, None))
    if chunk >= len(lengths):
        raise ValueError(
            f"picture {number} of the {split} split has no chunk {chunk}. It has {len(lengths):,}, counted from 0"
        )
    ends = lengths[: chunk + 1].cumsum(dtype=int).tolist()
    return [tokens[begin:end].tobytes() for begin, end in itertools.pairwise([0, *ends])]


def parse_text(query: Text, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> bytes:
    """Return the text whose final state is the query; for pictures, `12:340` is picture 12 before chunk 340.

    Raises:
        ValueError: the model is of pictures, and the query is no place in one.
    """
    raw = to_bytes(query, 'run.probe.contexts("for i in ")')
    if chunker.name != PIXELS:
        return raw
    shown = raw.decode(errors="backslashreplace")
    if not (place := PLACE.fullmatch(shown.strip())):
        raise ValueError(f"{shown!r} is not a place in a picture. Use PICTURE:CHUNK, such as 12:340, counted from 0")
    return b"".join(picture_chunks(corpus(), split, int(place[1]), int(place[2]))[:-1])


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
        text, after: stored text before the place, and after it.
        name, document: name of the document, and its number in the split.
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
        collisions: which neighbours have the query's row of the encoder's table by chance; None if none has.
    """

    query: str
    hex: str
    neighbours: list[Neighbour]
    note: str | None = None
    collisions: str | None = None

    def as_record(self) -> dict[str, Any]:
        """Return all fields for programs, with `note` and `collisions` only if there is one."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def log_notes(results: Iterable[QueryResult]) -> None:
    """Log the notes of query results."""
    log_first(logging.WARNING, [note for each in results for note in (each.note, each.collisions) if note])


def log_first(level: int, notes: Iterable[str]) -> None:
    """Log notes on many queries, each once, and of many of them the first ones and the number of the others."""
    every = list(dict.fromkeys(notes))
    for note in every[:_NOTES]:
        log.log(level, "%s", note)
    if more := len(every[_NOTES:]):
        log.log(level, "… the same of %s more queries", f"{more:,}")


class SearchResults(list[QueryResult]):
    """Results of several queries, which print as a table.

    Attributes:
        summary: description of the searched rows and of the scores.
        score: name of the score.
    """

    def __init__(self, results: Iterable[QueryResult], summary: str = "", score: str = "cosine") -> None:
        super().__init__(results)
        self.summary, self.score = summary, score

    def __str__(self) -> str:
        lines = [self.summary] if self.summary else []
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
        raise ImportError("data frames need pandas. Install it with pip install 'haed[pandas]'") from None
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
