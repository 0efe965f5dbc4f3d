"""Training and sharding as the UI shows them: a progress artifact with step, loss, bits, rate and time left, or with parts.

A thread of its own talks to the server, so that nobody waits for it, and goes on while there is none.
"""

import contextvars
import hashlib
import logging
import re
import threading
from pathlib import Path
from typing import Any, Protocol, Self

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from data.sharding.progress import Sharding
from pipeline.options import Options, Phase, PhaseOptions
from pipeline.run.metrics import Status
from pipeline.shown import markdown_text

log = logging.getLogger(__name__)
EVERY_SECONDS = 5.0


def key(*parts: str) -> str:
    """An artifact's key: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def run_key(what: str, options: Options) -> str:
    """The key of an artifact of a run, of this run alone: with some digits where the name does not say all."""
    plain = key(what, options.name)
    if plain == f"{what}-{options.name}" and Path(options.runs_dir).resolve() == Path("runs").resolve():
        return plain
    return f"{plain}-{hashlib.sha256(str(Path(options.runs_dir, options.name).resolve()).encode()).hexdigest()[:4]}"


class Shown(Protocol):
    """What an artifact shows: it takes news, and makes a line of them."""

    def __call__(self, news: Any, /) -> None:
        """Takes the newest figures."""

    def progress(self) -> float:
        """Share that is done, in [0, 1]."""

    def line(self) -> str:
        """All of it, for people."""


class LiveArtifact:
    """A progress artifact that follows what it is told; a context manager within a flow run."""

    def __init__(self, artifact: str, status: Shown) -> None:
        self._key, self._status = artifact, status
        self._changed, self._ended = threading.Event(), threading.Event()
        context = contextvars.copy_context()  # the artifact belongs to this flow run
        self._thread = threading.Thread(target=context.run, args=(self._tell,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(5)

    def __call__(self, news: Any) -> None:
        """Takes the newest figures."""
        self._status(news)
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
            percent, text = round(100 * self._status.progress(), 1), markdown_text(self._status.line())
            try:
                if artifact is None:
                    artifact = create_progress_artifact(percent, self._key, text)
                else:
                    update_progress_artifact(artifact, percent, text)
            except Exception as error:  # whatever it is: the server's troubles are not training's
                log.debug("no live artifact: %s", error)
            self._ended.wait(EVERY_SECONDS)


class Live(LiveArtifact):
    """Listens to the metrics of a phase."""

    def __init__(self, phase: Phase, options: Options) -> None:
        limits: PhaseOptions = getattr(options, phase)
        super().__init__(f"{run_key('live', options)}-{phase}", Status(f"{options.name}: {phase}", limits))


class LiveShards(LiveArtifact):
    """Listens to a sharding."""

    def __init__(self, source: str) -> None:
        super().__init__(key("live", source, "shard"), _Newest(f"{source}: shard"))


class _Newest:
    def __init__(self, title: str) -> None:
        self._title = title

    def __call__(self, news: Sharding) -> None:
        self._news = news

    def progress(self) -> float:
        return self._news.share

    def line(self) -> str:
        return self._news.line(self._title)
