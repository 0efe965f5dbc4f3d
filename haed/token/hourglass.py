"""Hourglass: a transformer that shortens its sequence and lengthens it again (Nawrot et al. 2021)."""

from torch import Tensor

from haed.blocks.attention import Past
from haed.blocks.layer import Stack
from haed.options import IEMOptions, ModelOptions
from haed.system import Cut
from haed.token.sequence import TokenSystem


class Hourglass(TokenSystem):
    """A stack of layers."""

    parts = ("embedding", "scale_1", "output")

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: Cut) -> None:
        super().__init__(options.token, cut)
        layers = int(options.hourglass.hierarchy.split("@")[0])
        self.scale_1 = Stack(options.token, options.token.attention, layers, cut.context * cut.k)
        self.initialise()

    def body(self, x: Tensor, route: object = None, memory: list[Past] | None = None) -> Tensor:
        """See `TokenSystem.body`."""
        return self.mark("scale_1", self.scale_1(x, memory))

    def memory(self, samples: int) -> list[Past]:
        """See `TokenSystem.memory`."""
        return self.scale_1.memory()
