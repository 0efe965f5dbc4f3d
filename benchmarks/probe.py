"""Compare nearest-neighbour searches among a million vectors of width 256: `auto`, exact search, hnswlib and usearch.

    python benchmarks/probe.py [--vectors 1000000] [--queries 300] [--threads 2] [--run runs/quickstart] [--output FOLDER]
        [--only "haed auto" hnswlib "usearch i8"]

With a run, the vectors are rows of its index of chunks, each as often as is needed, plus noise. The noise is as large a
share of a vector's length as the distance to its nearest neighbours is in the index. So they lie as embeddings do. Without
a run they are mixtures of clusters of different sizes around a few directions, which spread like word vectors. All are of
unit length. Queries are drawn in the same way, and are in no index.

Every search gets one query at a time on one thread, and all take turns, query by query. Builds use `--threads`. Each build
has a process of its own. Its memory is the peak beyond what the process had before. Vectors are mapped from a file for
ours, and in memory for the others, which copy them.

hnswlib and usearch are optional: `pip install --no-deps -r benchmarks/peers.txt`.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

NEAREST, WIDTH, PART = 10, 256, 1 << 14
SHARE = 0.5  # length of the noise, of that of a vector
Search = Callable[[np.ndarray, int], np.ndarray]


def draw_vectors(number: int, run: Path | None, seed: int) -> np.ndarray:
    """Draw unit vectors (n, 256) in float32, see the module; the base is the same for every seed."""
    chance, fixed = np.random.default_rng(seed), np.random.default_rng(0)
    if run is not None:
        from pipeline.run.index.chunk_index import ChunkIndex
        from pipeline.run.run_directory import RunFolder

        base = ChunkIndex(RunFolder(run)).vectors[:]
    else:
        base = fixed.normal(size=(20_000, 32)) @ fixed.normal(size=(32, WIDTH))
        base = (base / np.linalg.norm(base, axis=1, keepdims=True)).astype(np.float32)
    vectors = np.empty((number, base.shape[1]), np.float32)
    for begin in range(0, number, PART):
        size = min(PART, number - begin)
        rows = base[(len(base) * chance.random(size) ** 2).astype(int)]  # clusters of different sizes
        noise = chance.normal(size=rows.shape).astype(np.float32) * SHARE / rows.shape[1] ** 0.5
        vectors[begin : begin + size] = (rows + noise) / np.linalg.norm(rows + noise, axis=1, keepdims=True)
    return vectors


def build_auto_index(vectors: np.ndarray, place: Path, threads: int) -> dict[str, Any]:
    from dataclasses import asdict

    from pipeline.config import IndexOptions
    from pipeline.run.index.faiss_search import choose_index

    return asdict(choose_index(place, vectors, "cosine", vectors[:0], IndexOptions(), threads, 0))


def build_hnswlib(vectors: np.ndarray, place: Path, threads: int) -> dict[str, Any]:
    import hnswlib

    index = hnswlib.Index("cosine", vectors.shape[1])
    index.init_index(len(vectors), ef_construction=40, M=32, random_seed=0)
    index.set_num_threads(threads)
    for begin in range(0, len(vectors), PART):
        index.add_items(np.array(vectors[begin : begin + PART]))
    index.save_index(str(place / "hnswlib"))
    return {}


def build_usearch(vectors: np.ndarray, place: Path, threads: int) -> dict[str, Any]:
    from usearch.index import Index

    index = Index(ndim=vectors.shape[1], metric="cos", dtype="i8", connectivity=32, expansion_add=40)
    for begin in range(0, len(vectors), PART):
        part = np.array(vectors[begin : begin + PART])
        index.add(np.arange(begin, begin + len(part)), part, threads=threads)
    index.save(str(place / "usearch"))
    return {}


BUILDS = {"haed auto": build_auto_index, "hnswlib": build_hnswlib, "usearch i8": build_usearch}


def build_in_process(name: str, place: str, number: int, width: int, threads: int) -> dict[str, Any]:
    """Build an index in a process of its own, and return its description with seconds and the peak of its memory in GB."""
    import faiss  # noqa: F401

    vectors = np.memmap(f"{place}/vectors", np.float32, "r", shape=(number, width)).view(np.ndarray)
    before, began = read_anonymous_memory(), time.perf_counter()
    index = BUILDS[name](vectors, Path(place), threads)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "peak": peak / 1e9, "anonymous": (read_anonymous_memory() - before) / 1e9} | index


def read_anonymous_memory() -> float:
    """Return the bytes of this process that are in memory and not of a file."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * float(lines["RssAnon"].split()[0])


