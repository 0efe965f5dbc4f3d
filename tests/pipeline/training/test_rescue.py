"""A run whose folder is removed, moved or replaced while it is trained: never half of a run in its place."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from data.filesystem import FolderLostError
from pipeline import ROOT, open_run
from pipeline.cli import main
from pipeline.config import Options, dump_options
from pipeline.reporting import report
from pipeline.run import opened
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.run_directory import RunFolder
from pipeline.training import stages
from pipeline.training.trainer import Validation
from tests.conftest import mostly_nightly
from tests.pipeline.conftest import CommandLine


def remove(run: Path) -> None:
    """Until it is gone: the thread that saves may write into a folder that is being emptied."""
    while run.exists():
        shutil.rmtree(run, ignore_errors=True)


def remove_and_begin_anew(run: Path) -> None:
    remove(run)
    run.mkdir()
    (run / "config.yaml").write_text("of another process")


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def swap_for_a_link(run: Path) -> None:
    other = run.with_name("other")
    with suppress(shutil.Error):  # a checkpoint got its name while it was copied
        shutil.copytree(run, other)
    run.rename(run.with_name("moved"))
    run.symlink_to(other)


def remove_the_lock(run: Path) -> None:
    (run / "lock").unlink()


def replace_the_lock(run: Path) -> None:
    (run / "lock").unlink()
    (run / "lock").touch()


def remove_all_runs(run: Path) -> None:
    remove(run.parent)


def once(change: Callable[[Path], None], run: Path, at: int = 3) -> Callable[[], bool]:
    """A stop that never stops, and changes the folder of the run after a step."""
    calls = iter(range(1, 1000))

    def stop() -> bool:
        if next(calls) == at:
            change(run)
        return False

    return stop


def content(folder: Path) -> dict[str, bytes]:
    """All but what was being written when it was copied."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".partial" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


GONE = [remove, remove_and_begin_anew, remove_the_lock, replace_the_lock]


@pytest.fixture
def lasting(options: Options) -> Options:
    options.checkpoint.every_steps, options.train.steps = 2, 12
    return options


@pytest.mark.parametrize("change", mostly_nightly(GONE, remove))
def test_a_run_that_is_gone_is_saved_beside_and_goes_on_there(
    change: Callable[[Path], None], lasting: Options, haed: CommandLine
) -> None:
    run = RunFolder.from_options(lasting).path
    with pytest.raises(FolderLostError) as error:
        stages.train(lasting, once(change, run))
    there = {path.name for path in run.parent.iterdir()}
    assert there == {"tiny-rescued-1", *(() if change is remove else ("tiny",))}
    rescued = run.with_name("tiny-rescued-1")
    assert f"saved in {rescued}. Run `haed train {rescued}` to resume" in str(error.value)
    if change is remove_and_begin_anew:
        assert content(run) == {"config.yaml": b"of another process"}
    assert open_run(rescued).step == 3
    done = haed.json("train", rescued)
    assert (done["resumed_from"], done["steps"]) == (3, 12)
    steps = [json.loads(line)["step"] for line in (rescued / "train" / "metrics.jsonl").read_text().splitlines()]
    assert steps[0] == 1 and steps == sorted(steps)


@pytest.mark.parametrize("change", [move, swap_for_a_link])
def test_a_run_that_is_moved_is_saved_where_it_lies_now(change: Callable[[Path], None], lasting: Options) -> None:
    run = RunFolder.from_options(lasting).path
    before: dict[str, bytes] = {}

    def changed(path: Path) -> None:
        change(path)
        before.update(content(run.with_name("other")))

    with pytest.raises(FolderLostError, match=f"saved in {run.with_name('moved')}"):
        stages.train(lasting, once(changed, run))
    assert open_run(run.with_name("moved")).step == 3
    assert content(run.with_name("other")) == before
    assert run.is_symlink() == (change is swap_for_a_link) and run.exists() == run.is_symlink()


