"""Windows of chunks for scoring (overlapping, or a fixed subset) and for torch's DataLoader.

Legend: N chunks of a document, K tokens of a chunk, T chunks of a window, B windows of a batch.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from data.corpus import Corpus
from data.loader import Batch, Loader
from haed.base import SequenceModel, TokenBatch, check_finite
from haed.chunk.memory import DocumentMemory
from haed.chunk.mixture import MixtureScores
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks

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
        without_memory: (N,) bits of the model alone; None without a memory.
        weights: (N, J) weight of each part of a memory; else None.
        shares: (N, J) probability that each part of a memory produced the chunk; else None.
        names: names of the J parts of a memory; empty without one.
    """

    part: DocumentWindows
    bits: Tensor
    decisions: Tensor
    known: Tensor | None = None
    gate: Tensor | None = None
    without_memory: Tensor | None = None
    weights: Tensor | None = None
    shares: Tensor | None = None
    names: tuple[str, ...] = ()

    def sum_parts(self) -> Tensor | None:
        """Return sums (2, 5) over all chunks and over the known ones; None if the system has no known chunks.

        The five are number of chunks, tokens, bits by the decoder, bits by the softmax, and g.
        """
        if self.known is None or self.gate is None:
            return None
        lengths, decoder = self.part.windows.lengths[self.part.new].double(), self.decisions.sum(-1)
        each = torch.stack([torch.ones_like(lengths), lengths, decoder, self.known, self.gate])
        return torch.stack([each.sum(1), each[:, self.known.isfinite()].sum(1)])

    def part_shares(self) -> tuple[tuple[str, ...], Tensor]:
        """Return the names of the J parts of the likelihood, and the probability (N, J) that each produced the chunk.

        J is 0 for a model of one part.
        """
        if self.shares is not None:
            return self.names, self.shares
        if self.known is None or self.gate is None:
            return (), self.bits.new_zeros(len(self.bits), 0)
        known = (self.gate * torch.exp2(self.bits - self.known)).clamp(0, 1)
        return ("known", "spelled"), torch.stack([known, 1 - known], 1)

    def sum_remembered(self) -> Tensor | None:
        """Return sums (1 + 2·J) over all chunks: bits without memory, weights, and shares; None without a memory."""
        if self.without_memory is None or self.weights is None or self.shares is None:
            return None
        return torch.cat([self.without_memory.sum()[None], self.weights.sum(0), self.shares.sum(0)])

    def per_window(self) -> Tensor:
        """Return the bits (B,) of each window."""
        window = self.part.new.nonzero()[:, 0]
        return self.bits.new_zeros(len(self.part.new)).index_add(0, window, self.bits)


class WindowScorer:
    """Scores windows of documents in their order, and remembers the document if the system has a memory.

    Args:
        system: in evaluation mode.
        remembers: false for windows that are no documents, which the model scores alone.
    """

    def __init__(self, system: SequenceModel, remembers: bool = True) -> None:
        self.system, self.remembers = system, remembers
        self._document: DocumentMemory | None = None
        self._number = -1

    def score_windows(self, part: DocumentWindows) -> ScoredWindows:
        """Score the next windows."""
        system = self.system
        if not isinstance(system, HAED):
            decisions = -system.decision_log_likelihood(part.windows).double().cpu()[part.new] / math.log(2)
            return ScoredWindows(part, check_finite(decisions.sum(-1), "scores"), decisions)
        scores = system.score(part.windows, part.new)
        joint, decisions = (-x.double().cpu() / math.log(2) for x in (scores.joint_log_prob, scores.decisions))
        scored = ScoredWindows(part, check_finite(joint, "scores"), decisions)
        if scores.known is not None and scores.gate is not None:
            scored.known = -scores.known.double().cpu() / math.log(2)
            scored.gate = scores.gate.double().sigmoid().cpu()
        if self.remembers and system.memory is not None and len(joint):
            remembered = []
            for number, chunks, document_scores in read_windows(part, scores):
                if self._document is None or number != self._number:
                    self._document, self._number = system.memory.start_document(), number
                remembered.append(system.memory.score_chunks(self._document, chunks, document_scores))
            scored.without_memory, scored.bits = joint, -torch.cat([x.joint_log_prob for x in remembered]) / math.log(2)
            scored.weights = torch.cat([each.log_weight.exp() for each in remembered])
            scored.shares = torch.cat([each.shares for each in remembered])
            scored.names = system.memory.names
        return scored


def read_windows(part: DocumentWindows, scores: MixtureScores) -> Iterator[tuple[int, Chunks, MixtureScores]]:
    """Yield the scored chunks of windows by document: its number, the chunks, and their scores."""
    documents = part.document[part.new.nonzero()[:, 0]]
    chunks = Chunks(part.windows.tokens, part.windows.lengths)[part.new]
    numbers, sizes = documents.unique_consecutive(return_counts=True)
    for number, rows in zip(numbers.tolist(), torch.arange(len(documents)).split(sizes.tolist()), strict=True):
        yield number, chunks[rows], scores[rows]


