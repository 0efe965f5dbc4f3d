"""Rounding the number of rows changes no product, and leaves few different shapes."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from haed.blocks import rows
from haed.blocks.lstm import packed_lstm
from haed.blocks.rows import linear, rounded


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 64, 100])
def test_a_product_and_its_gradients_are_the_same(number: int) -> None:
    x = torch.randn(number, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)
    out = torch.randn(number, 7, dtype=torch.float64)
    found = torch.autograd.grad((linear(x, weight, bias) * out).sum(), (x, weight, bias))
    expected = torch.autograd.grad((F.linear(x, weight, bias) * out).sum(), (x, weight, bias))
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
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
            gates = linear(x, torch.randn(16, 6, requires_grad=True))
            packed_lstm(gates, None, weight, sizes).sum().backward()
    assert 0 < len(shapes.seen) <= 20, "a program would be made for each of these shapes"
    assert [rounded(number) for number in (0, 3, 31, 32, 33, 65)] == [0, 3, 31, 32, 64, 96]


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
    monkeypatch.setattr(rows, "_ROWS", 1)
    torch.testing.assert_close(filled, found())
