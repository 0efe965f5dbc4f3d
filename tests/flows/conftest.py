"""`haed serve` as a process, in a folder of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.environment import DEFAULTS
from flows.serve import LOCAL
from tests.flows.api import call, until


class Served:
    """`haed serve` in a folder, on free ports; may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.port, self.board = one.getsockname()[1], other.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when every flow is registered and can be triggered."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT") and k not in DEFAULTS}
        command = [sys.executable, "-m", "flows.cli", "serve", "--port", str(self.port)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--tensorboard-port", str(self.board)],
                cwd=self.folder,
                env=clean | {"PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        until(120, lambda: self.said().count("TensorBoard: ") == self.starts and self.ready())

    def ready(self) -> bool:
        """Whether its runner polls: all deployments are marked as ready."""
        found = call(self.address, "/deployments/filter", {})
        return len(found) >= 11 and all(item["status"] == "READY" and not item["paused"] for item in found)

    def deployments(self) -> dict[str, str]:
        """Ids by the flow's name."""
        return {item["tags"][0]: item["id"] for item in call(self.address, "/deployments/filter", {})}

    def trigger(self, flow: str, parameters: dict[str, object], deployment: str = LOCAL) -> str:
        """Starts a flow as the UI does; returns the run's id."""
        found = call(self.address, f"/deployments/name/{flow}/{deployment}")
        path = f"/deployments/{found['id']}/create_flow_run"
        run = until(30, lambda: call(self.address, path, {"parameters": parameters}))  # 503: the database was busy
        return str(run["id"])

    def state(self, run: str) -> str:
        """Type of a run's state."""
        return str(call(self.address, f"/flow_runs/{run}")["state_type"])

    def said(self) -> str:
        """What it printed."""
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        """Ctrl-C; nothing may answer or run afterwards."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        with pytest.raises(OSError):
            call(self.address, "/health")


@pytest.fixture
def served(text: Path, tmp_path: Path) -> Iterator[Served]:
    """Started from nothing, with the folder `text` beside it."""
    (tmp_path / "text").symlink_to(text)
    made = Served(tmp_path)
    made.start()
    yield made
    made.stop()
