"""Sampling from a mixture: as often as the likelihood says, given a beginning too, and with what `Draw` cuts off."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.sampling import ChunkSampler, Draw, draw_outcomes, find_likeliest_chunks, outcome_log_probs
from tests.haed.chunk.test_mixture import K, V, knowing, lexicon, mixed
from tests.haed.chunk.test_model import append_chunks, windows

GIVEN, NOTHING = windows(1, 2, K, V), torch.tensor([], dtype=torch.long)
BEGINNINGS = [[], [1], [0, 1], [1, 0, 1]]
DRAWN = 10_000


def likelihood(model: HAED, every: Chunks, opened: list[int]) -> Tensor:
    """Of every chunk after `GIVEN`, among those that begin so, by scoring whole windows."""
    with torch.no_grad():
        found = model.log_likelihood(append_chunks(GIVEN, every))[:, -1].exp()
    begins = (every.tokens[:, : len(opened)] == torch.tensor(opened)).all(1) & (every.lengths >= len(opened))
    return found * begins / found[begins].sum()


def frequencies(drawn: Chunks, every: Chunks) -> Tensor:
    same = (drawn.tokens[:, None] == every.tokens).all(2) & (drawn.lengths[:, None] == every.lengths)
    assert same.sum(1).eq(1).all()
    return same.double().mean(0)


def fits(found: Tensor, wanted: Tensor, drawn: int = DRAWN) -> bool:
    """Pearson's chi-square is within what one draw in a thousand exceeds (Wilson and Hilferty's approximation).

    Outcomes that are expected fewer than five times count as one.
    """
    if (found[wanted == 0] != 0).any():
        return False
    rare = wanted * drawn < 5
    found, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, wanted))
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    statistic, free = drawn * ((found - wanted).square() / wanted).sum(), max(1, len(wanted) - 1)
    return bool(statistic < free * (1 - 2 / (9 * free) + 3.1 * (2 / (9 * free)) ** 0.5) ** 3)


WAYS = {
    "few outcomes": {},
    "many outcomes": {"sampling._MANY": 4},
    "by rejection": {"sampling.LEAST": 0},
    "by rejection, or all where none is accepted": {"sampling.LEAST": 0}
    | {f"chunk.rejection.{name}": 1 for name in ("_DIRECTIONS", "_PROPOSED", "_ROUNDS")},
}


@pytest.mark.parametrize("way", WAYS)
def test_chunks_are_drawn_as_often_as_the_likelihood_says(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From S, from the decoder, or by both ways; after an open prefix given that the chunk begins with it."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(f"haed.{name}", value)
    model, every = knowing()
    draw = Draw(generator=torch.Generator().manual_seed(1))
    for opened in BEGINNINGS:
        sampler = ChunkSampler(model, GIVEN, DRAWN)
        before, beginning = Chunks(GIVEN.tokens[:, -1], GIVEN.lengths[:, -1]), torch.tensor(opened, dtype=torch.long)
        shares = outcome_log_probs(model, sampler.prediction[:1], before, beginning)[0].softmax(0).detach()
        found = frequencies(sampler.draw_chunk(draw, beginning), every)
        assert fits(found, likelihood(model, every, opened))
        gate, summoned = float(1 - shares[-1]), float(sampler.parts["known"].mean())
        assert abs(summoned - gate) <= 4 * (gate * (1 - gate) / DRAWN) ** 0.5


@pytest.mark.parametrize(("way", "top_k"), [("few outcomes", 4), ("many outcomes", 4), ("by rejection", 0)])
def test_temperature_and_cut_offs_apply_to_the_gate_then_to_the_known_chunks_or_the_symbols(
    way: str, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(f"haed.{name}", value)
    model, every = knowing()
    sampler = ChunkSampler(model, GIVEN, DRAWN)
    before = Chunks(GIVEN.tokens[:, -1], GIVEN.lengths[:, -1])
    with torch.no_grad():
        shares = outcome_log_probs(model, sampler.prediction[:1], before, NOTHING)[0].softmax(0)
        known, model.known = model.known, None
        spelled = likelihood(model, every, [])
        model.known = known
    gate = torch.stack([1 - shares[-1], shares[-1]]) ** 0.5
    whole, spell = gate / gate.sum()
    number_kept = top_k or len(shares) - 1
    kept = shares[:-1] ** 0.5 * (shares[:-1] >= shares[:-1].topk(number_kept).values[-1])
    wanted = torch.zeros(len(every), dtype=torch.float64)
    wanted[torch.arange(len(every)).flip(0)[::2][:5]] = whole * kept / kept.sum()
    symbols = torch.zeros_like(wanted)  # top_k=4 leaves all three symbols
    for number, (tokens, size) in enumerate(zip(every.tokens.tolist(), every.lengths.tolist(), strict=True)):
        symbols[number] = tempered(spelled, every, tokens[:size])
    assert (kept > 0).sum() == number_kept and 0.01 < spell < 0.99
    found = frequencies(sampler.draw_chunk(Draw(2.0, top_k, generator=torch.Generator().manual_seed(0))), every)
    assert fits(found, wanted + symbols * spell)


@pytest.mark.parametrize("draw", [Draw(0.0), Draw(1e-6), Draw(top_k=1), Draw(top_p=1e-6)])
@pytest.mark.parametrize("odds", [-9.0, -0.1, 0.1, 9.0])
def test_the_coldest_draw_takes_the_likeliest_known_chunk_where_whole_ones_are_likelier(
    odds: float, draw: Draw
) -> None:
    """Even if all that may be spelled together is likelier than each of them."""
    model, every = knowing()
    assert model.mixture is not None
    torch.nn.init.zeros_(model.mixture.gate.weight)
    torch.nn.init.constant_(model.mixture.gate.bias, odds)
    sampler = ChunkSampler(model, GIVEN)
    with torch.no_grad():
        shares = outcome_log_probs(model, sampler.prediction, sampler.last, NOTHING)[0]
    drawn, best = sampler.draw_chunk(draw), int(shares[:-1].argmax())
    assert (odds > 1) == (shares[best] > shares[-1])
    assert bool(sampler.parts["known"]) == (odds > 0)
    assert odds < 0 or drawn.tokens.tolist() == lexicon(every).chunks.tokens[[best]].tolist()


@pytest.mark.parametrize(
    ("chances", "cold", "kept"),
    [
        ([0.3, 0.2, 0.1, 0.4], 0, {0, 1, -1}),
        ([0.1, 0.3, 0.15, 0.45], 1, {1, 2, -1}),
        ([0.1, 0.05, 0.05, 0.8], -1, {-1}),
        ([0.0, 0.0, 0.0, 0.2], -1, {-1}),
        ([0.1, 0.2, 0.1, 0.0], 1, {0, 1}),
        ([0.5, 0.3, 0.15, 0.05], 0, {0, 1}),
    ],
)
def test_an_outcome_is_drawn_after_whether_it_is_a_whole_chunk(chances: list[float], cold: int, kept: set[int]) -> None:
    log_prob = torch.tensor([chances]).log().expand(4000, -1)
    assert draw_outcomes(Draw(0.0), log_prob).unique().tolist() == [cold]
    drawn = draw_outcomes(Draw(top_p=0.7, generator=torch.Generator().manual_seed(0)), log_prob)
    assert set(drawn.tolist()) == kept
    drawn = draw_outcomes(Draw(generator=torch.Generator().manual_seed(0)), log_prob)
    found = torch.stack([(drawn == row).double().mean() for row in (0, 1, 2, -1)])
    assert fits(found, torch.tensor(chances, dtype=torch.float64) / sum(chances), 4000)


def tempered(probabilities: Tensor, every: Chunks, tokens: list[int]) -> float:
    """Of a chunk whose symbols are drawn at temperature 2, from the probabilities of all chunks."""

    def begins(some: list[int]) -> float:
        same = (every.tokens[:, : len(some)] == torch.tensor(some)).all(1) & (every.lengths >= len(some))
        return float(probabilities[same].sum())

    def exactly(some: list[int]) -> float:
        return begins(some) - sum(begins([*some, token]) for token in range(V)) if len(some) < K else begins(some)

    result = 1.0
    for place in range(min(len(tokens) + 1, K)):
        ways = [begins([*tokens[:place], token]) ** 0.5 for token in range(V)]
        ways += [exactly(tokens[:place]) ** 0.5] if place else []
        result *= ways[tokens[place] if place < len(tokens) else V] / sum(ways)
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 0.5), (0.7, 0, 0.99), (1.3, 70, 1.0), (1.0, 0, 0.9999)]
)
def test_many_outcomes_are_cut_off_like_few(
    temperature: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("haed.sampling._MANY", 8)
    draw = Draw(temperature, top_k, top_p, torch.Generator().manual_seed(0))
    for row, drawn in zip(logits, draw(logits.repeat_interleave(4000, 0)).split(4000), strict=True):
        chance, order = (row.double() / temperature).softmax(0).sort(descending=True)
        stay = int((chance.cumsum(0) - chance < top_p).sum()) if top_p < 1 else top_k
        assert torch.isin(drawn, order[:stay]).all() and len(drawn.unique()) > 10
        wanted = (chance / chance[:stay].sum())[:10]
        found = (drawn[:, None] == order[:10]).double().mean(0)
        assert ((found - wanted).abs() <= 4.5 * (wanted * (1 - wanted) / 4000).sqrt()).all()


def test_the_gate_of_a_beginning_that_is_less_likely_than_the_least_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sentence of 140 bytes that the decoder never saw: P is below e^-745, and no part is NaN."""
    model, every = knowing()
    sampler = ChunkSampler(model, GIVEN)
    spell, gates = model.decoder_log_probs, list[float]()
    monkeypatch.setattr(model, "decoder_log_probs", lambda *given: spell(*given) - 1000)
    for opened in every.tokens:
        gates.append(find_likeliest_chunks(model, sampler.prediction, sampler.last, opened, 3).gate["known"])
    assert 0.0 in gates and not any(map(math.isnan, gates))


