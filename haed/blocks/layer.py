"""Pre-norm transformer layers of the systems of tokens: attention of any kind, feed-forward, dropout.

Legend: B sequences, L positions, W width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.blocks.attention import Attention, Grid, Local, Past, Relative, Rotary, Shifted
from haed.blocks.lsh import LSH
from haed.options import TokenOptions

ATTENTIONS: dict[str, type[Attention]] = {
    "plain": Attention,
    "rotary": Rotary,
    "relative": Relative,
    "local": Local,
    "lsh": LSH,
}


class Norm(nn.LayerNorm):
    """The layer norm before attention or feed-forward; with `model.token.shift` it gives them pairs of neighbours.

    Token shift (Peng et al. 2023, RWKV): the second half of the channels is that of the position before, zeros for the first.
    """

    def __init__(self, options: TokenOptions) -> None:
        super().__init__(options.width)
        self.shift = options.shift

    def forward(self, x: Tensor, last: Shifted | None = None) -> Tensor:
        """(B, L, W) to (B, L, W); `last`, which is kept up to date, has what this norm gave before; None: nothing."""
        x = super().forward(x)
        if not self.shift:
            return x
        now, late = x.tensor_split([x.shape[2] // 2], 2)
        before = late.new_zeros(len(x), 1, late.shape[2]) if last is None or self not in last else last[self]
        late = torch.cat([before, late], 1)
        if last is not None:
            last[self] = late[:, -1:]
        return torch.cat([now, late[:, :-1]], 2)


class FeedForward(nn.Module):
    """Norm, hidden layer, activation and dropout, beside a residual: what follows every attention."""

    def __init__(self, options: TokenOptions) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.gelu if options.activation == "gelu" else F.relu
        self.norm = Norm(options)
        self.up = nn.Linear(options.width, options.ffn)
        self.down = nn.Linear(options.ffn, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, last: Shifted | None = None) -> Tensor:
        """(B, L, W) to (B, L, W), each position by itself or, shifted, with the one before; see `Norm`."""
        hidden = self.dropout(self.activation(self.up(self.norm(x, last))))
        return x + self.dropout(self.down(hidden))


class Layer(nn.Module):
    """Attention and feed-forward, each after a layer norm and beside a residual.

    Args:
        options: sizes and dropout.
        kind: of attention, one of `ATTENTIONS`.
        longest: positions of the longest sequence.
    """

    def __init__(self, options: TokenOptions, kind: str, longest: int) -> None:
        super().__init__()
        self.norm = Norm(options)
        self.attention = ATTENTIONS[kind](options, longest)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        """(B, L, W) to (B, L, W); position t sees positions up to t, and what is past."""
        last = past.last if past is not None else None
        return self.feed_forward(x + self.dropout(self.attention(self.norm(x, last), past)), last)


class CrossLayer(nn.Module):
    """A layer whose vectors attend to others, such as those of another level; its arguments are those of `Layer`."""

    def __init__(self, options: TokenOptions, kind: str, longest: int) -> None:
        super().__init__()
        self.norm, self.source_norm = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = ATTENTIONS[kind](options, longest)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, source: Tensor, queries: Grid, keys: Grid, past: Past) -> Tensor:
        """(B, n, W) and others (B, m, W), which follow what is past, to (B, n, W); see `Attention.between`."""
        found = self.attention.between(self.norm(x), self.source_norm(source), queries, keys, past)
        return self.feed_forward(x + self.dropout(found), past.last)


class Stack(nn.ModuleList):
    """Layers one after the other, none perhaps."""

    def __init__(self, options: TokenOptions, kind: str, layers: int, longest: int) -> None:
        super().__init__(Layer(options, kind, longest) for _ in range(layers))

    def memory(self) -> list[Past]:
        """What the layers remember, still empty."""
        return [Past() for _ in self]

    def forward(self, x: Tensor, memory: list[Past] | None = None) -> Tensor:
        """(B, L, W) to (B, L, W); with a memory, x follows what that has seen, and L may be 0."""
        for number, layer in enumerate(self):
            x = layer(x, memory[number] if memory is not None else None) if x.shape[1] else x
        return x


@torch.no_grad()
def calm_residuals(module: nn.Module) -> None:
    """Divides the matrices that end a residual branch by the root of their number, so that depth adds no variance.

    As in GPT-2 (Radford et al. 2019, section 2.3); with the attention and the feed-forward of n layers, by √(2·n).
    """
    ends = [each.out for each in module.modules() if isinstance(each, Attention)]
    ends += [each.down for each in module.modules() if isinstance(each, FeedForward)]
    for end in ends:
        end.weight /= len(ends) ** 0.5
