"""Retina: every layer sees near tokens one by one and far ones in groups (Subramanian et al. 2020, section 3.4).

The heads of a layer are divided among scales. Those of a scale see a window of distances, such as 0:8 at scale 1, 8:256
at 4, 256:512 at 16. The distance of a token from itself is 0. Groups are pooled from the layer's normalised input.

Legend: B sequences, L tokens, W width.
"""

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from haed.base import ChunkingSpec, Mark, no_op_timer
from haed.layers.attention import BlockOptions
from haed.layers.transformer import FeedForward, Norm
from haed.options import IEMOptions, ModelOptions
from haed.token.base import WINDOW, TokenModel, parse_nested_scales
from haed.token.multiscale import PendingTokens, Pool, ScaledAttention, ScaledMemory, divide_heads


@dataclass
class RetinaMemory:
    """Memory of a layer.

    Attributes:
        held: tokens that no complete group has, by scale.
        attention: memory of its attention.
    """

    held: list[PendingTokens]
    attention: ScaledMemory


class RetinaLayer(nn.Module):
    """Attention to groups of the layer's own input, and feed-forward."""

    def __init__(
        self, options: BlockOptions, heads: dict[int, int], windows: dict[int, tuple[int, int]], pooling: str
    ) -> None:
        super().__init__()
        self.norm = Norm(options)
        self.pools = nn.ModuleList(Pool(pooling, scale, options.width) for scale in heads)
        self.attention = ScaledAttention(options, heads, windows)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, memory: RetinaMemory | None = None, mark: Mark = no_op_timer) -> Tensor:
        """Map (B, L, W) to (B, L, W); with a memory, x follows the tokens seen before."""
        cache = memory.attention.layer if memory is not None else None
        seen = self.norm(x, cache)
        held = memory.held if memory is not None else [PendingTokens() for _ in self.pools]
        groups = (pool(seen, each) for pool, each in zip(self.pools, held, strict=True))  # each before its attention
        attended = self.attention(seen, groups, memory.attention if memory is not None else None, mark)
        return self.feed_forward(x + self.dropout(attended), cache)

    def create_memory(self) -> RetinaMemory:
        """Return an empty memory."""
        return RetinaMemory([PendingTokens() for _ in self.pools], self.attention.create_memory())


class Retina(TokenModel):
    """A stack of Retina layers.

    Raises:
        ValueError: the windows or their scales are invalid, or the heads cannot be divided like this.
    """

    submodules = ("embedding", "scale_1", "output")

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(options.token, cut)
        token, chosen = options.token, options.retina
        if token.attention in ("local", "lsh"):
            raise ValueError(
                f"model.token.attention={token.attention}: retina has its own windows. Use rotary, relative or plain"
            )
        windows = {}
        for scale, window in parse_nested_scales(chosen.windows, "model.retina.windows", WINDOW, cut).items():
            begin, end = map(int, window.split(":"))
            if begin >= end or end < scale or (scale == 1 and begin):
                raise ValueError(  # the last complete group may end scale − 1 tokens back: a shorter window misses it
                    f"model.retina.windows={chosen.windows!r}: {window}@{scale} must end after its begin and at "
                    f"{scale} or later. The window of scale 1 must begin at 0"
                )
            windows[scale] = (begin, end)
            if begin >= (longest := cut.context * cut.k):
                self.option_warnings.append(
                    f"model.retina.windows: {window}@{scale} begins beyond windows of at most {longest} tokens "
                    "(batch.context × chunker.k). Its heads would see only the start. Leave it out, or use longer "
                    "windows"
                )
        heads = divide_heads(chosen.heads, "model.retina.heads", token.heads, windows)
        sizes = BlockOptions.from_token_options(token, cut.context * cut.k)
        self.scale_1 = nn.ModuleList(RetinaLayer(sizes, heads, windows, chosen.pooling) for _ in range(chosen.layers))
        self.initialise_parameters()

    def forward_body(self, x: Tensor, route: object = None, memory: list[RetinaMemory] | None = None) -> Tensor:
        """See `TokenModel.forward_body`."""
        for layer, kept in zip(self.scale_1, memory or itertools.repeat(None), strict=False):
            x = self.mark("scale_1", layer(x, kept, self.mark))
        return x

    def scale_outputs(self) -> dict[int, nn.Module]:
        """Return the pools from which the last layer gets its coarse groups, and that layer itself for scale 1.

        See `SequenceModel.scale_outputs`.
        """
        last = self.scale_1[-1]
        assert isinstance(last, RetinaLayer)
        return {pool.factor: pool for pool in last.pools if isinstance(pool, Pool)} | {1: last}

    def create_body_memory(self, samples: int) -> list[RetinaMemory]:
        """See `TokenModel.create_body_memory`."""
        return [layer.create_memory() for layer in self.scale_1 if isinstance(layer, RetinaLayer)]
