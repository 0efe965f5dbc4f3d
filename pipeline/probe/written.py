"""What the stage `index` writes beside the vectors of a space: the table, the search, and what is told of them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from data.durable import replacing
from pipeline.run.opened import Run
from pipeline.run.spaces.building import choose
from pipeline.run.spaces.stored import SEARCH, TABLE, VECTORS, Meta, Metric, Space, finish, mapped, place_of


def write_table(run: Run, space: Space, tables: Iterable[Any]) -> None:
    """Writes the table of a space, given in parts of one schema."""
    import pyarrow.parquet

    with replacing(place_of(run.folder, space) / TABLE) as file:
        writer = None
        for table in tables:
            writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
            writer.write_table(table)
        if writer is not None:
            writer.close()


def searched(run: Run, space: Space, metric: Metric, unseen: np.ndarray, **more: Any) -> Meta:
    """Builds and tunes the search over the vectors that were written, and finishes the index.

    Args:
        run: of which it is.
        space: which.
        metric: of the vectors.
        unseen: (m, E) vectors that it does not have, to be asked for.
        more: further fields of `Meta`.
    """
    place, limits = place_of(run.folder, space), run.options.index
    vectors = mapped(place / VECTORS)
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
        asked_stage=run.options.evaluate.stage,
        chunker=run.chunker.name,
        **more,
    )
    return finish(run.folder, meta, [VECTORS, TABLE] if tuned.kind == "flat" else [VECTORS, SEARCH, TABLE])
