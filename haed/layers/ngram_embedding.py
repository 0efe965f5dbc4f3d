"""Hashed n-grams of the last tokens, looked up in a table (hash n-gram embeddings: Pagnoni et al. 2024, section 3.2.1).

A layer then need not learn what often follows a few letters. For several n, the last n tokens together select a row by
their hash. The sum of these rows is mapped into a layer's input and, by another matrix, into the logits.

The rows of a step are determined beforehand. The gradient of the table has only these rows (a sparse tensor). So
neither the backward pass nor the optimizer depends on the size of the table.

Legend: N integers, S places, n orders of n-grams, R rows of an order, D width of a row, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.hashing import mix_columns
from haed.layers.lstm import linear_rows
from haed.options import GramsOptions

_MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64))
_FEW = 256  # symbols of which NumPy computes the rows, in less time, as in sampling


@dataclass
class SortedIntegers:
    """N integers in the order of their values. Unlike `torch.unique`, it waits for no device.

    Attributes:
        values: (N,) the integers, as they were.
        order: (N,) index of each integer; equal ones keep their order.
        is_new: (N,) true at the first of equal integers, in this order.
        inverse: (N,) number of each integer's value among the distinct values.
    """

    values: Tensor
    order: Tensor
    is_new: Tensor
    inverse: Tensor

    @classmethod
    def from_values(cls, values: Tensor) -> "SortedIntegers":
        """Sort integers (N,)."""
        ascending, order = values.sort(stable=True)
        is_new = torch.ones_like(ascending, dtype=torch.bool)
        torch.ne(ascending[1:], ascending[:-1], out=is_new[1:])
        return cls(values, order, is_new, torch.empty_like(order).scatter_(0, order, is_new.cumsum(0) - 1))

    def count_values(self) -> Tensor:
        """Return the number of distinct values, a scalar on the device."""
        return self.is_new.sum()


@dataclass
class SparseLookup:
    """Row indices of a table look-up.

    Attributes:
        rows: (R,) the distinct row indices, sorted. On a device that would have to be waited for, they are padded with
            0 up to the number of elements.
        inverse: index into `rows` of each element, of any shape.
    """

    rows: Tensor
    inverse: Tensor

    @classmethod
    def from_rows(cls, rows: Tensor) -> "SparseLookup":
        """Return the look-up of row indices of any shape."""
        if torch.is_inference_mode_enabled():  # only a gradient needs them to be distinct
            return cls(rows.flatten(), torch.arange(rows.numel(), device=rows.device).view_as(rows))
        ascending = SortedIntegers.from_values(rows.flatten())
        count = int(ascending.count_values()) if rows.device.type == "cpu" else rows.numel()
        distinct = rows.new_zeros(count).scatter_(0, ascending.inverse, ascending.values)
        return cls(distinct, ascending.inverse.view_as(rows))

    @property
    def row_indices(self) -> Tensor:
        """Row index (…) of each element."""
        return self.rows[self.inverse]

    def embed_rows(self, table: Tensor) -> Tensor:
        """Return the rows (…, D) on the table's device. The table's gradient is sparse and has these rows alone."""
        return F.embedding(self.inverse, F.embedding(self.rows, table, sparse=True))


class Grams(nn.Module):
    """A table of n-grams, with its terms for a layer and for the logits.

    Args:
        options: orders, rows and width.
        layer: width of the layer's input that it is added to.
        symbols: number of logits.

    Attributes:
        longest: number of tokens of the longest n-gram.
    """

    def __init__(self, options: GramsOptions, layer: int, symbols: int) -> None:
        super().__init__()
        self.orders, self.rows, self.longest = options.orders, options.rows, max(options.orders)
        self.table = nn.Parameter(torch.empty(len(options.orders) * options.rows, options.width))
        self.layer = nn.Parameter(torch.empty(layer, options.width))
        self.logits = nn.Parameter(torch.empty(symbols, options.width))

    @torch.no_grad()
    def initialise_parameters(self) -> None:
        """Initialise the table and its map to the logits to zero, so that an unseen n-gram has no effect.

        Call it last, so that the other parameters of a system begin as they would without it.
        """
        nn.init.zeros_(self.table)
        nn.init.zeros_(self.logits)
        nn.init.normal_(self.layer, std=self.layer.shape[1] ** -0.5)

    def look_up(self, last: Tensor) -> SparseLookup:
        """Return the rows (…, n) of the n-grams that end with `last` (…, longest) symbols.

        The newest symbol is the last.
        """
        few = last.device.type == "cpu" and last.numel() <= _FEW
        symbols, rows_of_orders = last.numpy() if few else last, []
        for place, order in enumerate(self.orders):
            key = mix_columns(order, (symbols[..., column] for column in range(-order, 0)), _MIX)
            rows_of_orders.append(key % self.rows + place * self.rows)
        return SparseLookup.from_rows(torch.stack([torch.as_tensor(rows) for rows in rows_of_orders], -1))

    def forward(self, lookup: SparseLookup) -> tuple[Tensor, Tensor]:
        """Return the terms for the layer (…, layer) and for the logits (…, symbols)."""
        vectors = lookup.embed_rows(self.table).sum(-2)
        rows, places = vectors.flatten(0, -2), vectors.shape[:-1]
        return linear_rows(rows, self.layer).unflatten(0, places), linear_rows(rows, self.logits).unflatten(0, places)
