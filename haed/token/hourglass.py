"""Hourglass: a transformer that shortens its sequence and lengthens it again (Nawrot et al. 2021).

Algorithm 1 there: layers at a scale; shift right by k − 1 and shorten by k; the same at the next scale; lengthen, add to what
was before shortening; layers again. With one scale it is a flat transformer. What the paper leaves open is as follows: layers
are pre-norm with no norm at the end of a stack; the attention of resampling is of the kind of the coarser of its two levels,
and rotary where that is local or LSH, which know no two levels.

Legend: B sequences, L positions, W width.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor, nn

from haed.blocks.attention import Past
from haed.blocks.layer import Stack
from haed.options import HourglassOptions, IEMOptions, ModelOptions
from haed.system import Cut
from haed.token.notation import Scale, parse_hierarchy
from haed.token.resample import Lengthen, Seam, Shorten
from haed.token.sequence import TokenSystem


def linear_cost(scales: list[Scale], options: HourglassOptions) -> Fraction:
    """Cost of a token in layers of the finest level, if all work is linear in the length (section 3.1).

    A layer at scale k costs 1/k, resampling by attention as much as a layer of its finer level, other resampling nothing.
    """
    by_attention = sum(kind.startswith("attention") for kind in (options.shortening, options.lengthening))
    layers = [Fraction(each.before + each.after, each.factor) for each in scales]
    return sum(layers + [Fraction(by_attention, each.factor) for each in scales[:-1]], Fraction(0))


@dataclass
class LevelMemory:
    """What one level remembers while it samples."""

    before: list[Past]
    after: list[Past]
    seam: Seam = field(default_factory=Seam)


class Level(nn.Module):
    """The layers of a scale and, of all but the finest, what comes between the finer scale and this one."""

    def __init__(self, options: ModelOptions, scale: Scale, finer: Scale | None, kind: str, longest: int) -> None:
        super().__init__()
        token, chosen = options.token, options.hourglass
        self.before = Stack(token, kind, scale.before, -(-longest // scale.factor))
        self.after = Stack(token, kind, scale.after, -(-longest // scale.factor))
        if finer is not None:
            factor, long = scale.factor // finer.factor, -(-longest // finer.factor)
            between = "rotary" if kind in ("local", "lsh") else kind
            self.shorten = Shorten(token, chosen.shortening, factor, between, long)
            self.lengthen = Lengthen(token, chosen.lengthening, factor, between, long)

    def memory(self) -> LevelMemory:
        """Of this level, still empty."""
        return LevelMemory(self.before.memory(), self.after.memory())


class Hourglass(TokenSystem):
    """A hierarchy of levels, `scale_1` and so on by their factors, each a child of its own.

    Attributes:
        linear_cost: of the paper's section 3.1.
    """

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: Cut) -> None:
        super().__init__(options.token, cut)
        longest, kinds = cut.context * cut.k, options.hourglass.attention or [options.token.attention]
        scales = parse_hierarchy(options.hourglass.hierarchy, longest)
        if len(kinds) > len(scales):
            raise ValueError(
                f"model.hourglass.attention has {len(kinds)} kinds, model.hourglass.hierarchy {len(scales)} levels: set one for "
                "each level, or for the finest ones"
            )
        self.linear_cost = float(linear_cost(scales, options.hourglass))
        self.scales = [f"scale_{scale.factor}" for scale in scales]
        self.parts = ("embedding", *self.scales, "output")
        for i, (name, scale) in enumerate(zip(self.scales, scales, strict=True)):
            finer, kind = scales[i - 1] if i else None, kinds[min(i, len(kinds) - 1)]
            self.add_module(name, Level(options, scale, finer, kind, longest))
        self.initialise()

    def levels(self) -> list[tuple[str, Level]]:
        """From the finest to the coarsest, by name."""
        return [(name, getattr(self, name)) for name in self.scales]

    def outlets(self) -> dict[int, nn.Module]:
        """See `System.outlets`: of each level, what it gives to the finer one."""
        return {int(name.removeprefix("scale_")): level.after for name, level in self.levels()}

    def memory(self, samples: int) -> list[LevelMemory]:
        """See `TokenSystem.memory`."""
        return [level.memory() for _, level in self.levels()]

    def body(self, x: Tensor, route: object = None, memory: list[LevelMemory] | None = None) -> Tensor:
        """See `TokenSystem.body`."""
        levels, finer = self.levels(), []
        seams = [Seam() for _ in levels] if memory is None else [each.seam for each in memory]
        for i, (name, level) in enumerate(levels):
            if i:
                finer.append(x)
                x = level.shorten(x, seams[i])
            x = self.mark(name, level.before(x, memory[i].before if memory is not None else None))
        for i, (name, level) in reversed(list(enumerate(levels))):
            x = self.mark(name, level.after(x, memory[i].after if memory is not None else None))
            if i:
                fine = finer.pop()
                x = self.mark(name, fine + level.lengthen(fine, x, seams[i]))
        return x
