"""Training and sharding as the UI shows them: a progress artifact with step, loss, bits, rate and time left, or with parts.

A thread of its own talks to the server, so that nobody waits for it, and goes on while there is none.

The page of `haed` tells what its stages do, each of which has a page of its own: in its log, and in its live line.
"""

import contextvars
import hashlib
import logging
import re
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol, Self

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from data.sharding.progress import Sharding
from pipeline.options import Options, Phase, PhaseOptions
from pipeline.run.metrics import Pace, Record, Status, validated
from pipeline.shown import markdown_text

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


_OUTER: ContextVar["Story | None"] = ContextVar("outer", default=None)


def tell(message: str, *values: object) -> None:
    """Logs on the page of the flow run that this stage is a part of, if it is one."""
    if (story := _OUTER.get()) is not None:
        story.log.info(message, *values)


def follow(stage: str, record: Record | None = None) -> None:
    """Moves the live line there: a stage has begun, or told its newest figures; validations are logged too."""
    if (story := _OUTER.get()) is not None:
        story((stage, record or {}))
        if record and (line := validated(record["step"], record)):
            story.log.info("%s %s", stage, line)


class _OnPages(logging.Filter):
    """Keeps off a terminal what a stage has said there already, and was said for the page of the run that it is part of."""

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: D102
        return not getattr(record, "haed_told", False)


def _told_on_pages() -> Any:
    """The logger of this flow run, of which terminals show nothing."""
    for name in ("", "prefect"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and not any(isinstance(e, _OnPages) for e in handler.filters):
                handler.addFilter(_OnPages())
    return get_run_logger(haed_told=True)


class Story(LiveArtifact):
    """What a flow run of several stages shows of them; a context manager, within which stages tell it."""

    def __init__(self, options: Options, shares: Mapping[str, float]) -> None:
        limits = {phase: getattr(options, phase) for phase in shares}
        super().__init__(run_key("live", options), _Whole(options.name, limits, shares))
        self.log = _told_on_pages()

    def __enter__(self) -> Self:
        self._before = _OUTER.set(self)
        return super().__enter__()

    def __exit__(self, *what: object) -> None:
        _OUTER.reset(self._before)
        super().__exit__(*what)


class _Whole:
    """How far all phases are, and which stage is at work.

    Args:
        name: of the run.
        limits: of its phases.
        shares: of each of them, of all the training.
    """

    def __init__(self, name: str, limits: Mapping[str, PhaseOptions], shares: Mapping[str, float]) -> None:
        self._name, self._stage, self._shares, self._pace = name, "", shares, Pace()
        self._done: set[str] = set()
        self._phases = {phase: Status(f"{name}: {phase}", each) for phase, each in limits.items()}

    def __call__(self, news: tuple[str, Record]) -> None:
        stage, record = news
        if stage != self._stage:
            self._done.add(self._stage)
            self._stage = stage
        if self._stage in self._phases and record:
            self._phases[self._stage](record)
            self._pace(self.progress())

    def progress(self) -> float:
        return sum(
            share * (1 if phase in self._done else self._phases[phase].progress())
            for phase, share in self._shares.items()
        )

    def line(self) -> str:
        phase = self._phases.get(self._stage)
        share, *left = self._pace(self.progress())
        return " · ".join([f"{share} of training", *left, phase.figures() if phase else f"{self._name}: {self._stage}"])


log = logging.getLogger(__name__)
