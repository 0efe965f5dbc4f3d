"""Hourglass: a transformer that shortens its sequence and lengthens it again (Nawrot et al. 2021).

Algorithm 1 there: layers at a scale; shift right by k − 1 and shorten by k; the same at the next scale; lengthen, add to what
was before shortening; layers again. With one scale it is a flat transformer. What the paper leaves open is as follows: layers
are pre-norm with no norm at the end of a stack; the attention of resampling is of the kind of the coarser of its two levels,
and rotary where that is local or LSH, which know no two levels.

Legend: B sequences, L positions, W width.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor, nn

from haed.blocks.attention import Past
from haed.blocks.layer import Stack
from haed.options import HourglassOptions, IEMOptions, ModelOptions
from haed.system import Cut
from haed.token.resample import Lengthen, Seam, Shorten
from haed.token.sequence import TokenSystem


@dataclass(frozen=True)
class Scale:
    """One level of a hierarchy: tokens of a position; layers before the coarser levels and after them."""

    factor: int
    before: int
    after: int


def parse_hierarchy(text: str, longest: int) -> list[Scale]:
    """Scales from the finest to the coarsest of a hierarchy such as "2@1 1@2 4@4 1@2 2@1", also with commas and parentheses.

    Args:
        text: layers@factor from the input to the output.
        longest: tokens of the longest window.

    Raises:
        ValueError: it is none, does not nest, has no layers, or shortens by more than a window.
    """
    where = f"model.hourglass.hierarchy={text!r}"
    entries = re.sub(r"[\s,()]+", " ", text).split() or [""]
    if text.count("(") != text.count(")") or not all(re.fullmatch(r"\d{1,4}@[1-9]\d{0,6}", entry) for entry in entries):
        raise ValueError(f"{where}: entries are layers@factor; set something like 2@1 8@4 2@1")
    layers, factors = zip(*((int(number) for number in entry.split("@")) for entry in entries), strict=True)
    middle = len(factors) // 2
    down = factors[: middle + 1]
    if factors != factors[::-1] or len(factors) % 2 == 0:
        raise ValueError(
            f"{where}: factors must rise to one in the middle and fall likewise; set something like 2@1 8@4 2@1"
        )
    if down[0] != 1:
        raise ValueError(f"{where}: the first factor must be 1; set 0@1 {text.strip(' ()')} 0@1 for no layers there")
    for fine, coarse in zip(down, down[1:], strict=False):
        if coarse % fine or coarse == fine:
            raise ValueError(
                f"{where}: {coarse} is no multiple of {fine}; each factor must be one of the factor before it"
            )
    if not any(layers):
        raise ValueError(
            f"{where}: no scale has a layer, and no token would see another; set something like 2@1 8@4 2@1"
        )
    if down[-1] > longest:
        raise ValueError(
            f"{where}: factor {down[-1]} is more than the {longest} tokens of a window; set a smaller one, or more batch.context"
        )
    backwards = layers[::-1]
    return [Scale(factor, layers[i], backwards[i] if i < middle else 0) for i, factor in enumerate(down)]


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
