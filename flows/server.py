"""Prefect's server and TensorBoard as child processes, each behind `pipeline.web.host_check`.

A server lasts as long as `haed serve`, or is a temporary one for a single flow run. A child has its own session. A
Ctrl-C, or a SIGTERM to the process group, must not end the server before a flow that is still saving: the flow would
wait for it forever. This module is also the program of the children:

    python -m flows.server prefect --host 127.0.0.1 --port 4200 --runs runs
    python -m flows.server board --port 6006 --logdir runs
"""

import argparse
import asyncio
import atexit
import http.client
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from data.filesystem import file_lock
from data.processes import available_threads
from pipeline.config import ConfigError
from pipeline.signals import die_with_parent
from pipeline.web.host_check import LOOPBACK, AllowedHosts, HostCheckMiddleware, host_checked_wsgi, host_names

log = logging.getLogger(__name__)
START_SECONDS = 120
_PATIENCE = 15
_LONGEST_PAUSE = 60  # seconds between the end of a server and its next start
_LOG_BYTES = 4 << 20
_TURN_SECONDS = 60.0  # SQLite waits as long


@contextmanager
def explain_refusal(address: str) -> Iterator[None]:
    """Raise PermissionError, which says how to give the password, if a Prefect server answers that it needs another."""
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        yield
    except PrefectHTTPStatusError as error:
        if error.response.status_code != 401:
            raise
        if os.environ.get("PREFECT_API_KEY"):
            raise PermissionError(f"{address} does not take the key in PREFECT_API_KEY. Set another") from None
        which = "another" if os.environ.get("PREFECT_API_AUTH_STRING") else "a"
        raise PermissionError(
            f"{address} asks for {which} password. Set PREFECT_API_AUTH_STRING to it. `haed serve` keeps its own in .prefect/password"
        ) from None


def is_server_healthy(address: str) -> bool:
    """Return whether a healthy Prefect server runs at an address."""
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.read(10).strip() == b"true")
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
    """Run this module as a child process in its own session. It ends with this process and writes to a log.

    Args:
        name: of the log.
        arguments: command-line arguments.
        keeps: open file descriptors that the child inherits under the same numbers.
        environment: additional environment variables.
    """
    log_file = log_path(name)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    _rotate_log(log_file)
    with open(log_file, "ab", opener=partial(os.open, mode=0o600)) as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.server", *arguments],
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


def _wait(process: "subprocess.Popen[bytes]", address: str, advice: str, log_file: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while not is_server_healthy(address):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"the Prefect server did not start on {address}. {advice} (its log: {log_file})")
        time.sleep(0.2)


@contextmanager
def lasting_server(address: str, host: str, port: int, allowed_hosts: Sequence[str]) -> Iterator[bool]:
    """Run a server with the pages of `runs/`, and restart it if it dies, unless one answers at the address.

    Yield whether the server is ours.
    """
    if is_server_healthy(address):
        yield False
        return
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"--host {host}: {reason}. Use an address of this machine, or 0.0.0.0 for all") from error
    arguments = ["server", "prefect", "--host", host, "--port", str(port), "--runs", "runs"]
    arguments += [word for name in allowed_hosts for word in ("--allowed-host", name)]
    ended = threading.Event()
    with run_child_process(*arguments) as process:
        _wait(process, address, "The port may be in use. Choose another with --port", log_path("server"))
        watch = threading.Thread(target=_restart_on_exit, args=(process, arguments, ended), daemon=True)
        watch.start()
        try:
            yield True
        finally:
            ended.set()
            watch.join(_PATIENCE)


def _restart_on_exit(process: "subprocess.Popen[bytes]", arguments: list[str], ended: threading.Event) -> None:
    """Restart the server when it has died, at growing intervals while it dies within a minute.

    A restarted server is tied to this thread by die_with_parent. The thread lives as long as this process.
    """
    path, pause = log_path("server"), 1
    while not ended.wait(pause):
        _rotate_log(path)
        if process.poll() is None:
            continue
        log.warning(
            "the Prefect server ended with status %s. It is started again. Its log: %s", process.returncode, path
        )
        started = time.monotonic()
        with run_child_process(*arguments) as again:
            while again.poll() is None and not ended.wait(1):
                _rotate_log(path)
            process = again
        pause = min(_LONGEST_PAUSE, 2 * pause) if time.monotonic() - started < _LONGEST_PAUSE else 1


def start_temporary_server() -> Callable[[], str]:
    """Start a server without a UI that ends with this process.

    Returns:
        A function that waits for the server and returns the address of its API. It raises RuntimeError if the server
        does not start.
    """
    database = Path(os.environ["PREFECT_HOME"]) / "prefect.db"
    if not database.exists() or not database.stat().st_size:
        log.info("the Prefect server creates its database, which takes about ten seconds")
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
        _wait(process, address, "Try again, or set PREFECT_API_URL to a running server", log_path("temporary"))
        return f"{address}/api"

    return wait


