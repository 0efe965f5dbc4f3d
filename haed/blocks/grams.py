"""Hashed n-grams of the last tokens, looked up in a table (hash n-gram embeddings: Pagnoni et al. 2024, section 3.2.1).

What often follows a few letters need not be worked out by a layer: each of the last n tokens together, for several n, has a
row by its hash. Their sum is mapped into what a layer sees and, by a matrix of its own, into the logits.

Which rows a step needs is worked out on the CPU beforehand, each once, and the gradient of the table has these rows alone
(a sparse tensor), so that neither the backward pass nor the optimizer depends on the size of the table.

Legend: S places, n orders of n-grams, R rows of an order, D width of a row, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from haed.blocks.lstm import linear
from haed.options import GramsOptions

_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))


class _Picked(torch.autograd.Function):
    """Different rows of a table; its gradient is sparse."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(rows[None], grad, ctx.shape, is_coalesced=True, check_invariants=False), None


@dataclass
class Looked:
    """What is looked up in a table.

    Attributes:
        rows: (R,) the different rows, in order.
        inverse: which of them each of several things has, of any shape.
    """

    rows: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Looked":
        """Of rows on the CPU, of any shape."""
        return cls(*torch.unique(rows, return_inverse=True))

    @property
    def each(self) -> Tensor:
        """The row of each thing, (…)."""
        return self.rows[self.inverse]

    def up(self, table: Tensor) -> Tensor:
        """The rows (…, D), on the table's device."""
        return F.embedding(self.inverse, _Picked.apply(table, self.rows))


class Grams(nn.Module):
    """A table of n-grams, and what it adds to a layer and to the logits.

    Args:
        options: orders, rows and width.
        layer: values of the layer that it is added to.
        symbols: values of the logits.

    Attributes:
        longest: tokens of the longest n-gram.
    """

    def __init__(self, options: GramsOptions, layer: int, symbols: int) -> None:
        super().__init__()
        self.orders, self.rows, self.longest = options.orders, options.rows, max(options.orders)
        self.table = nn.Parameter(torch.empty(len(options.orders) * options.rows, options.width))
        self.layer = nn.Parameter(torch.empty(layer, options.width))
        self.logits = nn.Parameter(torch.empty(symbols, options.width))

    @torch.no_grad()
    def initialise(self) -> None:
        """The table and its share of the logits begin at zero: an n-gram that was never seen says nothing.

        To be called last, so that all else of a system begins as without it.
        """
        nn.init.zeros_(self.table)
        nn.init.zeros_(self.logits)
        nn.init.normal_(self.layer, std=self.layer.shape[1] ** -0.5)

    def look_up(self, last: Tensor) -> Looked:
        """The rows (…, n) of the n-grams that end with `last` (…, longest) symbols on the CPU, the newest last."""
        found = []
        for place, order in enumerate(self.orders):
            key = torch.full(last.shape[:-1], order, dtype=torch.long)
            for column in last[..., -order:].unbind(-1):
                key = (key ^ column) * _MIX[0]
                key = (key ^ (key >> 29)) * _MIX[1]
            found.append((key ^ (key >> 32)).remainder(self.rows) + place * self.rows)
        return Looked.of(torch.stack(found, -1))

    def forward(self, looked: Looked) -> tuple[Tensor, Tensor]:
        """What is added to the layer (…, layer) and to the logits (…, symbols)."""
        found = looked.up(self.table).sum(-2)
        rows, places = found.flatten(0, -2), found.shape[:-1]
        return linear(rows, self.layer).unflatten(0, places), linear(rows, self.logits).unflatten(0, places)

    def products(self, places: int) -> list[tuple[Tensor, int]]:
        """Weights of the products, and the multiply-adds of each in a forward pass over so many places."""
        return [(each, places * each.numel()) for each in (self.layer, self.logits)]
