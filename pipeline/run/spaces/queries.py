"""Parsing of queries: a chunk of text; for pictures a colour, the values of a chunk, or a place in one of them."""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Sequence

from data.chunkers import Chunker
from data.corpus import Corpus
from pipeline.console import escape_control_characters
from pipeline.run.spaces.results import PIXELS

log = logging.getLogger(__name__)
_SHOWN = 6  # chunks of a query that is several
START = "‹where a document begins›"
PLACE = re.compile(r"(\d{1,12}):(\d{1,12})")
Text = str | bytes | bytearray | memoryview
Texts = Text | Sequence[Text]


def to_bytes(text: Text, example: str = 'run.neighbours("return ")') -> bytes:
    """Return the bytes of a text: a str is encoded as UTF-8, and its lone surrogates are bytes, as in file names.

    Args:
        text: str, or bytes, which are returned unchanged.
        example: a call that the error shows.

    Raises:
        TypeError: it is neither a str nor bytes.
        ValueError: it has a surrogate that stands for no byte.
    """
    if isinstance(text, str):
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(f"{text!r} is no text: {error.reason} at character {error.start}") from None
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


def parse_chunk(query: Text, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> bytes:
    """Return the chunk that a query stands for, and log if it is truncated or would be cut by the run's chunker.

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
        return _parse_pixels(raw.decode(errors="backslashreplace"), chunker, corpus, split)
    if not raw:
        raise ValueError(f"the query '' is empty: a chunk has 1 to {chunker.k} bytes")
    tokens, lengths = chunker.split(raw)
    pieces = [tokens[end - length : end].tobytes() for length, end in zip(lengths, lengths.cumsum(), strict=True)]
    shown = " ".join(_show_chunk(piece) for piece in pieces[:_SHOWN]) + (" …" if len(pieces) > _SHOWN else "")
    if len(raw) > chunker.k:
        log.warning(
            "the query %s has %d bytes, a chunk of this run has up to %d: %s is taken, the first of its %d chunks (%s); "
            "--context takes passages",
            _show_chunk(raw),
            len(raw),
            chunker.k,
            _show_chunk(pieces[0]),
            len(pieces),
            shown,
        )
        return pieces[0]
    if len(pieces) > 1:
        log.warning(
            "the query %s is %d chunks of this run (%s), and is embedded as if it were one; --context takes passages",
            _show_chunk(raw),
            len(pieces),
            shown,
        )
    return raw


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
        f"the query {query!r} is no chunk of pixels: give a colour such as #4080c0, or {k} values in hexadecimal, or "
        "PICTURE:CHUNK such as 12:340; without queries chunks of the corpus are taken"
    )


def picture_chunks(corpus: Corpus, split: str, number: int, chunk: int) -> list[bytes]:
    """Return the chunks of a picture of a split, up to and including one; pictures and chunks are counted from 0.

    Raises:
        ValueError: there is no such picture or chunk.
    """
    pictures = corpus.split_counts(split).documents
    if number >= pictures:
        raise ValueError(f"there is no picture {number}: the {split} split has {pictures:,}, counted from 0")
    tokens, lengths = next(itertools.islice(corpus.iterate_documents(split), number, None))
    if chunk >= len(lengths):
        raise ValueError(f"picture {number} of the {split} split has no chunk {chunk}: it has {len(lengths):,}, from 0")
    ends = lengths[: chunk + 1].cumsum(dtype=int).tolist()
    return [tokens[begin:end].tobytes() for begin, end in itertools.pairwise([0, *ends])]


def parse_prefix(query: Text, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> bytes:
    """Return the text whose final state is the query; for pictures, `12:340` is picture 12 before chunk 340.

    Raises:
        ValueError: the model is of pictures, and the query is no place in one.
    """
    raw = to_bytes(query, 'run.probe.contexts("for i in ")')
    if chunker.name != PIXELS:
        return raw
    shown = raw.decode(errors="backslashreplace")
    if not (place := PLACE.fullmatch(shown.strip())):
        raise ValueError(f"{shown!r} is no place in a picture: give PICTURE:CHUNK such as 12:340, counted from 0")
    return b"".join(picture_chunks(corpus(), split, int(place[1]), int(place[2]))[:-1])


def parse_passage(query: Text, chunker: Chunker, corpus: Callable[[], Corpus], split: str) -> bytes:
    """Return the text whose final state is the query, as `after` does, and refuse an empty one.

    Raises:
        ValueError: as `after`, or the text is empty.
    """
    if not (raw := parse_prefix(query, chunker, corpus, split)):
        raise ValueError("an empty passage is like no other: give the text that others are to be like")
    return raw
