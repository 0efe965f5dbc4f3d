"""Top-down, Bottom-up and Retina against the formulas of their paper, written out position by position."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from haed.base import ChunkingSpec, TokenBatch
from haed.options import GramsOptions, IEMOptions, ModelOptions, MultiscaleOptions, RetinaOptions, TokenOptions
from haed.registry import make_system
from haed.token.base import NUMBER, TokenModel, parse_scales
from tests.haed.conftest import move_parameters
from tests.haed.token import reference
from tests.haed.token.reference import Array, Weights

TOKEN = TokenOptions(width=8, heads=3, head_width=6, ffn=12)
POOLINGS = pytest.mark.parametrize("pooling", ["average", "max", "convolution"])


def made(kind: str, token: TokenOptions = TOKEN, **sections: object) -> TokenModel:
    torch.manual_seed(0)
    system = make_system(ModelOptions(kind=kind, token=token, **sections), IEMOptions(), ChunkingSpec(4, 5, True, 8))
    assert isinstance(system, TokenModel)
    return move_parameters(system)


def symbols(length: int) -> torch.Tensor:
    return torch.cat([torch.tensor([5]), torch.randint(5, (length - 1,), generator=torch.Generator().manual_seed(1))])


def agrees(system: TokenModel, fed: torch.Tensor, slow: Array) -> None:
    """At once, and with queries in blocks."""
    for block in (len(fed), 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("haed.layers.attention._BLOCK", block)
            np.testing.assert_allclose(system(fed[None])[0].numpy(), slow, rtol=0, atol=1e-9)


def weights(system: TokenModel) -> Weights:
    return {name: x.numpy() for name, x in system.state_dict().items()}


def of_scale(w: Weights, name: str, number: int, xs: list[Array], coarse: bool) -> list[Array]:
    xs = reference.layers(w, f"{name}.layers", number, xs, TOKEN.heads)
    return [reference.norm(w, f"{name}.norm", x) for x in xs] if coarse else xs


def top_down(w: Weights, fed: list[int], scales: list[tuple[int, int]], pooling: str) -> Array:
    """Section 3.2; scales (k, layers) from the coarsest on."""
    embedded = [w["embedding.weight"][symbol] for symbol in fed]
    above: list[Array] = []
    for place, (scale, number) in enumerate(scales):
        name, finer = f"scale_{scale}", (*scales[place + 1 :], (1, 0))[0][0]
        xs = reference.groups(w, f"{name}.pool", embedded, scale, pooling)
        if place:
            joined = [np.concatenate([x, above[j]]) for j, x in enumerate(xs)]
            xs = [reference.gelu(reference.linear(w, f"{name}.join", x)) for x in joined]
        xs = of_scale(w, name, number, xs, scale > 1)
        if scale > 1:  # each vector becomes as many as the finer scale has groups in its own
            above = [part for x in xs for part in np.split(reference.linear(w, f"{name}.up", x), scale // finer)]
    return reference.logits(w, xs)


def bottom_up(w: Weights, fed: list[int], scales: list[tuple[int, int]], pooling: str) -> Array:
    """Section 3.3; scales (k, layers) from the coarsest on; two coarse ones share the three heads, the finer has two."""
    heads = [2, 1] if len(scales) == 3 else [3]
    xs = [w["embedding.weight"][symbol] for symbol in fed]
    *coarse, (_, number) = scales
    normed = [reference.norm(w, "aggregation.norm", x) for x in xs]
    below, fine, found = xs, 1, [np.zeros_like(x) for x in xs]
    for place, (scale, own) in enumerate(reversed(coarse)):
        below = reference.groups(w, f"scale_{scale}.pool", below, scale // fine, pooling)
        below, fine = of_scale(w, f"scale_{scale}", own, below, True), scale
        name, complete = f"aggregation.attention.attentions.{place}", lambda t, k=scale: list(range(t // k + 1))
        mixed = reference.attention(w, name, normed, below, heads[place], complete, scale)
        found = [a + b for a, b in zip(found, mixed, strict=True)]
    xs = [reference.feed_forward(w, "aggregation.feed_forward", x + new) for x, new in zip(xs, found, strict=True)]
    return reference.logits(w, reference.layers(w, "scale_1", number, xs, TOKEN.heads))


def retina(w: Weights, fed: list[int], windows: dict[int, tuple[int, int]], heads: list[int], pooling: str) -> Array:
    """Section 3.4; two layers; windows by scale and heads, both from the finest on."""

    def seen(t: int, scale: int) -> list[int]:
        """The complete groups one of whose tokens is in the window, or else the first one."""
        begin, end = windows[scale]
        groups = {0: [0]} | {j: list(range((j - 1) * scale + 1, j * scale + 1)) for j in range(1, t + 1)}
        for before in range(1 - scale, 0):  # group 0 also holds what would be before the first position
            groups[0].append(before)
        complete = {j: places for j, places in groups.items() if max(places) <= t}
        return [j for j, places in complete.items() if any(begin <= t - s < end for s in places)] or [0]

    xs = [w["embedding.weight"][symbol] for symbol in fed]
    for layer in range(2):
        name = f"scale_1.{layer}"
        normed = [reference.norm(w, f"{name}.norm", x) for x in xs]
        found = [np.zeros_like(x) for x in xs]
        for place, scale in enumerate(windows):
            groups = reference.groups(w, f"{name}.pools.{place}", normed, scale, pooling)
            own, at = f"{name}.attention.attentions.{place}", lambda t, k=scale: seen(t, k)
            mixed = reference.attention(w, own, normed, groups, heads[place], at, scale)
            found = [a + b for a, b in zip(found, mixed, strict=True)]
        xs = [reference.feed_forward(w, f"{name}.feed_forward", x + new) for x, new in zip(xs, found, strict=True)]
    return reference.logits(w, xs)


@POOLINGS
@pytest.mark.parametrize(
    ("notation", "scales"), [("1@6 2@3 1@1", [(6, 1), (3, 2), (1, 1)]), ("2@4 1@1", [(4, 2), (1, 1)])]
)
@pytest.mark.parametrize("formulas", [top_down, bottom_up])
@torch.no_grad()
def test_top_down_and_bottom_up_are_the_formulas(
    formulas: Callable[..., Array], notation: str, scales: list[tuple[int, int]], pooling: str
) -> None:
    chosen = MultiscaleOptions(layers=notation, pooling=pooling)
    system, fed = made(formulas.__name__, multiscale=chosen), symbols(15)
    agrees(system, fed, formulas(weights(system), fed.tolist(), scales, pooling))


@POOLINGS
@pytest.mark.parametrize(
    ("notation", "windows", "heads"),
    [
        ("8:16@4 3:9@2 0:3@1", {1: (0, 3), 2: (3, 9), 4: (8, 16)}, [1, 1, 1]),
        ("5:40@3 0:7@1", {1: (0, 7), 3: (5, 40)}, [2, 1]),
        ("0:6@2 0:1@1", {1: (0, 1), 2: (0, 6)}, [2, 1]),
    ],
)
@torch.no_grad()
def test_retina_is_the_formulas(
    notation: str, windows: dict[int, tuple[int, int]], heads: list[int], pooling: str
) -> None:
    chosen = RetinaOptions(layers=2, windows=notation, pooling=pooling)
    system, fed = made("retina", retina=chosen), symbols(25)
    agrees(system, fed, retina(weights(system), fed.tolist(), windows, heads, pooling))


@pytest.mark.parametrize("notation", ["2@16 3@4 4@1", "2@16, 3@4, 4@1", " 2@16,3@4 , 4@1 ", "(2@16, 3@4 (4@1))"])
def test_scales_are_read_with_commas_and_parentheses_too(notation: str) -> None:
    assert parse_scales(notation, "model.multiscale.layers", NUMBER) == {16: "2", 4: "3", 1: "4"}


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ("2*4 4@1", r"'2\*4' is not of the form WHAT@SCALE. Use something like 2@16 2@4 4@1"),
        ("２@4 4@1", "'２@4' is not of the form"),
        ("(2@4 4@1", r"'\(2@4' is not of the form"),
        ("", "there is no scale"),
        ("2@4 1@4 1@1", "scale 4 is given twice"),
        ("0@4 4@1", "0@4 must be from 1 to 1,024 at scale 4, or left out"),
        ("2@4 1025@1", "1025@1 must be from 1 to 1,024"),
        ("2@4", r"the finest scale must be 1 \(tokens\). Add something like 4@1"),
        ("2@6 2@4 4@1", "4 does not divide 6"),
        ("2@64 4@1", r"a window has 32 tokens \(batch.context × chunker.k\)"),
    ],
)
@pytest.mark.parametrize("kind", ["top_down", "bottom_up"])
def test_scales_that_cannot_be_are_told_in_a_line(kind: str, layers: str, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.multiscale\.layers=.*{told}[^\n]*$"):
        made(kind, multiscale=MultiscaleOptions(layers=layers))


@pytest.mark.parametrize(
    ("kind", "chosen", "token", "told"),
    [
        ("top_down", {"heads": "3@4"}, {}, "heads='3@4': top_down has no heads per scale"),
        ("bottom_up", {"upsampling": "repeat"}, {}, "repeat: bottom_up does not upsample"),
        (
            "top_down",
            {"layers": "1@4", "upsampling": "repeat"},
            {"grams": GramsOptions(rows=8)},
            "rows=8: a bag of tokens",
        ),
        ("bottom_up", {"layers": "4@1"}, {}, "layers='4@1': bottom_up needs a coarse scale"),
        ("bottom_up", {"heads": "3@2"}, {}, r"heads='3@2'.* at the scales \[4\].*Use 3@4"),
        ("bottom_up", {"heads": "2@4"}, {}, r"heads='2@4'.*3 in all.*Use 3@4"),
        ("retina", {"windows": "8:64@4 0:8"}, {}, "'0:8' is not of the form .* like 256:512@16 8:256@4 0:8@1"),
        ("retina", {"windows": "8:8@4 0:8@1"}, {}, "8:8@4 must end after its begin"),
        ("retina", {"windows": "8:64@4 1:8@1"}, {}, "1:8@1 must .* The window of scale 1 must begin at 0"),
        ("retina", {"windows": "1:3@4 0:8@1"}, {}, "1:3@4 must end after its begin and at 4 or later"),
        ("retina", {"windows": "8:64@4"}, {}, r"finest scale must be 1 \(tokens\). Add something like 0:8@1"),
        ("retina", {}, {"heads": 2}, "heads=2: each of the 3 scales needs a head"),
        ("retina", {}, {"attention": "local"}, "attention=local: retina has its own windows"),
    ],
)
def test_heads_and_windows_that_cannot_be_are_told_in_a_line(
    kind: str, chosen: dict[str, str], token: dict[str, object], told: str
) -> None:
    section = {"retina": RetinaOptions(**chosen)} if kind == "retina" else {"multiscale": MultiscaleOptions(**chosen)}
    with pytest.raises(ValueError, match=rf"^model\.[^\n]*{told}[^\n]*$"):
        made(kind, replace(TOKEN, **token), **section)


@pytest.mark.parametrize(("layers", "k"), [("2@3", 3), ("1@4 1@2", 2), ("1@4", 4)])
@torch.no_grad()
def test_a_bag_is_told_by_the_whole_groups_before_it(layers: str, k: int) -> None:
    """One distribution for a group, that no symbol which is fed within it changes, and every one before it does."""
    system, length = made("top_down", multiscale=MultiscaleOptions(layers=layers, upsampling="repeat")), 23
    fed = symbols(length).repeat(length + 1, 1)
    for row in range(length):
        fed[row, row] = (fed[row, row] + 1) % 6
    found = system(fed)
    changed = (found[:-1] - found[-1]).abs().amax(-1) > 1e-12  # (perturbed, position)
    group, last = torch.arange(length) // k, -(-torch.arange(length) // k)  # a position's; the one that knows a symbol
    assert torch.equal(changed, group >= last[:, None])
    torch.testing.assert_close(found, found[:, group * k], rtol=0, atol=0)


@torch.no_grad()
def test_the_likelihood_of_a_bag_is_a_cross_entropy_with_its_tokens_alike() -> None:
    """Section 6.2: times k, in float64."""
    system, k = made("top_down", multiscale=MultiscaleOptions(layers="2@4", upsampling="repeat")), 4
    tokens = torch.randint(5, (1, 6, k), generator=torch.Generator().manual_seed(2))
    windows = TokenBatch.from_chunks(tokens, torch.full((1, 6), k))
    fed = torch.cat([torch.tensor([5]), tokens.flatten()[:-1]])[None]
    wanted = 0.0
    for group, logits in enumerate(system(fed)[0, ::k].log_softmax(-1)):
        uniform = torch.bincount(tokens[0, group], minlength=5) / k
        wanted += k * float((uniform * logits).sum())
    assert float(system.log_likelihood(windows).sum()) == pytest.approx(wanted, abs=1e-9)
