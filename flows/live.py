"""Training as the UI shows it while it runs: a progress artifact with step, loss, bits, rate and time left.

A thread of its own talks to the server, so that training never waits for it, and goes on while there is none.
"""

import contextvars
import logging
import re
import threading
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from pipeline.metrics import Status
from pipeline.options import PhaseOptions

log = logging.getLogger(__name__)
EVERY_SECONDS = 5.0


def key(*parts: str) -> str:
    """An artifact's key: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class Live:
    """Listens to the metrics of a phase; a context manager within a flow run."""

    def __init__(self, run: str, phase: str, limits: PhaseOptions) -> None:
        self._key, self._status = key("live", run, phase), Status(f"{run}: {phase}", limits)
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
        """Takes a metrics record, or a part of one."""
        self._status(record)
        self._changed.set()

    def _tell(self) -> None:
        artifact: Any = None
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last = self._ended.is_set()
            if last and artifact is None:
                return
            percent, text = round(100 * self._status.progress(), 1), self._status.line()
            try:
                if artifact is None:
                    artifact = create_progress_artifact(percent, self._key, text)
                else:
                    update_progress_artifact(artifact, percent, text)
            except Exception as error:  # whatever it is: the server's troubles are not training's
                log.debug("no live artifact: %s", error)
            self._ended.wait(EVERY_SECONDS)
