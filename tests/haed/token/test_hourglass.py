"""Hourglass against algorithm 1 of its paper, position by position; its costs, its shifts; other people's packages."""

import re
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from haed.base import ChunkingSpec
from haed.options import HourglassOptions, IEMOptions, ModelOptions, TokenOptions
from haed.registry import make_system
from haed.token.base import TokenModel, parse_hierarchy
from haed.token.hourglass import Hourglass, linear_cost
from tests.haed.conftest import move_parameters
from tests.haed.token import reference
from tests.haed.token.reference import Array, Weights

TOKEN = TokenOptions(width=8, heads=2, head_width=4, ffn=12)
SHORTENINGS = ["average", "linear", "attention_average", "attention_linear"]
LENGTHENINGS = ["repeat", "linear", "attention", "attention_linear"]


def made(hourglass: HourglassOptions, token: TokenOptions = TOKEN, vocabulary: int = 5) -> Hourglass:
    torch.manual_seed(0)
    cut = ChunkingSpec(4, vocabulary, True, 16)
    system = make_system(ModelOptions(kind="hourglass", token=token, hourglass=hourglass), IEMOptions(), cut)
    assert isinstance(system, Hourglass)
    return move_parameters(system)


def symbols(batch: int, length: int, vocabulary: int = 5) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


# The formulas


def across(w: Weights, name: str, queries: list[Array], sources: list[Array], at: list[int], step: int) -> list[Array]:
    """A layer whose queries, at positions `at`, look at the sources at or before them; these stand at every `step`."""
    rows = [np.zeros(TOKEN.width)] * (at[-1] + 1)
    for place, x in zip(at, queries, strict=True):
        rows[place] = reference.norm(w, f"{name}.norm", x)
    normed = [reference.norm(w, f"{name}.source_norm", x) for x in sources]
    seen = {t: [j for j in range(len(sources)) if j * step <= t] for t in range(len(rows))}
    found = reference.attention(w, f"{name}.attention", rows, normed, TOKEN.heads, seen.__getitem__, step)
    mixed = [x + found[place] for place, x in zip(at, queries, strict=True)]
    return [reference.feed_forward(w, f"{name}.feed_forward", x) for x in mixed]


