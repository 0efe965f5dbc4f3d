"""`haed run` where something is wrong: a line or two, no traceback, whether Prefect had started or not."""

import argparse
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import flows
from flows.cli import main
from flows.commands import _find_preset_and_overrides, _suggest_commands
from flows.flows import StageLog
from pipeline.arguments import options_from_arguments, parse_arguments
from pipeline.commands import COMMANDS
from pipeline.config import Options, load_options, phases_to_train
from pipeline.run.run_directory import RunFolder
from tests.conftest import of_kind
from tests.flows.api import PATIENCE, ROOT, clean_environment, haed, python, until


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "quickstat"], 2, "Did you mean quickstart"),
        (["source.kind=text", "source.path=nowhere"], 1, "source.path=nowhere: no such file or folder"),
        (["nowhere"], 1, "no run 'nowhere'"),
        (["iem.correction=none"], 2, "Set iem.correction=inclusion, or model.mixture.known=0"),
    ],
)
def test_what_is_wrong_is_said_before_prefect_starts(
    arguments: list[str], status: int, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == status
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert list(here.iterdir()) == []


def resume(*words: str) -> Options:
    """The options of the flow of `haed run WORDS`."""
    asked = argparse.Namespace(config=None, words=list(words))
    return load_options(*_find_preset_and_overrides(asked, options_from_arguments(asked)))


def test_a_run_that_was_renamed_goes_on_in_its_folder(tiny: list[str], tmp_path: Path) -> None:
    made = RunFolder.create(load_options("quickstart", [*tiny, "name=first"]))
    (tmp_path / "elsewhere").mkdir()
    moved = made.path.rename(tmp_path / "elsewhere" / "second")
    options = resume(str(moved), "seed=3")
    assert (options.name, options.runs_dir, options.seed) == ("second", str(moved.parent), 3)


@pytest.mark.parametrize("name", ["rate=1", "runs/rate=1"])
@pytest.mark.usefixtures("here")
def test_a_run_with_an_equals_sign_in_its_name_goes_on(name: str, tiny: list[str]) -> None:
    RunFolder.create(load_options("quickstart", [*tiny, "name=rate=1", "runs_dir=runs"]))
    options = resume(name, "seed=3")
    assert (options.name, options.seed) == ("rate=1", 3)


def test_a_run_that_starts_from_another_trains_phase_two_alone() -> None:
    options = load_options("quickstart", ["finetune.start_from=other"])
    assert phases_to_train(options) == ("finetune",)
    assert StageLog(options).describe_plan().startswith("6 stages: shard, finetune, evaluate, index, sample, report.")


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ([], ["sample", "next", "neighbours"]),
        (["chunker.kind=pixels", "source.kind=images", "source.path=/"], ["sample", "neighbours", "evaluate"]),
        (["chunker.kind=fixed", "source.kind=audio", "source.path=/"], ["sample", "neighbours", "evaluate"]),
        (["model.kind=hourglass", "evaluate.split=valid"], ["sample", "evaluate", "profile"]),
        (["index.space=contexts"], ["sample", "next", "neighbours"]),
    ],
)
def test_three_lines_say_what_to_do_next(words: list[str], commands: list[str]) -> None:
    options = load_options("quickstart", words)
    lines = _suggest_commands(options, "runs/quickstart")
    asked = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [command for command, *_ in asked] == commands
    assert all(parse_arguments(line, "haed", COMMANDS).run == "runs/quickstart" for line in asked)
    assert not any(f"evaluate.split={options.evaluate.split}" in line for line in lines)
    assert ("--context" in asked[-1]) == (options.index.space == "contexts")


@pytest.mark.slow
def test_what_a_flow_finds_wrong_ends_it_in_a_line(tiny: list[str], text: Path, tmp_path: Path, api: str) -> None:
    """Before the corpus is cut, before a training, and in a stage. One process runs all, since it loads for seconds."""
    (tmp_path / "train.py").write_bytes((text / "train-textwrap.py").read_bytes())
    uneven = [*of_kind("hourglass", tiny), "model.hourglass.hierarchy=1@1 1@9999 1@1", "shards_dir=uncut"]
    wrong = {
        "hierarchy": ["name=long", *uneven],
        "empty": [*tiny, "name=empty", "source.path=train.py"],
        "failing": [*tiny, "name=failing", "resume=required"],
    }
    code = (
        "import json, sys; from flows.cli import main\n"
        "for words in json.loads(sys.argv[1]): print('status', main(['run', *words]), file=sys.stderr)"
    )
    done = python(tmp_path, "-c", code, json.dumps(list(wrong.values())), PREFECT_API_URL=api)
    hierarchy, _, empty, of_empty, failing, of_failing, rest = re.split(r"status (\d)\n", done.stderr)
    assert rest == "" and "Traceback" not in done.stderr + done.stdout and of_empty == of_failing == "1"
    assert "factor 9999 exceeds the" in hierarchy and not (tmp_path / "uncut").exists()
    assert "the test split of" in empty and "evaluate.split=test cannot be read" in empty
    assert not (tmp_path / "runs" / "empty").exists()
    assert "has no checkpoint. Use resume=auto to start" in failing


