"""`haed serve` as a process, in a folder of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.environment import DEFAULTS, deployment_suffix
from pipeline.cli import main
from tests.conftest import TINY, lay_database
from tests.flows.api import PATIENCE, call, check_texts, clean_environment, free_ports, until

SETTINGS = [*TINY, "source.kind=text", "source.path=text", "validation.times=0", "checkpoint.every_steps=10"]


class Served:
    """`haed serve` in a folder, on free ports; may be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        self.arguments: tuple[str, ...] = ()
        self.port, self.board = free_ports()
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str) -> None:
        """Returns when every flow is registered and can be triggered; without arguments, with those of last time."""
        self.arguments = arguments or self.arguments
        clean = {name: value for name, value in clean_environment().items() if name not in DEFAULTS}
        command = [sys.executable, "-m", "flows.cli", "serve", "--port", str(self.port)]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--tensorboard-port", str(self.board), *self.arguments],
                cwd=self.folder,
                # trainings of other tests are none of ours
                env=clean | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.folder), "PREFECT_RUNNER_POLL_FREQUENCY": "1"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1
        try:
            until(PATIENCE, self.is_up)
        except AssertionError as error:  # nothing of it stays beside other tests
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            error.add_note(self.said()[-5000:])
            raise

    def is_up(self) -> bool:
        """Whether every flow is registered and can be triggered; fails as soon as the process has ended."""
        assert self.process.poll() is None, f"it ended with {self.process.returncode}"
        return self.said().count("To schedule: ") == self.starts and self.ready()

    def ready(self) -> bool:
        """Whether its runner polls: all deployments are marked as ready."""
        from flows.flows import FLOWS

        found = self.found()
        return len(found) == len(FLOWS) and all(item["status"] == "READY" for item in found)

    def found(self) -> list[dict[str, Any]]:
        asked = {"deployments": {"name": {"like_": f"-{deployment_suffix(self.folder)}"}}}
        return list(call(self.address, "/deployments/filter", asked))

    def deployments(self) -> dict[str, str]:
        return {item["tags"][0]: item["id"] for item in self.found()}

    def trigger(self, flow: str, parameters: dict[str, object], deployment: str = "") -> str:
        """Starts a flow as the UI does; returns the run's id."""
        found = call(self.address, f"/deployments/name/{flow}/{flow}-{deployment or deployment_suffix(self.folder)}")
        path = f"/deployments/{found['id']}/create_flow_run"
        # 503: the database was busy
        run = until(PATIENCE, lambda: call(self.address, path, {"parameters": parameters}))
        return str(run["id"])

    def work(self, command: str, *words: str) -> None:
        """Runs a command beside it, in its folder and in this process: a flow takes a process of seconds."""
        with contextlib.chdir(self.folder):
            assert main([command, "--config", "quickstart", *words]) == 0

    def state(self, run: str) -> str:
        return str(call(self.address, f"/flow_runs/{run}")["state_type"])

    def cancel(self, run: str) -> None:
        self.set_state(run, "CANCELLING", "Cancelling")

    def set_state(self, run: str, type: str, name: str, **more: object) -> None:
        """Sets the state of a run as the UI does, once the server answers."""
        asked = {"state": {"type": type, "name": name} | more, "force": type == "SCHEDULED"}
        until(PATIENCE, lambda: call(self.address, f"/flow_runs/{run}/set_state", asked))

    def message(self, run: str) -> str:
        return str(call(self.address, f"/flow_runs/{run}")["state"]["message"])

    def lines(self, run: str) -> list[str]:
        of_it = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return [line["message"] for line in call(self.address, "/logs/filter", of_it)]

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def stop(self) -> None:
        """Ctrl-C; nothing may answer or run afterwards."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(PATIENCE)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        with pytest.raises(OSError):
            call(self.address, "/health")


def engine(served: Served) -> psutil.Process:
    children = psutil.Process(served.process.pid).children()
    return next(child for child in children if "prefect.engine" in child.cmdline())


@contextlib.contextmanager
def at_rest(processes: Collection[psutil.Process]) -> Iterator[None]:
    """Stops processes, which train and would take a core from what is waited for."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@pytest.fixture
def prefect_home(database: Path, tmp_path: Path) -> None:
    """An empty database in `tmp_path`."""
    lay_database(database, tmp_path)


@pytest.fixture(scope="module")
def served(
    text: Path, database: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """One for the tests of a module, which may kill it and start it again; a module's ARGUMENTS are added.

    It has an empty database, and the folder `text` beside it; tests/test_wheel.py starts from nothing.
    """
    folder = tmp_path_factory.mktemp("served")
    (folder / "text").symlink_to(text)
    lay_database(database, folder)
    made = Served(folder)
    made.start(*getattr(request.module, "ARGUMENTS", ()))
    yield made
    print(made.said()[-20_000:])  # shown beside what failed
    try:
        check_texts(made.address)
    finally:
        made.stop()


@pytest.fixture(scope="module")
def corpus(served: Served) -> None:
    """The shards of SETTINGS, where the server runs."""
    served.work("shard", *SETTINGS)
