"""Hashes of chunks and of other rows of integers, the same for tensors and arrays.

PyTorch is not imported, so that an index tells which chunks share a hashed row without it.

Legend: N chunks, K tokens of a chunk.
"""

from typing import Any

import numpy as np

LENGTH_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
CHUNK_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def mix_columns(key: Any, columns: Any, factors: tuple[int, int]) -> Any:
    """Return a hash (n,) of integers in columns of (n,) each, from a first key; tensors or arrays of 64 bits."""
    for column in columns:
        key = (key ^ column) * factors[0]
        key = (key ^ (key >> 29)) * factors[1]
    return key ^ (key >> 32)


def hash_chunks(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash (N,) of every chunk; see `haed.chunk.packing.chunk_keys`.

    Args:
        tokens: (N, K) integers, zero beyond each length.
        lengths: (N,).
    """
    return mix_columns(lengths.astype(np.int64) * LENGTH_FACTOR + 1, tokens.astype(np.int64).T, CHUNK_FACTORS)


def hash_rows(tokens: np.ndarray, lengths: np.ndarray, rows: int) -> np.ndarray:
    """Return the row (N,) of every chunk in a table of hashed rows, see `haed.chunk.encoder.Encoder`."""
    return hash_chunks(tokens, lengths) % rows
