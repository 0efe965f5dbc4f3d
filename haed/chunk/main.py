"""The main model f_main: predicts ŷ of the next chunk from the embeddings of the chunks so far, one step a chunk.

Legend: B sequences, T chunks of a window, E width of an embedding, W width of ŷ, U units of an LSTM.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from haed.base import SHORTER, record_outputs
from haed.layers.attention import BlockOptions, KeyValueCache
from haed.layers.lstm import LSTMLayer
from haed.layers.transformer import TransformerStack
from haed.options import MainOptions

LSTMCache = dict[int, tuple[Tensor, Tensor]]  # output and cell, each (B, U), of every layer that has begun


class Main(nn.Module, ABC):
    """Base class of the main models.

    A learned vector `start` (E,) stands in for the chunk before the first one of a document. The constructor takes
    (options, E, maximum T).

    Attributes:
        options_class: dataclass of its options, with those of its own kind.
        start: (E,) the learned start vector.
        positions: learned position vectors, or None.
    """

    options_class: ClassVar[type[MainOptions]] = MainOptions
    start: nn.Parameter
    positions: nn.Parameter | None

    def forward(self, embeddings: Tensor, starts: Tensor) -> Tensor:
        """Predict every chunk of a window from the chunks before it.

        Args:
            embeddings: (B, T, E) of the window's chunks.
            starts: (B, T) true where a chunk begins a document. It is predicted from the start vector, not from the
                last chunk of another document.

        Returns:
            (B, T, W): ŷ for each chunk; it depends on earlier chunks only.
        """
        before = torch.cat([embeddings[:, :1], embeddings[:, :-1]], 1)
        first = starts.clone()
        first[:, 0] = True
        return self.step(torch.where(first[..., None], self.start.to(before.dtype), before), None)

    def initialise_parameters(self) -> None:
        """Give parameters other values than `haed.chunk.model.HAED.initialise_parameters` does, which calls this last."""

    def layer_states(self, embeddings: Tensor, starts: Tensor) -> list[Tensor]:
        """Return the output (B, T, ·) of each layer, and ŷ at last; see `forward`."""
        with record_outputs(dict(enumerate(self.get_layers()))) as seen:
            last = self(embeddings, starts)
        return [*seen.values(), last]

    @abstractmethod
    def get_layers(self) -> nn.ModuleList:
        """Return the layers."""

    @abstractmethod
    def step(self, inputs: Tensor, cache: Any) -> Tensor:
        """Feed inputs (B, T, E), which follow those in the cache, and return ŷ (B, T, W) after each."""

    @abstractmethod
    def create_cache(self) -> Any:
        """Return an empty cache for `step`."""

    @abstractmethod
    def parameters_by_depth(self) -> list[tuple[int, list[nn.Parameter]]]:
        """Return all parameters in their order, grouped by the number of layers from them to ŷ."""


class TransformerMain(Main):
    """A causal transformer over chunk embeddings, zero-padded from E to its width W.

    With `positions="concatenated"`, learned position vectors fill the padded coordinates (paper, appendix; the size 100
    there is 356 − 256). With `learned` they are added to all coordinates. With `rotary` queries and keys are rotated.
    """

    def __init__(self, options: MainOptions, embedding: int, context: int) -> None:
        super().__init__()
        padding = options.width - embedding
        self.concatenated = options.positions == "concatenated"
        if padding < 0 or (self.concatenated and padding == 0):
            wanted = f"more than {embedding}" if self.concatenated else f"at least {embedding}"
            raise ValueError(
                f"model.main.width={options.width}: expected {wanted} (model.encoder.width) with model.main.positions={options.positions}"
            )
        self.context = context
        self.padding = padding
        added = torch.empty(context, padding if self.concatenated else options.width)
        self.positions = nn.Parameter(added) if options.positions != "rotary" else None
        self.start = nn.Parameter(torch.empty(embedding))
        attention = "rotary" if options.positions == "rotary" else "plain"
        sizes = BlockOptions(
            options.width, options.heads, options.head_width, options.ffn, attention, dropout=options.dropout
        )
        self.dropout = nn.Dropout(options.dropout)
        self.blocks = TransformerStack(options.layers, sizes)
        self.norm = nn.LayerNorm(options.width)

    def step(self, inputs: Tensor, cache: list[KeyValueCache] | None) -> Tensor:
        """See `Main.step`."""
        past = cache[0].seen if cache is not None else 0
        length = inputs.shape[1]
        if self.padding and not self.concatenated:
            inputs = nn.functional.pad(inputs, (0, self.padding))
        if self.positions is not None:
            if past + length > self.context:
                raise ValueError(f"{past + length} chunks exceed the {self.context} positions of this model. {SHORTER}")
            extra = self.positions[past : past + length].to(inputs.dtype)
            if self.concatenated:
                inputs = torch.cat([inputs, extra.expand(len(inputs), -1, -1)], -1)
            else:
                inputs = inputs + extra
        return self.norm(self.blocks(self.dropout(inputs), cache))

    def get_layers(self) -> nn.ModuleList:
        """See `Main.get_layers`."""
        return self.blocks

    def create_cache(self) -> list[KeyValueCache]:
        """See `Main.create_cache`."""
        return self.blocks.create_cache()

    def parameters_by_depth(self) -> list[tuple[int, list[nn.Parameter]]]:
        """See `Main.parameters_by_depth`."""
        depth = len(self.blocks)
        blocks = [(depth - number, list(block.parameters())) for number, block in enumerate(self.blocks)]
        return [(depth, list(self.parameters(recurse=False))), *blocks, (1, list(self.norm.parameters()))]


class LSTMMain(Main):
    """A capped LSTM over chunk embeddings; the first W units of its output are ŷ (HRED: paper, appendix A).

    The paper also pads the input with zeros to the transformer's width. That would change nothing here.
    """

    def __init__(self, options: MainOptions, embedding: int, context: int) -> None:
        super().__init__()
        self.width, units = options.width, options.units or options.width
        if units < self.width:
            raise ValueError(f"model.main.units={units} must be at least model.main.width={self.width}")
        self.positions = None
        self.start = nn.Parameter(torch.empty(embedding))
        self.dropout = nn.Dropout(options.dropout)
        widths = [embedding, *[units] * options.layers]
        self.layers = nn.ModuleList(LSTMLayer(a, b, capped=True) for a, b in zip(widths, widths[1:], strict=False))

    def step(self, inputs: Tensor, cache: LSTMCache | None) -> Tensor:
        """See `Main.step`."""
        batch, length, _ = inputs.shape
        x = self.dropout(inputs.transpose(0, 1))
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, LSTMLayer)
            if cache is None:  # all sequences are of one length: a packed layout is time-major order
                x = self.dropout(layer(x.flatten(0, 1), [batch] * length)).unflatten(0, (length, batch))
                continue
            outputs = []
            for each in x:
                cache[number] = layer.step(each, cache.get(number))
                outputs.append(cache[number][0])
            x = torch.stack(outputs)
        return x.transpose(0, 1)[..., : self.width]

    def get_layers(self) -> nn.ModuleList:
        """See `Main.get_layers`."""
        return self.layers

    def layer_states(self, embeddings: Tensor, starts: Tensor) -> list[Tensor]:
        """Return the layers' outputs with all their units; see `Main.layer_states`."""
        *layers, last = super().layer_states(embeddings, starts)
        return [*(each.unflatten(0, (-1, len(embeddings))).transpose(0, 1) for each in layers), last]

    def create_cache(self) -> LSTMCache:
        """See `Main.create_cache`."""
        return {}

    def parameters_by_depth(self) -> list[tuple[int, list[nn.Parameter]]]:
        """See `Main.parameters_by_depth`."""
        depth = len(self.layers)
        layers = [(depth - number, list(layer.parameters())) for number, layer in enumerate(self.layers)]
        return [(depth, [self.start]), *layers]
