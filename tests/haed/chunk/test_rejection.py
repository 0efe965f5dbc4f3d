"""Draws by rejection: the bound holds, and the distribution is the softmax over all scores, in float64."""

import pytest
import torch
from torch import Tensor

from haed.chunk.rejection import RejectionSampler
from tests.conftest import mostly_nightly
from tests.haed.test_sampling import fits

WIDTH, DRAWN = 64, 4000


def make_case(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys (C, E), bias (C,) and queries (2, E), in float32."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(300, WIDTH, generator=generator) * torch.linspace(1, 0.05, WIDTH)
    bias, queries = torch.randn(300, generator=generator), torch.randn(2, WIDTH, generator=generator) / 4
    return {
        "usual": (keys, bias, queries),
        "peaked": (keys, bias, 20 * queries),
        "equal": (torch.ones(300, WIDTH), torch.zeros(300), queries),
        "two alike": (keys[:150].repeat(2, 1), bias[:150].repeat(2), queries),
        "zeros": (0 * keys, bias, 0 * queries),
        "one chunk": (keys[:1], bias[:1], queries),
        "narrow": (keys[:, :3].contiguous(), bias, queries[:, :3]),
        "far away": (keys, 1e4 + bias, queries),
        "bfloat16 keys": (keys.bfloat16(), bias, queries),
    }[name]


CASES = ["usual", "peaked", "equal", "two alike", "zeros", "one chunk", "narrow", "far away", "bfloat16 keys"]


def score_exactly(keys: Tensor, bias: Tensor, queries: Tensor) -> Tensor:
    return queries.double() @ keys.double().t() + bias.double()


@pytest.mark.parametrize("directions", [1, 8, 48])
@pytest.mark.parametrize("name", CASES)
def test_no_score_exceeds_its_bound(name: str, directions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haed.chunk.rejection._DIRECTIONS", directions)
    keys, bias, queries = make_case(name)
    for scale in (1e-6, 1.0, 1e6):
        some = scale * torch.cat([queries, torch.randn(50, len(queries[0]))])
        bounds = RejectionSampler(keys, bias, queries).bound_scores(some).double()
        scores = score_exactly(keys, bias, some)
        assert (scores - bounds <= 1e-6 * scores.abs()).all()
        if len(keys[0]) <= directions:  # then nothing is left out
            torch.testing.assert_close(bounds, scores, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("proposed", mostly_nightly([256, 1], 1))
@pytest.mark.parametrize("temperature", mostly_nightly([1.0, 0.5, 3.0], 1.0, 0.5))
@pytest.mark.parametrize("name", CASES)
def test_accepted_chunks_follow_the_softmax_over_all_scores(
    name: str, proposed: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if so few are proposed that none is accepted for many queries; with directions that leave much out."""
    monkeypatch.setattr("haed.chunk.rejection._PROPOSED", proposed)
    monkeypatch.setattr("haed.chunk.rejection._DIRECTIONS", 8)
    keys, bias, queries = make_case(name)
    sampler, scores = RejectionSampler(keys, bias, queries), score_exactly(keys, bias, queries)
    wanted, generator = (scores / temperature).softmax(1), torch.Generator().manual_seed(1)
    rows = sampler.draw_rows(queries.repeat_interleave(DRAWN, 0), generator, temperature).split(DRAWN)
    for drawn, probability in zip(rows, wanted, strict=True):
        accepted = drawn[drawn >= 0]
        assert len(accepted) > (DRAWN / 50 if temperature >= 1 or proposed > 1 else 0)
        assert len(accepted) < DRAWN or proposed > 1 or temperature > 1 or name not in ("usual", "peaked")
        assert fits(torch.bincount(accepted, minlength=len(keys)) / len(accepted), probability, len(accepted))


def test_no_queries_draw_nothing() -> None:
    keys, bias, queries = make_case("usual")
    assert len(RejectionSampler(keys, bias, queries).draw_rows(queries[:0], None)) == 0


@pytest.mark.parametrize("broken", ["a key whose square overflows", "a key", "a query", "a bias"])
def test_where_a_bound_is_no_number_nothing_is_drawn(broken: str) -> None:
    """So all chunks are scored, and an unusable score is refused there."""
    keys, bias, queries = make_case("usual")
    if broken == "a bias":
        bias[7] = torch.inf
    elif broken == "a query":
        queries[0] = torch.nan
    else:
        keys[7, 0] = 1e21 if "square" in broken else torch.nan
    rows = RejectionSampler(keys, bias, make_case("usual")[2]).draw_rows(queries, torch.Generator().manual_seed(0))
    assert rows[0] == -1 and (rows < len(keys)).all()
