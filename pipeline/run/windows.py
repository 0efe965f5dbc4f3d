"""Windows that are scored: overlapping ones of documents, so that every chunk counts exactly once, and a fixed subset.

Legend: N chunks of a document, K tokens of a chunk, T chunks of a window, B windows of a batch.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from data.loader import Batch, Loader
from haed.system import Windows

log = logging.getLogger(__name__)

BATCH = 1 << 14  # chunks


@dataclass
class DocumentWindows:
    """Windows of documents, of whose chunks some count and the others are context.

    Attributes:
        windows: B of them.
        new: (B, T) true for the chunks that count in this window.
        document: (B,) number of each window's document.
    """

    windows: Windows
    new: Tensor
    document: Tensor


@dataclass
class Scored:
    """Windows and the bits (B, T, K + 1) of their chunks' tokens and ends; chunks that do not count have 0."""

    part: DocumentWindows
    decisions: Tensor

    def __post_init__(self) -> None:
        self.decisions = torch.where(self.part.new[..., None], self.decisions, 0.0)

    @property
    def bits(self) -> Tensor:
        """Bits (B, T) of whole chunks."""
        return self.decisions.sum(-1)


def grid(tokens: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """Flat tokens (n,) of chunks with `lengths` (N,) as rows (N, K), zero beyond each length."""
    rows = np.zeros((len(lengths), k), tokens.dtype)
    rows[np.arange(k) < lengths[:, None]] = tokens
    return rows


def overlapping(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int, at_once: int
) -> Iterator[DocumentWindows]:
    """Cuts documents, given as flat tokens and lengths, into windows of at most `context` chunks, at most `at_once` a batch.

    The first window of a document scores all its chunks; each following one begins `stride` chunks later and scores
    what is new. Memory follows the text: a batch is as long as its longest window, and has at most `BATCH` chunks unless one
    window alone has more.
    """
    stride = min(stride, context)
    for batch in _batches(_windows(documents, k, context, stride), at_once):
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
        yield DocumentWindows(Windows(tokens, lengths, starts), new, torch.tensor([each.document for each in batch]))


class _Window(NamedTuple):
    """A window of a document: tokens (n, K) and lengths (n,); whether it begins it, and how many chunks are context."""

    document: int
    first: bool
    known: int
    rows: np.ndarray
    lengths: np.ndarray


def _batches(windows: Iterator[_Window], at_once: int) -> Iterator[list[_Window]]:
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


def _windows(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int
) -> Iterator[_Window]:
    for number, (tokens, lengths) in enumerate(documents):
        rows, scored, begin = grid(tokens, lengths, k), 0, 0
        while scored < len(lengths):
            end = min(begin + context, len(lengths))
            yield _Window(number, begin == 0, scored - begin, rows[begin:end], lengths[begin:end])
            scored, begin = end, begin + stride


def as_windows(batch: Batch) -> Windows:
    """A batch of the loader in torch, sharing its memory."""
    return Windows(*(torch.from_numpy(getattr(batch, name)) for name in ("tokens", "lengths", "starts")))


def fixed_subset(corpus: Corpus, context: int, windows: int, split: str = "valid") -> Windows | None:
    """The first `windows` of a fixed shuffle of a split, without padding; None if it is empty or none are asked for."""
    if windows and corpus.counts(split).chunks == 0:
        log.warning("the split %s of %s is empty: nothing of it is scored", split, corpus.location)
        return None
    if not windows:
        return None
    loader = Loader(corpus, split, context=context, sequences=1, seed=0)
    found = Windows.cat([as_windows(batch) for batch in islice(loader, min(windows, loader.windows_per_epoch))])
    used = int(found.real.any(0).nonzero().max()) + 1  # memory follows the text, not the context
    return Windows(found.tokens[:, :used], found.lengths[:, :used], found.starts[:, :used])


def some_at_once(windows: Windows, most: int = 16) -> Iterator[Windows]:
    """Windows of a subset, so few at a time that their chunks fit."""
    return windows.split(max(1, min(most, BATCH // windows.lengths.shape[1])))
