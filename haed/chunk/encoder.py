"""The encoder f_enc: a chunk, without context, to a vector; the rows of an embedding matrix that is never stored."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from haed.options import EncoderOptions


@dataclass
class Embedding:
    """What the encoder says of N chunks: `vector` (N, E), and `bias` (N,), their share of the score as candidates."""

    vector: Tensor
    bias: Tensor


class MLPEncoder(nn.Module):
    """Token embeddings of a chunk, concatenated, through an MLP (paper, appendix: (12·10)→256→ReLU→256→ReLU).

    Padding is a symbol of its own, so the length of a chunk is known. The bias is a linear function of the embedding, or 0.
    """

    def __init__(self, options: EncoderOptions, k: int, vocabulary: int, bias: bool = True) -> None:
        super().__init__()
        self.padding, self.width = vocabulary, options.width
        self.tokens = nn.Embedding(vocabulary + 1, options.token_width)
        widths = [k * options.token_width] + [options.hidden] * (options.layers - 1) + [options.width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.activation = nn.ReLU() if options.output == "relu" else nn.GELU()
        self.output = nn.ReLU() if options.output == "relu" else nn.LayerNorm(options.width)
        self.bias = nn.Linear(options.width, 1) if bias else None

    def forward(self, tokens: Tensor, lengths: Tensor) -> Embedding:
        """Embeds chunks `tokens` (N, K) of `lengths` (N,): vector (N, E), bias (N,)."""
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        x = self.tokens(tokens.long().masked_fill(~real, self.padding)).flatten(1)
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        vector = self.output(self.layers[-1](x))
        return Embedding(
            vector, self.bias(vector).squeeze(1) if self.bias is not None else vector.new_zeros(len(vector))
        )
