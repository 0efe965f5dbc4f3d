"""How embeddings changed from one checkpoint to another, once what tells nothing is taken off: turning, mirroring and scaling.

Legend: n chunks, E width of an embedding.
"""

from dataclasses import dataclass, field

import numpy as np

from pipeline.probe.analyse.geometry import nearest, unit

_MOVED = 12


@dataclass
class Moved:
    """A chunk, for people, and the cosine of what it was, turned, with what it is."""

    chunk: str
    cosine: float


@dataclass
class Drift:
    """What changed.

    Attributes:
        before: the checkpoint that it is measured from, for people.
        after: the one it is measured to.
        distance: of both clouds after the best turn, 0 (the same) to 1 (nothing in common): Procrustes' statistic.
        cosine: mean of a chunk's cosine with itself after that turn.
        unaligned: the same without a turn; None where the widths differ.
        neighbours: of each chunk that are compared, by the centred cosine.
        queries: chunks whose neighbours are compared.
        overlap: share of the neighbours that are the same.
        chance: that share if nothing were left.
        most: the chunks that moved most, among those compared.
        least: those that moved least.
    """

    before: str
    after: str
    distance: float
    cosine: float
    unaligned: float | None
    neighbours: int
    queries: int
    overlap: float
    chance: float
    most: list[Moved] = field(default_factory=list)
    least: list[Moved] = field(default_factory=list)


def turned(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Two clouds (n, E), centred and scaled to the same size, the first turned onto the second; and the distance left.

    The orthogonal Procrustes problem (Schönemann 1966), as Hamilton et al. 2016 align word vectors of two times; the narrower
    cloud is filled up with zeros.
    """
    width = max(source.shape[1], target.shape[1])
    a, b = (
        np.pad(each.astype(np.float64) - each.mean(0), ((0, 0), (0, width - each.shape[1])))
        for each in (source, target)
    )
    a, b = a / max(np.linalg.norm(a), 1e-300), b / max(np.linalg.norm(b), 1e-300)
    left, values, right = np.linalg.svd(a.T @ b)
    return a @ (left @ right), b, float(max(0.0, 1 - values.sum() ** 2))


def drift(
    source: np.ndarray,
    target: np.ndarray,
    labels: list[str],
    before: str,
    after: str,
    queries: int = 1000,
    frequent: int = 2000,
    count: int = 10,
) -> Drift:
    """Compares the embeddings (n, E) of the same chunks, the most frequent first, by two checkpoints.

    Args:
        source: of the first.
        target: of the second; it may be of another width.
        labels: the chunks, for people.
        before: what the first is called.
        after: what the second is.
        queries: chunks whose neighbours are compared, spread evenly over the ranks of frequency.
        frequent: the most frequent chunks, among which those are named that moved most and least.
        count: neighbours.
    """
    moved, onto, distance = turned(source, target)
    cosines = (unit(moved) * unit(onto)).sum(1)
    rows = np.unique(np.linspace(0, len(source) - 1, min(queries, len(source))).astype(int))
    count = min(count, len(source) - 1)
    first, second = (nearest(each - each.mean(0), rows, count) for each in (source, target))
    order = np.argsort(cosines[:frequent], kind="stable")
    named = [Moved(labels[row], float(cosines[row])) for row in order]
    same_width = source.shape[1] == target.shape[1]
    return Drift(
        before=before,
        after=after,
        distance=distance,
        cosine=float(cosines.mean()),
        unaligned=float((unit(source) * unit(target)).sum(1).mean()) if same_width else None,
        neighbours=count,
        queries=len(rows),
        overlap=float((first[:, :, None] == second[:, None]).any(2).mean()),
        chance=count / (len(source) - 1),
        most=named[:_MOVED],
        least=named[: -_MOVED - 1 : -1],
    )
