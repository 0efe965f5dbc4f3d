"""The stage `neighbours`: questions to the index of a run; see `pipeline.run.index` for what may be asked."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.options import Options
from pipeline.run.folder import RunFolder
from pipeline.run.index import Index, Neighbours, check_chunks
from pipeline.shown import visible


def neighbours(options: Options, queries: Sequence[str | bytes] = (), count: int = 8) -> list[Neighbours]:
    """The nearest chunks of the index to each query.

    A query that the corpus has is looked up without the model, which is opened to embed any other.

    Raises:
        ConfigError: the model embeds no chunk by itself.
        FileNotFoundError: the run has no index yet.
        ValueError: a query is none, or the index is damaged, or of another checkpoint.
    """
    check_chunks(options)
    folder = RunFolder.of(options)
    folder.check(options)
    asked = options.evaluate.stage
    index = Index.open(folder, folder.digest(asked) if asked else None)

    def embed(chunks: list[bytes]) -> np.ndarray:
        from pipeline.run.opened import Run

        of_index = replace(options, evaluate=replace(options.evaluate, stage=index.meta.stage))
        return Run(folder, of_index).embed(chunks)

    return index.nearest(queries, count, embed)


def table(found: list[Neighbours]) -> str:
    """Neighbours as text, with white space made visible."""
    lines = []
    for item in found:
        lines.append(visible(item.query))
        lines += [f"  {n.score:6.3f}  {n.count:>9,}  {visible(n.text)}" for n in item.neighbours]
    return "\n".join(lines)