@pytest.mark.parametrize("known", [True, False])
def test_the_likeliest_chunks_have_their_exact_probabilities(known: bool) -> None:
    model, every = knowing() if known else mixed()
    sampler = ChunkSampler(model, GIVEN)
    for opened in BEGINNINGS:
        beginning = torch.tensor(opened, dtype=torch.long)
        wanted = likelihood(model, every, opened).sort(descending=True)
        found = find_likeliest_chunks(model, sampler.prediction, sampler.last, beginning, 5)
        possible = min(5, int((wanted.values > 0).sum()))
        best = every[wanted.indices[:possible]]
        torch.testing.assert_close(found.probability, wanted.values[:possible])
        assert found.chunks.tokens.tolist() == best.tokens.tolist() and found.chunks.lengths.equal(best.lengths)
        rows = lexicon(every).find_rows(best) if known else torch.full((possible,), -1)
        known_share = found.parts.get("known", torch.zeros(possible))
        assert ((known_share > 0) == (rows >= 0)).all() and (known_share < 1).all()
        with torch.no_grad():
            shares = outcome_log_probs(model, sampler.prediction, sampler.last, beginning)[0].softmax(0)
        assert found.gate.get("known", 0.0) == pytest.approx(float(1 - shares[-1]))
        summoned = (found.probability * known_share)[rows >= 0]
        torch.testing.assert_close(summoned, shares[rows[rows >= 0]])


