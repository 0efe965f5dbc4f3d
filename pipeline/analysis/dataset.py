"""Input arrays of the analyses: frequent chunks, their counts and embeddings, and the split as a stream of chunk rows.

This module reads the run and the corpus, so that the analyses of embeddings take plain arrays.

Legend: n chunks, E width of an embedding, S positions of the stream.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.corpus import Corpus
from data.statistics import hash_chunks
from data.vocabulary import DistinctChunks, count_distinct_chunks
from pipeline.analysis.geometry import cluster_directions
from pipeline.config import Options
from pipeline.console import escape_control_characters
from pipeline.run.index.chunk_index import known_count_threshold
from pipeline.run.index.queries import PIXELS, display_chunk
from pipeline.run.index.storage import IndexFiles
from pipeline.run.opened import Run

log = logging.getLogger(__name__)
FREQUENT, ENOUGH = 10, 1000  # default minimum count, and how many chunks must reach it


@dataclass
class ChunkTable:
    """Table of n distinct chunks, the most frequent first.

    Attributes:
        chunks: bytes of each chunk.
        rows: the same chunks as tokens and lengths, with their counts, and the number of further ones.
        least: minimum count that was asked of a chunk. All in the table may have more.
    """

    chunks: list[bytes]
    rows: DistinctChunks
    least: int


@dataclass
class AnalysisData:
    """Input data of an analysis.

    Attributes:
        run: the opened run.
        every: all chunks that were read, including those only exported.
        embedded: (N, E) embeddings of `every`.
        chunks: the first n of them, which are analysed; the following fields refer to these.
        counts: (n,) occurrences in the split.
        vectors: (n, E) embeddings.
        mean: (E,) mean of the run's index, or else of the known ones.
        labels: (n) displayed chunks.
        stream: (S,) the split, or its beginning, as rows of `every`.
        clusters: (n,) clusters of the uncentred directions, which predict the next chunk better (dev/LOG.md).
        pixels: true if chunks consist of pixels.
        notes: sentences on what was cut or left out.
    """

    run: Run
    every: ChunkTable
    embedded: np.ndarray
    chunks: list[bytes]
    counts: np.ndarray
    vectors: np.ndarray
    mean: np.ndarray
    labels: list[str]
    stream: np.ndarray
    clusters: np.ndarray
    pixels: bool
    notes: list[str]

    @cached_property
    def centred(self) -> np.ndarray:
        """Embeddings (n, E) less the mean. Their cosines rank neighbours."""
        return self.vectors - self.mean


def load_analysis_data(run: Run, options: Options) -> AnalysisData:
    """Read the corpus of a run and embed its frequent chunks.

    Raises:
        FileNotFoundError: the shards are gone.
        ValueError: the split has too few distinct chunks.
    """
    limits, corpus = options.analyse, run.folder.open_corpus()
    every = find_frequent_chunks(corpus, limits.split, max(limits.max_chunks, limits.projector), limits.min_count)
    log.info("embedding %s chunks and counting their contexts", f"{len(every.chunks):,}")
    vectors, size = run.embed_rows(every.rows.tokens, every.rows.lengths), min(limits.max_chunks, len(every.chunks))
    rows, whole = read_stream(corpus, limits.split, every, limits.corpus_chunks)
    notes = []
    if every.least > 1:
        notes.append(f"chunks that occur less than {every.least:,} times are left out (analyse.min_count=1 keeps all)")
    if left_out := len(every.chunks) - size + every.rows.left_out:
        notes.append(
            f"{left_out:,} chunks that are as rare or rarer are left out (analyse.max_chunks={limits.max_chunks})"
        )
    if not whole:
        notes.append(
            f"contexts are counted in the first {(rows >= 0).sum():,} known chunks of the split "
            f"(analyse.corpus_chunks={limits.corpus_chunks})"
        )
    if (mean := _mean_of_index(run)) is None:
        mean = vectors[every.rows.counts >= known_count_threshold(every.rows.counts)].mean(0)
    return AnalysisData(
        run=run,
        every=every,
        embedded=vectors,
        chunks=every.chunks[:size],
        counts=every.rows.counts[:size],
        vectors=vectors[:size],
        mean=mean,
        labels=label_chunks(run, every.chunks[:size]),
        stream=rows,
        clusters=cluster_directions(vectors[:size], limits.clusters, options.seed),
        pixels=run.chunker.name == PIXELS,
        notes=notes,
    )


def _mean_of_index(run: Run) -> np.ndarray | None:
    """Return the mean that the index of this checkpoint subtracts; None if there is no such index or no mean."""
    with suppress(OSError, ValueError):
        mean = IndexFiles(run.folder, "chunks", run.digest).meta.mean
        return None if mean is None else np.array(mean, np.float32)
    return None


def label_chunks(run: Run, chunks: list[bytes]) -> list[str]:
    """Return the chunks in displayable form."""
    if run.of_values and run.chunker.name != PIXELS:  # sound is no text, even if it is cut as one
        return [chunk.hex() for chunk in chunks]
    return [escape_control_characters(display_chunk(chunk, run.chunker.name)) for chunk in chunks]


def find_frequent_chunks(corpus: Corpus, split: str, most: int, min_count: int | None) -> ChunkTable:
    """Return the most frequent chunks of a split, at most `most`.

    Of equally frequent ones, as most chunks of pictures are, any are taken, always the same. Without `min_count` the
    minimum is 10 occurrences if 1,000 chunks reach it, otherwise 1. For rarer chunks, neither contexts nor rows of the
    encoder's table are reliable.

    Raises:
        ValueError: fewer than three chunks remain.
    """
    distinct = count_distinct_chunks(corpus, split, most=most, at_least=min_count or FREQUENT, any_of_equal=True)
    least = min_count or FREQUENT
    if min_count is None and len(distinct.counts) + distinct.left_out < ENOUGH:
        distinct, least = count_distinct_chunks(corpus, split, most=most, any_of_equal=True), 1
    if len(distinct.counts) < 3:
        raise ValueError(
            f"{len(distinct.counts)} distinct chunks of the {split} split occur {least} times or more, too few to analyse. "
            f"{'Lower analyse.min_count, or choose' if least > 1 else 'Choose'} another analyse.split"
        )
    chunks = [row.tobytes()[:length] for row, length in zip(distinct.tokens, distinct.lengths, strict=True)]
    return ChunkTable(chunks, distinct, least)


def read_stream(corpus: Corpus, split: str, table: ChunkTable, most: int) -> tuple[np.ndarray, bool]:
    """Read a split as rows of a table (S,) int32, and return them and whether the split was read to its end.

    Chunks missing from the table are -1. One more -1 precedes each document, so that no pair of neighbours in the
    stream crosses documents. Reading stops after `most` chunks.
    """
    real = np.arange(table.rows.tokens.shape[1]) < table.rows.lengths[:, None]
    keys = hash_chunks(table.rows.tokens[real], table.rows.lengths)
    order = np.argsort(keys)
    keys, parts, size = keys[order], [], 0
    for shard in corpus.shards_of(split):
        for sample in corpus.read(shard):
            hashes = hash_chunks(sample.tokens, sample.lengths)
            place = np.searchsorted(keys, hashes).clip(max=len(keys) - 1)
            rows = np.where(keys[place] == hashes, order[place], -1).astype(np.int32)
            begins, left = np.cumsum(sample.documents) - sample.documents, most - size
            parts.append(np.insert(rows[:left], begins[begins < left], -1))
            size += len(rows)
            if size > most:
                return np.concatenate(parts), False
    return np.concatenate(parts or [np.zeros(0, np.int32)]), True
