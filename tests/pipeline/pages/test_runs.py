"""What is said of a run's folder: how far it is, which checkpoints lie there, what it changes of a preset."""

import json
import re
from pathlib import Path

import pytest

from pipeline.pages import details, runs
from pipeline.pages.details import draw_curves
from pipeline.run.run_directory import RunFolder
from tests.conftest import write_state


def change(run: Path, old: str, new: str) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace(old, new))


def test_how_far_a_run_is(run: Path) -> None:
    folder = RunFolder(run)
    assert (runs.determine_state(folder).word, runs.determine_state(folder).running) == ("finished", False)
    with folder.lock():
        found = runs.determine_state(folder)
        assert (found.word, found.running) == ("training", True) and "process" in str(found.holder)
    change(run, "  steps: 4\n", "  steps: 8\n")
    found = runs.determine_state(folder)
    assert (found.word, found.phase, found.step, found.share) == ("stopped", "finetune", 4, 0.5) and found.left
    latest = run / "finetune" / "checkpoints" / "step-00000004" / "state.json"
    saved = latest.read_text()
    write_state(latest, json.loads(saved) | {"step": 6})  # as if it was stopped between two lines of metrics
    assert (runs.determine_state(folder).step, runs.determine_state(folder).share) == (6, 0.75)
    latest.write_text(saved)
    change(run, "  patience: 0", "  patience: 1")
    write_state(latest, json.loads(latest.read_text()) | {"stale": 1})
    assert runs.determine_state(folder).word == "finished"
    for name in ("finetune", "pretrain"):
        (run / name / "metrics.jsonl").unlink()
    assert runs.determine_state(folder).word == "not trained"


def test_looking_at_a_lock_takes_it_from_nobody(run: Path) -> None:
    folder = RunFolder(run)
    assert folder.lock_holder() is None
    with folder.lock():
        assert folder.lock_holder() and folder.lock_holder()
    with folder.lock():
        pass
    (run / "lock").unlink()
    assert folder.lock_holder() is None


def test_checkpoints_have_the_scores_of_their_steps(run: Path) -> None:
    found = details.describe_checkpoints(RunFolder(run))
    assert [(each.phase, each.step) for each in found][-2:] == [("finetune", 2), ("finetune", 4)]
    assert [each.notes for each in found if "asked" in each.notes] == [["best", "latest", "asked"]]
    records = [json.loads(line) for line in (run / "finetune" / "metrics.jsonl").read_text().splitlines()]
    score = next(r["validation/bits_per_token"] for r in records if r["step"] == 4 and "validation/bits_per_token" in r)
    assert found[-1].score == score and found[-1].unit == "bits per token"
    (run / "finetune" / "checkpoints" / "step-00000002" / "state.json").write_text("{")
    assert details.describe_checkpoints(RunFolder(run))[-2].digest is None


def test_what_a_run_changes_of_its_preset(run: Path) -> None:
    found = details.summarise_configuration(RunFolder(run))
    assert found is not None and found.preset == "quickstart"
    changed = {each.key: (each.was, each.now) for each in found.changed}
    assert changed["finetune.steps"] == (None, 4) and "name" not in changed and "seed" not in changed


@pytest.mark.parametrize("points", [1, 2, 10_000])
def test_curves_stay_small_and_inside(points: int) -> None:
    records = [{"step": n, "seconds": 0.5 * n, "bits_per_token": 9 / (n + 1)} for n in range(points)]
    records.append({"step": points, "seconds": 0.5 * points, "validation/bits_per_token": 2.0})
    drawn = draw_curves({"train": records})
    places = [float(x) for pair in re.findall(r"points='([^']*)'", drawn) for x in re.split("[ ,]", pair)]
    assert len(drawn) < 10_000 and places and 0 <= min(places) and max(places) <= 460 and "nan" not in drawn
    assert draw_curves({}) == ""
