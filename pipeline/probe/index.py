"""Stage `index`: write the vectors of a run, their table and the FAISS search over them.

`pipeline.run.spaces.stored` documents the files.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from data.durable import file_lock, replace_atomically
from pipeline.config import ConfigError
from pipeline.options import Options
from pipeline.run.folder import RunFolder, guard_results
from pipeline.run.index import check_chunks, known_count_threshold
from pipeline.run.metrics import ProgressCounter
from pipeline.run.opened import Run
from pipeline.run.shards import check_split
from pipeline.run.spaces.answers import display_chunk
from pipeline.run.spaces.stored import (
    SCORES,
    SEARCH,
    TABLE,
    VECTORS,
    IndexMetadata,
    IndexSummary,
    Metric,
    RandomPairScores,
    Space,
    VectorFile,
    choose_metric,
    finish_index,
    open_vectors,
    space_folder,
    write_vectors,
)
from pipeline.run.spaces.vectors import choose_index, prepare_vectors

_PAIRS = 4000


def write_table(run: Run, space: Space, tables: Iterable[Any]) -> None:
    """Write the table of a space from parts of one schema."""
    import pyarrow.parquet

    with replace_atomically(space_folder(run.folder, space) / TABLE) as file:
        writer = None
        try:
            for table in tables:
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
                writer.write_table(table)
        finally:  # otherwise the garbage collector tries to finish it, and prints an error
            if writer is not None:
                writer.close()


def build_search(run: Run, space: Space, metric: Metric, unseen: np.ndarray, known: int, **more: Any) -> IndexMetadata:
    """Build and tune the search over the written vectors, and finish the index.

    Args:
        run: run that is indexed.
        space: space that is indexed.
        metric: metric of the vectors.
        unseen: (m, E) vectors outside the index, used as queries for tuning.
        known: number of rows, from the first, that results are taken from.
        more: further fields of `IndexMetadata`.
    """
    place, limits = space_folder(run.folder, space), run.options.index
    vectors = open_vectors(place / VECTORS)
    tuned = choose_index(place, vectors, metric, unseen, limits, run.options.threads, run.options.seed)
    number, width = vectors.shape
    meta = IndexMetadata(
        folder=str(place),
        space=space,
        chunks=number,
        width=width,
        split=limits.split,
        stage=run.phase,
        step=run.step,
        kind=tuned.kind,
        metric=metric,
        found=tuned.found,
        curve=tuned.curve,
        queries=tuned.queries,
        recall=limits.recall,
        min_count=limits.min_count,
        max_chunks=limits.max_chunks,
        sha256={},
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        asked_stage=run.options.evaluate.stage,
        context=run.options.batch.context,
        chunker=run.chunker.name,
        chance=random_pair_scores(vectors, min(known, number), metric, run.options.seed),
        **more,
    )
    return finish_index(run.folder, meta, [VECTORS, TABLE] if tuned.kind == "flat" else [VECTORS, SEARCH, TABLE])


def random_pair_scores(
    vectors: np.ndarray | VectorFile, number: int, metric: Metric, seed: int
) -> RandomPairScores | None:
    """Score random pairs of the first `number` of vectors (n, E), drawn by the seed; return None for fewer than two."""
    if number < 2:
        return None
    chance = np.random.default_rng(seed)
    one = chance.integers(number, size=_PAIRS)
    other = (one + chance.integers(1, number, size=_PAIRS)) % number
    first, second = vectors[one], vectors[other]
    scores = np.linalg.norm(first - second, axis=1) if metric == "l2" else (first * second).sum(1)
    rare = np.percentile(scores, 1 if metric == "l2" else 99)
    return RandomPairScores(float(scores.mean()), float(scores.std()), float(rare))


if TYPE_CHECKING:
    from pipeline.run.opened import Run

log = logging.getLogger(__name__)
_AT_ONCE = 8192


@guard_results
def build_index(options: Options) -> IndexSummary:
    """Build the index of the space `index.space`.

    Raises:
        ConfigError: the model has no such space, or no chunk occurs `index.min_count` times.
        FileNotFoundError: there are no such shards, or nothing was trained.
        ValueError: the split is empty.
        BlockingIOError: another process is building it.
    """
    from pipeline.run.device import release_memory

    wanted = options.index.space
    space: Space = "contexts" if wanted == "contexts" else "chunks"
    if space == "chunks":
        check_chunks(options)
        if wanted == "predictions":
            log.info("predictions are asked for among chunks (haed neighbours RUN --after TEXT): chunks are indexed")
        if options.index.layer is not None or options.index.scale is not None:
            log.warning("index.layer and index.scale are of contexts, and change nothing here: --space contexts")
    from pipeline.run.opened import Run

    folder = RunFolder.from_options(options)
    run = Run(folder, options)
    split, corpus = options.index.split, folder.open_corpus()
    check_split(corpus.split_counts(split).chunks, corpus.location, "index.split", split)
    place = space_folder(folder, space)
    place.parent.mkdir(exist_ok=True)  # for the lock

    def refuse(holder: str) -> None:
        raise BlockingIOError(f"{place} is being built by {holder}; wait for it or stop it")

    with file_lock(place.with_name(f"{space}.lock"), refuse):
        if space == "contexts":
            from pipeline.probe.contexts import index_contexts

            found = index_contexts(run)
        else:
            found = _index_chunks(run)
    release_memory()
    return IndexSummary(**{name: getattr(found, name) for name in IndexSummary.__dataclass_fields__})


def _index_chunks(run: "Run") -> IndexMetadata:
    """Index the distinct chunks of a split of the run's corpus, the most frequent first."""
    from data.distinct import count_distinct_chunks

    limits, corpus = run.options.index, run.folder.open_corpus()
    least = limits.min_count or 1
    found = count_distinct_chunks(corpus, limits.split, most=limits.max_chunks, at_least=least)
    tokens, lengths, counts = found.tokens, found.lengths, found.counts
    if not len(counts):
        raise ConfigError(f"no chunk of the {limits.split} split occurs {least} times: lower index.min_count")
    if found.left_out:
        rest = f"{found.left_out:,} rarer or equally rare ones are left out"
        log.warning("index.max_chunks=%d: of the distinct chunks %s", limits.max_chunks, rest)
    norms, distances = np.empty((2, len(counts)), np.float32)
    log.info("embedding %s chunks of %s by %s step %s", f"{len(counts):,}", limits.split, run.phase, f"{run.step:,}")
    progress = ProgressCounter("index", len(counts), "chunks")
    metric = choose_metric(limits, "chunks")
    known = int((counts >= known_count_threshold(counts)).sum())
    mean = _mean_embedding(run, tokens, lengths, known) if metric == "centred" else None
    with write_vectors(space_folder(run.folder, "chunks"), run.options.model.encoder.width, metric) as file:
        for rows, vectors in _embed_batches(run, tokens, lengths):
            norms[rows] = np.linalg.norm(vectors, axis=1)
            if mean is not None:
                distances[rows] = np.linalg.norm(vectors - mean, axis=1)
            file.append_vectors(prepare_vectors(vectors, metric, mean))
            progress.add_done(len(vectors))

    import pyarrow

    kind = run.chunker.name
    texts = (display_chunk(row.tobytes()[:size], kind) for row, size in zip(tokens, lengths, strict=True))
    fixed = pyarrow.binary(tokens.shape[1])
    columns = {
        "text": pyarrow.array(texts, pyarrow.string()),
        "count": pyarrow.array(counts, pyarrow.int64()),
        "length": pyarrow.array(lengths.astype(np.int64)),
        "norm": pyarrow.array(norms),
        "tokens": pyarrow.FixedSizeBinaryArray.from_buffers(
            fixed, len(counts), [None, pyarrow.py_buffer(np.ascontiguousarray(tokens))]
        ),
    }
    if mean is not None:
        columns["from_mean"] = pyarrow.array(distances)
    write_table(run, "chunks", [pyarrow.table(columns)])
    others = count_distinct_chunks(corpus, "valid", most=4096) if limits.split != "valid" else None
    unseen = np.zeros((0, run.options.model.encoder.width), np.float32)
    if others is not None and len(others.counts):
        there = {row.tobytes() for row in np.column_stack([tokens, lengths])}
        new = [
            i for i, row in enumerate(np.column_stack([others.tokens, others.lengths])) if row.tobytes() not in there
        ]
        if new:
            unseen = prepare_vectors(run.embed_rows(others.tokens[new], others.lengths[new]), metric, mean)
    taken = None if mean is None else mean.tolist()
    return build_search(
        run, "chunks", metric, unseen, known, left_out=found.left_out, floor=known_count_threshold(counts), mean=taken
    )


