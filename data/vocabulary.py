"""The distinct chunks of a corpus and how often each occurs: exact, in one pass, in bounded memory.

DuckDB counts them. It keeps up to `MEMORY` bytes, and writes what is beyond to a temporary folder.
"""

import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from data.chunkers import Chunker
from data.corpus import Corpus
from data.processes import available_threads
from data.shards import Sample
from data.statistics import hash_chunks

log = logging.getLogger(__name__)
MEMORY = 1 << 29  # bytes that DuckDB may use
SHARE = 1 << 24  # hashes that wait to be sorted
PART = 1 << 12  # chunks
_DISK = re.compile("offload|temp_directory|no space", re.IGNORECASE)  # in DuckDB's messages of memory that ran out
_LOOKED_AT = 4  # samples, of about a megabyte
_FREQUENT, _OFTEN = 1000, 5  # chunks are frequent up to this rank, if they occur so often


class VocabularyOverflowError(ValueError):
    """An error: there are more distinct chunks than a limit."""


@dataclass
class DistinctChunks:
    """A table of C distinct chunks, the most frequent first; equal counts are in the order of their bytes.

    Attributes:
        tokens: (C, K) uint8, zero beyond their lengths.
        lengths: (C,) uint8.
        counts: (C,) int64, occurrences of each.
        left_out: number of further chunks that would come after these.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    left_out: int = 0


def count_distinct_chunks(
    corpus: Corpus,
    *splits: str,
    most: int | None = None,
    at_least: int = 1,
    limit: int | None = None,
    any_of_equal: bool = False,
    on_shard: Callable[[], object] | None = None,
) -> DistinctChunks:
    """Count the distinct chunks of some splits together.

    Args:
        corpus: the corpus.
        splits: the splits to read.
        most: maximum number to return; None: all, in as much memory as they take.
        at_least: minimum count of a returned chunk.
        limit: maximum number of all distinct chunks.
        any_of_equal: of equally frequent chunks the first by a hash come first, not those of the lowest bytes.
        on_shard: called when a shard was read.

    Raises:
        VocabularyOverflowError: there are more than `limit`, raised as soon as that is certain.
        OSError: there is no room for the temporary file.
    """
    samples = _iterate_samples(corpus, *splits, on_shard=on_shard)
    return _count_samples(samples, corpus.build_chunker().k, most, at_least, limit, any_of_equal)


def _iterate_samples(corpus: Corpus, *splits: str, on_shard: Callable[[], object] | None = None) -> Iterator[Sample]:
    for split in splits:
        for shard in corpus.shards_of(split):
            yield from corpus.read(shard)
            if on_shard is not None:
                on_shard()


def _count_samples(
    samples: Iterable[Sample],
    k: int,
    most: int | None = None,
    at_least: int = 1,
    limit: int | None = None,
    any_of_equal: bool = False,
) -> DistinctChunks:
    import duckdb
    import pyarrow

    schema = pyarrow.schema({"chunk": pyarrow.large_binary()})
    failures: list[BaseException] = []  # DuckDB would tell them in its own words

    def read_batches() -> Iterator[Any]:
        try:
            for sample in samples if limit is None else _limited(samples, limit):
                ends = np.zeros(len(sample.lengths) + 1, np.int64)
                np.cumsum(sample.lengths, out=ends[1:])
                tokens = np.ascontiguousarray(sample.tokens)
                buffers = [None, pyarrow.py_buffer(ends), pyarrow.py_buffer(tokens)]  # no copy of the tokens
                chunks = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(sample.lengths), buffers)
                yield pyarrow.record_batch([chunks], schema=schema)
        except BaseException as error:
            failures.append(error)
            raise

    settings: dict[str, Any] = {"memory_limit": f"{MEMORY}B", "threads": available_threads()}
    with (
        tempfile.TemporaryDirectory(prefix="haed-chunks-") as folder,
        duckdb.connect(config=settings | {"temp_directory": folder, "preserve_insertion_order": False}) as database,
    ):
        try:
            database.register("chunks", pyarrow.RecordBatchReader.from_batches(schema, read_batches()))
            database.execute("CREATE TEMP TABLE counted AS SELECT chunk, count(*) AS times FROM chunks GROUP BY chunk")
            frequent = database.sql("FROM counted WHERE times >= ?", params=[at_least])
            ((total,),) = frequent.count("*").fetchall()
            ties = "md5(chunk), chunk" if any_of_equal else "chunk"
            table = frequent.order(f"times DESC, {ties}").limit(total if most is None else most).to_arrow_table()
        except duckdb.Error as error:
            if failures:
                raise failures[0] from None
            if not isinstance(error, duckdb.IOException | duckdb.OutOfMemoryException):
                raise
            place, reason = tempfile.gettempdir(), str(error).split("\n")[0]
            if isinstance(error, duckdb.OutOfMemoryException) and not _DISK.search(reason):
                raise MemoryError(reason) from error
            message = f"counting distinct chunks needs disk space in {place} ({reason}). Set TMPDIR to another folder."
            raise OSError(message) from error
    column = table["chunk"].cast(pyarrow.large_binary()).combine_chunks()
    tokens, lengths = _as_rows(column, k)
    times = table["times"].combine_chunks()  # its `to_numpy` would import pandas
    counts = np.frombuffer(times.buffers()[1], np.int64)[times.offset : times.offset + len(times)].copy()
    return DistinctChunks(tokens, lengths, counts, total - len(lengths))


def _as_rows(chunks: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens (C, K) uint8, padded with zeros, and lengths (C,) uint8 of an Arrow array of chunks."""
    _, offsets, content = chunks.buffers()
    ends = np.frombuffer(offsets, np.int64)[chunks.offset : chunks.offset + len(chunks) + 1] if len(chunks) else [0]
    lengths = np.diff(ends)
    tokens = np.zeros((len(chunks), k), np.uint8)
    if len(chunks):
        tokens[np.arange(k) < lengths[:, None]] = np.frombuffer(content, np.uint8)[ends[0] : ends[-1]]
    return tokens, lengths.astype(np.uint8)


