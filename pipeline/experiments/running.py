"""Execution of the missing runs of an experiment, each with the ordinary commands in processes of its own.

A run is limited in steps, by a clock that is measured first (`pipeline.train.timing`). So the machine may be shared, and
a stopped run continues as it would have. The run's name has a digest of its configuration, so equal runs are not
repeated. Further measures of the runs are taken after all of them, one at a time.
"""

import logging
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from data.corpus import Corpus
from data.filesystem import available_threads, write_json
from pipeline.experiments.arms import Finished, Ready, ours, ready
from pipeline.experiments.experiment import Arm, Experiment, Plan
from pipeline.experiments.measures import OF_SIZES, Measured, kept_at
from pipeline.run.device import release_memory
from pipeline.run.files import Evaluation, read_as, read_json
from pipeline.run.shards import shard_source
from pipeline.signals import Interrupt, die_with_parent
from pipeline.train.timing import measure_step_seconds
from pipeline.train.trainer import TrainingInterrupted

log = logging.getLogger(__name__)
_POLL = 0.2  # seconds


@dataclass
class Done:
    """A run: its folder, its totals or why it failed, its measures, and why others are missing."""

    arm: Arm
    seed: int
    run: Path
    finished: Finished | None = None
    failure: str | None = None
    measured: dict[str, Measured] = field(default_factory=dict, repr=False)
    unmeasured: dict[str, str] = field(default_factory=dict)


