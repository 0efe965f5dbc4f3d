"""What may be asked; answers are in tests/pipeline/run/index/test_neighbours.py."""

import pytest

from data.chunkers import make_chunker
from data.corpus import Corpus
from data.options import ChunkerOptions
from pipeline.run.index.queries import parse_chunk, parse_text

WORDS = make_chunker(ChunkerOptions(kind="words"))
PIXELS = make_chunker(ChunkerOptions(kind="pixels", k=12))


def nothing() -> Corpus:
    raise AssertionError("no place in a picture is asked for")


@pytest.mark.parametrize("query", ["#12345", "12345g", "00" * 11, "", "1:", ":2", "1:2:3"])
def test_what_is_no_chunk_of_pixels(query: str) -> None:
    with pytest.raises(ValueError, match="is not a chunk of pixels"):
        parse_chunk(query, PIXELS, nothing, "train")
    with pytest.raises(ValueError, match="is not a place in a picture"):
        parse_text(query, PIXELS, nothing, "train")
    eight = make_chunker(ChunkerOptions(kind="pixels", k=8))
    assert parse_chunk("#FF0080", eight, nothing, "train") == (bytes.fromhex("ff0080ff0080ff00"), None)


def test_what_is_cut_and_what_is_several_chunks_is_said() -> None:
    for query, meant, said in (
        ("def ", b"def ", ""),
        (b"\xff\xfe", b"\xff\xfe", ""),
        ("New York", b"New York", "New␣York is 2 chunks of this run (New␣ York)"),
        (
            "internationalisation",
            b"internationa",
            "20 bytes, but a chunk of this run has at most 12. Using internationa",
        ),
        ("for i in range(10)", b"for ", "Using for␣, the first of its 5 chunks (for␣ i␣ in␣ range( 10))"),
    ):
        chunk, note = parse_chunk(query, WORDS, nothing, "train")
        assert chunk == meant and (said in note if said else note is None)
    with pytest.raises(ValueError, match="empty"):
        parse_chunk("", WORDS, nothing, "train")
