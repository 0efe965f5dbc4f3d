"""The index of a run's chunks, opened once and queried often; see `pipeline.run.spaces.storage` for its files.

A query is a chunk, a sum of chunks, or a vector of the same space, such as a prediction. Results are chunks that occur
often enough to be known to the model, unless more are requested. Rows are in the order of `DistinctChunks`, so frequent
chunks come first.

With the metric `centred`, the mean embedding of the known chunks, each counted once, is subtracted from all vectors and
from the query. It is not subtracted from a prediction, which the model compares with whole embeddings.
"""

import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Self

import numpy as np

from data.chunkers import Chunker
from data.corpus import Corpus
from data.vocabulary import DistinctChunks, select_telling_chunks
from haed.options import SYSTEMS
from pipeline.config import ConfigError, Options
from pipeline.console import escape_control_characters, unescape_query
from pipeline.run.run_directory import RunFolder
from pipeline.run.spaces.faiss_search import Vectors, prepare_vectors, search_uncentred
from pipeline.run.spaces.queries import Text, parse_chunk, to_bytes
from pipeline.run.spaces.results import PIXELS, Neighbour, QueryResult, SearchResults, display_chunk, log_notes
from pipeline.run.spaces.storage import SCORES, IndexFiles, IndexMetadata, StaleIndexError, VectorFile, space_folder

log = logging.getLogger(__name__)
OWN_QUERIES = 6
COUNT = 8  # neighbours, unless it is said how many
FLOORS, ENOUGH = (10, 5, 3, 2), 1000  # occurrences, chunks
__all__ = [
    "PIXELS",
    "ChunkIndex",
    "Embed",
    "Neighbour",
    "QueryResult",
    "SearchResults",
    "StaleIndexError",
    "display_chunk",
]

Embed = Callable[[list[bytes]], np.ndarray]  # n chunks: (n, E) float32
Search = Callable[[int, int], tuple[np.ndarray, np.ndarray]]  # how many, among so many first rows: scores, rows


def known_count_threshold(counts: np.ndarray) -> int:
    """Return the count from which a chunk is taken as known: 10, or less if fewer than 1,000 chunks are that frequent.

    The alternatives are 5, 3, 2 and 1.
    """
    return next((least for least in FLOORS if int((counts >= least).sum()) >= ENOUGH), 1)


