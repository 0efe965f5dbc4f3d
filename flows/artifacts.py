"""Artifacts of flow runs: texts and tables, and progress artifacts of training and sharding.

The UI renders descriptions as Markdown, so descriptions are escaped here. A separate thread sends the updates of a
progress artifact, so that training never waits for the server and continues without one.

The page of the flow `haed` shows the progress of its stages, in its log and progress artifact. Each stage has its own
page.
"""

import contextvars
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.logging import get_run_logger

from data.parts import ShardingProgress
from pipeline.config import Options, PhaseOptions
from pipeline.console import make_printable, markdown_text
from pipeline.run.metrics import PhaseStatus, Record, RemainingTime, format_validation
from pipeline.suggestions import name_flows

log = logging.getLogger(__name__)
EVERY_SECONDS = 5.0
ROOMS = ("pipeline", "data", "haed", "flows")


def post_markdown(text: str, key: str, *descriptions: str) -> None:
    """Post a Markdown text.

    Args:
        text: Markdown, whose names, paths and messages went through `pipeline.console.markdown_text` or `markdown_code`.
        key: of the artifact.
        descriptions: paragraphs of its description, as plain text.
    """
    _post(create_markdown_artifact, text, key, descriptions)


def post_table(rows: Sequence[Mapping[str, Any]], key: str, *descriptions: str) -> None:
    """Post a table, whose cells the UI shows as plain text; see `post_markdown`."""
    shown = [
        {name: make_printable(value) if isinstance(value, str) else value for name, value in row.items()}
        for row in rows
    ]
    _post(create_table_artifact, shown, key, descriptions)


def _post(create: Callable[[Any, str, str], object], content: Any, key: str, descriptions: Sequence[str]) -> None:
    try:
        create(content, key, "\n\n".join(markdown_text(name_flows(each)) for each in descriptions))
    except Exception as error:  # whatever it is: what a flow has done lies in the run's folder
        log.warning("the server did not take the artifact %s: %s", key, str(error).partition("\n")[0])


def name_flows_in_logs() -> None:
    """Make our log messages name flows, as the UI shows them."""
    make = logging.getLogRecordFactory()

    def make_record(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        if record.name.partition(".")[0] in ROOMS:
            record.msg, record.args = name_flows(record.getMessage()), ()
        return record

    make_record.__wrapped__ = make  # type: ignore[attr-defined]  # what a worker process can have of it
    logging.setLogRecordFactory(make_record)


def artifact_key(*parts: str) -> str:
    """Return an artifact's key: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def run_artifact_key(kind: str, options: Options) -> str:
    """Return the key of a run's artifact, unique to this run; digits of a hash are added to ambiguous names."""
    plain = artifact_key(kind, options.name)
    if plain == f"{kind}-{options.name}" and Path(options.runs_dir).resolve() == Path("runs").resolve():
        return plain
    return f"{plain}-{hashlib.sha256(str(Path(options.runs_dir, options.name).resolve()).encode()).hexdigest()[:4]}"


class LiveArtifact:
    """A progress artifact that shows the updates it receives. Use it as a context manager within a flow run.

    Args:
        key: key of the artifact.
        status: takes the updates, and has their share in [0, 1] and their text.
    """

    def __init__(self, key: str, status: "PhaseStatus | ShardingStatus | _PipelineStatus") -> None:
        self._key, self._status = key, status
        self._changed, self._ended = threading.Event(), threading.Event()
        context = contextvars.copy_context()  # the artifact belongs to this flow run
        self._thread = threading.Thread(target=context.run, args=(self._publish_updates,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(5)

    def __call__(self, news: Any) -> None:
        """Take the newest metrics."""
        self._status(news)
        self._changed.set()

    def _publish_updates(self) -> None:
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


class ShardingStatus:
    """Progress of sharding."""

    def __init__(self, title: str) -> None:
        self._title = title

    def __call__(self, news: ShardingProgress) -> None:
        """Take the newest progress."""
        self._news = news

    def progress(self) -> float:
        """Return the completed share, in [0, 1]."""
        return self._news.share

    def line(self) -> str:
        """Return the status as one line."""
        return self._news.format_line(self._title)


_OUTER: ContextVar["PipelineArtifact | None"] = ContextVar("outer", default=None)


def log_to_parent_run(message: str, *values: object) -> None:
    """Log on the page of the parent flow run, if there is one."""
    if (story := _OUTER.get()) is not None:
        story.log.info(message, *values)


def update_parent_progress(stage: str, record: Record | None = None) -> None:
    """Update the parent's progress artifact: a stage has begun, or has new metrics. Validations are also logged."""
    if (story := _OUTER.get()) is not None:
        story((stage, record or {}))
        if record and (line := format_validation(record["step"], record)):
            story.log.info("%s %s", stage, line)


class PipelineArtifact(LiveArtifact):
    """The progress artifact of a flow run with several stages. Within its context, stages report to it."""

    def __init__(self, options: Options, shares: Mapping[str, float]) -> None:
        limits = {phase: getattr(options, phase) for phase in shares}
        super().__init__(run_artifact_key("live", options), _PipelineStatus(options.name, limits, shares))
        # A logger of Prefect's that sends to the server alone: the stages have logged the same lines on the terminal.
        self.log = logging.LoggerAdapter(logging.getLogger("prefect.extra"), getattr(get_run_logger(), "extra", None))

    def __enter__(self) -> Self:
        self._before = _OUTER.set(self)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        _OUTER.reset(self._before)
        super().__exit__(*exception)


class _PipelineStatus:
    """Progress of all phases together, each by its share of the training time, and the current stage."""

    def __init__(self, name: str, limits: Mapping[str, PhaseOptions], shares: Mapping[str, float]) -> None:
        self._name, self._stage, self._shares, self._pace = name, "", shares, RemainingTime()
        self._done: set[str] = set()
        self._phases = {phase: PhaseStatus(f"{name}: {phase}", each) for phase, each in limits.items()}

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
        stage = phase.format_metrics() if phase else f"{self._name}: {self._stage}"
        return " · ".join([f"{share} of training", *left, stage])
