"""The index of places in a text: states of the main model, with the position of each.

A vector is the model's state before a chunk, so it describes the preceding text, as far as the model's window reaches.
The table has the position of each place and some bytes of the text around it, so that results need no shards.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Self

import numpy as np

from data.chunkers import Chunker
from pipeline.run.index import COUNT, check_count
from pipeline.run.run_directory import RunFolder
from pipeline.run.spaces.faiss_search import Vectors, prepare_vectors
from pipeline.run.spaces.queries import Text, parse_passage
from pipeline.run.spaces.results import Passage, QueryResult, SearchResults, display_chunk, log_notes
from pipeline.run.spaces.storage import SCORES, IndexFiles, IndexMetadata

BEFORE, AFTER, NAMED = 128, 64, 96  # bytes of a passage before and after its place, and of a document's name
_TEXT = {"passage": "FIXED_LEN_BYTE_ARRAY", "name": "FIXED_LEN_BYTE_ARRAY"}
_NUMBERS = ("before", "length", "named", "document", "chunk", "offset")

Embed = Callable[[list[bytes]], np.ndarray]  # n texts: (n, E) float32


class ContextIndex:
    """An open index of places, which may be queried from several threads.

    Attributes:
        meta: contents of meta.json.
        search: the vectors, and the search among them.
    """

    def __init__(self, folder: RunFolder, meta: IndexMetadata, columns: dict[str, np.ndarray], search: Vectors) -> None:
        """Create the index from the contents of its files."""
        self.folder, self.meta, self.search, self._columns = folder, meta, search, columns

    @classmethod
    def open(cls, folder: RunFolder, digest: str | None = None) -> Self:
        """Open the index of a run; see `IndexFiles.open` for checks and errors."""
        files = IndexFiles.open(folder, "contexts", digest)
        columns = files.read_columns(**_TEXT, **dict.fromkeys(_NUMBERS, "INT64"))
        widths = {"before": BEFORE, "length": BEFORE + AFTER, "named": NAMED}
        if any(columns[name].min() < 0 or columns[name].max() > most for name, most in widths.items()):
            raise ValueError(f"the index in {files.place} is damaged (lengths of passages): {files.again}")
        return cls(folder, files.meta, columns, Vectors.open(files))

    @cached_property
    def chunker(self) -> Chunker:
        """The run's chunker."""
        return self.folder.load_chunker()

    def __len__(self) -> int:
        return len(self.search)

    def nearest_places(self, texts: Sequence[Text], count: int | None, embed: Embed) -> SearchResults:
        """Find the places whose context is nearest to that at the end of each text.

        Args:
            texts: passages, of which the model sees as much as its window holds.
            count: places for each text; None is eight. If there are fewer, all are returned, with a note.
            embed: returns the state after each text.

        Raises:
            ValueError: a text is empty.
        """
        wanted = check_count("count", COUNT if count is None else count)
        asked, vectors = self.embed_queries(texts, embed)
        scores, rows = self.search.find_nearest(vectors, min(wanted, len(self)))
        few = None
        if count is not None and count > len(self):
            few = f"{len(self):,} of {count:,} places: the index has no more; raise index.max_contexts for others"
        found = [
            QueryResult(
                display_chunk(text, self.meta.chunker),
                text.hex(),
                [self.passage_at(*each) for each in zip(near, own, strict=True)],
                few,
            )
            for text, near, own in zip(asked, rows.tolist(), scores.tolist(), strict=True)
        ]
        log_notes(found)
        meta, name = self.meta, SCORES[self.meta.metric]
        left = self.meta.left_out
        among = f"among {len(self):,} of the {len(self) + left:,} places of {self.meta.split}" if left else "all places"
        part = "".join(f", {of} {n}" for of, n in (("layer", meta.layer), ("scale", meta.scale)) if n is not None)
        return SearchResults(
            found, f"{name}{part}, document at byte, text before ▸ after; {among}{meta.chance_note}", name
        )

    def embed_queries(self, texts: Sequence[Text], embed: Embed) -> tuple[list[bytes], np.ndarray]:
        """Return the queried texts, and the states (n, W) after them as the index holds those of its places."""
        asked = [parse_passage(text, self.chunker, self.folder.open_corpus, self.meta.split) for text in texts]
        states = embed(asked) if asked else np.zeros((0, self.meta.width), np.float32)
        return asked, prepare_vectors(states, self.meta.metric)

    def passage_at(self, row: int, score: float) -> Passage:
        """Return the place of a row."""
        number = {name: int(self._columns[name][row]) for name in _NUMBERS}
        text = self._columns["passage"][row].tobytes()[: number["length"]]
        before, after, kind = text[: number["before"]], text[number["before"] :], self.meta.chunker
        return Passage(
            text=display_chunk(before, kind),
            hex=before.hex(),
            score=score,
            count=1,
            after=display_chunk(after, kind),
            name=self._columns["name"][row].tobytes()[: number["named"]].decode(errors="replace"),
            document=number["document"],
            chunk=number["chunk"],
            offset=number["offset"],
        )
