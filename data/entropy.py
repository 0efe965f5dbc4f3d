"""Chunks that begin where the text is hard to foresee, as the patches of the Byte Latent Transformer.

Pagnoni et al. 2024 (arXiv 2412.09871, section 2.3) begin a patch where the entropy of a small language model's next byte
passes a global threshold. Here the model is an interpolated byte trigram (Witten-Bell), fitted on a sample of the training
split. What decides is the entropy of the next byte after each pair of bytes, 65,536 numbers, so these and the threshold are
what the manifest keeps.
"""

import base64
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from data.chunkers import Chunker
from data.options import ChunkerOptions

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
