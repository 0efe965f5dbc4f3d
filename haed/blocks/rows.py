"""Products over rows whose number differs from step to step.

A CPU library makes a program for every shape that it multiplies (oneDNN, in bfloat16), which takes as long as some products
themselves, and keeps only some of them; a GPU multiplies numbers of rows that are no multiple of 8 more slowly. So a number of
rows that comes from the data is rounded up, by rows whose products nobody reads. What it saves is in docs/log.md.
"""

import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 32
SLACK = _ROWS - 1  # rows that rounding adds at most


def rounded(rows: int) -> int:
    """The number of rows that is multiplied in the place of so many; few stay few, as in sampling."""
    return rows if rows < _ROWS else -(-rows // _ROWS) * _ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of rows (S, I) by (O, I): the same, forward and backward over a rounded number of them."""
    more = rounded(len(x)) - len(x)
    return F.linear(F.pad(x, (0, 0, 0, more)), weight, bias)[: len(x)] if more else F.linear(x, weight, bias)


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """Rows `x[rows]` of x (N, W), each as often as it is asked for; the gradient of a row is summed in the order of `rows`.

    On a CPU with several threads the gradient of `x[rows]` is summed in any order, so its last bits differ from run to run.
    """
    return F.embedding(rows, x)


class RowLinear(nn.Linear):
    """`torch.nn.Linear` of rows (S, I) whose number comes from the data."""

    def forward(self, x: Tensor) -> Tensor:
        """(S, O)."""
        return linear(x, self.weight, self.bias)
