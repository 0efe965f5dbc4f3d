"""Every experiment can be run as it is declared."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from data.filesystem import write_json
from pipeline.config import ConfigError, load_options
from pipeline.experiments.arms import ours, ready
from pipeline.experiments.catalogue import EXPERIMENTS, listed, planned, states
from pipeline.experiments.cost import costs
from pipeline.experiments.experiment import BUDGETS, Experiment
from pipeline.experiments.measures import MEASURES


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda each: each.name)
def test_arms_are_configurations_and_claims_are_of_arms(experiment: Experiment) -> None:
    names = [arm.name for arm in experiment.arms]
    assert len(set(names)) == len(names) > 1
    assert {name for pair in experiment.better for name in pair} <= set(names)
    for arm in (arm for arm in experiment.arms if not arm.package):
        options = load_options(arm.preset, list(arm.options))
        assert arm.phases and all(getattr(options, phase).seconds for phase in arm.phases)
    for arm in experiment.full:
        options = load_options(arm.preset, list(arm.options))
        assert all((limits := getattr(options, phase)).steps or limits.epochs for phase in arm.phases)
        assert arm.preset.startswith("paper-")
    assert set(experiment.measures) <= set(MEASURES) and (experiment.by == ("bits",) or experiment.measures)


@pytest.mark.parametrize("name", MEASURES)
def test_measures_are_modules(name: str) -> None:
    assert find_spec(f"pipeline.experiments.measures.{MEASURES[name]}")


@pytest.mark.slow
def test_the_papers_sizes_are_built_and_cost(tmp_path: Path) -> None:
    """On the meta device, of tiny data."""
    experiment, plan = planned("haed-figure4", "paper", tmp_path, tmp_path / "none")
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "valid", "test"):
        (source / f"{split}.txt").write_text(f" = {split} = \n" + f"some {split} words of no corpus \n" * 9000)
    arms, _ = ready(experiment, replace(plan, overrides=("source.kind=wikitext", f"source.path={source}")))
    found = {(each.arm, each.phase): each for each in costs(ours(arms))}
    assert [each.phase for each in found.values()] == ["train", "pretrain", "finetune", "pretrain", "finetune"]
    train, first = found["end to end", "train"], found["IEM, then everything", "pretrain"]
    assert train.parameters > 2e7 and train.flops > 4 * first.flops and train.days > 0


def test_the_list_tells_which_results_there_are(tmp_path: Path) -> None:
    done, begun = EXPERIMENTS["haed-table1"], EXPERIMENTS["haed-figure4"]
    (place := tmp_path / done.name / "minutes").mkdir(parents=True)
    write_json(place / f"{done.name}.json", {"rows": [{"failures": []}]})
    (tmp_path / begun.name / "hour").mkdir(parents=True)
    (tmp_path / begun.name / "minutes-0123abcd").mkdir()
    found = states(tmp_path)
    assert list(found) == list(EXPERIMENTS) and list(BUDGETS) == ["minutes", "hour", "paper"]
    assert found[done.name] == "minutes done"
    assert found[begun.name] == "minutes of its own settings begun, hour begun"
    assert found["haed-figure2"] == "not run" and all(name in listed(tmp_path) for name in EXPERIMENTS)


def test_a_damaged_result_is_said_and_keeps_nobody_from_the_list(tmp_path: Path) -> None:
    for name, content in (("haed-table1", "{"), ("haed-figure4", '{"rows": [{"failures": []}]}')):
        (place := tmp_path / name / "minutes").mkdir(parents=True)
        (place / f"{name}.json").write_text(content)
    (place := tmp_path / "haed-figure2" / "minutes").mkdir(parents=True)
    write_json(place / "haed-figure2.json", {"rows": 3})
    found = states(tmp_path)
    assert [found[name] for name in ("haed-table1", "haed-figure4", "haed-figure2")] == ["minutes damaged"] * 3


@pytest.mark.parametrize(
    ("name", "budget", "overrides", "message"),
    [
        ("haed-figure5", "minutes", (), "no experiment 'haed-figure5': choose one of haed-table1"),
        ("hourglass-copy", "paper", (), "no models of a paper's sizes"),
        ("haed-table1", "minutes", ("seed=3",), "an experiment sets seed itself; see --seeds"),
        ("haed-table1", "minutes", ("train.seconds=5",), "an experiment sets train.seconds itself; --seconds N"),
        ("haed-table1", "minutes", ("evaluate.split=test",), "an experiment sets evaluate.split itself"),
    ],
)
def test_what_cannot_be_planned_is_said(name: str, budget: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(name, budget, Path("experiments"), overrides=overrides)


def test_settings_of_ones_own_have_a_folder_of_their_own() -> None:
    folders = [planned("haed-table1", "minutes", Path("out"), seconds=s)[1].folder for s in (None, 60.0, 90.0)]
    assert folders[0] == Path("out/haed-table1/minutes") and len(set(folders)) == 3
    assert [planned("hourglass-copy", each, Path("out"))[1].seconds for each in ("minutes", "hour")] == [120, 360]
