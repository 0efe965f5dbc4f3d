"""The index of a run's chunks, opened once and queried often; see `pipeline.run.index.storage` for its files.

A query is a vector of the index: that of a chunk, a sum of chunks, or a prediction. Results are chunks that occur often
enough to be known to the model, unless more are requested. Rows are in the order of `DistinctChunks`, so frequent chunks
come first.

With the metric `centred`, the mean embedding of the known chunks, each counted once, is subtracted from all vectors and
from the query. It is not subtracted from a prediction, which the model compares with whole embeddings.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress

import numpy as np

from data.vocabulary import DistinctChunks
from haed.hashing import hash_rows
from haed.options import SYSTEMS
from pipeline.config import ConfigError, Options
from pipeline.console import escape_control_characters
from pipeline.run.index.faiss_search import Vectors, prepare_vectors, search_uncentred
from pipeline.run.index.queries import Neighbour, QueryResult, SearchResults, check_count, display_chunk, log_notes
from pipeline.run.index.storage import SCORES, IndexFiles, RandomPairScores, VectorFile, random_pair_scores
from pipeline.run.run_directory import RunFolder

COUNT = 8  # default number of neighbours
_NAMED = 3  # chunks that are alike by chance
FLOORS, ENOUGH = (10, 5, 3, 2), 1000  # occurrences, chunks


def known_count_threshold(counts: np.ndarray) -> int:
    """Return the count from which a chunk is taken as known: 10, or less if fewer than 1,000 chunks are that frequent.

    The alternatives are 5, 3, 2 and 1.
    """
    return next((least for least in FLOORS if int((counts >= least).sum()) >= ENOUGH), 1)


def check_chunks(options: Options) -> None:
    """Raise ConfigError for a model that embeds no chunk by itself, and so has no index of chunks."""
    kind = options.model.kind
    if not SYSTEMS[kind].chunks:
        raise ConfigError(
            f"model.kind={kind} does not embed single chunks, so it has no index of chunks. Use `haed index "
            "RUN --space contexts` and `haed neighbours RUN --context TEXT`"
        )


class ChunkIndex:
    """An open index of chunks, which may be queried from several threads. Its vectors stay in their file.

    Args:
        folder: the run; see `IndexFiles` for checks and errors.
        digest: digest of the checkpoint that the index must be of, see `IndexFiles`.

    Attributes:
        chunks: the chunks, row by row, the most frequent first.
        find_row: returns the row of a chunk; None if it has none.
        norms: (n,) float32, norms of the embeddings before centring and normalisation.
        distances: (n,) float32, distances of the embeddings from their mean, if that is subtracted; else None.
        mean: (E,) float32, the subtracted mean, or None.
        search: their vectors, and the search among these.
    """

    def __init__(self, folder: RunFolder, digest: str | None = None) -> None:
        files = IndexFiles(folder, "chunks", digest)
        of_mean = {"from_mean": "FLOAT"} if files.meta.metric == "centred" else {}
        numbers = {"length": "INT64", "count": "INT64", "norm": "FLOAT"} | of_mean
        columns = files.read_columns(tokens="FIXED_LEN_BYTE_ARRAY", **numbers)
        tokens, lengths, counts = columns["tokens"], columns["length"], columns["count"]
        if not ((1 <= lengths) & (lengths <= tokens.shape[1])).all() or (np.diff(counts) > 0).any():
            raise ValueError(f"the index in {files.place} is damaged (lengths or counts). {files.again}")
        self.meta, self.chunks = files.meta, DistinctChunks(tokens, lengths.astype(np.uint8), counts)
        self.norms, self.distances, self.search = columns["norm"], columns.get("from_mean"), Vectors.open(files)
        self.mean = None if self.meta.mean is None else np.array(self.meta.mean, np.float32)
        self.find_row = lru_cache(1 << 12)(self._search_row)  # a query looks each of its chunks up several times
        self.score_by_chance = lru_cache(1 << 4)(self._score_random_pairs)

    def __len__(self) -> int:
        return len(self.chunks.counts)

    @property
    def vectors(self) -> np.ndarray | VectorFile:
        """Vectors (n, E) float32, as returned by `prepare_vectors`."""
        return self.search.exact

    def chunk_at(self, row: int) -> bytes:
        """Return the chunk of a row."""
        return self.chunks.tokens[row].tobytes()[: int(self.chunks.lengths[row])]

    def _search_row(self, chunk: bytes) -> int | None:
        size = len(chunk)
        if not 1 <= size <= self.chunks.tokens.shape[1]:
            return None
        rows = np.flatnonzero((self.chunks.lengths == size) & (self.chunks.tokens[:, 0] == chunk[0]))
        same = (self.chunks.tokens[rows, :size] == np.frombuffer(chunk, np.uint8)).all(1)
        return int(rows[same.argmax()]) if same.any() else None

    def find_longer(self, beginning: bytes, count: int) -> list[tuple[bytes, int]]:
        """Return up to `count` longer chunks that begin with some bytes, the most frequent first, with their counts."""
        size = len(beginning)
        if not 1 <= size < self.chunks.tokens.shape[1]:
            return []
        same = (self.chunks.tokens[:, :size] == np.frombuffer(beginning, np.uint8)).all(1)
        rows = np.flatnonzero(same & (self.chunks.lengths > size))[:count]
        return [(self.chunk_at(row), int(self.chunks.counts[row])) for row in rows]

    def count_known(self, min_count: int | None = None) -> int:
        """Return the number of chunks with at least this count (None: the index's floor); they have the first rows."""
        least = self.meta.floor if min_count is None else min_count
        return int(np.searchsorted(-self.chunks.counts, -least, side="right"))

    def searched_rows(self, min_count: int | None = None) -> tuple[int, int]:
        """Return the number of chunks that are searched, which have the first rows, and their minimum count.

        Raises:
            ValueError: no chunk has this count.
        """
        least = self.meta.floor if min_count is None else check_count("min_count", min_count)
        among = self.count_known(least)
        if not among:
            most = self.chunks.counts[0]
            raise ValueError(f"no chunk of the index occurs {least:,} times: the most frequent occurs {most:,} times")
        return among, least

    def find_neighbours(
        self,
        queries: Sequence[tuple[str, bytes]],
        vectors: np.ndarray,
        count: int | None,
        min_count: int | None = None,
        without: Sequence[Sequence[bytes]] | None = None,
        are_predictions: bool = False,
    ) -> SearchResults:
        """Find the chunks nearest to vectors.

        The search for predictions is exact, because an approximate one is tuned for chunks. With the metric `centred` it
        is by the cosine of whole embeddings.

        Args:
            queries: the text and the bytes of each query.
            vectors: (q, E) vectors of the index, sums of them, or predictions.
            count: neighbours of each query; None is eight. If there are fewer, all are returned, with a note.
            min_count: minimum count of a neighbour; None is the index's floor.
            without: chunks that are excluded from the results of each query; None excludes none.
            are_predictions: the vectors are predictions. Scores of random pairs of chunks are then not reported.

        Raises:
            ValueError: no chunk has this count.
        """
        among, least = self.searched_rows(min_count)
        wanted = check_count("count", COUNT if count is None else count)
        without = [()] * len(queries) if without is None else without
        excluded = [{self.find_row(chunk) for chunk in chunks} - {None} for chunks in without]
        most = min(wanted + max(map(len, excluded), default=0), among)
        metric = "cosine" if are_predictions and self.mean is not None else self.meta.metric
        vectors = prepare_vectors(vectors, metric)
        if not are_predictions:
            scores, rows = self.search.find_nearest(vectors, most, among)
        elif self.mean is None or self.distances is None:
            scores, rows = self.search.find_exactly(vectors, most, among)
        else:
            norms = self.norms[:among]
            scores, rows = search_uncentred(vectors, self.vectors, self.mean, self.distances[:among], norms, most)
        results = []
        columns = (queries, without, excluded, rows.tolist(), scores.tolist())
        for (text, chunk), parts, left, near, near_scores in zip(*columns, strict=True):
            pairs = [(row, score) for row, score in zip(near, near_scores, strict=True) if row not in left][:wanted]
            note = None if count is None else self._shortage_note(count, len(pairs), among, least)
            is_chunk = list(parts) == [chunk]  # no sum of several, and no prediction
            shared = self._collision_note(text, chunk, [row for row, _ in pairs]) if is_chunk else None
            results.append(QueryResult(text, chunk.hex(), [self._neighbour_at(*pair) for pair in pairs], note, shared))
        log_notes(results)
        rest = f", of {len(self):,} (`--min-count 1`)" if among < len(self) else ""
        often = f" that occur at least {least:,} times in {self.meta.split}" if rest or least > 1 else ""
        note = self.meta.describe(None if are_predictions else self.score_by_chance(among))
        heading = f"{SCORES[metric]}, count, chunk; among {among:,} chunks{often}{rest}{note}"
        return SearchResults(results, heading, SCORES[metric])

    def _score_random_pairs(self, among: int) -> RandomPairScores | None:
        if among == self.count_known(self.meta.floor):
            return self.meta.chance
        return random_pair_scores(self.vectors, among, self.meta.metric, seed=0)

    def _shortage_note(self, count: int, returned: int, among: int, least: int) -> str | None:
        """Return a note for a result with fewer neighbours than requested; None if there are enough."""
        if returned >= count:
            return None
        often = f" that occur at least {least:,} times" if least > 1 else ""
        without = ", without the query" if returned < among else ""
        more = f"; a minimum count of 1 searches all {len(self):,}" if among < len(self) else ""
        return f"only {returned:,} of {count:,} neighbours: the index has {among:,} chunks{often}{without}{more}"

    def _collision_note(self, query: str, chunk: bytes, rows: list[int]) -> str | None:
        """Return a note that names the chunks of some rows that have the query's row of the encoder's hashed table."""
        if not (self.meta.rows and rows and 1 <= len(chunk) <= self.chunks.tokens.shape[1]):
            return None
        tokens = np.zeros((1, self.chunks.tokens.shape[1]), np.uint8)
        tokens[0, : len(chunk)] = np.frombuffer(chunk, np.uint8)
        hashed_row = hash_rows(tokens, np.array([len(chunk)]), self.meta.rows)
        shared = hash_rows(self.chunks.tokens[rows], self.chunks.lengths[rows], self.meta.rows) == hashed_row
        names = [display_chunk(self.chunk_at(row), self.meta.chunker) for row in compress(rows, shared)]
        if not names:
            return None
        listed = ", ".join(escape_control_characters(name) for name in names[:_NAMED])
        listed += f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
        return (
            f"{escape_control_characters(query)} shares its row of the encoder's table with {listed}: they are alike by "
            f"chance, as a hash chose one of {self.meta.rows:,} rows for each chunk"
        )

    def _neighbour_at(self, row: int, score: float) -> Neighbour:
        chunk = self.chunk_at(row)
        return Neighbour(display_chunk(chunk, self.meta.chunker), chunk.hex(), score, int(self.chunks.counts[row]))
