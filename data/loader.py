"""The loader: one global order of windows, dealt out to ranks, with a position that resumes at no cost.

The chunks of a shard are one stream, split into windows of T consecutive chunks. A window may cross documents and marks
where they start, so no chunk is left out. Rasters (pictures) stay whole: a window has as many as fit.

The order is a function of (seed, epoch, stream). Shards are shuffled, then windows within buffers of a few shards, so
reading stays sequential. The manifest gives the number of windows of each shard. So the n-th window of an epoch is
found by arithmetic.

Worker processes make batches ahead. A batch is a function of its position, so workers change only the time it takes.

Legend: B windows per batch of a rank, T chunks per window, K tokens per chunk.
"""

import logging
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count, repeat
from typing import Any

import numpy as np

from data.corpus import Corpus
from data.filesystem import CorruptFileError, OpenedFile
from data.options import LoaderOptions
from data.processes import allowed_workers, process_pool
from data.shards import CorruptShardError, Sample

log = logging.getLogger(__name__)
BUFFER_SHARDS = 4
_AHEAD = 4  # batches that each worker makes ahead


@dataclass
class Batch:
    """A batch of B windows.

    Attributes:
        tokens: (B, T, K) uint8, zero where there is no token.
        lengths: (B, T) uint8, 0 where there is no chunk: after the end of a shard, and in a window of a damaged shard.
        starts: (B, T) bool, the chunk begins a document.
        skipped: number of windows that are empty because their shard is damaged.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    skipped: int = 0


class _Stream:
    """The chunks of a shard, across samples. Tokens are read on demand, so that processes share the page cache."""

    def __init__(self, samples: list[Sample], file: OpenedFile) -> None:
        self.file, self.at = file, [sample.at for sample in samples]
        sizes = (len(sample.lengths) for sample in samples)
        self.firsts = list(accumulate(sizes, initial=0))  # first chunk of each, and the end
        self.lengths = np.concatenate([sample.lengths for sample in samples])
        self.ends = np.concatenate([np.cumsum(sample.lengths, dtype=np.int32) for sample in samples])  # in the sample
        self.starts = np.zeros(len(self.lengths), bool)  # of documents
        for first, sample in zip(self.firsts, samples, strict=False):
            begins = first + np.cumsum(sample.documents) - sample.documents
            self.starts[begins[int(sample.continues) :]] = True

    def read_window(self, begin: int, size: int, lengths: np.ndarray, starts: np.ndarray) -> bytearray:
        """Return the tokens of at most `size` chunks, from `begin` on, and write their lengths (T,) and starts (T,)."""
        stop, tokens = min(begin + size, self.firsts[-1]), bytearray()
        first = begin
        while begin < stop:
            number = bisect_right(self.firsts, begin) - 1
            last = min(stop, self.firsts[number + 1]) - 1  # in this sample
            offset = int(self.ends[begin]) - int(self.lengths[begin])
            try:
                tokens += self.file.read_range(self.at[number] + offset, int(self.ends[last]) - offset)
            except CorruptFileError as error:
                raise CorruptShardError(self.file.path, None, str(error)) from error
            begin = last + 1
        lengths[: stop - first], starts[: stop - first] = self.lengths[first:stop], self.starts[first:stop]
        return tokens


class Loader:
    """Endless batches of windows in the global order, from a position on.

    Args:
        corpus: the corpus to read.
        split: the split to read.
        context: T.
        sequences: B, per rank.
        seed: of the order.
        rank: of this process, in [0, ranks).
        ranks: number of processes that share the order.
        shuffle: False keeps shards and windows in their order.
        part: begin and end of the share of every shard to read, as fractions of its windows.
        stream: number of an independent order, for extra negatives.
        options: number of worker processes, and what to do about a damaged shard.

    Attributes:
        skipped: number of windows that this rank returned empty, since it was created, because their shard is damaged.

    Raises:
        ValueError: the split, or the part of it, has no window; or the context is too small for a picture.
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
        options: LoaderOptions | None = None,
    ) -> None:
        self.corpus, self.context, self.sequences = corpus, context, sequences
        self.rank, self.ranks, self.shuffle = rank, ranks, shuffle
        self.options = options or LoaderOptions()
        self.skipped = 0
        self._seed = (seed, stream)
        self._k = corpus.build_chunker().k
        self._shards = corpus.shards_of(split)
        raster = corpus.chunks_per_raster(split)
        if raster is not None and raster > context:
            raise ValueError(
                f"a picture of {corpus.location} has {raster} chunks and is never cut, so a window of {context} "
                f"is too small. Set batch.context={raster}"
            )
        self._step = context // raster * raster if raster else context  # chunks of a full window
        totals = np.array([-(-shard.chunks // self._step) for shard in self._shards], np.int64)
        self._first = (totals * part[0]).astype(np.int64)
        self._windows = (totals * part[1]).astype(np.int64) - self._first
        self.windows_per_epoch = int(self._windows.sum())
        if self.windows_per_epoch == 0:
            raise ValueError(
                f"the {split} split of {corpus.location} has no window of {context} chunks in the share {part[0]}–{part[1]}. "
                "Add data, or lower batch.context"
            )
        self._epoch, self._consumed, self._began = 0, 0, 0
        self._damaged: set[int] = set()
        self._make_caches()

    def _make_caches(self) -> None:
        self._load = lru_cache(maxsize=2 * BUFFER_SHARDS)(self._load_shard)
        self._order = lru_cache(maxsize=2)(self._buffer_order)
        self._buffers = lru_cache(maxsize=2)(self._epoch_buffers)
        self._fetching: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for workers: everything but cached shards and orders."""
        return {k: v for k, v in vars(self).items() if k not in ("_load", "_order", "_buffers", "_fetching")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state in a worker, with empty caches."""
        vars(self).update(state)
        self._make_caches()

    @property
    def epochs_passed(self) -> float:
        """Passes over the data so far, or since `restart_epoch_count` was called."""
        return (self._epoch * self.windows_per_epoch + self._consumed - self._began) / self.windows_per_epoch

    def restart_epoch_count(self) -> None:
        """Count epochs from the present position on."""
        self._began = self._epoch * self.windows_per_epoch + self._consumed

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was returned, over all ranks."""
        return {"epoch": self._epoch, "windows": self._consumed, "began": self._began}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position, also with another number of ranks. Call it before the iteration begins.

        Raises:
            ValueError: there is no such position in this corpus.
        """
        epoch, windows = int(state["epoch"]), int(state["windows"])
        if epoch < 0 or not 0 <= windows < self.windows_per_epoch:
            raise ValueError(
                f"position {state} is outside the corpus, which has {self.windows_per_epoch} windows per epoch"
            )
        self._epoch, self._consumed, self._began = epoch, windows, int(state.get("began", 0))

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from the present position on, without end. Workers run until it is closed or collected.

        A worker of torch's DataLoader yields every n-th batch, so that all workers together yield each batch once.

        Raises:
            CorruptShardError: a shard is damaged, and `loader.damaged` is stop.
        """
        start = self._epoch * self.windows_per_epoch + self._consumed  # in windows over all epochs
        step = self.sequences * self.ranks
        share, shares = _worker_share()
        positions = count(start + share * step, shares * step)
        workers = allowed_workers(self.options.workers)
        stream = _make_batches_ahead(self, positions, workers) if workers else map(self.batch, positions)
        for number, batch in enumerate(stream):
            after = start + (share + number * shares + 1) * step
            self._epoch, self._consumed = divmod(after, self.windows_per_epoch)
            self.skipped += batch.skipped
            yield batch

    def iterate_epoch(self) -> Iterator[Batch]:
        """Yield the batches of the rest of this epoch, every window once.

        The last batch may be smaller, or missing on some ranks.

        A worker of torch's DataLoader yields every n-th of them. The position does not change, and no processes are
        started.

        Raises:
            CorruptShardError: a shard is damaged, and `loader.damaged` is stop.
        """
        step, (share, shares) = self.sequences * self.ranks, _worker_share()
        first = self._epoch * self.windows_per_epoch
        end = first + self.windows_per_epoch
        for position in range(first + self._consumed + share * step, end, shares * step):
            if position + self.rank * self.sequences < end:
                yield self.batch(position, end)

    def batch(self, position: int, end: int | None = None) -> Batch:
        """Return this rank's batch of the step that begins at a position, counted in windows over all epochs and ranks.

        Args:
            position: of the step's first window, over all ranks.
            end: position that no window of the batch may pass.
        """
        place = position + self.rank * self.sequences
        total = self.windows_per_epoch
        stop = place + self.sequences if end is None else min(end, place + self.sequences)
        lengths = np.zeros((stop - place, self.context), np.uint8)
        starts = np.zeros(lengths.shape, bool)
        rows = zip(range(place, stop), lengths, starts, strict=True)
        windows = [self._read_window(*divmod(each, total), *row) for each, *row in rows]
        tokens = np.zeros((*lengths.shape, self._k), np.uint8)
        is_token = np.arange(self._k, dtype=np.uint8) < lengths[..., None]
        tokens[is_token] = np.frombuffer(b"".join(filter(None, windows)), np.uint8)
        return Batch(tokens, lengths, starts, windows.count(None))

    def _epoch_buffers(self, epoch: int) -> tuple[np.ndarray, list[int]]:
        """Return the order of the shards in an epoch, and the first window of each buffer followed by the end."""
        order = np.arange(len(self._shards))
        if self.shuffle:
            np.random.default_rng((*self._seed, epoch)).shuffle(order)
        sizes = np.add.reduceat(self._windows[order], np.arange(0, len(order), BUFFER_SHARDS))
        return order, [0, *np.cumsum(sizes).tolist()]

    def _buffer_order(self, epoch: int, buffer: int) -> np.ndarray:
        """Return the windows of a buffer in their order: (n, 2) of shard and window."""
        order, _ = self._buffers(epoch)
        shards = order[buffer * BUFFER_SHARDS : (buffer + 1) * BUFFER_SHARDS]
        windows = [np.stack([np.full(n := self._windows[s], s), self._first[s] + np.arange(n)], 1) for s in shards]
        pairs = np.concatenate(windows)
        if self.shuffle:
            pairs = pairs[np.random.default_rng((*self._seed, epoch, buffer)).permutation(len(pairs))]
        self._fetch_ahead(order[(buffer + 1) * BUFFER_SHARDS : (buffer + 2) * BUFFER_SHARDS])
        return pairs

    def _fetch_ahead(self, numbers: np.ndarray) -> None:
        """Fetch the shards of the next buffer into the cache while the present one is read."""
        if self.corpus.is_remote and (self._fetching is None or not self._fetching.is_alive()):
            shards = [self._shards[number] for number in numbers if number not in self._damaged]
            self._fetching = threading.Thread(target=self.corpus.fetch_ahead, args=(shards,), daemon=True)
            self._fetching.start()

    def _read_window(self, epoch: int, index: int, lengths: np.ndarray, starts: np.ndarray) -> bytearray | None:
        """Return the tokens of a window of an epoch, and write its lengths and starts; None if its shard is skipped."""
        _, firsts = self._buffers(epoch)
        buffer = bisect_right(firsts, index) - 1
        shard, window = self._order(epoch, buffer)[index - firsts[buffer]].tolist()
        stream = self._load(shard)
        if stream is None:
            return None
        try:
            return stream.read_window(window * self._step, self._step, lengths, starts)
        except CorruptShardError as error:
            self._skip_shard(shard, error)
            return None

    def _load_shard(self, number: int) -> _Stream | None:
        try:
            return _Stream(*self.corpus.open_shard(self._shards[number]))
        except CorruptShardError as error:
            self._skip_shard(number, error)
            return None

    def _skip_shard(self, number: int, error: CorruptShardError) -> None:
        """Raise the error of a damaged shard, or warn once that its windows are skipped, by `loader.damaged`."""
        if self.options.damaged == "stop":
            raise error
        if number not in self._damaged:
            log.warning("%s. Its %s windows are skipped", error, f"{self._windows[number]:,}")
        self._damaged.add(number)


def _worker_share() -> tuple[int, int]:
    """Return the number of this worker of torch's DataLoader and the number of workers; (0, 1) elsewhere."""
    torch_data: Any = sys.modules.get("torch.utils.data")  # which takes long to import
    worker = torch_data.get_worker_info() if torch_data else None
    return (worker.id, worker.num_workers) if worker else (0, 1)


def _make_batches_ahead(loader: Loader, positions: Iterator[int], workers: int) -> Iterator[Batch]:
    """Yield the loader's batches in order, made by worker processes."""
    pool = process_pool(workers, _set_loader, (loader,))
    try:
        waiting = deque(pool.submit(_make_batch, next(positions)) for _ in repeat(None, _AHEAD * workers))
        while True:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(_make_batch, next(positions)))
            yield batch
    except BrokenProcessPool as error:
        raise OSError(
            "a loader worker died (killed, or out of memory). Use loader.workers=0 to load without workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_loader: Loader


def _set_loader(loader: Loader) -> None:
    global _loader
    _loader = loader


def _make_batch(position: int) -> Batch:
    return _loader.batch(position)
