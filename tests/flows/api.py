"""Prefect's API as the UI calls it."""

import json
import time
import urllib.request
from typing import Any

PATIENCE = 900  # seconds, which only what hangs takes, however much else the machine does


def call(address: str, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """GET, or POST of a body, or another method; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api{path}", data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read() or "null")


def until(seconds: float, found: Any, every: float = 0.3) -> Any:
    """Waits for a true answer, and asks every so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = found()
        except OSError:
            answer = None
        if answer:
            return answer
        time.sleep(every)
    raise AssertionError(f"nothing after {seconds} s")
