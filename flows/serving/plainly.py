"""Plain error messages for the form checks of Prefect's server, without regular expressions and typed passwords.

The checks use jsonschema, whose messages repeat the value and the pattern that it does not match.
"""

import json
import re
from typing import Any

from data.urls import NO_SECRET, redact_urls

_CHECKED = re.compile(r"/api/(deployments/[^/]+/create_flow_run(/bulk)?|deployments/?([^/]+)?|ui/schemas/validate)")
WORDS = {
    NO_SECRET: "an address holds no name, password or signature here, as it would be kept and shown: leave it out, as in "
    "s3://BUCKET/FOLDER; keys come from the environment (docs/safety.md says which)"
}


def explain_errors(value: Any) -> Any:
    """Return the JSON of an answer with patterns replaced by explanations and secrets by stars."""
    if isinstance(value, dict):
        return {key: explain_errors(each) for key, each in value.items()}
    if isinstance(value, list):
        return [explain_errors(each) for each in value]
    if not isinstance(value, str):
        return value
    for pattern, words in WORDS.items():
        if (end := f" does not match {pattern!r}") in value:
            before = value.partition(end)[0]
            where, reason, _ = before.partition("Failure reason: ")
            return f"{where}{words}" if reason else words
    return redact_urls(value)


class PlainErrorMiddleware:
    """ASGI middleware that rewrites the error messages of form checks."""

    def __init__(self, application: Any) -> None:
        self._application = application

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer as the wrapped application does, with rewritten error messages."""
        if scope["type"] != "http" or scope["method"] == "GET" or not _CHECKED.fullmatch(scope.get("path", "")):
            return await self._application(scope, receive, send)
        start: dict[str, Any] = {}
        body = b""

        async def look(message: Any) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            said = body
            if start["status"] in (400, 409, 422) or scope["path"].endswith("/validate"):
                try:
                    said = json.dumps(explain_errors(json.loads(body))).encode()
                except ValueError:
                    pass
            kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
            await send(start | {"headers": [*kept, (b"content-length", str(len(said)).encode())]})
            await send({"type": "http.response.body", "body": said})

        # Compressed answers could not be read.
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
        await self._application(scope | {"headers": headers}, receive, look)
