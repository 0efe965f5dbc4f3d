"""Documents cut into overlapping windows, so that every chunk is scored exactly once and with a stated context.

Legend: N chunks of a document, K tokens of a chunk, T chunks of a window, B windows of a batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor


@dataclass
class Windows:
    """A batch of windows.

    Attributes:
        tokens: (B, T, K).
        lengths: (B, T), 0 where no chunk is.
        starts: (B, T), true where a document begins.
        new: (B, T), true for the chunks that count in this window; the others are context.
        document: (B,) number of each window's document.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    new: Tensor
    document: Tensor


@dataclass
class Scored:
    """Windows and the bits (B, T, K + 1) of their chunks' tokens and ends; chunks that do not count have 0."""

    windows: Windows
    decisions: Tensor

    def __post_init__(self) -> None:
        self.decisions = torch.where(self.windows.new[..., None], self.decisions, 0.0)

    @property
    def bits(self) -> Tensor:
        """Bits (B, T) of whole chunks."""
        return self.decisions.sum(-1)


def grid(tokens: np.ndarray, lengths: np.ndarray, k: int) -> np.ndarray:
    """Flat tokens (n,) of chunks with `lengths` (N,) as rows (N, K), zero beyond each length."""
    rows = np.zeros((len(lengths), k), tokens.dtype)
    rows[np.arange(k) < lengths[:, None]] = tokens
    return rows


def windows(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int, at_once: int
) -> Iterator[Windows]:
    """Cuts documents, given as flat tokens and lengths, into windows of `context` chunks, `at_once` a batch.

    The first window of a document scores all its chunks; each following one begins `stride` chunks later and scores
    what is new.
    """
    stride = min(stride, context)
    cut = _cut(documents, k, context, stride)
    while batch := list(islice(cut, at_once)):
        shape = (len(batch), context)
        tokens = torch.zeros(*shape, k, dtype=torch.long)
        lengths = torch.zeros(shape, dtype=torch.long)
        starts, new = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        for row, (_, first, known, rows, ends) in enumerate(batch):
            tokens[row, : len(ends)] = torch.from_numpy(rows.astype(np.int64))
            lengths[row, : len(ends)] = torch.from_numpy(ends.astype(np.int64))
            starts[row, 0] = first
            new[row, known : len(ends)] = True
        yield Windows(tokens, lengths, starts, new, torch.tensor([number for number, *_ in batch]))


def _cut(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, context: int, stride: int
) -> Iterator[tuple[int, bool, int, np.ndarray, np.ndarray]]:
    """Windows as (document, begins it, chunks known before, tokens (n, K), lengths (n,))."""
    for number, (tokens, lengths) in enumerate(documents):
        rows, scored, begin = grid(tokens, lengths, k), 0, 0
        while scored < len(lengths):
            end = min(begin + context, len(lengths))
            yield number, begin == 0, scored - begin, rows[begin:end], lengths[begin:end]
            scored, begin = end, begin + stride
