"""Breakdown of the bits of an evaluation: by position in a chunk, by chunk length, and by count in the train split.

A mixture scores whole chunks. Its bits by frequency are also given for each part of the mixture. Its bits by position
are those of the decoder alone.

Legend: B windows, T chunks of a window, K tokens of a chunk.
"""

import numpy as np

from data.vocabulary import Occurrences
from pipeline.run.files import Breakdown, Part
from pipeline.run.windows import ScoredWindows

_FREQUENCIES = (0, 1, 2, 10, 100, 1000, 10_000)


class Tally:
    """Accumulator for the bits of scored windows by position, length and frequency.

    Args:
        k: maximum number of tokens in a chunk.
        train: counts of the scored chunks in the train split.
    """

    def __init__(self, k: int, train: Occurrences) -> None:
        self._train = train
        self._position, self._length = np.zeros((2, 3, k + 1))
        self._frequency, self._decoder, self._known = np.zeros((3, 3, len(_FREQUENCIES)))

    def add_windows(self, scored: ScoredWindows) -> None:
        """Add the newly scored chunks of these windows."""
        new = scored.part.new
        tokens, lengths = scored.part.windows.tokens[new].numpy(), scored.part.windows.lengths[new].numpy()
        decisions, bits = scored.decisions.numpy(), scored.bits.numpy()
        reached = np.arange(decisions.shape[1]) <= lengths[:, None]
        self._position += np.stack(
            [reached.sum(0), (reached & (np.arange(len(reached[0])) < lengths[:, None])).sum(0), decisions.sum(0)]
        )
        flat = tokens[np.arange(tokens.shape[1]) < lengths[:, None]].astype(np.uint8)
        seen = np.digitize(self._train.count_occurrences(flat, lengths), _FREQUENCIES) - 1
        _add_to_groups(self._length, lengths, lengths, bits)
        _add_to_groups(self._frequency, seen, lengths, bits)
        if scored.known is not None:
            known = scored.known.numpy()
            hit = np.isfinite(known)
            _add_to_groups(self._decoder, seen, lengths, decisions.sum(1))
            _add_to_groups(self._known, seen[hit], lengths[hit], known[hit])

    def build_breakdown(self) -> Breakdown:
        """Return the breakdown of everything added so far."""
        ends = [*(f"{end - 1:,}" for end in _FREQUENCIES[1:]), ""]
        often = [f"{a:,}" if f"{a:,}" == b else f"{a:,}–{b}" for a, b in zip(_FREQUENCIES, ends, strict=True)]
        sizes = [str(size) for size in range(self._length.shape[1])]
        return Breakdown(
            _build_parts([str(place) for place in range(1, self._position.shape[1] + 1)], self._position),
            _build_parts(sizes, self._length),
            *(_build_parts(often, table) for table in (self._frequency, self._decoder, self._known)),
        )


def _add_to_groups(table: np.ndarray, group: np.ndarray, tokens: np.ndarray, bits: np.ndarray) -> None:
    """Add chunks, their tokens and bits, (N,) each, to the columns of their groups (N,) in a table (3, groups)."""
    for row, weight in zip(table, (np.ones_like(bits), tokens, bits), strict=True):
        row += np.bincount(group, weight, len(row))


def _build_parts(names: list[str], table: np.ndarray) -> list[Part]:
    return [
        Part(name, int(chunks), int(tokens), float(bits), float(bits / tokens) if tokens else None)
        for name, chunks, tokens, bits in zip(names, *table, strict=True)
        if chunks and (tokens or bits)  # no bits at certain ends, nor where the model cannot score
    ]
