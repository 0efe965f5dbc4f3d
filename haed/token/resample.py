"""Hourglass's shortening and lengthening of a sequence by a factor k (Nawrot et al. 2021, sections 2.1 to 2.3).

Shifted right by k − 1, group g of k positions ends with position g·k of the finer level: it is complete as soon as that is
fed, and the positions g·k to g·k + k − 1, which are given it, come no earlier than all that it holds. Both classes go on from
a memory: positions that complete no group are kept until others do. Attention measures distances in positions of the finer
level, where group g stands at g·k.

Legend: B sequences, L positions of the finer level, G groups that they complete, W width, k factor.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from haed.blocks.attention import Grid, Past
from haed.blocks.layer import CrossLayer
from haed.options import TokenOptions


@dataclass
class Seam:
    """What is remembered between two levels.

    Attributes:
        fed: positions of the finer level so far.
        rest: (B, ·, W) of those, shifted, which complete no group yet.
        last: (B, 1, W) the coarser level's vector of the last group, which its positions still to come are given.
        shorten: what the shortening attention has seen.
        lengthen: what the lengthening attention has seen.
    """

    fed: int = 0
    rest: Tensor | None = None
    last: Tensor | None = None
    shorten: Past = field(default_factory=Past)
    lengthen: Past = field(default_factory=Past)


class Shorten(nn.Module):
    """From a level to the next coarser one.

    Args:
        options: sizes, dropout.
        kind: average or linear; attention_average and attention_linear add what the group, so summed up, finds by attention
            among all positions up to its last one (the zeros shifted in are none), and a feed-forward.
        factor: k.
        attention: kind of that attention.
        longest: positions of the finer level at most.
    """

    def __init__(self, options: TokenOptions, kind: str, factor: int, attention: str, longest: int) -> None:
        super().__init__()
        self.factor, self.shift = factor, factor - 1
        self.linear = nn.Linear(factor * options.width, options.width) if kind.endswith("linear") else None
        self.attention = CrossLayer(options, attention, longest) if kind.startswith("attention") else None

    def forward(self, x: Tensor, seam: Seam) -> Tensor:
        """(B, L, W) to the groups that they complete, (B, G, W); G may be 0."""
        k = self.factor
        rest = seam.rest if seam.rest is not None else x.new_zeros(len(x), self.shift, x.shape[2])
        shifted = torch.cat([rest, x], 1)
        count = shifted.shape[1] // k
        groups, seam.rest = shifted[:, : count * k].unflatten(1, (count, k)), shifted[:, count * k :]
        found = self.linear(groups.flatten(2)) if self.linear is not None else groups.mean(2)
        if self.attention is None:
            return found
        done = (seam.fed + self.shift) // k
        ends = Grid((done + 1) * k - 1 - self.shift, k)  # the last position of each group
        return self.attention(found, x, ends, Grid(seam.fed), seam.shorten)


class Lengthen(nn.Module):
    """From the coarser level back to the finer one.

    Args:
        options: sizes, dropout.
        kind: repeat or linear; attention and attention_linear begin with U = x or x + linear(x'), to which they add what it
            finds by attention among all groups known, and a feed-forward.
        factor: k.
        attention: kind of that attention.
        longest: positions of the finer level at most.
    """

    def __init__(self, options: TokenOptions, kind: str, factor: int, attention: str, longest: int) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(options.width, factor * options.width) if kind.endswith("linear") else None
        self.attention = CrossLayer(options, attention, longest) if kind.startswith("attention") else None

    def forward(self, x: Tensor, coarse: Tensor, seam: Seam) -> Tensor:
        """The next positions x (B, L, W), as before shortening, and the groups (B, G, W) they complete: to (B, L, W)."""
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
