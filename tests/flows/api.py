"""Prefect's API as the UI calls it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

PATIENCE = 900  # seconds, which only what hangs takes, however much else the machine does
# A flag, a command that has a flow, or advice to repeat one: nothing for a reader without a terminal.
COMMAND = re.compile(
    r"(?<![\w-])--[a-z]|[Rr]un the same command|"
    r"\bhaed (run|shard|pretrain|finetune|train|evaluate|sample|next|index|neighbours|analyse|report|compare)\b"
)
ROOT = Path(__file__).resolve().parents[2]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment of a process of ours that starts in another folder: nothing of Prefect but what is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def python(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], clean_environment(**environment)
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)


def haed(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(place, "-m", "flows.cli", *arguments, **environment)


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def has_begun(metrics: Path) -> bool:
    """Whether a first step was done: before it there is nothing to save, and a signal ends a training at once."""
    return metrics.is_file() and metrics.stat().st_size > 0


def call(address: str, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """GET, or POST of a body, or another method; the answer's JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api{path}", data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read() or "null")


def check_texts(address: str) -> int:
    """Checks that no text of a server names a command or a flag, and returns how many there are.

    They are artifacts, but for tables and samples, which have the data, states of flow runs, and logs.
    """

    def read(what: str) -> Iterator[dict[str, Any]]:
        for offset in count(0, 200):
            yield from (some := call(address, f"/{what}/filter", {"limit": 200, "offset": offset}))
            if len(some) < 200:
                return

    texts = [each["message"] for each in read("logs")]
    texts += [each["state"]["message"] or "" for each in read("flow_runs")]
    for each in read("artifacts"):
        has_data = each["type"] == "table" or each["key"].startswith("samples-")
        texts += [each["description"] or "", "" if has_data else str(each["data"])]
    wrong = [text for text in texts if COMMAND.search(text)]
    assert not wrong, wrong
    return len(texts)


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
