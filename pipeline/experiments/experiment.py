"""What an experiment is: its runs, what a paper says of them, and how it is run; one file for each declares it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.config import load
from pipeline.kinds import phases
from pipeline.options import Phase

Data = Literal["text", "pictures", "copies"]
OURS = "this project"  # the source of what no paper has


@dataclass(frozen=True)
class Arm:
    """One model of an experiment: a row of its table, a curve of its figure.

    Attributes:
        name: as the paper calls it.
        preset: what its options are on top of.
        options: `key=value`.
        paper: figures of the paper for it, by what they are of.
        data: what it is trained on.
        only: the phases that are trained; none: those of its kind of model.
        package: in place of a preset: one of `pipeline.experiments.ours.packages`.
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
        """What is trained, in order."""
        if self.package:
            return ("train",)
        return self.only or phases(load(self.preset, list(self.options)).model.kind)


@dataclass(frozen=True)
class Experiment:
    """A table or figure.

    Attributes:
        name: of the command.
        source: paper, and where it stands there.
        question: what is compared.
        arms: its runs.
        claim: what the paper finds.
        better: that as pairs of arms, the first of which has less of each figure of `by`.
        margin: how much less, at least.
        no_better: pairs of arms, the first of which is not ahead of the second in `by`, as a part of the claim.
        by: "bits", or figures that `measures` find.
        below: figures of which each arm that has them is to have less than so much, as a part of the claim.
        equal: what the arms have the same number of; seconds are those of a clock, `pipeline.train.clock`.
        measures: what else is worked out from each run, by name; see `pipeline.experiments.measures`.
        across: a figure of `measures` that is drawn across, where bits are drawn upwards; None: curves are drawn.
        full: the arms at the paper's sizes, under the same names, for `--budget paper`.
        enough: seconds of training, of all arms once, beyond which nothing more is to be seen; None: there is always more.
        beside: seconds of two cores a run takes beside its training, at `--budget minutes`: evaluation, validation, measures.
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
    """How an experiment is run.

    Attributes:
        folder: of its results.
        runs_dir: of the runs of all experiments.
        seconds: of training, of all arms and seeds together; None: the arms are those of the paper's size, with their own limits.
        seeds: of each arm.
        parallel: runs side by side, which share the cores.
        data: folder with the corpora.
        scored: bytes of each split but train that are kept; None: all.
        overrides: `key=value`, for all arms.
        clock: what a second of a step is: of wall time, or of what the process works ("process").
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
    """What all runs of an experiment may take.

    Attributes:
        about: for people.
        seconds: of training; None: the models are of the paper's sizes, and have its limits.
        seeds: of each run.
        scored: bytes of valid; None: all.
        whole: seconds of all, with what runs take beside their training.
        beside: how much that is, of `Experiment.beside`.
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