@pytest.mark.parametrize("many", [1024, 3], ids=["few outcomes", "many outcomes"])
@pytest.mark.parametrize(
    ("logits", "draw", "left"),
    [
        ([0.0] * 4, {"top_k": 2}, {0, 1}),
        ([1.0, 3.0, 2.0, 3.0, 3.0, 2.0], {"top_k": 2}, {1, 3}),
        ([1.0, 3.0, 2.0, 3.0, 3.0, 2.0], {"top_k": 4}, {1, 2, 3, 4}),
        ([0.0, -torch.inf, 0.0, -torch.inf], {"top_k": 3}, {0, 2}),
        ([0.0] * 4, {"top_k": 10**6}, {0, 1, 2, 3}),
        ([0.0, 1e-6, 2e-6, 3e-6], {"top_k": 1, "temperature": 1000.0}, {3}),
        ([0.0] * 4, {"top_p": 0.5}, {0, 1}),
        ([0.0] * 10, {"top_p": 0.7}, set(range(7))),
        ([0.0, 5.0, 0.0, 5.0, 5.0], {"top_p": 0.6}, {1, 3}),
        ([0.0] * 4, {"top_p": 1e-12}, {0}),
        ([0.0] * 8, {"top_k": 4, "top_p": 0.5}, {0, 1}),
        ([0.0, 2.0, 2.0], {"temperature": 0.0}, {1}),
        ([0.0, 2.0, 2.0], {"temperature": 0.0, "top_k": 2}, {1}),
        ([-100.0, -100.0, -96.0, -100.0], {"temperature": 1e-37}, {2}),
        ([-100.0, -100.0, -96.0, -100.0], {"temperature": 1e-310}, {2}),
        ([-100.0, -100.0, -96.0, -100.0], {"top_p": 1e-300}, {2}),
    ],
)
def test_exactly_as_many_outcomes_stay_as_were_asked_for_where_some_are_equal(
    logits: list[float], draw: dict[str, float], left: set[int], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the lowest numbers."""
    monkeypatch.setattr("haed.sampling._MANY", many)
    given = torch.tensor([logits]).expand(400, -1)
    drawn = Draw(**draw, generator=torch.Generator().manual_seed(0))(given)  # type: ignore[arg-type]
    assert set(drawn.tolist()) == left


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": math.nan}]
)
def test_what_is_no_way_to_draw_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Use Draw\("):
        Draw(**wrong)


@pytest.mark.parametrize("many", [1024, 3], ids=["few outcomes", "many outcomes"])
@pytest.mark.parametrize("how", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("logits", [[0.0, math.nan, 1.0, 0.0], [-math.inf] * 4, [0.0, math.inf, 0.0, 1.0]])
def test_scores_that_are_no_numbers_are_refused(
    logits: list[float], how: dict[str, Any], many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haed.sampling._MANY", many)
    with pytest.raises(FloatingPointError, match="no numbers"):
        Draw(**how)(torch.tensor([logits]))