@pytest.mark.parametrize("at", ["validation", "saving"])
def test_a_moved_run_keeps_its_best_step(at: str, lasting: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its folder is moved when the validation that improved is done, or while its checkpoint is written."""
    run, scores = RunFolder.from_options(lasting).path, iter([9.0, 8.0])
    lasting.validation.times, lasting.checkpoint.every_steps = 2, 99
    write = Checkpoints._write_checkpoint

    def move_at(place: str, step: int) -> None:
        if place == at and step == 12 and run.exists():
            move(run)

    def score(validation: Validation, *_: object) -> dict[str, float]:
        value = next(scores)
        move_at("validation", 12 if value == 8.0 else 6)
        return {validation.metric_name: value}

    def write_then(self: Checkpoints, step: int, *rest: Any) -> None:
        move_at("saving", step)
        write(self, step, *rest)

    monkeypatch.setattr(Validation, "score", score)
    monkeypatch.setattr(Checkpoints, "_write_checkpoint", write_then)
    with pytest.raises(FolderLostError, match="step 12 was saved in"):
        stages.train(lasting)
    folder = run.with_name("moved") / "train" / "checkpoints"
    newest = Checkpoints(folder).load_newest()
    assert newest is not None and (newest.step, newest.state["best"]) == (12, 8.0)
    assert (folder / "best").read_text().strip() == "step-00000012"


def test_files_that_a_cleaner_took_are_written_again(lasting: Options, caplog: pytest.LogCaptureFixture) -> None:
    run = RunFolder.from_options(lasting).path
    files = ["config.yaml", "corpus.json", "environment.json", "train/metrics.jsonl"]
    before: dict[str, bytes] = {}

    def clean(run: Path) -> None:
        before.update({name: (run / name).read_bytes() for name in files})
        for name in files:
            (run / name).unlink()

    stages.train(lasting, once(clean, run))
    assert all(f"{run / name} was removed" in caplog.text for name in files)
    assert {name: (run / name).read_bytes() for name in files[:3]} == {name: before[name] for name in files[:3]}
    metrics = (run / files[3]).read_bytes()
    steps = {json.loads(line)["step"] for line in metrics.splitlines()}
    assert metrics.startswith(before[files[3]]) and {1, 12} <= steps
    assert open_run(run).step == 12 and main(["compare", str(run)]) == 0


def test_where_no_place_is_left_nothing_is_made(lasting: Options) -> None:
    run = RunFolder.from_options(lasting).path
    with pytest.raises(FolderLostError, match="could not be saved beside the run either: No such file or directory"):
        stages.train(lasting, once(remove_all_runs, run))
    assert not run.parent.exists()


def test_the_last_step_is_not_said_to_be_saved_where_it_is_not(lasting: Options) -> None:
    lasting.train.steps = 3
    with pytest.raises(FolderLostError, match="saved in"):
        stages.train(lasting, once(remove, RunFolder.from_options(lasting).path))


@pytest.mark.parametrize("stage", ["evaluate", "sample", "index", "analyse", "report"])
def test_no_reader_makes_a_run_anew(stage: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed as soon as its model was read, or, for a report, its metrics."""

    def then_remove(call: Callable[..., object]) -> Callable[..., object]:
        def called(*given: object, **named: object) -> object:
            found = call(*given, **named)
            shutil.rmtree(run, ignore_errors=True)
            return found

        return called

    monkeypatch.setattr(opened, "load_weights", then_remove(opened.load_weights))
    monkeypatch.setattr(report, "load_run_report", then_remove(report.load_run_report))
    assert main([stage, str(run), *(["evaluate.baselines=false"] if stage == "evaluate" else [])]) > 0
    assert not run.exists()


@pytest.mark.nightly
def test_a_training_in_its_own_process_ends_with_an_error(lasting: Options, tmp_path: Path) -> None:
    lasting.train.steps = 1_000_000
    config = tmp_path / "config.yaml"
    config.write_text(dump_options(lasting))
    run = RunFolder.from_options(lasting).path
    command = [sys.executable, "-m", "pipeline", "train", "--config", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        while not list(run.glob("train/checkpoints/step-*")) and process.poll() is None:
            time.sleep(0.1)
        remove(run)
        error = process.communicate()[1].splitlines()[-1]
    finally:
        process.kill()
    assert process.returncode == 1 and error.startswith("error: ") and "to resume" in error
    assert not run.exists()
