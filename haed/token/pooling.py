"""Coarser scales of a sequence: groups of neighbours pooled to one vector each, causally, as a stream.

At scale k, group j consists of positions (j − 1)·k + 1 … j·k, so it is complete at position j·k, and position t may see groups
0 … ⌊t / k⌋. Position t holds token t − 1, so these are tokens (j − 1)·k … j·k − 1, as in the listings of Subramanian et al.
2020. Group 0 is the first position, k times: it knows only that the window starts, and every position has a group to look
at. Pooling the groups of scale k by a factor r gives those of scale k·r.

Legend: B sequences, L positions, J groups, W width.
"""

import torch
from torch import Tensor, nn


class Held:
    """What of a stream (B, L, W) has come and was not used yet."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def take(self, new: Tensor | None, number: int | None = None, multiple: int = 1) -> Tensor:
        """The first `number` of all that is held and new, or as many as are a multiple; what is left is held."""
        known = [each for each in (self.tensor, new) if each is not None]
        found = known[0] if len(known) == 1 else torch.cat(known, 1)
        number = found.shape[1] // multiple * multiple if number is None else number
        self.tensor = found[:, number:]
        return found[:, :number]


class Pool(nn.Module):
    """Groups of `factor` neighbours (B, L, W) to one vector each, by their average, maximum, or a convolution.

    The stride of the convolution is its kernel's size, so it is a linear map of a group's vectors, one behind the other.
    """

    def __init__(self, kind: str, factor: int, width: int) -> None:
        super().__init__()
        self.kind, self.factor, self.shift = kind, factor, factor - 1  # with a smaller shift, a group knows the future
        self.convolution = nn.Linear(factor * width, width) if kind == "convolution" and factor > 1 else None

    def forward(self, x: Tensor, held: Held | None = None) -> Tensor:
        """Groups (B, J, W) that x (B, L, W) completes; it follows what `held` has seen, where that is given."""
        if self.factor == 1:
            return x
        held = held or Held()
        if held.tensor is None:
            held.tensor = x[:, :1].expand(-1, self.shift, -1)
        x = held.take(x, multiple=self.factor)
        x = x.reshape(len(x), x.shape[1] // self.factor, self.factor, x.shape[2])
        if self.convolution is not None:
            return self.convolution(x.flatten(2))
        return x.mean(2) if self.kind == "average" else x.amax(2)
