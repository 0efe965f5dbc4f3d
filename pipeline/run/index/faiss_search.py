"""Nearest vectors: exact search over a file, and approximate indexes whose proposals are reranked exactly.

Whatever the type of an index, its vectors are in one flat file, in the order of the table. An approximate index holds
codes of 8 bits a coordinate (`ivfpq`: 8 bits for 8 coordinates) and only proposes candidates. It proposes several times
as many as are requested, and their exact scores decide. So scores are exact, codes take a quarter of the memory, and
recall is lost only if a neighbour is not proposed.

The metric `centred` is the cosine of vectors less their mean, so that their common part hides no difference (Mu &
Viswanath 2018, "All-but-the-top"). Vectors are stored without the mean and with unit length, so they are searched as
for the cosine.

All approximate indexes use Euclidean distances. For unit vectors (`centred`, `cosine`) these give the order of cosines.
Graphs and clusters need a metric, so inner products get one more coordinate: √(φ² − |x|²) with φ the largest norm, and
0 in a query. Then the nearest vector has the largest product (Bachrach et al. 2014, "Speeding up the Xbox recommender
system using a Euclidean transformation for inner-product spaces").

The module also builds approximate indexes over the vectors of a file, and tunes the effort of their searches.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from data.filesystem import CorruptFileError, add_path_to_errors, open_file, replace_atomically
from data.processes import available_threads, free_memory
from pipeline.config import IndexOptions
from pipeline.run.files import ChecksumCache
from pipeline.run.index.storage import SEARCH, IndexFiles, Metric, SearchPoint, VectorFile, explain_damage
from pipeline.run.metrics import ProgressCounter

log = logging.getLogger(__name__)
PART = 1 << 14  # vectors at a time
ALIGNED = 8  # coordinates: widths are filled up to a multiple with zeros, as product quantisation needs
CANDIDATES = {"flat": 1, "hnsw": 3, "ivf": 3, "ivfpq": 20}  # for each vector that is asked for
_FEW = 1 << 15  # rows: among so few exact search is as quick
_LOCK = threading.Lock()  # of FAISS's number of threads, which is that of the process
_SHARE = 8  # of all rows, among fewer than one in so many a graph finds too little
_IS_MACOS = sys.platform == "darwin"


def load_faiss() -> Any:
    """Import FAISS.

    Its wheels for macOS bring an OpenMP library, and so do PyTorch's. There the second library ends the process unless
    KMP_DUPLICATE_LIB_OK is set, and threads of both crash. So PyTorch's comes first, and FAISS computes with one thread.
    """
    if _IS_MACOS:
        import torch  # noqa: F401

        os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "TRUE")
    import faiss

    if _IS_MACOS:
        faiss.omp_set_num_threads(1)
    return faiss


def prepare_vectors(vectors: np.ndarray, metric: Metric, mean: np.ndarray | None = None) -> np.ndarray:
    """Prepare vectors (n, E) for an index: subtract the mean (E,) if given, and normalise them for cosines."""
    if mean is not None:
        vectors = vectors - mean
    if metric in ("centred", "cosine"):
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    return np.ascontiguousarray(vectors, np.float32)


class Vectors:
    """Searchable vectors, with an approximate index if there is one.

    Attributes:
        exact: (n, E) float32, as returned by `prepare_vectors`.
        metric: metric of the scores.
        kind: type of the approximate index; flat if there is none.
        effort: effort of its searches, see `SearchPoint`.
    """

    def __init__(
        self, exact: np.ndarray | VectorFile, metric: Metric, kind: str = "flat", search: Any = None, effort: int = 0
    ) -> None:
        self.exact, self.metric, self.kind, self.effort, self._search = exact, metric, kind, effort, search

    @classmethod
    def open(cls, files: IndexFiles) -> "Vectors":
        """Open the vectors of a space, with the approximate index if this user built it here.

        See `pipeline.run.index.storage` for the reason.
        """
        meta = files.meta
        if meta.kind == "flat":
            return cls(files.vectors, meta.metric)
        path = files.place / SEARCH
        if not ChecksumCache(files.place).is_built_here(SEARCH):
            why = "was not built by you on this machine, so it is not read. Exact search is used, which is slower"
            log.warning("%s %s. %s", path, why, files.again)
            return cls(files.vectors, meta.metric)
        if (size := path.stat().st_size) > (free := free_memory()):
            sizes = f"has {size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of memory are free"
            log.warning("%s %s. Exact search is used, which is slower", path, sizes)
            return cls(files.vectors, meta.metric)
        with explain_damage(files.place, files.again):
            return cls(files.vectors, meta.metric, meta.kind, read_index(path), meta.found.effort)

    def __len__(self) -> int:
        return len(self.exact)

    def find_nearest(
        self, queries: np.ndarray, count: int, among: int | None = None, effort: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the nearest of the first rows to each query.

        Args:
            queries: (q, E) float32, as returned by `prepare_vectors`.
            count: maximum number of results for each.
            among: search only rows before this one.
            effort: effort of this search; None is the index's.

        Returns:
            Scores (q, n) float32, the best first (for l2 the smallest distance), and rows (q, n), with n the smaller of
            `count` and `among`. If an approximate index proposes fewer, the search is exact.
        """
        among = len(self.exact) if among is None else among
        few = among < len(self.exact) and among <= max(_FEW, len(self.exact) // _SHARE)
        if self._search is None or few or count > among // 4:
            return self.find_exactly(queries, count, among)
        faiss = load_faiss()

        selected = faiss.IDSelectorRange(0, among) if among < len(self.exact) else None
        wanted, effort = count * CANDIDATES[self.kind], effort or self.effort
        if self.kind == "hnsw":
            parameters = faiss.SearchParametersHNSW(sel=selected, efSearch=max(effort, wanted))
        else:
            parameters = faiss.SearchParametersIVF(sel=selected, nprobe=effort)
        augmented = augment_vectors(queries, self.metric, 0.0, self._search.d)
        _, rows = self._search.search(augmented, wanted, params=parameters)
        if ((rows >= 0).sum(1) < count).any():  # FAISS fills up with -1
            return self.find_exactly(queries, count, among)
        return self._rerank_rows(queries, rows, count)

    def find_exactly(self, queries: np.ndarray, count: int, among: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the nearest rows as `find_nearest` does, by comparing each query with all rows."""
        faiss = load_faiss()

        is_l2 = self.metric == "l2"
        metric = faiss.METRIC_L2 if is_l2 else faiss.METRIC_INNER_PRODUCT
        step = among if isinstance(self.exact, np.ndarray) else PART
        parts = []
        for begin in range(0, among, step):
            vectors = self.exact[begin : min(begin + step, among)]
            scores, rows = faiss.knn(queries, vectors, min(count, len(vectors)), metric=metric)
            parts.append((scores, rows + begin))
        scores, rows = (np.concatenate(each, 1) for each in zip(*parts, strict=True))
        if len(parts) > 1:
            scores, rows = _take_best(scores, rows, count, is_l2)
        return (np.sqrt(np.maximum(scores, 0)) if is_l2 else scores), rows

    def _rerank_rows(self, queries: np.ndarray, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best `count` of proposed rows (q, n), by their exact scores."""
        near = self.exact[rows]  # (q, n, E); of rows that were not found those of the last, whose score is replaced
        is_l2 = self.metric == "l2"
        scores = np.linalg.norm(near - queries[:, None], axis=2) if is_l2 else np.einsum("qne,qe->qn", near, queries)
        scores[rows < 0] = np.inf if is_l2 else -np.inf
        return _take_best(scores, rows, count, is_l2)


def _take_best(scores: np.ndarray, rows: np.ndarray, count: int, small: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the best `count` of scores (q, n), which are the smallest if `small`, and their rows."""
    order = np.argsort(scores if small else -scores, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def search_uncentred(
    queries: np.ndarray,
    vectors: np.ndarray | VectorFile,
    mean: np.ndarray,
    distances: np.ndarray,
    norms: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest of centred vectors by the cosine of the uncentred ones, exactly.

    Args:
        queries: (q, E) of unit length, without centring.
        vectors: (n, E) of unit length, centred; further rows are ignored.
        mean: (E,) mean that was subtracted.
        distances: (n,) norms of the vectors less the mean.
        norms: (n,) norms of the vectors with the mean.
        count: maximum number m of results.

    Returns:
        Scores and rows (q, m), the best first.
    """
    scores: np.ndarray = np.zeros((len(queries), 0), np.float32)
    rows: np.ndarray = np.zeros((len(queries), 0), np.int64)
    for begin in range(0, len(distances), PART):
        part = slice(begin, min(begin + PART, len(distances)))
        products = queries @ vectors[part].T * distances[part] + (queries @ mean)[:, None]
        scores = np.concatenate([scores, products / norms[part].clip(1e-12)], 1)
        rows = np.concatenate([rows, np.broadcast_to(np.arange(begin, begin + products.shape[1]), products.shape)], 1)
        scores, rows = _take_best(scores, rows, count, small=False)
    return scores, rows


def augment_vectors(vectors: np.ndarray, metric: Metric, longest: float, width: int) -> np.ndarray:
    """Return vectors (n, E) with the extra coordinate for inner products, padded with zeros to a width.

    Args:
        vectors: vectors of an index, or queries.
        metric: metric of the scores.
        longest: largest norm of the index; 0 for queries.
        width: width of the result.
    """
    augmented = np.zeros((len(vectors), width), np.float32)
    augmented[:, : vectors.shape[1]] = vectors
    if metric == "ip" and longest:
        rest = longest**2 - np.einsum("ne,ne->n", vectors, vectors, dtype=np.float64)
        augmented[:, vectors.shape[1]] = np.sqrt(rest.clip(0))
    return augmented


def read_index(path: Path) -> Any:
    """Read an approximate index that was built here.

    Raises:
        ValueError: the file is truncated or not an index.
        OSError: it cannot be read.
    """
    faiss = load_faiss()

    with add_path_to_errors(path), open_file(path) as file:
        try:
            return faiss.read_index(faiss.PyCallbackIOReader(file.read))
        except RuntimeError as error:  # with FAISS's own place in its code
            raise CorruptFileError(f"{path} is damaged: it is truncated or not an index") from error


@contextmanager
def limit_threads(number: int | None) -> Iterator[None]:
    """Set the number of FAISS threads for the length of the context; None is as many as this process may use."""
    faiss = load_faiss()

    with _LOCK:
        before = faiss.omp_get_max_threads()
        wanted = number or min(before, available_threads())
        faiss.omp_set_num_threads(1 if _IS_MACOS else wanted)  # see `load_faiss`
        try:
            yield
        finally:
            faiss.omp_set_num_threads(before)


FLAT_UP_TO, GRAPH_UP_TO = 1 << 26, 1 << 33  # numbers of all vectors together: 256 MB, and 8 GB of codes
NEAREST = 10  # recall is that of so many
QUERIES, TO_TUNE = 400, 1600  # of an index that has nothing to be tuned, and of others
SLACK = 0.005  # by which recall on the other half of the queries may fall short
_LINKS = 32  # of a graph's node, twice as many at its lowest level
_EFFORTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_PROBES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)


def kinds_to_try(kind: str, number: int, width: int) -> tuple[str, ...]:
    """Return the types of index that are tried in turn until one reaches the requested recall.

    `auto` is flat up to 256 MB of vectors: exact search takes some twenty milliseconds, and nothing is built. Up to 8
    GB of 8-bit codes it is a graph. If the graph finds too little, because of hubs or of queries far from everything,
    clusters are tried. Beyond 8 GB it is clusters of product-quantised vectors.
    """
    if kind == "ivfpq" and number < 16:
        log.warning("index.kind=ivfpq needs 16 vectors, and there are %d, so the search is exact (flat)", number)
        return ("flat",)
    if kind != "auto":
        return (kind,)
    if number * width <= FLAT_UP_TO:
        return ("flat",)
    return ("hnsw", "ivf") if number * width <= GRAPH_UP_TO else ("ivfpq",)


def build_faiss_index(
    path: Path, vectors: np.ndarray | VectorFile, metric: Metric, kind: str, threads: int | None, seed: int
) -> None:
    """Build an approximate index of vectors (n, E) and write it; only a part of `VectorFile` is in memory at a time.

    There are some 4·√n clusters, trained on 64 vectors each, as FAISS's guidelines recommend.
    """
    faiss = load_faiss()

    longest = 0.0
    if metric == "ip":
        longest = max(float(np.linalg.norm(vectors[i : i + PART], axis=1).max()) for i in range(0, len(vectors), PART))
    width = -(-(vectors.shape[1] + (metric == "ip")) // ALIGNED) * ALIGNED
    lists = max(1, min(int(4 * len(vectors) ** 0.5), len(vectors) // 40))
    factory = {
        "hnsw": f"HNSW{_LINKS},SQ8",
        "ivf": f"IVF{lists},SQ8",
        "ivfpq": f"IVF{lists},PQ{width // ALIGNED}x{8 if len(vectors) >= 10_000 else 4}",
    }
    index = faiss.index_factory(width, factory[kind])
    clusterings = {"hnsw": (), "ivf": ("cp",), "ivfpq": ("cp", "pq.cp")}[kind]
    for name in clusterings:  # few vectors are no reason for FAISS to warn
        attrgetter(name)(index).min_points_per_centroid = 1
    with limit_threads(threads):
        some = np.random.default_rng(seed).permutation(len(vectors))[: max(64 * lists, 1 << 14)]
        index.train(augment_vectors(vectors[np.sort(some)], metric, longest, width))
        progress = ProgressCounter(f"build {kind}", len(vectors), "vectors")
        for begin in range(0, len(vectors), PART):
            part = vectors[begin : begin + PART]
            index.add(augment_vectors(part, metric, longest, width))
            progress.add_done(len(part))
        with replace_atomically(path) as file:
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))


@dataclass
class TuningResult:
    """The chosen type of index and effort, their recall and latency, and the efforts that were tried."""

    kind: str
    found: SearchPoint
    curve: list[SearchPoint]
    queries: dict[str, int]


def tune_effort(vectors: Vectors, recall: float, unseen: np.ndarray, seed: int) -> TuningResult:
    """Choose the smallest effort that reaches a recall on one half of some queries, and measure it on the other half.

    FAISS's `ParameterSpace` measures the order of the codes' own distances, without the exact scores of candidates. Among
    100,000 vectors it reached a recall of 0.975 with a graph and 0.987 with clusters at any effort; this search reaches
    0.99 at efforts of 128 and 6.

    Args:
        vectors: vectors with or without an approximate index.
        recall: requested share of the exact ten nearest.
        unseen: (m, E) vectors that the index does not have; the other queries are rows of it, which exclude themselves.
        seed: seed of the choice of queries.
    """
    chance = np.random.default_rng(seed)
    number = QUERIES if vectors.kind == "flat" else TO_TUNE
    unseen = unseen[: number // 2]
    indexed = chance.permutation(len(vectors))[: number - len(unseen)]
    queries = np.concatenate([vectors.exact[indexed], unseen]).astype(np.float32)
    itself = np.concatenate([indexed, np.full(len(unseen), -1)])
    order = chance.permutation(len(queries))
    queries, itself = queries[order], itself[order]
    efforts: tuple[int, ...] = (0,)
    truth: list[np.ndarray] = []
    half = 0
    if vectors.kind != "flat":
        most = max(16, getattr(vectors._search, "nlist", len(vectors)))  # clusters; a graph has none
        efforts = tuple(n for n in (_EFFORTS if vectors.kind == "hnsw" else _PROBES) if n <= most)
        with limit_threads(None):
            every = zip(*vectors.find_exactly(queries, NEAREST + 1, len(vectors)), itself, strict=True)
        truth = [scores[rows != indexed][:NEAREST] for scores, rows, indexed in every]
        half = len(queries) // 2
    curve, parts = [], (slice(0, half), slice(half, None))
    with limit_threads(1):
        for effort in efforts:
            tried = [_measure_effort(vectors, queries[p], itself[p], truth[p], effort) for p in parts]
            curve.append(tried[1])
            if tried[0].recall >= recall:
                break
    if curve[-1].recall < recall:
        log.warning("%s: index.recall=%g was not reached; the recall is %.4f", vectors.kind, recall, curve[-1].recall)
    return TuningResult(vectors.kind, curve[-1], curve, {"rows": len(indexed), "unseen": len(unseen)})


def _measure_effort(
    vectors: Vectors, queries: np.ndarray, itself: np.ndarray, truth: list[np.ndarray], effort: int
) -> SearchPoint:
    """Measure recall, and milliseconds of one query at a time; ties with the tenth count as found."""
    recalls, times = [], []
    for i in range(len(queries)):
        began = time.perf_counter()
        scores, rows = vectors.find_nearest(queries[i : i + 1], NEAREST + 1, effort=effort)
        times.append(1000 * (time.perf_counter() - began))
        if truth:
            recalls.append(_measure_recall(scores[0], rows[0], truth[i], itself[i], vectors.metric == "l2"))
    p50, p99 = np.percentile(times, [50, 99]) if times else (0.0, 0.0)
    return SearchPoint(effort, float(np.mean(recalls)) if recalls else 1.0, float(p50), float(p99))


def _measure_recall(scores: np.ndarray, rows: np.ndarray, truth: np.ndarray, itself: int, small: bool) -> float:
    """Return the share of the exact results for which the search found one with as good a score."""
    if not len(truth):
        return 1.0
    if small:
        scores, truth = -scores, -truth
    good = (rows >= 0) & (rows != itself) & (scores >= truth[-1] - 1e-5 * np.abs(truth).max())
    return min(1.0, float(good.sum()) / len(truth))


def choose_index(
    place: Path,
    vectors: np.ndarray | VectorFile,
    metric: Metric,
    unseen: np.ndarray,
    limits: IndexOptions,
    threads: int | None,
    seed: int,
) -> TuningResult:
    """Build and tune the requested types of index, and leave the best as `search.faiss` unless it is flat.

    Args:
        place: folder of the space.
        vectors: (n, E), as returned by `prepare_vectors`.
        metric: metric of the scores.
        unseen: (m, E) vectors that the index does not have, used as queries.
        limits: type and recall.
        threads: threads for building; None is all cores.
        seed: seed of the choice of training vectors and queries.
    """
    tried: list[tuple[bool, float, TuningResult, Path]] = []
    for kind in kinds_to_try(limits.kind, *vectors.shape):
        path = place / f".{kind}.partial"
        if kind != "flat":
            log.info("building %s over %s vectors of width %d", kind, f"{len(vectors):,}", vectors.shape[1])
            build_faiss_index(path, vectors, metric, kind, threads, seed)
        tuned = tune_effort(open_candidate(path, vectors, metric, kind), limits.recall, unseen, seed)
        reached = tuned.found.recall >= limits.recall - SLACK
        tried.append((reached, -tuned.found.p50 if reached else tuned.found.recall, tuned, path))
        if reached:
            break
    *_, best, chosen = max(tried, key=lambda each: each[:2])
    if best.kind != "flat":
        os.replace(chosen, place / SEARCH)
    for *_, path in tried:
        path.unlink(missing_ok=True)
    return best


def open_candidate(path: Path, vectors: np.ndarray | VectorFile, metric: Metric, kind: str) -> Vectors:
    """Open the index that `build_faiss_index` wrote, or exact search if `kind` is flat."""
    return Vectors(vectors, metric, kind, read_index(path) if kind != "flat" else None)
