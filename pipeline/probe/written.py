"""What the stage `index` writes beside the vectors of a space: the table, the search, and what is told of them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from data.durable import replacing
from pipeline.run.opened import Run
from pipeline.run.spaces.building import choose
from pipeline.run.spaces.stored import (
    SEARCH,
    TABLE,
    VECTORS,
    Chance,
    Meta,
    Metric,
    Rows,
    Space,
    finish,
    open_vectors,
    place_of,
)

_PAIRS = 4000


def write_table(run: Run, space: Space, tables: Iterable[Any]) -> None:
    """Writes the table of a space, given in parts of one schema."""
    import pyarrow.parquet

    with replacing(place_of(run.folder, space) / TABLE) as file:
        writer = None
        try:
            for table in tables:
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
                writer.write_table(table)
        finally:  # else it tries to be finished when it is collected, and says that it cannot
            if writer is not None:
                writer.close()


def searched(run: Run, space: Space, metric: Metric, unseen: np.ndarray, known: int, **more: Any) -> Meta:
    """Builds and tunes the search over the vectors that were written, and finishes the index.

    Args:
        run: of which it is.
        space: which.
        metric: of the vectors.
        unseen: (m, E) vectors that it does not have, to be asked for.
        known: rows that answers are taken from, the first ones.
        more: further fields of `Meta`.
    """
    place, limits = place_of(run.folder, space), run.options.index
    vectors = open_vectors(place / VECTORS)
    tuned = choose(place, vectors, metric, unseen, limits, run.options.threads, run.options.seed)
    number, width = vectors.shape
    meta = Meta(
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
        chance=by_chance(vectors, min(known, number), metric, run.options.seed),
        **more,
    )
    return finish(run.folder, meta, [VECTORS, TABLE] if tuned.kind == "flat" else [VECTORS, SEARCH, TABLE])


def by_chance(vectors: np.ndarray | Rows, number: int, metric: Metric, seed: int) -> Chance | None:
    """Scores of some pairs of the first `number` of vectors (n, E), drawn by the seed; None of fewer than two."""
    if number < 2:
        return None
    chance = np.random.default_rng(seed)
    one = chance.integers(number, size=_PAIRS)
    other = (one + chance.integers(1, number, size=_PAIRS)) % number
    first, second = vectors[one], vectors[other]
    scores = np.linalg.norm(first - second, axis=1) if metric == "l2" else (first * second).sum(1)
    rare = np.percentile(scores, 1 if metric == "l2" else 99)
    return Chance(float(scores.mean()), float(scores.std()), float(rare))
