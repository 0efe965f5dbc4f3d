"""Training as the UI shows it while it runs: a progress artifact with step, loss, bits, rate and time left.

A thread of its own talks to the server, so that training never waits for it, and goes on while there is none.
"""

import contextvars
import logging
import re
import threading
import time
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from pipeline.learning import Position
from pipeline.options import PhaseOptions

log = logging.getLogger(__name__)
EVERY_SECONDS = 3.0
SHOWN = {"loss": "loss", "iem": "IEM", "bits_per_token": "bits/token", "validation/bits_per_token": "validation"}


def key(*parts: str) -> str:
    """An artifact's key: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class Live:
    """Listens to the metrics of a phase; a context manager within a flow run."""

    def __init__(self, run: str, phase: str, limits: PhaseOptions) -> None:
        self.run, self.phase, self.limits = run, phase, limits
        self._shown: dict[str, Any] = {}
        self._began: tuple[float, float] | None = None
        self._changed, self._ended = threading.Event(), threading.Event()
        context = contextvars.copy_context()  # the artifact belongs to this flow run
        self._thread = threading.Thread(target=context.run, args=(self._tell,), daemon=True)

    def __enter__(self) -> "Live":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(5)

    def __call__(self, record: dict[str, Any]) -> None:
        """Takes a metrics record."""
        self._began = self._began or (time.monotonic(), self._progress(record))
        self._shown |= record
        self._changed.set()

    def _progress(self, record: dict[str, Any]) -> float:
        position = Position(record["step"], record.get("seconds", 0.0), record.get("epoch", 0.0))
        return position.progress(self.limits)

    def _tell(self) -> None:
        artifact: Any = None
        while not self._ended.is_set():
            self._changed.wait()
            self._changed.clear()
            if not self._shown:
                continue
            progress, text = self._progress(self._shown), self._line()
            try:
                if artifact is None:
                    artifact = create_progress_artifact(100 * progress, key("live", self.run, self.phase), text)
                else:
                    update_progress_artifact(artifact, 100 * progress, text)
            except Exception as error:  # whatever it is: the server's troubles are not training's
                log.debug("no live artifact: %s", error)
            self._ended.wait(EVERY_SECONDS)

    def _line(self) -> str:
        assert self._began is not None
        shown, (began, first) = self._shown, self._began
        parts = [f"{self.run}: {self.phase}, step {shown['step']:,}"]
        parts += [f"{label} {shown[name]:.3f}" for name, label in SHOWN.items() if name in shown]
        if "steps_per_second" in shown:
            parts.append(f"{shown['steps_per_second']:.1f} steps/s")
        gained = self._progress(shown) - first
        if gained > 0:
            parts.append(f"{(1 - first - gained) * (time.monotonic() - began) / gained:,.0f} s left")
        return " · ".join(parts)
