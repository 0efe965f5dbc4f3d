"""What a verdict says of figures that every arm is to have less of than a bound."""

import pytest

from pipeline.experiments.experiment import Arm, Experiment
from pipeline.experiments.result import Figure, Row, verdict

BOUNDED = Experiment("bounded", "nobody", "one model", (Arm("a", "flat"),), "it is low", (), below={"share": 0.5})


def row(share: float | None, spread: float = 0.0, seeds: int = 1, bits: float | None = 2.0) -> Row:
    figures = {} if share is None else {"share": Figure(share, spread)}
    return Row("a", bits, 0.0, "bits/char", seeds, None, 1, 1.0, 1.0, 1, figures)


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
def test_a_bound_holds_for_every_arm(rows: list[Row], word: str) -> None:
    assert verdict(BOUNDED, rows).startswith(word)
