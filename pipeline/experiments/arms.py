"""Arms of an experiment, ready to run: with the ordinary commands, or with a public package."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from data.corpus import Corpus
from pipeline.config import ConfigError, OptimizerOptions, Options, Phase, dump_options, load_options
from pipeline.experiments import corpora
from pipeline.experiments.experiment import Arm, Experiment, Plan
from pipeline.run.checkpoints import read_position
from pipeline.run.files import read_json
from pipeline.run.run_directory import PHASES, RunFolder
from pipeline.show.compare import count_parameters
from pipeline.train.timing import lift_other_limits, run_phase_steps

Command = tuple[str, ...]  # a module, and what it is called with

# Options that a package knows: of the corpus, and of where it computes.
_READ = ("source.", "chunker.", "shard.", "threads=", "device=", "precision=")


@dataclass(frozen=True)
class Ready(ABC):
    """An arm that can be run.

    Attributes:
        arm: the arm of the experiment.
        runs_dir: folder of its runs.
        words: overrides after the preset, shared by all of its runs.
    """

    arm: Arm
    runs_dir: Path
    words: tuple[str, ...]

    @cached_property
    def options(self) -> Options:
        """Return the options of its runs, except name, seed, threads and steps. A package reads only some of them."""
        return load_options(self.arm.preset or None, list(self.words))

    @property
    def data(self) -> str:
        """Return a key of the options that determine the corpus."""
        return repr((self.options.source, self.options.chunker))

    @property
    @abstractmethod
    def identity(self) -> str:
        """Return a text of all settings that determine its results, except seed and steps."""

    @abstractmethod
    def work(self, phase: Phase) -> str:
        """Return a text of all settings that determine the time of a step of a phase."""

    @abstractmethod
    def steps(self, phase: Phase, corpus: Corpus, place: Path) -> Iterator[None]:
        """Train a phase one step at a time, to be timed."""

    @abstractmethod
    def commands(self, run: Path, seed: int, limits: Mapping[Phase, int], threads: int) -> list[Command]:
        """Return the commands that train a run and evaluate it. Without `limits`, its own limits apply."""

    @abstractmethod
    def finished(self, run: Path) -> "Finished":
        """Return the totals of a finished run."""

    def shares(self) -> dict[Phase, float]:
        """Return each phase's share of the budget."""
        return dict.fromkeys(self.arm.phases, 1.0)

    def folder(self, seed: int, limits: Mapping[Phase, int]) -> Path:
        """Return the folder of a run, named by a digest of its configuration, so that equal runs are not repeated."""
        digest = hashlib.sha256(f"{self.identity} {seed} {dict(limits)}".encode()).hexdigest()[:10]
        return self.runs_dir / f"{re.sub('[^a-z0-9]+', '-', self.arm.name.lower()).strip('-')}-{seed}-{digest}"


@dataclass
class Finished:
    """Steps and seconds of a finished run by phase, its model FLOPs of training, and its parameters."""

    steps: dict[Phase, int]
    seconds: dict[Phase, float]
    flops: float
    parameters: int | None


@dataclass(frozen=True)
class Ours(Ready):
    """A model of this project."""

    @property
    def identity(self) -> str:
        """See `Ready`."""
        return dump_options(replace(self.options, name="", runs_dir="", shards_dir="", threads=None))

    def work(self, phase: Phase) -> str:
        """See `Ready`. Learning rates, limits and seeds are left out, because they do not change the time of a step."""
        own = self.options
        limits = replace(getattr(own, phase), steps=None, seconds=None, epochs=None, rate_from=1.0, rate_to=0.0)
        phases = {each: type(getattr(own, each))() for each in PHASES} | {phase: limits}
        optimizer = OptimizerOptions(ema=own.optimizer.ema)
        return phase + dump_options(
            replace(own, name="", runs_dir="", shards_dir="", seed=0, optimizer=optimizer, **phases)
        )

    def shares(self) -> dict[Phase, float]:
        """Return each phase's share of the preset's seconds."""
        limits = load_options(self.arm.preset, list(self.arm.options))
        own = {phase: getattr(limits, phase).seconds or 1.0 for phase in self.arm.phases}
        return {phase: seconds / sum(own.values()) for phase, seconds in own.items()}

    def steps(self, phase: Phase, corpus: Corpus, place: Path) -> Iterator[None]:
        """See `Ready`."""
        return run_phase_steps(
            phase, load_options(self.arm.preset, [*self.words, f"{phase}.steps=1000"]), corpus, place
        )

    def commands(self, run: Path, seed: int, limits: Mapping[Phase, int], threads: int) -> list[Command]:
        """See `Ready`."""
        chosen = [*self.words, f"seed={seed}", f"threads={threads}", f"name={run.name}"]
        chosen += [f"{phase}.steps={steps}" for phase, steps in limits.items()]
        trained = [("pipeline", phase, "--config", self.arm.preset, *chosen) for phase in self.arm.phases]
        return [*trained, ("pipeline", "evaluate", str(run), f"threads={threads}", "evaluate.yardsticks=false")]

    def finished(self, run: Path) -> Finished:
        """See `Ready`."""
        last = {phase: read_position(run / phase / "checkpoints") for phase in self.arm.phases}
        return Finished(
            {phase: int(where["step"]) for phase, where in last.items()},
            {phase: where["seconds"] for phase, where in last.items()},
            sum(where["flops"] for where in last.values()),
            count_parameters(RunFolder(run)),
        )


