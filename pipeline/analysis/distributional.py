"""Agreement of embeddings with use and with spelling: are the neighbours of a chunk used alike, or only written alike?

Use is measured by the chunks directly before and after a chunk: its row holds its positive pointwise mutual
information (PPMI) with the most frequent of them. Two chunks are used alike if the cosine of their rows is high. The
same rows in few dimensions are the baseline for the embeddings: they need no training and see one chunk on each side.
Spelling is measured by the edit distance of bytes, or by the distance of values.

Legend: n chunks, C chunks of context, S positions of the stream, Q queries, E dimensions.
"""

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from pipeline.analysis.geometry import highest_columns, normalise_rows, spearman_correlation
from pipeline.run.analysis_results import Agreement, Classes, Example, SimilarityStatistics

MOST = 64  # bytes of a chunk that are compared


def spelling_similarity(chunks: list[bytes], rows: np.ndarray, of_values: bool = False) -> np.ndarray:
    """Return the spelling similarity (Q, n) float32 of some chunks, given as rows (Q,), to all chunks.

    It is 1 − edit distance / length of the longer chunk, of their first 64 bytes. For values of pictures and sound it is
    1 − mean absolute difference / 255. Equal chunks have 1, chunks with nothing in common 0.
    """
    if of_values:
        return np.stack([_value_similarity(chunks[row], chunks) for row in rows.tolist()])
    cut = [chunk[:MOST] for chunk in chunks]
    queries = [cut[row] for row in rows.tolist()]
    return cdist(queries, cut, scorer=Levenshtein.normalized_similarity, dtype=np.float32)


def _value_similarity(chunk: bytes, chunks: list[bytes]) -> np.ndarray:
    """Return the similarity (n,) of a chunk of values to all chunks, over the values that both have."""
    query = np.frombuffer(chunk, np.uint8).astype(np.float32)
    similarity = np.zeros(len(chunks), np.float32)
    for number, other in enumerate(chunks):
        shared = min(len(query), len(other))
        values = np.frombuffer(other, np.uint8, shared).astype(np.float32)
        similarity[number] = 1 - float(np.abs(query[:shared] - values).mean()) / 255
    return similarity


SMOOTHING = 0.75
_BINS, _EXAMPLES, _PERMUTATIONS = 12, 10, 20


