"""Windows of chunks for scoring (overlapping, or a fixed subset) and for torch's DataLoader.

Legend: N chunks of a document, K tokens of a chunk, T chunks of a window, B windows of a batch.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from data.corpus import Corpus
from data.loader import Batch, Loader
from haed.base import SequenceModel, TokenBatch
from haed.chunk.model import HAED

log = logging.getLogger(__name__)

BATCH = 1 << 14  # chunks


@dataclass
class DocumentWindows:
    """Windows of documents, in which some chunks are scored and the others are context.

    Attributes:
        windows: B windows.
        new: (B, T) true for the chunks that are scored in this window.
        document: (B,) number of each window's document.
    """

    windows: TokenBatch
    new: Tensor
    document: Tensor


@dataclass
class ScoredWindows:
    """Windows and the bits of their N scored chunks, in the order of `part.new`.

    Attributes:
        part: the windows.
        bits: (N,) float64 bits of whole chunks, the result.
        decisions: (N, K + 1) bits of each token and end, by the decoder or the system.
        known: (N,) bits by a mixture's softmax over the known chunks, ∞ if a chunk is not known; else None.
        gate: (N,) a mixture's g; else None.
    """

    part: DocumentWindows
    bits: Tensor
    decisions: Tensor
    known: Tensor | None = None
    gate: Tensor | None = None

    @classmethod
    def from_system(cls, system: SequenceModel, part: DocumentWindows) -> "ScoredWindows":
        """Score windows with a system."""
        if not isinstance(system, HAED):
            decisions = -system.decision_log_likelihood(part.windows).double().cpu()[part.new] / math.log(2)
            return cls(part, decisions.sum(-1), decisions)
        found = system.score(part.windows, part.new)
        joint, decisions = (-x.double().cpu() / math.log(2) for x in (found.joint_log_prob, found.decisions))
        if found.known is None or found.gate is None:
            return cls(part, joint, decisions)
        return cls(
            part, joint, decisions, -found.known.double().cpu() / math.log(2), found.gate.double().sigmoid().cpu()
        )

    def sum_parts(self) -> Tensor | None:
        """Return sums (2, 5) over all chunks and over the known ones; None if the system has no known chunks.

        The five are number of chunks, tokens, bits by the decoder, bits by the softmax, and g.
        """
        if self.known is None or self.gate is None:
            return None
        lengths, decoder = self.part.windows.lengths[self.part.new].double(), self.decisions.sum(-1)
        each = torch.stack([torch.ones_like(lengths), lengths, decoder, self.known, self.gate])
        return torch.stack([each.sum(1), each[:, self.known.isfinite()].sum(1)])

    def per_window(self) -> Tensor:
        """Return the bits (B,) of each window."""
        window = self.part.new.nonzero()[:, 0]
        return self.bits.new_zeros(len(self.part.new)).index_add(0, window, self.bits)


def pad_chunks(tokens: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """Return flat tokens (n,) of chunks with `lengths` (N,) as rows (N, K), padded with zeros."""
    rows = np.zeros((len(lengths), k), tokens.dtype)
    rows[np.arange(k) < lengths[:, None]] = tokens
    return rows


def cut_documents(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int, at_once: int
) -> Iterator[DocumentWindows]:
    """Cut documents, given as flat tokens and lengths, into batches of windows.

    A window has at most `context` chunks, and a batch at most `at_once` windows. The first window of a document scores
    all its chunks. Each following one begins `stride` chunks later and scores the chunks that are new. A batch is as
    long as its longest window, and has at most `BATCH` chunks unless one window alone has more.
    """
    stride = min(stride, context)
    for batch in _batch_windows(_window_documents(documents, k, context, stride), at_once):
        shape = (len(batch), max(len(each.lengths) for each in batch))
        tokens = torch.zeros(*shape, k, dtype=torch.long)
        lengths = torch.zeros(shape, dtype=torch.long)
        starts, new = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, each in enumerate(batch):
            chunks = len(each.lengths)
            tokens[row, :chunks] = torch.from_numpy(each.rows.astype(np.int64))
            lengths[row, :chunks] = torch.from_numpy(each.lengths.astype(np.int64))
            starts[row, 0] = each.first
            new[row, each.known : chunks] = True
        yield DocumentWindows(TokenBatch(tokens, lengths, starts), new, torch.tensor([each.document for each in batch]))


class _Window(NamedTuple):
    """A window of a document: tokens (n, K), lengths (n,), whether it is the first, and its context chunks."""

    document: int
    first: bool
    known: int
    rows: np.ndarray
    lengths: np.ndarray


def _batch_windows(windows: Iterator[_Window], at_once: int) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    longest = 0
    for window in windows:
        longest = max(longest, len(window.lengths))
        if batch and (len(batch) == at_once or longest * (len(batch) + 1) > BATCH):
            yield batch
            batch, longest = [], len(window.lengths)
        batch.append(window)
    if batch:
        yield batch


def _window_documents(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int
) -> Iterator[_Window]:
    for number, (tokens, lengths) in enumerate(documents):
        rows, scored, begin = pad_chunks(tokens, lengths, k), 0, 0
        while scored < len(lengths):
            end = min(begin + context, len(lengths))
            yield _Window(number, begin == 0, scored - begin, rows[begin:end], lengths[begin:end])
            scored, begin = end, begin + stride


def as_windows(batch: Batch) -> TokenBatch:
    """Return a loader's batch as torch tensors that share its memory."""
    return TokenBatch(*(torch.from_numpy(getattr(batch, name)) for name in ("tokens", "lengths", "starts")))


