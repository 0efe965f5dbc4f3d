"""A sweep: its combinations and their names, what is refused before any run is started, and runs that are started."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flows.forms import FormSubmission, check_all_stages, read_form
from flows.sweep import SweptRun, fix_options, list_runs_to_try, plan_runs
from pipeline.config import ConfigError, dump_options, list_presets, load_options
from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import SETTINGS, Served


def test_each_combination_is_a_run_with_a_name() -> None:
    runs = list_runs_to_try("a", ["optimizer.learning_rate=1e-3, 0.003", "", "seed=0,1,0"])
    names = [f"a-learning_rate-{rate}-seed-{seed}" for rate in ("1e-3", "0.003") for seed in (0, 1)]
    assert [run.name for run in runs] == names
    assert runs[1].values == ["optimizer.learning_rate=1e-3", "seed=1"]
    (one, other) = list_runs_to_try("a", ["evaluate.parts=[copied,recalled],[copied]"])
    assert one.values == ["evaluate.parts=[copied,recalled]"] and other.name == "a-parts-copied"
    quoted = list_runs_to_try("a", ["source.valid_pattern=\"a,b\", 'c,d' ,e", "source.pattern=*.{txt,md},don't,won't"])
    assert len(quoted) == 9 and quoted[0].values == ['source.valid_pattern="a,b"', "source.pattern=*.{txt,md}"]
    assert quoted[-1].values == ["source.valid_pattern=e", "source.pattern=won't"]
    (both,) = list_runs_to_try("a", ["pretrain.steps=4", "finetune.steps=6"])
    assert both.name == "a-pretrain.steps-4-finetune.steps-6"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "values: there is nothing to try. Give an option with values, such as seed=0,1,2"),
        (["seed"], "values: 'seed' is not an option with values. Use one such as seed=0,1,2"),
        (["seed= , "], "is not an option with values"),
        (["=1,2"], "is not an option with values"),
        ([f"seed={','.join(map(str, range(11)))}", f"threads={','.join(map(str, range(1, 11)))}"], "these are 110"),
        (["name=x,y"], "values: the names of the runs follow from their values. Leave name= out"),
        (["source.path=a/b,a-b"], "values: two runs would have the name a-path-a-b. Leave one of their values out"),
    ],
)
def test_values_that_make_no_runs_are_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        list_runs_to_try("a", words)


def plan(values: list[str], overrides: list[str], **fields: Any) -> list[SweptRun]:
    given = {"preset": "quickstart", "name": "x", "source": "", "overrides": overrides, "values": values} | fields
    return plan_runs(FormSubmission("quickstart", [], load_options("quickstart", [f"name={given['name']}"]), given))


@pytest.mark.slow
def test_kinds_of_models_share_a_time_each_among_its_own_phases() -> None:
    runs = plan(["model.kind=haed,hourglass"], ["threads=1"], name="x$seed", seconds=60.0)
    haed, hourglass = (load_options("quickstart", run.overrides) for run in runs)
    assert (haed.pretrain.seconds, haed.finetune.seconds, hourglass.train.seconds) == (40, 20, 60)
    assert [haed.name, hourglass.name] == [run.name for run in runs] == ["x$seed-kind-haed", "x$seed-kind-hourglass"]
    assert haed.threads == hourglass.threads == 1


@pytest.mark.parametrize(("source", "values"), [("", ["source.path=/nowhere"]), ("/nowhere", ["seed=0,1"])])
def test_a_sweep_whose_source_is_missing_starts_no_run(source: str, values: list[str]) -> None:
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        plan(values, ["source.kind=text"], source=source)


def test_each_chunker_of_a_sweep_must_suit_the_source(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"a text of {split}\n")
    with pytest.raises(ValueError, match="gives text, but chunker.kind=pixels cuts pictures"):
        plan(["chunker.kind=words,pixels"], ["source.kind=text"], source=str(tmp_path))


def test_runs_of_a_sweep_keep_the_options_that_were_checked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the configuration of the run that they vary changes, and its folder is renamed."""
    wanted = load_options(run / "config.yaml", ["seed=7"])
    preset, overrides = fix_options(str(run / "config.yaml"), ["seed=7"])
    run.rename(run.with_name("elsewhere"))
    assert load_options(preset, overrides) == wanted
    assert fix_options("hred", ["seed=7"]) == ("hred", ["seed=7"])
    for name in list_presets():
        path = run.parent / f"{name}.yaml"
        path.write_text(dump_options(load_options(name)))
        preset, overrides = fix_options(str(path), [])
        assert load_options(preset, overrides) == load_options(name)


