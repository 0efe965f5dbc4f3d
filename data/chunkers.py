"""Chunkers: documents to chunks of at most K tokens, and back without loss.

All work on whole buffers with NumPy; a buffer may hold many documents, and no chunk crosses from one to the next. For ours
a token is a byte; a chunker of your own may have other tokens, as long as `join` gives back the bytes.

Chunks that begin where the text is hard to foresee, as the patches of the Byte Latent Transformer.

Pagnoni et al. 2024 (arXiv 2412.09871, section 2.3) begin a patch where the entropy of a small language model's next byte
passes a global threshold. Here the model is an interpolated byte trigram (Witten-Bell), fitted on a sample of the training
split. What decides is the entropy of the next byte after each pair of bytes, 65,536 numbers, so these and the threshold are
what the manifest keeps.
"""

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from data.options import CHUNKERS, LARGEST_CHUNK, ChunkerOptions
from data.sources.source import load

ONE = np.zeros(1, np.int64)


def _table(characters: bytes) -> np.ndarray:
    table = np.zeros(256, bool)
    table[list(characters)] = True
    return table


_SPACE = _table(b" \t\n\r\x0b\x0c")
_WORD = _table(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_'" + bytes(range(128, 256)))
_NEWLINE = _table(b"\n")
_RANKS = np.select([_WORD, _NEWLINE, _SPACE], [3, 0, 1], 2).astype(np.uint8).tobytes()  # punctuation is 2
_MANY, _LONGEST_WORD = 0.1, 64  # share of words and bytes: beyond, k is advised, and a text has no words
_STOP, _CLOSING = _table(b".!?"), _table(b"\"')]}")


class Chunker(ABC):
    """Cuts documents into chunks. Packages add theirs as entry points of `haed.chunkers`.

    Attributes:
        name: as in `chunker.kind`.
        k: tokens per chunk at most, up to 255.
        vocabulary: number of different tokens, up to 256.
        fixed: every chunk has k tokens, but for a document's last, so that ends carry no information.
        version: of its cuts; raise it when it cuts the same text in another way: that makes another corpus.
        whole: what is longer than k bytes is cut between characters of UTF-8, never inside of one; False: after k tokens.
        text: cuts text, and makes no sense of pictures or sound.
    """

    vocabulary = 256
    fixed = False
    version = 1
    whole = False
    text = False

    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        """Makes a chunker of these options and of what `fit` returned for this corpus."""
        self.name, self.k = options.kind, options.k

    @classmethod
    def fit(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """What is to be learned from a sample of the training documents, as JSON for the manifest; None: nothing."""
        return None

    @classmethod
    def measure(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """What is worth saying of these options, from a sample of the training documents; `advice` is said. None: nothing."""
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
        if self.whole and not text.isascii():
            begins[_between_characters(tokens, first, self.k)] = True
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


def _between_characters(tokens: np.ndarray, first: np.ndarray, k: int) -> np.ndarray:
    """Where chunks of more than k bytes are cut so that no part has more, or ends inside of a character of UTF-8.

    Parts are as long as that allows, but every 64k bytes of a chunk one begins anyway, so that all of it is cut at once.
    What decides on a cut lies in the bytes before it, so a text and its continuation are cut alike. Where no character
    ends (bytes that are no UTF-8, a character of more than k bytes), a part has k bytes.

    Args:
        tokens: (n,) of the text.
        first: (N,) where its chunks begin.
        k: bytes of a part at most.
    """

    def after(at: np.ndarray, size: int | np.ndarray) -> np.ndarray:
        back = last = at + size
        for _ in range(3):
            back = back - (tokens[back] & 0xC0 == 0x80)
        return np.where((back > at) & (tokens[back] & 0xC0 != 0x80), back, last)

    ends = np.append(first[1:], len(tokens))
    long = ends - first > k
    at, ends = first[long], ends[long]
    blocks = (ends - at - 1) // (64 * k)
    at = np.repeat(at, blocks)
    number = np.arange(len(at)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    cuts = [after(at, 64 * k * (number + 1))]
    at = np.sort(np.concatenate([first[long], cuts[0]]))
    ends = np.sort(np.concatenate([ends, cuts[0]]))
    while len(at):
        more = ends - at > k
        at, ends = after(at[more], k), ends[more]
        cuts.append(at)
    return np.concatenate(cuts)


class WordChunker(Chunker):
    """A word with the punctuation and white space that follow it, at most k bytes; longer ones are cut between characters.

    A chunk begins at the first byte of a word (letters, digits, `_`, `'`, non-ASCII bytes) that follows punctuation or
    white space, at punctuation that follows white space, and at the indentation of a line. So `hello, ` is one chunk,
    `self.name(x)` three, and indentation is a chunk of its own: blanks and newlines never become one chunk each.
    Where chunks begin depends on the byte before and the byte itself, so a text and its continuation are cut alike but
    for the text's last chunk.
    """

    whole = True
    text = True

    @classmethod
    def measure(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """How many words are longer than k bytes, which is much where letters have several."""
        text = b"".join(documents)
        lengths = cls(replace(options, k=LARGEST_CHUNK)).split(text)[1]
        if not len(lengths):
            return None
        longer = float(np.mean(lengths > options.k))
        characters = int((np.frombuffer(text, np.uint8) & 0xC0 != 0x80).sum())
        width = len(text) / max(1, characters)
        found: dict[str, Any] = {"longer_than_k": round(longer, 3), "bytes_per_character": round(width, 2)}
        if longer > _MANY:
            wanted = -(-int(np.quantile(lengths, 1 - _MANY / 2)) // 4) * 4
            found["advice"] = (
                f"{100 * longer:.0f} % of the words are longer than chunker.k={options.k} bytes, and cut: this text has "
                f"{width:.1f} bytes a character. "
                + (
                    f"chunker.k={wanted} would hold 95 % of them"
                    if wanted <= _LONGEST_WORD
                    else f"Many have more than {_LONGEST_WORD} (a script without blanks, or no prose): chunks are pieces of "
                    f"{options.k / width:.0f} characters; a larger chunker.k makes longer ones"
                )
            )
        return found

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Wherever a byte ranks above the one before."""
        ranks = np.frombuffer(text.translate(_RANKS), np.uint8)
        begins = np.empty(len(text), bool)
        begins[0] = True
        np.greater(ranks[1:], ranks[:-1], out=begins[1:])
        return begins


class FixedChunker(Chunker):
    """Chunks of k bytes; the last of a document may be shorter."""

    fixed = True

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Nowhere but at documents, and the cap does the rest."""
        return np.zeros(len(text), bool)


class PixelChunker(FixedChunker):
    """k values of an RGB raster: 12 are four pixels. Rasters stay whole in the loader."""


class SentenceChunker(Chunker):
    """A sentence with the white space after it, for coarse experiments; give it a large k, up to 255.

    A chunk begins after white space that follows `.`, `!` or `?`, perhaps with a closing quote or bracket between, and
    after white space with a newline in it. It knows no abbreviations.
    """

    whole = True
    text = True

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """After the white space that ends a sentence or a line."""
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


def make_chunker(options: ChunkerOptions, fitted: dict[str, Any] | None = None, version: int | None = None) -> Chunker:
    """The chunker of `options`.

    Args:
        options: which one, and its settings.
        fitted: what it learned from the corpus, from the manifest.
        version: the one that cut the corpus; None: it does not matter.

    Raises:
        ValueError: there is no chunker of that name or version, or it is not of our kind.
    """
    made = chunker_class(options.kind)(options, fitted)
    if version not in (None, made.version):
        raise ValueError(
            f"the corpus was cut by version {version} of the chunker {options.kind!r}, and here is version {made.version}. "
            "Run `haed shard` again, or install the version that cut it."
        )
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


_STEPS = 31  # of entropy per bit: 8 bits and a little more in a byte
_COUNTED = 4 << 20


class EntropyChunker(Chunker):
    """A chunk begins at a byte whose entropy, given the two bytes before, is above the threshold."""

    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        if fitted is None:
            raise ValueError("the entropy chunker has to be fitted on a corpus: run `haed shard` with it")
        inflater = zlib.decompressobj()
        table = inflater.decompress(base64.b64decode(fitted["entropies"]), (1 << 16) + 1)
        if len(table) != 1 << 16:
            raise ValueError("the entropies in the manifest are damaged")
        self.uncertain = np.frombuffer(table, np.uint8) > fitted["threshold"]

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Where the text is hard to foresee; a document's second byte begins none: nothing is known yet."""
        tokens, begins = np.frombuffer(text, np.uint8), np.zeros(len(text), bool)
        begins[2:] = self.uncertain[tokens[:-2].astype(np.uint16) << 8 | tokens[1:-1]]
        second = starts + 1
        begins[second[second < len(text)]] = False
        return begins

    @classmethod
    def fit(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any]:
        """Entropies in 31sts of a bit, and the threshold that gives chunks of `mean_length` bytes on the sample."""
        counts = _trigrams(documents).reshape(256, 256, 256)  # [a, b, x]
        pairs = counts.sum(0)
        frequent = pairs.sum(1, keepdims=True)
        kinds = (pairs > 0).sum(1, keepdims=True)
        one = (pairs + np.maximum(kinds, 1) / 256) / np.maximum(frequent + kinds, 1)  # p(x | b)
        entropies = np.zeros((256, 256))
        for first in range(256):
            seen, different = counts[first].sum(1, keepdims=True), (counts[first] > 0).sum(1, keepdims=True)
            both = np.where(seen > 0, (counts[first] + different * one) / np.maximum(seen + different, 1), one)
            entropies[first] = -(both * np.log2(np.maximum(both, 1e-300))).sum(1)
        table = np.minimum(np.round(entropies * _STEPS), 255).astype(np.uint8).ravel()
        weight = np.bincount(table, counts.sum(2).ravel(), 256)
        above = weight.sum() - np.cumsum(weight)  # occurrences above each value
        threshold = int(np.argmin(np.abs(above - weight.sum() / options.mean_length)))
        packed = base64.b64encode(zlib.compress(table.tobytes(), 9)).decode()
        return {"entropies": packed, "threshold": threshold, "threshold_bits": threshold / _STEPS}


def _trigrams(documents: Iterable[bytes]) -> np.ndarray:
    """How often each three bytes occur, (2^24,) int64."""
    counts = np.zeros(1 << 24, np.int64)
    waiting: list[bytes] = []

    def count() -> None:
        codes = []
        for document in waiting:
            text = np.frombuffer(document, np.uint8).astype(np.uint32)
            codes.append(text[:-2] << 16 | text[1:-1] << 8 | text[2:])
        np.add(counts, np.bincount(np.concatenate(codes), minlength=1 << 24), out=counts)
        waiting.clear()

    for document in documents:
        if len(document) > 2:
            waiting.append(document)
        if sum(map(len, waiting)) >= _COUNTED:
            count()
    if waiting:
        count()
    return counts
