"""Change of the embeddings from one checkpoint to another, after rotation, reflection and scaling are removed.

Legend: n chunks, E width of an embedding.
"""

import numpy as np

from pipeline.analysis.geometry import find_nearest, normalise_rows
from pipeline.run.analysis_results import ChunkDrift, Drift

_MOVED = 12


def align_procrustes(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Centre and scale two sets of vectors (n, E), align the first with the second, and return both and their distance.

    This is the orthogonal Procrustes problem (Schönemann 1966). Hamilton et al. 2016 align word vectors of two
    periods the same way. The narrower set is padded with zeros.
    """
    width = max(source.shape[1], target.shape[1])
    a, b = (
        np.pad(each.astype(np.float64) - each.mean(0), ((0, 0), (0, width - each.shape[1])))
        for each in (source, target)
    )
    a, b = a / max(np.linalg.norm(a), 1e-300), b / max(np.linalg.norm(b), 1e-300)
    left, values, right = np.linalg.svd(a.T @ b)
    return a @ (left @ right), b, float(max(0.0, 1 - values.sum() ** 2))


def measure_drift(
    source: np.ndarray,
    target: np.ndarray,
    labels: list[str],
    before: str,
    after: str,
    queries: int = 1000,
    frequent: int = 2000,
    count: int = 10,
) -> Drift:
    """Compare the embeddings (n, E) that two checkpoints give the same chunks, the most frequent first.

    Args:
        source: embeddings by the first checkpoint.
        target: embeddings by the second checkpoint. Their width may differ.
        labels: the displayed chunks.
        before: name of the first checkpoint.
        after: name of the second checkpoint.
        queries: number of chunks whose neighbours are compared, spread evenly over the frequency ranks.
        frequent: number of the most frequent chunks from which the most and least moved are chosen.
        count: neighbours of each chunk.
    """
    moved, onto, distance = align_procrustes(source, target)
    cosines = (normalise_rows(moved) * normalise_rows(onto)).sum(1)
    rows = np.unique(np.linspace(0, len(source) - 1, min(queries, len(source))).astype(int))
    count = min(count, len(source) - 1)
    first, second = (find_nearest(each - each.mean(0), rows, count) for each in (source, target))
    order = np.argsort(cosines[:frequent], kind="stable")
    named = [ChunkDrift(labels[row], float(cosines[row])) for row in order]
    same_width = source.shape[1] == target.shape[1]
    return Drift(
        before=before,
        after=after,
        distance=distance,
        cosine=float(cosines.mean()),
        unaligned=float((normalise_rows(source) * normalise_rows(target)).sum(1).mean()) if same_width else None,
        neighbours=count,
        queries=len(rows),
        overlap=float((first[:, :, None] == second[:, None]).any(2).mean()),
        chance=count / (len(source) - 1),
        most=named[:_MOVED],
        least=named[: -_MOVED - 1 : -1],
    )
