"""Transformers with layers of their own for each scale: Top-down (Subramanian et al. 2020, section 3.2).

It goes from the coarsest scale to the tokens: layers over the pooled embeddings of a scale, joined with what comes from the scale
above. Layers are pre-norm ones, with a norm where those of a coarse scale end, as the paper's post-norm layers have one.

Legend: B sequences, L positions, J groups of a scale, W width. How groups lie is said in `haed.token.pooling`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.blocks.transformer import Block, Cache
from haed.options import IEMOptions, ModelOptions, TokenOptions
from haed.system import Cut
from haed.token.pooling import LAYERS, Held, Pool, per_scale
from haed.token.sequence import TokenSystem


class Layers(nn.Module):
    """Blocks over the groups of a scale, and a norm behind them if it is coarse."""

    def __init__(self, options: TokenOptions, layers: int, coarse: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(options.width, options.heads, options.head_width, options.ffn, rotary=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(options.width) if coarse else nn.Identity()

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, J, W) to (B, J, W), which follow those in the cache."""
        for layer, block in enumerate(self.blocks):
            x = block(x, cache, layer)
        return self.norm(x)


class Level(nn.Module):
    """A scale of the top-down model.

    Args:
        options: of its layers.
        pooling: how token embeddings are pooled.
        scale: tokens of a group.
        layers: their number.
        above: is there a coarser scale?
        ratio: of its scale to the next finer one; 1 for the finest.
    """

    def __init__(self, options: TokenOptions, pooling: str, scale: int, layers: int, above: bool, ratio: int) -> None:
        super().__init__()
        width, self.ratio = options.width, ratio
        self.pool = Pool(pooling, scale, width)
        self.join = nn.Linear(2 * width, width) if above else None
        self.layers = Layers(options, layers, coarse=ratio > 1)
        # A transposed convolution whose stride is its kernel's size: each vector becomes `ratio` of them.
        self.up = nn.Linear(width, ratio * width) if ratio > 1 else None

    def forward(self, x: Tensor, above: Tensor | None, memory: "LevelMemory") -> Tensor:
        """Embeddings (B, L, W) and new vectors from above (B, J, W) to those of the next finer scale that follow."""
        x = self.pool(x, memory.embeddings)
        if not x.shape[1]:  # no group was completed
            return x
        if self.join is not None:
            x = F.gelu(self.join(torch.cat([x, memory.above.take(above, x.shape[1])], -1)))
        x = self.layers(x, memory.cache)
        return x if self.up is None else self.up(x).unflatten(2, (self.ratio, -1)).flatten(1, 2)


@dataclass
class LevelMemory:
    """What a level was given and has not used yet, and what its layers have seen, if that is kept."""

    cache: Cache | None
    embeddings: Held = field(default_factory=Held)
    above: Held = field(default_factory=Held)


class TopDown(TokenSystem):
    """From the coarsest scale to the tokens.

    Raises:
        ValueError: the scales do not nest, or are too long.
    """

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: Cut) -> None:
        super().__init__(options.token, cut)
        layers = per_scale(options.multiscale.layers, "model.multiscale.layers", LAYERS, cut)
        self.scales = list(layers)
        for scale, finer in zip(self.scales, [*self.scales[1:], 1], strict=True):
            level = Level(
                options.token,
                options.multiscale.pooling,
                scale,
                int(layers[scale]),
                above=scale < self.scales[0],
                ratio=scale // finer,
            )
            self.add_module(f"scale_{scale}", level)
        self.parts = ("embedding", *(f"scale_{scale}" for scale in self.scales), "output")
        self.initialise()

    def body(self, x: Tensor, route: object = None, memory: list[LevelMemory] | None = None) -> Tensor:
        """See `TokenSystem.body`."""
        found = None
        for level, scale in enumerate(self.scales):
            kept = memory[level] if memory is not None else LevelMemory(None)
            found = self.mark(f"scale_{scale}", getattr(self, f"scale_{scale}")(x, found, kept))
        assert found is not None
        return found

    def memory(self, samples: int) -> list[LevelMemory]:
        """See `TokenSystem.memory`."""
        return [LevelMemory(Cache(len(getattr(self, f"scale_{scale}").layers.blocks))) for scale in self.scales]