def serve_prefect(arguments: argparse.Namespace) -> None:
    """Run Prefect's server as `prefect server start` does, behind our checks and beside the pages of runs, if any."""
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    from flows.middleware import PlainErrorMiddleware, RunPagesMiddleware, StorableBodyMiddleware

    settings = get_current_settings().server
    origins = [item.strip() for item in settings.api.cors_allowed_origins.split(",") if item.strip() != "*"]
    application: Any = StorableBodyMiddleware(PlainErrorMiddleware(create_app(final=True)))
    warm = None
    if arguments.runs is not None:
        from pipeline.web.app import make_application
        from pipeline.web.explore import PageServer, exit_if_busy
        from pipeline.web.model_cache import ModelCache
        from pipeline.web.runs import ServedRuns

        # Models run on the CPU with half of the threads, and leave the rest to trainings.
        warm = ModelCache(overrides=("device=cpu", f"threads={max(1, available_threads() // 2)}"))
        pages = make_application(ServedRuns(arguments.runs), warm, {"Prefect UI": "/v2/"})
        secret = settings.api.auth_string
        application = RunPagesMiddleware(application, pages, secret.get_secret_value() if secret else "")
    hosts = AllowedHosts([*host_names(arguments.host), *arguments.allowed_host], origins)
    config = uvicorn.Config(
        HostCheckMiddleware(application, hosts),
        host=arguments.host,
        port=arguments.port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    # Not `fd=`, which uvicorn takes for a Unix socket: without TCP_NODELAY every answer is 40 ms late.
    sockets = None if arguments.socket is None else [socket.socket(fileno=arguments.socket)]
    if warm is None:
        uvicorn.Server(config).run(sockets)
        return
    try:
        PageServer(config, warm).run(sockets)
    finally:
        exit_if_busy(warm, 128 + signal.SIGINT)


@contextmanager
def waiting_transactions() -> Iterator[None]:
    """Make Prefect's SQLite transactions wait for each other, one at a time, before they begin.

    Prefect begins most transactions as readers. If one writes after reading, it fails at once when another has written
    in between, whatever SQLite's timeout (SQLITE_BUSY_SNAPSHOT), and the request gets 503. With six clients at a time,
    101 of 107 flow runs were refused by Prefect 3.9.1, and none of 193 here. No setting of Prefect changes this.

    They wait for a lock of asyncio. Suppose they waited in SQLite, and the client went away, such as a run that is
    deleted. Then the statement would be reset in the thread of all requests, behind the one that waits. So nothing
    would be answered, and the holder could not end, until SQLite gives up after 60 s.
    """
    from prefect.server.database.configurations import AioSqliteConfiguration
    from prefect.server.database.dependencies import temporary_database_config
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    class WaitingSqliteConfiguration(AioSqliteConfiguration):
        @asynccontextmanager
        async def begin_transaction(self, session: Any, with_for_update: bool = False) -> AsyncIterator[Any]:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            lock = locks.setdefault(loop, asyncio.Lock())
            is_inner = holders.get(loop) is task  # within another one of the same task
            has_turn = False
            try:
                if not is_inner:
                    with suppress(TimeoutError):  # as of a task that the holder waits for
                        async with asyncio.timeout(_TURN_SECONDS):
                            has_turn = await lock.acquire()
                if has_turn:
                    holders[loop] = task
                async with super().begin_transaction(session, with_for_update or not is_inner) as transaction:
                    yield transaction
            finally:
                if has_turn:
                    holders.pop(loop, None)
                    lock.release()

    locks = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
    holders = WeakKeyDictionary[asyncio.AbstractEventLoop, "asyncio.Task[Any] | None"]()
    address = str(PREFECT_API_DATABASE_CONNECTION_URL.value())
    if not address.startswith("sqlite"):
        yield
        return
    with temporary_database_config(WaitingSqliteConfiguration(connection_url=address)):
        yield


def create_database() -> None:
    """Create the database of SQLite, unless there is one; a process at a time, since two at once would both fail."""
    from prefect.server.database import provide_database_interface
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, get_current_settings

    database = get_current_settings().home / "prefect.db"
    if str(PREFECT_API_DATABASE_CONNECTION_URL.value()).endswith(str(database)):
        with file_lock(database.with_name("database.lock")):
            if not database.exists() or not database.stat().st_size:
                asyncio.run(provide_database_interface().create_db())


def serve_tensorboard(port: int, folder: str) -> None:
    """Run TensorBoard on 127.0.0.1."""
    from tensorboard import default, main_lib, program

    class Server(program.WerkzeugServer):
        def __init__(self, application: Any, flags: Any) -> None:
            super().__init__(host_checked_wsgi(application, AllowedHosts(LOOPBACK)), flags)

    main_lib.global_init()
    board = program.TensorBoard(default.get_plugins(), server_class=Server)
    board.configure(["tensorboard", "--logdir", folder, "--host", "127.0.0.1", "--port", str(port)])
    board.main()


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
    arguments = parser.parse_args()
    if arguments.server == "board":
        serve_tensorboard(arguments.port, arguments.logdir)
    else:
        with waiting_transactions():
            create_database()
            serve_prefect(arguments)


if __name__ == "__main__":
    main()
