"""How alike two chunks are spelled: edit distance of bytes, many at a time, or the distance of their pixels."""

import numpy as np

MOST = 64  # bytes of a chunk that are compared: bits of a word
_ONE = np.uint64(1)


def similarity(chunks: list[bytes], rows: np.ndarray, pixels: bool = False) -> np.ndarray:
    """Likeness (Q, n) float32 of some chunks, given as rows (Q,), to all: 1 of equal ones, 0 with nothing in common.

    It is 1 − edit distance / length of the longer, or, of pixels, 1 − mean absolute difference / 255.
    """
    if pixels:
        return np.stack([_pixels(chunks[row], chunks) for row in rows.tolist()])
    width = min(MOST, max(map(len, chunks)))
    table = np.zeros((width, len(chunks)), np.uint8)
    lengths = np.array([min(len(chunk), width) for chunk in chunks])
    for number, chunk in enumerate(chunks):
        table[: lengths[number], number] = np.frombuffer(chunk[:width], np.uint8)
    found = np.empty((len(rows), len(chunks)), np.float32)
    for at, row in enumerate(rows.tolist()):
        longer = np.maximum(lengths, lengths[row])
        found[at] = 1 - distances(chunks[row][:width], table, lengths) / longer
    return found


def distances(pattern: bytes, table: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Edit distances (n,) of a pattern to n texts, by bit vectors (Myers 1999, in the form of Hyyrö 2001).

    A column of the matrix of dynamic programming is two words of bits: where it rises and where it falls. So a byte of
    all texts costs a dozen operations on arrays, whatever the pattern's length.

    Args:
        pattern: 1 to 64 bytes.
        table: (K, n) uint8, the texts in columns.
        lengths: (n,) of them.
    """
    places = np.zeros(256, np.uint64)
    for at, byte in enumerate(pattern):
        places[byte] |= _ONE << np.uint64(at)
    last = np.uint64(len(pattern) - 1)
    texts = table.shape[1]
    rises, falls = np.full(texts, ~np.uint64(0)), np.zeros(texts, np.uint64)
    score = np.full(texts, len(pattern), np.int64)
    for step in range(table.shape[0]):
        matches = places[table[step]]
        diagonal = (((matches & rises) + rises) ^ rises) | matches | falls  # the sum carries along runs of matches
        up, down = falls | ~(diagonal | rises), rises & diagonal
        change = ((up >> last) & _ONE).astype(np.int64) - ((down >> last) & _ONE).astype(np.int64)
        score += np.where(step < lengths, change, 0)
        up, down = (up << _ONE) | _ONE, down << _ONE
        rises, falls = down | ~(diagonal | up), diagonal & up
    return score


def _pixels(chunk: bytes, chunks: list[bytes]) -> np.ndarray:
    """Likeness (n,) of a chunk of pixels to all, over the values that both have."""
    own = np.frombuffer(chunk, np.uint8).astype(np.float32)
    found = np.zeros(len(chunks), np.float32)
    for number, other in enumerate(chunks):
        shared = min(len(own), len(other))
        values = np.frombuffer(other, np.uint8, shared).astype(np.float32)
        found[number] = 1 - float(np.abs(own[:shared] - values).mean()) / 255
    return found
