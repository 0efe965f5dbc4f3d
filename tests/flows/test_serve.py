"""`haed serve` for real: a server, every flow as a deployment, and one of them triggered through the API of the UI."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flows.environment import DEFAULTS


def call(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def until(seconds: float, found: Any) -> Any:
    """Waits for a true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = found()
        except OSError:
            answer = None
        if answer:
            return answer
        time.sleep(0.5)
    raise AssertionError(f"nothing after {seconds} s")


@pytest.mark.timeout(240)
def test_every_flow_is_served_and_can_be_triggered(tmp_path: Path, tiny: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT") and name not in DEFAULTS
    }
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-m", "flows.cli", "serve", "--port", str(port)]
    served = subprocess.Popen(
        command, cwd=tmp_path, env=clean | {"PYTHONPATH": os.getcwd()}, stdout=log, stderr=log, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wanted = {
            "haed",
            "shard",
            "pretrain",
            "finetune",
            "train",
            "evaluate",
            "sample",
            "index",
            "neighbours",
            "report",
        }

        def registered() -> dict[str, str] | None:
            found = {item["tags"][0]: item["id"] for item in call(address, "/deployments/filter", {}) if item["tags"]}
            return found if wanted <= set(found) else None

        deployments = until(120, registered)
        parameters = {"preset": "quickstart", "overrides": [*tiny, "name=served"]}
        trigger = f"/deployments/{deployments['shard']}/create_flow_run"
        run = until(30, lambda: call(address, trigger, {"parameters": parameters}))  # 503: the database was busy
        done = ("COMPLETED", "FAILED", "CRASHED")
        state = until(90, lambda: (s := call(address, f"/flow_runs/{run['id']}")["state_type"]) in done and s)
        assert state == "COMPLETED", (tmp_path / "log").read_text()[-3000:]
        assert list((tmp_path / "shards").glob("*/manifest.json"))
        with urllib.request.urlopen(address, timeout=10) as page:
            assert b"<html" in page.read().lower()
    finally:
        served.send_signal(signal.SIGINT)
        try:
            served.wait(30)
        finally:
            log.close()
            if served.poll() is None:
                os.killpg(served.pid, signal.SIGKILL)
    with pytest.raises(OSError):
        call(address, "/health")
