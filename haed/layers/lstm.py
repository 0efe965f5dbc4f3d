"""LSTM over packed sequences: real steps only, with a hand-written backward pass.

The input of a decoder's cell at decision t is a symbol and the context vector ŷ of its chunk. The symbol's part is a
row of a (V + 1, 4H) table, and ŷ's part is constant over a chunk. Both are multiplied once, outside the recurrence.
Inside remains one product with the recurrent weights. In the backward pass the gradients of the weights are single
large products over all steps, not one small product a step. Gates are kept in the autocast type, the cell in float32 or
wider.

A capped LSTM takes min(i, 1 − f) for its input gate i, where f is the forget gate (Melis et al. 2017). Its cell is a
mean of the values written into it, so it stays within −1 and 1. `torch.nn.LSTM` has no such gate.

Hochreiter & Schmidhuber 1997; gates in the order input, forget, cell, output, as `torch.nn.LSTM`.

The number of rows differs from step to step. A CPU library (oneDNN, in bfloat16) compiles a program for every shape
that it multiplies. This takes as long as some products themselves, and only some programs are kept. A GPU is slower if
the number of rows is not a multiple of 8. So a number of rows that comes from the data is rounded up, and the products
of the extra rows are ignored. dev/LOG.md has the time that this saves.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

ROW_MULTIPLE = 32
SLACK = ROW_MULTIPLE - 1  # rows that rounding adds at most


def round_up_rows(rows: int) -> int:
    """Round a number of rows up for multiplication; small numbers stay as they are, as in sampling."""
    return rows if rows < ROW_MULTIPLE else -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` of rows (S, I) by (O, I), over a rounded number of rows.

    Its result and its gradients are the same.
    """
    more = round_up_rows(len(x)) - len(x)
    return F.linear(F.pad(x, (0, 0, 0, more)), weight, bias)[: len(x)] if more else F.linear(x, weight, bias)


def gather_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return the rows `x[rows]` of x (N, W); the gradient of a row is summed in the order of `rows`.

    On a CPU with several threads the gradient of `x[rows]` is summed in any order, so its last bits differ from run to
    run.
    """
    return F.embedding(rows, x)


class RowLinear(nn.Linear):
    """A `torch.nn.Linear` for rows (S, I) whose number comes from the data."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows (S, I) to (S, O)."""
        return linear_rows(x, self.weight, self.bias)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which matrix products run: autocast's if it is on, else that of `x`."""
    device = x.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype


