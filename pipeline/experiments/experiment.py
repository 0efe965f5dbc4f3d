"""Definitions of an experiment: its arms, the claim of the paper, and the plan for running it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config import Phase, load_options, training_phases

Data = Literal["text", "pictures", "copies"]
OURS = "this project"  # the source of what no paper has


@dataclass(frozen=True)
class Arm:
    """A model of an experiment: a row of its table, a curve of its figure.

    Attributes:
        name: the paper's name for it.
        preset: base of its options.
        options: `key=value`.
        paper: the paper's results for it, by metric.
        data: kind of its training data.
        only: the phases that are trained; empty: those of its kind of model.
        package: one of `pipeline.experiments.ours.packages`, instead of a preset.
    """

    name: str
    preset: str = ""
    options: tuple[str, ...] = ()
    paper: dict[str, float] = field(default_factory=dict)
    data: Data = "text"
    only: tuple[Phase, ...] = ()
    package: str = ""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases that are trained, in order."""
        if self.package:
            return ("train",)
        return self.only or training_phases(load_options(self.preset, list(self.options)).model.kind)


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
        name: name for the command.
        source: the paper, and the place in it.
        question: what is compared.
        arms: its models.
        claim: the paper's finding.
        better: the claim as pairs of arms, the first of which is lower in each metric of `by`.
        margin: the least difference required.
        no_better: pairs of arms, the first of which is not ahead of the second in `by`, as a part of the claim.
        by: "bits", or metrics computed by `measures`.
        below: upper bounds of metrics, for each arm that has them, as a part of the claim.
        equal: what the arms share equally; seconds are those of a clock, `pipeline.train.timing`.
        measures: further measures of each run, by name; see `pipeline.experiments.measures`.
        across: a metric of `measures` on the x-axis, with bits on the y-axis; None: curves are drawn.
        full: the arms at the paper's sizes, under the same names, for `--budget paper`.
        enough: training seconds, of all arms once, beyond which results no longer change; None: no such limit.
        beside: seconds on two cores that a run takes besides training, at `--budget minutes`: evaluation, validation
            and measures.
    """

    name: str
    source: str
    question: str
    arms: tuple[Arm, ...]
    claim: str
    better: tuple[tuple[str, str], ...]
    by: tuple[str, ...] = ("bits",)
    margin: float = 0.0
    no_better: tuple[tuple[str, str], ...] = ()
    below: dict[str, float] = field(default_factory=dict)
    equal: Literal["seconds", "steps"] = "steps"
    measures: tuple[str, ...] = ()
    across: str | None = None
    full: tuple[Arm, ...] = ()
    enough: float | None = None
    beside: float = 30


Clock = Literal["wall", "process"]


@dataclass(frozen=True)
class Plan:
    """The settings for running an experiment.

    Attributes:
        folder: folder of its results.
        runs_dir: folder of the runs of all experiments.
        seconds: training seconds of all arms and seeds together; None: arms of the paper's size, with their own limits.
        seeds: number of seeds of each arm.
        parallel: number of concurrent runs, which share the cores.
        data: folder with the corpora.
        scored: bytes kept of each split except train; None: all.
        overrides: `key=value`, for all arms.
        clock: how steps are timed: by wall time, or by CPU time of the process ("process").
    """

    folder: Path
    runs_dir: Path
    seconds: float | None
    seeds: int = 1
    parallel: int = 1
    data: Path = Path("../shared/data")
    scored: int | None = None
    overrides: tuple[str, ...] = ()
    clock: Clock = "wall"


@dataclass(frozen=True)
class Budget:
    """Limits on the runs of an experiment together.

    Attributes:
        about: description for users.
        seconds: training seconds; None: the models have the paper's sizes and limits.
        seeds: number of seeds of each arm.
        scored: bytes of valid; None: all.
        whole: seconds in total, including what runs take besides training.
        beside: factor applied to `Experiment.beside`.
    """

    about: str
    seconds: float | None
    seeds: int
    scored: int | None
    whole: float = 0
    beside: float = 0


BUDGETS = {
    "minutes": Budget("20 minutes of two cores in all", 840, 1, 200_000, 1200, 1),
    "hour": Budget("an hour of training, three seeds, at most three hours in all", 3600, 3, 500_000, 10_800, 2),
    "paper": Budget("the paper's sizes and limits: see --plan first", None, 1, None),
}
