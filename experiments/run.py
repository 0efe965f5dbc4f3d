"""Execution of the missing runs of an experiment, each with the ordinary commands in processes of its own.

A run is limited in steps, by a clock that is measured first (`experiments.timing`). So the machine may be shared, and
a stopped run continues as it would have. The run's name has a digest of its configuration, so equal runs are not
repeated. Further measures of the runs are taken after all of them, one at a time.
"""

import hashlib
import json
import logging
import math
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from data.corpus import Corpus
from data.filesystem import file_lock, write_json
from data.loader import Loader
from data.options import SourceOptions
from data.processes import available_threads
from experiments import corpora
from experiments.catalogue import PACKAGE_OPTIONS, Data, Experiment, Plan, Variant
from experiments.external_models import PACKAGES, train_endlessly
from experiments.measures import PER_VARIANT, Measurement, measurement_path
from experiments.results import Result, RunTotals, VariantRun, write_results
from experiments.timing import build_phase_trainer, lift_other_limits, measure_step_seconds
from haed.base import TokenBatch
from haed.options import SYSTEMS
from haed.registry import make_objective
from pipeline.config import ConfigError, OptimizerOptions, Options, Phase, dump_options, load_options
from pipeline.reporting.rendering import Column, Table
from pipeline.reporting.run_state import count_parameters
from pipeline.run.checkpoints import read_position
from pipeline.run.device import release_memory, setup_compute
from pipeline.run.files import Evaluation, read_as
from pipeline.run.run_directory import LATEST_FIRST, RunFolder
from pipeline.run.sharding import shard_source
from pipeline.run.system import build_system
from pipeline.run.windows import as_windows
from pipeline.signals import Interrupt, TrainingInterrupted, die_with_parent
from pipeline.training.profile import product_rate

log = logging.getLogger(__name__)
Command = tuple[str, ...]  # its name for messages, and the arguments of Python
# One process for all stages of a run: to import torch takes seconds.
_RUN_STAGES = "import json, sys; from pipeline.cli import main; sys.exit(next(filter(None, map(main, json.loads(sys.argv[1]))), 0))"
_POLL = 0.2  # seconds
_NOWHERE: dict[str, Any] = {"name": "", "runs_dir": "", "shards_dir": ""}


