"""The index of a run's chunks, opened once and asked often; see `pipeline.run.spaces.stored` for its files.

A query is a chunk, or some of them added and subtracted, or a vector of that space, such as a prediction. Answers are chunks
that the model knows: those that occur often enough, unless more are asked for. Rows are in the order of `DistinctChunks`, so
what occurs so often stands before what does not.

Of the metric `centred` the mean embedding of those that are known, each counted once, is taken off all others and off what is
asked. A prediction is asked for without that: the model compares it with whole embeddings.
"""

import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Self

import numpy as np

from data.chunkers import Chunker
from data.corpus import Corpus
from data.distinct import DistinctChunks, telling
from haed.options import SYSTEMS
from pipeline.config import ConfigError
from pipeline.options import Options
from pipeline.run.folder import RunFolder
from pipeline.run.spaces.answers import PIXELS, Answers, Neighbour, Neighbours, say_notes, spell
from pipeline.run.spaces.queries import Text, parse, to_bytes
from pipeline.run.spaces.stored import SCORES, Files, Meta, Rows, StaleIndex, place_of
from pipeline.run.spaces.vectors import Vectors, prepared, whole
from pipeline.shown import meant, visible

log = logging.getLogger(__name__)
OWN_QUERIES = 6
COUNT = 8  # neighbours, unless it is said how many
FLOORS, ENOUGH = (10, 5, 3, 2), 1000  # occurrences, chunks
__all__ = ["PIXELS", "Answers", "Embed", "Index", "Neighbour", "Neighbours", "StaleIndex", "spell"]

Embed = Callable[[list[bytes]], np.ndarray]  # n chunks: (n, E) float32
Search = Callable[[int, int], tuple[np.ndarray, np.ndarray]]  # how many, among so many first rows: scores, rows


def floor(counts: np.ndarray) -> int:
    """How often a chunk occurs that the model may be taken to know: ten times, or as often as a thousand chunks do."""
    return next((least for least in FLOORS if int((counts >= least).sum()) >= ENOUGH), 1)