def count_contexts(stream: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Count how often each chunk has each of the most frequent chunks before and after it; return (n, 2 C) float32.

    Args:
        stream: (S,) rows of chunks, -1 for none.
        rows: n. Lower rows are more frequent chunks.
        width: upper limit of C.
    """
    width, sides = min(width, rows), []
    for chunk, other in ((stream[1:], stream[:-1]), (stream[:-1], stream[1:])):
        pairs = (chunk >= 0) & (chunk < rows) & (other >= 0) & (other < width)
        cells = chunk[pairs].astype(np.int64) * width + other[pairs]
        sides.append(np.bincount(cells, minlength=rows * width).astype(np.float32).reshape(rows, width))
    return np.concatenate(sides, 1)


def positive_pmi(counts: np.ndarray) -> np.ndarray:
    """Compute the PPMI (n, C) of counts, with smoothed contexts (Levy, Goldberg & Dagan 2015)."""
    columns = counts.sum(0, dtype=np.float64) ** SMOOTHING
    expected = columns / max(float(columns.sum()), 1e-12)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1e-12)
    with np.errstate(divide="ignore"):
        information = np.log2(shares, out=shares) - np.log2(np.maximum(expected, 1e-30), dtype=np.float32)
    return np.maximum(information, 0, dtype=np.float32)


def reduce_dimensions(matrix: np.ndarray, width: int) -> np.ndarray:
    """Reduce a matrix (n, C) to E dimensions by singular value decomposition.

    Return the first left singular vectors (n, E), scaled by the square roots of their singular values (Levy &
    Goldberg 2014). They are computed from the eigenvectors of the smaller Gram matrix (C, C).
    """
    values, vectors = np.linalg.eigh((matrix.T @ matrix).astype(np.float64))
    largest = np.argsort(-values)[:width]
    singular = np.sqrt(np.maximum(values[largest], 1e-12))
    return (matrix @ (vectors[:, largest] / np.sqrt(singular)).astype(np.float32)).astype(np.float32)


def measure_agreement(
    vectors: np.ndarray,
    used: np.ndarray,
    chunks: list[bytes],
    counts: np.ndarray,
    labels: list[str],
    band: slice,
    queries: int,
    count: int,
    of_values: bool = False,
) -> Agreement:
    """Compare the neighbours by embedding with those by use and by spelling, in a frequency band.

    Rare and frequent chunks are compared separately. Norms and directions of embeddings depend on frequency, and so
    does the reliability of the contexts.

    Args:
        vectors: (n, E) embeddings, the most frequent chunk first.
        used: (n, C) PPMI rows of the contexts.
        chunks: bytes of each chunk.
        counts: (n,) occurrences of each chunk.
        labels: the displayed chunks.
        band: slice of frequency ranks, at least three.
        queries: maximum number of queries, spread evenly over the ranks.
        count: neighbours of each query.
        of_values: true if chunks consist of values of pictures or sound.
    """
    vectors, used, chunks, counts, labels = vectors[band], used[band], chunks[band], counts[band], labels[band]
    among = len(chunks)
    sampled = np.unique(np.linspace(0, among - 1, min(queries, among)).astype(int))
    count = min(count, among - 1)
    units, likely = normalise_rows(vectors), normalise_rows(used)
    cosine = units[sampled] @ units.T
    kinds = {"use": likely[sampled] @ likely.T, "spelling": spelling_similarity(chunks, sampled, of_values)}
    is_self = sampled[:, None] == np.arange(among)
    near = highest_columns(cosine, is_self, count)
    lists = {name: highest_columns(kind, is_self, count) for name, kind in kinds.items()}
    edges = np.unique(np.quantile(cosine[~is_self], np.linspace(0, 1, _BINS + 1)))
    bins = np.clip(np.searchsorted(edges, cosine[~is_self], "right") - 1, 0, max(len(edges) - 2, 0))
    statistics = {}
    for name, kind in kinds.items():
        values = kind[~is_self]
        sums, sizes = (np.bincount(bins, weights, max(len(edges) - 1, 1)) for weights in (values, None))
        mean, best = (float(np.take_along_axis(kind, rows, 1).mean()) for rows in (near, lists[name]))
        chance = float(values.mean())
        statistics[name] = SimilarityStatistics(
            neighbours=mean,
            chance=chance,
            best=best,
            share=(mean - chance) / (best - chance) if best > chance else 0.0,
            overlap=float((near[:, :, None] == lists[name][:, None]).any(2).mean()),
            correlation=spearman_correlation(cosine[~is_self], values),
            by_cosine=[
                float(total / size) if size else None for total, size in zip(sums.tolist(), sizes.tolist(), strict=True)
            ],
        )
    columns = {"embedding": near, **lists}
    examples = [
        Example(labels[sampled[at]], **{name: [labels[row] for row in rows[at]] for name, rows in columns.items()})
        for at in np.unique(np.linspace(0, len(sampled) - 1, min(_EXAMPLES, len(sampled))).astype(int))
    ]
    return Agreement(
        first=(band.start or 0) + 1,
        among=among,
        counts=(int(counts[-1]), int(counts[0])),
        queries=len(sampled),
        neighbours=count,
        chance=count / max(among - 1, 1),
        **statistics,
        cosines=edges[: max(len(edges) - 1, 1)].tolist(),
        examples=examples,
    )


def mutual_information(stream: np.ndarray, classes: np.ndarray) -> tuple[float, int]:
    """Return the mutual information, in bits, of the classes of neighbouring chunks, and the number of pairs.

    Args:
        stream: (S,) rows of chunks, -1 for none.
        classes: (n,) class of each row. Rows from n on are left out.
    """
    before, after = stream[:-1], stream[1:]
    pairs = (before >= 0) & (after >= 0) & (before < len(classes)) & (after < len(classes))
    size, number = int(classes.max()) + 1, int(pairs.sum())
    cells = classes[before[pairs]].astype(np.int64) * size + classes[after[pairs]]
    joint = np.bincount(cells, minlength=size * size).reshape(size, size) / max(number, 1)
    apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    real = joint > 0
    return float((joint[real] * np.log2(joint[real] / apart[real])).sum()), number


def measure_class_information(
    stream: np.ndarray, embedding: np.ndarray, use: np.ndarray, chunks: list[bytes], counts: np.ndarray, seed: int
) -> Classes:
    """Measure clusters by their mutual information with the cluster of the next chunk, as for parts of speech.

    Args:
        stream: (S,) rows of chunks.
        embedding: (n,) clusters of embeddings.
        use: (n,) as many clusters of context vectors.
        chunks: bytes of each chunk.
        counts: (n,) occurrences of each chunk.
        seed: seed of the permutations.
    """
    number, chance = int(embedding.max()) + 1, np.random.default_rng(seed)
    known, permuted = (stream >= 0) & (stream < len(embedding)), stream.copy()
    permuted[known] = chance.permutation(stream[known])
    at_random = [mutual_information(stream, chance.permutation(embedding))[0] for _ in range(_PERMUTATIONS)]
    order = np.array(sorted(range(len(chunks)), key=chunks.__getitem__))
    spelled = np.empty(len(chunks), np.int64)
    spelled[order] = np.cumsum(counts[order]) * number // (counts.sum() + 1)
    bits, pairs = mutual_information(stream, embedding)
    return Classes(
        classes=number,
        pairs=pairs,
        embedding=bits,
        use=mutual_information(stream, use)[0],
        spelling=mutual_information(stream, spelled)[0],
        bias=mutual_information(permuted, embedding)[0],
        random=float(np.mean(at_random)),
        random_deviation=float(np.std(at_random, ddof=1)),
    )
