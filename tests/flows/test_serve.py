"""`haed serve` for real: a server, every flow as a deployment; flows triggered, killed and retried through its API."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import psutil
import pytest
import torch
from prefect.settings import PREFECT_RUNNER_PROCESS_LIMIT
from safetensors.torch import load_file

from flows.environment import deployment_suffix
from flows.flows import FLOWS
from tests.flows.api import PATIENCE, call, clean_environment, haed, has_begun, python, until
from tests.flows.conftest import SETTINGS, Served, at_rest, engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("corpus")]
DONE = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
STEPS = 120  # enough to be killed at a tenth of them


def answer(address: str, headers: dict[str, str]) -> int:
    """Status of what a page of a browser may send without asking first; to TensorBoard a GET."""
    method, body = ("POST", b"{}") if "/api/" in address else ("GET", None)
    kind = {"Content-Type": "application/json" if "evil" not in str(headers) else "text/plain"}
    answered = httpx2.request(method, address, content=body, headers=kind | headers, timeout=PATIENCE)
    assert answered.is_success or "Access-Control-Allow-Origin" not in answered.headers
    return answered.status_code


def kill_server(served: Served) -> None:
    """kill -9; `haed serve` starts it again."""
    command = ["pgrep", "-f", f"flows.server prefect .*--port {served.port}"]
    os.kill(int(subprocess.run(command, capture_output=True).stdout.split()[0]), signal.SIGKILL)


def check_weights(served: Served, *names: str) -> None:
    """All weights of some runs are the same at the last step."""
    checkpoints = [served.folder / "runs" / name / "train/checkpoints" for name in names]
    assert {(each / "latest").read_text().strip() for each in checkpoints} == {f"step-{STEPS:08d}"}
    expected, *others = (load_file(each / f"step-{STEPS:08d}/model.safetensors") for each in checkpoints)
    assert others and all(torch.equal(other[key], value) for other in others for key, value in expected.items())


def test_every_flow_is_served_and_other_hosts_are_refused(served: Served) -> None:
    assert served.deployments().keys() == {flow.name for flow in FLOWS}
    family = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]
    listens = {each.laddr for one in family for each in one.net_connections() if each.status == psutil.CONN_LISTEN}
    assert {("127.0.0.1", served.port), ("127.0.0.1", served.board)} <= listens
    assert {address for address, _ in listens} == {"127.0.0.1"}
    page = httpx2.get(served.address, timeout=PATIENCE, follow_redirects=True)
    assert "<html" in page.text.lower() and "frame-ancestors 'self'" in page.headers["Content-Security-Policy"]
    for server, path in ((served.address, "/api/flows/filter"), (f"http://127.0.0.1:{served.board}", "/data/runs")):
        assert answer(server + path, {}) == answer(server + path, {"Origin": server}) == 200
        assert answer(server + path, {"Origin": "https://evil.example"}) == 403
        assert answer(server + path, {"Host": "evil.example"}) == 403


def test_pages_of_runs_lead_to_forms_that_are_filled_in(served: Served) -> None:
    def follow(path: str) -> tuple[str, Any]:
        """The page to which an address leads, and the values of its form."""
        found = httpx2.get(f"{served.address}{path}", timeout=PATIENCE)
        assert found.status_code == 303
        place = urlsplit(found.headers["Location"])
        return place.path, json.loads(parse_qs(place.query)["parameters"][0])

    for flow, field in (("evaluate", "run"), ("finetune", "name")):
        place, filled = follow(f"/runs/w%C3%B6rter%20%26/form/{flow}")
        assert place == f"/v2/deployments/deployment/{served.deployments()[flow]}/run" and filled[field] == "wörter &"
    _, filled = follow("/runs/x/form/index?space=contexts&overrides=index.kind%3Dflat&run=y")
    assert filled == {"run": "x", "space": "contexts", "overrides": ["index.kind=flat"]}
    assert follow("/runs/.form/sweep")[1] == {}
    assert answer(f"{served.address}/runs/x/form/nothing", {}) == 404
    run = served.trigger("report", {"run": "nö & such"})
    until(PATIENCE, lambda: served.state(run) == "FAILED")
    tags = {"tags": ["run:nö & such"]}
    call(served.address, f"/flow_runs/{run}", tags, "PATCH")
    (listed,) = httpx2.get(f"{served.address}/runs/n%C3%B6%20&%20such/flow-runs", timeout=PATIENCE).json()
    assert listed["state"] == "Failed" and listed["address"].endswith(run) and listed["date"]


def test_kills_and_retries_end_in_the_same_bits(served: Served) -> None:
    """-9 to the flow's process and to `haed serve`, each while a training runs."""
    wrong = served.trigger("train", {"overrides": ["train.step=3"]})
    refused = until(PATIENCE, lambda: served.state(wrong) in DONE and call(served.address, f"/flow_runs/{wrong}"))
    assert refused["state_type"] == "FAILED" and "train.step" in refused["state"]["message"]

    served.work("train", *SETTINGS, f"train.steps={STEPS}", "name=alone")
    runs = {}
    for name in ("flow", "serve"):
        overrides = [*SETTINGS, f"train.steps={STEPS}", f"name={name}"]
        runs[name] = served.trigger("train", {"overrides": overrides})
        until(PATIENCE, (served.folder / "runs" / name / "train/checkpoints/latest").is_file)
        if name == "flow":
            engine(served).kill()
            until(PATIENCE, lambda: served.state(runs["flow"]) == "CRASHED")
            served.set_state(runs["flow"], "SCHEDULED", "AwaitingRetry")
        else:
            flow = engine(served)
            served.process.kill()
            served.process.wait()
            flow.wait(PATIENCE)
            served.start()
            assert served.state(runs["serve"]) == "CRASHED" and "marked as crashed: train serve" in served.said()
            served.set_state(runs["serve"], "SCHEDULED", "AwaitingRetry")
        until(PATIENCE, lambda run=runs[name]: served.state(run) == "COMPLETED")
    check_weights(served, "alone", *runs)

    name = f"report/report-{deployment_suffix(served.folder)}"
    prefect = partial(python, served.folder, "-m", "prefect", "deployment", PREFECT_API_URL=f"{served.address}/api")
    assert name.split("/")[1] in prefect("ls", COLUMNS="200").stdout and "'run'" in prefect("inspect", name).stdout
    done = prefect("run", name, "-p", "run=alone", "--watch")
    assert done.returncode == 0 and (served.folder / "runs/alone/report.html").is_file(), done.stdout + done.stderr


