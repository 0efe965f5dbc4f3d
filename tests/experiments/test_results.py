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
NO_BETTER = replace(BETTER, better={}, no_better={"flat": ("wide",)})
ALIKE = Claim(text="they are alike", alike={"flat": ("wide",)})
BOUNDED = Claim(text="shares are small", below={"share": 0.5})


def judge(claim: Claim, rows: list[Row], experiment: Experiment = TWO) -> str:
    return str(judge_claim(claim, experiment, rows))


def row(variant: str, bits: float | None, spread: float = 0.0, seeds: int = 1, **metrics: float) -> Row:
    found = {name: Metric(value, 0) for name, value in metrics.items()}
    return Row(variant, bits, spread, "bits/char", seeds, None, 1, 1.0, 1.0, 1, found)


def pair(flat: float | None, wide: float | None, spread: float = 0.0, seeds: int = 1) -> list[Row]:
    return [row("flat", flat, spread, seeds), row("wide", wide, spread, seeds)]


def share(value: float | None, spread: float = 0.0, seeds: int = 1, bits: float | None = 2.0) -> Row:
    found = {} if value is None else {"share": Metric(value, spread, seeds)}
    return replace(row("a", bits, 0.0, seeds), metrics=found)


FAR = Claim(text="far is little", below={"far": 0.1})
PAIRS = {"flat": ("wide",), "flat pictures": ("wide pictures",)}
TEXTS = [row("flat", 1.7), row("wide", 1.9)]
PICTURES = [row("flat pictures", 7.9), row("wide pictures", 7.7)]
COSTS, NAMELESS = replace(BETTER, by=("bits", "memory")), replace(BETTER, by=("bitts",))
VERDICTS: dict[str, tuple[Claim, list[Row], str] | tuple[Claim, list[Row], str, str]] = {
    "ahead by more than one seed's noise": (BETTER, pair(1.5, 1.6), "agrees"),
    "behind by more than that": (BETTER, pair(1.6, 1.5), "disagrees"),
    "ahead within that": (BETTER, pair(1.5, 1.57), "cannot tell"),
    "two seeds are as one": (BETTER, pair(1.5, 1.57, 0.001, 2), "cannot tell"),
    "three seeds, ahead within their spread": (BETTER, pair(1.5, 1.6, 0.1, 3), "cannot tell"),
    "three seeds, ahead by more than it": (BETTER, pair(1.5, 1.51, 0.001, 3), "agrees"),
    "one lost two seeds": (BETTER, [row("flat", 1.5, 0.2, 3), row("wide", 1.55)], "cannot tell"),
    "one has no figure": (BETTER, pair(None, 1.6), "cannot tell"),
    "ahead by the margin": (replace(BETTER, margin=0.02), pair(1.5, 1.6), "agrees"),
    "ahead by less than the margin": (replace(BETTER, margin=0.2), pair(1.5, 1.6), "disagrees"),
    "no better: ahead": (NO_BETTER, pair(1.5, 1.6), "disagrees", "0.020 ahead was asked"),
    "no better: ahead within one seed's noise": (NO_BETTER, pair(1.5, 1.51), "cannot tell"),
    "no better: ahead by less than was asked": (NO_BETTER, pair(1.5, 1.51, 0.004, 3), "agrees"),
    "no better: that and the spread are more": (NO_BETTER, pair(1.5, 1.51, 0.006, 3), "cannot tell"),
    "no better: ahead by more than was asked": (NO_BETTER, pair(1.5, 1.54, 0.006, 3), "disagrees"),
    "no better: behind": (NO_BETTER, pair(1.9, 1.5), "agrees"),
    "no better: ahead within a wide spread": (NO_BETTER, pair(1.5, 1.6, 0.2, 3), "cannot tell"),
    "alike": (ALIKE, pair(1.5, 1.505, 0.005, 3), "agrees"),
    "alike the other way": (ALIKE, pair(1.505, 1.5, 0.005, 3), "agrees"),
    "alike within the noise": (ALIKE, pair(1.5, 1.525, 0.005, 3), "cannot tell"),
    "alike within the noise the other way": (ALIKE, pair(1.525, 1.5, 0.005, 3), "cannot tell"),
    "not alike": (ALIKE, pair(1.5, 1.6, 0.005, 3), "disagrees"),
    "not alike the other way": (ALIKE, pair(1.6, 1.5, 0.005, 3), "disagrees"),
    "below the bound": (BOUNDED, [share(0.4)], "agrees"),
    "one that has no such figure says nothing": (BOUNDED, [share(0.4), share(None)], "agrees"),
    "one above the bound": (BOUNDED, [share(0.4), share(0.6)], "disagrees"),
    "a twentieth of the bound is noise": (BOUNDED, [share(0.495)], "cannot tell"),
    "below the bound by more than the spread": (BOUNDED, [share(0.49, 0.001, 3)], "agrees"),
    "below the bound within the spread": (BOUNDED, [share(0.4, 0.2, 3)], "cannot tell"),
    "nothing was trained": (BOUNDED, [share(None, bits=None)], "cannot tell"),
    "nothing was measured": (BOUNDED, [share(None)], "cannot tell"),
    "no model has learned": (
        BETTER,
        pair(7.9, 7.0),
        "cannot tell",
        "every model needs more than 6.4 bits of 8 by chance",
    ),
    "bytes": (BETTER, [replace(each, bits_per_token=each.bits / 3) for each in pair(7.9, 8.5)], "agrees"),
    "a pair has hardly learned, and one has": (
        *(replace(BETTER, better=PAIRS), [*TEXTS, *PICTURES], "cannot tell"),
        "0.200 behind wide pictures, but neither has learned much",
    ),
    "no model has the metric": (NAMELESS, pair(1.5, 1.6), "cannot tell", "here no model has bitts."),
    "several metrics": (
        *(COSTS, [row("flat", 1.5, memory=3.0), row("wide", 1.6, memory=2.0)], "disagrees"),
        "0.100 ahead of wide in bits; flat 1.000 behind wide in memory",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_verdict_minds_the_noise(case: str) -> None:
    claim, rows, word, *phrases = VERDICTS[case]
    verdict = judge(claim, rows)
    assert verdict.startswith(word) and all(phrase in verdict for phrase in phrases)


@pytest.mark.parametrize(("lead", "word"), [(0.008, "cannot tell"), (-0.011, "cannot tell"), (0.014, "agrees")])
def test_equal_seconds_add_the_error_of_the_clock(lead: float, word: str) -> None:
    rows = pair(1.5, 1.5 + lead, 0.001, 3)
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


def test_a_bound_is_asked_for_all_that_was_measured() -> None:
    flat, wide = row("flat", 1.5, near=1.0, far=0.01), row("wide", 1.6, near=1.0)
    measured = replace(TWO, measures=("distance",))
    assert judge(FAR, [flat, wide], measured).startswith("agrees")  # the other has no such figure
    half, failed = replace(wide, untold=["far"]), replace(wide, failures=["seed 0, distance: lost"])
    for other, said in (half, "nothing can be said of wide"), (failed, "wide is missing"):
        found = judge(FAR, [flat, other], measured)
        assert found.startswith("cannot tell") and said in found


def test_of_many_comparisons_those_are_told_that_do_not_agree() -> None:
    rows = [row("flat", 1.5), row("worse", 1.3), *(row(f"wide {number}", 1.6) for number in range(7))]
    asked = replace(BETTER, better={"flat": tuple(each.variant for each in rows[1:])})
    found = judge(asked, rows, replace(TWO, source=OURS))
    assert found.startswith("disagrees: this project claims that ")
    assert found.endswith("; here flat 0.200 behind worse; the other 7 are as claimed.")


def test_each_claim_has_a_verdict_of_its_own() -> None:
    cheaper = Claim(text="flat is cheaper", better={"flat": ("wide",)}, by=("seconds", "TFLOP"))
    rows = [replace(row("flat", 1.5), seconds=2.0, flops=3e12), replace(row("wide", 1.6), seconds=3.0, flops=2e12)]
    found = judge_claims(replace(TWO, claims=(BETTER, cheaper)), rows)
    assert [(each.claim, each.word) for each in found] == [
        ("the paper finds that flat is better", "agrees"),
        ("the paper finds that flat is cheaper", "disagrees"),
    ]
    assert found[1].findings == ["flat 1.000 ahead of wide in seconds", "flat 1.000 behind wide in TFLOP"]


def test_models_are_alike_within_a_tolerance() -> None:
    rows = [row("flat", 1.5, BLEU=6.0), row("wide", 1.5, BLEU=5.0)]
    for tolerance, word in (0.25, "agrees"), (0.1, "disagrees"):
        assert judge(replace(ALIKE, by=("BLEU",), tolerance=tolerance), rows).startswith(word)
