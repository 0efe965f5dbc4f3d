"""Attention in parts against attention in one call."""

import pytest
import torch

from haed.layers import transformer
from haed.layers.transformer import causal_attention


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("past", [0, 2])
def test_many_sequences_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch, seen: bool, past: int) -> None:
    """CUDA's kernels take 65,535 at most; the parts are the whole, and so are their gradients."""
    torch.manual_seed(0)
    parts = [torch.randn(7, 2, length, 4, requires_grad=True) for length in (5, 5 + past, 5 + past)]
    hidden = torch.rand(7, 5 + past) < 0.3
    hidden[:, 0] = False
    whole = causal_attention(*parts, ~hidden if seen else None)
    gradients = torch.autograd.grad(whole.square().sum(), parts)
    calls, attention = [], transformer.causal_attention
    monkeypatch.setattr(transformer, "_SEQUENCES", 3)
    monkeypatch.setattr(transformer, "causal_attention", lambda *x: calls.append(len(x[0])) or attention(*x))
    split = attention(*parts, ~hidden if seen else None)
    assert calls == [3, 3, 1] and torch.equal(split, whole)
    for ours, theirs in zip(torch.autograd.grad(split.square().sum(), parts), gradients, strict=True):
        assert torch.equal(ours, theirs)
