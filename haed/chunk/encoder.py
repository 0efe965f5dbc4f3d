"""The encoder f_enc: maps a chunk, without context, to a vector, a row of an embedding matrix that is never stored.

Encoders that read a chunk token by token use a packed layout, on real tokens only. `Encoder.prepare_inputs` prepares it
where the chunks are. Its result is moved to the device and encoded.

Legend: N chunks, K tokens of a chunk at most, S tokens of all, E width of an embedding, H width within an encoder.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from haed.base import describe_value, length_mask
from haed.chunk.packing import Chunks, chunk_keys, pack_decisions
from haed.layers.attention import BlockOptions
from haed.layers.lstm import LSTMLayer, RowLinear
from haed.layers.ngram_embedding import SparseLookup
from haed.layers.transformer import TransformerStack
from haed.options import EncoderOptions


@dataclass
class Embedding:
    """The encoder's output for N chunks.

    Attributes:
        vector: (N, E).
        bias: (N,) the chunks' share of their score as candidates.
    """

    vector: Tensor
    bias: Tensor


@dataclass
class EncoderInput:
    """Prepared input of an encoder for N chunks.

    Attributes:
        chunks: chunks in the layout of the kind of encoder.
        lookup: look-up of each chunk's row of the table; None without a table.
        padded: every chunk costs as much as one of K tokens.
    """

    chunks: Any
    lookup: SparseLookup | None
    padded: bool = False

    @property
    def sizes(self) -> list[int]:
        """Number of chunks that have a token t, for each t; if they are padded, only that of all chunks.

        The device is waited for, unless they are padded or packed.
        """
        if self.padded or not isinstance(self.chunks, Chunks):
            return getattr(self.chunks, "sizes", [len(self)])
        return length_mask(self.chunks.lengths, self.chunks.tokens.shape[1]).sum(0).tolist()

    def __len__(self) -> int:
        return len(self.chunks)


class Encoder(nn.Module, ABC):
    """Base class of the encoders: token embeddings, an output layer, and the bias.

    The bias is a linear function of the embedding, or 0. With a table each chunk, as a whole, also has a row of its
    own, or one that it shares with the few others of its hash (Svenstrup et al. 2017; Pagnoni et al. 2024, section
    3.2.1, of n-grams). It is added before the output layer. So the embedding of a frequent chunk can differ from those
    of chunks with similar letters.

    The constructor takes (options, K, V, whether there is a bias).

    Attributes:
        options_class: dataclass of its options, with those of its own kind.
        padded: every chunk costs as much as one of K tokens.
        width: E.
        table: (rows, E), or None.
        output: output layer; chosen by the options.
    """

    options_class: ClassVar[type[EncoderOptions]] = EncoderOptions
    padded: ClassVar[bool] = False
    width: int
    tokens: nn.Embedding
    table: nn.Parameter | None
    output: nn.Module
    bias: nn.Linear | None

    def add_output_layers(self, options: EncoderOptions, bias: bool) -> None:
        """Add the last layers: table, output layer and bias."""
        self.width = options.width
        self.table = nn.Parameter(torch.empty(options.rows, options.width)) if options.rows else None
        ends = {"norm": nn.LayerNorm(options.width), "relu": nn.ReLU(), "none": nn.Identity()}
        self.output = ends[options.output]
        self.bias = nn.Linear(options.width, 1) if bias else None

    def prepare_inputs(
        self, chunks: Chunks, keys: Tensor | None = None, sizes: list[int] | None = None
    ) -> EncoderInput:
        """Prepare the input of `forward`.

        Args:
            chunks: N chunks, each of length 1 or more.
            keys: (N,) their keys, if known.
            sizes: number of chunks that have a token t, for each t, if known. If not, encoders that read tokens one by
                one wait for the device.
        """
        lookup = None
        if self.table is not None:
            keys = chunk_keys(chunks.tokens, chunks.lengths) if keys is None else keys
            lookup = SparseLookup.from_rows(keys.remainder(len(self.table)))
        return EncoderInput(self.arrange_chunks(chunks, sizes), lookup, self.padded)

    def forward(self, inputs: EncoderInput) -> Embedding:
        """Embed N chunks whose prepared input is on the encoder's device."""
        vector = self.embed_tokens(inputs.chunks)
        float_type = next((x.dtype for x in self.parameters()), torch.float32)
        is_tensor = isinstance(vector, Tensor) and vector.dtype in (torch.bfloat16, float_type)
        if not is_tensor or vector.shape != (len(inputs), self.width):
            raise ValueError(
                f"{type(self).__name__}.embed_tokens returned {describe_value(vector)}, expected {float_type} or bfloat16 of the shape "
                f"{(len(inputs), self.width)}: chunks × model.encoder.width"
            )
        if self.table is not None and inputs.lookup is not None:
            vector = vector + inputs.lookup.embed_rows(self.table)
        vector = self.output(vector)
        bias = self.bias(vector).squeeze(1) if self.bias is not None else vector.new_zeros(len(vector))
        return Embedding(vector, bias)

    def initialise_parameters(self) -> None:
        """Give parameters other values than `haed.chunk.model.HAED.initialise_parameters` does, which calls this last."""

    def arrange_chunks(self, chunks: Chunks, sizes: list[int] | None) -> Any:
        """Return N chunks in the layout that `embed_tokens` takes; by default int64. See `prepare_inputs`."""
        return Chunks(chunks.tokens.long(), chunks.lengths.long())

    @abstractmethod
    def embed_tokens(self, inputs: Any) -> Tensor:
        """Return vectors (N, E), before the table and the output layer, of chunks from `arrange_chunks`."""


