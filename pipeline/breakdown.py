"""Where the bits of an evaluation are spent: by position in a chunk, by its length, by how often training saw it.

Legend: B windows, T chunks of a window, K tokens of a chunk.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.corpus import DistinctChunks
from haed.chunks import chunk_keys
from pipeline.windows import Scored

_FREQUENCIES = (0, 1, 2, 10, 100, 1000, 10_000)


@dataclass
class Part:
    """Some of the chunks, or of the decisions: `bits` of `decisions` (tokens and ends) in `chunks` with `tokens`.

    `bits_per_token` is None where there is no token; at a position, the decision is the token there or the end.
    """

    of: str
    chunks: int
    tokens: int
    bits: float
    bits_per_token: float | None


@dataclass
class Breakdown:
    """Bits of a split in three partitions; each adds up to all of them."""

    by_position: list[Part]
    by_length: list[Part]
    by_frequency: list[Part]


class Tally:
    """Adds up the bits of scored windows by position, length and frequency.

    Args:
        k: tokens of a chunk.
        train: distinct chunks of the train split, and how often each occurs.
    """

    def __init__(self, k: int, train: DistinctChunks) -> None:
        keys = chunk_keys(torch.from_numpy(train.tokens), torch.from_numpy(train.lengths)).numpy()
        order = np.argsort(keys)
        self._keys, self._counts = keys[order], train.counts[order]
        self._position, self._length, self._frequency = (
            np.zeros((3, groups)) for groups in (k + 1, k + 1, len(_FREQUENCIES))
        )

    def add(self, scored: Scored) -> None:
        """Takes in the chunks that count in these windows."""
        new = scored.windows.new
        tokens, lengths = scored.windows.tokens[new], scored.windows.lengths[new].numpy()
        decisions = scored.decisions[new].numpy()
        bits = decisions.sum(1)
        reached = np.arange(decisions.shape[1]) <= lengths[:, None]
        self._position += np.stack(
            [reached.sum(0), (reached & (np.arange(len(reached[0])) < lengths[:, None])).sum(0), decisions.sum(0)]
        )
        seen = np.digitize(self._seen(chunk_keys(tokens, torch.from_numpy(lengths)).numpy()), _FREQUENCIES) - 1
        for table, group in ((self._length, lengths), (self._frequency, seen)):
            for row, weight in enumerate((np.ones_like(bits), lengths, bits)):
                table[row] += np.bincount(group, weight, table.shape[1])

    def _seen(self, keys: np.ndarray) -> np.ndarray:
        """How often the train split has each chunk."""
        if not len(self._keys):
            return np.zeros(len(keys), np.int64)
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._counts[place], 0)

    def result(self) -> Breakdown:
        """What was added up so far."""
        ends = [*(f"{end - 1:,}" for end in _FREQUENCIES[1:]), ""]
        often = [f"{a:,}" if f"{a:,}" == b else f"{a:,}–{b}" for a, b in zip(_FREQUENCIES, ends, strict=True)]
        sizes = [str(size) for size in range(self._length.shape[1])]
        return Breakdown(
            _parts([str(place) for place in range(1, self._position.shape[1] + 1)], self._position),
            _parts(sizes, self._length),
            _parts(often, self._frequency),
        )


def _parts(names: list[str], table: np.ndarray) -> list[Part]:
    return [
        Part(name, int(chunks), int(tokens), float(bits), float(bits / tokens) if tokens else None)
        for name, chunks, tokens, bits in zip(names, *table, strict=True)
        if chunks
    ]
