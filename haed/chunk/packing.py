"""Sets of chunks as tensors: distinct chunks, and the packed layout in which decoders see only real tokens.

A chunk is a row of at most K tokens, padded with zeros, and its length; length 0 marks padding where there is no chunk.

All of it runs on the device of the chunks. Shapes that depend on the data (how many distinct chunks, how many decisions)
can be passed in, so that a step waits once for all of them.

Legend: N chunks, K tokens per chunk at most, V vocabulary, S decoding decisions of all chunks together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from haed.base import TokenBatch, length_mask
from haed.hashing import CHUNK_FACTORS, LENGTH_FACTOR, hash_chunks, mix_columns
from haed.layers.ngram_embedding import SortedIntegers, SparseLookup

_FEW = 1 << 10  # chunks whose keys NumPy computes, in a third of the time, as in sampling


def chunk_keys(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return a 64-bit key of every chunk; equal chunks have equal keys.

    Two of n different chunks collide with a probability of at most (K + 1)·n²/2⁶⁵: two in 10⁸ for 200,000 chunks of 12
    tokens, a very large step. The shifts are arithmetic. So each token maps two states, x and its complement, to one,
    and chunks that end alike can meet at each. Logical shifts would save the factor, but would change the keys, by
    which checkpoints count chunks.

    Args:
        tokens: (N, K) integers, zero beyond each length.
        lengths: (N,).

    Returns:
        (N,) int64.
    """
    if tokens.device.type == "cpu" and len(tokens) <= _FEW:
        return torch.from_numpy(hash_chunks(tokens.numpy(), lengths.numpy()))
    return mix_columns(lengths.long() * LENGTH_FACTOR + 1, tokens.long().unbind(1), CHUNK_FACTORS)


@dataclass
class Chunks:
    """A set of chunks; N may be a shape.

    Attributes:
        tokens: (N, K), zero beyond each length.
        lengths: (N,), 0 where there is no chunk.
    """

    tokens: Tensor
    lengths: Tensor

    def __getitem__(self, rows: Tensor | slice) -> "Chunks":
        return Chunks(self.tokens[rows], self.lengths[rows])

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def empty(cls, k: int) -> "Chunks":
        """Return no chunks, of K tokens at most."""
        return cls(torch.zeros(0, k, dtype=torch.long), torch.zeros(0, dtype=torch.long))

    @staticmethod
    def concatenate(sets: "Sequence[Chunks]") -> "Chunks":
        """Concatenate one or more sets."""
        return Chunks(torch.cat([each.tokens for each in sets]), torch.cat([each.lengths for each in sets]))


@dataclass
class Distinct(Chunks):
    """The C distinct chunks of a set of N, in the order of their keys.

    Attributes:
        keys: (C,) int64, see `chunk_keys`.
        inverse: (N,) index of every chunk's distinct chunk.
        counts: (C,) how often each occurs in the set.
    """

    keys: Tensor
    inverse: Tensor
    counts: Tensor


def find_distinct(tokens: Tensor, lengths: Tensor) -> Distinct:
    """Find the distinct chunks of `tokens` (N, K), `lengths` (N,); waits for their device."""
    keys = SortedIntegers.from_values(chunk_keys(tokens, lengths))
    return select_distinct(Chunks(tokens, lengths), keys, int(keys.count_values()))


def select_distinct(chunks: Chunks, keys: SortedIntegers, count: int) -> Distinct:
    """Return the distinct ones of N chunks with sorted keys, `count` in all."""
    inverse = keys.inverse
    place = inverse.new_zeros(count).scatter_(0, inverse, torch.arange(len(inverse), device=inverse.device))
    counts = torch.zeros_like(place).index_add_(0, inverse, torch.ones_like(inverse))
    return Distinct(chunks.tokens[place], chunks.lengths[place], keys.values[place], inverse, counts)


@dataclass
class Packed:
    """Decoding decisions of N chunks in time-major order, longest chunk first, without padding.

    Decision t of a chunk is its token t, or "the chunk ends here" (symbol V). A chunk of K tokens, and any chunk of a
    fixed-size chunker, ends with certainty and needs no decision. Rows of decision t come before those of t + 1. Within
    a step chunks keep their order, so step t concerns the first `sizes[t]` chunks of `order`.

    Attributes:
        order: (N,) the chunks from most to fewest decisions.
        sizes: number of chunks that take decision t, for each t.
        inputs: (S,) symbol seen at each decision: the token before, or V at the start of a chunk.
        targets: (S,) symbol to predict.
        chunk: (S,) position in `order` of each row's chunk.
        before: the chunks before, in the order of `order`, of length 0 for none; or None.
        lookup: look-up of the n-grams before each row's symbol, for a decoder with such a table; or None.
    """

    order: Tensor
    sizes: list[int]
    inputs: Tensor
    targets: Tensor
    chunk: Tensor
    before: Chunks | None = None
    lookup: SparseLookup | None = None


def previous_chunks(windows: TokenBatch) -> Chunks:
    """Return the chunk before each chunk, in its window and document: (B, T, K) and (B, T), length 0 for none."""
    before, ends = windows.tokens.roll(1, 1), windows.lengths.roll(1, 1)
    none = windows.starts.clone()
    none[:, 0] = True
    return Chunks(before.masked_fill(none[..., None], 0), ends.masked_fill(none, 0))


def mask_decisions(lengths: Tensor, k: int, fixed: bool) -> Tensor:
    """Return a mask (N, K) of the decisions of chunks of lengths (N,); the sum over chunks is `Packed.sizes`."""
    return length_mask(lengths.long() if fixed else (lengths.long() + 1).clamp(max=k), k)


def pack_decisions(
    chunks: Chunks, vocabulary: int, fixed: bool = False, before: Chunks | None = None, sizes: list[int] | None = None
) -> Packed:
    """Lay out the decisions of N chunks, each of length 1 or more.

    Args:
        chunks: tokens (N, K) in [0, vocabulary), lengths (N,).
        vocabulary: V; the symbol V is the start of a chunk as input and its end as target.
        fixed: true if the chunker's chunks have a fixed size, so that no end is ever predicted.
        before: the chunks before these, for a decoder that sees them.
        sizes: number of chunks that take decision t, for each t, if known; else the device is waited for.
    """
    tokens, lengths = chunks.tokens, chunks.lengths.long()
    n, k = tokens.shape
    decisions = mask_decisions(lengths, k, fixed)
    order = decisions.sum(1).sort(descending=True, stable=True).indices
    sizes = [size for size in (decisions.sum(0).cpu().tolist() if sizes is None else sizes) if size]
    symbols = lengths.new_full((n, k + 1), vocabulary)
    symbols[:, 1:] = torch.where(length_mask(lengths, k), tokens.long(), vocabulary)
    symbols, places = symbols[order], torch.arange(n, device=lengths.device)
    return Packed(
        order=order,
        sizes=sizes,
        inputs=torch.cat([places[:0], *(symbols[:size, t] for t, size in enumerate(sizes))]),
        targets=torch.cat([places[:0], *(symbols[:size, t + 1] for t, size in enumerate(sizes))]),
        chunk=torch.cat([places[:0], *(places[:size] for size in sizes)]),
        before=None if before is None else Chunks(before.tokens[order].long(), before.lengths[order].long()),
    )
