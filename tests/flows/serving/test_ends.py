"""How serving and its flows end: paused, suspended, deleted, by a signal; what trains saves first."""

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import SETTINGS, Served, engine


def has_begun(metrics: Path) -> bool:
    """Whether a first step was done: before it there is nothing to save, and a signal ends a training at once."""
    return metrics.is_file() and metrics.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_paused_suspended_or_deleted_saves_stops_and_can_be_resumed(served: Served) -> None:
    base = [*SETTINGS, "train.steps=1000000", "pretrain.steps=1000000", "checkpoint.every_steps=1000000"]
    base += ["checkpoint.every_seconds=null"]
    run = served.trigger("shard", {"overrides": base})
    until(PATIENCE, lambda: served.state(run) == "COMPLETED")
    for name, flow, phase in (
        ("paused", "train", "train"),
        ("suspended", "haed", "pretrain"),
        ("deleted", "train", "train"),
    ):
        run = served.trigger(flow, {"overrides": [*base, f"name={name}"]})
        lines = served.folder / "runs" / name / phase / "metrics.jsonl"
        until(PATIENCE, lambda lines=lines: has_begun(lines))
        process = engine(served)
        if name == "deleted":
            call(served.address, f"/flow_runs/{run}", method="DELETE")
        else:
            state = {
                "type": "PAUSED",
                "name": name.capitalize(),
                "state_details": {"pause_reschedule": name != "paused"},
            }
            call(served.address, f"/flow_runs/{run}/set_state", {"state": state})
        process.wait(PATIENCE)
        saved = int((lines.parent / "checkpoints/latest").read_text().strip().removeprefix("step-"))
        if name == "deleted":
            break
        assert served.state(run) == "PAUSED", name
        assert (
            call(served.address, "/flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}) == []
        )
        call(served.address, f"/flow_runs/{run}/resume", {})
        until(PATIENCE, lambda lines=lines, saved=saved: json.loads(lines.read_text().splitlines()[-1])["step"] > saved)
        assert served.state(run) == "RUNNING", name
        call(served.address, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        until(PATIENCE, lambda run=run: served.state(run) == "CANCELLED")


SLOW = [
    "batch.sequences=16",
    "batch.context=128",
    "model.encoder.hidden=256",
    "model.decoder.width=384",
]  # seconds a step
ENDS: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
    "SIGTERM": lambda process: process.terminate(),
    "Ctrl-C to it alone": lambda process: process.send_signal(signal.SIGINT),
    "Ctrl-C in a terminal": lambda process: os.killpg(process.pid, signal.SIGINT),
    "kill -9": lambda process: process.kill(),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("served", [("--trainings", "0")], indirect=True)
def test_however_serving_ends_slow_and_fast_trainings_save_first(served: Served) -> None:
    """Each kind of end once, or HAED_TURNS ends; what saves is the end alone, as nothing else is due."""
    base = [*SETTINGS, "train.steps=1000000", "checkpoint.every_steps=1000000", "checkpoint.every_seconds=null"]
    run = served.trigger("shard", {"overrides": base})
    until(PATIENCE, lambda: served.state(run) == "COMPLETED")
    for turn, (how, end) in zip(
        range(int(os.environ.get("HAED_TURNS", 4))), itertools.cycle(ENDS.items()), strict=False
    ):
        runs = {}
        for name, more in ((f"slow{turn}", [*SLOW, "model.decoder.ffn=1536"]), (f"fast{turn}", [])):
            runs[name] = served.trigger("train", {"overrides": [*base, *more, f"name={name}"]})
        for name in runs:
            metrics = served.folder / "runs" / name / "train/metrics.jsonl"
            until(PATIENCE, lambda metrics=metrics: has_begun(metrics))
        family = psutil.Process(served.process.pid).children(recursive=True)
        end(served.process)
        status = served.process.wait(PATIENCE)
        assert not psutil.wait_procs(family, PATIENCE)[1], how
        assert status == (-signal.SIGKILL if how == "kill -9" else 0), how
        for name in runs:
            assert (served.folder / "runs" / name / "train/checkpoints/latest").is_file(), (how, name)
        served.start("--trainings", "0")
        assert [served.state(run) for run in runs.values()] == ["CRASHED", "CRASHED"], how
