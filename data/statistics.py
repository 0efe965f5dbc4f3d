"""Statistics of a corpus: lengths of chunks and documents, distinct chunks and their frequencies, in bounded memory.

Of each document 8 bytes are kept, by which documents that two splits share are found.

Chunks are counted by 64-bit hashes. Up to 2^16 distinct chunks the counts are exact. Beyond, two sets are kept. The
chunks with the smallest hashes are a uniform sample of the distinct chunks. Their number and the tail of the
rank-frequency curve are estimated from it (k minimum values, Bar-Yossef et al. 2002). The most frequent chunks give the
head of the curve. Sketches of parts can be added, so workers share the counting.
"""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

KEPT, HEAD = 1 << 16, 1 << 12
_Count = Annotated[int, Field(ge=0, lt=2**63)]  # for readers of a manifest
_WAITING, _POINTS = 1 << 22, 60  # chunks that wait to be counted; points of a curve
_END = np.uint64(0xFFFFFFFFFFFFFFFF)
_MASKS = np.array([(1 << (8 * min(n, 8))) - 1 for n in range(256)], np.uint64)  # masks of the first n of eight bytes
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def hash_chunks(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return hashes (N,) uint64 of chunks; equal chunks have equal hashes.

    Args:
        tokens: (n,) uint8 of all chunks.
        lengths: (N,) uint8 of each.
    """
    padded = np.concatenate([tokens, np.zeros(8, np.uint8)])
    words = np.ndarray((len(tokens) + 1,), "<u8", padded.data, strides=(1,))
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = ends - lengths
    keys = words[begins] & _MASKS[lengths]
    keys ^= lengths.astype(np.uint64) * _MIX[0]
    rows = np.flatnonzero(lengths > 8)
    offset = 8
    while len(rows):
        word = words[begins[rows] + offset] & _MASKS[np.minimum(lengths[rows] - offset, 8)]
        keys[rows] = mix_bits(keys[rows]) ^ word
        offset += 8
        rows = rows[lengths[rows] > offset]
    return mix_bits(keys)


def mix_bits(x: np.ndarray) -> np.ndarray:
    """Apply the finaliser of SplitMix64 (Steele et al. 2014)."""
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = x ^ (x >> np.uint64(shift))
        x *= factor
    return x ^ (x >> np.uint64(31))


@dataclass
class Frequencies:
    """The counts of distinct chunks, of all or of a sample.

    Attributes:
        keys: (C,) uint64 ascending.
        counts: (C,) int64.
        limit: all keys up to this one are included; beyond it only those of the most frequent chunks.
    """

    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    limit: int = int(_END)

    def merge_counts(self, other: "Frequencies") -> None:
        """Add the counts of other documents."""
        self.keys, rows = np.unique(np.concatenate([self.keys, other.keys]), return_inverse=True)
        counts = np.concatenate([self.counts, other.counts])
        self.counts = np.bincount(rows, counts, len(self.keys)).astype(np.int64)  # sums are exact up to 2^53
        self.limit = min(self.limit, other.limit)
        self._trim_rarest()

    @property
    def _sample_size(self) -> int:
        return int(np.searchsorted(self.keys, np.uint64(self.limit), "right"))

    def _trim_rarest(self) -> None:
        below = self._sample_size
        if below > KEPT:
            self.limit, below = int(self.keys[KEPT - 1]), KEPT
        if below < len(self.keys):
            kept = np.zeros(len(self.keys), bool)
            kept[:below] = True
            kept[np.argpartition(self.counts, -HEAD)[-HEAD:]] = True
            self.keys, self.counts = self.keys[kept], self.counts[kept]

    @classmethod
    def from_keys(cls, keys: np.ndarray) -> "Frequencies":
        """Count the chunks with these keys (N,)."""
        frequencies = cls(*np.unique(keys, return_counts=True))
        frequencies._trim_rarest()
        return frequencies

    @property
    def is_exact(self) -> bool:
        """No distinct chunk is missing."""
        return self.limit == int(_END)

    @property
    def distinct_count(self) -> int:
        """Number of distinct chunks; an estimate with a standard error of 0.4 % unless `is_exact`."""
        if self.is_exact:
            return len(self.keys)
        return round((self._sample_size - 1) / (self.limit / 2**64))

    def rank_curve(self) -> list[tuple[int, int]]:
        """Return pairs of rank and count, evenly spaced over the logarithm of the rank."""
        head = np.sort(self.counts)[::-1]
        total = self.distinct_count
        ranks = np.unique(np.geomspace(1, max(total, 1), _POINTS).round().astype(np.int64))
        if self.is_exact:
            return [(int(rank), int(head[rank - 1])) for rank in ranks] if total else []
        below = self._sample_size
        sample = np.sort(self.counts[:below])[::-1]
        trusted = HEAD // 4  # deeper ranks may miss chunks that were rare in one part and frequent in another
        at = np.minimum((ranks * below // total), below - 1)
        return [(int(r), int(head[r - 1] if r <= trusted else sample[i])) for r, i in zip(ranks, at, strict=True)]


@dataclass
class DocumentLengths:
    """The lengths of documents in tokens, and numbers of documents with 2^n to 2^(n+1) − 1 tokens, by 2^n as text."""

    shortest: int
    longest: int
    documents_from: dict[str, int]


@dataclass
class Summary:
    """The statistics of a split in the manifest; see docs/reference/file-formats.md.

    Attributes:
        chunk_lengths: number of chunks of each length, from 0 on.
        distinct_chunks: their number.
        distinct_chunks_exact: False if it is an estimate.
        rank_frequency: pairs of rank and count; chunks are ranked by count.
        tokens_per_document: lengths of documents.
    """

    chunk_lengths: list[_Count]
    distinct_chunks: _Count
    distinct_chunks_exact: bool
    rank_frequency: list[tuple[_Count, _Count]]
    tokens_per_document: DocumentLengths


class Statistics:
    """The statistics of a split, collected chunk by chunk, and merged over parts in their order."""

    def __init__(self) -> None:
        self.lengths = np.zeros(256, np.int64)
        self.documents = np.zeros(64, np.int64)  # by the base-2 logarithm of their tokens
        self.shortest, self.longest = 0, 0
        self.frequencies = Frequencies()
        # Tokens of a document that an earlier part began, and of the last one, which a later part may continue.
        self._head, self._last = 0, 0
        self._waiting: list[np.ndarray] = []
        self._hashes = bytearray()  # of the documents' bytes, 8 of each
        self._ends_hashed = False  # the last document is one of them

    def count_chunks(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Count chunks."""
        self.lengths += np.bincount(lengths, minlength=256)
        self._waiting.append(hash_chunks(tokens, lengths))
        if sum(map(len, self._waiting)) > _WAITING:
            self._count_waiting()

    def count_document(self, tokens: int, begins: bool) -> None:
        """Count a document of so many tokens, or, if `begins` is False, the rest of the one before."""
        if begins:
            self._end_document()
            self._last = tokens
        elif self._last:
            self._last += tokens
        else:
            self._head += tokens

    def add_hash(self, digest: bytes) -> None:
        """Add the hash of a document's bytes, of 8 bytes."""
        self._hashes += digest
        self._ends_hashed = True

    @property
    def hashes(self) -> np.ndarray:
        """Hash of each document (D,), uint64, without those that parts share."""
        return np.frombuffer(bytes(self._hashes), np.uint64)

    def _end_document(self) -> None:
        if self._last:
            self.documents[self._last.bit_length() - 1] += 1
            self.shortest = min(self.shortest or self._last, self._last)
            self.longest = max(self.longest, self._last)
        self._last = 0

    def _count_waiting(self) -> None:
        if self._waiting:
            self.frequencies.merge_counts(Frequencies.from_keys(np.concatenate(self._waiting)))
            self._waiting = []

    def merge_statistics(self, other: "Statistics") -> None:
        """Add the statistics of the next part."""
        self._count_waiting()
        other._count_waiting()
        self.lengths += other.lengths
        self.documents += other.documents
        if other._head and self._ends_hashed:  # the last document goes on there
            del self._hashes[-8:]
            self._ends_hashed = False
        if other._ends_hashed:
            self._hashes += other._hashes
            self._ends_hashed = True
        if other._head:
            self.count_document(other._head, False)
        if other._last:
            self._end_document()
            self._last = other._last
        if other.shortest:
            self.shortest = min(self.shortest or other.shortest, other.shortest)
        self.longest = max(self.longest, other.longest)
        self.frequencies.merge_counts(other.frequencies)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the whole state as arrays for a file, which `from_arrays` reads back."""
        self._count_waiting()
        return {
            "lengths": self.lengths,
            "documents": self.documents,
            "hashes": self.hashes,
            "ends": np.array([self.shortest, self.longest, self._head, self._last, self._ends_hashed], np.int64),
            "keys": self.frequencies.keys,
            "counts": self.frequencies.counts,
            "limit": np.array([self.frequencies.limit], np.uint64),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> "Statistics":
        """Restore statistics from the result of `to_arrays`."""
        restored = cls()
        restored.lengths, restored.documents = arrays["lengths"], arrays["documents"]
        restored._hashes = bytearray(arrays["hashes"].tobytes())
        restored.shortest, restored.longest, restored._head, restored._last = (int(x) for x in arrays["ends"][:4])
        restored._ends_hashed = bool(arrays["ends"][4])
        restored.frequencies = Frequencies(arrays["keys"], arrays["counts"], int(arrays["limit"][0]))
        return restored

    def make_summary(self) -> Summary:
        """Return the statistics for the manifest."""
        self._count_waiting()
        self._end_document()
        last = int(np.flatnonzero(self.lengths)[-1]) if self.lengths.any() else 0
        bins = np.flatnonzero(self.documents)
        return Summary(
            self.lengths[: last + 1].tolist(),
            self.frequencies.distinct_count,
            self.frequencies.is_exact,
            self.frequencies.rank_curve(),
            DocumentLengths(self.shortest, self.longest, {str(1 << int(n)): int(self.documents[n]) for n in bins}),
        )
