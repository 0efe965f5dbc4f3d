"""Chunkers: they split documents into chunks of at most k tokens and join them back without loss.

A chunker works on a whole buffer with NumPy. A buffer may hold many documents, and no chunk crosses from one to the
next. A token of ours is a byte. A custom chunker may have other tokens, as long as `join` returns the original bytes.

`EntropyChunker` begins chunks where the text is hard to predict, like the patches of the Byte Latent Transformer.
Pagnoni et al. 2024 (arXiv 2412.09871, section 2.3) begin a patch where the next-byte entropy of a small language model
passes a global threshold. Here the model is an interpolated byte trigram (Witten-Bell), fitted on a sample of the
training split. Only the entropy of the next byte after each pair of bytes matters. So the manifest keeps these 65,536
numbers and the threshold.
"""

import base64
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from data.options import CHUNKERS, LARGEST_CHUNK, ChunkerOptions

ONE = np.zeros(1, np.int64)


def _byte_mask(characters: bytes) -> np.ndarray:
    return np.isin(np.arange(256), list(characters))


_SPACE = _byte_mask(b" \t\n\r\x0b\x0c")
_WORD = _byte_mask(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_'" + bytes(range(128, 256)))
_NEWLINE = _byte_mask(b"\n")
_RANKS = np.select([_WORD, _NEWLINE, _SPACE], [3, 0, 1], 2).astype(np.uint8).tobytes()  # punctuation is 2
_MANY, _LONGEST_WORD = 0.1, 64  # share of long words above which k is advised; bytes of the longest useful k
_SENTENCE_END = re.compile(rb"""[.!?\n](?:(?<=\n)|["')\]}]?\s)\s*""")


class Chunker(ABC):
    """A base class of chunkers. Packages add theirs as entry points of `haed.chunkers`.

    Attributes:
        options_class: dataclass of its options, with those of its own kind.
        name: as in `chunker.kind`.
        k: maximum tokens per chunk, up to 255.
        vocabulary: tokens are below it; at most 256.
        fixed: every chunk but a document's last has k tokens, so that boundaries carry no information.
        version: of the boundaries. Raise it when the same text is split differently: that makes another corpus.
        whole: chunks longer than k bytes are split between UTF-8 characters, never inside one; False: after k tokens.
        text: for text only, not for pictures or sound.
    """

    options_class: ClassVar[type[ChunkerOptions]] = ChunkerOptions
    vocabulary = 256
    fixed = False
    version = 1
    whole = False
    text = False

    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        """Create a chunker from its options and from the result of `fit` for this corpus."""
        self.name, self.k = options.kind, options.k

    @classmethod
    def fit(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """Learn from a sample of the training documents.

        Returns:
            a JSON value for the manifest; None: nothing is learned.
        """
        return None

    @classmethod
    def measure_sample(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """Measure how well the options suit a sample of the training documents.

        Returns:
            a JSON value for the manifest, whose entry `advice` is logged; None: nothing to report.
        """
        return None

    def split(self, text: bytes, starts: np.ndarray | Sequence[int] = ONE) -> tuple[np.ndarray, np.ndarray]:
        """Split a buffer of documents into chunks.

        Args:
            text: the documents, one after the other, none of them empty.
            starts: (D,) offsets of the documents; the first is 0.

        Returns:
            tokens (n,) uint8, and lengths (N,) uint8 of the chunks, each from 1 to k, that sum to n.
        """
        tokens, starts = np.frombuffer(text, np.uint8), np.asarray(starts)
        if not len(tokens):
            return tokens, np.zeros(0, np.uint8)
        begins = self.begins(text, starts)
        if not isinstance(begins, np.ndarray) or begins.dtype != bool or begins.shape != tokens.shape:
            expected = f"bool {tokens.shape}: whether each byte begins a chunk"
            raise ValueError(f"chunker.kind={self.name}: begins returned {_describe(begins)}, expected {expected}")
        begins[starts] = True
        first = np.flatnonzero(begins)
        if self.whole and not text.isascii():
            begins[_between_characters(tokens, first, self.k)] = True
            first = np.flatnonzero(begins)
        lengths = np.diff(first, append=len(tokens))
        if lengths.max() <= self.k:
            return tokens, lengths.astype(np.uint8)
        pieces = -(-lengths // self.k)
        capped = np.full(int(pieces.sum()), self.k, np.uint8)
        capped[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * self.k
        return tokens, capped

    def check_split(self, text: bytes, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Check what another class, with its own `split`, `join` or `vocabulary`, made of a document.

        Raises:
            ValueError: it is not what `split` promises, or the chunks joined are not the document.
        """
        returned = f"chunker.kind={self.name}: split returned {_describe(tokens)} and {_describe(lengths)}"
        for values in (tokens, lengths):
            if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.ndim != 1:
                raise ValueError(f"{returned}, expected tokens (n,) and lengths (N,), both uint8")
        if not lengths.all() or lengths.max(initial=0) > self.k or lengths.sum(dtype=int) != len(tokens):
            problem = f"lengths from {lengths.min(initial=255)} to {lengths.max(initial=0)} that sum to {lengths.sum(dtype=int):,}"
            raise ValueError(f"{returned}: {problem}, expected 1 to {self.k} and a sum of {len(tokens):,}")
        if tokens.max(initial=0) >= self.vocabulary:
            problem = f"a token is {tokens.max()}, but vocabulary is {self.vocabulary}"
            raise ValueError(f"chunker.kind={self.name}: {problem}. Raise it, to at most 256")
        if self.join(tokens, lengths) != text:
            raise ValueError(f"chunker.kind={self.name}: the chunks of a document joined are not the document")

    def cut_text(self, text: bytes) -> list[bytes]:
        """Return the chunks of one document as bytes."""
        tokens, lengths = self.split(text)
        ends = lengths.cumsum(dtype=int).tolist()
        return [tokens[begin:end].tobytes() for begin, end in pairwise([0, *ends])]

    @abstractmethod
    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Return a mask (n,) bool of the bytes of `text` that begin a chunk.

        Longer chunks are split at k tokens afterwards, and every document begins a chunk anyway. The mask of a document
        must not depend on the documents before it, which `starts` separates.
        """

    def join(self, tokens: np.ndarray, lengths: np.ndarray) -> bytes:
        """Return the bytes of these chunks."""
        return tokens.tobytes()

    def join_chunk(self, tokens: bytes) -> bytes:
        """Return the bytes of one chunk of these tokens."""
        return self.join(np.frombuffer(tokens, np.uint8), np.array([len(tokens)]))


def _describe(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"{value!r:.100}"


def _between_characters(tokens: np.ndarray, first: np.ndarray, k: int) -> np.ndarray:
    """Return the positions that split chunks of more than k bytes. No part is longer, or ends inside a UTF-8 character.

    The chunks of the text, `tokens` (n,), begin at `first` (N,). Parts are as long as possible, but one begins about
    every 64k bytes, so that all blocks of a chunk are split at once. A split depends only on the bytes before it, so a
    text and its continuation are split alike. Where no character ends (bytes that are not UTF-8, a character of more
    than k bytes), a part has k bytes.
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
    """A chunker of words: a word with the punctuation and white space after it, at most k bytes.

    Longer words are split between characters. A chunk begins at each of these bytes:

    - the first byte of a word (letters, digits, `_`, `'`, non-ASCII bytes) after punctuation or white space,
    - punctuation after white space,
    - the indentation of a line.

    So `hello, ` is one chunk and `self.name(x)` three. Indentation is a chunk of its own: blanks and newlines never
    become one chunk each. A boundary depends on a byte and the one before it. So a text and its continuation are split
    alike, except for the text's last chunk.
    """

    whole = True
    text = True

    @classmethod
    def measure_sample(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any] | None:
        """Measure the share of words longer than k bytes, which is large where letters have several bytes."""
        kept = [document for document in documents if document]
        text, starts = b"".join(kept), np.cumsum([0, *map(len, kept)])[:-1]
        lengths = WordChunker(replace(options, k=LARGEST_CHUNK)).split(text, starts)[1]  # a subclass may need `fitted`
        if not len(lengths):
            return None
        longer = float(np.mean(lengths > options.k))
        characters = int((np.frombuffer(text, np.uint8) & 0xC0 != 0x80).sum())
        width = len(text) / max(1, characters)
        measures: dict[str, Any] = {"longer_than_k": round(longer, 3), "bytes_per_character": round(width, 2)}
        if longer > _MANY:
            wanted = -(-int(np.quantile(lengths, 1 - _MANY / 2)) // 4) * 4
            advice = f"chunker.k={wanted} would hold 95 % of them"
            if wanted > _LONGEST_WORD:
                advice = (
                    f"Many have more than {_LONGEST_WORD} bytes (a script without spaces, or not prose), so chunks "
                    f"are pieces of {options.k / width:.0f} characters. A larger chunker.k makes longer ones"
                )
            measures["advice"] = (
                f"{100 * longer:.0f} % of the words are longer than chunker.k={options.k} bytes and are cut. "
                f"This text has {width:.1f} bytes per character. {advice}"
            )
        return measures

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Begin a chunk at each byte of a higher rank than the byte before."""
        ranks = np.frombuffer(text.translate(_RANKS), np.uint8)
        begins = np.ones(len(text), bool)
        np.greater(ranks[1:], ranks[:-1], out=begins[1:])
        return begins


class FixedChunker(Chunker):
    """A chunker with chunks of k bytes; the last of a document may be shorter."""

    fixed = True

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Return an empty mask: documents begin chunks anyway, and `split` limits their length."""
        return np.zeros(len(text), bool)


class PixelChunker(FixedChunker):
    """A chunker with k values of an RGB raster per chunk: 12 are four pixels. The loader keeps rasters whole."""


class SentenceChunker(Chunker):
    """A chunker of sentences with the white space after them, for coarse experiments. Use a large k, up to 255.

    A chunk begins after white space that follows `.`, `!` or `?`, with an optional closing quote or bracket between. It
    also begins after white space with a newline in it. Abbreviations are not recognised.
    """

    whole = True
    text = True

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Begin a chunk after the white space that ends a sentence or a line."""
        begins = np.zeros(len(text) + 1, bool)
        for start, stop in pairwise([*starts.tolist(), len(text)]):
            begins[[start + match.end() for match in _SENTENCE_END.finditer(text[start:stop])]] = True
        return begins[:-1]


def make_chunker(options: ChunkerOptions, fitted: dict[str, Any] | None = None, version: int | None = None) -> Chunker:
    """Create the chunker of `options`.

    Args:
        options: its kind and settings.
        fitted: result of `fit` for the corpus, from the manifest.
        version: of the chunker that split the corpus; None: any.

    Raises:
        ValueError: there is no chunker of that name or version, or its k or vocabulary is out of range.
    """
    new_chunker: Chunker = CHUNKERS.load_class(options.kind)(options, fitted)
    if version not in (None, new_chunker.version):
        raise ValueError(
            f"the corpus was cut by version {version} of the chunker {options.kind!r}, but this is version "
            f"{new_chunker.version}. Run `haed shard` again, or install the version that cut it."
        )
    if not 1 <= new_chunker.k <= LARGEST_CHUNK or not 2 <= new_chunker.vocabulary <= 256:
        raise ValueError(
            f"chunker {options.kind!r}: k={new_chunker.k} and vocabulary={new_chunker.vocabulary} must be at most {LARGEST_CHUNK} and 256"
        )
    return new_chunker


_STEPS = 31  # units per bit of entropy, so that 8 bits fit into a byte


class EntropyChunker(Chunker):
    """A chunker that begins a chunk at a byte whose entropy, given the two bytes before, is above the threshold."""

    def __init__(self, options: ChunkerOptions, fitted: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        if fitted is None:
            raise ValueError("the entropy chunker must be fitted on a corpus. Run `haed shard` with it")
        table = zlib.decompressobj().decompress(base64.b64decode(fitted["entropies"]), (1 << 16) + 1)
        if len(table) != 1 << 16:
            raise ValueError("the entropies in the manifest are damaged")
        self.uncertain = np.frombuffer(table, np.uint8) > fitted["threshold"]

    def begins(self, text: bytes, starts: np.ndarray) -> np.ndarray:
        """Begin a chunk where the text is hard to predict, but not at a document's second byte: it lacks context."""
        tokens, begins = np.frombuffer(text, np.uint8), np.zeros(len(text), bool)
        begins[2:] = self.uncertain[tokens[:-2].astype(np.uint16) << 8 | tokens[1:-1]]
        second = starts + 1
        begins[second[second < len(text)]] = False
        return begins

    @classmethod
    def fit(cls, options: ChunkerOptions, documents: Iterable[bytes]) -> dict[str, Any]:
        """Return entropies in units of 1/31 bit, and a threshold for a mean chunk of `mean_length` bytes."""
        triples = np.zeros(1 << 24, np.int64)  # occurrences of each sequence of three bytes
        for document in documents:
            text = np.frombuffer(document, np.uint8).astype(np.int64)
            np.add.at(triples, text[:-2] << 16 | text[1:-1] << 8 | text[2:], 1)
        counts = triples.reshape(256, 256, 256)  # [a, b, x]
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
