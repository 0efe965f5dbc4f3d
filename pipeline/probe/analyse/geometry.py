"""The shape of a cloud of embeddings: lengths, direction, dimension; exact neighbours and clusters in it.

Legend: n chunks, E width of an embedding, Q queries.
"""

from dataclasses import dataclass

import numpy as np

_CLUSTER_ROUNDS = 20


@dataclass
class Norms:
    """How the length of an embedding goes with the frequency of its chunk.

    Attributes:
        mean: of the norms.
        deviation: of them.
        correlation: Spearman's, of norm and count.
        slope: of the norm by the decimal logarithm of the count (least squares), in means.
    """

    mean: float
    deviation: float
    correlation: float
    slope: float


@dataclass
class Cloud:
    """How the embeddings fill their space.

    Attributes:
        width: E.
        mean_cosine: of all pairs: 0 where directions are spread evenly, 1 where all are the same (anisotropy).
        centred_cosine: the same once the mean vector is taken off.
        dimension: the participation ratio of the covariance's eigenvalues, 1 to E.
        half: principal components that hold half of the variance.
    """

    width: int
    mean_cosine: float
    centred_cosine: float
    dimension: float
    half: int


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, E) divided by their lengths, float32; zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def norms(vectors: np.ndarray, counts: np.ndarray) -> Norms:
    """Norms of embeddings (n, E) against counts (n,); that they go with frequency is known of word vectors (Schakel 2015)."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    mean, logarithm = float(lengths.mean()), np.log10(counts)
    spread = logarithm - logarithm.mean()
    slope = float(spread @ lengths / max(spread @ spread, 1e-12))
    return Norms(mean, float(lengths.std()), spearman(lengths, counts), slope / max(mean, 1e-12))


def cloud(vectors: np.ndarray) -> Cloud:
    """Anisotropy (Ethayarajh 2019) and effective dimension (participation ratio, as Gao et al. 2017) of embeddings (n, E).

    The mean cosine is of all pairs, not of a sample: it is (|Σu|² − n) / (n² − n) of unit vectors u.
    """
    exact = vectors.astype(np.float64)
    centred = exact - exact.mean(0)
    variances = np.linalg.svd(centred, compute_uv=False) ** 2
    total = max(float(variances.sum()), 1e-30)
    ratio = total**2 / max(float((variances**2).sum()), 1e-300)
    half = int(np.searchsorted(np.cumsum(variances), total / 2)) + 1
    return Cloud(vectors.shape[1], _mean_cosine(exact), _mean_cosine(centred), ratio, half)


def _mean_cosine(vectors: np.ndarray) -> float:
    size = len(vectors)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    summed = units.sum(0)
    return float((summed @ summed - (units**2).sum()) / (size * (size - 1)))


def nearest(vectors: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """The nearest others (Q, count) of some rows (Q,) by cosine, exactly, the nearest first.

    Args:
        vectors: (n, E).
        rows: queries, as rows of `vectors`.
        count: neighbours of each, less than n.
    """
    import faiss

    units = unit(vectors)
    index = faiss.IndexFlatIP(units.shape[1])
    index.add(units)
    _, found = index.search(units[rows], count + 1)
    return _without(found, rows, count)


def _without(found: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Neighbours (Q, count + 1) without the query itself; equals of it may have pushed it out, then without the last one."""
    own = found == rows[:, None]
    own[~own.any(1), -1] = True
    return found[~own].reshape(len(rows), count)


def clusters(vectors: np.ndarray, number: int, seed: int) -> np.ndarray:
    """A cluster (n,) of each embedding: k-means of directions (spherical, Dhillon & Modha 2001), by FAISS."""
    import faiss

    units = unit(vectors)
    number = max(1, min(number, len(units) // 4))
    settings = dict(niter=_CLUSTER_ROUNDS, seed=seed % (1 << 31), spherical=True)
    found = faiss.Kmeans(units.shape[1], number, **settings, min_points_per_centroid=1, max_points_per_centroid=1 << 20)
    found.train(units)
    _, nearest_one = found.index.search(units, 1)
    return np.asarray(nearest_one[:, 0])


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks (n,) of values, equal ones their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts + 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation of two columns (n,); 0 where one of them is constant."""
    x, y = (column - column.mean() for column in (ranks(a), ranks(b)))
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0