def check_count(name: str, value: int) -> int:
    """Return a number of results or occurrences as an int, after checking it.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}. Use {name}=8.")
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1. Use {name}=8.")
    return int(value)


class ChunkIndex:
    """An open index of chunks. It has no model, so callers embed chunks that it does not have.

    It may be queried from several threads.

    Attributes:
        meta: contents of meta.json.
        chunks: the chunks, row by row, the most frequent first.
        find: returns the row of a chunk; None if it has none.
        norms: (n,) float32, norms of the embeddings before centring and normalisation.
        distances: (n,) float32, distances of the embeddings from their mean, if that is subtracted; else None.
        mean: (E,) float32, the subtracted mean, or None.
        search: their vectors, and the search among these.
    """

    def __init__(
        self,
        folder: RunFolder,
        meta: IndexMetadata,
        chunks: DistinctChunks,
        norms: np.ndarray,
        distances: np.ndarray | None,
        search: Vectors,
    ) -> None:
        """Create the index from the contents of its files."""
        self.folder, self.meta, self.chunks, self.search = folder, meta, chunks, search
        self.norms, self.distances = norms, distances
        self.mean = None if meta.mean is None else np.array(meta.mean, np.float32)
        self.find_row = lru_cache(1 << 12)(self._search_row)  # a question looks each of its chunks up several times

    @classmethod
    def open(cls, folder: RunFolder, digest: str | None = None) -> Self:
        """Open the index of a run, leaving its vectors in their file; see `IndexFiles.open` for checks and errors."""
        files = IndexFiles.open(folder, "chunks", digest)
        of_mean = {"from_mean": "FLOAT"} if files.meta.metric == "centred" else {}
        columns = files.read_columns(
            tokens="FIXED_LEN_BYTE_ARRAY", length="INT64", count="INT64", norm="FLOAT", **of_mean
        )
        tokens, lengths, counts = columns["tokens"], columns["length"], columns["count"]
        if not ((1 <= lengths) & (lengths <= tokens.shape[1])).all() or (np.diff(counts) > 0).any():
            raise ValueError(f"the index in {files.place} is damaged (lengths or counts): {files.again}")
        chunks = DistinctChunks(tokens, lengths.astype(np.uint8), counts)
        return cls(folder, files.meta, chunks, columns["norm"], columns.get("from_mean"), Vectors.open(files))

    @staticmethod
    def is_there(folder: RunFolder) -> bool:
        """Return whether an index of chunks was built, by this version or an earlier one."""
        return any(
            os.path.lexists(place / "meta.json") for place in (space_folder(folder, "chunks"), folder.path / "index")
        )

    def __len__(self) -> int:
        return len(self.chunks.counts)

    @property
    def vectors(self) -> np.ndarray | VectorFile:
        """Vectors (n, E) float32, as returned by `prepared`."""
        return self.search.exact

    @cached_property
    def chunker(self) -> Chunker:
        """The run's chunker."""
        return self.folder.load_chunker()

    @cached_property
    def _run_corpus(self) -> Corpus:
        return self.folder.open_corpus()

    def chunk_at(self, row: int) -> bytes:
        """Return the chunk of a row."""
        return self.chunks.tokens[row].tobytes()[: int(self.chunks.lengths[row])]

    def _search_row(self, chunk: bytes) -> int | None:
        """Return the row of a chunk; None if it has none."""
        size = len(chunk)
        if not 1 <= size <= self.chunks.tokens.shape[1]:
            return None
        rows = np.flatnonzero((self.chunks.lengths == size) & (self.chunks.tokens[:, 0] == chunk[0]))
        same = (self.chunks.tokens[rows, :size] == np.frombuffer(chunk, np.uint8)).all(1)
        return int(rows[same.argmax()]) if same.any() else None

    def count_known(self, min_count: int | None = None) -> int:
        """Return the number of chunks with at least this count (None: the index's floor); they have the first rows."""
        least = self.meta.floor if min_count is None else min_count
        return int(np.searchsorted(-self.chunks.counts, -least, side="right"))

    def nearest_chunks(
        self,
        queries: Sequence[Text],
        count: int | None,
        embed: Embed,
        strict: bool = True,
        min_count: int | None = None,
    ) -> SearchResults:
        """Find the chunks nearest to each query, without the query itself.

        Args:
            queries: see `pipeline.run.spaces.queries.parse_chunk`; if empty, frequent chunks of the corpus.
            count: neighbours of each query; None is eight. If there are fewer, all are returned, with a note.
            embed: called with the queries that the index does not have, if there are any.
            strict: false skips queries that are no chunks of this run, meant for another kind of data.
            min_count: minimum count of a neighbour; None is the index's floor.

        Raises:
            ValueError: a query is not a chunk of this run.
        """
        asked = self._parse_queries(queries, strict)
        vectors = self.embed_queries(asked, embed)
        return self.search_vectors(
            [(display_chunk(chunk, self.meta.chunker), chunk) for chunk in asked], vectors, count, min_count
        )

    def nearest_to_sum(
        self,
        like: Sequence[Text],
        minus: Sequence[Text],
        plus: Sequence[Text],
        count: int | None,
        embed: Embed,
        min_count: int | None = None,
    ) -> SearchResults:
        """Find the chunks nearest to the sum of `like` and `plus` less `minus`, without these chunks themselves.

        Raises:
            ValueError: nothing is added, or as `nearest`.
        """
        if not (like or plus):
            raise ValueError("nothing is added: --minus goes with --like or --plus")
        signs = [1.0] * len(like) + [-1.0] * len(minus) + [1.0] * len(plus)
        asked = self._parse_queries([*like, *minus, *plus], True)
        (vector,) = np.array([signs], np.float32) @ self.embed_queries(asked, embed)
        words = [display_chunk(chunk, self.meta.chunker) for chunk in asked]
        label = "".join(f" {'-' if sign < 0 else '+'} {word}" for sign, word in zip(signs, words, strict=True))
        return self.search_vectors(
            [(label.removeprefix(" + "), b"".join(asked))], vector[None], count, min_count, [asked]
        )

    def query_vectors(self, queries: Sequence[Text], embed: Embed) -> np.ndarray:
        """Return vectors (q, E) of queries, as `nearest` uses them."""
        if not queries:
            return np.zeros((0, self.meta.width), np.float32)
        return prepare_vectors(self.embed_queries(self._parse_queries(queries, True), embed), self.meta.metric)

    def embed_queries(self, chunks: list[bytes], embed: Embed) -> np.ndarray:
        """Return vectors (n, E) of chunks as the index holds them; `embed` is called for chunks it does not have."""
        rows = [self.find_row(chunk) for chunk in chunks]
        strange = list(dict.fromkeys(chunk for chunk, row in zip(chunks, rows, strict=True) if row is None))
        vectors = prepare_vectors(embed(strange), self.meta.metric, self.mean) if strange else ()
        made = dict(zip(strange, vectors, strict=True))
        for chunk in strange:
            near = [
                each
                for each in (chunk + b" ", chunk.removesuffix(b" "))
                if each != chunk and self.find_row(each) is not None
            ]
            hint = (
                f"; the index has {escape_control_characters(display_chunk(near[0], self.meta.chunker))}"
                if near
                else ""
            )
            log.info(
                "%s is not in the index, its own embedding is searched with%s",
                escape_control_characters(display_chunk(chunk, self.meta.chunker)),
                hint,
            )
        return np.stack([made[c] if r is None else self.vectors[r] for c, r in zip(chunks, rows, strict=True)])

    def search_vectors(
        self,
        asked: Sequence[tuple[str, bytes]],
        vectors: np.ndarray,
        count: int | None,
        min_count: int | None = None,
        without: Sequence[Sequence[bytes]] | None = None,
    ) -> SearchResults:
        """Find the chunks nearest to vectors (q, E) of the index, or to sums of them.

        Args:
            asked: the text and the bytes of each query.
            vectors: the query vectors, less the mean if the index is centred; for cosines they are normalised here.
            count: neighbours of each query; None is eight. If there are fewer, all are returned, with a note.
            min_count: minimum count of a neighbour; None is the index's floor.
            without: chunks that are excluded from the results of each query; None is the bytes of the query.

        Raises:
            ValueError: no chunk has this count.
        """
        search = partial(self.search.find_nearest, prepare_vectors(vectors, self.meta.metric))
        found = self._collect_results(
            asked, search, SCORES[self.meta.metric], count, min_count, without or [[chunk] for _, chunk in asked]
        )
        found.about += self.meta.chance_note
        return found

    def search_predictions(
        self, asked: Sequence[tuple[str, bytes]], vectors: np.ndarray, count: int | None, min_count: int | None = None
    ) -> SearchResults:
        """Find the chunks nearest to predictions (q, E), by the cosine if the metric is `centred`, else by the metric.

        The search is exact, because an approximate one is tuned for chunks. Scores of random pairs are not reported,
        because predictions are not chunks.

        Raises:
            ValueError: as `answer`.
        """
        none: list[list[bytes]] = [[] for _ in asked]
        if self.mean is None or self.distances is None:
            exactly = partial(self.search.find_exactly, prepare_vectors(vectors, self.meta.metric))
            return self._collect_results(asked, exactly, SCORES[self.meta.metric], count, min_count, none)
        mean, distances, queries = self.mean, self.distances, prepare_vectors(vectors, "cosine")

        def search(most: int, among: int) -> tuple[np.ndarray, np.ndarray]:
            return search_uncentred(queries, self.vectors, mean, distances[:among], self.norms[:among], most)

        return self._collect_results(asked, search, SCORES["cosine"], count, min_count, none)

    def _collect_results(
        self,
        asked: Sequence[tuple[str, bytes]],
        search: Search,
        score: str,
        count: int | None,
        min_count: int | None,
        without: Sequence[Sequence[bytes]],
    ) -> SearchResults:
        among, least = self.searched_rows(min_count)
        wanted = check_count("count", COUNT if count is None else count)
        left = [{self.find_row(chunk) for chunk in chunks} - {None} for chunks in without]
        most = max((len(rows) for rows in left), default=0)
        scores, rows = search(min(wanted + most, among), among)
        found = []
        for (label, chunk), drop, own, near in zip(asked, left, scores.tolist(), rows.tolist(), strict=True):
            kept = [self._make_neighbour(row, score) for row, score in zip(near, own, strict=True) if row not in drop][
                :wanted
            ]
            note = None if count is None else self._shortage_note(count, len(kept), among, least)
            found.append(QueryResult(label, chunk.hex(), kept, note))
        log_notes(found)
        return SearchResults(found, f"{score}, {self._describe_search(among, least)}", score)

    def searched_rows(self, min_count: int | None = None) -> tuple[int, int]:
        """Return the number of chunks that are searched, which have the first rows, and their minimum count.

        Raises:
            ValueError: no chunk has this count.
        """
        least = self.meta.floor if min_count is None else check_count("min_count", min_count)
        among = self.count_known(least)
        if not among:
            raise ValueError(
                f"no chunk of the index occurs {least:,} times: the most frequent has {self.chunks.counts[0]:,}"
            )
        return among, least

    def _shortage_note(self, count: int, found: int, among: int, least: int) -> str | None:
        """Return a note for a result with fewer neighbours than requested; None if there are enough."""
        if found >= count:
            return None
        often = f" that occur {least:,} times or more" if least > 1 else ""
        own = ", what is asked for left out" if found < among else ""
        more = f"; --min-count 1 searches all {len(self):,}" if among < len(self) else ""
        return f"{found:,} of {count:,} neighbours: the index has {among:,} chunks{often}{own}{more}"

    def _make_neighbour(self, row: int, score: float) -> Neighbour:
        chunk = self.chunk_at(row)
        return Neighbour(display_chunk(chunk, self.meta.chunker), chunk.hex(), score, int(self.chunks.counts[row]))

    def _describe_search(self, among: int, least: int) -> str:
        rest = f", of {len(self):,} (--min-count 1)" if among < len(self) else ""
        often = f" that occur {least:,} times or more in {self.meta.split}" if among < len(self) or least > 1 else ""
        return f"count, chunk; among {among:,} chunks{often}{rest}"

    def _parse_queries(self, queries: Sequence[Text], strict: bool) -> list[bytes]:
        found = []
        for query in queries:
            try:
                found.append(
                    parse_chunk(self._unescape_query(query), self.chunker, lambda: self._run_corpus, self.meta.split)
                )
            except ValueError as error:
                if strict:
                    raise
                log.info("left out: %s", error)
        return found or select_telling_chunks(self.chunks, OWN_QUERIES)

    def _unescape_query(self, query: Text) -> Text:
        """Return the query; if it was copied from a result with signs for white space, return that chunk."""
        text = to_bytes(query).decode(errors="replace")
        plain = unescape_query(text)
        if plain == text or self.find_row(text.encode(errors="replace")) is not None:
            return query
        log.info("%s stands for %r: signs for white space are taken as such", text, plain)
        return plain


def check_chunks(options: Options) -> None:
    """Raise ConfigError for a model that embeds no chunk by itself, and so has no index of chunks."""
    kind = options.model.kind
    if not SYSTEMS[kind].chunks:
        raise ConfigError(
            f"model.kind={kind} embeds no chunk by itself, so there is no index of chunks: it has contexts; "
            "`haed index RUN --space contexts`, then `haed neighbours RUN --context TEXT`"
        )