class MLPEncoder(Encoder):
    """Token embeddings of a chunk, concatenated, through an MLP (paper, appendix: (12·10)→256→ReLU→256→ReLU).

    Padding is a symbol of its own, so the length of a chunk is known. The linear kind is a layer norm and one linear
    map, the patch embedder of MEGABYTE-pytorch (Yu et al. 2023, section 2.2, has neither).
    """

    padded = True

    def __init__(self, options: EncoderOptions, k: int, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        self.padding, linear = vocabulary, options.kind == "linear"
        self.tokens = nn.Embedding(vocabulary + 1, options.token_width)
        self.norm = nn.LayerNorm(k * options.token_width) if linear else nn.Identity()
        hidden = [] if linear else [options.hidden] * (options.layers - 1)
        widths = [k * options.token_width, *hidden, options.width]
        self.layers = nn.ModuleList(RowLinear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.activation = nn.ReLU() if options.output == "relu" else nn.GELU()
        self.add_output_layers(options, bias)

    def arrange_chunks(self, chunks: Chunks, sizes: list[int] | None) -> Chunks:
        """Return the chunks unchanged, which are bytes in training; see `Encoder.arrange_chunks`."""
        return chunks

    def embed_tokens(self, inputs: Chunks) -> Tensor:
        """See `Encoder.embed_tokens`."""
        real = length_mask(inputs.lengths, inputs.tokens.shape[1])
        x = self.norm(self.tokens(inputs.tokens.long().masked_fill(~real, self.padding)).flatten(1))
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


@dataclass
class PackedTokens:
    """Tokens of N chunks in time-major order, longest chunk first, as in `haed.chunk.packing.Packed`.

    Attributes:
        tokens: (S,).
        sizes: number of chunks that have a token t, for each t.
        back: (N,) place of each chunk in this order.
        lengths: (N,) in this order.
    """

    tokens: Tensor
    sizes: list[int]
    back: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.back)


class RowEncoder(Encoder):
    """An encoder that reads tokens one by one."""

    def arrange_chunks(self, chunks: Chunks, sizes: list[int] | None) -> PackedTokens:
        """See `Encoder.arrange_chunks`."""
        # Without ends, so that the targets are the tokens themselves.
        packed = pack_decisions(chunks, 0, fixed=True, sizes=sizes)
        lengths = chunks.lengths[packed.order].long()
        return PackedTokens(packed.targets, packed.sizes, packed.order.argsort(), lengths)


class LSTMEncoder(RowEncoder):
    """An LSTM over a chunk's tokens; the first E units of its last output are the embedding (HRED: paper, section 3).

    Sordoni et al. 2015 use it for the words of a query. The paper's appendix A says that an embedding wider than the
    main model's input is cut.
    """

    def __init__(self, options: EncoderOptions, k: int, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        if options.hidden < options.width:
            raise ValueError(
                f"model.encoder.hidden={options.hidden} must be at least model.encoder.width={options.width} "
                "with model.encoder.kind=lstm"
            )
        self.tokens = nn.Embedding(vocabulary, options.token_width)
        widths = [options.token_width, *[options.hidden] * options.layers]
        self.layers = nn.ModuleList(LSTMLayer(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.add_output_layers(options, bias)

    def embed_tokens(self, inputs: PackedTokens) -> Tensor:
        """See `Encoder.embed_tokens`."""
        x = self.tokens(inputs.tokens)
        for layer in self.layers:
            x = layer(x, inputs.sizes)
        steps = zip(x[:, : self.width].split(inputs.sizes), [*inputs.sizes[1:], 0], strict=False)
        last = [outputs[longer:] for outputs, longer in steps]  # chunks that end at this step; the longest come first
        return torch.cat(last[::-1] or [x[:, : self.width]])[inputs.back]


class TransformerEncoder(RowEncoder):
    """A bidirectional transformer over a chunk's tokens; their mean, mapped to E, is the embedding."""

    def __init__(self, options: EncoderOptions, k: int, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        width = options.hidden
        if width % options.heads:
            raise ValueError(f"model.encoder.hidden={width} must be a multiple of model.encoder.heads={options.heads}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(k, width)
        sizes = BlockOptions(width, options.heads, width // options.heads, options.ffn)
        self.blocks = TransformerStack(options.layers, sizes)
        self.norm = nn.LayerNorm(width)
        self.pooled = nn.Linear(width, options.width)
        self.add_output_layers(options, bias)

    def embed_tokens(self, inputs: PackedTokens) -> Tensor:
        """See `Encoder.embed_tokens`."""
        positions = [row.expand(size, -1) for row, size in zip(self.positions.weight, inputs.sizes, strict=False)]
        x = self.tokens(inputs.tokens) + torch.cat([self.positions.weight[:0], *positions])
        real = length_mask(inputs.lengths, len(inputs.sizes))
        for block in self.blocks:
            x = block.forward_packed(x, inputs.sizes, visible=real)
        x = self.norm(x)
        if inputs.sizes:
            grid, _ = pad_packed_sequence(PackedSequence(x, torch.tensor(inputs.sizes)), batch_first=True)
            x = grid.sum(1) / inputs.lengths[:, None]
        return self.pooled(x)[inputs.back]
