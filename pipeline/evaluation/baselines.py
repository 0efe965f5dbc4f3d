"""Baselines of evaluation.json: bits that simple models need for the same bytes.

Interpolated Witten-Bell n-gram models over bytes (Witten & Bell 1991), fitted on the train split:

    p_n(x | h) = (c(hx) + T(h) · p_{n−1}(x | h′)) / (c(h) + T(h))

T(h) is the number of different bytes seen after h, and h′ is h without its first byte. The lowest order is mixed with
the uniform distribution. Then there are two compressors: `xz -9` of the held-out bytes alone, and PPMd (Shkarin 2002,
variant I, order 16), which has read the train split before and goes on to learn from the held-out bytes. The documents of
a split are joined, so contexts cross their borders.
"""

import lzma
import math
from collections.abc import Iterable

import numpy as np

from pipeline.run.files import Baseline

ORDERS = range(6)
TRAIN_LIMIT, HELD_OUT_LIMIT = 64 << 20, 64 << 20  # n-gram models take 52 bytes of memory for each of these bytes
_PPMD_ORDER, _PPMD_MEMORY = 16, 1 << 30  # bytes at most, of which only those that are used are taken


def measure_baselines(train: bytes, held_out: bytes, orders: Iterable[int] = ORDERS) -> list[Baseline]:
    """Measure n-gram models of the given orders (bytes of context), xz and PPMd on `held_out`.

    Args:
        train: text to fit the n-gram models and PPMd on. Of a longer text only the first 64 MiB are used, and the names say so.
        held_out: bytes to score.
        orders: bytes of context, each at most 6.

    Raises:
        ValueError: `held_out` is empty, or an order is not from 0 to 6.
    """
    if not held_out:
        raise ValueError("there are no held-out bytes, so baselines cannot be measured")
    wanted = sorted(set(orders))
    if wanted and not 0 <= wanted[0] <= wanted[-1] <= 6:
        raise ValueError(f"orders {wanted}: expected 0 to 6 bytes of context")
    size, length = len(held_out), len(held_out.decode("utf-8", errors="surrogateescape"))
    note = f" (first {TRAIN_LIMIT >> 20} MiB of train)" if len(train) > TRAIN_LIMIT else ""
    data, held = np.frombuffer(train[:TRAIN_LIMIT], np.uint8), np.frombuffer(held_out, np.uint8)
    bits = dict[str, float]()
    probability = np.full(size, 1 / 256)
    for order in range(wanted[-1] + 1 if wanted else 0):
        probability = _interpolate_order(probability, data, held, order)
        if order in wanted:
            name = f"n-gram, {order} byte{'s' if order != 1 else ''} of context{note}"
            bits[name] = float(-np.log2(probability).sum())
    window = min(max(len(held_out), 1 << 12), 1 << 26)  # `xz -9` has a window of 64 MB, which is slow to clear;
    wide = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}  # a window longer than the text finds no more
    bits["xz -9"] = 8.0 * len(lzma.compress(held_out, filters=[wide]))
    bits[f"PPMd, order {_PPMD_ORDER}, given train{note}"] = 8.0 * _compress_after(train[:TRAIN_LIMIT], held_out)
    return [Baseline(name, total, total / size, total / length) for name, total in bits.items()]


def _compress_after(train: bytes, held_out: bytes) -> int:
    """Return the bytes that PPMd adds for `held_out` after it has compressed `train`."""
    import pyppmd

    memory = min(_PPMD_MEMORY, max(1 << 20, 64 * (len(train) + len(held_out))))
    encoder = pyppmd.Ppmd8Encoder(_PPMD_ORDER, memory, pyppmd.PPMD8_RESTORE_METHOD_RESTART)
    if train:
        encoder.encode(train)  # what it holds back is a few bytes of its range coder
    return len(encoder.encode(held_out)) + len(encoder.flush())


def _pack_ngrams(data: np.ndarray, width: int) -> np.ndarray:
    """Pack every sequence of `width` bytes big-endian: (n − width + 1,) uint64."""
    count = max(0, len(data) - width + 1)
    keys = np.zeros(count, np.uint64)
    for offset in range(width):
        keys <<= np.uint64(8)
        keys |= data[offset : offset + count]
    return keys


def _interpolate_order(lower: np.ndarray, train: np.ndarray, held: np.ndarray, order: int) -> np.ndarray:
    """Compute p_n of every held-out byte from p_{n−1}. Bytes with a short or unseen context keep p_{n−1}."""
    grams, counts = np.unique(_pack_ngrams(train, order + 1), return_counts=True)
    if not len(grams):
        return lower
    contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
    totals = np.add.reduceat(counts, first)
    kinds = np.diff(first, append=len(grams))
    wanted = _pack_ngrams(held, order + 1)
    where, seen = _look_up(contexts, wanted >> np.uint64(8))
    at, known = _look_up(grams, wanted)
    below = lower[order:]
    mixed = (np.where(known, counts[at], 0) + kinds[where] * below) / (totals[where] + kinds[where])
    result = lower.copy()
    result[order:] = np.where(seen, mixed, below)
    return result


def _look_up(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of each key in a sorted table, and whether the table contains it."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def not_beaten(bits_per_char: float, baselines: Iterable[Baseline]) -> list[str]:
    """Return the names of the baselines that need no more bits than a model with this metric; NaN beats none."""
    return [item.name for item in baselines if not bits_per_char < item.bits_per_char or math.isnan(bits_per_char)]
