"""Cosines, dimension, neighbours and correlation against brute force in float64."""

import numpy as np
import pytest

from pipeline.analysis import geometry


@pytest.fixture
def vectors() -> np.ndarray:
    chance = np.random.default_rng(0)
    return (chance.normal(size=(60, 8)) * np.arange(1, 9) + 2).astype(np.float32)


def test_the_mean_cosine_is_of_all_pairs(vectors: np.ndarray) -> None:
    exact = vectors.astype(np.float64)
    found = geometry.measure_spread(vectors)
    for shift, value in ((0.0, found.mean_cosine), (exact.mean(0), found.centred_cosine)):
        units = exact - shift
        units /= np.linalg.norm(units, axis=1, keepdims=True)
        pairs = (units @ units.T)[~np.eye(len(units), dtype=bool)]
        assert value == pytest.approx(pairs.mean(), abs=1e-9)


def test_the_dimension_is_that_of_the_directions_which_are_used() -> None:
    chance = np.random.default_rng(1).normal(size=(4000, 10))
    assert geometry.measure_spread(chance).dimension == pytest.approx(10, rel=0.05)
    chance[:, 2:] = 0
    found = geometry.measure_spread(chance)
    assert found.dimension == pytest.approx(2, rel=0.05) and found.half == 1 and found.width == 10


def test_equal_embeddings_have_one_dimension() -> None:
    found = geometry.measure_spread(np.full((50, 6), 0.1, np.float32))
    assert (found.dimension, found.half) == (1, 1) and found.mean_cosine == pytest.approx(1)


def test_neighbours_are_those_of_the_highest_cosine(vectors: np.ndarray) -> None:
    doubled = np.concatenate([vectors, 3 * vectors[:4]])  # as near as itself
    units = doubled / np.linalg.norm(doubled, axis=1, keepdims=True)
    cosines = units @ units.T
    np.fill_diagonal(cosines, -2)
    rows = np.array([0, 3, 17, 62])
    found = geometry.find_nearest(doubled, rows, 5)
    assert found.shape == (4, 5) and not (found == rows[:, None]).any()
    own = np.take_along_axis(cosines[rows], found, 1)
    np.testing.assert_allclose(own, -np.sort(-cosines[rows], axis=1)[:, :5], atol=1e-6)


def test_norms_that_grow_with_frequency_are_told() -> None:
    counts = np.array([1, 10, 100, 1000])
    found = geometry.measure_norms(np.log10(counts)[:, None] + 1.0, counts)
    assert (found.mean, found.correlation) == (2.5, 1.0) and found.slope == pytest.approx(1 / 2.5)


def test_spearman_shares_ranks_among_equals() -> None:
    assert geometry.rank_values(np.array([3, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]
    assert geometry.spearman_correlation(np.array([1, 2, 3]), np.array([9, 4, 1])) == -1
    assert geometry.spearman_correlation(np.array([1, 2, 3]), np.ones(3)) == 0


def test_clusters_find_directions() -> None:
    chance = np.random.default_rng(2)
    centres = np.eye(3).repeat(20, 0)
    found = geometry.cluster_directions(
        centres * chance.uniform(1, 9, (60, 1)) + 0.01 * chance.normal(size=(60, 3)), 3, seed=0
    )
    assert len(set(found.tolist())) == 3 and all(len(set(part)) == 1 for part in found.reshape(3, 20).tolist())