def hourglass(w: Weights, x: list[Array], options: HourglassOptions, scales: list[tuple[int, int, int]]) -> list[Array]:
    """Algorithm 1; scales are (factor, layers before, layers after), the own one first."""
    name, before, after = f"scale_{scales[0][0]}", *scales[0][1:]
    x = reference.layers(w, f"{name}.before", before, x, TOKEN.heads)
    if len(scales) == 1:
        return x
    k, inner = scales[1][0] // scales[0][0], f"scale_{scales[1][0]}"
    length, shifted = len(x), [np.zeros(TOKEN.width)] * (k - 1) + x
    groups = [shifted[g * k : (g + 1) * k] for g in range(-(-length // k))]
    if options.shortening.endswith("linear"):
        coarse = [reference.linear(w, f"{inner}.shorten.linear", np.concatenate(group)) for group in groups]
    else:
        coarse = [sum(group) / k for group in groups]
    ends = [g * k for g in range(len(groups))]
    if options.shortening.startswith("attention"):
        coarse = across(w, f"{inner}.shorten.attention", coarse, x, ends, 1)
    coarse = hourglass(w, coarse, options, scales[1:])
    if options.lengthening.endswith("linear"):
        spread = [reference.linear(w, f"{inner}.lengthen.linear", y).reshape(k, -1) for y in coarse]
        longer = [spread[t // k][t % k] for t in range(length)]
    else:
        longer = [coarse[t // k] for t in range(length)]
    if options.lengthening.startswith("attention"):
        longer = x if options.lengthening == "attention" else [a + b for a, b in zip(x, longer, strict=True)]
        longer = across(w, f"{inner}.lengthen.attention", longer, coarse, list(range(length)), k)
    x = [a + b for a, b in zip(x, longer, strict=True)]
    return reference.layers(w, f"{name}.after", after, x, TOKEN.heads)


@pytest.mark.parametrize(
    ("hierarchy", "scales", "length"),
    [
        ("2@1", [(1, 2, 0)], 8),
        ("1@1 1@3 0@1", [(1, 1, 0), (3, 1, 0)], 8),
        ("0@1 1@2 1@4 0@2 1@1", [(1, 0, 1), (2, 1, 0), (4, 1, 0)], 11),
    ],
)
@pytest.mark.parametrize(("shortening", "lengthening"), [*zip(SHORTENINGS, LENGTHENINGS, strict=True)])
@torch.no_grad()
def test_hourglass_is_algorithm_1(
    hierarchy: str, scales: list[tuple[int, int, int]], length: int, shortening: str, lengthening: str
) -> None:
    options = HourglassOptions(hierarchy=hierarchy, shortening=shortening, lengthening=lengthening)
    system, fed = made(options), symbols(1, length)
    w = {name: x.numpy() for name, x in system.state_dict().items()}
    slow = hourglass(w, [w["embedding.weight"][symbol] for symbol in fed[0].tolist()], options, scales)
    np.testing.assert_allclose(system(fed)[0].numpy(), reference.logits(w, slow), rtol=0, atol=1e-9)


# Costs

TABLE_7 = {  # linear cost of each hierarchy (section 4.5)
    "2@1 4@4 2@1": "7",
    "2@1 8@4 2@1": "8",
    "3@1 8@4 3@1": "10",
    "4@1 8@4 4@1": "12",
    "2@1 1@3 2@1": "6.33",
    "2@1 4@3 2@1": "7.33",
    "2@1 8@3 2@1": "8.66",
    "2@1 16@3 2@1": "11.33",
    "2@1 1@2 4@4 1@2 2@1": "9",
}
TABLE_9 = {"6@1": "6", "14@1": "14", "5@1 8@2 5@1": "16"}  # those that Table 7 does not have
MAIN = {"5@1 24@3 5@1": "20", "3@1 24@3 3@1": "16"}  # Tables 1 and 2
IMAGENET64 = "3@1 12@3 3@1"  # 10 in Table 2, which is its cost without attention between levels


@pytest.mark.parametrize(("hierarchy", "cost"), [*TABLE_7.items(), *TABLE_9.items(), *MAIN.items()])
def test_linear_cost_is_that_of_the_paper(hierarchy: str, cost: str) -> None:
    found = float(linear_cost(parse_hierarchy(hierarchy, 100), HourglassOptions()))
    decimals = len(cost.partition(".")[2])
    assert int(found * 10**decimals + 1e-9) == int(cost.replace(".", ""))


def test_linear_resampling_costs_nothing() -> None:
    scales = parse_hierarchy(IMAGENET64, 100)
    assert linear_cost(scales, HourglassOptions(shortening="linear", lengthening="linear")) == 10
    assert linear_cost(scales, HourglassOptions(shortening="attention_linear", lengthening="linear")) == 11


@pytest.mark.parametrize("hierarchy", ["2@1 4@4 2@1", "0@1 1@2 3@6 1@2 2@1"])
@torch.no_grad()
def test_linear_cost_is_what_the_matrices_cost(hierarchy: str) -> None:
    """Of layers exactly; attention between levels takes less than the paper charges, some of it being done at the coarser."""
    length, per_layer = 24, 2 * 24 * (4 * 8 * 8 + 2 * 8 * 12)

    def matrices(shortening: str, lengthening: str) -> tuple[float, float]:
        options = HourglassOptions(hierarchy=hierarchy, shortening=shortening, lengthening=lengthening)
        system = made(options)
        with FlopCounterMode(display=False) as counter:
            system(symbols(1, length))
        counted = counter.get_flop_counts()["Global"][torch.ops.aten.addmm]
        return (counted - 2 * length * 8 * 5) / per_layer, system.linear_cost

    found, cost = matrices("average", "repeat")
    assert found == pytest.approx(cost)
    by_attention, charged = matrices("attention_average", "attention")
    assert cost < by_attention < charged


@pytest.mark.parametrize(
    ("hierarchy", "message"),
    [
        ("", "entries are layers@factor"),
        ("2@1 4 2@1", "entries are layers@factor"),
        ("2@1 4@0 2@1", "entries are layers@factor"),
        ("(2@1 4@4 2@1", "entries are layers@factor"),
        (")2@1 4@4 2@1(", "entries are layers@factor"),
        ("２@1 4@4 2@1", "entries are layers@factor"),
        ("2@1 1025@4 2@1", "a level has at most 1,024 layers"),
        ("9" * 5000 + "@1", "entries are layers@factor"),
        ("0@1", "no scale has a layer"),
        ("0@1 0@4 0@1", "no scale has a layer"),
        ("2@1 4@4", "rise to the middle"),
        ("2@1 4@4 2@2", "rise to the middle"),
        ("2@1 2@4 2@4 2@1", "rise to the middle"),
        ("2@2 4@4 2@2", "Use 0@1 2@2 4@4 2@2 0@1"),
        ("2@1 1@4 1@6 1@4 2@1", "6 is not a larger multiple of 4"),
        ("2@1 1@4 1@2 1@4 2@1", "2 is not a larger multiple of 4"),
        ("2@1 1@4 1@4 1@4 2@1", "4 is not a larger multiple of 4"),
        ("2@1 1@65 2@1", "factor 65 exceeds the 64 tokens of a window"),
    ],
)
def test_hierarchies_that_cannot_be_built_are_told_why(hierarchy: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        made(HourglassOptions(hierarchy=hierarchy))
    assert f"model.hourglass.hierarchy={hierarchy!r}" in str(error.value) and "\n" not in str(error.value)


def test_more_kinds_of_attention_than_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="hourglass.attention has 3 kinds, but model.hourglass.hierarchy has 2 levels"):
        made(HourglassOptions(hierarchy="1@1 1@2 1@1", attention=["lsh", "local", "rotary"]))


def test_notations_of_the_paper() -> None:
    plain = parse_hierarchy("2@1 1@2 4@4 3@2 0@1", 64)
    for written in "(2@1, 1@2, 4@4, 3@2, 0@1)", "(2@1 (1@2 (4@4) 3@2) 0@1)":
        assert plain == parse_hierarchy(written, 64)
    assert [(each.factor, each.before, each.after) for each in plain] == [(1, 2, 0), (2, 1, 3), (4, 4, 0)]


@pytest.mark.parametrize(("kinds", "expected"), [([], "RRR"), (["lsh", "relative"], "LTT"), (["local"], "lll")])
def test_attention_is_chosen_by_level(kinds: list[str], expected: str) -> None:
    system = made(HourglassOptions(hierarchy="1@1 1@2 1@4 1@2 1@1", attention=kinds))
    names = {"Rotary": "R", "LSH": "L", "Relative": "T", "Local": "l"}
    assert "".join(names[type(level.before[0].attention).__name__] for _, level in system.named_levels()) == expected
    assert system.submodules == ("embedding", "scale_1", "scale_2", "scale_4", "output")


# Other people's packages, with the same weights


def copied(system: TokenModel, pairs: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Every parameter of the system is given once."""
    seen = set()
    with torch.no_grad():
        for own, theirs in pairs:
            own.copy_(theirs)
            seen.add(id(own))
    assert seen == {id(parameter) for parameter in system.parameters()}


def same(own: nn.Linear | nn.LayerNorm, theirs: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    return [(own.weight, theirs.weight), (own.bias, theirs.bias)]


@pytest.mark.parametrize("factors", [[4], [2, 3], [3, 2, 2]])
@torch.no_grad()
def test_the_annotated_implementation_gives_the_same_logits(factors: list[int]) -> None:
    """labml-nn's `hour_glass` and the model around it in its experiment, for lengths that the factors divide.

    For others labml's last group is an average of fewer positions, though the shift brings as many as there are; ours then
    waits for no length.
    """
    labml = pytest.importorskip("labml_nn.transformers.hour_glass")
    positions = pytest.importorskip("labml_nn.transformers.positional_encoding")
    torch.manual_seed(0)
    scales = [1, *np.cumprod(factors).tolist()]
    hierarchy = " ".join(f"1@{scale}" for scale in [*scales, *scales[-2::-1]])
    system = made(
        HourglassOptions(hierarchy=hierarchy, shortening="average", lengthening="repeat"),
        replace(TOKEN, attention="plain", activation="relu", positions="sinusoidal"),
    )
    theirs = labml.HourGlass(2, 8, 0.0, 12, factors).double().eval()
    embedding, norm, output = nn.Embedding(6, 8).double(), nn.LayerNorm(8).double(), nn.Linear(8, 5).double()
    encoding = positions.PositionalEncoding(8, 0.0).double()

    def of_layer(own: nn.Module, other: nn.Module) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        attention = other.self_attn
        yield from same(own.norm, other.norm_self_attn)
        projections = attention.query.linear, attention.key.linear, attention.value.linear
        yield own.attention.qkv.weight, torch.cat([each.weight for each in projections])
        yield own.attention.qkv.bias, torch.cat([each.bias for each in projections])
        yield from same(own.attention.out, attention.output) + same(own.feed_forward.norm, other.norm_ff)
        yield from same(own.feed_forward.up, other.feed_forward.layer1)
        yield from same(own.feed_forward.down, other.feed_forward.layer2)

    def of_all() -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        yield system.embedding.weight, embedding.weight * 8**0.5
        yield from same(system.norm, norm) + same(system.output, output)
        part = theirs
        for _, level in system.named_levels()[:-1]:
            yield from of_layer(level.before[0], part.pre)
            yield from of_layer(level.after[0], part.post)
            last, part = part, part.hour_glass
        yield from of_layer(system.named_levels()[-1][1].before[0], last.shortened)

    copied(system, of_all())
    fed = symbols(2, 36)
    x = theirs(encoding(embedding(fed.T) * 8**0.5))
    torch.testing.assert_close(system(fed), output(norm(x)).transpose(0, 1), rtol=0, atol=1e-5)
