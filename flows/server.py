"""Prefect servers as child processes: a lasting one for `haed serve`, and a temporary one for a single flow run.

A child has its own session. A Ctrl-C, or a SIGTERM to the process group, must not end the server before a flow that is
still saving: the flow would wait for it forever.
"""

import atexit
import http.client
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from pipeline.signals import die_with_parent

log = logging.getLogger(__name__)
START_SECONDS = 120
_PATIENCE = 15
_LOG_BYTES = 4 << 20


def is_server_healthy(address: str) -> bool:
    """Return whether a healthy Prefect server runs at an address."""
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # nothing, or something else
        return False


def log_path(name: str) -> Path:
    """Return the path of a child's log, `PREFECT_HOME/NAME.log`. Older output is in `NAME.log.old` (4 MB each)."""
    return Path(os.environ["PREFECT_HOME"]) / f"{name}.log"


def _rotate_log(path: Path) -> None:
    """Limit the size of an append-only log: copy it to `.log.old` and truncate it."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > _LOG_BYTES:
            shutil.copy(path, path.with_suffix(".log.old"))
            os.truncate(path, 0)


@contextmanager
def run_child_process(
    name: str, *arguments: str, keeps: tuple[int, ...] = (), **environment: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `flows.server_process` as a child process in its own session. It ends with this process and writes to a log.

    Args:
        name: of the log.
        arguments: command-line arguments.
        keeps: open file descriptors that the child inherits under the same numbers.
        environment: additional environment variables.
    """
    said = log_path(name)
    said.parent.mkdir(parents=True, exist_ok=True)
    _rotate_log(said)
    with open(said, "ab", opener=partial(os.open, mode=0o600)) as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.server_process", *arguments],
            env=os.environ | environment,
            start_new_session=True,
            stdout=file,
            stderr=file,
            pass_fds=keeps,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", address: str, advice: str, said: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not is_server_healthy(address):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the Prefect server did not start on {address}: {advice} (its log: {said})")
        time.sleep(0.2)


@contextmanager
def lasting_server(address: str, host: str, port: int, allowed_hosts: list[str]) -> Iterator[bool]:
    """Run a server with the pages of `runs/`, and restart it if it dies, unless one answers at the address.

    Yield whether the server is ours.
    """
    if is_server_healthy(address):
        yield False
        return
    arguments = ["server", "prefect", "--host", host, "--port", str(port), "--runs", "runs"]
    arguments += [word for name in allowed_hosts for word in ("--allowed-host", name)]
    ended = threading.Event()
    with ExitStack() as first:
        process = first.enter_context(run_child_process(*arguments))
        _wait(process, address, "is the port taken? try --port", log_path("server"))
        watch = threading.Thread(target=_restart_on_exit, args=(process, arguments, ended), daemon=True)
        watch.start()
        try:
            yield True
        finally:
            ended.set()
            watch.join(_PATIENCE)


def _restart_on_exit(process: "subprocess.Popen[bytes]", arguments: list[str], ended: threading.Event) -> None:
    """Restart the server when it has died.

    A restarted server is tied to this thread by die_with_parent. The thread lives as long as this process.
    """
    while not ended.wait(1):
        _rotate_log(log_path("server"))
        if process.poll() is None:
            continue
        said = log_path("server")
        log.warning("the Prefect server ended with status %s: starting it again; its log: %s", process.returncode, said)
        with run_child_process(*arguments) as again:
            while again.poll() is None and not ended.wait(1):
                _rotate_log(said)
            process = again


def start_temporary_server() -> Callable[[], str]:
    """Start a server without a UI that ends with this process.

    Returns:
        A function that waits for the server and returns the address of its API. It raises RuntimeError if the server
        does not start.
    """
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"
    if not database.exists() or not database.stat().st_size:
        log.info("Prefect's server makes its database first, for some ten seconds")
    quiet = {"PREFECT_SERVER_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}
    held = ExitStack()
    with socket.socket() as bound:  # handed on as it is: a freed port may be another process's by then
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        number = bound.fileno()
        process = held.enter_context(
            run_child_process("temporary", "prefect", "--socket", str(number), keeps=(number,), **quiet)
        )
    atexit.register(held.close)  # so early that all that Prefect has to say at the end comes before it

    def wait() -> str:
        _wait(process, address, "try again, or set PREFECT_API_URL to a server's", log_path("temporary"))
        return f"{address}/api"

    return wait
