"""Search: all kinds and metrics against brute force in float64, and how much of it approximate indexes find."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config import IndexOptions
from pipeline.run.index import faiss_search
from pipeline.run.index.faiss_search import (
    Vectors,
    augment_vectors,
    build_faiss_index,
    choose_index,
    kinds_to_try,
    open_candidate,
    prepare_vectors,
    search_uncentred,
    tune_effort,
)
from pipeline.run.index.storage import Metric, open_vectors, write_vectors
from tests.conftest import mostly_nightly

METRICS: tuple[Metric, ...] = ("centred", "cosine", "ip", "l2")


def some(number: int, width: int, seed: int = 0) -> np.ndarray:
    """Clustered vectors of different lengths, as embeddings of chunks are."""
    chance = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(30, width))
    found = centres[chance.integers(0, 30, number)] + 0.6 * chance.normal(size=(number, width))
    return (found * chance.uniform(0.5, 2, size=(number, 1))).astype(np.float32)


def brute(base: np.ndarray, queries: np.ndarray, metric: Metric) -> np.ndarray:
    """The scores (q, n) of all, the best first."""
    base, queries = base.astype(np.float64), queries.astype(np.float64)
    if metric == "l2":
        return np.sort(np.linalg.norm(queries[:, None] - base, axis=2), axis=1)
    if metric in ("centred", "cosine"):
        base, queries = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (base, queries))
    return -np.sort(-queries @ base.T, axis=1)


def test_faiss_has_one_thread_beside_the_openmp_of_pytorch_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    library = SimpleNamespace(omp_get_max_threads=lambda: 8, omp_set_num_threads=numbers.append)
    monkeypatch.setitem(sys.modules, "faiss", library)
    monkeypatch.setattr(faiss_search, "_IS_MACOS", True)
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "")  # is undone at the end, as what is set without it is not
    monkeypatch.delenv("KMP_DUPLICATE_LIB_OK")
    with faiss_search.limit_threads(4):
        assert os.environ["KMP_DUPLICATE_LIB_OK"] == "TRUE" and numbers == [1, 1]


@pytest.mark.parametrize("metric", mostly_nightly(METRICS, "cosine"))
def test_search_finds_what_brute_force_finds(metric: Metric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_search, "_FEW", 100)
    base, queries, width = some(1500, 20), some(40, 20, 1), 20
    mean = base.mean(0) if metric == "centred" else None
    with write_vectors(tmp_path, width, metric) as file:
        for begin in range(0, 1500, 400):
            file.append_vectors(prepare_vectors(base[begin : begin + 400], metric, mean))
    stored = open_vectors(tmp_path / "vectors.faiss")
    np.testing.assert_array_equal(stored, prepare_vectors(base, metric, mean))
    unseen = prepare_vectors(some(50, width, 2), metric, mean)
    if mean is not None:
        base, queries = base - mean, queries - mean
    truth, of_some = brute(base, queries, metric), brute(base[:400], queries, metric)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    for kind in ("flat", "hnsw", "ivf", "ivfpq"):
        if kind != "flat":
            build_faiss_index(tmp_path / kind, stored, metric, kind, 1, 0)
        search = open_candidate(tmp_path / kind, stored, metric, kind)
        tuned = tune_effort(search, 0.97, unseen, 0)
        assert tuned.found == tuned.curve[-1]
        assert tuned.queries == {"rows": 350 if kind == "flat" else 1500, "unseen": 50}
        assert tuned.found.recall > 0.95 and 0 < tuned.found.p50 <= tuned.found.p99
        search.effort = 1500
        for among, expected in ((None, truth), (400, of_some)):
            scores, rows = search.find_nearest(prepare_vectors(queries, metric), 10, among)
            assert rows.max() < (among or 1500)
            recall = np.isclose(scores[:, :, None], expected[:, None, :10], **tolerance).any(1).mean()
            assert recall > (0.999 if kind == "flat" else 0.97), kind
            own = prepare_vectors(base, metric)[rows]  # scores are exact, whatever proposed the rows
            asked = prepare_vectors(queries, metric)[:, None]
            again = np.linalg.norm(own - asked, axis=2) if metric == "l2" else (own * asked).sum(2)
            np.testing.assert_allclose(scores, again, **tolerance)
        search.effort = 1  # what is no chunk is compared with all, however little an index looks at
        scores, _ = search.find_exactly(prepare_vectors(queries, metric), 10, 400)
        np.testing.assert_allclose(scores, of_some[:, :10], **tolerance)
        everything, _ = search.find_nearest(prepare_vectors(queries, metric), 1500)
        np.testing.assert_allclose(everything, truth, rtol=1e-3, atol=1e-3)


def test_whole_vectors_are_compared_though_centred_ones_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_search, "PART", 64)
    base, queries = some(200, 13) + 3, some(20, 13, 1)
    mean = base[:50].mean(0)
    lengths = (np.linalg.norm(each, axis=1) for each in (base - mean, base))
    asked = prepare_vectors(queries, "cosine")
    scores, rows = search_uncentred(asked, prepare_vectors(base, "centred", mean), mean, *lengths, 7)
    np.testing.assert_allclose(scores, brute(base, queries, "cosine")[:, :7], atol=1e-5)
    np.testing.assert_allclose(scores, (asked[:, None] * prepare_vectors(base, "cosine")[rows]).sum(2), atol=1e-5)


def test_one_more_coordinate_makes_nearest_the_largest_product() -> None:
    base, queries = some(200, 13), some(20, 13, 1)
    longest = float(np.linalg.norm(base, axis=1).max())
    far = np.linalg.norm(
        augment_vectors(queries, "ip", 0.0, 16)[:, None] - augment_vectors(base, "ip", longest, 16), axis=2
    )
    products = queries @ base.T
    np.testing.assert_array_equal(far.argsort(1)[:, :5], (-products).argsort(1)[:, :5])


def test_a_recall_that_is_not_reached_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(faiss_search, "_PROBES", (1, 2))
    base = prepare_vectors(np.random.default_rng(0).normal(size=(3000, 16)).astype(np.float32), "cosine")
    build_faiss_index(tmp_path / "ivf", base, "cosine", "ivf", 1, 0)
    tuned = tune_effort(open_candidate(tmp_path / "ivf", base, "cosine", "ivf"), 0.99, base[:0], 0)
    assert "ivf: index.recall=0.99 was not reached" in caplog.text
    first, last = tuned.curve
    assert (first.effort, last.effort) == (1, 2) and first.recall < last.recall < 0.99


@pytest.mark.parametrize(
    ("number", "kind"), [(10, "flat"), (262_144, "flat"), (262_145, "hnsw"), (10**6, "hnsw"), (10**8, "ivfpq")]
)
def test_auto_goes_by_size(number: int, kind: str) -> None:
    assert kinds_to_try("auto", number, 256)[0] == kind and kinds_to_try("ivf", number, 256) == ("ivf",)


@pytest.mark.nightly
def test_auto_takes_the_next_type_where_one_finds_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_search, "FLAT_UP_TO", 100)
    base = prepare_vectors(some(3000, 16), "cosine")
    for links, kind in ((2, "ivf"), (32, "hnsw")):
        monkeypatch.setattr(faiss_search, "_LINKS", links)
        found = choose_index(tmp_path, base, "cosine", base[:0], IndexOptions(recall=0.999), 1, 0)
        assert found.kind == kind
        assert [path.name for path in tmp_path.iterdir()] == ["search.faiss"]


@pytest.mark.parametrize("kind", ["ivf", "ivfpq"])
def test_an_index_of_few_vectors_is_built_without_a_word(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build_faiss_index(tmp_path / "search.faiss", prepare_vectors(some(20, 16), "cosine"), "cosine", kind, 1, 0)
    assert capfd.readouterr() == ("", "")


def test_one_vector_can_be_asked() -> None:
    base = prepare_vectors(some(1, 4), "cosine")
    tuned = tune_effort(Vectors(base, "cosine"), 0.99, base[:0], 0)
    assert tuned.found.recall == 1 and Vectors(base, "cosine").find_nearest(base, 5)[1].tolist() == [[0]]
