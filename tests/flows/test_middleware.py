"""What the middleware refuses before Prefect's server keeps it, and who gets the pages beside Prefect's UI."""

import asyncio
import base64
import json
from itertools import count
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient

from flows.middleware import RunPagesMiddleware, StorableBodyMiddleware, explain_errors, find_unstorable_value

BEYOND = [
    (b'{"parameters": {"name": "\\ud800"}}', "parameters.name: "),
    (b'{"parameters": {"overrides": ["a", "\\udcff="]}}', "parameters.overrides[1]: "),
    (b'{"tags": ["\xed\xa0\x80"]}', "tags[0]: "),
    (b'{"parameters": {"\\udfff": 1}}', "parameters: "),
    (b'{"parameters": {"x": 92233720368547760001}}', "parameters.x: "),
    (b'{"parameters": {"x": -92233720368547760001}}', "parameters.x: "),
    (b'{"parameters": {"seconds": 1e400}}', "parameters.seconds: "),
    (b'{"parameters": {"seconds": NaN}}', "parameters.seconds: "),
    (b'{"parameters": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply"),
    (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    (b'{"parameters": {"x": ' + b"1" * 5000 + b"}}", "digits"),
]


@pytest.mark.parametrize(("body", "where"), BEYOND, ids=lambda each: repr(each)[:40])
def test_what_no_list_could_show_is_refused_with_its_place_and_advice(body: bytes, where: str) -> None:
    said = find_unstorable_value(body)
    assert said is not None and where in said and len(said) < 300
    said.encode()


@pytest.mark.parametrize(
    "body", [b"", b"{bad", b'{"a": [1, -1.5, null, true, "\\ud83d\\ude00", "\\u0000", 9223372036854775807]}']
)
def test_what_can_be_kept_and_what_is_no_json_goes_to_the_server(body: bytes) -> None:
    assert find_unstorable_value(body) is None


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await Response(await Request(scope, receive).body())(scope, receive, send)


def test_a_request_is_refused_or_passed_on_whole() -> None:
    client, path = TestClient(StorableBodyMiddleware(echo)), "/api/deployments/x/create_flow_run"

    def ask(method: str, *parts: bytes) -> tuple[int, bytes]:
        answer = client.request(method, path, content=iter(parts))
        return answer.status_code, answer.content

    assert ask("POST", b'{"a"', b": 1}") == (200, b'{"a": 1}')
    status, said = ask("PATCH", b'{"name"', b': "\\ud800"}')
    assert status == 422 and "half of a character" in json.loads(said)["detail"]
    assert ask("GET", b'"\\ud800"') == (200, b'"\\ud800"')
    status, said = ask("POST", b'{"parameters": {"source": "a\\u0000b"}}')
    assert status == 422 and json.loads(said)["detail"].endswith("holds a NUL character. Remove it")


def test_messages_of_forms_are_sentences_of_a_readable_length() -> None:
    wrong = [
        f"{value} is not valid under any of the given schemas" for value in ("1.5", "{'rows': -1}", f"'{'x' * 300}'")
    ]
    number, group, text, long = explain_errors({"detail": [*wrong, "x" * 200_000 + " is too long"]})["detail"]
    assert number.startswith("1.5 is no value for this field")
    assert group.startswith("one of these values is not allowed")
    assert len(text) < 200 and "a shorter text" in text and text.startswith("'xxx")
    assert len(long) < 700 and long.endswith("x is too long")


UUID = "0b2f4d3e-7a51-4f6e-9d0c-3c1f2a4b5d6e"


def site(secret: str = "") -> TestClient:
    return TestClient(
        RunPagesMiddleware(PlainTextResponse("Prefect"), PlainTextResponse("pages"), secret), "http://127.0.0.1:4200"
    )


def basic(secret: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


def test_the_pages_have_runs_and_prefect_all_else() -> None:
    prefect = ["/", "/v2/runs", "/api/health", "/runsheet", f"/runs/flow-run/{UUID}"]
    pages = ["/runs", "/runs/", "/runs/flow-run/"]
    found = {path: site().get(path).text for path in (*prefect, *pages)}
    assert found == dict.fromkeys(prefect, "Prefect") | dict.fromkeys(pages, "pages")


def test_a_password_is_asked_for_once(secret: str = "haed:sesam öffne") -> None:
    client = site(secret)
    assert client.get("/").text == "Prefect"  # which asks for it itself
    refused = client.get("/runs/")
    assert refused.status_code == 401 and refused.headers["www-authenticate"].startswith("Basic ")
    wrong: list[dict[str, Any]] = [basic("haed:other"), {"Authorization": "Basic"}, {"Authorization": "Bearer x"}]
    wrong += [{"Authorization": "Basic é".encode()}, {"Cookie": "haed-pages=x"}, {"Cookie": 'haed-pages="\\377'}]
    for headers in wrong:
        assert client.get("/runs/", headers=headers).status_code == 401
        assert client.post("/enter", headers=headers).status_code == 401
    assert client.get("/runs/", headers=basic(secret)).text == "pages"

    assert "localStorage" in client.get("/enter").text and not client.cookies
    shown = client.get("/runs/?search=a", headers={"Accept": "text/html,*/*"})  # by which that page can be entered
    assert shown.status_code == 401 and shown.text == client.get("/enter").text
    told = client.post("/runs/.change", headers={"Accept": "text/html"})  # what was sent cannot be shown after it
    assert told.status_code == 401 and told.text.startswith("haed serve has a password")
    told = client.post("/enter", headers=basic(secret))
    assert told.status_code == 204
    cookie = told.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=lax", "Path=/runs")) and "sesam" not in cookie
    assert client.get("/runs/").text == "pages"
    assert "again" in client.get("/leave").text and not client.cookies
    assert client.get("/runs/").status_code == 401


@pytest.mark.parametrize("path", ["/api/flow_runs/filter", "/api/health", "/openapi.json", "/docs", "/redoc"])
def test_without_the_password_prefect_reads_no_request(path: str) -> None:
    asked: list[str] = []

    async def prefect(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await PlainTextResponse("Prefect")(scope, receive, send)

    client = TestClient(RunPagesMiddleware(prefect, PlainTextResponse("pages"), "haed:sesam"))
    assert client.post(path, content=b"x").status_code == 401 and not asked
    assert client.post(path, content=b"x", headers=basic("haed:sesam")).text == "Prefect"
    assert client.options(path).text == "Prefect" and client.get("/ui-settings").text == "Prefect"
    assert client.get("/api/health").text == "Prefect"


def test_a_request_without_end_is_refused_while_it_is_read() -> None:
    read, said = count(), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        assert next(read) < 17
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    scope = {"type": "http", "method": "POST", "path": "/api/deployments/x/create_flow_run", "headers": []}
    asyncio.run(StorableBodyMiddleware(echo)(scope, receive, send))
    assert said[0]["status"] == 413 and b"at most 16 MiB" in said[1]["body"]
    assert find_unstorable_value(b"[" + b"1," * 1_000_001 + b"1]") == "it has more than 1,000,000 values"
