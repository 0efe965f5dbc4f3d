"""The index of places in a text: states of the main model, with the position of each.

A vector is the model's state before a chunk, so it describes the preceding text, as far as the model's window reaches.
The table has the position of each place and some bytes of the text around it, so that results need no shards.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.run.index.chunk_index import COUNT
from pipeline.run.index.faiss_search import Vectors, prepare_vectors
from pipeline.run.index.queries import (
    Neighbour,
    Passage,
    QueryResult,
    SearchResults,
    check_count,
    display_chunk,
    log_notes,
)
from pipeline.run.index.storage import SCORES, IndexFiles
from pipeline.run.run_directory import RunFolder

# Bytes of a passage before and after its place, whole pixels, and of a document's name.
BEFORE, AFTER, NAMED = 126, 63, 96
_TEXT = {"passage": "FIXED_LEN_BYTE_ARRAY", "name": "FIXED_LEN_BYTE_ARRAY"}
_NUMBERS = ("before", "length", "named", "document", "chunk", "offset")


class ContextIndex:
    """An open index of places, which may be queried from several threads.

    Args:
        folder: the run; see `IndexFiles` for checks and errors.
        digest: digest of the checkpoint that the index must be of, see `IndexFiles`.

    Attributes:
        meta: contents of meta.json.
        search: the vectors, and the search among them.
    """

    def __init__(self, folder: RunFolder, digest: str | None = None) -> None:
        files = IndexFiles(folder, "contexts", digest)
        columns = files.read_columns(**_TEXT, **dict.fromkeys(_NUMBERS, "INT64"))
        widths = {"before": BEFORE, "length": BEFORE + AFTER, "named": NAMED}
        if any(columns[name].min() < 0 or columns[name].max() > most for name, most in widths.items()):
            raise ValueError(f"the index in {files.place} is damaged (lengths of passages). {files.again}")
        self.meta, self.search, self._columns = files.meta, Vectors.open(files), columns

    def __len__(self) -> int:
        return len(self.search)

    def find_neighbours(self, texts: Sequence[bytes], states: np.ndarray, count: int | None) -> SearchResults:
        """Find the places nearest to the states (q, W) after texts; see `Probe.contexts`."""
        meta, name = self.meta, SCORES[self.meta.metric]
        wanted = check_count("count", COUNT if count is None else count)
        scores, rows = self.search.find_nearest(prepare_vectors(states, meta.metric), min(wanted, len(self)))
        note = None
        if count is not None and count > len(self):
            advice = "Raise index.max_contexts and build it again"
            note = f"only {len(self):,} of {count:,} places: the index has no more. {advice}"
        results = []
        for text, near, near_scores in zip(texts, rows.tolist(), scores.tolist(), strict=True):
            passages: list[Neighbour] = [self.passage_at(*each) for each in zip(near, near_scores, strict=True)]
            results.append(QueryResult(display_chunk(text, meta.chunker), text.hex(), passages, note))
        log_notes(results)
        left = meta.left_out
        among = f"among {len(self):,} of the {len(self) + left:,} places of {meta.split}" if left else "all places"
        part = "".join(f", {kind} {n}" for kind, n in (("layer", meta.layer), ("scale", meta.scale)) if n is not None)
        heading = f"{name}{part}, document at byte, text before ▸ after; {among}{meta.describe(meta.chance)}"
        return SearchResults(results, heading, name)

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
