"""Questions to the indexes of a run, from Python as from the command line.

from pipeline import open_run
probe = open_run("runs/quickstart").probe
probe.neighbours("def ", "class ")
probe.analogy(like="for ", minus="while ", plus="if ")
probe.expected("for i in ")
probe.contexts("a passage that others are to be like")
probe.vectors(min_count=10), probe.query_vectors(["def "])
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from pipeline.config import Phase
from pipeline.console import escape_control_characters
from pipeline.run.index import ChunkIndex, SearchResults
from pipeline.run.run_directory import RunFolder
from pipeline.run.spaces.contexts import ContextIndex
from pipeline.run.spaces.queries import START, Texts, parse_prefix, to_texts
from pipeline.run.spaces.results import data_frame, display_chunk

if TYPE_CHECKING:
    import pandas

log = logging.getLogger(__name__)


class Model(Protocol):
    """The methods of a run's model that queries need; `pipeline.run.opened.Run` has them."""

    def embed(self, chunks: list[bytes]) -> np.ndarray:
        """Return embeddings (n, E) of chunks."""

    def context(
        self, text: bytes, layer: int | None = None, scale: int | None = None, seen: int | None = None
    ) -> np.ndarray:
        """Return the state (W,) after a text."""

    def expected(self, text: bytes) -> np.ndarray:
        """Return the predicted vector (E,) after a text, in the space of chunk embeddings."""


class Probe:
    """Queries to the indexes of a checkpoint. An index is opened at its first query, and the model if it is needed.

    Results print as a table; `to_frame()` returns them as a pandas data frame.
    """

    def __init__(self, folder: RunFolder, digest: str | None, model: Callable[[Phase], Model]) -> None:
        """Create the probe of a run; nothing is opened yet.

        Args:
            folder: folder of the run.
            digest: digest of the checkpoint that indexes must be of; None accepts the one each was made of, if it is
                still the run's.
            model: opens the model of a phase.
        """
        self._folder, self._digest, self._model = folder, digest, model

    @cached_property
    def index(self) -> ChunkIndex:
        """The index of chunks."""
        return ChunkIndex.open(self._folder, self._digest)

    @cached_property
    def places(self) -> ContextIndex:
        """The index of contexts."""
        return ContextIndex.open(self._folder, self._digest)

    def _embed_chunks(self, chunks: list[bytes]) -> np.ndarray:
        return self._model(self.index.meta.stage).embed(chunks)

    def vectors(
        self, min_count: int | None = None, space: Literal["chunks", "contexts"] = "chunks"
    ) -> tuple[np.ndarray, "pandas.DataFrame"]:
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
        if space == "contexts":
            if min_count is not None:
                raise ValueError("min_count is of chunks: a place in the text is there once. Leave it out.")
            rows = [asdict(self.places.passage_at(row, 0.0)) for row in range(len(self.places))]
            frame = data_frame([{"row": number} | row for number, row in enumerate(rows)])
            return np.array(self.places.search.exact), frame.drop(columns=["score", "count"])
        if space != "chunks":
            raise ValueError(f"space={space!r} has no vectors. Use space='chunks' or space='contexts'.")
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

    def query_vectors(self, queries: Texts, space: Literal["chunks", "contexts"] = "chunks") -> np.ndarray:
        """Return vectors (q, E) float32 of queries in the space of `vectors`, as `neighbours` uses them.

        Args:
            queries: one or several chunks; for contexts one or several texts, whose ends are the queries.
            space: as in `vectors`.

        Raises:
            TypeError: a query is neither a str nor bytes.
            ValueError: a query is not valid for this run.
        """
        asked = to_texts(queries, 'run.probe.query_vectors(["return "])')
        if space == "contexts":
            return self.places.embed_queries(asked, self._compute_states)[1]
        if space != "chunks":
            raise ValueError(f"space={space!r} has no vectors. Use space='chunks' or space='contexts'.")
        return self.index.query_vectors(asked, self._embed_chunks)

    def neighbours(self, *queries: Texts, count: int | None = None, min_count: int | None = None) -> SearchResults:
        """Find the chunks nearest to each query, by default to some of the corpus; see `ChunkIndex.nearest_chunks`.

        A query may also be a list of queries.
        """
        asked = _flatten_texts(queries, 'run.probe.neighbours("return ")')
        return self.index.nearest_chunks(asked, count, self._embed_chunks, min_count=min_count)

    def analogy(
        self, like: Texts, minus: Texts = (), plus: Texts = (), count: int | None = None, min_count: int | None = None
    ) -> SearchResults:
        """Find the chunks nearest to `like` − `minus` + `plus`, each one or several chunks; see `ChunkIndex.nearest_to_sum`."""
        first, less, more = (
            to_texts(x, 'run.probe.analogy("for ", minus="while ", plus="if ")') for x in (like, minus, plus)
        )
        return self.index.nearest_to_sum(first, less, more, count, self._embed_chunks, min_count)

    def expected(self, *texts: Texts, count: int | None = None, min_count: int | None = None) -> SearchResults:
        """Find the chunks nearest to the model's prediction after each text; a text may also be a list of texts.

        The prediction is ŷ, which is compared with whole embeddings, from which no mean is subtracted. `Run.next`
        returns probabilities, which take the bias and the counts of chunks into account.
        """
        index = self.index
        example = 'run.probe.expected("for i in ")'
        given = _flatten_texts(texts, example)
        if not given:
            raise ValueError(f"nothing is asked. Use {example}.")
        asked = [parse_prefix(text, index.chunker, index.folder.open_corpus, index.meta.split) for text in given]
        model = self._model(index.meta.stage)
        vectors = np.stack([model.expected(text) for text in asked])
        labels = [(display_chunk(text, index.meta.chunker) if text else START, text) for text in asked]
        return index.search_predictions(labels, vectors, count, min_count)

    def contexts(self, *texts: Texts, count: int | None = None) -> SearchResults:
        """Find the places of the corpus whose state is nearest to that after each text.

        A text may also be a list of texts.
        """
        return self.places.nearest_places(
            _flatten_texts(texts, 'run.probe.contexts("for i in ")'), count, self._compute_states
        )

    def _compute_states(self, asked: list[bytes]) -> np.ndarray:
        """Return the states (n, W) after texts."""
        meta = self.places.meta
        model = self._model(meta.stage)
        for text in asked:
            if meta.scale is not None and len(text) < meta.scale:
                log.warning(
                    "%s has %d bytes, and scale %d reads whole groups of so many: it knows nothing of it, give more text",
                    escape_control_characters(display_chunk(text, meta.chunker)),
                    len(text),
                    meta.scale,
                )
        return np.stack([model.context(text, meta.layer, meta.scale, meta.context) for text in asked])


def _flatten_texts(asked: tuple[Texts, ...], example: str) -> list[bytes]:
    """Return the texts that were given one by one or in lists, as one list."""
    return [text for each in asked for text in to_texts(each, example)]