def fixed_subset(corpus: Corpus, context: int, windows: int, split: str = "valid") -> TokenBatch | None:
    """Return the first `windows` of a fixed shuffle of a split, without padding.

    None if the split is empty or no windows are requested.
    """
    if windows and corpus.split_counts(split).chunks == 0:
        log.warning("the split %s of %s is empty: nothing of it is scored", split, corpus.location)
        return None
    if not windows:
        return None
    loader = Loader(corpus, split, context=context, sequences=1, seed=0)
    found = TokenBatch.concatenate_batches(
        [as_windows(batch) for batch in islice(loader, min(windows, loader.windows_per_epoch))]
    )
    used = int(found.chunk_mask.any(0).nonzero().max()) + 1  # memory follows the text, not the context
    return TokenBatch(found.tokens[:, :used], found.lengths[:, :used], found.starts[:, :used])


def require_subset(
    corpus: Corpus, context: int, windows: int, split: str = "valid", *, whole: bool = False
) -> TokenBatch:
    """Return `fixed_subset`, or raise if it is empty; with `whole`, only the windows that chunks fill completely.

    Raises:
        ValueError: there is no such window.
    """
    found = fixed_subset(corpus, context, windows, split)
    if found is None:
        raise ValueError(f"the split {split} is empty: nothing to measure")
    if whole and not len(found := found[found.chunk_mask.all(1)]):
        raise ValueError(f"{split} has no window of {context} chunks: set a shorter batch.context")
    return found


def split_windows(windows: TokenBatch, most: int = 16) -> Iterator[TokenBatch]:
    """Split the windows of a subset into parts of at most `most` windows and about `BATCH` chunks."""
    return windows.split(max(1, min(most, BATCH // windows.lengths.shape[1])))


class WindowDataset(IterableDataset[dict[str, np.ndarray]]):
    """This rank's batches of one epoch, for `DataLoader(WindowDataset(loader), batch_size=None, num_workers=2)`.

    The order is the loader's, whatever the number of workers. An item is a batch: `tokens` (B, T, K) uint8, `lengths`
    (B, T) uint8 and `starts` (B, T) bool, see `data.loader.Batch`. The last batch of an epoch may have fewer windows.
    The first epoch begins at the loader's position; `set_epoch` chooses another.

    Args:
        loader: chooses the windows, their order and the rank.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader, self._from = loader, loader.state_dict()
        self._epoch = torch.tensor(self._from["epoch"]).share_memory_()  # so that workers that persist see it change

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._epoch.fill_(epoch)

    def _seek_epoch(self) -> None:
        epoch = int(self._epoch)
        self.loader.load_state_dict(self._from if epoch == self._from["epoch"] else {"epoch": epoch, "windows": 0})

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over the batches of the epoch, or over a worker's share of them."""
        self._seek_epoch()
        for batch in self.loader.iterate_epoch():
            yield {"tokens": batch.tokens, "lengths": batch.lengths, "starts": batch.starts}

    def __len__(self) -> int:
        """Return the number of batches of the epoch on this rank."""
        made = self.loader
        done = self._from["windows"] if int(self._epoch) == self._from["epoch"] else 0
        left = made.windows_per_epoch - done - made.rank * made.sequences
        return max(0, -(-left // (made.sequences * made.ranks)))
