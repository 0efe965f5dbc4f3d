"""The temporary server of a flow run without one, deaf to Ctrl-C."""

import signal

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS


def start_local_server() -> None:
    """Starts Prefect's own temporary server now, unless an address of one is set; it ends with this process.

    A terminal's Ctrl-C goes to the whole process group. A server that dies of it leaves the flow, which is still saving,
    waiting for it without end. A child inherits the mask of blocked signals, so it is started with SIGINT blocked.
    """
    if PREFECT_API_URL.value():
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        SubprocessASGIServer().start(timeout=PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