@pytest.mark.nightly
def test_a_training_outlives_a_server_that_is_killed(served: Served) -> None:
    served.work("train", *SETTINGS, f"train.steps={STEPS}", "name=undisturbed")
    run = served.trigger("train", {"overrides": [*SETTINGS, f"train.steps={STEPS}", "name=server"]})
    until(PATIENCE, (served.folder / "runs/server/train/checkpoints/latest").is_file)
    kill_server(served)
    until(PATIENCE, lambda: served.state(run) == "COMPLETED")
    check_weights(served, "undisturbed", "server")


def test_cancel_ends_all_processes_of_a_training_and_workers_of_a_pool_run_flows_in_its_folder(served: Served) -> None:
    together = [*SETTINGS, "train.steps=100000", "name=together", "launcher.processes=2"]
    run = served.trigger("train", {"overrides": together})
    latest = served.folder / "runs/together/train/checkpoints/latest"
    until(PATIENCE, latest.is_file)
    below = psutil.Process(served.process.pid).children(recursive=True)
    training = [child for child in below if "pipeline" in " ".join(child.cmdline())]
    assert len(training) >= 3  # torchrun and its two
    with at_rest(training):
        again = served.trigger("train", {"overrides": together})
        second = until(PATIENCE, lambda: served.state(again) in DONE and call(served.address, f"/flow_runs/{again}"))
    said = second["state"]["message"]
    assert second["state_type"] == "FAILED" and "is in use by process" in said and "flow run 'train together" in said
    kill_server(served)  # Cancel is heard all the same
    served.cancel(run)
    until(PATIENCE, lambda: served.state(run) == "CANCELLED")
    gone, alive = psutil.wait_procs(training, PATIENCE)
    assert not alive and 0 < (step := int(latest.read_text().strip().removeprefix("step-"))) < 100_000
    assert served.message(run) == f"saved step {step} of train; Retry resumes from there"

    # A worker's own choice is a temporary folder, which it deletes with all that a run has written.
    call(served.address, "/work_pools/", {"name": "gpus", "type": "process"})
    api = f"{served.address}/api"
    for pool, status in (("none", 1), ("gpus", 0)):
        done = haed(served.folder, "deploy", "--pool", pool, PREFECT_API_URL=api)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        assert len(done.stdout.splitlines()) == (len(FLOWS) if status == 0 else 0)
        assert ("error: there is no work pool 'none'" in done.stderr) == (status == 1)
    name = deployment_suffix(served.folder, "gpus")
    made = {item["name"]: item["enabled"] for item in call(served.address, "/automations/filter", {})}
    assert made == {f"haed: silent runs of {name}": True}

    run = served.trigger("shard", {"overrides": [*SETTINGS, "shards_dir=pooled"]}, name)
    elsewhere = served.folder / "elsewhere"
    elsewhere.mkdir()
    worker = ("-m", "prefect", "worker", "start", "--pool", "gpus", "--run-once")
    done = python(elsewhere, *worker, PREFECT_API_URL=api)
    assert served.state(run) == "COMPLETED", done.stderr
    assert list(served.folder.glob("pooled/**/*.tar")) and not list(elsewhere.iterdir())


