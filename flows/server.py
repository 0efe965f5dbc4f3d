"""Prefect servers as children of ours: one that is kept up for `haed serve`, and one for a flow run without any.

A child has a session of its own: a Ctrl-C, or a SIGTERM to a whole process group, must not end the server before the flow that
still saves, which would wait for it without end.
"""

import atexit
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from pipeline.launcher import die_with_parent

log = logging.getLogger(__name__)
START_SECONDS = 120
_PATIENCE = 15


def answers(address: str) -> bool:
    """Whether a healthy server is there."""
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def child(command: list[str], environment: dict[str, str] | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """A quiet process in a session of its own, which ends with us, however that comes."""
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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


def _wait(process: "subprocess.Popen[bytes]", address: str, advice: str) -> None:
    until = time.monotonic() + START_SECONDS
    while not answers(address):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the Prefect server did not start on {address}: {advice}")
        time.sleep(0.2)


@contextmanager
def lasting_server(address: str, host: str, port: int) -> Iterator[None]:
    """A server that is started again if it dies; or the one that answers there already."""
    if answers(address):
        yield
        return
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
    ended = threading.Event()
    with ExitStack() as first:
        process = first.enter_context(child(command))
        _wait(process, address, "is the port taken? try --port")
        watch = threading.Thread(target=_keep_up, args=(process, command, ended), daemon=True)
        watch.start()
        try:
            yield
        finally:
            ended.set()
            watch.join(_PATIENCE)


def _keep_up(process: "subprocess.Popen[bytes]", command: list[str], ended: threading.Event) -> None:
    """Starts the server again when it has died; die_with_parent goes by this thread, which lives as long as we."""
    while not ended.wait(1):
        if process.poll() is None:
            continue
        log.warning("the Prefect server ended with status %s: starting it again", process.returncode)
        with child(command) as again:
            while again.poll() is None and not ended.wait(1):
                pass
            process = again


def start_temporary_server() -> Callable[[], str]:
    """Starts a server without a UI, which ends with this process; returns what waits for it, and gives its API's address.

    Raises:
        RuntimeError: by the waiting, if it does not start.
    """
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port = tried.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
    quiet = {"PREFECT_SERVER_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    held = ExitStack()
    process = held.enter_context(
        child([*command, "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"], os.environ | quiet)
    )
    atexit.register(held.close)  # so early that all that Prefect has to say at the end comes before it

    def wait() -> str:
        _wait(process, address, "try again, or set PREFECT_API_URL to a server's")
        return f"{address}/api"

    return wait
