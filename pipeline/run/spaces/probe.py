"""Questions to the indexes of a run, from Python as from the command line.

from pipeline import open_run
probe = open_run("runs/quickstart").probe
probe.neighbours("def ", "class ")
probe.analogy(like="for ", minus="while ", plus="if ")
probe.expected("for i in ")
probe.contexts("a passage that others are to be like")
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from pipeline.options import Phase
from pipeline.run.folder import RunFolder
from pipeline.run.index import Answers, Index
from pipeline.run.spaces.answers import spell
from pipeline.run.spaces.contexts import Contexts
from pipeline.run.spaces.queries import START, after
from pipeline.shown import visible

log = logging.getLogger(__name__)
Texts = str | bytes | Sequence[str | bytes]


class Model(Protocol):
    """What a run's model is asked for; `pipeline.run.opened.Run` is one."""

    def embed(self, chunks: list[bytes]) -> np.ndarray:
        """Embeddings (n, E) of chunks."""

    def context(
        self, text: bytes, layer: int | None = None, scale: int | None = None, seen: int | None = None
    ) -> np.ndarray:
        """The state (W,) after a text."""

    def expected(self, text: bytes) -> np.ndarray:
        """The vector (E,) that is expected after a text, among those of chunks."""


class Probe:
    """The indexes of a checkpoint, each opened at the first question to it, and the model, opened if it is needed.

    Answers print as a table; `to_frame()` gives them as a data frame of pandas.
    """

    def __init__(self, folder: RunFolder, digest: str | None, model: Callable[[Phase], Model]) -> None:
        """Of a run.

        Args:
            folder: of the run.
            digest: of the checkpoint that indexes must be of; None: that which each was made of, if it is still the run's.
            model: opens the model of a phase.
        """
        self._folder, self._digest, self._model = folder, digest, model

    @cached_property
    def index(self) -> Index:
        """The index of chunks."""
        return Index.open(self._folder, self._digest)

    @cached_property
    def places(self) -> Contexts:
        """The index of contexts."""
        return Contexts.open(self._folder, self._digest)

    def _embed(self, chunks: list[bytes]) -> np.ndarray:
        return self._model(self.index.meta.stage).embed(chunks)

    def neighbours(self, *queries: str | bytes, count: int | None = None, min_count: int | None = None) -> Answers:
        """The chunks nearest to each query, by default to some of the corpus; see `Index.nearest`."""
        return self.index.nearest(queries, count, self._embed, min_count=min_count)

    def analogy(
        self, like: Texts, minus: Texts = (), plus: Texts = (), count: int | None = None, min_count: int | None = None
    ) -> Answers:
        """The chunks nearest to `like` − `minus` + `plus`, each a chunk or several; see `Index.analogy`."""
        first, less, more = ([x] if isinstance(x, str | bytes) else list(x) for x in (like, minus, plus))
        return self.index.analogy(first, less, more, count, self._embed, min_count)

    def expected(self, *texts: str | bytes, count: int | None = None, min_count: int | None = None) -> Answers:
        """The chunks nearest to what the model predicts after each text: ŷ asked for among whole embeddings, mean and all.

        Probabilities, with the bias and the counts of chunks, are what `Run.next` tells.
        """
        index = self.index
        asked = [after(text, index.chunker, index.folder.corpus, index.meta.split) for text in texts]
        model = self._model(index.meta.stage)
        vectors = np.stack([model.expected(text) for text in asked])
        labels = [(spell(text, index.meta.chunker) if text else START, text) for text in asked]
        return index.expected(labels, vectors, count, min_count)

    def contexts(self, *texts: str | bytes, count: int | None = None) -> Answers:
        """The places of the corpus where the model's state is nearest to that after each text; see `Contexts.nearest`."""
        meta = self.places.meta

        def embed(asked: list[bytes]) -> np.ndarray:
            model = self._model(meta.stage)
            for text in asked:
                if meta.scale is not None and len(text) < meta.scale:
                    log.warning(
                        "%s has %d bytes, and scale %d reads whole groups of so many: it knows nothing of it, give more text",
                        visible(spell(text, meta.chunker)),
                        len(text),
                        meta.scale,
                    )
            return np.stack([model.context(text, meta.layer, meta.scale, meta.context) for text in asked])

        return self.places.nearest(texts, count, embed)