@dataclass
class Timings:
    """Seconds per step by arm/phase, and errors of arms that cannot take a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def timed(
    arms: Sequence[Ready], corpora: Mapping[str, Corpus], plan: Plan, seconds: float, stop: Callable[[], bool]
) -> Timings:
    """Return the clock of these models and this budget, measured once. Arms that do the same work share their times.

    Raises:
        Exception: no arm can take a step; the error of the first one.
        ValueError: the clock would not count the work of a GPU.
    """
    path = plan.folder / "clock.json"
    threads = [each.options.threads for each in ours(arms)]
    of = [seconds, [each.folder(0, {}).name for each in arms], threads, plan.clock]
    known = read_json(path) if path.is_file() else {}
    if known.get("of") == of:
        if known["on"] != platform.node():
            log.info("seconds are by a clock that was measured on %s; without %s it is here", known["on"], path)
        return Timings(dict(known["seconds"]), dict(known.get("failures", {})))
    works = {f"{each.arm.name}/{phase}": each.work(phase) for each in arms for phase in each.arm.phases}
    log.info("timing the steps of %d models and phases, in turns", len(set(works.values())))
    found, turns, error = Timings(), dict[str, Iterator[None]](), None
    with tempfile.TemporaryDirectory() as place:
        for number, each in enumerate(arms):
            own: dict[str, Iterator[None]] = {}  # by work: what does the same as an arm before is not timed again
            try:
                for phase in each.arm.phases:
                    if (work := works[f"{each.arm.name}/{phase}"]) not in turns:
                        own[work] = _until(stop, each.steps(phase, corpora[each.data], Path(place) / str(number)))
                        next(own[work])
                turns |= own
            except TrainingInterrupted:
                raise
            except Exception as failure:
                error = error or failure.with_traceback(None)  # its frames hold a model
                found.failures[each.arm.name] = (
                    f"{failure}; to try it again, delete {path}: all runs are then of a new clock"
                )
                log.error("%s: %s", each.arm.name, failure)
            del own
        if error is not None and not turns:
            raise error
        took = measure_step_seconds(turns, *((3, 3, 1) if seconds < 60 * len(turns) else (3, 8, 3)), clock=plan.clock)
    del turns
    release_memory()  # of all models, which would be kept beside the runs
    found.seconds = {name: took[work] for name, work in works.items() if name.rpartition("/")[0] not in found.failures}
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"of": of, "on": platform.node(), **asdict(found)}
    write_json(path, kept)
    return found


def _until(stop: Callable[[], bool], steps: Iterator[None]) -> Iterator[None]:
    for step in steps:
        if stop():
            raise TrainingInterrupted("stopped while steps were timed")
        yield step


def steps(experiment: Experiment, arms: Sequence[Ready], clock: dict[str, float], seconds: float) -> dict[str, int]:
    """Return the number of steps of each phase of each arm, by arm/phase, to take `seconds` in total."""
    shares = {f"{each.arm.name}/{phase}": share for each in arms for phase, share in each.shares().items()}
    if experiment.equal == "seconds":
        number = {name: share * seconds / len(arms) / clock[name] for name, share in shares.items()}
    else:
        a_step = sum(share * clock[name] for name, share in shares.items())
        number = {name: share * seconds / a_step for name, share in shares.items()}
    return {name: max(2, round(each)) for name, each in number.items()}


def shard_all(arms: Sequence[Ready]) -> dict[str, Corpus]:
    """Return the corpora of all arms, by `Ready.data`. Existing ones are not made again."""
    return {data: shard_source(each.options) for data, each in {each.data: each for each in arms}.items()}


def make(experiment: Experiment, plan: Plan, stop: Callable[[], bool] = lambda: False) -> tuple[list[Done], list[str]]:
    """Make all runs of an experiment, and return them with notes on its data.

    Raises:
        Interrupted: `stop` became true; running trainings have saved.
    """
    arms, notes = ready(experiment, plan)
    corpora = shard_all(arms)
    clock, limits = Timings(), dict[str, int]()
    if plan.seconds is not None:
        clock = timed(arms, corpora, plan, plan.seconds, stop)
        able = [each for each in arms if each.arm.name not in clock.failures]
        limits = steps(experiment, able, clock.seconds, plan.seconds / plan.seeds)
    cores = next((each.options.threads for each in ours(arms)), None) or available_threads()
    work = _Work(max(1, cores // plan.parallel), stop)
    runs = [partial(work.run, each, seed, clock, limits) for seed in range(plan.seeds) for each in arms]
    done = _all(runs, plan.parallel, work)
    work.threads = cores
    measures = [partial(work.measure, each, name) for name in experiment.measures for each in taken_of(name, done)]
    _all(measures, 1, work)
    return done, notes


def taken_of(measure: str, done: Sequence[Done]) -> list[Done]:
    """Return the runs that a measure is taken of: all finished ones, or the first of each arm."""
    whole = [each for each in done if each.failure is None]
    if measure not in OF_SIZES:
        return whole
    first = {each.arm.name: each for each in reversed(whole)}
    return [each for each in whole if first[each.arm.name] is each]


def _all(tasks: Sequence[Callable[[], Done]], parallel: int, work: "_Work") -> list[Done]:
    """Execute tasks in parallel, and forward a request to stop."""
    with ThreadPoolExecutor(parallel) as pool:
        futures: list[Future[Done]] = [pool.submit(task) for task in tasks]
        left = set(futures)
        while left:
            try:
                _, left = wait(left, _POLL, FIRST_COMPLETED)
                if work.stop():
                    work.end(signal.SIGTERM)
                    wait(futures)
                    raise TrainingInterrupted(
                        "stopped; what was under way has saved, but for packages, which begin anew"
                    )
            except Interrupt:  # one that insists
                work.end(signal.SIGKILL)
                raise
    return [future.result() for future in futures]


class _Work:
    """A worker that makes runs, and its current processes."""

    def __init__(self, threads: int, stop: Callable[[], bool]) -> None:
        self.threads, self.stop = threads, stop
        self.processes: set[subprocess.Popen[bytes]] = set()

    def run(self, ready: Ready, seed: int, clock: Timings, limits: dict[str, int]) -> Done:
        """Make a run if it does not exist. A failure does not end the other runs."""
        name = ready.arm.name
        if name in clock.failures:
            return Done(ready.arm, seed, ready.folder(seed, {}), failure=clock.failures[name])
        own = {phase: limits[f"{name}/{phase}"] for phase in ready.arm.phases if limits}
        done = Done(ready.arm, seed, ready.folder(seed, own))
        try:
            if not (done.run / "evaluation.json").is_file():
                log.info("%s, seed %d: %s", name, seed, done.run)
                for command in ready.commands(done.run, seed, own, self.threads):
                    self.command(*command)
            read_as(Evaluation, done.run / "evaluation.json")
            done.finished = found = ready.finished(done.run)
            if limits:  # by the clock, whatever else the machine did meanwhile
                found.seconds = {
                    phase: steps * clock.seconds[f"{name}/{phase}"] for phase, steps in found.steps.items()
                }
        except Exception as error:
            done.failure = self._said(done, error)
        return done

    def measure(self, done: Done, name: str) -> Done:
        """Add a measure to a finished run, computing it if it is not in its folder yet."""
        try:
            if not (kept := kept_at(done.run, name)).is_file():
                log.info("%s, seed %d: %s", done.arm.name, done.seed, name)
                words = (name, str(done.run), f"threads={self.threads}")
                self.command("pipeline.experiments.measures", *words)
            done.measured[name] = read_as(Measured, kept)
        except Exception as error:
            done.unmeasured[name] = self._said(done, error)
        return done

    def _said(self, done: Done, error: Exception) -> str:
        what = str(error) if isinstance(error, (OSError, RuntimeError, ValueError)) else repr(error)
        if (done.run / "evaluation.json").is_file() and done.finished is None:
            what += f"; delete {done.run} to have it made anew"
        if not self.stop():
            log.error("%s, seed %d: %s", done.arm.name, done.seed, what)
        return what

    def command(self, module: str, *arguments: str) -> None:
        """Run a module.

        Raises:
            RuntimeError: it failed; with the last line of its output.
        """
        if self.stop():
            raise RuntimeError("not begun")
        with tempfile.TemporaryFile() as said:
            command = [sys.executable, "-m", module, *arguments]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=said, preexec_fn=_with_parent, start_new_session=True
            )
            self.processes.add(process)
            try:
                if self.stop():
                    process.send_signal(signal.SIGTERM)
                status = process.wait()
            finally:
                self.processes.discard(process)
            said.seek(0)
            if status:
                lines = said.read().decode(errors="replace").strip().splitlines()
                raise RuntimeError(f"`{arguments[0]}` ended with {status}: {lines[-1] if lines else 'no word'}")

    def end(self, number: int) -> None:
        """Send a signal to the current processes: SIGTERM lets them save and end, SIGKILL ends them."""
        for process in list(self.processes):
            process.send_signal(number)


def _with_parent() -> None:
    die_with_parent(signal.SIGTERM)