def _step_cell(gates: Tensor, cell: Tensor | None, capped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Activate gates (n, 4H) in place and step the cell (n, H); return the output, the new cell and its tanh.

    The cell's gate uses tanh x = 2σ(2x) − 1, so that one call activates all four.
    """
    width = gates.shape[1] // 4
    update = gates[:, 2 * width : 3 * width]
    update.mul_(2)
    gates.sigmoid_()
    update.mul_(2).sub_(1)
    if capped:
        gates[:, :width] = torch.minimum(gates[:, :width], 1 - gates[:, width : 2 * width])
    i, f, g, o = gates.chunk(4, 1)
    new = torch.mul(i, g).to(torch.promote_types(gates.dtype, torch.float32))
    if cell is not None:
        new.addcmul_(f.to(new.dtype), cell)
    squashed = torch.tanh(new).to(gates.dtype)
    return o * squashed, new, squashed


class _PackedLSTM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, context: Tensor | None, weight: Tensor, sizes: list[int], capped: bool
    ) -> Tensor:
        width, total = weight.shape[1], len(inputs)
        gates, outputs = (inputs.new_empty(total + SLACK, columns) for columns in (4 * width, width))
        cells = inputs.new_empty(total, width, dtype=torch.promote_types(inputs.dtype, torch.float32))
        squashed = inputs.new_empty(total, width)
        start, before, cell = 0, 0, None
        for size in sizes:
            rows = slice(start, start + size)
            if context is None:
                gates[rows] = inputs[rows]
            else:
                torch.add(inputs[rows], context[:size], out=gates[rows])
            if cell is not None:  # the next step overwrites the rows beyond
                many = round_up_rows(size)
                gates[start : start + many].addmm_(outputs[before : before + many], weight.t())
                cell = cell[:size]
            outputs[rows], cell, squashed[rows] = _step_cell(gates[rows], cell, capped)
            cells[rows] = cell
            start, before = start + size, start
        ctx.save_for_backward(weight, gates, cells, squashed, outputs)
        ctx.sizes, ctx.capped, ctx.chunks = sizes, capped, None if context is None else len(context)
        return outputs[:total]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        weight, gates, cells, squashed, outputs = ctx.saved_tensors
        sizes: list[int] = ctx.sizes
        width, total = weight.shape[1], len(cells)
        d_gates = torch.empty_like(gates)
        d_gates[total:] = 0
        d_context = None if ctx.chunks is None else gates.new_zeros(ctx.chunks, 4 * width, dtype=cells.dtype)
        d_cell = cells.new_zeros(sizes[0] if sizes else 0, width)
        d_hidden: Tensor | None = None
        start = total
        for t in reversed(range(len(sizes))):
            size, start = sizes[t], start - sizes[t]
            rows = slice(start, start + size)
            d_out = grad[rows]
            if d_hidden is not None:
                d_out = d_out.clone()
                d_out[: len(d_hidden)] += d_hidden
            i, f, g, o = gates[rows].chunk(4, 1)
            squash = squashed[rows]
            carried = d_cell[:size]
            carried += d_out * o * (1 - squash * squash)
            narrow = carried.to(gates.dtype)
            d_i, d_f, d_g, d_o = d_gates[rows].chunk(4, 1)
            torch.mul(d_out * squash, o * (1 - o), out=d_o)
            torch.mul(narrow * g, i * (1 - i), out=d_i)
            torch.mul(narrow * i, 1 - g * g, out=d_g)
            d_hidden = None
            if t > 0:
                before = slice(start - sizes[t - 1], start - sizes[t - 1] + size)
                torch.mul(narrow * cells[before].to(gates.dtype), f * (1 - f), out=d_f)
            else:
                d_f.zero_()
            if ctx.capped:  # where i is 1 − f, its gradient goes to f; i·(1 − i) equals f·(1 − f)
                over = i == 1 - f
                d_f -= d_i * over
                d_i.masked_fill_(over, 0)
            if t > 0:
                carried *= f
                d_hidden = (d_gates[start : start + round_up_rows(size)] @ weight)[:size]
            if d_context is not None:
                d_context[:size] += d_gates[rows]
        first = sizes[0] if sizes else 0
        many = round_up_rows(total - first)
        previous = torch.cat([*_previous_rows(outputs, sizes), outputs.new_zeros(first + many - total, width)])
        d_weight = d_gates[first : first + many].t() @ previous
        return d_gates[:total], None if d_context is None else d_context.to(gates.dtype), d_weight, None, None


def _previous_rows(outputs: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return, for every row after the first step, the output of the same chunk one step before."""
    rows, start = [], 0
    for before, size in zip(sizes, sizes[1:], strict=False):
        rows.append(outputs[start : start + size])
        start += before
    return rows


def packed_lstm(
    inputs: Tensor, context: Tensor | None, weight: Tensor, sizes: list[int], capped: bool = False
) -> Tensor:
    """Run an LSTM, from a zero state, over packed sequences.

    Args:
        inputs: (S, 4H) each row's own contribution to the gates, in the packed order of `haed.chunk.packing.Packed`.
        context: (N, 4H) each sequence's constant contribution, in the order of `Packed.order`; None for none.
        weight: (4H, H) recurrent weights.
        sizes: number of sequences alive at each step, not increasing.
        capped: true if the input gate is at most 1 − forget gate.

    Returns:
        (S, H) outputs.
    """
    return _PackedLSTM.apply(inputs, context, weight, sizes, capped)


def lstm_step(
    gates: Tensor, recurrent: Tensor, state: tuple[Tensor, Tensor] | None, capped: bool = False
) -> tuple[Tensor, Tensor]:
    """Return output and cell, (n, H) each, of a sampling step, from the inputs' share of the gates (n, 4H).

    `state` has output and cell of the step before, if there was one; `recurrent` are the weights (4H, H).
    """
    gates = gates.clone() if state is None else gates + F.linear(state[0], recurrent)
    output, cell, _ = _step_cell(gates, None if state is None else state[1], capped)
    return output, cell


class LSTMLayer(nn.Module):
    """An LSTM layer with its input matrix, for sequences of vectors; see `packed_lstm`."""

    def __init__(self, inputs: int, units: int, capped: bool = False) -> None:
        super().__init__()
        self.capped = capped
        self.input = RowLinear(inputs, 4 * units)
        self.recurrent = nn.Parameter(torch.empty(4 * units, units))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Map packed rows (S, I) to outputs (S, H)."""
        gates = self.input(x)
        return packed_lstm(gates, None, self.recurrent.to(gates.dtype), sizes, self.capped)

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Step all sequences, (N, I), once; return the output and the cell, each (N, H)."""
        return lstm_step(self.input(x), self.recurrent, state, self.capped)


def initialise_lstm(recurrent: Tensor, bias: Tensor) -> None:
    """Initialise the recurrent weights (4H, H) orthogonally and the forget gates' share of the bias (4H,) to 1.

    The forget gates are then open at first. One thread does it: with more threads than free cores, MKL's QR of a
    1536×384 matrix was seen to take 4.5 s instead of 26 ms.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        nn.init.orthogonal_(recurrent)
    finally:
        torch.set_num_threads(threads)
    width = recurrent.shape[1]
    bias[width : 2 * width] = 1
