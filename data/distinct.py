"""The distinct chunks of a corpus and their counts: exact, in one pass, in bounded memory.

A chunk is a record of 64-bit words: its bytes, padded with zeros to K, its length, and its count in the last word.
Records are collected in memory. When they fill `SHARE`, equal chunks are merged by sorting. If more than half of the
share remains, all records go to a temporary file, in the order of their hashes. At the end the file is read one range
of hashes after the other, each about half a share. So n chunks always take O(n log n) time.

Peak memory is about five shares (the copies of a sort) plus the result. The file takes at most the size of all records.
"""

import functools
import logging
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import IO

import numpy as np

from data.corpus import Corpus
from data.shards import Sample
from data.statistics import hashes, mixed

log = logging.getLogger(__name__)
SHARE = 1 << 27  # bytes
PART = 1 << 12  # chunks
_LOOKED_AT = 4  # samples to count, of about a megabyte each
_FREQUENT, _OFTEN = 1000, 5  # maximum rank and minimum count of a frequent chunk


class TooMany(ValueError):
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


def distinct_chunks(
    corpus: Corpus, *splits: str, most: int | None = None, at_least: int = 1, limit: int | None = None
) -> DistinctChunks:
    """Count the distinct chunks of some splits together.

    Args:
        corpus: the corpus.
        splits: the splits to read.
        most: maximum number to return; None: all, in as much memory as they take.
        at_least: minimum count of a returned chunk.
        limit: maximum number of all distinct chunks.

    Raises:
        TooMany: there are more than `limit`, raised as soon as that is certain.
        OSError: there is no room for the temporary file.
    """
    chunks = sum(corpus.counts(split).chunks for split in splits)
    return _counted(_samples(corpus, *splits), corpus.chunker().k, chunks, most, at_least, limit)


def _samples(corpus: Corpus, *splits: str) -> Iterator[Sample]:
    return (sample for split in splits for shard in corpus.of(split) for sample in corpus.read(shard))


def _counted(
    samples: Iterable[Sample], k: int, chunks: int, most: int | None = None, at_least: int = 1, limit: int | None = None
) -> DistinctChunks:
    """Count the chunks of samples, which are at most `chunks`; see `distinct_chunks`."""
    with tempfile.SpooledTemporaryFile(1) as file:  # it makes no file before the first write
        counter = _Counter(k, chunks, file)
        for sample in samples:
            counter.add(sample)
            _check(counter.surely, limit)
        best, total, kept = counter.none, 0, 0
        for part in counter.parts():
            total += len(part)
            _check(total, limit)
            part = part[part[:, -1] >= at_least]
            kept += len(part)
            best = np.concatenate([best, part])
            if most is not None and len(best) > most + counter.share:
                best = _first(best, most)
    best = _first(best, len(best) if most is None else most)
    table = best.view(np.uint8)
    return DistinctChunks(table[:, :k], table[:, k], best[:, -1].astype(np.int64), kept - len(best))


def _check(found: int, limit: int | None) -> None:
    if limit is not None and found > limit:
        raise TooMany(f"there are more than {limit:,} distinct chunks")