@pytest.mark.slow
def test_the_flow_of_contributing_passes_the_test_of_contributing(
    whole: Path, tmp_path: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path, code in re.findall(r"```python\n# ((?:tests/)?flows/\w*sizes.py)\n(.*?)```", text, re.DOTALL):
        (tmp_path / Path(path).name).write_text(code)
    monkeypatch.setattr(flows, "__path__", [*flows.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "flows.sizes", None)  # both are removed at the end
    monkeypatch.setattr(flows, "sizes", None, raising=False)
    del sys.modules["flows.sizes"]
    (test,) = (value for name, value in runpy.run_path(str(tmp_path / "test_sizes.py")).items() if name[:5] == "test_")
    test(whole, api)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_home")
@pytest.mark.timeout(1800)
def test_a_signal_to_all_its_processes_leaves_a_checkpoint_and_nothing_else(tiny: list[str], tmp_path: Path) -> None:
    """As `timeout`, a batch system or a container's end sends it: the server must not be gone before the flow."""
    words = [*tiny, "name=ended", "pretrain.steps=100000", "validation.times=0", "checkpoint.every_steps=10"]
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", *words],
        cwd=tmp_path,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        latest = tmp_path / "runs/ended/pretrain/checkpoints/latest"
        try:
            until(PATIENCE, latest.is_file)
            family = psutil.Process(process.pid).children(recursive=True)
            assert any("flows.server" in " ".join(child.cmdline()) for child in family)
            os.killpg(process.pid, signal.SIGTERM)
            said = process.communicate()[1]
        finally:
            process.kill()
    assert process.returncode == 143 and "stopped and saved. Run the same command to resume" in said
    assert "Traceback" not in said and 0 < int(latest.read_text().strip().removeprefix("step-")) < 100_000
    assert not psutil.wait_procs(family, PATIENCE)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_home")
@pytest.mark.timeout(1800)
def test_a_whole_run_says_its_stages_first_and_each_result_once(tiny: list[str], tmp_path: Path, api: str) -> None:
    words = [word for word in tiny if "runs_dir" not in word]
    done = haed(tmp_path, "run", *words, "name=whole", "log_steps=1")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    stages = ["shard", "pretrain", "finetune", "evaluate", "index", "sample", "report"]
    begun = [line for line in said if re.fullmatch(r"stage \d of 7: \w+(, .*)?", line) and " took " not in line]
    assert [line.split()[4].rstrip(",") for line in begun] == stages
    assert "stage 2 of 7: pretrain, 6 steps of training" in said
    (plan,) = (line for line in said if line.startswith("7 stages: shard, pretrain, finetune"))
    assert "pretrain 6 steps, finetune 4 steps" in plan and said.index(plan) < said.index(begun[0])
    assert sum("validation" in line and "step 3" in line for line in said) == 1
    for result in (" bits/char, test, finetune step 4", "recall@10", "6 steps in ", "report.html"):
        assert sum(result in line for line in said) == 1, result
    again = haed(tmp_path, "run", *words, "name=whole", PREFECT_API_URL=api)
    assert "stage 4 of 7: evaluate, already done" in again.stderr.splitlines()


@pytest.mark.slow
def test_another_source_for_a_run_is_refused_before_it_is_cut(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shard", *tiny, "name=mine"]) == main(["train", *tiny, "name=mine", "train.steps=1"]) == 0
    made = sorted(tmp_path.glob("shards/*/manifest.json"))
    (tmp_path / "other.txt").write_text("another text, of which nothing was trained. " * 200)
    capsys.readouterr()
    assert main(["run", *tiny, "name=mine", f"source.path={tmp_path / 'other.txt'}"]) == 1
    said = capsys.readouterr().err
    assert "was trained on another corpus: source.path=" in said and "Use another name=" in said
    assert sorted(tmp_path.glob("shards/*/manifest.json")) == made
