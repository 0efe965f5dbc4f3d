"""The door before the servers that `haed` starts: real requests and websockets to a real server behind it."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
import websockets
from starlette.datastructures import Headers

from pipeline.web.host_check import LOOPBACK, AllowedHosts, HostCheckMiddleware, host_checked_wsgi, host_names

EVIL = "https://evil.example"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Says yes to everything, and to every origin, as Prefect's server does by default."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "yes"})
        await receive()
    elif scope["type"] == "http":
        headers = [(b"access-control-allow-origin", b"*")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"yes"})


@contextmanager
def serve(pages: Any) -> Iterator[int]:
    """A server in a thread; its port."""
    server = uvicorn.Server(uvicorn.Config(pages, port=0, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.02)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serve(HostCheckMiddleware(application, AllowedHosts(LOOPBACK, ["https://ours.example"]))) as port:
        yield port


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {}, 200),
        ("POST", {}, 200),
        ("POST", {"Origin": "http://127.0.0.1:PORT"}, 200),
        ("POST", {"Host": "localhost:PORT", "Origin": "http://localhost:PORT"}, 200),
        ("POST", {"Host": "LOCALHOST.:PORT"}, 200),
        ("POST", {"Host": "[::1]:PORT"}, 200),
        ("POST", {"Host": "[::1].evil.example"}, 403),
        ("POST", {"Host": "127.0.0.1:evil@evil.example"}, 403),
        ("POST", {"Host": "127.0.0.1:"}, 403),
        ("POST", {"Origin": "https://ours.example"}, 200),
        ("OPTIONS", {"Origin": EVIL, "Access-Control-Request-Method": "POST"}, 403),
        ("POST", {"Origin": EVIL, "Content-Type": "text/plain"}, 403),
        ("GET", {"Origin": EVIL}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "http://127.0.0.1:1"}, 403),  # another server on this machine
        ("POST", {"Origin": "http://127.0.0.1:PORT.evil.example"}, 403),
        ("GET", {"Host": "evil.example"}, 403),
        ("GET", {"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"}, 403),
        ("GET", {"Host": "127.0.0.1.evil.example:PORT"}, 403),
        ("GET", {"Host": ""}, 403),
        ("POST", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
        *(
            ("GET", {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": what, **more}, status)
            for site, mode, what, more, status in (
                ("cross-site", "navigate", "document", {}, 200),  # a link that is followed
                ("none", "navigate", "document", {}, 200),
                ("same-origin", "navigate", "iframe", {}, 200),
                ("same-origin", "no-cors", "image", {}, 200),
                ("cross-site", "navigate", "iframe", {}, 403),
                ("cross-site", "navigate", "frame", {}, 403),
                ("cross-site", "navigate", "embed", {}, 403),
                ("cross-site", "navigate", "object", {}, 403),
                ("same-site", "navigate", "iframe", {}, 403),  # another port of this machine
                ("cross-site", "no-cors", "image", {}, 403),
                ("same-site", "no-cors", "script", {}, 403),
                ("cross-site", "no-cors", "empty", {}, 403),
                ("cross-site", "navigate", "document", {"Sec-Purpose": "prefetch;prerender"}, 403),
                ("cross-site", "cors", "empty", {"Origin": "https://ours.example"}, 200),
            )
        ),
    ],
)
def test_only_who_addresses_the_server_by_its_name_is_answered(
    method: str, headers: dict[str, str], status: int, port: int
) -> None:
    filled = {name: value.replace("PORT", str(port)) for name, value in headers.items()}
    body = b"{}" if method == "POST" else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", body, filled, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            found, allowed = answer.status, answer.headers["Access-Control-Allow-Origin"]
    except urllib.error.HTTPError as error:
        found, allowed = error.code, error.headers["Access-Control-Allow-Origin"]
        error.close()
    assert found == status and (allowed is None) == (status == 403)


@pytest.mark.parametrize(("origin", "let_in"), [(None, True), ("http://127.0.0.1:PORT", True), (EVIL, False)])
def test_websockets_of_other_sites_are_refused(origin: str | None, let_in: bool, port: int) -> None:
    async def ask() -> str:
        given: Any = origin and origin.replace("PORT", str(port))
        async with websockets.connect(f"ws://127.0.0.1:{port}/", origin=given) as socket:
            return str(await socket.recv())

    if let_in:
        assert asyncio.run(ask()) == "yes"
    else:
        with pytest.raises(websockets.InvalidStatus, match="403"):
            asyncio.run(ask())


def test_the_names_of_a_server() -> None:
    def answers(rules: AllowedHosts, *hosts: str, **more: str) -> bool:
        sent = [(b"host", host.encode()) for host in hosts] + [(k.encode(), v.encode()) for k, v in more.items()]
        return rules.refusal_reason(Headers(raw=sent)) is None

    everywhere, here = AllowedHosts(host_names("0.0.0.0")), AllowedHosts(LOOPBACK)
    for host in ("192.0.2.7:4200", "[2001:db8::1]:4200", socket.gethostname(), "localhost:4200"):
        assert answers(everywhere, host)
    assert not answers(everywhere, "evil.example") and not answers(everywhere)
    assert not answers(here, "192.0.2.7:4200") and not answers(here, "127.0.0.1", "evil.example")
    assert answers(AllowedHosts([*LOOPBACK, "board.example"]), "board.example", origin="https://board.example")
    assert "allowed-host" in str(here.refusal_reason(Headers({"host": "board.example"})))  # what helps


FRAMED = {"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "navigate", "HTTP_SEC_FETCH_DEST": "iframe"}


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"HTTP_HOST": "127.0.0.1:6006"}, "200 OK"),
        ({"HTTP_HOST": "127.0.0.1:6006"} | FRAMED, "403 Forbidden"),
        ({"HTTP_HOST": "evil.example:6006"}, "403 Forbidden"),
        ({"HTTP_HOST": "127.0.0.1:6006", "HTTP_ORIGIN": EVIL}, "403 Forbidden"),
        ({}, "403 Forbidden"),
    ],
)
def test_the_same_rules_for_wsgi(given: dict[str, Any], status: str) -> None:
    def board(environment: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Security-Policy", "default-src 'self'")])
        return [b"yes"]

    said: list[Any] = []
    answered = host_checked_wsgi(board, AllowedHosts(LOOPBACK))(given, lambda *answer: said.append(answer))
    ((found, headers),) = said
    assert found == status and (answered == [b"yes"]) == (status == "200 OK")
    if status == "200 OK":
        assert ("x-frame-options", "SAMEORIGIN") in headers and len(headers) == 6
        assert ("Content-Security-Policy", "frame-ancestors 'self'") in headers


def test_no_answer_may_be_framed_guessed_at_or_embedded_elsewhere(port: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120) as answer:
        assert answer.headers["X-Frame-Options"] == "SAMEORIGIN"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "frame-ancestors 'self'" in answer.headers["Content-Security-Policy"]