@dataclass(frozen=True)
class RunnableVariant:
    """A variant that can be run: a model of this project.

    Attributes:
        variant: the variant of the experiment.
        runs_dir: folder of its runs.
        words: overrides after the preset, shared by all of its runs.
        corpus: name of its corpus, with the digest of its contents; empty until it is made.
    """

    variant: Variant
    runs_dir: Path
    words: tuple[str, ...]
    corpus: str = ""

    @cached_property
    def options(self) -> Options:
        """Return the options of its runs, except name, seed, threads and steps. A package reads only some of them."""
        return load_options(self.variant.preset or None, list(self.words))

    @property
    def corpus_key(self) -> str:
        """Return a text of the options that determine the corpus."""
        return repr((self.options.source, self.options.chunker))

    @property
    def identity(self) -> str:
        """Return a text of all that determines its results, except seed and steps: settings, and contents of the corpus."""
        same = replace(self.options, **_NOWHERE, threads=None, source=SourceOptions())
        return self.corpus + dump_options(same)

    def step_identity(self, phase: Phase) -> str:
        """Return a text of all settings that determine the time of a step of a phase.

        Learning rates, limits and seeds do not.
        """
        options = self.options
        limits = replace(getattr(options, phase), steps=None, seconds=None, epochs=None, rate_from=1.0, rate_to=0.0)
        phases = {each: type(getattr(options, each))() for each in LATEST_FIRST} | {phase: limits}
        optimizer = OptimizerOptions(ema=options.optimizer.ema)
        return phase + dump_options(replace(options, **_NOWHERE, seed=0, optimizer=optimizer, **phases))

    def phase_shares(self) -> dict[Phase, float]:
        """Return each phase's share of the budget: that of the preset's seconds, or the same with `equal_data`."""
        limits = {phase: getattr(self.variant.settings, phase) for phase in self.variant.phases}
        seconds = {phase: 1.0 if self.variant.equal_data else each.seconds or 1.0 for phase, each in limits.items()}
        return {phase: each / sum(seconds.values()) for phase, each in seconds.items()}

    def train_steps(self, phase: Phase, corpus: Corpus, folder: Path) -> Iterator[None]:
        """Train a phase one step at a time, to be timed."""
        options = load_options(self.variant.preset, [*self.words, f"{phase}.steps=1000"])
        return build_phase_trainer(phase, options, corpus, folder).run_steps()

    def make_command(self, run: Path, seed: int, limits: Mapping[Phase, int], threads: int) -> Command:
        """Return the command that trains a run and evaluates it. Without `limits`, its own limits apply."""
        words = [*self.words, f"seed={seed}", f"threads={threads}", f"name={run.name}"]
        words += [f"{phase}.steps={steps}" for phase, steps in limits.items()]
        stages = [(phase, "--config", self.variant.preset, *words) for phase in self.variant.phases]
        # Rows show the model alone. Its memory takes as long as a short training.
        alone = ("evaluate.memory=0",) if SYSTEMS[self.options.model.kind].chunks else ()
        stages.append(("evaluate", str(run), f"threads={threads}", "evaluate.baselines=false", *alone))
        return (", ".join(stage[0] for stage in stages), "-c", _RUN_STAGES, json.dumps(stages))

    def read_totals(self, run: Path) -> RunTotals:
        """Return the totals of a finished run."""
        positions = {phase: read_position(run / phase / "checkpoints") for phase in self.variant.phases}
        return RunTotals(
            {phase: int(position["step"]) for phase, position in positions.items()},
            {phase: position["seconds"] for phase, position in positions.items()},
            sum(position["flops"] for position in positions.values()),
            count_parameters(RunFolder(run)),
        )

    def run_folder(self, seed: int, limits: Mapping[Phase, int]) -> Path:
        """Return the folder of a run, named by a digest of its configuration, so that equal runs are not repeated."""
        digest = hashlib.sha256(f"{self.identity} {seed} {dict(limits)}".encode()).hexdigest()[:10]
        return self.runs_dir / f"{re.sub('[^a-z0-9]+', '-', self.variant.name.lower()).strip('-')}-{seed}-{digest}"


@dataclass(frozen=True)
class PackageVariant(RunnableVariant):
    """A public package, which is trained on the original bytes of the same shards. See `RunnableVariant`.

    Attributes:
        remembers: true if it is also scored with memory.
    """

    remembers: bool = False

    @property
    def identity(self) -> str:
        machine = f"{self.options.device} {self.options.precision}"
        return f"{self.variant.package} {self.corpus} {machine}{' with memory' * self.remembers}"

    def step_identity(self, phase: Phase) -> str:
        return self.identity

    def phase_shares(self) -> dict[Phase, float]:
        return {"train": 1.0}

    def train_steps(self, phase: Phase, corpus: Corpus, folder: Path) -> Iterator[None]:
        return train_endlessly(self.variant.package, corpus, self.options)

    def make_command(self, run: Path, seed: int, limits: Mapping[Phase, int], threads: int) -> Command:
        settings = ("--steps", str(limits["train"]), "--seed", str(seed), "--threads", str(threads))
        memory = ("--memory",) if self.remembers else ()
        words = (self.variant.package, str(run), *self.words, *settings, *memory)
        return (self.variant.package, "-m", "experiments.external_models", *words)

    def read_totals(self, run: Path) -> RunTotals:
        totals = read_as(dict[str, Any], run / "package.json")
        return RunTotals(
            {"train": totals["steps"]}, {"train": totals["seconds"]}, totals["flops"], totals["parameters"]
        )


def select_own(variants: Sequence[RunnableVariant]) -> list[RunnableVariant]:
    """Return the variants that are models of this project."""
    return [each for each in variants if not each.variant.package]


