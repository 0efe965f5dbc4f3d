"""What Prefect's server could keep and show no more is refused before it is kept."""

import asyncio
import json
from typing import Any

import pytest

from flows.serving.keepable import StorableBodyMiddleware, find_unstorable_value

BEYOND = [
    (b'{"parameters": {"name": "\\ud800"}}', "parameters.name: "),
    (b'{"parameters": {"overrides": ["a", "\\udcff="]}}', "parameters.overrides[1]: "),
    (b'{"tags": ["\xed\xa0\x80"]}', "tags[0]: "),
    (b'{"parameters": {"\\udfff": 1}}', "parameters: "),
    (b'{"parameters": {"x": 92233720368547760001}}', "parameters.x: "),
    (b'{"parameters": {"x": -92233720368547760001}}', "parameters.x: "),
    (b'{"parameters": {"seconds": 1e400}}', "parameters.seconds: "),
    (b'{"parameters": {"seconds": NaN}}', "parameters.seconds: "),
    (b'{"parameters": ' + b"[" * 500 + b"]" * 500 + b"}", "levels at most"),
    (b"[" * 100_000 + b"]" * 100_000, "levels at most"),
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


async def _asked(method: str, path: str, parts: list[bytes]) -> tuple[int, bytes]:
    """Status and body of an answer of an application that gives back what it was sent."""

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    left = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await StorableBodyMiddleware(inner)({"type": "http", "method": method, "path": path}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def test_a_request_is_refused_or_passed_on_whole() -> None:
    path = "/api/deployments/x/create_flow_run"
    assert asyncio.run(_asked("POST", path, [b'{"a"', b": 1}"])) == (200, b'{"a": 1}')
    status, said = asyncio.run(_asked("PATCH", path, [b'{"name"', b': "\\ud800"}']))
    assert status == 422 and "half of a character" in json.loads(said)["detail"]
    assert asyncio.run(_asked("GET", path, [b'"\\ud800"'])) == (200, b'"\\ud800"')
