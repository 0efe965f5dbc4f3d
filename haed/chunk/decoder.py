"""Decoders: predict the next token from ŷ and the chunk's tokens so far, with exact likelihood.

Both run on the packed layout of `haed.chunk.packing`, that is on real tokens only. At each decision there are V + 1
symbols: the vocabulary and "the chunk ends here", which is impossible before the first token.

Legend: N chunks, S decisions, V vocabulary, W width of ŷ, H width of the decoder.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.base import length_mask, to_device
from haed.chunk.packing import Chunks, Packed, pack_decisions
from haed.layers.attention import BlockOptions, KeyValueCache
from haed.layers.lstm import RowLinear, compute_dtype, lstm_step, packed_lstm
from haed.layers.ngram_embedding import Grams
from haed.layers.transformer import TransformerStack
from haed.options import DecoderOptions


@dataclass
class DecoderState:
    """State of a decoder between two steps.

    Attributes:
        context: ŷ's share of the inputs; (N, 4H) of an LSTM's gates, or (N, K, H) or (N, 1, H) of a transformer's inputs.
        recent: (N, n) last tokens on the CPU, if n-grams are looked up; else None.
    """

    context: Tensor
    recent: Tensor | None

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the selected chunks, between steps; `rows` is a mask (N,) or their indices."""
        self.context = self.context[rows]
        self.recent = None if self.recent is None else self.recent[rows.cpu()]

    def append_symbol(self, symbol: Tensor, is_first: bool) -> None:
        """Append a symbol (N,) that is fed to the last tokens; the first symbol of a chunk is not a token."""
        if self.recent is not None and not is_first:
            self.recent = torch.cat([self.recent[:, 1:], symbol[:, None].cpu()], 1)


