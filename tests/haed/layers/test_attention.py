"""Each kind of attention against its formula, pair by pair in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from haed.layers import attention as blocks
from haed.layers.attention import Attention, BlockOptions, Grid, KeyValueCache, Relative
from haed.layers.lsh_attention import LSH
from haed.layers.transformer import ATTENTIONS, TransformerBlock, TransformerStack, scale_residual_init

OPTIONS = BlockOptions(width=10, heads=2, head_width=6, ffn=12, window=5, hashes=2, longest=300)
every = pytest.mark.parametrize("kind", ATTENTIONS)
by_position = pytest.mark.parametrize("kind", ["plain", "rotary", "relative", "local"])


def attention(kind: str, longest: int = 300) -> Attention:
    torch.manual_seed(0)
    made = ATTENTIONS[kind](replace(OPTIONS, longest=longest)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary positions by complex numbers."""
    half = len(x) // 2
    angle = position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    found = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([found.real, found.imag])


def waves(distance: int, width: int) -> Tensor:
    found = torch.zeros(width, dtype=torch.float64)
    for place in range(width):
        angle = distance / 10_000 ** ((place - place % 2) / width)
        found[place] = math.cos(angle) if place % 2 else math.sin(angle)
    return found


@torch.no_grad()
def slowly(made: Attention, kind: str, x: Tensor, source: Tensor, queries: Grid, keys: Grid) -> Tensor:
    """Of one sequence (n, W), (m, W)."""
    q = made.qkv(x).view(-1, 3, 2, 6)[:, 0]
    k, v = made.qkv(source).view(-1, 3, 2, 6)[:, 1:].unbind(1)
    places, sources = [queries.position_at(i) for i in range(len(x))], [keys.position_at(j) for j in range(len(source))]
    if kind in ("rotary", "local"):
        q = torch.stack([torch.stack([turned(y, at) for y in row]) for row, at in zip(q, places, strict=True)])
        k = torch.stack([torch.stack([turned(y, at) for y in row]) for row, at in zip(k, sources, strict=True)])
    if isinstance(made, Relative):
        far = [made.distance(waves(m, OPTIONS.width)).view(2, 6) for m in range(places[-1] - sources[0] + 1)]
    rows = []
    for at, query in zip(places, q, strict=True):
        window = made.window or math.inf
        seen = [j for j, there in enumerate(sources) if min(at, made.nearest) <= at - there < window]
        if isinstance(made, Relative):
            u, w = made.content_bias[:, 0], made.distance_bias[:, 0]
            scores = [((query + u) * k[j] + (query + w) * far[at - sources[j]]).sum(1) for j in seen]
        else:
            scores = [(query * k[j]).sum(1) for j in seen]
        shares = (torch.stack(scores) / math.sqrt(6)).softmax(0)
        rows.append((shares[..., None] * v[seen]).sum(0).flatten())
    return made.out(torch.stack(rows))


