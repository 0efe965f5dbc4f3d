"""Hourglass: a transformer that shortens its sequence and lengthens it again (Nawrot et al. 2021).

It follows algorithm 1 there. At a scale there are layers, then a shift right by k − 1, shortening by k, and the same at
the next scale. What comes back is lengthened and added to the vectors before shortening, and layers follow. With one
scale it is a flat transformer. The paper leaves some points open. Here layers are pre-norm with no norm at the end of a
stack. The attention of resampling is of the kind of the coarser of its two levels. It is rotary where that is local or
LSH, which do not support two levels.

Shifted right by k − 1, group g of k positions ends with position g·k of the finer level. It is complete as soon as that
position is fed. It is given to the positions g·k to g·k + k − 1, which come no earlier than anything in it (sections
2.1 to 2.3). `Downsample` and `Upsample` continue from a memory: positions that complete no group are kept until others do.
Attention measures distances in positions of the finer level, where group g stands at g·k.

Legend: B sequences, L positions of the finer level, G groups that they complete, W width, k factor.
"""

from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from haed.base import ChunkingSpec
from haed.layers.attention import BlockOptions, Grid, KeyValueCache
from haed.layers.transformer import CrossBlock, TransformerStack
from haed.options import HourglassOptions, IEMOptions, ModelOptions
from haed.token.base import Scale, TokenModel, parse_hierarchy


class ResamplingMemory:
    """State between two levels while sampling.

    Attributes:
        shorten: cache of the shortening attention.
        lengthen: cache of the lengthening attention.
        fed: number of positions of the finer level so far.
        rest: (B, ·, W) shifted positions that do not complete a group yet.
        last: (B, 1, W) the coarser level's vector of the last group, for that group's later positions.
    """

    def __init__(self) -> None:
        self.shorten, self.lengthen = KeyValueCache(), KeyValueCache()
        self.fed = 0
        self.rest: Tensor | None = None
        self.last: Tensor | None = None


class Downsample(nn.Module):
    """Downsampling from a level to the next coarser one.

    Args:
        options: sizes, dropout and kind of that attention, and the number of positions of the finer level.
        kind: average or linear. attention_average and attention_linear add the result of attention, and a feed-forward.
            The group's average or linear map attends to all positions up to the group's last one, without the zeros
            shifted in.
        factor: k.
    """

    def __init__(self, options: BlockOptions, kind: str, factor: int) -> None:
        super().__init__()
        self.factor, self.shift = factor, factor - 1
        self.linear = nn.Linear(factor * options.width, options.width) if kind.endswith("linear") else None
        self.attention = CrossBlock(options) if kind.startswith("attention") else None

    def forward(self, x: Tensor, seam: ResamplingMemory) -> Tensor:
        """Map (B, L, W) to the groups that they complete, (B, G, W); G may be 0."""
        k = self.factor
        rest = seam.rest if seam.rest is not None else x.new_zeros(len(x), self.shift, x.shape[2])
        shifted = torch.cat([rest, x], 1)
        count = shifted.shape[1] // k
        groups, seam.rest = shifted[:, : count * k].unflatten(1, (count, k)), shifted[:, count * k :]
        pooled = self.linear(groups.flatten(2)) if self.linear is not None else groups.mean(2)
        if self.attention is None:
            return pooled
        completed = (seam.fed + self.shift) // k
        ends = Grid((completed + 1) * k - 1 - self.shift, k)  # the last position of each group
        return self.attention(pooled, x, ends, Grid(seam.fed), seam.shorten)


