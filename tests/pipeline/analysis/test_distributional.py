"""Contexts, their information, and what neighbours have in common, on streams whose answers are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.analysis import distributional
from pipeline.analysis.distributional import spelling_similarity


def test_contexts_are_counted_before_and_after_and_not_across_gaps() -> None:
    gap, a, b, c = range(-1, 3)
    found = distributional.count_contexts(np.array([a, b, a, gap, c, a], np.int32), 3, 2)
    assert found.tolist() == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 0]]


def test_information_is_the_logarithm_of_observed_over_expected() -> None:
    counts = np.array([[8, 0], [4, 4]], np.float32)
    weights = np.array([12.0, 4.0]) ** distributional.SMOOTHING
    shares = np.array([[1, 0], [0.5, 0.5]])
    with np.errstate(divide="ignore"):
        expected = np.maximum(np.log2(shares / (weights / weights.sum())), 0)
    np.testing.assert_allclose(distributional.positive_pmi(counts), expected, atol=1e-6)
    assert np.isfinite(distributional.positive_pmi(np.zeros((2, 3), np.float32))).all()


def test_reduced_vectors_have_the_products_of_the_best_approximation() -> None:
    matrix = np.random.default_rng(0).random((30, 12)).astype(np.float32)
    left, values, _ = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    expected = left[:, :5] * np.sqrt(values[:5])
    found = distributional.reduce_dimensions(matrix, 5)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)


def test_mutual_information_of_classes() -> None:
    alternating = np.tile([0, 2, 1, 3], 500).astype(np.int32)
    bits, pairs = distributional.mutual_information(alternating, np.array([0, 0, 1, 1]))
    assert bits == pytest.approx(1, abs=1e-3) and pairs == 1999
    assert distributional.mutual_information(alternating, np.zeros(4, int))[0] == pytest.approx(0, abs=1e-12)


def test_random_classes_keep_information_and_permuted_chunks_have_only_the_bias_of_small_counts() -> None:
    cycle = np.tile(np.arange(12), 400).astype(np.int32)  # each chunk tells the next
    clusters, counts = np.arange(12) % 3, np.full(12, 400)
    chunks = [bytes([97 + row]) for row in range(12)]
    found = distributional.measure_class_information(cycle, clusters, clusters, chunks, counts, seed=0)
    assert found.embedding == found.use == pytest.approx(np.log2(3), abs=1e-3)
    assert 0 <= found.bias < 0.01 < 0.1 < found.random < found.embedding and found.random_deviation > 0


@pytest.mark.parametrize("first", ["use", "spelling"])
def test_the_verdict_says_what_neighbours_have_in_common(first: str) -> None:
    chance = np.random.default_rng(3)
    size, groups = 64, 8
    used, written = np.arange(size) % groups, np.arange(size) // groups
    chunks = [bytes([97 + group]) * 5 + bytes([33 + number]) for number, group in enumerate(written)]
    contexts = np.eye(groups, dtype=np.float32)[used] + 0.01 * chance.random((size, groups), np.float32)
    vectors = np.eye(groups)[used if first == "use" else written] + 0.1 * chance.normal(size=(size, groups))
    counts, labels = np.arange(size, 0, -1), [chunk.decode() for chunk in chunks]
    found = distributional.measure_agreement(vectors, contexts, chunks, counts, labels, slice(0, size), 20, 5)
    other = "spelling" if first == "use" else "use"
    assert found.verdict == f"{first} before {other}"
    assert getattr(found, first).share > 0.8 > 0.2 > getattr(found, other).share
    assert getattr(found, first).correlation > getattr(found, other).correlation
    assert (found.first, found.among, found.queries, found.counts) == (1, size, 20, (1, size))
    for example in found.examples:
        near = example.embedding
        assert len(near) == 5 and example.chunk not in near + example.use + example.spelling
        if first == "spelling":
            assert all(chunk[0] == example.chunk[0] for chunk in near)


# Edit distances against the textbook's table, and values.


def by_the_table(a: bytes, b: bytes) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(before + (x != y), row[j] + 1, row[j - 1] + 1)
    return row[-1]


@settings(max_examples=60)
@given(
    st.lists(st.binary(min_size=1, max_size=70) | st.text("ab", min_size=1, max_size=64).map(str.encode), min_size=2)
)
def test_it_is_the_edit_distance(chunks: list[bytes]) -> None:
    found = spelling_similarity(chunks, np.arange(len(chunks)))
    cut = [chunk[:64] for chunk in chunks]
    for a, row in zip(cut, found, strict=True):
        expected = [1 - by_the_table(a, b) / max(len(a), len(b)) for b in cut]
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_values_are_alike_by_their_difference() -> None:
    chunks = [bytes([0] * 6), bytes([255] * 6), bytes([51] * 6), bytes([0] * 3)]
    found = spelling_similarity(chunks, np.array([0, 3]), of_values=True)
    np.testing.assert_allclose(found, [[1, 0, 0.8, 1], [1, 0, 0.8, 1]], atol=1e-6)
