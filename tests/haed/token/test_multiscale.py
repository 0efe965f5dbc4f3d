"""Top-down against the formulas of its paper, written out position by position."""

import numpy as np
import pytest
import torch

from haed.build import make_system
from haed.options import IEMOptions, ModelOptions, MultiscaleOptions, TokenOptions
from haed.system import Cut
from haed.token.pooling import Pool
from haed.token.sequence import TokenSystem
from tests.haed.token import reference
from tests.haed.token.reference import Array, Weights

HEADS = 2


def made(kind: str, context: int = 8, **options: str) -> TokenSystem:
    torch.manual_seed(0)
    token = TokenOptions(width=8, heads=HEADS, head_width=6, ffn=12)
    system = make_system(
        ModelOptions(kind=kind, token=token, multiscale=MultiscaleOptions(**options)),
        IEMOptions(),
        Cut(4, 5, True, context),
    )
    assert isinstance(system, TokenSystem)
    with torch.no_grad():
        for parameter in system.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return system.double().eval()


def weights(system: TokenSystem) -> Weights:
    return {name: x.numpy() for name, x in system.state_dict().items()}


def symbols(length: int) -> torch.Tensor:
    return torch.cat([torch.tensor([5]), torch.randint(5, (length - 1,), generator=torch.Generator().manual_seed(1))])


def layers(w: Weights, name: str, number: int, xs: list[Array], coarse: bool) -> list[Array]:
    for layer in range(number):
        xs = reference.block(w, f"{name}.blocks.{layer}", xs, HEADS)
    return [reference.norm(w, f"{name}.norm", x) for x in xs] if coarse else xs


def top_down(w: Weights, fed: list[int], scales: list[tuple[int, int]], pooling: str) -> list[Array]:
    """Section 3.2: scales (k, layers) from the coarsest on; logits at every position."""
    embedded = [w["embedding.weight"][symbol] for symbol in fed]
    above: list[Array] = []
    for place, (scale, number) in enumerate(scales):
        name, finer = f"scale_{scale}", (*scales[place + 1 :], (1, 0))[0][0]
        xs = reference.groups(w, f"{name}.pool", embedded, scale, pooling)
        if place:
            xs = [
                reference.gelu(reference.linear(w, f"{name}.join", np.concatenate([x, above[j]])))
                for j, x in enumerate(xs)
            ]
        xs = layers(w, f"{name}.layers", number, xs, coarse=scale > 1)
        if scale > 1:  # each vector becomes as many as the finer scale has groups in its own
            above = [part for x in xs for part in np.split(reference.linear(w, f"{name}.up", x), scale // finer)]
    return [reference.linear(w, "output", reference.norm(w, "norm", x)) for x in xs]


@pytest.mark.parametrize("pooling", ["average", "max", "convolution"])
@pytest.mark.parametrize(
    ("notation", "scales"), [("1@6 2@3 1@1", [(6, 1), (3, 2), (1, 1)]), ("2@4 1@1", [(4, 2), (1, 1)])]
)
@torch.no_grad()
def test_top_down_is_the_formulas(notation: str, scales: list[tuple[int, int]], pooling: str) -> None:
    system, fed = made("top_down", layers=notation, pooling=pooling), symbols(15)
    slow = top_down(weights(system), fed.tolist(), scales, pooling)
    np.testing.assert_allclose(system(fed[None])[0].numpy(), np.stack(slow), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["top_down"])
@pytest.mark.parametrize("scale", [2, 3, 8])
@torch.no_grad()
def test_groups_may_not_come_one_position_earlier(kind: str, scale: int) -> None:
    """Changed symbols change nothing before them; with a shift one too small they do."""
    system = made(kind, layers=f"1@{scale} 1@1")
    fed = symbols(2 * scale + 2)[None]

    def leaks() -> bool:
        before, found = system(fed), False
        for place in range(1, fed.shape[1]):
            changed = fed.clone()
            changed[0, place] = (fed[0, place] + 1) % 5
            found |= not torch.equal(system(changed)[:, :place], before[:, :place])
        return found

    assert not leaks()
    for module in system.modules():
        if isinstance(module, Pool):
            module.shift -= 1
    fed = fed[:, : 2 * scale]  # so that there are as many groups
    assert leaks()


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("2*4 4@1", "expected parts such as 2@16 2@4 4@1"),
        ("", "expected parts such as"),
        ("2@4", "expected each scale once and the scale 1 among them"),
        ("2@4 1@4 1@1", "expected each scale once"),
        ("2@6 2@4 4@1", "4 does not divide 6"),
        ("2@64 4@1", r"a window has 32 tokens \(batch.context × chunker.k\)"),
        ("0@4 4@1", "expected parts such as"),
    ],
)
def test_scales_that_cannot_be_are_told_in_a_line(layers: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.multiscale\.layers=.*{told}[^\n]*$"):
        made("top_down", layers=layers)
