"""Hourglass: a transformer that shortens its sequence and lengthens it again (Nawrot et al. 2021)."""

from torch import Tensor, nn

from haed.blocks.transformer import Block, Cache
from haed.options import IEMOptions, ModelOptions
from haed.system import Cut
from haed.token.sequence import TokenSystem


class Hourglass(TokenSystem):
    """A stack of blocks."""

    parts = ("embedding", "scale_1", "output")

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: Cut) -> None:
        super().__init__(options.token, cut)
        shared, layers = options.token, int(options.hourglass.hierarchy.split("@")[0])
        self.scale_1 = nn.ModuleList(
            Block(shared.width, shared.heads, shared.head_width, shared.ffn, rotary=True) for _ in range(layers)
        )
        self.initialise()

    def body(self, x: Tensor, route: object = None, memory: Cache | None = None) -> Tensor:
        """See `TokenSystem.body`."""
        for layer, block in enumerate(self.scale_1):
            x = block(x, memory, layer)
        return self.mark("scale_1", x)

    def memory(self, samples: int) -> Cache:
        """See `TokenSystem.memory`."""
        return Cache(len(self.scale_1))