def prepare_variants(experiment: Experiment, plan: Plan) -> tuple[list[RunnableVariant], list[str]]:
    """Return the variants that can be run, and notes on their data and on what is missing.

    Raises:
        ConfigError: overrides make two variants the same model, or no variant fits the corpus.
    """
    full, overridden = plan.seconds is None, " ".join(plan.overrides)
    variants = experiment.full if full else experiment.variants
    user_corpus = any(word.startswith(("source.kind=", "source.path=")) for word in plan.overrides)
    if user_corpus:
        kinds: dict[str, Data] = {"source.kind=images": "pictures", "source.kind=audio": "sound"}
        data = next((kinds[word] for word in plan.overrides if word in kinds), "text")
        left_out = [variant.name for variant in variants if variant.data != data]
        if len(left_out) == len(variants):
            raise ConfigError(f"{overridden}: this experiment has no models of {data}")
        variants = tuple(variant for variant in variants if variant.data == data)
        notes = ["data: as given"]
        notes += [f"left out, because they do not take {data}: {', '.join(left_out)}"] if left_out else []
    else:
        variants, notes = corpora.select_available(variants, plan.data, plan.scored)
        notes += ["this is not the paper's corpus. Give it with source.kind= and source.path="] if full else []
    runnable: list[RunnableVariant] = []
    missing = []
    for variant in variants:
        folder = plan.runs_dir / "corpora"
        source = () if user_corpus else corpora.prepare_source(variant.data, plan.data, plan.scored, folder)
        places = (f"runs_dir={plan.runs_dir}", f"shards_dir={plan.runs_dir / 'shards'}")
        if variant.package:
            if variant.package not in PACKAGES:
                raise ConfigError(f"package: {variant.package} is not known. Use one of {', '.join(PACKAGES)}")
            words = [word for word in plan.overrides if word.startswith(PACKAGE_OPTIONS)]
            if PACKAGES[variant.package].is_installed:
                remembers = "remembered" in experiment.measures
                runnable.append(PackageVariant(variant, plan.runs_dir, (*source, *places, *words), remembers=remembers))
            else:
                missing.append(variant.package)
            continue
        limits = ["validation.times=8", "evaluate.split=valid", "checkpoint.keep=1"]
        limits += [] if full else lift_other_limits(*variant.phases)
        words = [*source, *variant.options, *places, *limits, *plan.overrides]
        runnable.append(RunnableVariant(variant, plan.runs_dir, tuple(words)))
    names: dict[object, str] = {}
    for each in select_own(runnable):
        name = each.variant.name
        same = (each.identity, each.corpus_key, tuple(each.phase_shares().items()))
        if (other := names.setdefault(same, name)) != name:
            by_name = {variant.name: variant for variant in variants}
            if (by_name[name].described, by_name[name].data) == (by_name[other].described, by_name[other].data):
                raise ConfigError(f"variants {other!r} and {name!r} are the same model. Leave one out")
            raise ConfigError(f"{overridden} makes {other!r} and {name!r} the same model. Leave it out")
    if missing:
        advice = "Run pip install --no-deps -r benchmarks/peers.txt"
        notes.append(f"left out: {', '.join(missing)}: not installed. {advice}")
    return runnable, notes


def shard_corpora(variants: Sequence[RunnableVariant]) -> dict[str, Corpus]:
    """Return the corpora of all variants, by `RunnableVariant.corpus_key`. Existing ones are not made again."""
    return {key: shard_source(each.options) for key, each in {each.corpus_key: each for each in variants}.items()}


