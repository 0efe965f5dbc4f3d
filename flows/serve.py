"""`haed serve`: a Prefect server, if none answers, and every flow as a deployment in it, until Ctrl-C."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
START_SECONDS = 120
_PR_SET_PDEATHSIG = 1


def serve(host: str = "127.0.0.1", port: int = 4200) -> None:
    """Serves all flows in the foreground; starts a server on `host`:`port` unless PREFECT_API_URL names one.

    Raises:
        RuntimeError: the server does not start.
    """
    if "PREFECT_API_URL" in os.environ:
        _serve_flows()
        return
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    os.environ.setdefault("PREFECT_UI_URL", f"{address}/v2")
    with _server(address, host, port):
        print(f"Prefect UI: {address}", flush=True)
        _serve_flows()


def _serve_flows() -> None:
    from prefect import serve as prefect_serve
    from prefect.deployments.runner import EntrypointType

    from flows.flows import FLOWS

    deployments = [
        flow.to_deployment(name="local", tags=[flow.name], entrypoint_type=EntrypointType.MODULE_PATH) for flow in FLOWS
    ]
    prefect_serve(*deployments, print_starting_message=False)  # type: ignore[arg-type]


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end_with_parent() -> None:
    """Has Linux end the server when we are killed, so that none is left behind; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _server(address: str, host: str, port: int) -> Iterator[None]:
    """A server as a child process in a session of its own, ended with us; or the one that answers there already."""
    if _answers(address):
        yield
        return
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
    server = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(address):
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the Prefect server did not start on {address}: is the port taken? try --port")
            time.sleep(0.3)
        yield
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
