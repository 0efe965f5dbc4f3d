"""Geometry of embeddings: norms, anisotropy, effective dimension, exact neighbours, clusters, and drift.

Drift is the change from one checkpoint to another, after rotation, reflection and scaling are removed.

Legend: n chunks, E width of an embedding, Q queries.
"""

import numpy as np

from pipeline.run.analysis_results import ChunkDrift, Drift, EmbeddingSample, Norms
from pipeline.run.index.faiss_search import load_faiss, prepare_vectors

_CLUSTER_ROUNDS = 20
_ROUNDING = 1e-6  # of float32 embeddings, relative
_MOVED = 12  # chunks that are named: the most and the least moved
_QUERIES = 1000  # chunks whose neighbours are compared, spread evenly over the frequency ranks


def normalise_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide vectors (n, E) by their norms; return float32. Zero vectors stay zero."""
    return prepare_vectors(vectors, "cosine")


def measure_norms(vectors: np.ndarray, counts: np.ndarray) -> Norms:
    """Measure how norms of embeddings (n, E) depend on counts (n,), as known of word vectors (Schakel 2015)."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
    mean, logarithm = float(lengths.mean()), np.log10(counts)
    spread = logarithm - logarithm.mean()
    slope = float(spread @ lengths / max(spread @ spread, 1e-12))
    return Norms(mean, float(lengths.std()), spearman_correlation(lengths, counts), slope / max(mean, 1e-12))


def measure_spread(vectors: np.ndarray) -> EmbeddingSample:
    """Measure anisotropy (Ethayarajh 2019) and effective dimension of embeddings (n, E).

    The dimension is the participation ratio, as in Gao et al. 2017. The mean cosine covers all pairs, not a sample:
    it is (|Σu|² − n) / (n² − n) for unit vectors u.
    """
    exact, centred = vectors.astype(np.float64), centre_vectors(vectors)
    variances = np.linalg.svd(centred, compute_uv=False) ** 2
    total = float(variances.sum())
    ratio = total**2 / float((variances**2).sum()) if total else 1.0
    half = int(np.searchsorted(np.cumsum(variances), total / 2)) + 1
    return EmbeddingSample(vectors.shape[1], _mean_cosine(exact), _mean_cosine(centred), ratio, half)


def centre_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (n, E) less their mean, in float64: zeros if they differ by no more than rounding."""
    exact = vectors.astype(np.float64)
    centred = exact - exact.mean(0)
    return centred if np.linalg.norm(centred) > _ROUNDING * np.linalg.norm(exact) else np.zeros_like(exact)


def _mean_cosine(vectors: np.ndarray) -> float:
    size = len(vectors)
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    summed = units.sum(0)
    return float((summed @ summed - (units**2).sum()) / (size * (size - 1)))


def find_nearest(vectors: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Return the exact nearest neighbours (Q, count) of some rows (Q,) by cosine, the nearest first.

    Args:
        vectors: (n, E) embeddings.
        rows: (Q,) queries, as rows of `vectors`.
        count: neighbours of each query, less than n.
    """
    faiss = load_faiss()

    units = normalise_rows(vectors)
    _, neighbours = faiss.knn(units[rows], units, count + 1, metric=faiss.METRIC_INNER_PRODUCT)
    is_self = neighbours == rows[:, None]
    is_self[~is_self.any(1), -1] = True  # equal vectors displaced the query, so the last one goes instead
    return np.asarray(neighbours[~is_self].reshape(len(rows), count))


def highest_columns(values: np.ndarray, excluded: np.ndarray, count: int) -> np.ndarray:
    """Return the columns (Q, count) of each row's highest values (Q, n), none of them excluded (Q, n); ties go by column."""
    return np.argsort(np.where(excluded, np.inf, -values), axis=1, kind="stable")[:, :count]


