"""Queries to the indexes of a run, from Python as from the command line.

from pipeline import open_run
probe = open_run("runs/quickstart").probe
probe.neighbours("def ", "class ")
probe.analogy(like="for ", minus="while ", plus="if ")
probe.expected("for i in ")
probe.contexts("a passage that others are to be like")
probe.vectors(min_count=10), probe.query_vectors(["def "])
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from data.chunkers import Chunker
from data.vocabulary import select_telling_chunks
from pipeline.config import Phase
from pipeline.console import escape_control_characters, unescape_query
from pipeline.run.index.chunk_index import ChunkIndex, check_chunks
from pipeline.run.index.context_index import ContextIndex
from pipeline.run.index.faiss_search import prepare_vectors
from pipeline.run.index.queries import (
    START,
    SearchResults,
    Texts,
    data_frame,
    display_chunk,
    log_first,
    parse_chunk,
    parse_text,
    to_texts,
)
from pipeline.run.index.storage import Space
from pipeline.run.run_directory import RunFolder

if TYPE_CHECKING:
    import pandas

OWN_QUERIES = 6


class Probe:
    """Queries to the indexes of a checkpoint. An index is opened at its first query, and the model if it is needed.

    Results print as a table; `to_frame()` returns them as a pandas data frame.
    """

    def __init__(self, folder: RunFolder, digest: str | None, open_model: Callable[[Phase], Any]) -> None:
        """Create the probe of a run; nothing is opened yet.

        Args:
            folder: folder of the run.
            digest: digest of the checkpoint that indexes must be of; None accepts the one each was made of, if it is
                still the run's.
            open_model: opens the `Run` of a phase. It is called for texts, and for chunks that the index does not have.
        """
        self._folder, self._digest, self._open_model = folder, digest, open_model
        self._open_corpus = cache(folder.open_corpus)

    @cached_property
    def index(self) -> ChunkIndex:
        """The index of chunks."""
        check_chunks(self._folder.load_options())
        return ChunkIndex(self._folder, self._digest)

    @cached_property
    def places(self) -> ContextIndex:
        """The index of contexts."""
        return ContextIndex(self._folder, self._digest)

    @cached_property
    def _chunker(self) -> Chunker:
        return self._folder.load_chunker()

    def vectors(self, min_count: int | None = None, space: Space = "chunks") -> "tuple[np.ndarray, pandas.DataFrame]":
        """Return the vectors that are searched, ready for FAISS, and a data frame whose row i describes vector i.

        An inner product of two vectors is the score that `neighbours` returns; for an index with `l2`, their distance
        is. The mean is subtracted already, and vectors have unit length if the score is a cosine.

        Args:
            min_count: minimum count of a chunk; None is the index's floor. It applies to chunks only.
            space: chunks, or contexts, the places of the text.

        Returns:
            Vectors (n, E) float32, a copy; and a data frame with `row`, `text`, `hex`, `count`, `length` and `norm`.
            For places it has `row`, `text`, `hex`, `after`, `name`, `document`, `chunk` and `offset`.

        Raises:
            ImportError: pandas is not installed.
            ValueError: no chunk has this count.
        """
        _check_space(space)
        if space == "contexts":
            if min_count is not None:
                raise ValueError("min_count applies to chunks only. Leave it out.")
            rows = [asdict(self.places.passage_at(row, 0.0)) for row in range(len(self.places))]
            frame = data_frame([{"row": number} | row for number, row in enumerate(rows)])
            return np.array(self.places.search.exact[:]), frame.drop(columns=["score", "count"])
        index = self.index
        among, _ = index.searched_rows(min_count)
        chunks = [index.chunk_at(row) for row in range(among)]
        columns = {
            "row": range(among),
            "text": [display_chunk(chunk, index.meta.chunker) for chunk in chunks],
            "hex": [chunk.hex() for chunk in chunks],
            "count": np.array(index.chunks.counts[:among]),
            "length": [len(chunk) for chunk in chunks],
            "norm": np.array(index.norms[:among]),
        }
        return np.array(index.vectors[:among]), data_frame(columns)

    def query_vectors(self, queries: Texts, space: Space = "chunks") -> np.ndarray:
        """Return vectors (q, E) float32 of queries in the space of `vectors`, as `neighbours` uses them.

        Args:
            queries: one or several chunks; for contexts one or several texts, whose ends are the queries.
            space: as in `vectors`.

        Raises:
            TypeError: a query is neither a str nor bytes.
            ValueError: a query is not valid for this run.
        """
        _check_space(space)
        texts = to_texts(queries, 'run.probe.query_vectors(["return "])')
        if space == "contexts":
            return prepare_vectors(self._compute_states(texts)[1], self.places.meta.metric)
        if not texts:
            return np.zeros((0, self.index.meta.width), np.float32)
        return prepare_vectors(self._embed_chunks(self._parse_chunks(texts)), self.index.meta.metric)

    def neighbours(
        self, *queries: Texts, count: int | None = None, min_count: int | None = None, skip_invalid: bool = False
    ) -> SearchResults:
        """Find the chunks nearest to each query, without the query itself.

        Args:
            queries: chunks, or lists of chunks, see `parse_chunk`; if empty, frequent chunks of the corpus.
            count: neighbours of each query; None is eight. If there are fewer, all are returned, with a note.
            min_count: minimum count of a neighbour; None is the index's floor.
            skip_invalid: skip queries that are no chunks of this run, meant for another kind of data.

        Raises:
            ValueError: a query is not a chunk of this run, or no chunk has this count.
        """
        texts = _flatten_texts(queries, 'run.probe.neighbours("return ")')
        chunks = self._parse_chunks(texts, skip_invalid)
        chunks = chunks or select_telling_chunks(self.index.chunks, OWN_QUERIES, self._chunker)
        labelled = [(self._display(chunk), chunk) for chunk in chunks]
        without = [[chunk] for chunk in chunks]
        return self.index.find_neighbours(labelled, self._embed_chunks(chunks), count, min_count, without)

    def analogy(
        self, like: Texts, minus: Texts = (), plus: Texts = (), count: int | None = None, min_count: int | None = None
    ) -> SearchResults:
        """Find the chunks nearest to `like` − `minus` + `plus`, each one or several chunks, without these themselves.

        Raises:
            ValueError: nothing is added, or as `neighbours`.
        """
        parts = [to_texts(x, 'run.probe.analogy("for ", minus="while ", plus="if ")') for x in (like, minus, plus)]
        if not (parts[0] or parts[2]):
            raise ValueError("`--minus` needs `--like` or `--plus`")
        signs = [sign for sign, part in zip((1.0, -1.0, 1.0), parts, strict=True) for _ in part]
        chunks = self._parse_chunks([text for part in parts for text in part])
        vectors = self._embed_chunks(chunks)
        vector = np.array([signs], np.float32) @ vectors
        if np.linalg.norm(vector) < 1e-6 * np.linalg.norm(vectors):
            raise ValueError("what is added and what is subtracted is the same, so nothing is left to look for")
        words = [f" {'-' if sign < 0 else '+'} {self._display(x)}" for sign, x in zip(signs, chunks, strict=True)]
        label = "".join(words).removeprefix(" + ")
        return self.index.find_neighbours([(label, b"".join(chunks))], vector, count, min_count, [chunks])

    def expected(self, *texts: Texts, count: int | None = None, min_count: int | None = None) -> SearchResults:
        """Find the chunks nearest to the model's prediction after each text; a text may also be a list of texts.

        The prediction is ŷ, which is compared with whole embeddings, from which no mean is subtracted. `Run.next`
        returns probabilities, which take the bias and the counts of chunks into account.
        """
        index, example = self.index, 'run.probe.expected("for i in ")'
        queries, split = _flatten_texts(texts, example), index.meta.split
        prefixes = [parse_text(text, self._chunker, self._open_corpus, split) for text in queries]
        if not prefixes:
            raise ValueError(f"the query is empty. Use {example}.")
        model = self._open_model(index.meta.stage)
        vectors = np.stack([model.expected(prefix) for prefix in prefixes])
        labelled = [(self._display(prefix) if prefix else START, prefix) for prefix in prefixes]
        return index.find_neighbours(labelled, vectors, count, min_count, are_predictions=True)

    def contexts(self, *texts: Texts, count: int | None = None) -> SearchResults:
        """Find the places of the corpus whose state is nearest to that after each text.

        Args:
            texts: passages, or lists of passages, of which the model sees as much as its window holds.
            count: places for each text; None is eight. If there are fewer, all are returned, with a note.

        Raises:
            ValueError: a text is empty.
        """
        passages, states = self._compute_states(_flatten_texts(texts, 'run.probe.contexts("for i in ")'))
        return self.places.find_neighbours(passages, states, count)

    def _display(self, chunk: bytes) -> str:
        return display_chunk(chunk, self._chunker.name)

    def _parse_chunks(self, queries: Sequence[bytes], skip_invalid: bool = False) -> list[bytes]:
        chunks, notes, cut = [], [], []
        for query in queries:
            text = query.decode(errors="surrogateescape")
            plain = unescape_query(text)
            if is_copied := plain != text and self.index.find_row(query) is None:
                shown = query.decode(errors="replace")
                notes.append(f"{shown} is read as {plain!r}: signs for white space are replaced")
            try:
                meant = plain.encode(errors="surrogateescape") if is_copied else query
                chunk, note = parse_chunk(meant, self._chunker, self._open_corpus, self.index.meta.split)
            except ValueError as error:
                if not skip_invalid:
                    raise
                notes.append(f"left out: {error}")
                continue
            chunks.append(chunk)
            cut += [note] if note else []
        log_first(logging.INFO, notes)
        log_first(logging.WARNING, cut)
        return chunks

    def _embed_chunks(self, chunks: list[bytes]) -> np.ndarray:
        """Return vectors (n, E) of chunks as the index holds them; the model embeds those that it does not have."""
        index = self.index
        rows = [index.find_row(chunk) for chunk in chunks]
        missing = list(dict.fromkeys(chunk for chunk, row in zip(chunks, rows, strict=True) if row is None))
        embedded = {}
        if missing:
            vectors = self._open_model(index.meta.stage).embed(missing)
            embedded = dict(zip(missing, prepare_vectors(vectors, index.meta.metric, index.mean), strict=True))
        notes = []
        for chunk in missing:
            alike = chunk.removesuffix(b" ") if chunk.endswith(b" ") else chunk + b" "
            shown, other = (escape_control_characters(self._display(each)) for each in (chunk, alike))
            hint = "" if index.find_row(alike) is None else f"; the index has {other}"
            notes.append(f"{shown} is not in the index, so its own embedding is used{hint}")
        log_first(logging.INFO, notes)
        pairs = zip(chunks, rows, strict=True)
        return np.stack([embedded[chunk] if row is None else index.vectors[row] for chunk, row in pairs])

    def _compute_states(self, texts: Sequence[bytes]) -> tuple[list[bytes], np.ndarray]:
        """Return the queried passages, and the states (n, W) after them."""
        meta = self.places.meta
        passages = [parse_text(text, self._chunker, self._open_corpus, meta.split) for text in texts]
        if not all(passages):
            raise ValueError("the query is empty. Give the text to search for")
        if not passages:
            return [], np.zeros((0, meta.width), np.float32)
        model = self._open_model(meta.stage)
        short = [passage for passage in passages if meta.scale is not None and len(passage) < meta.scale]
        shown = [f"{escape_control_characters(self._display(each))} has {len(each)} bytes" for each in short]
        few = f"fewer than one group of scale {meta.scale}. Give more text"
        log_first(logging.WARNING, [f"{each}, {few}" for each in shown])
        return passages, np.stack([model.context(each, meta.layer, meta.scale, meta.context) for each in passages])


def _check_space(space: str) -> None:
    if space not in ("chunks", "contexts"):
        raise ValueError(f"space={space!r} has no vectors. Use space='chunks' or space='contexts'.")


def _flatten_texts(queries: tuple[Texts, ...], example: str) -> list[bytes]:
    return [text for each in queries for text in to_texts(each, example)]
