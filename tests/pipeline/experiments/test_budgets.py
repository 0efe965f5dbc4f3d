"""What is trained within a budget leaves time for what runs take beside it."""

from pathlib import Path

import pytest

from pipeline.experiments.catalogue import EXPERIMENTS, planned
from pipeline.experiments.experiment import BUDGETS


@pytest.mark.parametrize("budget", ["minutes", "hour"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_training_and_what_is_beside_it_keep_to_the_budget(name: str, budget: str, tmp_path: Path) -> None:
    experiment, plan = planned(name, budget, tmp_path)
    limits = BUDGETS[budget]
    assert plan.seconds is not None and limits.seconds is not None and 60 <= plan.seconds <= limits.seconds
    beside = limits.beside * experiment.beside * len(experiment.arms) * plan.seeds
    assert plan.seconds + beside <= limits.whole
    assert planned(name, budget, tmp_path, seconds=7)[1].seconds == 7