def open_searches(place: Path, vectors: np.ndarray, builds: dict[str, dict[str, Any]]) -> dict[tuple[str, int], Search]:
    """Return a search for each name and effort, which maps a query (1, E) to rows (10,)."""
    import faiss

    from pipeline.run.index.faiss_search import Vectors, open_candidate

    exact = Vectors(vectors, "cosine")
    searches: dict[tuple[str, int], Search] = {("exact", 0): lambda q, n: exact.find_nearest(q, n)[1][0]}
    faiss.omp_set_num_threads(1)
    ours = builds["haed auto"]
    index = open_candidate(place / "search.faiss", vectors, "cosine", ours["kind"])
    for effort in (point["effort"] for point in ours["curve"]):
        searches["haed auto", effort] = lambda q, n, e=effort: index.find_nearest(q, n, effort=e)[1][0]
    if "hnswlib" in builds:
        import hnswlib

        theirs = hnswlib.Index("cosine", vectors.shape[1])
        theirs.load_index(str(place / "hnswlib"))
        theirs.set_num_threads(1)

        def ask(effort: int, query: np.ndarray, count: int) -> np.ndarray:
            theirs.set_ef(effort)
            return theirs.knn_query(query, count)[0][0]

        searches |= {("hnswlib", effort): partial(ask, effort) for effort in (16, 32, 48, 64, 96, 128, 256)}
    if "usearch i8" in builds:
        from usearch.index import Index

        other = Index.restore(str(place / "usearch"))
        assert other is not None

        def ask_usearch(effort: int, query: np.ndarray, count: int) -> np.ndarray:
            other.expansion_search = effort
            return other.search(query[0], count, threads=1).keys

        searches |= {("usearch i8", effort): partial(ask_usearch, effort) for effort in (16, 32, 64, 128, 256, 512)}
    return searches


def measure_searches(
    searches: dict[tuple[str, int], Search], vectors: np.ndarray, queries: np.ndarray
) -> Iterator[str]:
    """Yield a table row of each search: recall@10 by exact scores, and milliseconds. They take turns, query by query."""
    times, recalls = ({each: list[float]() for each in searches} for _ in range(2))
    for query in queries:
        truth = None
        for each, search in searches.items():
            began = time.perf_counter()
            nearest = search(query[None], NEAREST)
            times[each].append(1000 * (time.perf_counter() - began))
            scores = np.sort(vectors[nearest.astype(int)] @ query)[::-1]
            truth = scores if truth is None else truth
            recalls[each].append((scores >= truth[-1] - 1e-6).mean())
    for name, effort in searches:
        p50, p99 = np.percentile(times[name, effort], [50, 99])
        yield f"| {name} | {effort} | {np.mean(recalls[name, effort]):.4f} | {p50:.3f} | {p99:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2, help="for building")
    parser.add_argument("--run", type=Path, help="a run with an index of chunks, whose embeddings the vectors are like")
    parser.add_argument("--output", type=Path, help="a folder for vectors and indexes (default: a temporary one)")
    parser.add_argument("--only", nargs="+", choices=list(BUILDS), default=list(BUILDS))
    arguments = parser.parse_args()
    place = arguments.output or Path(tempfile.mkdtemp(prefix="probe-"))
    place.mkdir(parents=True, exist_ok=True)
    vectors = draw_vectors(arguments.vectors, arguments.run, 1)
    vectors.tofile(place / "vectors")
    queries, shape = draw_vectors(arguments.queries, arguments.run, 2), vectors.shape
    del vectors
    print(
        f"{shape[0]:,} vectors of width {shape[1]}, like {arguments.run or 'mixtures of clusters'}; {len(queries)} queries"
    )
    builds: dict[str, dict[str, Any]] = {}
    for name in arguments.only:
        try:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                of = builds[name] = pool.submit(
                    build_in_process, name, str(place), shape[0], shape[1], arguments.threads
                ).result()
        except (ImportError, BrokenProcessPool) as error:
            print(f"{name}: not measured ({error})")
            continue
        print(
            f"{name}: built in {of['seconds']:.0f} s, peak {of['peak']:.2f} GB, {of['anonymous']:.2f} GB of it its own",
            flush=True,
        )
    vectors = np.memmap(place / "vectors", np.float32, "r", shape=shape).view(np.ndarray)
    rows = measure_searches(open_searches(place, vectors, builds), vectors, queries)
    print("| search | effort | recall@10 | p50, ms | p99, ms |\n|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
