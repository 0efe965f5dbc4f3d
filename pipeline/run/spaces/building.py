"""Building an approximate index over the vectors of a file, and choosing how hard it searches."""

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.durable import replacing
from pipeline.options import IndexOptions
from pipeline.run.spaces.stored import SEARCH, Metric, Point, Rows
from pipeline.run.spaces.vectors import ALIGNED, CANDIDATES, PART, Vectors, augmented, cores, read

log = logging.getLogger(__name__)
FLAT_UP_TO, GRAPH_UP_TO = 1 << 26, 1 << 33  # numbers of all vectors together: 256 MB, and 8 GB of codes
NEAREST = 10  # recall is that of so many
QUERIES, TO_TUNE = 400, 1600  # of an index that has nothing to be tuned, and of others
SLACK = 0.005  # by which recall on the other half of the queries may fall short
_LINKS = 32  # of a graph's node, twice as many at its lowest level
_EFFORTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_PROBES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
_SAID = 30.0  # seconds between two lines


def kinds_to_try(kind: str, number: int, width: int) -> tuple[str, ...]:
    """The types of index that `auto` tries, for so many vectors of a width, until one finds as much as is wanted.

    Flat where exact search reads no more than 256 MB, some twenty milliseconds, and nothing is to be built. Then a graph, and if
    it does not find enough (hubs keep it from that, and queries far from everything) clusters, while 8-bit codes stay within
    8 GB; then clusters of product-quantised vectors.
    """
    if kind != "auto":
        return (kind,)
    return (
        ("flat",) if number * width <= FLAT_UP_TO else ("hnsw", "ivf") if number * width <= GRAPH_UP_TO else ("ivfpq",)
    )