def stage(served: Served, name: str) -> str:
    asked = {"flows": {"name": {"any_": [name]}}, "sort": "START_TIME_DESC"}
    return str(call(served.address, "/flow_runs/filter", asked)[0]["id"])


@pytest.mark.nightly
def test_what_is_paused_suspended_or_deleted_saves_stops_and_can_be_resumed(served: Served) -> None:
    base = [*SETTINGS, "train.steps=1000000", "pretrain.steps=1000000", "checkpoint.every_steps=1000000"]
    base += ["checkpoint.every_seconds=null"]
    runs = {"paused": ("train", "train"), "suspended": ("haed", "pretrain"), "deleted": ("train", "train")}
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    for name, (flow, phase) in runs.items():
        run = served.trigger(flow, {"overrides": [*base, f"name={name}"]})
        lines = served.folder / "runs" / name / phase / "metrics.jsonl"
        until(PATIENCE, lambda lines=lines: has_begun(lines))
        process = engine(served)
        if name == "deleted":
            call(served.address, f"/flow_runs/{run}", method="DELETE")
        else:
            details = {"pause_reschedule": name != "paused"}
            served.set_state(run, "PAUSED", name.capitalize(), state_details=details)
        process.wait(PATIENCE)
        saved = int((lines.parent / "checkpoints/latest").read_text().strip().removeprefix("step-"))
        if name == "deleted":
            break
        assert served.state(run) == "PAUSED", name
        assert call(served.address, "/flow_runs/filter", running) == []
        call(served.address, f"/flow_runs/{run}/resume", {})
        until(PATIENCE, lambda lines=lines, saved=saved: json.loads(lines.read_text().splitlines()[-1])["step"] > saved)
        assert served.state(run) == "RUNNING", name
        cancelled = {run} if name == "paused" else {run, stage(served, "pretrain")}
        served.cancel(max(cancelled - {run}, default=run))  # a stage has no process, and its flow ends with it
        until(PATIENCE, lambda of=cancelled: {served.state(run) for run in of} == {"CANCELLED"})
        assert all(" of " + phase in served.message(run) for run in cancelled)


@pytest.mark.nightly
def test_cancel_ends_a_run_that_was_started_in_a_terminal(served: Served) -> None:
    where = clean_environment(PREFECT_API_URL=f"{served.address}/api")
    command = [sys.executable, "-m", "flows.cli", "run", *SETTINGS, "name=typed", "pretrain.steps=1000000"]
    with subprocess.Popen(command, cwd=served.folder, env=where, stderr=subprocess.PIPE, text=True) as typed:
        until(PATIENCE, lambda: has_begun(served.folder / "runs/typed/pretrain/metrics.jsonl"))
        run = stage(served, "haed")
        served.cancel(run)
        said = typed.communicate(timeout=PATIENCE)[1]
    assert typed.returncode == 128 + signal.SIGTERM and "Traceback" not in said, said
    assert served.state(run) == "CANCELLED" and "of pretrain; Retry resumes" in served.message(run)


@pytest.mark.nightly
def test_a_question_is_answered_while_there_are_more_trainings_than_prefect_has_places(
    served: Served, whole: Path
) -> None:
    shutil.copytree(whole / "runs/run", served.folder / "runs/asked")

    def start(name: str) -> str:
        return served.trigger("train", {"overrides": [*SETTINGS, "train.steps=1000000", f"name={name}"]})

    trains = start("trains")
    until(PATIENCE, lambda: has_begun(served.folder / "runs/trains/train/metrics.jsonl"))
    with at_rest([engine(served)]):
        waiting = [start(f"w{n}") for n in range(PREFECT_RUNNER_PROCESS_LIMIT.value())]
        names = [f"/flow_runs/{run}" for run in waiting]
        waits = " · waits for cpu behind "
        until(PATIENCE, lambda: all(waits in call(served.address, each)["name"] for each in names))
        asked = served.trigger("neighbours", {"run": "asked"})
        until(PATIENCE, lambda: served.state(asked) == "COMPLETED")
        assert {served.state(run) for run in (trains, *waiting)} == {"RUNNING"}
