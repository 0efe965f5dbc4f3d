"""How serving and its flows end: by a signal, or killed; what trains saves first, and what was lost is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.run.run_directory import RunFolder
from tests.flows.api import PATIENCE, call, clean_environment, has_begun, until
from tests.flows.conftest import SETTINGS, Served, at_rest, engine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.usefixtures("corpus")]
ARGUMENTS = ("--trainings", "0")
ENDLESS = ["train.steps=1000000", "checkpoint.every_steps=1000000", "checkpoint.every_seconds=null"]


def running(served: Served) -> Any:
    """Names of runs, stages too, that the server takes for running."""
    of_them = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    return [run["name"] for run in call(served.address, "/flow_runs/filter", of_them)]


def steps(folder: Path) -> int:
    return len(folder.read_text().splitlines()) if folder.is_file() else 0


SLOW = ["batch.sequences=16", "batch.context=128", "model.encoder.hidden=256"]  # seconds a step
SLOW += ["model.decoder.width=384", "model.decoder.ffn=1536"]
# How it ends, and the trainings that run then: one of a moment a step, or one whose step outlives every patience.
ENDS: dict[str, tuple[Callable[[subprocess.Popen[bytes]], None], dict[str, list[str]]]] = {
    "SIGTERM": (lambda process: process.terminate(), {"slow": SLOW, "fast": []}),
    "Ctrl-C in a terminal": (lambda process: os.killpg(process.pid, signal.SIGINT), {"quick": []}),
    "kill -9": (lambda process: process.kill(), {"heavy": SLOW}),
}


def test_however_serving_ends_trainings_save_no_process_is_left_and_the_next_one_settles_every_record(
    served: Served,
) -> None:
    """What saves is the end alone, as nothing else is due. Beside kill -9 there are an evaluation and a `haed run`."""
    for how, (end, trainings) in ENDS.items():
        if how == "kill -9":
            kill_a_direct_run(served)
        runs = {
            name: served.trigger("train", {"overrides": [*SETTINGS, *ENDLESS, *more, f"name={name}"]})
            for name, more in trainings.items()
        }
        for name in trainings:
            metrics = served.folder / "runs" / name / "train/metrics.jsonl"
            until(PATIENCE, lambda metrics=metrics: has_begun(metrics))
        family = psutil.Process(served.process.pid).children(recursive=True)
        if how == "kill -9":
            with at_rest([engine(served)]):
                runs |= evaluate(served)
            family = psutil.Process(served.process.pid).children(recursive=True)
            served.cancel(runs["heavy"])  # it has not ended when the kill comes
        if how == "SIGTERM":  # one that has not begun is ended, too, and its error is not the server's
            runs["starting"] = served.trigger("report", {"run": "whole"})
            until(PATIENCE, lambda run=runs["starting"]: served.state(run) == "PENDING")
        end(served.process)
        status = served.process.wait(PATIENCE)
        assert not psutil.wait_procs(family, PATIENCE)[1], how
        assert status == (-signal.SIGKILL if how == "kill -9" else 0), how
        assert "Error logging to API" not in served.said()
        for name in trainings:
            assert (served.folder / "runs" / name / "train/checkpoints/latest").is_file(), (how, name)
        served.start()
        expected = dict.fromkeys(runs, "CRASHED") | ({"heavy": "CANCELLED"} if how == "kill -9" else {})
        assert {name: served.state(run) for name, run in runs.items()} == expected, how
        assert all("saved step " in served.message(runs[name]) for name in trainings), how
    assert not (served.folder / "runs/whole/evaluation.json").exists()  # it was killed, and did not finish
    assert RunFolder(served.folder / "runs/whole").user() is None
    assert running(served) == []


def kill_a_direct_run(served: Served) -> None:
    """A `haed run`, which has no process of the server's."""
    where = clean_environment(PREFECT_API_URL=f"{served.address}/api")
    command = [sys.executable, "-m", "flows.cli", "run", *SETTINGS, "name=direct", "pretrain.steps=1000000"]
    with (
        open(served.folder / "direct", "wb") as said,
        subprocess.Popen(command, cwd=served.folder, env=where, stdout=said, stderr=said) as direct,
    ):
        until(PATIENCE, (served.folder / "runs/direct/pretrain/metrics.jsonl").is_file)
        direct.kill()


