"""Prefect's API as the UI calls it."""

import json
import time
import urllib.request
from typing import Any


def call(address: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """GET, or POST of a body; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def until(seconds: float, found: Any) -> Any:
    """Waits for a true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = found()
        except OSError:
            answer = None
        if answer:
            return answer
        time.sleep(0.3)
    raise AssertionError(f"nothing after {seconds} s")