class Decoder(nn.Module, ABC):
    """Base class of the decoders, with an optional table of n-grams that end in the chunk or in the one before.

    `forward` scores all decisions of chunks at once, `step` one after the other with a state, as in sampling. Both must
    give the same logits. The constructor takes (options, W, V, K).

    Attributes:
        options_class: dataclass of its options, with those of its own kind.
        vocabulary: V.
        sees_before: true if decisions depend on the tokens of the chunk before.
        grams: the table, or None.
    """

    options_class: ClassVar[type[DecoderOptions]] = DecoderOptions

    def __init__(self, options: DecoderOptions, vocabulary: int, layer: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.grams = Grams(options.grams, layer, vocabulary + 1) if options.grams.rows else None
        self.sees_before = options.previous or self.grams is not None

    @abstractmethod
    def forward(self, context: Tensor, packed: Packed) -> Tensor:
        """Return the logits (S, V + 1) of packed decisions, from ŷ (N, W) in the chunks' original order."""

    @abstractmethod
    def initial_state(self, context: Tensor, before: Chunks) -> Any:
        """Return the state, such as a `DecoderState`, before the first token of chunks with ŷ (N, W).

        `before` are the chunks before, of length 0 for none. The state has `select_rows(rows)`, which keeps some chunks.
        """

    @abstractmethod
    def step(self, state: Any, symbol: Tensor) -> Tensor:
        """Feed `symbol` (N,), at first V, to every chunk, update `state` and return logits (N, V + 1) of the next."""

    def initialise_parameters(self) -> None:
        """Give parameters other values than `haed.chunk.model.HAED.initialise_parameters` does, which calls this last."""

    def pack_chunks(self, chunks: Chunks, before: Chunks, fixed: bool, sizes: list[int] | None = None) -> Packed:
        """Lay out chunks and their n-gram look-ups; see `haed.chunk.packing.pack_decisions`."""
        packed = pack_decisions(chunks, self.vocabulary, fixed, before if self.sees_before else None, sizes)
        if self.grams is not None:
            packed.lookup = self.grams.look_up(symbol_histories(packed, self.grams.longest, self.vocabulary))
        return packed

    def recent_tokens(self, before: Chunks) -> Tensor | None:
        """Return the last tokens (N, n) of the chunks before, on the CPU, for `ngram_terms`; None without a table."""
        if self.grams is None:
            return None
        return last_tokens(to_device(before, torch.device("cpu")), self.grams.longest, self.vocabulary)

    def ngram_terms(self, recent: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
        """Return the terms of the n-grams that end with the last tokens (N, n), for the layer and for the logits."""
        if self.grams is None or recent is None:
            return 0.0, 0.0
        return self.grams(to_device(self.grams.look_up(recent), self.grams.table.device))


@dataclass
class LSTMState(DecoderState):
    """State of the LSTM decoder between two steps.

    Attributes:
        layers: output and cell, (N, H) each, of every layer; empty before the first token.
    """

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def select_rows(self, rows: Tensor) -> None:
        """See `DecoderState.select_rows`."""
        super().select_rows(rows)
        self.layers = {layer: (output[rows], cell[rows]) for layer, (output, cell) in self.layers.items()}


class LSTMDecoder(Decoder):
    """An LSTM over the tokens of each chunk, from a zero state; ŷ is part of its input at every step (paper)."""

    def __init__(self, options: DecoderOptions, context: int, vocabulary: int, k: int) -> None:
        super().__init__(options, vocabulary, 4 * options.width)
        width = options.width
        self.tokens = nn.Embedding(vocabulary + 1, options.token_width)
        self.input = nn.Linear(options.token_width, 4 * width)
        self.context = nn.Linear(context, 4 * width, bias=False)
        self.recurrent = nn.ParameterList(torch.empty(4 * width, width) for _ in range(options.layers))
        self.dropout = nn.Dropout(options.dropout)
        self.upper = nn.ModuleList(RowLinear(width, 4 * width) for _ in range(options.layers - 1))
        self.output = RowLinear(width, vocabulary + 1)

    def gate_table(self) -> Tensor:
        """Return each symbol's share of the first layer's gates: (V + 1, 4H)."""
        return self.input(self.dropout(self.tokens.weight))

    def forward(self, context: Tensor, packed: Packed) -> Tensor:
        """See `Decoder.forward`."""
        dtype = compute_dtype(context)
        x, logits = F.embedding(packed.inputs, self.gate_table()).to(dtype), None
        if self.grams is not None and packed.lookup is not None:
            layer, logits = self.grams(packed.lookup)
            x = x + layer.to(dtype)
        constant = self.context(self.dropout(context[packed.order])).to(dtype)
        x = self.dropout(packed_lstm(x, constant, self.recurrent[0].to(dtype), packed.sizes))
        for upper, recurrent in zip(self.upper, self.recurrent[1:], strict=True):
            x = self.dropout(packed_lstm(upper(x), None, recurrent.to(dtype), packed.sizes))
        return self.output(x) if logits is None else self.output(x) + logits

    def initial_state(self, context: Tensor, before: Chunks) -> LSTMState:
        """See `Decoder.initial_state`."""
        return LSTMState(self.context(context), self.recent_tokens(before))

    def step(self, state: LSTMState, symbol: Tensor) -> Tensor:
        """See `Decoder.step`."""
        state.append_symbol(symbol, is_first=not state.layers)
        seen, logits = self.ngram_terms(state.recent)
        x = self.input(self.tokens(symbol)) + state.context + seen  # few symbols: the whole table would cost more
        for layer, recurrent in enumerate(self.recurrent):
            gates = x if layer == 0 else self.upper[layer - 1](x)
            state.layers[layer] = lstm_step(gates, recurrent, state.layers.get(layer))
            x = state.layers[layer][0]
        return self.output(x) + logits


@dataclass
class TransformerState(DecoderState):
    """State of the transformer decoder between two steps.

    Attributes:
        cache: keys and values of the chunk so far, after those of the chunk before, for each block.
    """

    cache: list[KeyValueCache]

    def select_rows(self, rows: Tensor) -> None:
        """See `DecoderState.select_rows`."""
        super().select_rows(rows)
        for cache in self.cache:
            cache.select_rows(rows)


class TransformerDecoder(Decoder):
    """A causal transformer within each chunk; ŷ is added to every input.

    ŷ is mapped to the inputs' width once, or for each place of the chunk by a matrix of its own (MEGABYTE: Yu et al.
    2023, section 2.2, where each is the same matrix on a part of ŷ).

    With `previous`, the tokens of the chunk before in the same document and window are further keys and values of every
    block. They have position embeddings of their own. So the decoder can look up letters that ŷ does not carry.
    """

    def __init__(self, options: DecoderOptions, context: int, vocabulary: int, k: int) -> None:
        super().__init__(options, vocabulary, options.width)
        width = options.width
        if width % options.heads:
            raise ValueError(f"model.decoder.width={width} must be a multiple of model.decoder.heads={options.heads}")
        self.tokens = nn.Embedding(vocabulary + 1, width)
        self.positions = nn.Embedding(k, width)
        self.positions_before = nn.Embedding(k, width) if options.previous else None
        self.context = nn.Linear(context, width * (k if options.context == "each" else 1))
        sizes = BlockOptions(width, options.heads, width // options.heads, options.ffn, dropout=options.dropout)
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = TransformerStack(options.layers, sizes)
        self.norm = nn.LayerNorm(width)
        self.output = RowLinear(width, vocabulary + 1)

    def forward(self, context: Tensor, packed: Packed) -> Tensor:
        """See `Decoder.forward`."""
        places = self.position_terms(context[packed.order])
        parts = [
            self.positions.weight[t] + places[:size, min(t, places.shape[1] - 1)] for t, size in enumerate(packed.sizes)
        ]
        x = self.tokens(packed.inputs) + torch.cat([places[:0, 0], self.positions.weight[:0], *parts])
        logits = None
        if self.grams is not None and packed.lookup is not None:
            layer, logits = self.grams(packed.lookup)
            x = x + layer
        x, caches = self.dropout(x), self.create_cache(packed.before)
        for block in self.blocks:  # a cache is let go after its block
            x = block.forward_packed(x, packed.sizes, caches.pop(0))
        x = self.output(self.norm(x))
        return x if logits is None else x + logits

    def position_terms(self, context: Tensor) -> Tensor:
        """Return ŷ's (N, W) share of a chunk's inputs: (N, K, H), or (N, 1, H) if it is the same for all places."""
        return self.context(context).unflatten(1, (-1, self.output.in_features))

    def create_cache(self, before: Chunks | None) -> list[KeyValueCache]:
        """Return a cache for each block; with `previous`, the N chunks before are its prefix."""
        if before is None or self.positions_before is None:
            return self.blocks.create_cache()
        x = self.dropout(self.tokens(before.tokens) + self.positions_before.weight)
        mask, caches = length_mask(before.lengths, x.shape[1]), []
        for block in self.blocks:
            projected = block.project(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            _, key, value = block.attention.split_heads(projected)
            caches.append(KeyValueCache(key, value, mask))
        return caches

    def initial_state(self, context: Tensor, before: Chunks) -> TransformerState:
        """See `Decoder.initial_state`."""
        return TransformerState(self.position_terms(context), self.recent_tokens(before), self.create_cache(before))

    def step(self, state: TransformerState, symbol: Tensor) -> Tensor:
        """See `Decoder.step`."""
        place = state.cache[0].seen
        context = state.context[:, min(place, state.context.shape[1] - 1)]
        state.append_symbol(symbol, is_first=place == 0)
        seen, logits = self.ngram_terms(state.recent)
        x = (self.tokens(symbol) + self.positions.weight[place] + context + seen)[:, None]
        x = self.blocks(x, state.cache)
        return self.output(self.norm(x[:, 0])) + logits


def symbol_histories(packed: Packed, size: int, vocabulary: int) -> Tensor:
    """Return the last symbols (S, size) before each decision, the newest last; V beyond the chunk before.

    They are taken from the decision's chunk and from the chunk before it.
    """
    times = torch.arange(len(packed.sizes), device=packed.order.device)
    steps = torch.cat([times[:0], *(each.expand(n) for each, n in zip(times, packed.sizes, strict=True))])
    grid = packed.order.new_full((len(packed.order), size + len(packed.sizes)), vocabulary)
    if packed.before is not None and len(grid):
        grid[:, :size] = last_tokens(packed.before, size, vocabulary)
    later = slice(sum(packed.sizes[:1]), None)  # the first input is the start of the chunk, not a token
    grid[packed.chunk[later], size - 1 + steps[later]] = packed.inputs[later]
    return grid[packed.chunk[:, None], steps[:, None] + torch.arange(size, device=steps.device)]


def last_tokens(chunks: Chunks, size: int, vocabulary: int) -> Tensor:
    """Return the last tokens (N, size) of chunks, padded with V in front."""
    place = chunks.lengths.long()[:, None] - size + torch.arange(size, device=chunks.lengths.device)
    return chunks.tokens.long().gather(1, place.clamp(min=0)).masked_fill(place < 0, vocabulary)