def _embed_batches(run: "Run", tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Embed chunks, given as tokens (n, K) and lengths (n,), in batches; yield the rows and embeddings of each."""
    for begin in range(0, len(tokens), _AT_ONCE):
        rows = slice(begin, begin + _AT_ONCE)
        yield rows, run.embed_rows(tokens[rows], lengths[rows])


def _mean_embedding(run: "Run", tokens: np.ndarray, lengths: np.ndarray, known: int) -> np.ndarray:
    """Return the mean embedding (E,) float32 of the first `known` chunks, each counted once.

    Weighted by counts, a handful of chunks would dominate the mean. All chunks of the split give the same mean
    (docs/log.md).
    """
    summed = sum(
        vectors.sum(0, dtype=np.float64) for _, vectors in _embed_batches(run, tokens[:known], lengths[:known])
    )
    return np.asarray(summed / known, np.float32)


def describe_index(found: IndexSummary) -> str:
    """Describe a built index in text: its folder, its size and the quality of its search."""
    what = "chunks" if found.space == "chunks" else "contexts"
    option = "index.max_chunks" if found.space == "chunks" else "index.max_contexts"
    rarer = "rarer ones" if found.space == "chunks" else "others"
    left = f" ({found.left_out:,} {rarer} left out by {option})" if found.left_out else ""
    how = "exact search" if found.kind == "flat" else f"{found.kind} at effort {found.found.effort}"
    lines = [
        f"{found.folder}: {found.chunks:,} {what}{left}, {found.width} dimensions, {SCORES[found.metric]}",
        f"{how}: recall@10 {found.found.recall:.4f}, one query on one core {found.found.p50:.2f} ms (p99 {found.found.p99:.2f})",
    ]
    if found.floor > 1:
        lines.append(f"answers occur {found.floor} times or more, unless --min-count says otherwise")
    return "\n".join(lines)
