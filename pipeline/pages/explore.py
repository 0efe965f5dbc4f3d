"""`haed explore RUN`: serve the pages of one run on this machine until Ctrl-C."""

import asyncio
import json
import os
import signal
import socket

import uvicorn

from pipeline.config import ConfigError
from pipeline.pages.app import application
from pipeline.pages.guard import LOOPBACK, Guarded, Rules
from pipeline.pages.runs import Runs
from pipeline.pages.warm import Warm
from pipeline.run.folder import RunFolder
from pipeline.shown import end_streams, write

_END_SECONDS = 1.0  # time in which a running question may stop by itself
PORT = 7300  # default port


def explore(folder: RunFolder, port: int | None, overrides: tuple[str, ...], programs: bool = False) -> None:
    """Serve the pages of a run on 127.0.0.1 until a signal ends it. The address is printed once the server is ready.

    Args:
        folder: folder of the run.
        port: port to listen on; None: `PORT`, or a free one if that is taken; 0: a free one.
        overrides: options to change, such as device=cpu.
        programs: print the address as JSON.

    Raises:
        FileNotFoundError: nothing was trained in the run.
        ConfigError: the port is out of range.
        OSError: the port is taken.
    """
    folder.trained_phase()
    warm = Warm(keep=1, overrides=overrides)
    place = _listening(port)
    pages = Guarded(application(Runs(folder.path, single=True), warm), Rules(LOOPBACK))
    server = Server(uvicorn.Config(pages, log_level="warning", lifespan="off", timeout_graceful_shutdown=1), warm)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve([place]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        address = f"http://127.0.0.1:{place.getsockname()[1]}/"
        write(json.dumps({"address": address}) if programs else f"{address} until Ctrl-C")
        warm.prepare(folder)
        await serving

    try:
        asyncio.run(run())
    except KeyboardInterrupt as error:
        end_without(warm, 128 + getattr(error, "number", signal.SIGINT))
        raise


class Server(uvicorn.Server):
    """A uvicorn server that drops pending questions to models when it shuts down."""

    def __init__(self, config: uvicorn.Config, warm: Warm | None) -> None:
        super().__init__(config)
        self._warm = warm

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drop the questions, and shut down."""
        if self._warm is not None:
            self._warm.drop()
        await super().shutdown(sockets)


def end_without(warm: Warm, status: int) -> None:
    """Exit at once if a question cannot be stopped.

    A normal exit of Python would unload the libraries that still compute it.
    """
    if not warm.close(_END_SECONDS):
        end_streams()
        os._exit(status)


def _listening(port: int | None) -> socket.socket:
    if port is not None and not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: must be 0 to 65535")
    for wanted in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server(("127.0.0.1", wanted))
        except OSError:
            if port is not None:
                raise OSError(f"port {port} is taken: choose another with --port, or leave that out") from None
    raise AssertionError
