"""Verdicts on claims: pairs of variants, and bounds that every variant keeps to, beside the noise of seeds."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.catalogue import OURS, Claim, Experiment, Variant
from experiments.results import Metric, Row, judge_claim, judge_claims

TWO = Experiment(
    name="two",
    source="nobody",
    question="two models",
    variants=(Variant("wide", "quickstart"), Variant("flat", "flat")),
    claims=(Claim(text="flat is better", better={"flat": ("wide",)}),),
)
BETTER = TWO.claims[0]
BOUNDED = Claim(text="shares are small", below={"share": 0.5})


def judge(claim: Claim, rows: list[Row], experiment: Experiment = TWO) -> str:
    """The verdict as a sentence."""
    return str(judge_claim(claim, experiment, rows))


def row(variant: str, bits: float | None, spread: float = 0.0, seeds: int = 1) -> Row:
    return Row(variant, bits, spread, "bits/char", seeds, None, 1, 1.0, 1.0, 1)


def bounded_row(share: float | None, spread: float = 0.0, seeds: int = 1, bits: float | None = 2.0) -> Row:
    return replace(row("a", bits, 0.0, seeds), metrics={} if share is None else {"share": Metric(share, spread, seeds)})


@pytest.mark.parametrize(
    ("flat", "wide", "word"),
    [
        (row("flat", 1.5), row("wide", 1.6), "agrees"),
        (row("flat", 1.6), row("wide", 1.5), "disagrees"),
        (row("flat", 1.5), row("wide", 1.57), "cannot tell"),
        (row("flat", 1.5, 0.001, 2), row("wide", 1.57, 0.001, 2), "cannot tell"),
        (row("flat", 1.5, 0.1, 3), row("wide", 1.6, 0.1, 3), "cannot tell"),
        (row("flat", 1.5, 0.001, 3), row("wide", 1.51, 0.001, 3), "agrees"),
        (row("flat", 1.5, 0.2, 3), row("wide", 1.55), "cannot tell"),  # which lost two seeds
        (row("flat", None), row("wide", 1.6), "cannot tell"),
    ],
)
def test_a_verdict_minds_the_noise(flat: Row, wide: Row, word: str) -> None:
    assert judge(BETTER, [wide, flat]).startswith(word)


@pytest.mark.parametrize(("lead", "word"), [(0.008, "cannot tell"), (-0.011, "cannot tell"), (0.014, "agrees")])
def test_equal_seconds_add_the_error_of_the_clock(lead: float, word: str) -> None:
    rows = [row("flat", 1.5, 0.001, 3), row("wide", 1.5 + lead, 0.001, 3)]
    assert judge(BETTER, rows, replace(TWO, equal="seconds")).startswith(word)
    assert not judge(BETTER, rows).startswith("cannot tell")


def test_a_claim_of_many_pairs_is_not_refuted_by_chance() -> None:
    """By three seeds of equal models, the spreads are exceeded in one of twenty pairs on each side."""
    names = [f"model {number}" for number in range(14)]
    chain = replace(BETTER, better={first: (second,) for first, second in zip(names[::2], names[1::2], strict=True)})
    draw = np.random.default_rng(0)
    refuted = 0
    for _ in range(400):
        bits = draw.normal(2.0, 0.01, (14, 3))
        rows = [row(name, each.mean(), np.ptp(each) / 2, 3) for name, each in zip(names, bits, strict=True)]
        refuted += judge(chain, rows).startswith("disagrees")
    assert 0 < refuted < 0.08 * 400
    one = replace(BETTER, better={names[0]: (names[1],)})
    rows = [row(name, 2.0 + 0.015 * (number == 0), 0.005, 3) for number, name in enumerate(names)]
    assert judge(one, rows).startswith("disagrees") and judge(chain, rows).startswith("cannot tell")


def test_models_that_have_hardly_learned_are_not_ranked() -> None:
    found = judge(BETTER, [row("flat", 7.9), row("wide", 7.0)])
    assert found.startswith("cannot tell") and "every model needs more than 6.4 bits of 8 by chance" in found
    chinese = [replace(each, bits_per_token=each.bits / 3) for each in (row("flat", 7.9), row("wide", 8.5))]
    assert judge(BETTER, chinese).startswith("agrees")


def test_a_pair_that_has_hardly_learned_is_not_judged_beside_one_that_has() -> None:
    texts, pictures = [row("flat", 1.7), row("wide", 1.9)], [row("flat pictures", 7.9), row("wide pictures", 7.7)]
    both = replace(BETTER, better={"flat": ("wide",), "flat pictures": ("wide pictures",)})
    found = judge(both, [*texts, *pictures])
    assert found.startswith("cannot tell") and "0.200 behind wide pictures, but neither has learned much" in found


def test_a_metric_that_no_model_has_is_named() -> None:
    found = judge(replace(BETTER, by=("bitts",)), [row("flat", 1.5), row("wide", 1.6)])
    assert found.startswith("cannot tell") and "here no model has bitts." in found


def test_a_verdict_may_be_of_several_figures() -> None:
    rows = [row("flat", 1.5), row("wide", 1.6)]
    rows[0].metrics["memory"], rows[1].metrics["memory"] = Metric(3.0, 0), Metric(2.0, 0)
    found = judge(replace(BETTER, by=("bits", "memory")), rows)
    assert found.startswith("disagrees") and "0.100 ahead of wide in bits; flat 1.000 behind wide in memory" in found


def test_a_verdict_asks_for_a_margin_for_no_better_and_for_all_that_was_measured() -> None:
    apart = [row("flat", 1.5), row("wide", 1.6)]
    assert judge(replace(BETTER, margin=0.02), apart).startswith("agrees")
    assert judge(replace(BETTER, margin=0.2), apart).startswith("disagrees")
    no_better = replace(BETTER, better={}, no_better={"flat": ("wide",)})
    assert judge(no_better, apart).startswith("disagrees") and "0.020 ahead was asked" in judge(no_better, apart)
    assert judge(no_better, [row("flat", 1.5), row("wide", 1.51)]).startswith("cannot tell")
    for lead, spread, word in ((0.01, 0.004, "agrees"), (0.01, 0.006, "cannot tell"), (0.04, 0.006, "disagrees")):
        seeds = [row("flat", 1.5, spread, 3), row("wide", 1.5 + lead, spread, 3)]
        assert judge(no_better, seeds).startswith(word)
    assert judge(no_better, [row("flat", 1.9), row("wide", 1.5)]).startswith("agrees")
    assert judge(no_better, [row("flat", 1.5, 0.2, 3), row("wide", 1.6, 0.2, 3)]).startswith("cannot tell")
    bounded, measured = replace(BETTER, better={}, below={"far": 0.1}), replace(TWO, measures=("distance",))
    apart[0].metrics |= {"near": Metric(1, 0), "far": Metric(0.01, 0)}
    assert judge(bounded, apart, measured).startswith("agrees")  # the other has no such figure
    half, failed = (
        replace(apart[1], metrics={"near": Metric(1, 0)}, untold=["far"]),
        replace(apart[1], failures=["seed 0, distance: lost"]),
    )
    for other, said in (half, "nothing can be said of wide"), (failed, "wide is missing"):
        found = judge(bounded, [apart[0], other], measured)
        assert found.startswith("cannot tell") and said in found


def test_of_many_comparisons_those_are_told_that_do_not_agree() -> None:
    rows = [row("flat", 1.5), row("worse", 1.3), *(row(f"wide {number}", 1.6) for number in range(7))]
    asked = replace(BETTER, better={"flat": tuple(each.variant for each in rows[1:])})
    found = judge(asked, rows, replace(TWO, source=OURS))
    assert found.startswith("disagrees: this project claims that ")
    assert found.endswith("; here flat 0.200 behind worse; the other 7 are as claimed.")


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([bounded_row(0.4)], "agrees"),
        ([bounded_row(0.4), bounded_row(None)], "agrees"),  # one that has no such figure says nothing
        ([bounded_row(0.4), bounded_row(0.6)], "disagrees"),
        ([bounded_row(0.495)], "cannot tell"),  # a twentieth of the bound is noise
        ([bounded_row(0.49, 0.001, 3)], "agrees"),
        ([bounded_row(0.4, 0.2, 3)], "cannot tell"),
        ([bounded_row(None, bits=None)], "cannot tell"),
        ([bounded_row(None)], "cannot tell"),  # nothing was measured
    ],
)
def test_a_bound_holds_for_every_variant(rows: list[Row], word: str) -> None:
    assert judge(BOUNDED, rows).startswith(word)


def test_each_claim_has_a_verdict_of_its_own() -> None:
    cheaper = Claim(text="flat is cheaper", better={"flat": ("wide",)}, by=("seconds", "TFLOP"))
    rows = [replace(row("flat", 1.5), seconds=2.0, flops=3e12), replace(row("wide", 1.6), seconds=3.0, flops=2e12)]
    found = judge_claims(replace(TWO, claims=(BETTER, cheaper)), rows)
    assert [(each.claim, each.word) for each in found] == [
        ("the paper finds that flat is better", "agrees"),
        ("the paper finds that flat is cheaper", "disagrees"),
    ]
    assert found[1].findings == ["flat 1.000 ahead of wide in seconds", "flat 1.000 behind wide in TFLOP"]


@pytest.mark.parametrize(("bits", "word"), [(1.505, "agrees"), (1.525, "cannot tell"), (1.6, "disagrees")])
def test_models_that_are_alike_lead_neither_way(bits: float, word: str) -> None:
    alike = Claim(text="they are alike", alike={"flat": ("wide",)})
    for pair in (
        (row("flat", 1.5, 0.005, 3), row("wide", bits, 0.005, 3)),
        (row("flat", bits, 0.005, 3), row("wide", 1.5, 0.005, 3)),
    ):
        assert judge(alike, list(pair)).startswith(word)
    samples = [
        replace(row("flat", 1.5), metrics={"BLEU": Metric(6.0, 0)}),
        replace(row("wide", 1.5), metrics={"BLEU": Metric(5.0, 0)}),
    ]
    within_a_fifth = replace(alike, by=("BLEU",), tolerance=0.25)
    assert judge(within_a_fifth, samples).startswith("agrees") and judge(
        replace(within_a_fifth, tolerance=0.1), samples
    ).startswith("disagrees")
