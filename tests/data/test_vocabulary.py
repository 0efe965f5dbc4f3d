"""Counting distinct chunks against a Counter, in memory and beyond it, and what stops it."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from data import shards, vocabulary
from data.corpus import Corpus
from data.shards import CorruptShardError, Sample
from data.vocabulary import (
    DistinctChunks,
    Occurrences,
    VocabularyOverflowError,
    count_distinct_chunks,
    count_documents_with,
)
from tests.data.conftest import file_size_limit, shard_source


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """20,000 chunks of up to 12 bytes, zeros among them: some frequent ones, some that occur once."""
    folder = tmp_path_factory.mktemp("distinct")
    draw = np.random.default_rng(0)
    (folder / "text").mkdir()
    for split, files in (("train", 60), ("valid", 20)):
        for file in range(files):
            words = [str(n) if n % 7 else f"{n}\0" for n in draw.zipf(1.3, 250) % 10**9]
            (folder / "text" / f"{split}-{file}.txt").write_text(" ".join(words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SAMPLE_BYTES", 2048)
        return shard_source(folder / "text", folder / "shards")


def expected(corpus: Corpus, *splits: str) -> list[tuple[bytes, int]]:
    """Chunks and counts in their order, by brute force."""
    counts: Counter[bytes] = Counter()
    for split in splits:
        for tokens, lengths in corpus.iterate_documents(split):
            counts.update(chunk.tobytes() for chunk in np.split(tokens, np.cumsum(lengths)[:-1]))
    padded = {chunk: chunk.ljust(12, b"\0") + bytes([len(chunk)]) for chunk in counts}
    return sorted(counts.items(), key=lambda item: (-item[1], padded[item[0]]))


def listed(found: DistinctChunks) -> list[tuple[bytes, int]]:
    rows = zip(found.tokens, found.lengths, found.counts.tolist(), strict=True)
    return [(row.tobytes()[:length], count) for row, length, count in rows]


def test_counts_are_those_of_a_counter(corpus: Corpus) -> None:
    for splits in (("train",), ("train", "valid")):
        every = expected(corpus, *splits)
        found = count_distinct_chunks(corpus, *splits)
        assert listed(found) == every and found.left_out == 0
        for most in (1, 37, len(every) - 1, len(every), len(every) + 1):
            found = count_distinct_chunks(corpus, *splits, most=most)
            assert listed(found) == every[:most] and found.left_out == max(0, len(every) - most)
        often = [item for item in every if item[1] >= 3]
        found = count_distinct_chunks(corpus, *splits, most=50, at_least=3)
        assert listed(found) == often[:50] and found.left_out == len(often) - 50
    assert listed(count_distinct_chunks(corpus, "train", at_least=10**9)) == listed(count_distinct_chunks(corpus)) == []


def test_more_chunks_than_memory_holds_are_counted_by_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million distinct chunks, of which each occurs twice, in 32 MB."""
    monkeypatch.setattr(vocabulary, "MEMORY", 32 << 20)
    numbers, samples = 2_000_000, []
    for first in [*range(0, numbers, 100_000)] * 2:
        tokens = (np.arange(first, first + 100_000, dtype=">u8") * 0x9E3779B97F4A7C15).view(np.uint8)
        samples.append(Sample(tokens, np.full(100_000, 8, np.uint8), np.array([100_000]), ["a"]))
    found = vocabulary._count_samples(samples, 8, most=10, at_least=2)
    assert found.counts.tolist() == [2] * 10 and found.left_out == numbers - 10


def test_it_stops_at_a_limit(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    number = len(expected(corpus, "train"))
    assert len(count_distinct_chunks(corpus, "train", limit=number).counts) == number
    with pytest.raises(VocabularyOverflowError, match=f"more than {number - 1:,} distinct chunks"):
        count_distinct_chunks(corpus, "train", limit=number - 1)
    read, samples = [], vocabulary._iterate_samples
    monkeypatch.setattr(
        vocabulary,
        "_iterate_samples",
        lambda *given, **more: (read.append(0) or each for each in samples(*given, **more)),
    )
    with pytest.raises(VocabularyOverflowError):
        count_distinct_chunks(corpus, "train", limit=300)
    assert len(read) < len(list(samples(corpus, "train"))) / 4


def test_what_goes_wrong_while_chunks_are_read_is_raised_as_it_is(corpus: Corpus) -> None:
    def samples(error: BaseException) -> Iterator[Sample]:
        yield next(iter(corpus.read(next(iter(corpus.shards_of("train"))))))
        raise error

    for error in (CorruptShardError("x.tar", 7, "cut"), KeyboardInterrupt(), MemoryError("1 GB")):
        with pytest.raises(type(error)) as raised:
            vocabulary._count_samples(samples(error), 12)
        assert raised.value is error


def test_no_room_for_temporary_files_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "MEMORY", 32 << 20)
    tokens = (np.arange(2_000_000, dtype=">u8") * 0x9E3779B97F4A7C15).view(np.uint8)
    sample = Sample(tokens, np.full(2_000_000, 8, np.uint8), np.array([2_000_000]), ["a"])
    said = r"counting distinct chunks needs disk space in .*Set TMPDIR to another folder\."
    with file_size_limit(1 << 20), pytest.raises(OSError, match=said):
        vocabulary._count_samples([sample], 8)


@pytest.mark.parametrize("share", [8, 1 << 24])
def test_how_often_one_split_has_the_chunks_of_another(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    monkeypatch.setattr(vocabulary, "SHARE", share)
    train, valid = dict(expected(corpus, "train")), list(dict(expected(corpus, "valid")))
    seen = Occurrences(corpus, "train", "valid")
    asked = [*valid, b"nowhere"]
    tokens, lengths = np.frombuffer(b"".join(asked), np.uint8), np.array([len(chunk) for chunk in asked], np.uint8)
    assert seen.count_occurrences(tokens, lengths).tolist() == [train.get(chunk, 0) for chunk in asked]
    for splits in (("train", "empty"), ("empty", "train")):
        assert not Occurrences(corpus, *splits).count_occurrences(tokens, lengths).any()


def test_documents_that_have_a_chunk(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sets, by documents and by parts of them; chunks of another split that none has are 0."""
    asked = count_distinct_chunks(corpus, "train", "valid")
    names = [row.tobytes()[:length] for row, length in zip(asked.tokens, asked.lengths, strict=True)]
    for part in (vocabulary.PART, 100):
        monkeypatch.setattr(vocabulary, "PART", part)
        expected: Counter[bytes] = Counter()
        for sample in (each for file in corpus.shards_of("train") for each in corpus.read(file)):
            chunks = [chunk.tobytes() for chunk in np.split(sample.tokens, np.cumsum(sample.lengths)[:-1])]
            for document in np.split(np.arange(len(chunks)), np.cumsum(sample.documents)[:-1]):
                for begin in range(0, len(document), part):
                    expected.update({chunks[row] for row in document[begin : begin + part]})
        unread = iter([*corpus.shards_of("train"), None])
        found = count_documents_with(corpus, "train", asked, partial(next, unread))
        assert next(unread) is None
        assert found.tolist() == [expected[name] for name in names]
        assert 0 in found and found.max() > 50
