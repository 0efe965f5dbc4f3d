"""Chunkers: documents to chunks of at most K tokens, and back without loss.

All work on whole buffers with NumPy; a buffer may hold many documents, and no chunk crosses from one to the next. For ours
a token is a byte; a chunker of your own may have other tokens, as long as `join` gives back the bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from data.options import CHUNKERS, LARGEST_CHUNK, ChunkerOptions
from data.sources import load

ONE = np.zeros(1, np.int64)


def _table(characters: bytes) -> np.ndarray:
    table = np.zeros(256, bool)
    table[list(characters)] = True
    return table


_SPACE = _table(b" \t\n\r\x0b\x0c")
_WORD = _table(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_'" + bytes(range(128, 256)))
_NEWLINE = _table(b"\n")
_RANKS = np.select([_WORD, _NEWLINE, _SPACE], [3, 0, 1], 2).astype(np.uint8).tobytes()  # punctuation is 2
_STOP, _CLOSING = _table(b".!?"), _table(b"\"')]}")


class Chunker(ABC):
    """Cuts documents into chunks. Packages add theirs as entry points of `haed.chunkers`.

    Attributes:
        name: as in `chunker.kind`.
        k: tokens per chunk at most, up to 255.
        vocabulary: number of different tokens, up to 256.
        fixed: every chunk has k tokens, but for a document's last, so that ends carry no information.
    """

    vocabulary = 256
    fixed = False

    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        """Makes a chunker of these options and of what `fit` returned for this corpus."""
        self.name, self.k = options.kind, options.k

    @classmethod
    def fit(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """What is to be learned from a sample of the training documents, as JSON for the manifest; None: nothing."""
        return None

    def split(self, text: bytes, starts: np.ndarray | Sequence[int] = ONE) -> tuple[np.ndarray, np.ndarray]:
        """Cuts a buffer of documents.

        Args:
            text: the documents, one after the other, none of them empty.
            starts: (D,) where each begins; the first is 0.

        Returns:
            tokens (n,) uint8, and lengths (N,) uint8 of the chunks, each from 1 to k, that sum to n.
        """
        tokens, starts = np.frombuffer(text, np.uint8), np.asarray(starts)
        if not len(tokens):
            return tokens, np.zeros(0, np.uint8)
        begins = self.begins(text, starts)
        begins[starts] = True
        first = np.flatnonzero(begins)
        lengths = np.empty_like(first)
        np.subtract(first[1:], first[:-1], out=lengths[:-1])
        lengths[-1] = len(tokens) - first[-1]
        if lengths.max() <= self.k:
            return tokens, lengths.astype(np.uint8)
        pieces = -(-lengths // self.k)
        capped = np.full(int(pieces.sum()), self.k, np.uint8)
        capped[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * self.k
        return tokens, capped

    @abstractmethod
    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Where chunks begin, (n,) bool, for a text of n bytes; longer ones are capped, and documents begin one anyway.

        What it says of a document must not depend on the documents before, which `starts` tells apart.
        """

    def join(self, tokens: np.ndarray, lengths: np.ndarray) -> bytes:
        """The bytes of these chunks."""
        return tokens.tobytes()


class WordChunker(Chunker):
    """A word with the punctuation and white space that follow it, at most k bytes; longer ones are split.

    A chunk begins at the first byte of a word (letters, digits, `_`, `'`, non-ASCII bytes) that follows punctuation or
    white space, at punctuation that follows white space, and at the indentation of a line. So `hello, ` is one chunk,
    `self.name(x)` three, and indentation is a chunk of its own: blanks and newlines never become one chunk each.
    Where chunks begin depends on the byte before and the byte itself, so a text and its continuation are cut alike but
    for the text's last chunk.
    """

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """See `Chunker.begins`: wherever a byte ranks above the one before."""
        ranks = np.frombuffer(text.translate(_RANKS), np.uint8)
        begins = np.empty(len(text), bool)
        begins[0] = True
        np.greater(ranks[1:], ranks[:-1], out=begins[1:])
        return begins


class FixedChunker(Chunker):
    """Chunks of k bytes; the last of a document may be shorter."""

    fixed = True

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """See `Chunker.begins`: nowhere but at documents, and the cap does the rest."""
        return np.zeros(len(text), bool)


class PixelChunker(FixedChunker):
    """k values of an RGB raster: 12 are four pixels. Rasters stay whole in the loader."""


class SentenceChunker(Chunker):
    """A sentence with the white space after it, for coarse experiments; give it a large k, up to 255.

    A chunk begins after white space that follows `.`, `!` or `?`, perhaps with a closing quote or bracket between, and
    after white space with a newline in it. It knows no abbreviations.
    """

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """See `Chunker.begins`."""
        tokens = np.frombuffer(text, np.uint8)
        space = _SPACE[tokens]
        begins = np.zeros(len(text), bool)
        after = np.flatnonzero(~space[1:] & space[:-1]) + 1  # the first byte after white space
        filled = np.flatnonzero(~space)
        rank = np.searchsorted(filled, after)
        first = starts[np.searchsorted(starts, after, "right") - 1]
        last = np.where(rank > 0, filled[rank - 1], -1)
        stop = (last >= first) & _STOP[tokens[last]]
        stop |= (last > first) & _CLOSING[tokens[last]] & _STOP[tokens[last - 1]]
        newlines = np.flatnonzero(tokens == ord("\n"))
        rank = np.searchsorted(newlines, after)
        newline = np.where(rank > 0, newlines[rank - 1], -1) if len(newlines) else np.full(len(after), -1)
        begins[after[stop | (newline >= np.maximum(last, first))]] = True
        return begins


def make_chunker(options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> Chunker:
    """The chunker of `options`.

    Args:
        options: which one, and its settings.
        fitted: what it learned from the corpus, from the manifest.

    Raises:
        ValueError: there is no chunker of that name, or it is not of our kind.
    """
    made = chunker_class(options.kind)(options, fitted)
    if not 1 <= made.k <= LARGEST_CHUNK or not 2 <= made.vocabulary <= 256:
        raise ValueError(
            f"chunker {options.kind!r}: k={made.k} and vocabulary={made.vocabulary} must be at most {LARGEST_CHUNK} and 256"
        )
    return made


def chunker_class(kind: str) -> type[Chunker]:
    """The class of that name, ours or an entry point's.

    Raises:
        ValueError: there is none.
    """
    return load(kind, CHUNKERS, "haed.chunkers")