def test_values_that_are_the_same_number_are_no_two_runs() -> None:
    same = "seed=1, optimizer.learning_rate=0.001 and seed=1, optimizer.learning_rate=1e-3 are the same. Leave one"
    with pytest.raises(ConfigError, match=same):
        plan(["seed=1,2", "optimizer.learning_rate=0.001,1e-3"], [], seconds=60.0)


def test_a_sweep_whose_mixture_would_have_one_window_starts_no_run(here: Path) -> None:
    (here / "text.txt").write_text("some words\n" * 9)
    text = ["source.kind=text", "source.path=text.txt"]
    with pytest.raises(ConfigError, match=r"with one window per step.*Raise batch\.sequences"):
        plan(["batch.sequences=1,2"], text, seconds=60.0)
    for enough in ("iem.extra_batches=1", "launcher.processes=2", "model.mixture.known=0"):
        check_all_stages(load_options("quickstart", ["name=x", *text, "batch.sequences=1", enough]))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model.main.width=24", "was trained with model.main.width=16, but this run has model.main.width=24"),
        ("device=cuda:77", "device=cuda:77 is not available"),
    ],
)
@pytest.mark.usefixtures("here")
def test_another_model_or_device_is_refused_before_anything_is_cut_or_waited_for(
    word: str, said: str, run: Path
) -> None:
    check_all_stages(load_options(run / "config.yaml"))
    with pytest.raises(ValueError, match=said):
        check_all_stages(load_options(run / "config.yaml", [word]))


@pytest.mark.usefixtures("here")
def test_options_of_an_existing_run_are_varied_in_new_runs(run: Path) -> None:
    """The form of the page of a run names it, and no preset."""
    fields = {"preset": None, "name": run.name, "source": "", "overrides": ["threads=1"], "values": ["seed=5,6"]}
    preset, overrides, values = read_form("haed", fields)
    planned = plan_runs(FormSubmission(preset, [], load_options(preset, overrides, values), fields))
    assert [each.name for each in planned] == [f"{run.name}-seed-{seed}" for seed in (5, 6)]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_sweep_starts_its_runs_and_one_with_a_wrong_value_starts_none(served: Served) -> None:
    def runs() -> Any:
        return [run for run in call(served.address, "/flow_runs/filter", {}) if "sweep:tried" in run["tags"]]

    given = {"name": "tried", "overrides": SETTINGS}
    wrong = served.trigger("sweep", given | {"values": ["optimizer.learning_rate=0.001,-1"]})
    until(PATIENCE, lambda: served.state(wrong) == "FAILED")
    assert "learning_rate" in served.message(wrong) and not runs()
    right = served.trigger("sweep", given | {"values": ["optimizer.learning_rate=0.001,0.003"]})
    until(PATIENCE, lambda: served.state(right) == "COMPLETED")
    names = [f"tried-learning_rate-{rate}" for rate in ("0.001", "0.003")]
    assert served.message(right) == f"2 runs were started: {', '.join(names)}"
    until(PATIENCE, lambda: [run["state_type"] for run in runs()] == ["COMPLETED"] * 2)
    rates = [Path(served.folder, "runs", name, "config.yaml").read_text() for name in names]
    assert ["\n  learning_rate: 0.001\n" in text for text in rates] == [True, False]
    assert {run["name"] for run in runs()} == {f"haed {name} · 10 steps" for name in names}
    assert meanwhile_of_others(served, names) == []


def meanwhile_of_others(served: Served, names: list[str]) -> list[str]:
    """The runs that began to train while the one before was trained, evaluated or reported: they would slow it down."""
    every = call(served.address, "/flow_runs/filter", {})
    times = [
        (begun["start_time"], ended["end_time"], name)
        for name in names
        for begun in every
        for ended in every
        if begun["name"].startswith(f"pretrain {name}") and ended["name"].startswith(f"report {name}")
    ]
    assert len(times) == len(names)
    times.sort()
    return [name for (_, end, _), (start, _, name) in pairwise(times) if start < end]
