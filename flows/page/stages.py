"""The stages of a complete run, logged in order: what each is expected to take, as far as known, and what it took."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from haed.options import SYSTEMS
from pipeline.config import Options, PhaseOptions, training_phases
from pipeline.console import format_duration
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder

log = logging.getLogger(__name__)
_BACKWARD = 3  # times as long as scoring a chunk does learning from it take


class StageLog:
    """A log of the stages of a run. It begins with a plan of all stages."""

    def __init__(self, options: Options) -> None:
        self._options, kind = options, options.model.kind
        self._phases = training_phases(kind)
        index = ["index"] if SYSTEMS[kind].chunks else []
        self._names = ["shard", *self._phases, "evaluate", *index, "sample", "report"]
        log.info("%s", self.describe_plan())

    def describe_plan(self) -> str:
        """Return a sentence with the stages and the training budget of each phase."""
        budgets = [f"{phase} {format_budget(getattr(self._options, phase))}" for phase in self._phases]
        others = [name for name in self._names if name not in self._phases]
        return (
            f"{len(self._names)} stages: {', '.join(self._names)}. Training takes what its budget says ({', '.join(budgets)}), "
            f"and validations and checkpoints beside; how long {', '.join(others[:-1])} and {others[-1]} take is not known "
            "before: that goes by the sizes of corpus and model"
        )

    @contextmanager
    def begin_stage(self, name: str, about: float | None = None) -> Iterator[None]:
        """Log the start of a stage and, at its end, its duration.

        Args:
            name: of the stage.
            about: expected seconds, if known.
        """
        number = self._names.index(name) + 1
        if name in self._phases:
            expected = f", {format_budget(getattr(self._options, name))} of training"
        else:
            expected = "" if about is None else f", about {format_duration(about)}"
        log.info("stage %d of %d: %s%s", number, len(self._names), name, expected)
        began = time.monotonic()
        yield
        log.info(
            "stage %d of %d: %s took %s", number, len(self._names), name, format_duration(time.monotonic() - began)
        )

    def skip_stage(self, name: str) -> None:
        """Log that a stage was finished before."""
        log.info("stage %d of %d: %s, done before", self._names.index(name) + 1, len(self._names), name)

    def estimate_evaluation_seconds(self, chunks: int) -> float | None:
        """Return the expected seconds for scoring `chunks` chunks, from the training rate; None if that is unknown."""
        options, folder = self._options, RunFolder.from_options(self._options)
        rates = [
            record.get("chunks_per_second")
            for record in read_metrics(folder.phase_folder(self._phases[-1]) / "metrics.jsonl")
        ]
        known = [rate for rate in rates if rate]
        if not known:
            return None
        context = options.batch.context
        stride = min(options.evaluate.stride or max(1, context // 2), context)
        return chunks * math.ceil(context / stride) / (_BACKWARD * known[-1])


def format_budget(limits: PhaseOptions) -> str:
    """Return the limits of a phase as text. The first limit reached ends the phase."""
    found = [
        *([f"{limits.seconds:g} s"] if limits.seconds else []),
        *([f"{limits.steps:,} steps"] if limits.steps else []),
        *([f"{limits.epochs:g} epochs"] if limits.epochs else []),
    ]
    return " or ".join(found) or "without a limit"