def build(path: Path, vectors: np.ndarray | Rows, metric: Metric, kind: str, threads: int | None, seed: int) -> None:
    """Writes an approximate index of vectors (n, E), which may be `Rows`: a part of them is in memory at a time.

    Clusters are some 4·√n, found on 64 vectors for each, as FAISS's guidelines have it.
    """
    import faiss

    longest = 0.0
    if metric == "ip":
        longest = max(float(np.linalg.norm(vectors[i : i + PART], axis=1).max()) for i in range(0, len(vectors), PART))
    width = -(-(vectors.shape[1] + (metric == "ip")) // ALIGNED) * ALIGNED
    lists = max(1, min(int(4 * len(vectors) ** 0.5), len(vectors) // 40))
    made = faiss.index_factory(
        width,
        {
            "hnsw": f"HNSW{_LINKS},SQ8",
            "ivf": f"IVF{lists},SQ8",
            "ivfpq": f"IVF{lists},PQ{width // ALIGNED}x{8 if len(vectors) >= 10_000 else 4}",
        }[kind],
    )
    with cores(threads):
        some = np.random.default_rng(seed).permutation(len(vectors))[: max(64 * lists, 1 << 14)]
        made.train(augmented(vectors[np.sort(some)], metric, longest, width))
        began = said = time.monotonic()
        for begin in range(0, len(vectors), PART):
            made.add(augmented(vectors[begin : begin + PART], metric, longest, width))
            if (now := time.monotonic()) - said > _SAID:
                said, done = now, begin + PART
                left = (now - began) * (len(vectors) - done) / done
                log.info("%s of %s vectors are in the index, %.0f s left", f"{done:,}", f"{len(vectors):,}", left)
        with replacing(path) as file:
            faiss.write_index(made, faiss.PyCallbackIOWriter(file.write))


@dataclass
class Tuned:
    """The type of index and the effort that were chosen, what they find and cost, and the efforts that were tried."""

    kind: str
    found: Point
    curve: list[Point]
    queries: dict[str, int]


def tune(vectors: Vectors, recall: float, unseen: np.ndarray, seed: int) -> Tuned:
    """Chooses the smallest effort that reaches a recall, on one half of some queries; the other half says what it finds.

    Args:
        vectors: with an approximate index or without.
        recall: share of the exact ten nearest that are to be found.
        unseen: (m, E) vectors that the index does not have; the other queries are rows of it, which leave themselves out.
        seed: of their choice.
    """
    chance = np.random.default_rng(seed)
    number = QUERIES if vectors.kind == "flat" else TO_TUNE
    unseen = unseen[: number // 2]
    own = chance.permutation(len(vectors))[: number - len(unseen)]
    queries = np.concatenate([vectors.exact[own], unseen]).astype(np.float32)
    itself = np.concatenate([own, np.full(len(unseen), -1)])
    order = chance.permutation(len(queries))
    queries, itself = queries[order], itself[order]
    exact = Vectors(vectors.exact, vectors.metric)
    efforts: tuple[int, ...] = (0,)
    if vectors.kind != "flat":
        efforts = tuple(n for n in (_EFFORTS if vectors.kind == "hnsw" else _PROBES) if n <= max(16, vectors.lists))
    half = len(queries) // 2 if len(efforts) > 1 else 0
    truth: list[np.ndarray] = []
    if len(efforts) > 1:
        with cores(None):
            every = zip(*exact.nearest(queries, NEAREST + 1), itself, strict=True)
        truth = [scores[rows != own][:NEAREST] for scores, rows, own in every]
    curve, parts = [], (slice(0, half), slice(half, None))
    with cores(1):
        for effort in efforts:
            tried = [_point(vectors, queries[p], itself[p], truth[p], effort) for p in parts]
            curve.append(tried[1])
            if tried[0].recall >= recall:
                break
    if curve[-1].recall < recall:
        log.warning("%s: index.recall=%g was not reached, but %.4f", vectors.kind, recall, curve[-1].recall)
    return Tuned(vectors.kind, curve[-1], curve, {"rows": len(own), "unseen": len(unseen)})


def _point(vectors: Vectors, queries: np.ndarray, itself: np.ndarray, truth: list[np.ndarray], effort: int) -> Point:
    """Recall, and milliseconds of one query at a time; ties with the tenth count as found."""
    recalls, times = [], []
    for i in range(len(queries)):
        began = time.perf_counter()
        scores, rows = vectors.nearest(queries[i : i + 1], NEAREST + 1, effort=effort)
        times.append(1000 * (time.perf_counter() - began))
        if truth:
            recalls.append(_recall(scores[0], rows[0], truth[i], itself[i], vectors.metric == "l2"))
    p50, p99 = np.percentile(times, [50, 99]) if times else (0.0, 0.0)
    return Point(effort, float(np.mean(recalls)) if recalls else 1.0, float(p50), float(p99))


def _recall(scores: np.ndarray, rows: np.ndarray, truth: np.ndarray, itself: int, small: bool) -> float:
    """The share of the exact scores' number that is found with a score as good as theirs."""
    if not len(truth):
        return 1.0
    if small:
        scores, truth = -scores, -truth
    good = (rows >= 0) & (rows != itself) & (scores >= truth[-1] - 1e-5 * np.abs(truth).max())
    return min(1.0, float(good.sum()) / len(truth))


def choose(
    place: Path,
    vectors: np.ndarray | Rows,
    metric: Metric,
    unseen: np.ndarray,
    limits: IndexOptions,
    threads: int | None,
    seed: int,
) -> Tuned:
    """Builds and tunes the types of index that are asked for, and leaves the best as `search.faiss` unless it is flat.

    Args:
        place: folder of the space.
        vectors: (n, E), as `prepared` gives them.
        metric: of the scores.
        unseen: (m, E) vectors that the index does not have, to be asked for.
        limits: type and recall.
        threads: for building; None: all cores.
        seed: of what is trained on and asked for.
    """
    tried: list[tuple[bool, float, Tuned, Path]] = []
    for kind in kinds_to_try(limits.kind, *vectors.shape):
        path = place / f".{kind}.partial"
        if kind != "flat":
            log.info("building %s over %s vectors of width %d", kind, f"{len(vectors):,}", vectors.shape[1])
            build(path, vectors, metric, kind, threads, seed)
        tuned = tune(opened(path, vectors, metric, kind), limits.recall, unseen, seed)
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


def opened(path: Path, vectors: np.ndarray | Rows, metric: Metric, kind: str) -> Vectors:
    """What `build` wrote, or exact search."""
    return Vectors(vectors, metric, kind, read(path) if kind != "flat" else None)


assert set(CANDIDATES) == {"flat", "hnsw", "ivf", "ivfpq"}
