"""Chunkers: documents to chunks of at most K tokens, and back without loss.

All work on whole buffers with NumPy. A token is a byte, so the vocabulary is 256.
"""

from typing import Protocol

import numpy as np

from data.options import ChunkerOptions

_SPACE = np.zeros(256, bool)
_SPACE[list(b" \t\n\r\x0b\x0c")] = True
_WORD = np.zeros(256, bool)
_WORD[list(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_'")] = True
_WORD[128:] = True


class Chunker(Protocol):
    """Cuts documents into chunks.

    Attributes:
        name: as in `chunker.kind`.
        k: tokens per chunk at most.
        vocabulary: number of different tokens.
        fixed: every chunk has k tokens, but for a document's last, so that ends carry no information.
    """

    name: str
    k: int
    vocabulary: int
    fixed: bool

    def split(self, document: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Cuts a document: tokens (n,) uint8 and lengths (N,) uint8, each from 1 to k, that sum to n."""
        ...

    def join(self, tokens: np.ndarray, lengths: np.ndarray) -> bytes:
        """The document of these chunks."""
        ...


class _Bytes:
    """What chunkers of bytes share: joining is concatenation."""

    vocabulary = 256

    def __init__(self, k: int) -> None:
        self.k = k

    def join(self, tokens: np.ndarray, lengths: np.ndarray) -> bytes:
        """The bytes of these chunks."""
        return tokens.tobytes()


class WordChunker(_Bytes):
    """A word with the punctuation and white space that follow it, at most k bytes; longer ones are split.

    A chunk begins at the first byte of a word (letters, digits, `_`, `'`, non-ASCII bytes) that follows punctuation or
    white space, at punctuation that follows white space, and at the indentation of a line. So `hello, ` is one chunk,
    `self.name(x)` three, and indentation is a chunk of its own: blanks and newlines never become one chunk each.
    Where chunks begin depends on the byte before and the byte itself, so a text and its continuation are cut alike but
    for the text's last chunk.
    """

    name = "words"
    fixed = False

    def split(self, document: bytes) -> tuple[np.ndarray, np.ndarray]:
        """See `Chunker.split`."""
        tokens = np.frombuffer(document, np.uint8)
        space, word, newline = _SPACE[tokens], _WORD[tokens], tokens == ord("\n")
        begins = np.ones(len(tokens), bool)
        begins[1:] = ~space[1:] & (space[:-1] | (word[1:] & ~word[:-1]))
        begins[1:] |= space[1:] & ~newline[1:] & newline[:-1]
        return tokens, _cap(np.flatnonzero(begins), len(tokens), self.k)


class FixedChunker(_Bytes):
    """Chunks of k bytes; the last of a document may be shorter."""

    name = "fixed"
    fixed = True

    def split(self, document: bytes) -> tuple[np.ndarray, np.ndarray]:
        """See `Chunker.split`."""
        tokens = np.frombuffer(document, np.uint8)
        return tokens, _cap(np.zeros(min(1, len(tokens)), np.int64), len(tokens), self.k)


class PixelChunker(FixedChunker):
    """k values of an RGB raster: 12 are four pixels."""

    name = "pixels"


def _cap(begins: np.ndarray, size: int, k: int) -> np.ndarray:
    """Lengths (N,) uint8 of the pieces that begin at `begins`, those longer than k cut into pieces of k."""
    lengths = np.diff(begins, append=size)
    pieces = -(-lengths // k)
    capped = np.full(int(pieces.sum()), k, np.int64)
    last = np.cumsum(pieces) - 1
    capped[last] = lengths - (pieces - 1) * k
    return capped.astype(np.uint8)


CHUNKERS: dict[str, type[WordChunker] | type[FixedChunker]] = {
    chunker.name: chunker for chunker in (WordChunker, FixedChunker, PixelChunker)
}


def make_chunker(options: ChunkerOptions) -> Chunker:
    """The chunker of `options`.

    Raises:
        ValueError: there is no chunker of that name.
    """
    if options.kind not in CHUNKERS:
        raise ValueError(f"no chunker {options.kind!r}: expected {', '.join(CHUNKERS)}")
    return CHUNKERS[options.kind](options.k)
