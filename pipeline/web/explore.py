"""`haed explore RUN`: serve the pages of one run on this machine until Ctrl-C."""

import asyncio
import json
import os
import signal
import socket

import uvicorn

from pipeline.console import end_streams, print_stdout
from pipeline.run.run_directory import RunFolder
from pipeline.web.app import make_application
from pipeline.web.host_check import LOOPBACK, AllowedHosts, HostCheckMiddleware
from pipeline.web.model_cache import ModelCache
from pipeline.web.runs import ServedRuns

_END_SECONDS = 1.0  # time in which a running question may stop by itself
PORT = 7300  # default port


def serve_run_pages(folder: RunFolder, port: int | None, overrides: tuple[str, ...], programs: bool = False) -> None:
    """Serve the pages of a run on 127.0.0.1 until a signal ends it. The address is printed once the server is ready.

    Args:
        folder: folder of the run.
        port: port to listen on; None: `PORT`, or a free one if that is taken; 0: a free one.
        overrides: options to change, such as device=cpu.
        programs: print the address as JSON.

    Raises:
        FileNotFoundError: nothing was trained in the run.
        OSError: the port is taken.
    """
    folder.trained_phase()
    warm = ModelCache(keep=1, overrides=overrides)
    place = _open_socket(port)
    pages = HostCheckMiddleware(make_application(ServedRuns(folder.path, single=True), warm), AllowedHosts(LOOPBACK))
    server = PageServer(uvicorn.Config(pages, log_level="warning", lifespan="off", timeout_graceful_shutdown=1), warm)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve([place]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        address = f"http://127.0.0.1:{place.getsockname()[1]}/"
        print_stdout(json.dumps({"address": address}) if programs else f"{address} until Ctrl-C")
        warm.prepare_run(folder)
        await serving

    try:
        asyncio.run(run())
    except KeyboardInterrupt as error:
        exit_if_busy(warm, 128 + getattr(error, "number", signal.SIGINT))
        raise


class PageServer(uvicorn.Server):
    """A uvicorn server that drops pending questions to models when it shuts down."""

    def __init__(self, config: uvicorn.Config, warm: ModelCache) -> None:
        super().__init__(config)
        self._warm = warm

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drop the questions, and shut down."""
        self._warm.drop_questions()
        await super().shutdown(sockets)


def exit_if_busy(warm: ModelCache, status: int) -> None:
    """Exit at once if a question cannot be stopped.

    A normal exit of Python would unload the libraries that still compute it.
    """
    if not warm.close(_END_SECONDS):
        end_streams()
        os._exit(status)


def _open_socket(port: int | None) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", PORT if port is None else port))
    except OSError:
        if port is None:
            return socket.create_server(("127.0.0.1", 0))
        raise OSError(f"port {port} is in use. Choose another with --port, or leave --port out") from None
