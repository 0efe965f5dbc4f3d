"""What an operator expects of `haed serve`: what was set stays, and other folders are left alone."""

import signal
import sqlite3
import subprocess
from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from flows.environment import deployment_suffix
from flows.lifecycle import is_server_healthy
from tests.flows.api import PATIENCE, call, haed, until
from tests.flows.conftest import SETTINGS, Served, at_rest, engine

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800), pytest.mark.usefixtures("corpus")]
ARGUMENTS = ("--cron", "0 2 * * *", "name=nightly")


def test_what_was_typed_counts_even_if_it_is_the_default_and_the_log_says_so(served: Served) -> None:
    typed = {"model": {"main": {"heads": 4}}, "iem": {"similarity": "dot"}}  # both equal the schema's defaults
    given = [word for word in SETTINGS if not word.startswith("model.main.heads")]
    run = served.trigger("train", {"overrides": [*given, "name=typed-{date}"], **typed})
    until(PATIENCE, lambda: served.state(run) == "COMPLETED")
    written = (served.folder / f"runs/typed-{date.today()}/config.yaml").read_text()
    assert "heads: 4" in written and "similarity: dot" in written
    lines = call(served.address, "/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC"})
    began = next(line["message"] for line in lines if line["name"].startswith("flows"))
    assert began.startswith("preset quickstart with ") and "iem.similarity=dot (was cosine)" in began


def test_a_restart_keeps_what_was_set_and_marks_only_what_is_dead(served: Served, tmp_path: Path) -> None:
    ids = served.deployments()
    for flow, settings in (
        ("shard", {"tags": ["shard", "mine"], "concurrency_limit": 3, "paused": True}),
        ("train", {"parameters": {"name": "standard"}, "description": "ours"}),
    ):
        call(served.address, f"/deployments/{ids[flow]}", settings, "PATCH")
    daily = {"schedule": {"cron": "30 1 * * *", "timezone": "UTC"}, "active": False}
    call(served.address, f"/deployments/{ids['index']}/schedules", [daily])  # type: ignore[arg-type]
    names = ("name", "tags", "paused", "global_concurrency_limit", "parameters", "description")

    def set_there() -> dict[str, Any]:
        found = {item["id"]: {name: item[name] for name in names} for item in served.found()}
        for item in served.found():
            if item["global_concurrency_limit"]:
                found[item["id"]]["global_concurrency_limit"] = item["global_concurrency_limit"]["limit"]
            kept = ("schedule", "active", "parameters")
            found[item["id"]]["schedules"] = [{name: each[name] for name in kept} for each in item["schedules"]]
        return found

    before = set_there()
    nightly = before[ids["haed"]]["schedules"]
    found = [(each["schedule"]["cron"], each["parameters"]["overrides"]) for each in nightly]
    assert found == [("0 2 * * *", ["name=nightly"])]
    until(PATIENCE, lambda: any(run["auto_scheduled"] for run in call(served.address, "/flow_runs/filter", {})))
    long = [*SETTINGS, "train.steps=100000", "name=long"]
    run = served.trigger("train", {"overrides": long})
    until(PATIENCE, (served.folder / "runs/long/train/checkpoints/latest").is_file)
    labels = call(served.address, f"/flow_runs/{run}")["labels"]
    assert labels["haed.process"] and labels["haed.host"]

    with at_rest([engine(served)]):
        short = served.trigger("train", {"overrides": [*SETTINGS, "name=short"]})
        unwanted = served.trigger("train", {"overrides": [*SETTINGS, "name=unwanted"]})
        for waiting in (short, unwanted):
            asked, note = f"/flow_runs/{waiting}", " · waits for cpu behind train long"
            until(PATIENCE, lambda asked=asked, note=note: note in call(served.address, asked)["name"])
        served.cancel(unwanted)
        until(PATIENCE, lambda: served.state(unwanted) == "CANCELLED")
        assert served.state(run) == served.state(short) == "RUNNING"
        assert not (served.folder / "runs/short").exists() and not (served.folder / "runs/unwanted").exists()

        other = Served(tmp_path)  # another folder, which finds the server at the same port
        other.port, other.address = served.port, served.address
        other.start()
        assert served.state(run) == "RUNNING" and "marked as crashed" not in other.said()
        assert deployment_suffix(tmp_path) != deployment_suffix(served.folder)
        assert f"haed/haed-{deployment_suffix(tmp_path)}" in other.said()
        other.process.send_signal(signal.SIGINT)
        other.process.wait(PATIENCE)

    served.process.kill()
    served.process.wait()
    until(PATIENCE, lambda: not is_server_healthy(served.address))
    with closing(sqlite3.connect(served.folder / ".prefect/prefect.db", timeout=PATIENCE)) as records, records:
        (missed,) = records.execute("SELECT id FROM flow_run WHERE auto_scheduled LIMIT 1").fetchone()
        past = "2026-01-01 02:00:00.000000"
        records.execute("UPDATE flow_run SET next_scheduled_start_time = ? WHERE id = ?", (past, missed))
    served.start()
    assert served.state(missed) == "CANCELLED" and "cancelled: 1 scheduled runs" in served.said()
    until(PATIENCE, lambda: served.state(run) == served.state(short) == "CRASHED")
    assert set_there() == before
    said = served.said()
    assert f"Scheduled:   haed 0 2 * * * ({nightly[0]['schedule']['timezone']})" in said
    assert "Scheduled:   index 30 1 * * * (UTC) (paused)" in said


def test_deploy_takes_images_variables_and_a_limit_and_keeps_them(served: Served) -> None:
    for name, kind in (("near", "process"), ("far", "docker")):
        call(served.address, "/work_pools/", {"name": name, "type": kind})

    def deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
        return haed(served.folder, "deploy", *arguments, PREFECT_API_URL=f"{served.address}/api")

    refused = deploy("--pool", "near", "--image", "haed:1", "--folder", "nowhere")
    assert refused.returncode == 1 and "start no images" in refused.stderr
    assert "--folder nowhere: there is no such folder on this machine" in refused.stderr
    far = ("--pool", "far", "--image", "haed:1", "--job-variable", "env.WHERE=7", "--job-variable", "mem_limit=4g")
    made = deploy(*far, "--job-variable", "privileged=true", "--limit", "2")
    assert made.returncode == 0 and made.stdout.splitlines()[0] == "haed/haed-far", made.stderr
    found = call(served.address, "/deployments/name/haed/haed-far")
    variables = found["job_variables"]
    assert (variables["image"], variables["mem_limit"], variables["privileged"]) == ("haed:1", "4g", True)
    assert variables["env"]["WHERE"] == "7" and variables["env"]["HAED_TRAININGS"] == "1"
    assert call(served.address, "/work_pools/far")["concurrency_limit"] == 2

    call(served.address, f"/deployments/{found['id']}", {"tags": ["haed", "mine"], "concurrency_limit": 1}, "PATCH")
    again = deploy("--pool", "far", "--image", "haed:2")
    assert again.returncode == 0, again.stderr
    found = call(served.address, "/deployments/name/haed/haed-far")
    assert found["job_variables"] == variables | {"image": "haed:2"}
    assert found["tags"] == ["haed", "mine"] and found["global_concurrency_limit"]["limit"] == 1
    assert call(served.address, "/work_pools/far")["concurrency_limit"] == 2