@dataclass(frozen=True)
class Packaged(Ready):
    """A public package, which is trained on the original bytes of the same shards."""

    @property
    def identity(self) -> str:
        """See `Ready`."""
        return f"{self.arm.package} {self.options.source}"

    def work(self, phase: Phase) -> str:
        """See `Ready`."""
        return self.identity

    def steps(self, phase: Phase, corpus: Corpus, place: Path) -> Iterator[None]:
        """See `Ready`."""
        from pipeline.experiments.ours.packaged import endless

        return endless(self.arm.package, corpus, self.options)

    def commands(self, run: Path, seed: int, limits: Mapping[Phase, int], threads: int) -> list[Command]:
        """See `Ready`."""
        asked = ("--steps", str(limits["train"]), "--seed", str(seed), "--threads", str(threads))
        module = "pipeline.experiments.ours.packaged"
        return [(module, self.arm.package, str(run), *self.words, *asked)]

    def finished(self, run: Path) -> Finished:
        """See `Ready`."""
        found = read_json(run / "package.json")
        return Finished({"train": found["steps"]}, {"train": found["seconds"]}, found["flops"], found["parameters"])


def _given(arms: Sequence[Arm], plan: Plan) -> tuple[tuple[Arm, ...], list[str]]:
    """Return the arms that fit the user's own corpus (images or text), and notes on those left out."""
    data = "pictures" if "source.kind=images" in plan.overrides else "text"
    left_out = [arm.name for arm in arms if arm.data != data]
    if len(left_out) == len(arms):
        raise ConfigError(f"{' '.join(plan.overrides)}: this experiment has no models of {data}")
    notes = ["data: as given", *([f"left out, as they are not of {data}: {', '.join(left_out)}"] if left_out else [])]
    return tuple(arm for arm in arms if arm.data == data), notes


def ready(experiment: Experiment, plan: Plan) -> tuple[list[Ready], list[str]]:
    """Return the arms that can be run, and notes on their data and on what is missing.

    Raises:
        ConfigError: overrides make two arms the same model, or no arm fits the corpus.
    """
    full = plan.seconds is None
    chosen = experiment.full if full else experiment.arms
    given = any(word.startswith(("source.kind=", "source.path=")) for word in plan.overrides)
    arms, notes = _given(chosen, plan) if given else corpora.usable(chosen, plan.data, plan.scored)
    if full and not given:
        notes.append("not the paper's corpus: give it with source.kind= and source.path=")
    found: list[Ready] = []
    missing = []
    for arm in arms:
        words = () if given else corpora.source(arm.data, plan.data, plan.scored, plan.runs_dir / "corpora")
        places = (f"runs_dir={plan.runs_dir}", f"shards_dir={plan.runs_dir / 'shards'}")
        if arm.package:
            from pipeline.experiments.ours.packages import PACKAGES

            read = [word for word in plan.overrides if word.startswith(_READ)]
            if PACKAGES[arm.package].is_there:
                found.append(Packaged(arm, plan.runs_dir, (*words, *places, *read)))
            else:
                missing.append(arm.package)
            continue
        limits = ("validation.times=8", "evaluate.split=valid", *(() if full else lift_other_limits(*arm.phases)))
        found.append(Ours(arm, plan.runs_dir, (*words, *arm.options, *places, *limits, *plan.overrides)))
    alone: dict[object, str] = {}
    for each in ours(found):
        if (other := alone.setdefault((each.identity, tuple(each.shares().items())), each.arm.name)) != each.arm.name:
            raise ConfigError(
                f"{' '.join(plan.overrides)} makes {other!r} and {each.arm.name!r} one model: leave it out"
            )
    if missing:
        notes.append(f"left out: {', '.join(missing)}: not installed (pip install --no-deps -r benchmarks/peers.txt)")
    return found, notes


def ours(arms: Sequence[Ready]) -> list[Ours]:
    """Return the arms of this project."""
    return [each for each in arms if isinstance(each, Ours)]
