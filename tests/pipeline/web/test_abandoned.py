"""Questions that nobody waits for any more: real clients of a real server that ask and leave, and servers that end."""

import asyncio
import json
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from pipeline.run.run_directory import RunFolder
from pipeline.signals import AbandonedError, abandon_when
from pipeline.web.explore import PageServer
from pipeline.web.model_cache import MOST_WAITING
from tests.conftest import mostly_nightly
from tests.flows.api import until
from tests.pipeline.web.test_app import Site
from tests.pipeline.web.test_explore import explore

SHORT = "/runs/run/samples?prompt=a&chunks=1&format=json"
SECONDS = 240  # of a machine that is busy with others
LONG = "/runs/run/samples?prompt=a&samples=4&chunks=500&format=json"


class Serving:
    """The pages of a run behind a socket, in a thread; `hold` keeps the thread of questions busy until `release`."""

    def __init__(self, run: Path) -> None:
        self.folder, self.held, self.ended = RunFolder(run), threading.Event(), 0
        site = Site(run, single=True)
        self.warm, self.pages = site.warm, site.guarded
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.server = PageServer(
            uvicorn.Config(self._counted, interface="asgi3", lifespan="off", log_level="error"), self.warm
        )
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)

    async def _counted(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self.pages(scope, receive, send)
        finally:
            self.ended += 1

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve([self.listening])

    def hold(self) -> None:
        """Asks a question that is answered when it is released; returns once it is being answered."""
        began = threading.Event()

        def wait(_: Any) -> None:
            began.set()
            self.held.wait(SECONDS)

        asyncio.run_coroutine_threadsafe(self.warm.ask_run(self.folder, wait), self.loop)
        assert began.wait(SECONDS)

    def send(self, address: str) -> socket.socket:
        """A client that has asked."""
        client = socket.create_connection(("127.0.0.1", self.port))
        client.sendall(f"GET {address} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
        return client

    def ask(self, address: str) -> tuple[int, Any]:
        """Status and answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{address}", timeout=300) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def close(self) -> None:
        self.held.set()
        self.server.should_exit = True
        wait_for(lambda: not self.thread.is_alive())


def wait_for(found: Callable[[], Any]) -> None:
    until(SECONDS, found, 0.01)


@pytest.fixture
def serving(run: Path) -> Iterator[Serving]:
    made = Serving(run)
    yield made
    made.close()


def test_of_forty_clients_that_ask_and_leave_no_question_is_answered(serving: Serving) -> None:
    serving.hold()
    for _ in range(40):
        serving.send(LONG).close()
    wait_for(lambda: serving.ended == 40 and serving.warm.waiting == 1)  # the held one
    with ThreadPoolExecutor() as clients:
        last = clients.submit(serving.ask, SHORT)
        wait_for(lambda: serving.warm.waiting == 2)
        serving.held.set()
    status, answer = last.result()
    assert status == 200 and answer["value"]["samples"]
    assert serving.warm.begun == 2  # the held one and the last


def test_a_question_that_is_being_answered_stops_when_its_client_leaves(serving: Serving) -> None:
    client = serving.send(LONG)
    wait_for(lambda: serving.warm.begun == 1)
    client.close()
    wait_for(lambda: not serving.warm.waiting)
    assert serving.ask(SHORT)[0] == 200 and serving.warm.begun == 2


def test_loops_that_take_long_look_whether_they_are_still_asked_for(run: Path) -> None:
    from pipeline import open_run

    opened, looks = open_run(run), iter([False] * 5 + [True] * 9)
    with abandon_when(lambda: next(looks)), pytest.raises(AbandonedError):
        opened.sample("a", 1)
        opened.sample("a", 1)
    with abandon_when(lambda: True), pytest.raises(AbandonedError):
        opened.score("def f(x):")
    assert opened.sample("a", 1)  # nobody has to ask


def test_questions_that_wait_are_told_that_the_server_ends(serving: Serving) -> None:
    serving.hold()
    with ThreadPoolExecutor(5) as clients:
        asked = [clients.submit(serving.ask, LONG) for _ in range(5)]
        wait_for(lambda: serving.warm.waiting == 6)
        assert not serving.warm.close(0.05)  # the held one goes on
        serving.server.should_exit = True
        wait_for(lambda: not serving.thread.is_alive())  # though the held one still is
    answers = [each.result() for each in asked]
    assert [status for status, _ in answers] == [503] * 5 and "the server is stopping" in answers[0][1]["error"]
    assert serving.warm.begun == 1
    serving.held.set()
    assert serving.warm.close(300)


def test_too_many_questions_are_refused_until_some_leave(serving: Serving) -> None:
    serving.hold()
    clients = [serving.send(SHORT) for _ in range(MOST_WAITING - 1)]
    wait_for(lambda: serving.warm.waiting == MOST_WAITING)
    status, answer = serving.ask(SHORT)
    assert status == 503 and "questions are waiting" in answer["error"]
    for client in clients:
        client.close()
    wait_for(lambda: serving.warm.waiting == 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", mostly_nightly([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_a_signal_ends_explore_while_questions_are_answered_and_wait(run: Path, number: int) -> None:
    address, process = explore(run)
    port = int(address.rstrip("/").rpartition(":")[2])
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
    for client in clients:
        client.sendall(f"GET {LONG} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + number and not said
    for client in clients:
        client.close()