class Upsample(nn.Module):
    """Upsampling from the coarser level back to the finer one.

    Args:
        options: sizes, dropout and kind of that attention, and the number of positions of the finer level.
        kind: repeat or linear. attention and attention_linear begin with U = x or x + linear(x'). They add the result
            of attention among all groups known, and a feed-forward.
        factor: k.
    """

    def __init__(self, options: BlockOptions, kind: str, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(options.width, factor * options.width) if kind.endswith("linear") else None
        self.attention = CrossBlock(options) if kind.startswith("attention") else None

    def forward(self, x: Tensor, coarse: Tensor, seam: ResamplingMemory) -> Tensor:
        """Map the next positions x (B, L, W), from before shortening, and their groups (B, G, W) to (B, L, W).

        The groups are those that the positions complete.
        """
        k, fed, length = self.factor, seam.fed, x.shape[1]
        known, kept = -(-fed // k), int(seam.last is not None)
        held = coarse if seam.last is None else torch.cat([seam.last, coarse], 1)
        seam.fed, seam.last = fed + length, held[:, -1:]
        if self.linear is not None:
            spread = self.linear(held).unflatten(-1, (k, -1)).flatten(1, 2)
        else:
            spread = held.repeat_interleave(k, 1)
        first = fed - (known - kept) * k  # the place of position `fed` in the groups held
        spread = spread[:, first : first + length]
        if self.attention is None:
            return spread
        queries = x if self.linear is None else x + spread
        return self.attention(queries, coarse, Grid(fed), Grid(known * k, k), seam.lengthen)


def linear_cost(scales: list[Scale], options: HourglassOptions) -> Fraction:
    """Return the cost of a token in layers of the finest level, if all work is linear in the length (section 3.1).

    A layer at scale k costs 1/k. Resampling by attention costs as much as a layer of its finer level, other resampling
    nothing.
    """
    by_attention = sum(kind.startswith("attention") for kind in (options.shortening, options.lengthening))
    layers = [Fraction(each.before + each.after, each.factor) for each in scales]
    return sum(layers + [Fraction(by_attention, each.factor) for each in scales[:-1]], Fraction(0))


class LevelMemory:
    """State of one level: caches of its layers while sampling, None where none are kept, and the resampling's."""

    def __init__(self, before: list[KeyValueCache] | None = None, after: list[KeyValueCache] | None = None) -> None:
        self.before, self.after, self.seam = before, after, ResamplingMemory()


class Level(nn.Module):
    """The layers of a scale and, except for the finest, the resampling between the finer scale and this one."""

    def __init__(self, options: ModelOptions, scale: Scale, finer: Scale | None, kind: str, longest: int) -> None:
        super().__init__()
        token, chosen = options.token, options.hourglass
        sizes = BlockOptions.from_token_options(token, -(-longest // scale.factor), attention=kind)
        self.before, self.after = TransformerStack(scale.before, sizes), TransformerStack(scale.after, sizes)
        if finer is not None:
            factor, long = scale.factor // finer.factor, -(-longest // finer.factor)
            between = replace(sizes, attention="rotary" if kind in ("local", "lsh") else kind, longest=long)
            self.shorten = Downsample(between, chosen.shortening, factor)
            self.lengthen = Upsample(between, chosen.lengthening, factor)

    def create_memory(self) -> LevelMemory:
        """Return an empty memory of this level."""
        return LevelMemory(self.before.create_cache(), self.after.create_cache())


class Hourglass(TokenModel):
    """A hierarchy of levels; each is a child module named by its factor, `scale_1` and so on.

    Attributes:
        linear_cost: cost of a token by the paper's section 3.1.
    """

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(options.token, cut)
        longest, kinds = cut.context * cut.k, options.hourglass.attention or [options.token.attention]
        scales = parse_hierarchy(options.hourglass.hierarchy, longest)
        if len(kinds) > len(scales):
            raise ValueError(
                f"model.hourglass.attention has {len(kinds)} kinds, but model.hourglass.hierarchy has {len(scales)} "
                "levels. Set one kind per level, or only for the finest levels"
            )
        self.linear_cost = float(linear_cost(scales, options.hourglass))
        self.scales = [f"scale_{scale.factor}" for scale in scales]
        self.submodules = ("embedding", *self.scales, "output")
        for i, (name, scale) in enumerate(zip(self.scales, scales, strict=True)):
            finer, kind = scales[i - 1] if i else None, kinds[min(i, len(kinds) - 1)]
            self.add_module(name, Level(options, scale, finer, kind, longest))
        self.initialise_parameters()

    def named_levels(self) -> list[tuple[str, Level]]:
        """Return the levels from the finest to the coarsest, with their names."""
        return [(name, getattr(self, name)) for name in self.scales]

    def scale_outputs(self) -> dict[int, nn.Module]:
        """Return the module whose output each level gives to the finer one; see `SequenceModel.scale_outputs`."""
        return {int(name.removeprefix("scale_")): level.after for name, level in self.named_levels()}

    def create_body_memory(self, samples: int) -> list[LevelMemory]:
        """See `TokenModel.create_body_memory`."""
        return [level.create_memory() for _, level in self.named_levels()]

    def forward_body(self, x: Tensor, route: object = None, memory: list[LevelMemory] | None = None) -> Tensor:
        """See `TokenModel.forward_body`."""
        levels, finer = self.named_levels(), []
        memory = memory or [LevelMemory() for _ in levels]
        for i, (name, level) in enumerate(levels):
            if i:
                finer.append(x)
                x = level.shorten(x, memory[i].seam)
            x = self.mark(name, level.before(x, memory[i].before))
        for i, (name, level) in reversed(list(enumerate(levels))):
            x = self.mark(name, level.after(x, memory[i].after))
            if i:
                fine = finer.pop()
                x = self.mark(name, fine + level.lengthen(fine, x, memory[i].seam))
        return x
