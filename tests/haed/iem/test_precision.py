"""In which type the products of the loss are taken under autocast, and what that costs its value."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from haed.iem import sampled_softmax
from haed.iem.sampled_softmax import blockwise_cross_entropy

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}


class Products(TorchDispatchMode):
    """Notes the types of the factors of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.types += [x.dtype for x in (args[1:3] if "add" in name else args[:2])]
        return func(*args, **(kwargs or {}))


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """As `torch.autocast("cuda", torch.bfloat16)`, which refuses where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


def loss(device: str, similarity: str, head: str) -> tuple[Tensor, list[Tensor]]:
    """As the objective takes it: after a layer norm and perhaps a normalisation, both in float32 on a GPU."""
    torch.manual_seed(0)
    sizes = (40, 16), (30, 8), (30,), (8, 16), ()
    parts = [torch.randn(size, device=device, requires_grad=True) for size in sizes]
    prediction, vectors, bias, weight, scale = parts
    narrow = F.layer_norm(prediction, (16,))
    narrow = F.linear(narrow, weight) if head == "linear" else narrow[:, :8]
    keys = F.layer_norm(vectors, (8,))
    if similarity == "cosine":
        narrow, keys = F.normalize(narrow, dim=-1), F.normalize(keys, dim=-1)
    target = torch.arange(40, device=device) % 30
    query = narrow * scale
    found = blockwise_cross_entropy(query, keys.to(query.dtype), bias, target, 16, diagnose=True)
    return found.loss, parts


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; `make dry-run-cuda` has a fake one")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("head", ["linear", "none"])
def test_products_are_narrow_under_autocast(device: str, similarity: str, head: str) -> None:
    """Fake tensors stand for a GPU's; a layer norm gives float32 there and bfloat16 on a CPU."""
    with ExitStack() as contexts:
        if device == "cuda":
            contexts.enter_context(FakeTensorMode())
        with cuda_autocast() if device == "cuda" else torch.autocast("cpu", torch.bfloat16), Products() as products:
            value, parts = loss(device, similarity, head)
        with products:
            value.backward()
        assert value.dtype == torch.float32
        assert {part.grad.dtype for part in parts if part.grad is not None} == {torch.float32}
    assert len(products.types) >= 3 * 3 * 2 and set(products.types) == {torch.bfloat16}


def test_without_autocast_nothing_is_narrowed() -> None:
    with Products() as products:
        loss("cpu", "cosine", "none")[0].backward()
    assert set(products.types) == {torch.float32}


@pytest.mark.parametrize("way", ["_in_place", "_in_one"])
def test_narrow_products_change_little(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Against float64: factors of 8 significant bits and scores of a few units give errors of a few hundredths."""
    monkeypatch.setattr(sampled_softmax, "_in_place", getattr(sampled_softmax, way))
    torch.manual_seed(0)
    parts = [torch.randn(*shape, requires_grad=True) for shape in ((70, 16), (90, 16), (90,))]
    target = torch.randint(90, (70,))
    exact = [part.detach().double().requires_grad_() for part in parts]
    naive = F.cross_entropy(exact[0] @ exact[1].t() + exact[2], target)
    wanted = torch.autograd.grad(naive, exact)
    for precise in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            found = blockwise_cross_entropy(*parts, target, 32, diagnose=True)
        gradients = torch.autograd.grad(found.loss, parts)
        close = {"rtol": 0, "atol": 1e-5 if precise else 2e-2}
        torch.testing.assert_close(found.loss.double(), naive, **close)
        for ours, theirs in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=close["atol"] * float(theirs.abs().max()))
        scores = exact[0] @ exact[1].t() + exact[2]
        share = float((scores.argmax(1) == target).double().mean())
        assert float(found.accuracy) == pytest.approx(share, abs=1e-6 if precise else 0.02)