def evaluate(served: Served, name: str = "whole") -> dict[str, str]:
    """Flow runs that are not trainings: `haed`, which evaluates now, and its stage."""
    slow = [*SETTINGS, "batch.context=512", "evaluate.stride=1", "evaluate.sequences=1", "evaluate.baselines=false"]
    slow += ["model.decoder.width=1024"]
    whole = served.trigger("haed", {"overrides": [*slow, f"name={name}"]})  # last, so that it runs when it is killed
    of_stage = {"flow_runs": {"name": {"any_": [f"evaluate {name}"]}}}
    stage = until(PATIENCE, lambda: call(served.address, "/flow_runs/filter", of_stage))[0]["id"]
    until(PATIENCE, lambda: any(line.startswith("scoring ") for line in served.lines(stage)))
    with (
        pytest.raises(BlockingIOError, match=f"in use by process .*haed {name}"),
        RunFolder(served.folder / "runs" / name).reserve(),
    ):
        pass  # nor between its stages, which hold no lock of the run
    return {"whole": whole, "evaluate": stage}


@pytest.mark.parametrize("how", ["cancelled", "deleted"])
def test_a_run_that_is_stopped_while_it_evaluates_ends_soon(served: Served, how: str) -> None:
    runs, process = evaluate(served, how), engine(served)
    if how == "deleted":
        call(served.address, f"/flow_runs/{runs['whole']}", method="DELETE")
    else:
        served.cancel(runs["whole"])
    gone, alive = psutil.wait_procs([process], PATIENCE)
    assert gone and not alive and not (served.folder / "runs" / how / "evaluation.json").exists()
    until(PATIENCE, lambda: running(served) == [])
    assert how == "deleted" or served.state(runs["whole"]) == "CANCELLED"
    assert "Traceback" not in served.said()


def test_cancel_within_a_validation_of_minutes_saves_the_last_step(served: Served) -> None:
    """It would be killed after 30 s if it waited for the end: two million bytes are scored by a model that takes long."""
    (served.folder / "long").mkdir()
    for split, lines in (("train", 2_000), ("valid", 100_000), ("test", 10)):
        (served.folder / "long" / f"{split}.txt").write_text("".join(f"line {n} of a text\n" for n in range(lines)))
    long = [*SETTINGS, *SLOW, "source.path=long", "batch.sequences=1", "train.steps=4", "model.decoder.width=1024"]
    long += ["validation.times=4", "validation.windows=1000000", "name=validated"]
    served.work("shard", *long)
    run = served.trigger("train", {"overrides": long})
    until(PATIENCE, lambda: has_begun(served.folder / "runs/validated/train/metrics.jsonl"))
    served.cancel(run)
    until(PATIENCE, lambda: served.state(run) == "CANCELLED")
    assert served.message(run) == "saved step 1 of train; Retry resumes from there"
    latest = served.folder / "runs/validated/train/checkpoints/latest"
    assert latest.read_text().strip() == "step-00000001"


def test_what_a_kill_took_is_said(served: Served) -> None:
    metrics = served.folder / "runs/killed/train/metrics.jsonl"
    run = served.trigger("train", {"overrides": [*SETTINGS, *ENDLESS, "name=killed", "log_steps=1"]})
    until(PATIENCE, lambda: steps(metrics) > 20)
    engine(served).kill()
    until(PATIENCE, lambda: served.state(run) == "CRASHED")
    until(PATIENCE, lambda: "no step of train was saved, so its steps are lost" in "".join(served.lines(run)))
    served.set_state(run, "SCHEDULED", "AwaitingRetry")
    until(PATIENCE, lambda: "the steps after 0, up to at least " in "".join(served.lines(run)))
    before = steps(metrics)
    until(PATIENCE, lambda: steps(metrics) > before)
    engine(served).send_signal(signal.SIGSTOP)  # as a step that takes longer than Prefect waits
    served.cancel(run)
    until(PATIENCE, lambda: served.state(run) == "CANCELLED")
    lost = "no step of train was saved, so its steps are lost"
    assert served.message(run).startswith(f"killed, because it did not end within 30 s after Cancel: {lost}")
