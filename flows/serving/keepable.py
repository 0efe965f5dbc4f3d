"""A check of requests to Prefect's server for values that it could store but never show again.

The server reads JSON with the standard library and writes it with orjson, which supports neither integers of more than
64 bits nor lone surrogates. One such value in the parameters, name or tags of a flow run would break the list of all
flow runs for good.
"""

import json
import math
from typing import Any

from pipeline.web.host_check import send_response

DEEPEST = 100  # objects and lists within each other
_MOST = 2**63 - 1
_SHOWN = 80  # characters


def find_unstorable_value(body: bytes) -> str | None:
    """Return why a request's JSON cannot be stored; None if it can, or if it is not JSON (the server reports that)."""
    try:
        value = json.loads(body)
    except RecursionError:
        return f"lists and objects lie within each other: give {DEEPEST} levels at most"
    except ValueError as error:  # also an integer of thousands of digits
        return str(error).partition(":")[0] + ": give a smaller one" if "digits" in str(error) else None
    left: list[tuple[Any, str, int]] = [(value, "", 0)]
    while left:
        each, place, depth = left.pop()
        where = f"{place[:_SHOWN]}: " if place else ""
        if depth > DEEPEST:
            return f"{where}lists and objects lie within each other: give {DEEPEST} levels at most"
        if isinstance(each, dict):
            left += [(name, place, depth) for name in each]
            left += [(item, f"{place}.{name}".lstrip("."), depth + 1) for name, item in each.items()]
        elif isinstance(each, list):
            left += [(item, f"{place}[{number}]", depth + 1) for number, item in enumerate(each)]
        elif isinstance(each, str):
            if any("\ud800" <= character <= "\udfff" for character in each):
                return f"{_shorten_text(where)}{_shorten_text(repr(each))} holds half of a character (a lone surrogate): remove it"
        elif isinstance(each, float):
            if not math.isfinite(each):
                return f"{_shorten_text(where)}{each} is no number that can be kept: give one, such as 10"
        elif isinstance(each, int) and abs(each) > _MOST:
            return f"{_shorten_text(where)}{_shorten_text(str(each))} is greater than can be kept: give at most {_MOST}"
    return None


def _shorten_text(text: str) -> str:
    """Return the beginning of a text, with characters escaped that an answer cannot hold."""
    plain = text.encode(errors="backslashreplace").decode()
    return plain if len(plain) <= _SHOWN + 4 else f"{plain[:_SHOWN]}…"


class StorableBodyMiddleware:
    """ASGI middleware that refuses requests with values that the server could store but not show."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or answer 422 with a reason."""
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or not path.startswith("/api/"):
            return await self._application(scope, receive, send)
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has gone
                return None
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        body = b"".join(parts)
        if body and (reason := find_unstorable_value(body)):
            return await send_response(send, 422, json.dumps({"detail": reason}), "application/json")
        given: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return given.pop() if given else await receive()

        await self._application(scope, again, send)