def pad_chunks(tokens: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """Return flat tokens (n,) of chunks with `lengths` (N,) as rows (N, K), padded with zeros."""
    rows = np.zeros((len(lengths), k), tokens.dtype)
    rows[np.arange(k) < lengths[:, None]] = tokens
    return rows


class Window(NamedTuple):
    """Window of chunks of a document.

    Attributes:
        document: number of the document.
        tokens: (n,) tokens of the whole document.
        ends: (N + 1,) first token of each chunk of the document, and the end of the last chunk.
        begin: first chunk of the window.
        new: first chunk that no earlier window of the document has.
        end: chunk after the last of the window.
    """

    document: int
    tokens: np.ndarray
    ends: np.ndarray
    begin: int
    new: int
    end: int

    @property
    def size(self) -> int:
        """Number of chunks."""
        return self.end - self.begin


def cut_windows(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], context: int, stride: int | None = None
) -> Iterator[Window]:
    """Cut documents, given as flat tokens and lengths, into windows of at most `context` chunks.

    Each window of a document begins `stride` chunks after the one before it; by default neighbours overlap by half.
    """
    stride = min(stride or max(1, context // 2), context)
    for number, (tokens, lengths) in enumerate(documents):
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        begin = new = 0
        while new < len(lengths):
            end = min(begin + context, len(lengths))
            yield Window(number, tokens, ends, begin, new, end)
            new, begin = end, begin + stride


def stack_windows(batch: Sequence[Window], k: int) -> TokenBatch:
    """Return windows as one batch, which is as long as the longest of them."""
    shape = (len(batch), max(each.size for each in batch))
    tokens = torch.zeros(*shape, k, dtype=torch.long)
    lengths, starts = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, each in enumerate(batch):
        sizes = np.diff(each.ends[each.begin : each.end + 1])
        flat = each.tokens[each.ends[each.begin] : each.ends[each.end]]
        tokens[row, : each.size] = torch.from_numpy(pad_chunks(flat, sizes, k).astype(np.int64))
        lengths[row, : each.size] = torch.from_numpy(sizes)
        starts[row, 0] = each.begin == 0
    return TokenBatch(tokens, lengths, starts)


def cut_documents(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int, at_once: int
) -> Iterator[DocumentWindows]:
    """Cut documents into batches of windows in which each chunk is scored once; see `cut_windows`.

    A batch has at most `at_once` windows, and at most `BATCH` chunks unless one window alone has more.
    """
    for batch in _batch_windows(cut_windows(documents, context, stride), at_once):
        windows, known = stack_windows(batch, k), torch.tensor([each.new - each.begin for each in batch])
        new = windows.chunk_mask & (torch.arange(windows.lengths.shape[1]) >= known[:, None])
        yield DocumentWindows(windows, new, torch.tensor([each.document for each in batch]))


def _batch_windows(windows: Iterator[Window], at_once: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    longest = 0
    for window in windows:
        longest = max(longest, window.size)
        if batch and (len(batch) == at_once or longest * (len(batch) + 1) > BATCH):
            yield batch
            batch, longest = [], window.size
        batch.append(window)
    if batch:
        yield batch


def as_windows(batch: Batch) -> TokenBatch:
    """Return a loader's batch as torch tensors that share its memory."""
    return TokenBatch(*(torch.from_numpy(getattr(batch, name)) for name in ("tokens", "lengths", "starts")))


def fixed_subset(corpus: Corpus, context: int, windows: int, split: str = "valid") -> TokenBatch | None:
    """Return the first `windows` of a fixed shuffle of a split, without padding.

    None if the split is empty or no windows are requested.
    """
    if windows and corpus.split_counts(split).chunks == 0:
        log.warning("the %s split of %s is empty, so nothing of it is scored", split, corpus.location)
        return None
    if not windows:
        return None
    loader = Loader(corpus, split, context=context, sequences=1, seed=0)
    batches = islice(loader, min(windows, loader.windows_per_epoch))
    subset = TokenBatch.concatenate_batches([as_windows(batch) for batch in batches])
    used = int(subset.chunk_mask.any(0).nonzero().max()) + 1  # memory follows the text, not the context
    return TokenBatch(subset.tokens[:, :used], subset.lengths[:, :used], subset.starts[:, :used])


def split_windows(windows: TokenBatch) -> Iterator[TokenBatch]:
    """Split the windows of a subset into parts of at most 16 windows and about `BATCH` chunks."""
    return windows.split(max(1, min(16, BATCH // windows.lengths.shape[1])))


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

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Iterate over the batches of the epoch, or over a worker's share of them."""
        epoch = int(self._epoch)
        self.loader.load_state_dict(self._from if epoch == self._from["epoch"] else {"epoch": epoch, "windows": 0})
        for batch in self.loader.iterate_epoch():
            yield {"tokens": batch.tokens, "lengths": batch.lengths, "starts": batch.starts}

    def __len__(self) -> int:
        """Return the number of batches of the epoch on this rank."""
        loader = self.loader
        done = self._from["windows"] if int(self._epoch) == self._from["epoch"] else 0
        left = loader.windows_per_epoch - done - loader.rank * loader.sequences
        return max(0, -(-left // (loader.sequences * loader.ranks)))
