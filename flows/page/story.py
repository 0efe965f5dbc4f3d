"""The page of `haed` tells what its stages do, each of which has a page of its own: in its log, and in its live line."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Self

from prefect.logging import get_run_logger

from flows.page.live import LiveArtifact, run_key
from pipeline.options import Options, PhaseOptions
from pipeline.run.metrics import Pace, Record, Status

_OUTER: ContextVar["Story | None"] = ContextVar("outer", default=None)


def tell(message: str, *values: object) -> None:
    """Logs on the page of the flow run that this stage is a part of, if it is one."""
    if (story := _OUTER.get()) is not None:
        story.log.info(message, *values)


def follow(stage: str, record: Record | None = None) -> None:
    """Moves the live line there: a stage has begun, or told its newest figures; validations are logged too."""
    if (story := _OUTER.get()) is not None:
        story((stage, record or {}))
        if record and (line := validated(stage, record)):
            story.log.info("%s", line)


def validated(stage: str, record: Record) -> str:
    """A line on a record of a validation, else nothing."""
    found = {name.removeprefix("validation/"): value for name, value in record.items() if "validation/" in name}
    words = [f"{name.replace('_per_', '/').replace('_', ' ')} {value:.4f}" for name, value in found.items()]
    return f"{stage} step {record['step']:,}: validation {', '.join(words)}" if words else ""


class Story(LiveArtifact):
    """What a flow run of several stages shows of them; a context manager, within which stages tell it."""

    def __init__(self, options: Options, shares: Mapping[str, float]) -> None:
        limits = {phase: getattr(options, phase) for phase in shares}
        super().__init__(run_key("live", options), _Whole(options.name, limits, shares))
        self.log = get_run_logger()

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
