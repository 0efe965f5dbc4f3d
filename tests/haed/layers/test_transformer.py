"""Attention in parts against attention in one call."""

import pytest
import torch

from haed.layers import attention as layers
from haed.layers.attention import Grid, attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("past", [0, 2])
def test_many_sequences_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch, masked: bool, past: int) -> None:
    """CUDA's kernels take 65,535 at most; the parts are the whole, and so are their gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, length, 4, requires_grad=True) for length in (5, 5 + past, 5 + past))
    visible = torch.rand(7, 5 + past) > 0.3
    visible[:, 0] = True
    grids = Grid(past), Grid()
    whole = attention(q, k, v, *grids, visible=visible if masked else None)
    gradients = torch.autograd.grad(whole.square().sum(), (q, k, v))
    calls = []
    monkeypatch.setattr(layers, "_SEQUENCES", 3)
    monkeypatch.setattr(layers, "attention", lambda *x: calls.append(len(x[0])) or attention(*x))
    split = attention(q, k, v, *grids, visible=visible if masked else None)
    assert calls == [3, 3, 1] and torch.equal(split, whole)
    for ours, theirs in zip(torch.autograd.grad(split.square().sum(), (q, k, v)), gradients, strict=True):
        assert torch.equal(ours, theirs)
