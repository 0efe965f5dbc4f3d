"""The page of `haed` tells what its stages do, each of which has a page of its own: in its log, and in its live line."""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Self

from prefect.logging import get_run_logger

from flows.page.live import LiveArtifact, run_key
from pipeline.options import Options, PhaseOptions
from pipeline.run.metrics import Pace, Record, Status, validated

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
