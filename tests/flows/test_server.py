"""What `haed` knows of the servers it starts: whether one answers, and what it said."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows import server
from tests.flows.api import PATIENCE, clean_environment, free_ports, until

TURNS = """
import asyncio, json
from contextlib import asynccontextmanager
import sqlalchemy as sa
from flows.server import waiting_transactions
from prefect.server.database import provide_database_interface

@asynccontextmanager
async def begin(database):
    session = await database.session(await database.engine())
    async with session, database.begin_transaction(session):
        async def run(*words, **values):
            found = [await session.execute(sa.text(word), values) for word in words]
            return found[-1].scalar() if found[-1].returns_rows else None
        yield run

async def count(database):
    async def add():
        async with begin(database) as run:
            number = await run("select n from t")
            await asyncio.sleep(0.1)
            await run("update t set n = :n", n=number + 1)

    async with begin(database) as run:
        await run("drop table if exists t", "create table t (n int)", "insert into t values (0)")
    said = await asyncio.gather(*(add() for _ in range(4)), return_exceptions=True)
    async with begin(database) as run:
        found = await run("select n from t")
    await (await database.engine()).dispose()
    return [found, sum("database is locked" in str(item) for item in said)]

async def leave(database):
    # One that waits is given up, as when its client goes away, while another one goes on and has one within.
    begun = asyncio.Event()

    async def hold():
        async with begin(database) as run:
            await run("update t set n = n + 1")
            begun.set()
            await asyncio.sleep(0.5)
            async with begin(database) as within:
                before = await within("select n from t")
            await run("update t set n = n + 1")
            return before

    async def wait():
        async with begin(database) as run:
            await run("select n from t")

    holds = asyncio.create_task(hold())
    await begun.wait()
    waits = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0.1)
    for each in waits[:2]:
        each.cancel()
    found = await asyncio.wait_for(holds, 20)
    await asyncio.wait_for(waits[2], 20)
    await (await database.engine()).dispose()
    return found

theirs = asyncio.run(count(provide_database_interface().database_config))
with waiting_transactions():
    ours = asyncio.run(count(provide_database_interface().database_config))
    before = asyncio.run(leave(provide_database_interface().database_config))
print(json.dumps([theirs, ours, before]))
"""


@pytest.mark.nightly
def test_transactions_that_write_after_they_read_wait_for_each_other(tmp_path: Path) -> None:
    """What Prefect answers with 503 otherwise: Submit beside running flows. When it counts right, `waiting_transactions` goes."""
    where = {
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path}/x.db",
    }
    done = subprocess.run([sys.executable, "-c", TURNS], env=os.environ | where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (theirs, locked), ours, before = json.loads(done.stdout.splitlines()[-1])
    assert theirs < 4 and locked > 0  # else there is nothing to mend any more
    assert ours == [4, 0] and before == 4


def test_something_else_on_the_port_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def echo() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(connection.recv(1000))

        thread = threading.Thread(target=echo)
        thread.start()
        assert not server.is_server_healthy(f"http://127.0.0.1:{other.getsockname()[1]}")
        thread.join()


def test_a_log_is_kept_and_does_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.setattr(server, "_LOG_BYTES", 100)
    path = server.log_path("server")
    server._rotate_log(path)  # there is none yet
    with open(path, "ab") as said:  # the server keeps it open
        for number in range(30):
            said.write(b"line %2d\n" % number)
            said.flush()
            server._rotate_log(path)
    kept = path.with_suffix(".log.old").read_text().splitlines() + path.read_text().splitlines()
    assert kept == [f"line {number:2}" for number in range(30 - len(kept), 30)] and len(kept) > 10
    assert path.stat().st_size <= 108


def test_a_server_that_cannot_start_is_tried_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes five seconds of a core, and its folder may be gone for good."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    pauses = list[float]()

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0)
            return len(pauses) > 9

    @contextmanager
    def start(*_: object) -> Iterator["subprocess.Popen[bytes]"]:
        with subprocess.Popen(["false"]) as process:
            process.wait()
            yield process

    monkeypatch.setattr(server, "run_child_process", start)
    with start() as first:
        server._restart_on_exit(first, [], Ended())
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


def test_nobody_takes_the_port_of_a_server_that_still_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI has seen another server take one that was chosen, freed and then taken again."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    asked: list[Any] = []
    monkeypatch.setattr(server, "_wait", lambda *words: asked.extend(words))
    server.start_temporary_server()()
    process, address = asked[:2]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(address.rpartition(":")[2])))
    assert address.startswith("http://127.0.0.1:")
    process.terminate()
    process.wait()  # else other tests of this process find a zombie


@pytest.mark.nightly
def test_servers_that_start_at_once_make_one_database(tmp_path: Path) -> None:
    """As two commands do, the first in their folder."""
    ports = free_ports()
    home = clean_environment(PREFECT_HOME=str(tmp_path), PREFECT_SERVER_UI_ENABLED="false")
    command = [sys.executable, "-m", "flows.server", "prefect", "--port"]
    with ExitStack() as stack:
        for port in ports:
            process = stack.enter_context(subprocess.Popen([*command, str(port)], env=home, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
        until(PATIENCE, lambda: all(server.is_server_healthy(f"http://127.0.0.1:{port}") for port in ports))
