from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import statistics
from data.statistics import DocumentLengths, Statistics, hash_chunks


def packed(chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(b"".join(chunks), np.uint8), np.array([len(chunk) for chunk in chunks], np.uint8)


@given(st.lists(st.binary(min_size=1, max_size=255), min_size=1, max_size=60))
def test_equal_chunks_and_only_they_have_equal_hashes(chunks: list[bytes]) -> None:
    found = hash_chunks(*packed(chunks)).tolist()
    assert len(set(found)) == len(set(chunks))
    assert all((found[0] == other) == (chunks[0] == chunk) for other, chunk in zip(found, chunks, strict=True))


def test_zeros_of_any_length_differ() -> None:
    assert len(set(hash_chunks(*packed([bytes(n) for n in range(1, 256)])).tolist())) == 255


@given(st.lists(st.lists(st.integers(0, 30).map(lambda n: b"%d" % n), max_size=30), min_size=1, max_size=5))
def test_parts_add_up_to_the_exact_counts(parts: list[list[bytes]]) -> None:
    total = Statistics()
    for part in parts:
        one = Statistics()
        if part:
            one.count_chunks(*packed(part))
        total.merge_statistics(Statistics.from_arrays(one.to_arrays()))
    counts = Counter(chunk for part in parts for chunk in part)
    summary = total.make_summary()
    assert summary.distinct_chunks == len(counts) and summary.distinct_chunks_exact
    wanted = sorted(counts.values(), reverse=True)
    assert summary.rank_frequency == [(rank, wanted[rank - 1]) for rank, _ in summary.rank_frequency]
    assert not counts or summary.rank_frequency[-1][0] == len(counts)


def test_a_document_of_three_parts_takes_no_hash_of_another() -> None:
    begun, continued, ended = Statistics(), Statistics(), Statistics()
    for digest in (b"the one ", b"the next"):
        begun.count_document(3, True)
        begun.add_hash(digest)
    for each in (continued, ended):
        each.count_document(2, False)
    for each in (continued, ended):
        begun.merge_statistics(each)
        begun = Statistics.from_arrays(begun.to_arrays())
    assert begun.hashes.tobytes() == b"the one "
    assert begun.make_summary().tokens_per_document == DocumentLengths(3, 7, {"2": 1, "4": 1})


def test_many_distinct_chunks_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "KEPT", 4096)
    monkeypatch.setattr(statistics, "HEAD", 512)
    generator = np.random.default_rng(0)
    drawn = np.minimum(generator.zipf(1.2, 400_000), 1 << 40).astype("<u8")
    total = Statistics()
    for part in np.array_split(drawn, 7):
        one = Statistics()
        one.count_chunks(part.view(np.uint8), np.full(len(part), 8, np.uint8))
        total.merge_statistics(one)
    values = np.sort(np.unique(drawn, return_counts=True)[1])[::-1]
    assert not total.frequencies.is_exact and len(total.frequencies.keys) <= 4096 + 512
    summary = total.make_summary()
    assert summary.distinct_chunks == pytest.approx(len(values), rel=0.06)
    for rank, count in summary.rank_frequency:
        if rank <= 100:
            assert count == pytest.approx(values[rank - 1], rel=0.02)
        elif rank < len(values):
            assert count <= 3 * values[rank - 1] + 1 and 3 * count + 1 >= values[rank - 1]