class _Counter:
    """A counter of chunks of at most k tokens.

    Attributes:
        none: an empty table of records, (0, words).
        share: number of records that memory holds before equal chunks are merged.
        surely: lower bound on the number of distinct chunks so far.
    """

    def __init__(self, k: int, chunks: int, file: IO[bytes]) -> None:
        self.none = np.zeros((0, k // 8 + 2), np.uint64)
        self._width = 8 * self.none.shape[1]
        self.share, self.surely = SHARE // self._width, 0
        self._k, self._file, self._size = k, file, self._width * chunks
        ranges = max(1, -(-2 * chunks // self.share))
        self._bounds = np.array([(number << 64) // ranges for number in range(1, ranges)], np.uint64)
        self._ranges: list[np.ndarray] = []  # for each part of the file, first record of each range, and its end
        self._waiting: list[np.ndarray] = []

    def add(self, sample: Sample) -> None:
        """Count the chunks of a sample."""
        records = np.zeros((len(sample.lengths), self.none.shape[1]), np.uint64)
        table = records.view(np.uint8)
        table[:, : self._k][np.arange(self._k) < sample.lengths[:, None]] = sample.tokens
        table[:, self._k] = sample.lengths
        records[:, -1] = 1
        self._waiting.append(records)
        if sum(map(len, self._waiting)) > self.share:
            records, keys = _joined(self._waiting)
            self._waiting, self.surely = [records], max(self.surely, len(records))
            if len(records) > self.share // 2:
                self._spill(records, keys)

    def _spill(self, records: np.ndarray, keys: np.ndarray) -> None:
        place, end = tempfile.gettempdir(), 0
        if self._ranges:
            end = self._ranges[-1][-1]
        else:
            log.info("counting distinct chunks by a temporary file in %s", place)
        try:
            self._file.write(records.data)
        except OSError as error:
            size = f"counting distinct chunks takes up to {self._size / 1e9:.1f} GB for a while"
            raise OSError(f"{size}, and {place} has no room ({error}): set TMPDIR to another folder") from error
        self._ranges.append(end + np.array([0, *np.searchsorted(keys, self._bounds), len(records)]))
        self._waiting = []

    def parts(self) -> Iterator[np.ndarray]:
        """Yield distinct records, in parts that have no chunk in common."""
        records, keys = _joined([self.none, *self._waiting])
        if not self._ranges:
            yield records
            return
        self._spill(records, keys)
        del records, keys
        for begins, ends in pairwise(np.array(self._ranges).T.tolist()):
            yield _joined([self._read(begin, end) for begin, end in zip(begins, ends, strict=True)])[0]

    def _read(self, begin: int, end: int) -> np.ndarray:
        self._file.seek(self._width * begin)
        content = self._file.read(self._width * (end - begin))
        return np.frombuffer(content, np.uint64).reshape(-1, self.none.shape[1])


def _joined(parts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Merge the records of equal chunks. Return them in the order of their hashes, and the hashes."""
    records = np.concatenate(parts)
    keys = _keys(records)
    order = np.argsort(keys)
    records, keys = records[order], keys[order]
    if (_changes(records) & (keys[1:] == keys[:-1])).any():  # different chunks with one hash
        order = np.lexsort((*records[:, :-1].T, keys))
        records, keys = records[order], keys[order]
    first = np.flatnonzero(np.concatenate([[True], _changes(records)])[: len(records)])
    counts = np.add.reduceat(records[:, -1], first) if len(first) else records[:, -1]
    records, keys = records[first], keys[first]
    records[:, -1] = counts
    return records, keys


def _keys(records: np.ndarray) -> np.ndarray:
    return functools.reduce(lambda key, word: mixed(key ^ word), records[:, :-1].T, np.zeros(len(records), np.uint64))


def _changes(records: np.ndarray) -> np.ndarray:
    """Return for each record but the first if its chunk differs from that of the record before."""
    return functools.reduce(np.logical_or, (word[1:] != word[:-1] for word in records[:, :-1].T))


def _first(records: np.ndarray, most: int) -> np.ndarray:
    """Return the first records in the order of `DistinctChunks`, at most `most`."""
    rarity = np.uint64(0) - records[:, -1]
    if len(records) > most:  # sorting all is slow if most occur once
        last = np.partition(rarity, most - 1)[most - 1]
        before, ties = np.flatnonzero(rarity < last), np.flatnonzero(rarity == last)
        word, wanted = records[ties, 0].byteswap(), most - len(before)
        ties = ties[word <= np.partition(word, wanted - 1)[wanted - 1]]
        records, rarity = (x[np.concatenate([before, ties])] for x in (records, rarity))
    words = [word.byteswap() for word in records[:, -2::-1].T]  # big-endian numbers sort like their bytes
    return records[np.lexsort((*words, rarity))[:most]]


class Occurrences:
    """The counts in one split of the chunks of another, by 64-bit hashes.

    It takes 16 bytes per distinct chunk of the latter.

    Args:
        corpus: of both splits.
        split: where chunks are counted.
        among: the split whose chunks can be looked up.
    """

    def __init__(self, corpus: Corpus, split: str, among: str) -> None:
        self._keys, waiting, size = np.zeros(0, np.uint64), [], 0
        for sample in _samples(corpus, among):
            waiting.append(hashes(sample.tokens, sample.lengths))
            size += len(waiting[-1])
            if size > max(len(self._keys), SHARE // 8):
                self._keys, waiting, size = np.unique(np.concatenate([self._keys, *waiting])), [], 0
        self._keys = np.unique(np.concatenate([self._keys, *waiting]))
        self._counts = np.zeros(len(self._keys), np.int64)
        for sample in _samples(corpus, split) if len(self._keys) else ():
            keys, counts = np.unique(hashes(sample.tokens, sample.lengths), return_counts=True)
            place, found = self._find(keys)
            self._counts[place[found]] += counts[found]

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return place, self._keys[place] == keys

    def of(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the counts (N,) of chunks, given all their tokens (n,) and lengths (N,).

        It is 0 for a chunk that is not in `among`.
        """
        if not len(self._keys):
            return np.zeros(len(lengths), np.int64)
        place, found = self._find(hashes(tokens, lengths))
        return np.where(found, self._counts[place], 0)


def documents_with(corpus: Corpus, split: str, chunks: DistinctChunks) -> np.ndarray:
    """Count the documents of a split that contain each of some distinct chunks: (C,) int64.

    A document counts as several if it is longer than `PART` chunks, or if a sample ends inside it. So a corpus of one
    document, too, tells chunks that occur everywhere from those of one place.
    """
    known = hashes(chunks.tokens[np.arange(chunks.tokens.shape[1]) < chunks.lengths[:, None]], chunks.lengths)
    order = np.argsort(known)
    known, found = known[order], np.zeros(len(known), np.int64)
    for sample in _samples(corpus, split) if len(known) else ():
        keys, ends = hashes(sample.tokens, sample.lengths), np.cumsum(sample.documents)
        within = np.arange(len(keys)) - np.repeat(ends - sample.documents, sample.documents)
        begins = within % PART == 0
        part = np.cumsum(begins)
        rows = np.lexsort((keys, part))
        keys, part = keys[rows], part[rows]
        first = np.concatenate([[True], (keys[1:] != keys[:-1]) | (part[1:] != part[:-1])])[: len(keys)]
        keys, times = np.unique(keys[first], return_counts=True)
        place = np.searchsorted(known, keys).clip(max=len(known) - 1)
        here = known[place] == keys
        found[place[here]] += times[here]
    result = np.zeros_like(found)
    result[order] = found
    return result


def frequent_words(corpus: Corpus, number: int) -> list[str]:
    """Return some frequent chunks of the train split if it is text.

    Only its first megabytes are counted. See `telling`.
    """
    first = list(islice(_samples(corpus, "train"), _LOOKED_AT))
    found = _counted(first, corpus.chunker().k, sum(len(sample.lengths) for sample in first))
    return [chunk.decode() for chunk in telling(found, number) if _is_word(chunk)]


def telling(found: DistinctChunks, number: int) -> list[bytes]:
    """Return frequent chunks that show the topics of a corpus, the most frequent first.

    For text they are whole characters with at least one letter or digit. If few chunks are, any chunk is taken.
    """
    order = np.argsort(-found.counts, kind="stable")[:_FREQUENT]
    rows = [found.tokens[row].tobytes()[: found.lengths[row]] for row in order]
    rows = [chunk for chunk, row in zip(rows, order, strict=True) if found.counts[row] >= _OFTEN] or rows
    words = [chunk for chunk in rows if _is_word(chunk)]
    chosen = words if len(words) > len(rows) // 4 else rows
    ranks = np.unique(np.geomspace(1, max(1, len(chosen)), number).astype(int)) - 1
    return [chosen[rank] for rank in ranks if rank < len(chosen)]


def _is_word(chunk: bytes) -> bool:
    try:
        return any(character.isalnum() for character in chunk.decode())
    except UnicodeDecodeError:
        return False
