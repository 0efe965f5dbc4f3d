"""`haed serve` for real: a server, every flow as a deployment; flows triggered, killed and retried through its API."""

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.flows.api import call, until
from tests.flows.conftest import Served

DONE = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
FLOWS = {
    "haed",
    "shard",
    "pretrain",
    "finetune",
    "train",
    "evaluate",
    "sample",
    "index",
    "neighbours",
    "compare",
    "report",
}
SETTINGS = [*TINY, "source.kind=text", "source.path=text", "validation.times=0", "checkpoint.every_steps=10"]


def retry(served: Served, run: str) -> None:
    state = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    until(30, lambda: call(served.address, f"/flow_runs/{run}/set_state", state))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    latest = (folder / "train/checkpoints/latest").read_text().strip()
    assert latest == "step-00000600"
    return load_file(folder / "train/checkpoints" / latest / "model.safetensors")


def engine(served: Served) -> psutil.Process:
    """The process of the flow that runs now."""
    children = psutil.Process(served.process.pid).children()
    return next(child for child in children if "PREFECT__FLOW_RUN_ID" in child.environ())


@pytest.mark.timeout(240)
def test_kills_and_retries_end_in_the_same_bits(served: Served) -> None:
    """-9 to the flow's process, to the server, and to `haed serve`, each while a training runs."""
    assert served.deployments().keys() == FLOWS
    with urllib.request.urlopen(served.address, timeout=10) as page:
        assert b"<html" in page.read().lower()
    run = served.trigger("shard", {"overrides": SETTINGS})
    until(60, lambda: served.state(run) == "COMPLETED")
    wrong = served.trigger("train", {"overrides": ["train.step=3"]})
    refused = until(60, lambda: served.state(wrong) in DONE and call(served.address, f"/flow_runs/{wrong}"))
    assert refused["state_type"] == "FAILED" and "train.step" in refused["state"]["message"]

    runs = {}
    for name in ("alone", "flow", "server", "serve"):
        overrides = [*SETTINGS, "train.steps=600", f"name={name}"]
        runs[name] = served.trigger("train", {"overrides": overrides})
        if name == "alone":
            until(60, lambda: served.state(runs["alone"]) == "COMPLETED")
            continue
        until(60, (served.folder / "runs" / name / "train/checkpoints/latest").is_file)
        if name == "flow":
            engine(served).kill()
            until(60, lambda: served.state(runs["flow"]) == "CRASHED")
            retry(served, runs["flow"])
        elif name == "server":
            server = subprocess.run(["pgrep", "-f", f"server start .*--port {served.port}"], capture_output=True)
            os.kill(int(server.stdout.split()[0]), signal.SIGKILL)
        else:
            flow = engine(served)
            served.process.kill()
            served.process.wait()
            flow.wait(15)
            served.start()
            assert served.state(runs["serve"]) == "CRASHED" and "marked as crashed: train serve" in served.said()
            retry(served, runs["serve"])
        until(90, lambda run=runs[name]: served.state(run) == "COMPLETED")
    expected = weights(served.folder / "runs/alone")
    for name in runs:
        found = weights(served.folder / "runs" / name)
        assert all(torch.equal(found[key], value) for key, value in expected.items()), name


@pytest.mark.timeout(120)
def test_cancel_ends_all_processes_of_a_training_and_workers_of_a_pool_run_flows_in_its_folder(served: Served) -> None:
    run = served.trigger("shard", {"overrides": SETTINGS})
    until(60, lambda: served.state(run) == "COMPLETED")
    together = [*SETTINGS, "train.steps=100000", "name=together", "launcher.processes=2"]
    run = served.trigger("train", {"overrides": together})
    latest = served.folder / "runs/together/train/checkpoints/latest"
    until(60, latest.is_file)
    below = psutil.Process(served.process.pid).children(recursive=True)
    training = [child for child in below if "pipeline" in " ".join(child.cmdline())]
    assert len(training) >= 3  # torchrun and its two
    again = served.trigger("train", {"overrides": together})
    second = until(60, lambda: served.state(again) in DONE and call(served.address, f"/flow_runs/{again}"))
    said = second["state"]["message"]
    assert second["state_type"] == "FAILED" and "is in use by process" in said and "flow run 'train together" in said
    call(served.address, f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    until(30, lambda: served.state(run) == "CANCELLED")
    gone, alive = psutil.wait_procs(training, 5)
    assert not alive and 0 < int(latest.read_text().strip().removeprefix("step-")) < 100_000

    # A worker's own choice is a temporary folder, which it deletes with all that a run has written.
    call(served.address, "/work_pools/", {"name": "gpus", "type": "process"})
    where = os.environ | {"PREFECT_API_URL": f"{served.address}/api", "PYTHONPATH": os.getcwd()}
    for pool, status in (("none", 1), ("gpus", 0)):
        command = [sys.executable, "-m", "flows.cli", "deploy", "--pool", pool]
        done = subprocess.run(command, cwd=served.folder, env=where, capture_output=True, text=True)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert len(done.stdout.splitlines()) == (11 if status == 0 else 0)
        assert ("error: no work pool 'none'" in done.stderr) == (status == 1)
    made = call(served.address, "/automations/filter", {})
    assert [item["name"] for item in made] == ["haed: silent runs of gpus"] and made[0]["enabled"]

    run = served.trigger("shard", {"overrides": [*SETTINGS, "shards_dir=pooled"]}, "gpus")
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpus", "--run-once"]
    elsewhere = served.folder / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(command, cwd=elsewhere, env=where, capture_output=True, text=True)
    assert served.state(run) == "COMPLETED", done.stderr
    assert list(served.folder.glob("pooled/**/*.tar")) and not list(elsewhere.iterdir())
