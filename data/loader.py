"""The loader: one global order of windows, from which ranks are dealt, and a position that costs nothing to resume.

The chunks of a shard are one stream, cut into windows of T consecutive chunks; a window may cross documents, and marks
where they start. The order is a function of (seed, epoch, stream): shards are shuffled, then windows within buffers of a
few shards, so that reading stays sequential. How many windows a shard has follows from the manifest, so the n-th window
of an epoch is found by arithmetic.

Legend: B windows per batch of a rank, T chunks per window, K tokens per chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from data.corpus import Corpus
from data.shards import Shard

BUFFER_SHARDS = 4


@dataclass
class Batch:
    """B windows.

    Attributes:
        tokens: (B, T, K) uint8, zero where no token is.
        lengths: (B, T) uint8, 0 where no chunk is: after the end of a shard.
        starts: (B, T) bool, the chunk begins a document.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


@dataclass
class _Stream:
    """A shard's chunks: tokens (n,), lengths (N,), offsets (N + 1,) of chunks in tokens, starts (N,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray


class Loader:
    """Endless batches of windows in the global order, from a position on.

    Args:
        corpus: what to read.
        split: of which split.
        context: T.
        sequences: B, per rank.
        seed: of the order.
        rank: this process, in [0, ranks).
        ranks: processes that share the order.
        shuffle: false keeps shards and windows in their order.
        part: only windows from this share of every shard up to that one.
        stream: number of an independent order, for extra negatives.

    Raises:
        ValueError: the split, or the part of it, has no window.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        *,
        context: int,
        sequences: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
        shuffle: bool = True,
        part: tuple[float, float] = (0.0, 1.0),
        stream: int = 0,
    ) -> None:
        self.corpus, self.context, self.sequences = corpus, context, sequences
        self.rank, self.ranks, self.shuffle = rank, ranks, shuffle
        self._seed = (seed, stream)
        self._k = corpus.chunker().k
        self._shards = corpus.of(split)
        totals = np.array([-(-shard.chunks // context) for shard in self._shards], np.int64)
        self._first = (totals * part[0]).astype(np.int64)
        self._windows = (totals * part[1]).astype(np.int64) - self._first
        self.windows_per_epoch = int(self._windows.sum())
        if self.windows_per_epoch == 0:
            raise ValueError(
                f"the {split} split of {corpus.folder} has no window of {context} chunks in the share {part[0]}–{part[1]}: "
                "give it more data"
            )
        self._epoch, self._consumed = 0, 0
        self._load = lru_cache(maxsize=2 * BUFFER_SHARDS)(self._load_shard)
        self._order = lru_cache(maxsize=2)(self._buffer_order)
        self._buffers = lru_cache(maxsize=2)(self._epoch_buffers)

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self._epoch + self._consumed / self.windows_per_epoch

    def state_dict(self) -> dict[str, int]:
        """Position after the last batch that was handed out, over all ranks."""
        return {"epoch": self._epoch, "windows": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on from a position, also with another number of ranks.

        Raises:
            ValueError: there is no such position in this corpus.
        """
        epoch, windows = int(state["epoch"]), int(state["windows"])
        if epoch < 0 or not 0 <= windows < self.windows_per_epoch:
            raise ValueError(f"position {state} is not in a corpus of {self.windows_per_epoch} windows an epoch")
        self._epoch, self._consumed = epoch, windows

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the present position on, without end."""
        while True:
            yield self._next()

    def _next(self) -> Batch:
        total = self.windows_per_epoch
        mine = self._consumed + self.rank * self.sequences
        windows = [self._window(*divmod(self._epoch * total + mine + i, total)) for i in range(self.sequences)]
        passed, self._consumed = divmod(self._consumed + self.sequences * self.ranks, total)
        self._epoch += passed
        return Batch(*(np.stack(part) for part in zip(*windows, strict=True)))

    def _epoch_buffers(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the shards in an epoch, and the first window of each buffer and the end."""
        order = np.arange(len(self._shards))
        if self.shuffle:
            np.random.default_rng((*self._seed, epoch)).shuffle(order)
        sizes = np.add.reduceat(self._windows[order], np.arange(0, len(order), BUFFER_SHARDS))
        return order, np.concatenate([[0], np.cumsum(sizes)])

    def _buffer_order(self, epoch: int, buffer: int) -> np.ndarray:
        """Windows of a buffer in their order: (n, 2) of shard and window."""
        order, _ = self._buffers(epoch)
        shards = order[buffer * BUFFER_SHARDS : (buffer + 1) * BUFFER_SHARDS]
        pairs = np.concatenate(
            [np.stack([np.full(n := self._windows[s], s), self._first[s] + np.arange(n)], 1) for s in shards]
        )
        if self.shuffle:
            np.random.default_rng((*self._seed, epoch, buffer)).shuffle(pairs)
        return pairs

    def _window(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The index-th window of an epoch: tokens (T, K), lengths (T,), starts (T,)."""
        _, firsts = self._buffers(epoch)
        buffer = int(np.searchsorted(firsts, index, "right")) - 1
        shard, window = self._order(epoch, buffer)[index - firsts[buffer]]
        stream = self._load(int(shard))
        begin = int(window) * self.context
        end = min(begin + self.context, len(stream.lengths))
        tokens = np.zeros((self.context, self._k), np.uint8)
        lengths = np.zeros(self.context, np.uint8)
        starts = np.zeros(self.context, bool)
        lengths[: end - begin] = stream.lengths[begin:end]
        starts[: end - begin] = stream.starts[begin:end]
        real = np.arange(self._k) < lengths[:, None]
        tokens[real] = stream.tokens[stream.offsets[begin] : stream.offsets[end]]
        return tokens, lengths, starts

    def _load_shard(self, number: int) -> _Stream:
        shard: Shard = self._shards[number]
        arrays = self.corpus.read(shard)
        starts = np.zeros(len(arrays.lengths), bool)
        starts[np.concatenate([[0], np.cumsum(arrays.documents)[:-1]])] = True
        offsets = np.concatenate([[0], np.cumsum(arrays.lengths, dtype=np.int64)])
        return _Stream(arrays.tokens, arrays.lengths, offsets, starts)
