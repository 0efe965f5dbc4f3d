"""The state of a run, from its folder alone."""

import json
import shutil
from pathlib import Path

from pipeline.reporting import run_state
from pipeline.reporting.run_state import determine_state, phase_metrics
from pipeline.run.metrics import encode_record
from pipeline.run.run_directory import RunFolder
from tests.conftest import write_state


def change(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(old, new))


def test_how_far_a_run_is(run: Path) -> None:
    folder = RunFolder(run)
    assert (determine_state(folder).word, determine_state(folder).running) == ("finished", False)
    with folder.lock():
        found = determine_state(folder)
        assert (found.word, found.running) == ("training", True) and "process" in str(found.holder)
    change(run, "  steps: 4\n", "  steps: 8\n")
    found = determine_state(folder)
    assert (found.word, found.phase, found.step, found.share) == ("stopped", "finetune", 4, 0.5) and found.left
    latest = run / "finetune" / "checkpoints" / "step-00000004" / "state.json"
    saved = latest.read_text()
    write_state(latest, json.loads(saved) | {"step": 6})  # as if it was stopped between two lines of metrics
    assert (determine_state(folder).step, determine_state(folder).share) == (6, 0.75)
    latest.write_text(saved)
    change(run, "  patience: 0", "  patience: 1")
    write_state(latest, json.loads(latest.read_text()) | {"stale": 1})
    assert determine_state(folder).word == "finished"
    shutil.rmtree(run / "finetune" / "checkpoints")  # from which nothing can go on
    assert (determine_state(folder).word, determine_state(folder).step) == ("stopped", 0)
    for name in ("finetune", "pretrain"):
        (run / name / "metrics.jsonl").unlink()
    assert determine_state(folder).word == "not trained"


def test_the_last_validation_is_found_however_long_ago(run: Path) -> None:
    path = run / "finetune" / "metrics.jsonl"
    validation = determine_state(RunFolder(run)).validation
    assert validation is not None
    padding = {f"filler_{number}": 1.0 / 3 for number in range(30)}
    with path.open("ab") as file:
        for number in range(3000):  # two megabytes
            file.write(encode_record({"step": 4 + number / 1e6, "loss": 1.0} | padding))
    with RunFolder(run).lock():
        found = determine_state(RunFolder(run))
    assert (found.validation, found.metrics["loss"]) == (validation, 1.0)


def test_one_version_of_a_file_of_metrics_is_kept(run: Path) -> None:
    path = run / "finetune" / "metrics.jsonl"
    for number in range(20):
        with path.open("ab") as file:
            file.write(encode_record({"step": 4.0, "loss": float(number)}))
        assert phase_metrics(RunFolder(run))["finetune"][-1]["loss"] == number  # of the step of the checkpoint
    assert [each for each in run_state._records if each == path] == [path]
    assert len(run_state._records) <= run_state._KEPT
    assert phase_metrics(RunFolder(run))["finetune"] == phase_metrics(RunFolder(run))["finetune"]


def test_looking_at_a_lock_takes_it_from_nobody(run: Path) -> None:
    folder = RunFolder(run)
    assert folder.lock_holder() is None
    with folder.lock():
        assert folder.lock_holder() and folder.lock_holder()
    with folder.lock():
        pass
    (run / "lock").unlink()
    assert folder.lock_holder() is None


def test_a_phase_that_was_killed_before_its_first_checkpoint_does_not_count(run: Path) -> None:
    """One that had ended counts, though its checkpoints were deleted. So does one whose limits cannot be read."""
    folder = RunFolder(run)
    shutil.rmtree(run / "finetune" / "checkpoints")
    assert list(phase_metrics(folder)) == ["pretrain", "finetune"]
    change(run, "  steps: 4\n", "  steps: 8\n")  # it was to train longer
    assert list(phase_metrics(folder)) == ["pretrain"]
    with folder.lock():
        assert list(phase_metrics(folder)) == ["pretrain", "finetune"]
    (run / "config.yaml").write_text("{")
    assert list(phase_metrics(folder)) == ["pretrain", "finetune"]
