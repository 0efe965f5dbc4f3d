"""Parity of the packed LSTM with torch.nn.LSTM, value and gradients, in float64."""

import torch
from torch.nn.utils.rnn import PackedSequence

from haed.blocks.lstm import lstm_step, packed_lstm

SIZES = [5, 5, 3, 1]


def test_agrees_with_torch() -> None:
    torch.manual_seed(0)
    width, rows = 6, sum(SIZES)
    reference = torch.nn.LSTM(3, width, dtype=torch.float64)
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    context = torch.randn(5, 4 * width, dtype=torch.float64, requires_grad=True)
    weight = reference.weight_hh_l0.detach().clone().requires_grad_()
    seed = torch.randn(rows, width, dtype=torch.float64)

    table = x @ reference.weight_ih_l0.t() + reference.bias_ih_l0 + reference.bias_hh_l0
    ours = packed_lstm(table, context, weight, SIZES)
    grads = torch.autograd.grad((ours * seed).sum(), (x, context, weight))

    # the reference sees ŷ as part of its input: an identity maps it onto the gates
    spread = torch.cat([context[:size] for size in SIZES])
    wide = torch.nn.LSTM(3 + 4 * width, width, dtype=torch.float64)
    with torch.no_grad():
        wide.weight_ih_l0.copy_(torch.cat([reference.weight_ih_l0, torch.eye(4 * width, dtype=torch.float64)], 1))
        wide.weight_hh_l0.copy_(reference.weight_hh_l0)
        wide.bias_ih_l0.copy_(reference.bias_ih_l0)
        wide.bias_hh_l0.copy_(reference.bias_hh_l0)
    theirs = wide(PackedSequence(torch.cat([x, spread], 1), torch.tensor(SIZES)))[0].data
    expected = torch.autograd.grad((theirs * seed).sum(), (x, context, wide.weight_hh_l0))

    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 8), (4, 8), (8, 2))]
    assert torch.autograd.gradcheck(lambda a, b, c: packed_lstm(a, b, c, [4, 3, 2]), tensors)


def test_a_step_at_a_time_gives_the_same() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(8, 12), torch.randn(12, 3)
    whole = packed_lstm(inputs, torch.zeros(2, 12), weight, [2, 2, 2, 2])
    hidden, cell = None, None
    for t in range(4):
        gates = inputs[2 * t : 2 * t + 2] + (0 if hidden is None else hidden @ weight.t())
        hidden, cell = lstm_step(gates, cell)
        torch.testing.assert_close(hidden, whole[2 * t : 2 * t + 2])