def cluster_directions(vectors: np.ndarray, number: int, seed: int) -> np.ndarray:
    """Return the cluster (n,) of each embedding by spherical k-means (Dhillon & Modha 2001) with FAISS."""
    faiss = load_faiss()

    units = normalise_rows(vectors)
    number = max(1, min(number, len(units) // 4))
    settings = dict(niter=_CLUSTER_ROUNDS, seed=seed % (1 << 31), spherical=True)
    limits = dict(min_points_per_centroid=1, max_points_per_centroid=1 << 20)
    kmeans = faiss.Kmeans(units.shape[1], number, **settings, **limits)
    kmeans.train(units)
    _, nearest_one = kmeans.index.search(units, 1)
    return np.asarray(nearest_one[:, 0])


def rank_values(values: np.ndarray) -> np.ndarray:
    """Return the ranks (n,) of values. Equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts + 1) / 2)[inverse]


def spearman_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation of two columns (n,), or 0 if one of them is constant."""
    x, y = (column - column.mean() for column in (rank_values(a), rank_values(b)))
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def align_procrustes(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Centre and scale two sets of vectors (n, E), align the first with the second, and return both and their distance.

    This is the orthogonal Procrustes problem (Schönemann 1966). Hamilton et al. 2016 align word vectors of two
    periods the same way. The narrower set is padded with zeros.

    Raises:
        ValueError: the vectors of a set are all equal.
    """
    width = max(source.shape[1], target.shape[1])
    a, b = (np.pad(centre_vectors(each), ((0, 0), (0, width - each.shape[1]))) for each in (source, target))
    if not (a.any() and b.any()):
        raise ValueError("all embeddings of a checkpoint are equal")
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    left, values, right = np.linalg.svd(a.T @ b)
    return a @ (left @ right), b, float(max(0.0, 1 - values.sum() ** 2))


def measure_drift(
    source: np.ndarray,
    target: np.ndarray,
    labels: list[str],
    before: str,
    after: str,
    frequent: int = 2000,
    count: int = 10,
    seed: int = 0,
) -> Drift:
    """Compare the embeddings (n, E) that two checkpoints give the same chunks, the most frequent first.

    The alignment fits E × E values, so unrelated embeddings also seem related. A permutation of the chunks of the first
    checkpoint, aligned in the same way, is the chance level.

    Args:
        source: embeddings by the first checkpoint.
        target: embeddings by the second checkpoint. Their width may differ.
        labels: the displayed chunks.
        before: name of the first checkpoint.
        after: name of the second checkpoint.
        frequent: number of the most frequent chunks from which the most and least moved are chosen.
        count: neighbours of each chunk.
        seed: seed of the permutation.

    Raises:
        ValueError: the embeddings of a checkpoint are all equal.
    """
    moved, onto, distance = align_procrustes(source, target)
    cosines = _row_cosines(moved, onto)
    permuted, still, distance_chance = align_procrustes(np.random.default_rng(seed).permutation(source), target)
    centred = [centre_vectors(each) for each in (source, target)]
    rows = np.unique(np.linspace(0, len(source) - 1, min(_QUERIES, len(source))).astype(int))
    count = min(count, len(source) - 1)
    first, second = (find_nearest(each, rows, count) for each in centred)
    order = np.argsort(cosines[:frequent], kind="stable")
    named = [ChunkDrift(labels[row], float(cosines[row])) for row in order]
    same_width = source.shape[1] == target.shape[1]
    return Drift(
        before=before,
        after=after,
        distance=distance,
        distance_chance=distance_chance,
        cosine=float(cosines.mean()),
        cosine_chance=float(_row_cosines(permuted, still).mean()),
        unaligned=float(_row_cosines(*centred).mean()) if same_width else None,
        neighbours=count,
        queries=len(rows),
        overlap=float((first[:, :, None] == second[:, None]).any(2).mean()),
        chance=count / (len(source) - 1),
        most=named[:_MOVED],
        least=named[: -_MOVED - 1 : -1],
    )


def _row_cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine (n,) of each row of a with the same row of b."""
    return np.asarray((normalise_rows(a) * normalise_rows(b)).sum(1))
