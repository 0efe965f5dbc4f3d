import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chunkers import CHUNKERS, make_chunker
from data.options import ChunkerOptions

NASTY = [
    "e\u0301e\u0301e\u0301 a\u0308",
    "שלום עולם مرحبا",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢" * 5,
    "a\r\nb\r\n\r\n",
    "\x00\x00 \x00",
    "no final newline",
    "\n" * 40,
    " " * 100 + "x",
    "\t\t\tif x:\n\t\t\t\treturn\n",
    "",
]


def cut(kind: str, k: int, document: bytes) -> list[bytes]:
    tokens, lengths = make_chunker(ChunkerOptions(kind=kind, k=k)).split(document)
    ends = np.cumsum(lengths, dtype=np.int64)
    return [tokens[end - size : end].tobytes() for end, size in zip(ends.tolist(), lengths.tolist(), strict=True)]


@pytest.mark.parametrize("kind", CHUNKERS)
@given(
    document=st.one_of(st.binary(max_size=300), st.sampled_from([text.encode() for text in NASTY])),
    k=st.integers(1, 20),
)
def test_joining_gives_the_bytes_back(kind: str, document: bytes, k: int) -> None:
    chunker = make_chunker(ChunkerOptions(kind=kind, k=k))
    tokens, lengths = chunker.split(document)
    assert chunker.join(tokens, lengths) == document
    assert lengths.sum(dtype=int) == len(document) and (not len(lengths) or 1 <= lengths.min() <= lengths.max() <= k)
    if chunker.fixed:
        assert (lengths[:-1] == k).all()


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_a_text_and_its_continuation_are_cut_alike_but_for_the_last_chunk(first: bytes, second: bytes) -> None:
    short, long = cut("words", 12, first), cut("words", 12, first + second)
    assert long[: max(0, len(short) - 1)] == short[:-1]


def test_words() -> None:
    assert cut("words", 12, b"Hello, world  of (small) words.\n") == [
        b"Hello, ",
        b"world  ",
        b"of ",
        b"(",
        b"small) ",
        b"words.\n",
    ]
    assert cut("words", 4, b"abcdefghij k") == [b"abcd", b"efgh", b"ij ", b"k"]
    assert cut("words", 12, b"def f(x):\n        return x\n\n\n    y") == [
        b"def ", b"f(", b"x):\n", b"        ", b"return ", b"x\n\n\n", b"    ", b"y",
    ]  # fmt: skip


def test_white_space_never_becomes_one_chunk_per_blank() -> None:
    assert len(cut("words", 12, b" " * 120)) == 10
    assert len(cut("words", 12, b"x" + b"\n" * 35)) == 3
    assert cut("words", 12, "naïve café".encode()) == ["naïve ".encode(), "café".encode()]


def test_english_words_are_about_five_bytes(shared_wikitext: bytes) -> None:
    lengths = [len(chunk) for chunk in cut("words", 12, shared_wikitext)]
    assert 4.5 < np.mean(lengths) < 6


def test_an_unknown_chunker_is_refused() -> None:
    with pytest.raises(ValueError, match="expected words, fixed, pixels"):
        make_chunker(ChunkerOptions(kind="syllables"))  # type: ignore[arg-type]