@dataclass
class StepTimes:
    """Seconds per step by variant/phase, and errors of variants that cannot take a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def time_steps(
    variants: Sequence[RunnableVariant], corpora: Mapping[str, Corpus], plan: Plan, stop: Callable[[], bool]
) -> StepTimes:
    """Return the clock of these models, measured once for all results. Variants with equal steps share their times.

    A long training is worth a clock of more steps. For `corpora`, see `shard_corpora`.

    Raises:
        Exception: no variant can take a step; the error of the first one.
        ValueError: the clock would not count the work of a GPU.
    """
    keys = {
        f"{each.variant.name}/{phase}": each.step_identity(phase) for each in variants for phase in each.variant.phases
    }
    is_short = (plan.seconds or 0.0) / plan.seeds < 60 * len(set(keys.values()))
    rounds = (3, 3, 1) if is_short else (3, 8, 3)
    threads = [each.options.threads for each in select_own(variants)]
    timed = [rounds, [each.run_folder(0, {}).name for each in variants], threads, plan.clock]
    path = plan.runs_dir / "clocks" / f"{hashlib.sha256(repr(timed).encode()).hexdigest()[:10]}.json"
    if path.is_file():
        try:
            clock = read_as(dict[str, Any], path)
        except ValueError as damage:
            raise ValueError(f"{damage}. Delete {path} to time the steps again") from damage
        if clock["on"] != platform.node():
            log.info("seconds are by a clock that was measured on %s; without %s it is here", clock["on"], path)
        return StepTimes(dict(clock["seconds"]), dict(clock["failures"]))
    log.info("timing the steps of %d models and phases, in turns", len(set(keys.values())))
    times, turns, error = StepTimes(), dict[str, Iterator[None]](), None
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(variants):
            name, steps = each.variant.name, dict[str, Iterator[None]]()
            try:
                for phase in each.variant.phases:
                    if (key := keys[f"{name}/{phase}"]) not in turns:
                        training = each.train_steps(phase, corpora[each.corpus_key], Path(folder) / str(number))
                        steps[key] = _interruptible(training, stop)
                        next(steps[key])
                turns |= steps
            except TrainingInterrupted:
                raise
            except Exception as failure:
                error = error or failure.with_traceback(None)  # its frames hold a model
                advice = "Mend the variant. If it was no fault of it"
                times.failures[name] = f"{failure}. {advice}, delete {path}, and all runs use a new clock"
                log.error("%s: %s", name, failure)
            del steps
        if error is not None and not turns:
            raise error
        step_seconds = measure_step_seconds(turns, *rounds, clock=plan.clock)
    del turns
    release_memory()  # of all models, which would be kept beside the runs
    times.seconds = {
        name: step_seconds[key] for name, key in keys.items() if name.rpartition("/")[0] not in times.failures
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"on": platform.node(), **asdict(times)})
    return times


def _interruptible(steps: Iterator[None], stop: Callable[[], bool]) -> Iterator[None]:
    for step in steps:
        if stop():
            raise TrainingInterrupted("stopped while steps were timed")
        yield step


def divide_budget(
    experiment: Experiment, variants: Sequence[RunnableVariant], clock: dict[str, float], seconds: float
) -> dict[str, int]:
    """Return the number of steps of each phase of each variant, by variant/phase, to take `seconds` in total."""
    relative = dict[str, dict[str, float]]()  # steps, by variant and variant/phase
    for each in variants:
        by_seconds = experiment.equal == "seconds" and not each.variant.equal_data
        shares = {f"{each.variant.name}/{phase}": share for phase, share in each.phase_shares().items()}
        relative[each.variant.name] = {
            name: share / clock[name] if by_seconds else share for name, share in shares.items()
        }
    took = {variant: sum(clock[name] * each for name, each in shares.items()) for variant, shares in relative.items()}
    if experiment.equal == "seconds":
        scale = {variant: seconds / len(variants) / each for variant, each in took.items()}
    else:
        scale = dict.fromkeys(took, seconds / sum(took.values()))
    steps = {name: scale[variant] * each for variant, shares in relative.items() for name, each in shares.items()}
    return {name: max(2, round(each)) for name, each in steps.items()}


def run_experiment(experiment: Experiment, plan: Plan, stop: Callable[[], bool] = lambda: False) -> Result:
    """Make the missing runs and write the results. Only one process at a time works on a result.

    Raises:
        Interrupt: `stop` became true; running trainings have saved, and the same call continues them.
    """
    with RunFolder(plan.folder).lock():
        return write_results(experiment, *make_runs(experiment, plan, stop), plan)


def make_runs(
    experiment: Experiment, plan: Plan, stop: Callable[[], bool] = lambda: False
) -> tuple[list[VariantRun], list[str]]:
    """Make all runs of an experiment, and return them with notes on its data.

    Raises:
        Interrupt: `stop` became true; running trainings have saved, and the same call continues them.
    """
    variants, notes = prepare_variants(experiment, plan)
    corpora = shard_corpora(variants)
    variants = [replace(each, corpus=corpora[each.corpus_key].folder.name) for each in variants]
    clock, limits = StepTimes(), dict[str, int]()
    if plan.seconds is not None:
        with file_lock(plan.runs_dir / "timing.lock", partial(log.info, "waits until this times no steps: %s")):
            clock = time_steps(variants, corpora, plan, stop)
        able = [each for each in variants if each.variant.name not in clock.failures]
        limits = divide_budget(experiment, able, clock.seconds, plan.seconds / plan.seeds)
    cores = next((each.options.threads for each in select_own(variants)), None) or available_threads()
    worker = Worker(max(1, cores // plan.parallel), stop)
    tasks = [partial(worker.make_run, each, seed, clock, limits) for seed in range(plan.seeds) for each in variants]
    runs = _execute_tasks(tasks, plan.parallel, worker)
    worker.threads = cores
    tasks = [partial(worker.measure, run, name) for name in experiment.measures for run in select_measured(name, runs)]
    _execute_tasks(tasks, 1, worker)
    return runs, notes


def select_measured(measure: str, runs: Sequence[VariantRun]) -> list[VariantRun]:
    """Return the runs that a measure is taken of: all finished ones, or the first of each variant."""
    finished = [run for run in runs if run.failure is None]
    if measure not in PER_VARIANT:
        return finished
    first = {run.variant.name: run for run in reversed(finished)}
    return [run for run in finished if first[run.variant.name] is run]


def _execute_tasks(tasks: Sequence[Callable[[], VariantRun]], parallel: int, worker: "Worker") -> list[VariantRun]:
    """Execute tasks in parallel, and forward a request to stop."""
    with ThreadPoolExecutor(parallel) as pool:
        futures = [pool.submit(task) for task in tasks]
        left = set(futures)
        while left:
            try:
                _, left = wait(left, _POLL, FIRST_COMPLETED)
                if worker.stop():
                    worker.send_signal(signal.SIGTERM)
                    wait(futures)
                    saved = "stopped. Runs in progress are saved, except those of packages, which start again"
                    raise TrainingInterrupted(saved)
            except Interrupt:  # a second signal
                worker.send_signal(signal.SIGKILL)
                raise
    return [future.result() for future in futures]


class Worker:
    """A worker that makes runs, and its current processes."""

    def __init__(self, threads: int, stop: Callable[[], bool]) -> None:
        self.threads, self.stop = threads, stop
        self.processes: set[subprocess.Popen[bytes]] = set()

    def make_run(self, each: RunnableVariant, seed: int, clock: StepTimes, limits: dict[str, int]) -> VariantRun:
        """Make a run if it does not exist. A failure does not end the other runs."""
        name = each.variant.name
        if name in clock.failures:
            return VariantRun(each.variant, seed, each.run_folder(seed, {}), failure=clock.failures[name])
        steps = {phase: limits[f"{name}/{phase}"] for phase in each.variant.phases if limits}
        run = VariantRun(each.variant, seed, each.run_folder(seed, steps))
        evaluation = run.folder / "evaluation.json"
        damaged = None
        try:
            damaged = evaluation if evaluation.is_file() else None
            if damaged is None or read_as(Evaluation, evaluation).split != "valid":  # somebody evaluated another split
                damaged = None
                log.info("%s, seed %d: %s", name, seed, run.folder)
                self.execute(*each.make_command(run.folder, seed, steps, self.threads))
                damaged = evaluation
                read_as(Evaluation, evaluation)
            damaged = run.folder
            run.totals = totals = each.read_totals(run.folder)
            if limits:  # by the clock, whatever else the machine did meanwhile
                totals.seconds = {phase: n * clock.seconds[f"{name}/{phase}"] for phase, n in totals.steps.items()}
        except Exception as error:
            run.failure = self._describe_error(run, error, damaged)
        return run

    def measure(self, run: VariantRun, name: str) -> VariantRun:
        """Add a measure to a finished run, computing it if it is not in its folder yet."""
        path = measurement_path(run.folder, name)
        try:
            if not path.is_file():
                log.info("%s, seed %d: %s", run.variant.name, run.seed, name)
                words = (name, str(run.folder), f"threads={self.threads}")
                self.execute(name, "-m", "experiments.measures", *words)
            run.measured[name] = read_as(Measurement, path)
        except Exception as error:
            run.unmeasured[name] = self._describe_error(run, error, path if path.is_file() else None)
        return run

    def _describe_error(self, run: VariantRun, error: Exception, damaged: Path | None) -> str:
        text = str(error) if isinstance(error, (OSError, RuntimeError, ValueError)) else repr(error)
        if damaged is not None:
            text += f". Delete {damaged} to run it again"
        if not self.stop():
            log.error("%s, seed %d: %s", run.variant.name, run.seed, text)
        return text

    def execute(self, name: str, *arguments: str) -> None:
        """Run a command, which is Python with these arguments.

        Raises:
            RuntimeError: it failed; with its name and the last line of its output.
        """
        if self.stop():
            raise RuntimeError("not begun")
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=subprocess.DEVNULL,
                stderr=output,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
                start_new_session=True,
            )
            self.processes.add(process)
            try:
                if self.stop():
                    process.send_signal(signal.SIGTERM)
                status = process.wait()
            finally:
                self.processes.discard(process)
            output.seek(0)
            if status:
                lines = output.read().decode(errors="replace").strip().splitlines()
                raise RuntimeError(f"`{name}` ended with {status}: {lines[-1] if lines else 'no output'}")

    def send_signal(self, number: int) -> None:
        """Send a signal to the current processes: SIGTERM lets them save and end, SIGKILL ends them."""
        for process in list(self.processes):
            process.send_signal(number)


@dataclass
class Cost:
    """The cost of one phase of a run at the paper's sizes.

    Attributes:
        variant: name of the variant.
        phase: the phase that is trained.
        parameters: of the model.
        steps: by the preset's limits; epochs are converted with the corpus at hand.
        flops: model FLOPs of a step.
        days: days of one device at the rate of its matrix products, a lower bound.
    """

    variant: str
    phase: str
    parameters: int
    steps: int
    flops: float
    days: float


def estimate_costs(variants: Sequence[RunnableVariant]) -> list[Cost]:
    """Return the cost of every phase of every variant. Models lie on the meta device, so any size is possible."""
    rate = product_rate(setup_compute(variants[0].options))
    corpora = shard_corpora(variants)
    return [
        _estimate_cost(each, phase, rate, corpora[each.corpus_key])
        for each in variants
        for phase in each.variant.phases
    ]


def _estimate_cost(each: RunnableVariant, phase: Phase, rate: float, corpus: Corpus) -> Cost:
    options, limits = each.options, getattr(each.options, phase)
    batch, part = options.batch, (limits.part_from, limits.part_to)
    loader = Loader(corpus, "train", context=batch.context, sequences=batch.sequences, seed=options.seed, part=part)
    with torch.device("meta"):
        system = build_system(options, corpus.build_chunker())
    objective = make_objective(
        system, options.iem, iem_weight=limits.iem_weight, decode_fraction=limits.decode_fraction, pieces=batch.pieces
    )
    further = options.iem.extra_batches if limits.iem_weight else 0
    windows, *negatives = (as_windows(tokens) for tokens in islice(loader, 1 + further))
    joined = TokenBatch.concatenate_batches(negatives) if negatives else None
    flops = objective.estimate_flops(objective.prepare_batch(windows, joined, torch.Generator()))
    steps = limits.steps or math.ceil((limits.epochs or 1) * loader.windows_per_epoch / batch.sequences)
    parameters = sum(each.numel() for each in system.parameters())
    return Cost(each.variant.name, phase, parameters, steps, flops, steps * flops / rate / 86_400)


def format_costs(costs: Sequence[Cost]) -> str:
    """Format costs as a table with a total."""
    columns = [
        Column("", lambda cost: cost.variant),
        Column("phase", lambda cost: cost.phase),
        Column("parameters", lambda cost: cost.parameters, "{:,}"),
        Column("steps", lambda cost: cost.steps, "{:,}"),
        Column("TFLOP a step", lambda cost: cost.flops / 1e12, "{:,.3f}"),
        Column("days, at least", lambda cost: cost.days, "{:,.2f}"),
    ]
    table = Table.from_columns(columns, costs).to_text()
    return (
        f"{table}\n\n{sum(x.days for x in costs):,.1f} days of a device like this one at the rate of its matrix products, "
        "which no step reaches; `benchmarks/scaling_estimate.py RUN` tells what more devices would do"
    )
