"""Every experiment can be run as it is declared, within its budget; what a file gets wrong is named."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.filesystem import write_json
from experiments.catalogue import (
    BUDGETS,
    format_list,
    list_experiments,
    load_experiment,
    plan_experiment,
    read_experiment,
    read_states,
)
from experiments.external_models import PACKAGES
from experiments.measures import MEASURES
from experiments.run import estimate_costs, prepare_variants, select_own
from haed.base import ChunkingSpec
from haed.registry import make_system
from pipeline import commands
from pipeline.config import ConfigError

FILE = """
source: nobody
question: two models
claims:
  - text: flat is better
    better: {flat: [deep]}
small: {preset: flat, options: [decoder-alone]}
full: {preset: paper-spacebyte}
variants:
  flat: {options: [seed=1], paper: {there: 2}}
  deep: {small: {options: [seed=2]}, full: null}
"""


@pytest.mark.parametrize("name", list_experiments())
def test_variants_are_configurations_and_claims_are_of_variants(name: str) -> None:
    experiment = load_experiment(name)
    assert experiment.name == name and len(experiment.variants) > 1
    assert {variant.package for variant in experiment.variants if variant.package} <= set(PACKAGES)
    for variant in (variant for variant in experiment.variants if not variant.package):
        assert variant.phases and all(getattr(variant.settings, phase).seconds for phase in variant.phases)
    for variant in experiment.full:
        limits = [getattr(variant.settings, phase) for phase in variant.phases]
        assert all(each.steps or each.epochs for each in limits)
        assert variant.preset.startswith("paper-")
    assert set(experiment.measures) <= set(MEASURES)


def test_the_command_offers_the_budgets_that_there_are() -> None:
    parser = argparse.ArgumentParser()
    commands._experiment_arguments(parser)
    assert [parser.parse_args(["--budget", budget]).budget for budget in BUDGETS] == list(BUDGETS)
    assert all(
        budget.description.split(":")[0] in " ".join(parser.format_help().split()) for budget in BUDGETS.values()
    )


@pytest.mark.parametrize("budget", ["minutes", "hour"])
@pytest.mark.parametrize("name", list_experiments())
def test_training_and_what_is_beside_it_keep_to_the_budget(name: str, budget: str, tmp_path: Path) -> None:
    experiment, plan = plan_experiment(name, budget, tmp_path)
    limits = BUDGETS[budget]
    assert plan.seconds is not None and limits.seconds is not None and 60 <= plan.seconds <= limits.seconds
    assert plan.seconds + limits.seconds_beside(experiment, plan.seeds) <= limits.whole
    assert plan_experiment(name, budget, tmp_path, seconds=7)[1].seconds == 7


def test_systems_are_of_equal_size_beside_tables() -> None:
    for variant in load_experiment("systems").variants:
        options = variant.settings
        chunking = ChunkingSpec(options.chunker.k, 256, False, options.batch.context)
        with torch.device("meta"):
            system = make_system(options.model, options.iem, chunking)
        dense = (x.numel() for group in system.parameter_groups() if not group.table for x in group.parameters)
        assert 2e6 <= sum(dense) <= 3e6, variant.name


def test_a_file_gives_a_variant_for_each_size_that_it_has(tmp_path: Path) -> None:
    (path := tmp_path / "two.yaml").write_text(FILE)
    experiment = read_experiment(path)
    flat, deep = experiment.variants
    decoder_alone = ("model.mixture.known=0", "iem.correction=none", "finetune.iem_weight=0")
    assert flat.options == (*decoder_alone, "seed=1") and deep.options == (*decoder_alone, "seed=2")
    assert flat.paper == {"there": 2.0} and experiment.claims[0].better == {"flat": ("deep",)}
    full = [(each.name, each.preset, each.options) for each in experiment.full]
    assert full == [("flat", "paper-spacebyte", ("seed=1",))]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("claims:", "clams:", "clams is not a key; keys are source, question, claims"),
        ("    better:", "    beter:", "claims.0.beter is not a key; keys are text, better, no_better, alike"),
        ("{options: [seed=1]", "{optoins: [seed=1]", "variants.flat.optoins is not a key; keys are options, small"),
        ("small: {options: [seed=2]}", "small: {seed: 2}", "variants.deep.small.seed is not a key; keys are preset"),
        ("[decoder-alone]", "[decoder]", "'decoder' is neither key=value nor a set. Sets are untabled"),
        ("preset: flat", "preset: flta", "no preset 'flta'"),
        ("[deep]", "[wide]", "no variant 'wide'. Variants are flat, deep"),
        ("small: {preset: flat, ", "small: {", "claims.0.better: variant 'flat' has no preset. Give it one, or small"),
        ("    better:", "    by: []\n    better:", "claims.0.by: Tuple should have at least 1 item"),
        ("    better:", "    margin: -1\n    better:", "claims.0.margin: Input should be greater than or equal to 0"),
        ("better: {flat: [deep]}", "better: {flat: [deep], deep: [flat]}", "'flat' and 'deep' cannot both be better"),
        ("there: 2", "there: two", "variants.flat.paper.there: Input should be a valid number"),
        ("    better:", "    by: [speed]\n    better:", "claims.0.by: speed needs measures, but there are none"),
        ("claims:", "measures: [sped]\nclaims:", "measures.0: Input should be 'bags'"),
        ("better: {", "better: {{", "while parsing"),
        ("claims:", "source: me\nclaims:", "source is a duplicate key"),
        ("better: {flat: [deep]}", "alike: {flat: [flat]}", "claims.0.alike: 'flat' is compared with itself"),
        ("better: {flat: [deep]}", "better: {}", "claims.0: nothing to judge the claim by"),
        ("claims:\n  - text: flat is better\n    better: {flat: [deep]}", "claims: []", "at least 1 item"),
    ],
)
def test_a_mistake_in_a_file_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "two.yaml").write_text(FILE.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_experiment(path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)


def test_a_file_that_is_no_text_and_a_wrong_option_are_named_with_their_place(tmp_path: Path) -> None:
    (path := tmp_path / "two.yaml").write_bytes(b"source: \xff\n")
    with pytest.raises(ConfigError, match=f"{path}: 'utf-8' codec"):
        read_experiment(path)
    path.write_text(FILE.replace("seed=1", "sed=1"))
    with pytest.raises(ConfigError, match="variant 'flat': there is no option sed"):
        _ = read_experiment(path).variants[0].settings


def test_seeds_that_leave_no_time_to_train_are_refused_and_more_seconds_are_advised() -> None:
    with pytest.raises(ConfigError, match="so nothing is left to train. Add --seconds N .* such as --seconds 2520"):
        plan_experiment("systems", "minutes", Path("out"), seeds=3)
    assert plan_experiment("systems", "minutes", Path("out"), seeds=3, seconds=2520.0)[1].seconds == 2520


@pytest.mark.slow
def test_the_papers_sizes_are_built_and_cost(tmp_path: Path) -> None:
    """On the meta device, of tiny data."""
    experiment, plan = plan_experiment("haed-figure4", "paper", tmp_path, tmp_path / "none")
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "valid", "test"):
        (source / f"{split}.txt").write_text(f" = {split} = \n" + f"some {split} words of no corpus \n" * 9000)
    overrides = ("source.kind=wikitext", f"source.path={source}")
    variants, _ = prepare_variants(experiment, replace(plan, overrides=overrides))
    costs = {(each.variant, each.phase): each for each in estimate_costs(select_own(variants))}
    assert [each.phase for each in costs.values()] == ["train", "pretrain", "finetune"]
    train, first = costs["end to end", "train"], costs["IEM, then everything", "pretrain"]
    assert train.parameters > 2e7 and train.flops > 4 * first.flops and train.days > 0


def test_the_list_tells_which_results_there_are_and_which_are_damaged(tmp_path: Path) -> None:
    done, begun = "haed-table1", "haed-figure4"
    (place := tmp_path / done / "minutes").mkdir(parents=True)
    variant = load_experiment(done).variants[0]
    row = {"variant": variant.name, "options": variant.described, "failures": []}
    write_json(place / f"{done}.json", {"rows": [row]})
    (tmp_path / begun / "hour").mkdir(parents=True)
    (tmp_path / begun / "minutes-0123abcd").mkdir()
    states = read_states(tmp_path)
    assert list(states) == list_experiments() and list(BUDGETS) == ["minutes", "hour", "paper"]
    assert states[done] == "minutes done"
    assert states[begun] == "minutes of its own settings begun, hour begun"
    write_json(place / f"{done}.json", {"rows": [row | {"options": "flat"}]})
    assert read_states(tmp_path)[done] == "minutes done with other options"
    assert states["haed-figure2"] == "not run" and all(name in format_list(tmp_path) for name in list_experiments())
    for content in "{", '{"rows": [{"failures": []}]}':
        (place / f"{done}.json").write_text(content)
        assert read_states(tmp_path)[done] == "minutes damaged"
    write_json(place / f"{done}.json", {"rows": 3})
    assert read_states(tmp_path)[done] == "minutes damaged"


@pytest.mark.parametrize(
    ("name", "budget", "overrides", "message"),
    [
        (
            "haed-figure5",
            "minutes",
            (),
            "no experiment .* Did you mean haed-figure4. Use one of byte-pairs, haed-figure2",
        ),
        ("hourglass-copy", "paper", (), "no models of a paper's sizes"),
        ("haed-table1", "minutes", ("seed=3",), "an experiment sets seed itself; see --seeds"),
        ("haed-table1", "minutes", ("train.seconds=5",), "an experiment sets train.seconds itself; --seconds N"),
        ("haed-table1", "minutes", ("evaluate.split=test",), "an experiment sets evaluate.split itself"),
    ],
)
def test_what_cannot_be_planned_is_said(name: str, budget: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_experiment(name, budget, Path("results"), overrides=overrides)


def test_settings_of_ones_own_have_a_folder_of_their_own() -> None:
    folders = [plan_experiment("haed-table1", "minutes", Path("out"), seconds=s)[1].folder for s in (None, 60.0, 90.0)]
    assert folders[0] == Path("out/haed-table1/minutes") and len(set(folders)) == 3
    _, elsewhere = plan_experiment("haed-table1", "minutes", Path("out"), Path("my data"))
    assert elsewhere.folder not in folders and elsewhere.command.endswith(" --budget minutes '--data=my data'")
    plans = [plan_experiment("hourglass-copy", each, Path("out"))[1] for each in ("minutes", "hour")]
    assert [plan.seconds for plan in plans] == [120, 360]


def test_a_plan_knows_its_command() -> None:
    settings = {"seconds": 60.0, "seeds": 2, "parallel": 2, "clock": "process"}
    overrides = "threads=1", "source.path=a b"
    _, plan = plan_experiment("haed-table1", "hour", Path("out"), overrides=overrides, **settings)
    words = "--seconds=60 --seeds=2 --parallel=2 --clock=process threads=1 'source.path=a b'"
    assert plan.command == f"haed experiment haed-table1 --budget hour {words}"
    assert plan_experiment("recipe", "minutes", Path("out"))[1].command == "haed experiment recipe --budget minutes"
