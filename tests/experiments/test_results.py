"""What a verdict says of figures that every variant is to have less of than a bound."""

import pytest

from experiments.catalogue import Experiment, Variant
from experiments.results import Metric, Row, judge_claim

BOUNDED = Experiment(
    name="bounded",
    source="nobody",
    question="one model",
    variants=(Variant("a", "flat"),),
    claim="it is low",
    below={"share": 0.5},
)


def row(share: float | None, spread: float = 0.0, seeds: int = 1, bits: float | None = 2.0) -> Row:
    metrics = {} if share is None else {"share": Metric(share, spread)}
    return Row("a", bits, 0.0, "bits/char", seeds, None, 1, 1.0, 1.0, 1, metrics)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([row(0.4)], "agrees"),
        ([row(0.4), row(None)], "agrees"),  # one that has no such figure says nothing
        ([row(0.4), row(0.6)], "disagrees"),
        ([row(0.495)], "cannot tell"),  # a fiftieth of the bound is noise
        ([row(0.49, 0.001, 3)], "agrees"),
        ([row(0.4, 0.2, 3)], "cannot tell"),
        ([row(None, bits=None)], "cannot tell"),
        ([row(None)], "cannot tell"),  # nothing was measured
    ],
)
def test_a_bound_holds_for_every_variant(rows: list[Row], word: str) -> None:
    assert judge_claim(BOUNDED, rows).startswith(word)