@pytest.fixture(params=[128, 4])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in one block, and in several."""
    monkeypatch.setattr(blocks, "_BLOCK", request.param)
    monkeypatch.setattr(blocks, "_WHOLE", request.param)


@by_position
@pytest.mark.parametrize("length", [1, 4, 13])
@torch.no_grad()
def test_every_kind_is_its_formula(kind: str, length: int, block: None) -> None:
    made, x = attention(kind), torch.randn(2, length, 10, dtype=torch.float64)
    found = made(x)
    torch.testing.assert_close(found[1], slowly(made, kind, x[1], x[1], Grid(), Grid()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "rotary", "relative"])
@pytest.mark.parametrize(
    ("queries", "n", "keys", "m"),
    [
        (Grid(0, 3), 5, Grid(-2, 1), 15),  # a group of 3 sees the finer level up to its end
        (Grid(0, 1), 14, Grid(0, 3), 5),  # a finer position sees the groups that are complete
        (Grid(8, 2), 9, Grid(0, 1), 25),
        (Grid(7, 1), 4, Grid(0, 4), 3),
    ],
)
@torch.no_grad()
def test_between_two_levels_distances_are_those_of_the_finer_one(
    kind: str, queries: Grid, n: int, keys: Grid, m: int, block: None
) -> None:
    made = attention(kind)
    x, source = (torch.randn(1, count, 10, dtype=torch.float64) for count in (n, m))
    found = made.cross_attention(x, source, queries, keys)
    torch.testing.assert_close(found[0], slowly(made, kind, x[0], source[0], queries, keys), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "rotary", "relative"])
@pytest.mark.parametrize(("window", "nearest"), [(5, 0), (12, 4), (None, 7)])
@torch.no_grad()
def test_a_window_of_distances_may_begin_behind_the_nearest(
    kind: str, window: int | None, nearest: int, block: None
) -> None:
    """Groups of 3, all at once and by pieces; those who have none so far back see the first."""
    made = attention(kind)
    made.window, made.nearest = window, nearest
    x, source = (torch.randn(1, count, 10, dtype=torch.float64) for count in (28, 10))
    wanted = slowly(made, kind, x[0], source[0], Grid(), Grid(0, 3))
    found = made.cross_attention(x, source, Grid(), Grid(0, 3))[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    past, parts = KeyValueCache(), []
    for at in range(28):
        new = source[:, at // 3 : at // 3 + 1] if at % 3 == 0 else source[:, :0]
        parts.append(made.cross_attention(x[:, at : at + 1], new, Grid(at), Grid(past.seen * 3, 3), past)[0])
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=1e-12)


@every
@torch.no_grad()
def test_a_past_is_like_one_whole_sequence(kind: str, block: None) -> None:
    torch.manual_seed(0)
    made = TransformerStack(2, replace(OPTIONS, attention=kind)).double()
    x, memory = torch.randn(2, 20, 10, dtype=torch.float64), made.create_cache()
    parts = [made(part, memory) for part in x.split([1, 1, 3, 0, 11, 1, 2, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), made(x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_local_attention_holds_its_window_alone() -> None:
    made, past = attention("local"), KeyValueCache()
    made(torch.randn(2, 30, 10, dtype=torch.float64), past)
    assert past.seen == 30 and [x.shape[2] for x in past.tensors] == [4, 4]


@every
def test_gradients_are_those_of_finite_differences(kind: str, block: None) -> None:
    made, x = attention(kind), torch.randn(1, 6, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(made, (x,), atol=1e-5, fast_mode=True)
    made(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


@every
def test_dropout_is_for_training(kind: str) -> None:
    torch.manual_seed(0)
    made = TransformerBlock(replace(OPTIONS, attention=kind, dropout=0.5, longest=20))
    x = torch.randn(2, 9, 10)
    torch.manual_seed(1)
    first, second = made(x), made(x)
    torch.manual_seed(1)
    torch.testing.assert_close(made(x), first, rtol=0, atol=0)
    assert not torch.allclose(first, second)
    for part in (made.attention, made.dropout, made.feed_forward.dropout):  # each of the three does something
        made.eval()
        still = made(x)
        part.train()
        assert not torch.allclose(made(x), still)
    torch.testing.assert_close(made.eval()(x), still, rtol=0, atol=0)


@torch.no_grad()
def test_depth_adds_no_variance() -> None:
    torch.manual_seed(0)
    options, spread = BlockOptions(width=64, heads=2, head_width=32, ffn=64, attention="rotary"), {}
    for layers in (1, 16):
        made = TransformerStack(layers, options)
        for each in made.modules():
            if isinstance(each, torch.nn.Linear):
                torch.nn.init.normal_(each.weight, std=each.in_features**-0.5)
        scale_residual_init(made)
        x = torch.randn(4, 20, 64)
        spread[layers] = float((made(x) - x).var())
    assert 0.5 < spread[16] / spread[1] < 2


@pytest.mark.parametrize(("length", "window", "hashes"), [(1, 3, 2), (20, 3, 1), (23, 4, 2), (40, 6, 3), (7, 50, 2)])
@torch.no_grad()
def test_lsh_attention_is_a_softmax_over_the_last_of_each_bucket(length: int, window: int, hashes: int) -> None:
    torch.manual_seed(length)
    made = LSH(replace(OPTIONS, window=window, hashes=hashes, longest=3 * window)).double()
    x = torch.randn(1, length, 10, dtype=torch.float64)
    q, v = made.qkv(x)[0].view(length, 2, 2, 6).unbind(1)
    rows, alone = torch.zeros(length, 2, 6, dtype=torch.float64), 0
    for head in range(2):
        axes = made.rotations[head].view(6, hashes, -1)
        turned_by = torch.einsum("ld,drn->lrn", q[:, head], axes)
        buckets = torch.cat([turned_by, -turned_by], -1).argmax(-1).tolist()
        queries = [turned(q[i, head], i) for i in range(length)]
        keys = [turned(q[i, head] / q[i, head].norm(), i) for i in range(length)]
        for i in range(length):
            seen = set()
            for each in range(hashes):
                seen |= set([j for j in range(i + 1) if buckets[j][each] == buckets[i][each]][-window:])
            alone += seen == {i}
            there = sorted(seen - {i}) or [i]
            shares = torch.stack([queries[i] @ keys[j] / math.sqrt(6) for j in there]).softmax(0)
            rows[i, head] = shares @ v[there, head]
    torch.testing.assert_close(made(x)[0], made.out(rows.flatten(1)), rtol=0, atol=1e-12)
    assert alone >= 2


def test_codes_of_a_very_long_sequence_do_not_overflow() -> None:
    length, options = 300_000, replace(OPTIONS, heads=1, head_width=2, width=2, window=64, hashes=1, longest=300_000)
    made = LSH(options)
    buckets = torch.randint(2 * (length // 64), (1, 1, length, 1), generator=torch.Generator().manual_seed(0))
    order, codes = made._sort_positions(buckets)
    assert bool((codes.gather(2, order).diff(dim=2) > 0).all()) and int(codes.min()) >= 64


def test_the_rotations_of_lsh_are_saved() -> None:
    made, other = attention("lsh"), attention("lsh")
    other.rotations += torch.randn_like(other.rotations)
    x = torch.randn(1, 20, 10, dtype=torch.float64)
    assert not torch.allclose(made(x), other(x))
    other.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(x), other(x), rtol=0, atol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("past", [0, 2])
def test_many_sequences_are_attended_to_in_parts(monkeypatch: pytest.MonkeyPatch, masked: bool, past: int) -> None:
    """CUDA's kernels take 65,535 at most; the parts are the whole, and so are their gradients."""
    torch.manual_seed(0)
    whole_at_once = blocks.attention
    q, k, v = (torch.randn(7, 2, length, 4, requires_grad=True) for length in (5, 5 + past, 5 + past))
    visible = torch.rand(7, 5 + past) > 0.3
    visible[:, 0] = True
    grids = Grid(past), Grid()
    whole = whole_at_once(q, k, v, *grids, visible=visible if masked else None)
    gradients = torch.autograd.grad(whole.square().sum(), (q, k, v))
    calls = []
    monkeypatch.setattr(blocks, "_SEQUENCES", 3)
    monkeypatch.setattr(blocks, "attention", lambda *x: calls.append(len(x[0])) or whole_at_once(*x))
    split = whole_at_once(q, k, v, *grids, visible=visible if masked else None)
    assert calls == [3, 3, 1] and torch.equal(split, whole)
    for ours, theirs in zip(torch.autograd.grad(split.square().sum(), (q, k, v)), gradients, strict=True):
        assert torch.equal(ours, theirs)
