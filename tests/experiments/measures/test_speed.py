"""Characters a second."""

import pytest

from experiments import measures
from pipeline.run.opened import Continuations, Run


def test_the_best_turn_counts_but_not_the_first(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "SPEED_BYTES", 24)
    seconds, rates, ask = iter([0.01, 2.0, 1.0, 4.0]), [], scaled.continued

    def slow(*given: object) -> Continuations:
        found = ask(*given)  # type: ignore[arg-type]
        found.seconds = next(seconds)
        rates.append(len(found.texts[0].decode(errors="replace")) / found.seconds)
        return found

    monkeypatch.setattr(scaled, "continued", slow)
    assert measures.measure_speed(scaled).metrics == {"characters/s, sampled": max(rates[1:])} and len(rates) == 4