def _limited(samples: Iterable[Sample], limit: int) -> Iterator[Sample]:
    """Pass samples on; raise VocabularyOverflowError once they have more than `limit` distinct chunks, told apart by 64-bit hashes."""
    known = np.zeros(0, np.uint64)
    for sample in samples:
        known = np.union1d(known, hash_chunks(sample.tokens, sample.lengths))
        if len(known) > limit:
            raise VocabularyOverflowError(f"there are more than {limit:,} distinct chunks")
        yield sample


class Occurrences:
    """The counts in `split` of the chunks of the split `among`, by 64-bit hashes, in 16 bytes per distinct chunk."""

    def __init__(self, corpus: Corpus, split: str, among: str) -> None:
        self._keys, waiting, size = np.zeros(0, np.uint64), [], 0
        for sample in _iterate_samples(corpus, among):
            waiting.append(hash_chunks(sample.tokens, sample.lengths))
            size += len(waiting[-1])
            if size > max(len(self._keys), SHARE):
                self._keys, waiting, size = np.unique(np.concatenate([self._keys, *waiting])), [], 0
        self._keys = np.unique(np.concatenate([self._keys, *waiting]))
        self._counts = np.zeros(len(self._keys), np.int64)
        for sample in _iterate_samples(corpus, split) if len(self._keys) else ():
            keys, counts = np.unique(hash_chunks(sample.tokens, sample.lengths), return_counts=True)
            place, known = self._find_keys(keys)
            self._counts[place[known]] += counts[known]

    def _find_keys(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return place, self._keys[place] == keys

    def count_occurrences(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the counts (N,) of chunks, 0 if not in `among`, given all their tokens (n,) and lengths (N,)."""
        if not len(self._keys):
            return np.zeros(len(lengths), np.int64)
        place, known = self._find_keys(hash_chunks(tokens, lengths))
        return np.where(known, self._counts[place], 0)


def count_documents_with(
    corpus: Corpus, split: str, chunks: DistinctChunks, on_shard: Callable[[], object] | None = None
) -> np.ndarray:
    """Count the documents of a split that contain each of some distinct chunks: (C,) int64.

    A document counts as several if it is longer than `PART` chunks, or if a sample ends inside it. So a corpus of one
    document, too, tells chunks that occur everywhere from those of one place.
    """
    known = hash_chunks(chunks.tokens[np.arange(chunks.tokens.shape[1]) < chunks.lengths[:, None]], chunks.lengths)
    order = np.argsort(known)
    known, totals = known[order], np.zeros(len(known), np.int64)
    for sample in _iterate_samples(corpus, split, on_shard=on_shard) if len(known) else ():
        keys, ends = hash_chunks(sample.tokens, sample.lengths), np.cumsum(sample.documents)
        within = np.arange(len(keys)) - np.repeat(ends - sample.documents, sample.documents)
        begins = within % PART == 0
        part = np.cumsum(begins)
        rows = np.lexsort((keys, part))
        keys, part = keys[rows], part[rows]
        first = np.concatenate([[True], (keys[1:] != keys[:-1]) | (part[1:] != part[:-1])])[: len(keys)]
        keys, times = np.unique(keys[first], return_counts=True)
        place = np.searchsorted(known, keys).clip(max=len(known) - 1)
        here = known[place] == keys
        totals[place[here]] += times[here]
    result = np.zeros_like(totals)
    result[order] = totals
    return result


def frequent_words(corpus: Corpus, number: int) -> list[str]:
    """Return some frequent chunks of the train split's first megabytes, if it is text. See `select_telling_chunks`."""
    first = list(islice(_iterate_samples(corpus, "train"), _LOOKED_AT))
    chunker = corpus.build_chunker()
    chosen = select_telling_chunks(_count_samples(first, chunker.k), number, chunker)
    words = [chunker.join_chunk(chunk) for chunk in chosen]
    return [word.decode() for word in words if _is_word(word)]


def select_telling_chunks(table: DistinctChunks, number: int, chunker: Chunker) -> list[bytes]:
    """Return the tokens of frequent chunks that show the topics of a corpus, the most frequent first.

    For text they are whole characters with at least one letter or digit. If few chunks are, any chunk is taken.
    """
    order = np.argsort(-table.counts, kind="stable")[:_FREQUENT]
    rows = [table.tokens[row].tobytes()[: table.lengths[row]] for row in order]
    rows = [chunk for chunk, row in zip(rows, order, strict=True) if table.counts[row] >= _OFTEN] or rows
    words = [chunk for chunk in rows if _is_word(chunker.join_chunk(chunk))]
    chosen = words if len(words) > len(rows) // 4 else rows
    ranks = np.unique(np.geomspace(1, max(1, len(chosen)), number).astype(int)) - 1
    return [chosen[rank] for rank in ranks if rank < len(chosen)]


def _is_word(chunk: bytes) -> bool:
    try:
        return any(character.isalnum() for character in chunk.decode())
    except UnicodeDecodeError:
        return False
