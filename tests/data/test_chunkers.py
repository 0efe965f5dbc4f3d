from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.chunkers import Chunker, WordChunker, make_chunker
from data.options import CHUNKERS, ChunkerOptions

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


@cache
def fitted(kind: str) -> dict[str, object] | None:
    sample = [b"the cat sat on the mat. ", "שלום 𝔘𝔫𝔦 naïve\r\n".encode(), b"ab\x00cd"] * 3
    return CHUNKERS.load_class(kind).fit(ChunkerOptions(kind=kind), sample)


def chunker_of(kind: str, k: int) -> Chunker:
    return make_chunker(ChunkerOptions(kind=kind, k=k), fitted(kind))


def cut(kind: str, k: int, document: bytes) -> list[bytes]:
    return chunker_of(kind, k).cut_text(document)


@pytest.mark.parametrize("kind", CHUNKERS)
@given(
    document=st.one_of(st.binary(max_size=300), st.sampled_from([text.encode() for text in NASTY])),
    k=st.integers(1, 20),
)
def test_joining_gives_the_bytes_back(kind: str, document: bytes, k: int) -> None:
    chunker = chunker_of(kind, k)
    tokens, lengths = chunker.split(document)
    assert chunker.join(tokens, lengths) == document
    assert lengths.sum(dtype=int) == len(document) and (not len(lengths) or 1 <= lengths.min() <= lengths.max() <= k)
    if chunker.fixed:
        assert (lengths[:-1] == k).all()


@pytest.mark.parametrize("kind", CHUNKERS)
@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.text(" .a\n)", min_size=1).map(str.encode)), min_size=1)
)
def test_documents_of_a_buffer_are_cut_as_each_alone(kind: str, documents: list[bytes]) -> None:
    chunker = chunker_of(kind, 7)
    starts = np.cumsum([0, *map(len, documents[:-1])])
    tokens, lengths = chunker.split(b"".join(documents), starts)
    assert lengths.tolist() == [size for document in documents for size in chunker.split(document)[1].tolist()]
    assert chunker.join(tokens, lengths) == b"".join(documents)


MIXED = st.text("aж中𝔘 \n.", max_size=120).map(str.encode)


@given(st.one_of(st.binary(max_size=100), MIXED), st.one_of(st.binary(max_size=100), MIXED), st.integers(1, 12))
def test_a_text_and_its_continuation_are_cut_alike_but_for_the_last_chunk(first: bytes, second: bytes, k: int) -> None:
    short, long = cut("words", k, first), cut("words", k, first + second)
    assert long[: max(0, len(short) - 1)] == short[:-1]


def whole(chunk: bytes) -> bool:
    return chunk.decode(errors="replace").encode() == chunk


@pytest.mark.parametrize("kind", ["words", "sentences"])
@given(st.text("aж中𝔘 \n.", max_size=60).map(str.encode), st.integers(4, 12))
def test_no_character_is_cut(kind: str, document: bytes, k: int) -> None:
    chunks = cut(kind, k, document)
    assert all(map(whole, chunks))
    ends = {0, *accumulate(map(len, cut(kind, 255, document)))}  # of words, sentences
    at = 0
    for chunk in chunks:
        at += len(chunk)
        assert at in ends or len(chunk) > k - 4  # a part is as long as whole characters allow


def test_characters_of_long_texts_and_no_characters() -> None:
    assert cut("words", 12, "достопримечательность".encode())[0] == "достоп".encode()
    assert cut("words", 7, "中文字中文字 a".encode()) == [
        "中文".encode(), "字中".encode(), "文字 ".encode(), b"a",
    ]  # fmt: skip
    text = "a中𝔘ж".encode() * 40_000  # one chunk, in many blocks
    assert all(map(whole, chunks := cut("words", 12, text))) and b"".join(chunks) == text
    assert len(chunks) < len(text) / 9
    for k in (1, 2, 3):  # characters longer than a chunk, and bytes that are none
        assert b"".join(cut("words", k, text[:1000])) == text[:1000]
    assert cut("words", 4, b"\x80" * 10) == [b"\x80" * 4, b"\x80" * 4, b"\x80" * 2]
    assert cut("words", 4, b"\xff" * 10) == [b"\xff" * 4, b"\xff" * 4, b"\xff" * 2]


def test_a_corpus_that_another_version_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="cut by version 3 of the chunker 'words', but this is version 1"):
        make_chunker(ChunkerOptions(), version=3)


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
    with pytest.raises(ValueError, match="expected one of words, fixed, pixels, sentences, entropy"):
        make_chunker(ChunkerOptions(kind="syllables"))


def test_sentences() -> None:
    text = b'It is. "Is it?" Yes! (It was.) So e.g. this\nand\n\n  that. End'
    assert cut("sentences", 255, text) == [
        b"It is. ", b'"Is it?" ', b"Yes! ", b"(It was.) ", b"So e.g. ", b"this\n", b"and\n\n  ", b"that. ", b"End",
    ]  # fmt: skip
    assert cut("sentences", 4, b"abcdefghij. k") == [b"abcd", b"efgh", b"ij. ", b"k"]


def test_entropy_chunks_begin_where_the_next_byte_is_hard_to_foresee() -> None:
    generator = np.random.default_rng(0)
    letters = [b"%c" % c for c in b"abcdefgh"]
    # After "ix" anything, else nothing new.
    text = b"".join(b"fix" + letters[i] for i in generator.integers(0, 8, 4000))
    options = ChunkerOptions(kind="entropy", k=20, mean_length=4)
    learned = CHUNKERS.load_class("entropy").fit(options, [text])
    assert learned is not None and learned["threshold_bits"] < 3 and len(str(learned)) < 40_000
    chunks = make_chunker(options, learned).cut_text(text)
    assert {chunk[-3:] for chunk in chunks[1:-1]} == {b"fix"}
    with pytest.raises(ValueError, match="must be fitted"):
        make_chunker(options)


def test_entropy_reaches_the_mean_length(shared_wikitext: bytes) -> None:
    for wanted in (3.0, 5.0):
        options = ChunkerOptions(kind="entropy", k=30, mean_length=wanted)
        made = make_chunker(options, CHUNKERS.load_class("entropy").fit(options, [shared_wikitext]))
        assert len(shared_wikitext) / len(made.split(shared_wikitext)[1]) == pytest.approx(wanted, rel=0.15)


def test_words_are_measured_for_a_chunker_of_words_that_must_be_fitted() -> None:
    class Phrases(WordChunker):
        def __init__(self, options: ChunkerOptions, fitted: dict[str, object] | None = None) -> None:
            super().__init__(options)
            self.phrases = (fitted or {})["phrases"]

    measured = Phrases.measure_sample(ChunkerOptions(k=4), [b"four longer words here"])
    assert measured is not None and measured["longer_than_k"] == 0.75
