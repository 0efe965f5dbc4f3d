"""The processes that `haed` starts beside itself: Prefect's server and TensorBoard, each behind `flows.serving.guard`.

python -m flows.serving.guarded prefect --host 127.0.0.1 --port 4200
python -m flows.serving.guarded board --port 6006 --logdir runs
"""

import argparse
from typing import Any

from flows.serving.guard import LOOPBACK, Guarded, Rules, guarded_wsgi, names_of


def prefect(host: str, port: int, more: list[str]) -> None:
    """Prefect's server as `prefect server start` runs it, but that SQLite's transactions wait for each other."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    settings = get_current_settings().server
    _take_turns()
    origins = [item.strip() for item in settings.api.cors_allowed_origins.split(",") if item.strip() != "*"]
    uvicorn.run(
        Guarded(create_app(final=True), Rules([*names_of(host), *more], origins)),
        host=host,
        port=port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )


def _take_turns() -> None:
    """Has every transaction on SQLite take the write lock when it begins, and wait for it there.

    Prefect begins most of them as readers. One that writes after it has read fails at once if another has written in between,
    however long SQLite is told to wait (SQLITE_BUSY_SNAPSHOT), and the client gets 503.
    """
    from prefect.server.database import configurations, dependencies
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    class TakingTurns(configurations.AioSqliteConfiguration):
        def begin_transaction(self, session: Any, with_for_update: bool = False) -> Any:
            return super().begin_transaction(session, with_for_update=True)

    address = str(PREFECT_API_DATABASE_CONNECTION_URL.value())
    if address.startswith("sqlite"):
        dependencies.MODELS_DEPENDENCIES["database_config"] = TakingTurns(connection_url=address)


def board(port: int, folder: str) -> None:
    """TensorBoard on 127.0.0.1."""
    from tensorboard import default, main_lib, program

    class Server(program.WerkzeugServer):
        def __init__(self, application: Any, flags: Any) -> None:
            super().__init__(guarded_wsgi(application, Rules(LOOPBACK)), flags)

    main_lib.global_init()
    made = program.TensorBoard(default.get_plugins(), server_class=Server)
    made.configure(["tensorboard", "--logdir", folder, "--host", "127.0.0.1", "--port", str(port)])
    made.main()


def main() -> None:
    """Runs one of them until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=("prefect", "board"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--allowed-host", action="append", default=[])
    parser.add_argument("--logdir", default="runs")
    given = parser.parse_args()
    if given.server == "board":
        board(given.port, given.logdir)
    else:
        prefect(given.host, given.port, given.allowed_host)


if __name__ == "__main__":
    main()
