"""What a killed process leaves: nothing that runs, no record that says it runs, and a word on what was lost."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.flows import FLOWS
from flows.states.heartbeat import ASKS, LONG, TRAINS
from tests.flows.api import PATIENCE, call, until
from tests.flows.conftest import SETTINGS, Served, engine

ENDLESS = ["train.steps=1000000", "checkpoint.every_steps=1000000", "checkpoint.every_seconds=null"]


def lines(served: Served, run: str) -> list[str]:
    of_it = {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200}
    return [line["message"] for line in call(served.address, "/logs/filter", of_it)]


def running(served: Served) -> Any:
    """Names of runs, stages too, that the server takes for running."""
    of_them = {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}}
    return [run["name"] for run in call(served.address, "/flow_runs/filter", of_them)]


def steps(folder: Path) -> int:
    return len(folder.read_text().splitlines()) if folder.is_file() else 0


def test_every_flow_is_of_one_kind() -> None:
    assert sorted([*TRAINS, *LONG, *ASKS]) == sorted(flow.name for flow in FLOWS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_of_what_serves_ends_every_process_and_the_next_one_settles_every_record(served: Served) -> None:
    slow = [*SETTINGS, "batch.context=512", "evaluate.stride=1", "evaluate.sequences=1", "evaluate.baselines=false"]
    whole = served.trigger("haed", {"overrides": [*slow, "name=whole"]})
    evaluated = until(
        PATIENCE, lambda: call(served.address, "/flow_runs/filter", {"flows": {"name": {"any_": ["evaluate"]}}})
    )[0]["id"]
    until(PATIENCE, lambda: any(line.startswith("scoring ") for line in lines(served, evaluated)))

    clean = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT")}
    where = clean | {"PREFECT_API_URL": f"{served.address}/api", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "flows.cli", "run", *SETTINGS, "name=direct", "pretrain.steps=1000000"]
    with (
        open(served.folder / "direct", "wb") as said,
        subprocess.Popen(command, cwd=served.folder, env=where, stdout=said, stderr=said) as direct,
    ):
        until(PATIENCE, (served.folder / "runs/direct/pretrain/metrics.jsonl").is_file)
        family = psutil.Process(served.process.pid).children(recursive=True)
        assert engine(served) in family
        direct.kill()
    served.process.kill()
    served.process.wait()
    assert not psutil.wait_procs(family, PATIENCE)[1]
    assert not (served.folder / "runs/whole/evaluation.json").exists()  # it was killed, and did not finish
    served.start()
    assert served.state(whole) == served.state(evaluated) == "CRASHED" and running(served) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_question_is_answered_while_more_trainings_wait_than_prefect_has_places(served: Served) -> None:
    trained = served.trigger("haed", {"overrides": [*SETTINGS, "name=asked"]})
    until(PATIENCE, lambda: served.state(trained) == "COMPLETED")
    waiting = [served.trigger("train", {"overrides": [*SETTINGS, *ENDLESS, f"name=w{n}"]}) for n in range(7)]
    names = [f"/flow_runs/{run}" for run in waiting]
    until(PATIENCE, lambda: sum(call(served.address, each)["name"].endswith("waits for cpu") for each in names) == 6)
    asked = served.trigger("neighbours", {"run": "asked"})
    until(PATIENCE, lambda: served.state(asked) == "COMPLETED")
    assert {served.state(run) for run in waiting} == {"RUNNING"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_kill_took_is_said(served: Served) -> None:
    done = served.trigger("shard", {"overrides": SETTINGS})
    until(PATIENCE, lambda: served.state(done) == "COMPLETED")
    metrics = served.folder / "runs/killed/train/metrics.jsonl"

    run = served.trigger("train", {"overrides": [*SETTINGS, *ENDLESS, "name=killed", "log_steps=1"]})
    until(PATIENCE, lambda: steps(metrics) > 20)
    engine(served).kill()
    until(PATIENCE, lambda: served.state(run) == "CRASHED")
    until(
        PATIENCE, lambda: any("no step of train was saved: steps were lost, to " in line for line in lines(served, run))
    )

    state = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    call(served.address, f"/flow_runs/{run}/set_state", state)
    until(PATIENCE, lambda: any("steps after 0 were lost, to " in line for line in lines(served, run)))
    before = steps(metrics)
    until(PATIENCE, lambda: steps(metrics) > before)
    engine(served).send_signal(signal.SIGSTOP)  # as a step that takes longer than Prefect waits
    call(served.address, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(PATIENCE, lambda: served.state(run) == "CANCELLED")
    said = call(served.address, f"/flow_runs/{run}")["state"]["message"]
    assert said.startswith(
        "killed, as it had not ended 30 s after Cancel: no step of train was saved: steps were lost, to "
    )