def check_count(name: str, value: int) -> int:
    """A number of answers, or of occurrences, as it was given.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}. Use {name}=8.")
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1. Use {name}=8.")
    return int(value)


class Index:
    """An opened index; it knows no model, so whoever asks for chunks that it does not have embeds them.

    It may be asked from several threads.

    Attributes:
        meta: what was indexed.
        chunks: the chunks, row for row, the most frequent first.
        find: gives the row of a chunk; None: it has none.
        norms: (n,) float32, lengths of their embeddings before the metric had its way with them.
        distances: (n,) float32, of the embeddings from their mean, where that is taken off; else None.
        mean: (E,) float32, likewise.
        search: their vectors, and the search among these.
    """

    def __init__(
        self,
        folder: RunFolder,
        meta: Meta,
        chunks: DistinctChunks,
        norms: np.ndarray,
        distances: np.ndarray | None,
        search: Vectors,
    ) -> None:
        """Of what the files of an index hold."""
        self.folder, self.meta, self.chunks, self.search = folder, meta, chunks, search
        self.norms, self.distances = norms, distances
        self.mean = None if meta.mean is None else np.array(meta.mean, np.float32)
        self.find = lru_cache(1 << 12)(self._find)  # a question looks each of its chunks up several times

    @classmethod
    def open(cls, folder: RunFolder, digest: str | None = None) -> Self:
        """Opens the index of a run, whose vectors stay in their file; see `Files.open` for what is checked and raised."""
        files = Files.open(folder, "chunks", digest)
        of_mean = {"from_mean": "FLOAT"} if files.meta.metric == "centred" else {}
        columns = files.columns(tokens="FIXED_LEN_BYTE_ARRAY", length="INT64", count="INT64", norm="FLOAT", **of_mean)
        tokens, lengths, counts = columns["tokens"], columns["length"], columns["count"]
        if not ((1 <= lengths) & (lengths <= tokens.shape[1])).all() or (np.diff(counts) > 0).any():
            raise ValueError(f"the index in {files.place} is damaged (lengths or counts): {files.again}")
        chunks = DistinctChunks(tokens, lengths.astype(np.uint8), counts)
        return cls(folder, files.meta, chunks, columns["norm"], columns.get("from_mean"), Vectors.open(files))

    @staticmethod
    def is_there(folder: RunFolder) -> bool:
        """Whether an index of chunks was built, of this version or an earlier one."""
        return any(
            os.path.lexists(place / "meta.json") for place in (place_of(folder, "chunks"), folder.path / "index")
        )

    def __len__(self) -> int:
        return len(self.chunks.counts)

    @property
    def vectors(self) -> np.ndarray | Rows:
        """(n, E) float32, as `prepared` gave them."""
        return self.search.exact

    @cached_property
    def chunker(self) -> Chunker:
        """The run's."""
        return self.folder.chunker()

    @cached_property
    def _corpus(self) -> Corpus:
        return self.folder.corpus()

    def chunk(self, row: int) -> bytes:
        """The chunk of a row."""
        return self.chunks.tokens[row].tobytes()[: int(self.chunks.lengths[row])]

    def _find(self, chunk: bytes) -> int | None:
        """The row of a chunk; None: it has none."""
        size = len(chunk)
        if not 1 <= size <= self.chunks.tokens.shape[1]:
            return None
        rows = np.flatnonzero((self.chunks.lengths == size) & (self.chunks.tokens[:, 0] == chunk[0]))
        same = (self.chunks.tokens[rows, :size] == np.frombuffer(chunk, np.uint8)).all(1)
        return int(rows[same.argmax()]) if same.any() else None

    def known(self, min_count: int | None = None) -> int:
        """How many chunks occur so often: they have the first rows; None: as often as the floor says."""
        least = self.meta.floor if min_count is None else min_count
        return int(np.searchsorted(-self.chunks.counts, -least, side="right"))

    def nearest(
        self,
        queries: Sequence[Text],
        count: int | None,
        embed: Embed,
        strict: bool = True,
        min_count: int | None = None,
    ) -> Answers:
        """The chunks nearest to each query, the query itself left out.

        Args:
            queries: see `pipeline.run.spaces.queries.parse`; none: frequent chunks of the corpus.
            count: neighbours of each; None: eight. Where there are fewer, all of them, which is said.
            embed: called with those queries that the index does not have, if there are any.
            strict: false leaves queries out that are no chunks of this run, meant for another kind of data.
            min_count: occurrences of a neighbour; None: the index's floor.

        Raises:
            ValueError: a query is none.
        """
        asked = self._asked(queries, strict)
        vectors = self.embedded(asked, embed)
        return self.answer([(spell(chunk, self.meta.chunker), chunk) for chunk in asked], vectors, count, min_count)

    def analogy(
        self,
        like: Sequence[Text],
        minus: Sequence[Text],
        plus: Sequence[Text],
        count: int | None,
        embed: Embed,
        min_count: int | None = None,
    ) -> Answers:
        """The chunks nearest to a sum: what `like` and `plus` name, less what `minus` names, which are left out themselves.

        Raises:
            ValueError: nothing is added, or as `nearest`.
        """
        if not (like or plus):
            raise ValueError("nothing is added: --minus goes with --like or --plus")
        signs = [1.0] * len(like) + [-1.0] * len(minus) + [1.0] * len(plus)
        asked = self._asked([*like, *minus, *plus], True)
        (vector,) = np.array([signs], np.float32) @ self.embedded(asked, embed)
        words = [spell(chunk, self.meta.chunker) for chunk in asked]
        label = "".join(f" {'-' if sign < 0 else '+'} {word}" for sign, word in zip(signs, words, strict=True))
        return self.answer([(label.removeprefix(" + "), b"".join(asked))], vector[None], count, min_count, [asked])

    def query_vectors(self, queries: Sequence[Text], embed: Embed) -> np.ndarray:
        """Vectors (q, E) of queries as `nearest` searches with them."""
        if not queries:
            return np.zeros((0, self.meta.width), np.float32)
        return prepared(self.embedded(self._asked(queries, True), embed), self.meta.metric)

    def embedded(self, chunks: list[bytes], embed: Embed) -> np.ndarray:
        """Vectors (n, E) of chunks as the index holds them: its own, and those that `embed` is called for."""
        rows = [self.find(chunk) for chunk in chunks]
        strange = list(dict.fromkeys(chunk for chunk, row in zip(chunks, rows, strict=True) if row is None))
        vectors = prepared(embed(strange), self.meta.metric, self.mean) if strange else ()
        made = dict(zip(strange, vectors, strict=True))
        for chunk in strange:
            near = [
                each
                for each in (chunk + b" ", chunk.removesuffix(b" "))
                if each != chunk and self.find(each) is not None
            ]
            hint = f"; the index has {visible(spell(near[0], self.meta.chunker))}" if near else ""
            log.info(
                "%s is not in the index, its own embedding is searched with%s",
                visible(spell(chunk, self.meta.chunker)),
                hint,
            )
        return np.stack([made[c] if r is None else self.vectors[r] for c, r in zip(chunks, rows, strict=True)])

    def answer(
        self,
        asked: Sequence[tuple[str, bytes]],
        vectors: np.ndarray,
        count: int | None,
        min_count: int | None = None,
        without: Sequence[Sequence[bytes]] | None = None,
    ) -> Answers:
        """The chunks nearest to vectors (q, E) of the index, or sums of them.

        Args:
            asked: the text and the bytes of each question.
            vectors: what was asked, without the mean if the index is; for cosines divided by their lengths here.
            count: neighbours of each; None: eight. Where there are fewer, all of them, which is said.
            min_count: occurrences of a neighbour; None: the index's floor.
            without: chunks that are no answers to each; None: the bytes of each question.

        Raises:
            ValueError: no chunk occurs so often.
        """
        search = partial(self.search.nearest, prepared(vectors, self.meta.metric))
        found = self._answers(
            asked, search, SCORES[self.meta.metric], count, min_count, without or [[chunk] for _, chunk in asked]
        )
        found.about += self.meta.against
        return found

    def expected(
        self, asked: Sequence[tuple[str, bytes]], vectors: np.ndarray, count: int | None, min_count: int | None = None
    ) -> Answers:
        """The chunks to which predictions (q, E) point, by the cosine where the metric is `centred`; else by the metric.

        The search is exact: an approximate one is tuned for chunks. The chance of two chunks is not told, as they are none.

        Raises:
            ValueError: as `answer`.
        """
        none: list[list[bytes]] = [[] for _ in asked]
        if self.mean is None or self.distances is None:
            exactly = partial(self.search.exactly, prepared(vectors, self.meta.metric))
            return self._answers(asked, exactly, SCORES[self.meta.metric], count, min_count, none)
        mean, distances, queries = self.mean, self.distances, prepared(vectors, "cosine")

        def search(most: int, among: int) -> tuple[np.ndarray, np.ndarray]:
            return whole(queries, self.vectors, mean, distances[:among], self.norms[:among], most)

        return self._answers(asked, search, SCORES["cosine"], count, min_count, none)

    def _answers(
        self,
        asked: Sequence[tuple[str, bytes]],
        search: Search,
        score: str,
        count: int | None,
        min_count: int | None,
        without: Sequence[Sequence[bytes]],
    ) -> Answers:
        among, least = self.searched(min_count)
        wanted = check_count("count", COUNT if count is None else count)
        left = [{self.find(chunk) for chunk in chunks} - {None} for chunks in without]
        most = max((len(rows) for rows in left), default=0)
        scores, rows = search(min(wanted + most, among), among)
        found = []
        for (label, chunk), drop, own, near in zip(asked, left, scores.tolist(), rows.tolist(), strict=True):
            kept = [self._named(row, score) for row, score in zip(near, own, strict=True) if row not in drop][:wanted]
            note = None if count is None else self._fewer(count, len(kept), among, least)
            found.append(Neighbours(label, chunk.hex(), kept, note))
        say_notes(found)
        return Answers(found, f"{score}, {self._about(among, least)}", score)

    def searched(self, min_count: int | None = None) -> tuple[int, int]:
        """How many chunks answers are taken from, the first rows, and how often these occur at least.

        Raises:
            ValueError: none occurs so often.
        """
        least = self.meta.floor if min_count is None else check_count("min_count", min_count)
        among = self.known(least)
        if not among:
            raise ValueError(
                f"no chunk of the index occurs {least:,} times: the most frequent has {self.chunks.counts[0]:,}"
            )
        return among, least

    def _fewer(self, count: int, found: int, among: int, least: int) -> str | None:
        """What is said of an answer with fewer neighbours than were asked for; None: it has as many."""
        if found >= count:
            return None
        often = f" that occur {least:,} times or more" if least > 1 else ""
        own = ", what is asked for left out" if found < among else ""
        more = f"; --min-count 1 searches all {len(self):,}" if among < len(self) else ""
        return f"{found:,} of {count:,} neighbours: the index has {among:,} chunks{often}{own}{more}"

    def _named(self, row: int, score: float) -> Neighbour:
        chunk = self.chunk(row)
        return Neighbour(spell(chunk, self.meta.chunker), chunk.hex(), score, int(self.chunks.counts[row]))

    def _about(self, among: int, least: int) -> str:
        rest = f", of {len(self):,} (--min-count 1)" if among < len(self) else ""
        often = f" that occur {least:,} times or more in {self.meta.split}" if among < len(self) or least > 1 else ""
        return f"count, chunk; among {among:,} chunks{often}{rest}"

    def _asked(self, queries: Sequence[Text], strict: bool) -> list[bytes]:
        found = []
        for query in queries:
            try:
                found.append(parse(self._typed(query), self.chunker, lambda: self._corpus, self.meta.split))
            except ValueError as error:
                if strict:
                    raise
                log.info("left out: %s", error)
        return found or telling(self.chunks, OWN_QUERIES)

    def _typed(self, query: Text) -> Text:
        """A query; one that was copied from an answer, with signs for white space, means the chunk that is shown so."""
        text = to_bytes(query).decode(errors="replace")
        plain = meant(text)
        if plain == text or self.find(text.encode(errors="replace")) is not None:
            return query
        log.info("%s stands for %r: signs for white space are taken as such", text, plain)
        return plain


def check_chunks(options: Options) -> None:
    """Raises ConfigError for a model that embeds no chunk by itself: it has no index of chunks."""
    kind = options.model.kind
    if not SYSTEMS[kind].chunks:
        raise ConfigError(
            f"model.kind={kind} embeds no chunk by itself, so there is no index of chunks: it has contexts; "
            "`haed index RUN --space contexts`, then `haed neighbours RUN --context TEXT`"
        )
