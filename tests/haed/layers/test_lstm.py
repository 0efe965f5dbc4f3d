"""Parity of the packed LSTM with torch.nn.LSTM and, where it is capped, with the formulas; value and gradients, in float64.

Rounding the number of rows changes no product, and leaves few different shapes.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode

from haed.layers import lstm
from haed.layers.lstm import initialise_lstm, linear_rows, packed_lstm, round_up_rows

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


def by_the_formulas(inputs: torch.Tensor, weight: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Of Melis et al. 2017, one sequence and one step after the other."""
    width, first = weight.shape[1], [sum(sizes[:t]) for t in range(len(sizes))]
    outputs: dict[int, torch.Tensor] = {}
    for sequence in range(sizes[0]):
        hidden, cell = inputs.new_zeros(width), inputs.new_zeros(width)
        for t, size in enumerate(sizes):
            if sequence < size:
                gates = inputs[first[t] + sequence] + weight @ hidden
                i, f, o = (gates[k * width : (k + 1) * width].sigmoid() for k in (0, 1, 3))
                cell = f * cell + torch.minimum(i, 1 - f) * gates[2 * width : 3 * width].tanh()
                assert bool((cell.abs() <= 1).all())
                hidden = o * cell.tanh()
                outputs[first[t] + sequence] = hidden
    return torch.stack([outputs[row] for row in range(len(inputs))])


def test_a_capped_one_follows_the_formulas() -> None:
    torch.manual_seed(0)
    tensors = [2 * torch.randn(*shape, dtype=torch.float64) for shape in ((sum(SIZES), 24), (24, 6))]
    seed, found = torch.randn(sum(SIZES), 6, dtype=torch.float64), []
    for run in (lambda *x: packed_lstm(x[0], None, x[1], SIZES, capped=True), lambda *x: by_the_formulas(*x, SIZES)):
        given = [x.clone().requires_grad_() for x in tensors]
        outputs = run(*given)
        found.append([outputs, *torch.autograd.grad((outputs * seed).sum(), given)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert not torch.allclose(packed_lstm(tensors[0], None, tensors[1], SIZES), found[0][0])


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 64, 100])
def test_a_product_and_its_gradients_are_the_same(number: int) -> None:
    x = torch.randn(number, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    out = torch.randn(number, 7, dtype=torch.float64)
    found = torch.autograd.grad((linear_rows(x, weight, bias) * out).sum(), (x, weight, bias))
    expected = torch.autograd.grad((F.linear(x, weight, bias) * out).sum(), (x, weight, bias))
    torch.testing.assert_close(linear_rows(x, weight, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(found, expected)


class Shapes(TorchDispatchMode):
    """Notes the shapes of products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.seen.add((func, *(each.shape for each in args if isinstance(each, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def test_rows_of_varying_number_are_multiplied_in_few_shapes() -> None:
    weight = torch.randn(16, 4, requires_grad=True)
    with Shapes() as shapes:
        for first in range(65, 97):
            sizes = [first, first - 1, first - 32]
            x = torch.randn(sum(sizes), 6, requires_grad=True)
            gates = linear_rows(x, torch.randn(16, 6, requires_grad=True))
            packed_lstm(gates, None, weight, sizes).sum().backward()
    assert 0 < len(shapes.seen) <= 20, "a program would be made for each of these shapes"
    assert [round_up_rows(number) for number in (0, 3, 31, 32, 33, 65)] == [0, 3, 31, 32, 64, 96]


def test_rows_that_rounding_adds_are_read_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold is whatever was in memory; torch makes that NaN where algorithms are to be deterministic."""
    sizes = [70, 64, 41, 33, 32, 5, 1]
    inputs, context = torch.randn(sum(sizes), 16).double(), torch.randn(70, 16).double()
    given = [each.requires_grad_() for each in (inputs, context, torch.randn(16, 4).double())]

    def found() -> list[torch.Tensor]:
        outputs = packed_lstm(*given, sizes)
        return [outputs, *torch.autograd.grad(outputs.sin().sum(), given)]

    torch.use_deterministic_algorithms(True)
    try:
        filled = found()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(lstm, "ROW_MULTIPLE", 1)
    torch.testing.assert_close(filled, found())


def test_initial_weights_are_the_same_with_any_number_of_threads_which_stays() -> None:
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            recurrent, bias = torch.empty(1536, 384), torch.zeros(1536)
            initialise_lstm(recurrent, bias)
            assert torch.get_num_threads() == threads
            made.append(recurrent)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)
    torch.testing.assert_close(made[0].T @ made[0], torch.eye(384))
