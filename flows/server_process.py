"""The child processes of `haed`: Prefect's server and TensorBoard, each behind `pipeline.web.host_check`.

python -m flows.server_process prefect --host 127.0.0.1 --port 4200 --runs runs
python -m flows.server_process board --port 6006 --logdir runs
"""

import argparse
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.filesystem import available_threads
from flows.middleware import PlainErrorMiddleware, RunPagesMiddleware, StorableBodyMiddleware
from pipeline.web.host_check import LOOPBACK, AllowedHosts, HostCheckMiddleware, host_checked_wsgi, host_names

if TYPE_CHECKING:
    from pipeline.web.model_cache import ModelCache


def serve_prefect(host: str, port: int, bound: int | None, more: list[str], runs: Path | None) -> None:
    """Run Prefect's server as `prefect server start` does, behind our checks and beside the pages of runs.

    Args:
        host: address to listen on.
        port: port to listen on.
        bound: file descriptor of an open socket to listen on instead.
        more: further host names by which the server may be addressed.
        runs: folder of runs whose pages are served beside Prefect's UI; None: no pages.
    """
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    origins = [item.strip() for item in settings.api.cors_allowed_origins.split(",") if item.strip() != "*"]
    application: Any = StorableBodyMiddleware(PlainErrorMiddleware(create_app(final=True)))
    warm = None
    if runs is not None:
        secret = settings.api.auth_string
        pages, warm = _build_run_pages(runs)
        application = RunPagesMiddleware(application, pages, secret.get_secret_value() if secret else "")
    config = uvicorn.Config(
        HostCheckMiddleware(application, AllowedHosts([*host_names(host), *more], origins)),
        host=host,
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    # Not `fd=`, which uvicorn takes for a Unix socket: without TCP_NODELAY every answer is 40 ms late.
    sockets = None if bound is None else [socket.socket(fileno=bound)]
    if warm is None:
        uvicorn.Server(config).run(sockets)
        return
    from pipeline.web.explore import PageServer, exit_if_busy

    try:
        PageServer(config, warm).run(sockets)
    finally:
        exit_if_busy(warm, 128 + signal.SIGINT)


@contextmanager
def waiting_transactions() -> Iterator[None]:
    """Make every SQLite transaction of Prefect take the write lock when it begins, and wait for it there.

    Prefect begins most transactions as readers. If one writes after reading, it fails at once when another has written
    in between, whatever SQLite's timeout (SQLITE_BUSY_SNAPSHOT), and the request gets 503. With six clients at a time,
    101 of 107 flow runs were refused by Prefect 3.9.1, and none of 193 here. No setting of Prefect changes this.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import temporary_database_config
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    class WaitingSqliteConfiguration(AioSqliteConfiguration):
        def begin_transaction(self, session: Any, with_for_update: bool = False) -> Any:
            return super().begin_transaction(session, with_for_update=True)

    address = str(PREFECT_API_DATABASE_CONNECTION_URL.value())
    if not address.startswith("sqlite"):
        yield
        return
    with temporary_database_config(WaitingSqliteConfiguration(connection_url=address)):
        yield


def _build_run_pages(runs: Path) -> "tuple[Any, ModelCache]":
    """Return the application of the pages of runs, and its cache of models.

    The models run on the CPU with half of the threads, and leave the rest to trainings.
    """
    from pipeline.web.app import make_application
    from pipeline.web.model_cache import ModelCache
    from pipeline.web.runs import ServedRuns

    threads = max(1, available_threads() // 2)
    warm = ModelCache(overrides=("device=cpu", f"threads={threads}"))
    return make_application(ServedRuns(runs), warm, {"Prefect UI": "/v2/"}), warm


def serve_tensorboard(port: int, folder: str) -> None:
    """Run TensorBoard on 127.0.0.1."""
    from tensorboard import default, main_lib, program

    class Server(program.WerkzeugServer):
        def __init__(self, application: Any, flags: Any) -> None:
            super().__init__(host_checked_wsgi(application, AllowedHosts(LOOPBACK)), flags)

    main_lib.global_init()
    made = program.TensorBoard(default.get_plugins(), server_class=Server)
    made.configure(["tensorboard", "--logdir", folder, "--host", "127.0.0.1", "--port", str(port)])
    made.main()


def main() -> None:
    """Run one of the servers until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=("prefect", "board"))
    parser.add_argument("--host", default="127.0.0.1")
    listens = parser.add_mutually_exclusive_group(required=True)
    listens.add_argument("--port", type=int, default=0)
    listens.add_argument("--socket", type=int)
    parser.add_argument("--allowed-host", action="append", default=[])
    parser.add_argument("--logdir", default="runs")
    parser.add_argument("--runs", type=Path)
    given = parser.parse_args()
    if given.server == "board":
        serve_tensorboard(given.port, given.logdir)
    else:
        with waiting_transactions():
            serve_prefect(given.host, given.port, given.socket, given.allowed_host, given.runs)


if __name__ == "__main__":
    main()
