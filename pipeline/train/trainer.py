"""Trainer of every phase: steps, validation, and saving and restoring its state.

A step reads a batch, works out its shapes on the CPU, and minimises an `Objective`. The learning rate is a function of
progress, and of steps during warm-up or with `schedule=inverse_root`. Progress is the largest of steps done / steps,
seconds trained / seconds, and epochs / epochs. Seconds are those spent in steps; validation and saving do not count.

With several ranks (torchrun) each has its own windows, and gradients are averaged by DistributedDataParallel. The first
rank alone keeps the clock, writes metrics and saves; see `haed.ranks`. With one rank on a GPU, a thread prepares the
next batch while the present one is used.

Validation is the loss on a fixed subset of the validation split, with the standard error over its windows. A phase that
decodes is validated by the exact loss, in bits per token. A phase one without a decoded share is validated by the IEM
loss, in nats per chunk. This is a softmax over the distinct chunks of the subset, so windows and candidates are the
same each time; in a mixture it has the prior of their counts in train. It shows which checkpoint is better, and is no
likelihood.

A checkpoint holds everything that influences the next step of a phase. Weights and moving average have the system's own
names. `training.safetensors` has the optimizer's moments, the objective's own state and the random generator.
`state.json` has the positions in schedule and data, sums of unwritten metrics, the best validation, and the options.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.durable import FolderLost, check_guards
from data.loader import Loader
from haed.chunk.known import Lexicon
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, distinct
from haed.system import Losses, Objective, System, Windows, moved
from pipeline.options import Options, PhaseOptions
from pipeline.run.checkpoints import AVERAGE, MODEL, TRAINING, Checkpoint, Checkpoints, Identity, State
from pipeline.run.device import Compute
from pipeline.run.metrics import Metrics, Position, Record, validated
from pipeline.run.windows import as_windows, some_at_once
from pipeline.stopping import StopRequested, interruptible, keep_whole
from pipeline.train.optimizer import Average, make_optimizer, rate

SKIPPED = "skipped_windows"


@dataclass
class Trained:
    """Result of a training stage; `remark` is a warning about it, or empty."""

    run: str
    phase: str
    checkpoint: str
    steps: int
    seconds: float
    epochs: float
    resumed_from: int
    remark: str = ""


@dataclass
class TrainState:
    """Progress of a phase.

    Attributes:
        position: position in the schedule.
        sums: sums of metrics since the last record, by name.
        validated_at: position of the last validation.
        stale: number of validations since the best one.
        best: metric of the best one: bits per token, or nats per chunk for a phase one that decodes nothing.
        saved_at: position of the last checkpoint.
    """

    position: Position = field(default_factory=Position)
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    validated_at: Position = field(default_factory=Position)
    stale: int = 0
    best: float = math.inf
    saved_at: Position = field(default_factory=Position)

    def has_converged(self, limits: PhaseOptions) -> bool:
        """Return whether the last `patience` validations were no better than one before."""
        return bool(limits.patience) and self.stale >= limits.patience

    def is_finished(self, limits: PhaseOptions) -> bool:
        """Return whether a limit of the phase is reached or the phase has converged."""
        return self.position.progress(limits) >= 1 or self.has_converged(limits)


@dataclass
class Read:
    """Position in the data up to a step's batch, and the state that reading it changed.

    Attributes:
        loader: position of the loader.
        negatives: position of the negatives, or None.
        epochs: passes over the data.
        skipped: number of windows that were not read.
        objective: the objective's own state.
    """

    loader: dict[str, int]
    negatives: dict[str, int] | None
    epochs: float
    skipped: int
    objective: dict[str, Tensor]


@dataclass
class Learner:
    """Model, optimizer and data of a phase.

    Attributes:
        objective: system and loss, on the device.
        optimizer: optimizer of the system's parameters.
        average: moving average of the weights, or None.
        loader: batches of windows.
        negatives: batches that are read only for their chunks, or None.
    """

    objective: Objective
    optimizer: torch.optim.Optimizer
    average: Average | None
    loader: Loader
    negatives: Loader | None

    def read(self) -> Read:
        """Return the present position in the data."""
        return Read(
            self.loader.state_dict(),
            self.negatives.state_dict() if self.negatives is not None else None,
            self.loader.epochs,
            self.loader.skipped,
            self.objective.extra_state(),
        )


def capture(
    state: TrainState, learner: Learner, read: Read, sums: list[list[float]], identity: Identity, options: Options
) -> tuple[dict[str, dict[str, Tensor]], State]:
    """Collect the contents of a checkpoint.

    Args:
        state: progress of the phase.
        learner: weights and moments to save.
        read: position in the data up to the last step.
        sums: each rank's unwritten metrics, in the order of `state.sums`, and its number of skipped windows.
        identity: everything that must match for the checkpoint to be resumed.
        options: options of the run.

    Returns:
        Tensors by file, and the contents of state.json.
    """
    system = learner.objective.system
    training = dict(read.objective)
    names: dict[Tensor, str] = {parameter: name for name, parameter in system.named_parameters()}
    for parameter, moments in learner.optimizer.state.items():
        training |= {f"optimizer/{names[parameter]}/{key}": value for key, value in moments.items()}
    training["random/torch"] = torch.get_rng_state()
    files = {MODEL: system.state_dict(), TRAINING: training}
    if learner.average is not None:
        files[AVERAGE] = learner.average.weights
    return files, {
        "identity": identity,
        "options": asdict(options),
        "threads": torch.get_num_threads(),
        "phase": {name: value for name, value in vars(state.position).items() if name != "step"},
        "loader": read.loader,
        "negatives": read.negatives,
        "sums": [dict(zip([*state.sums, SKIPPED], rank, strict=True)) for rank in sums],
        "validated_at": vars(state.validated_at),
        "stale": state.stale,
        "best": state.best if math.isfinite(state.best) else None,
    }


def restore(learner: Learner, checkpoint: Checkpoint, options: Options) -> TrainState:
    """Restore everything that a checkpoint holds, so that the phase continues exactly where it was saved."""
    saved, ranks = checkpoint.state, learner.objective.ranks
    restore_learning(learner, checkpoint)
    restore_reading(learner, checkpoint)
    state = TrainState(Position(saved["step"], **saved["phase"]))
    skipped = [int(each[SKIPPED]) for each in saved["sums"]]
    if ranks.size != len(skipped):  # the first one has those of all
        skipped = [sum(skipped), *[0] * (ranks.size - 1)]
    learner.loader.skipped = skipped[ranks.rank]
    state.sums = dict(saved["sums"][ranks.rank if ranks.size == len(saved["sums"]) else 0])
    state.sums.pop(SKIPPED, None)
    state.validated_at = Position(**saved["validated_at"])
    if saved["best"] is not None:
        if saved["options"]["validation"]["windows"] == options.validation.windows:
            state.best, state.stale = saved["best"], saved["stale"]
        else:
            log.info("validation.windows changed: validations are not compared with those of before")
    if learner.average is not None and checkpoint.average is not None:
        learner.average.load(checkpoint.average)
    torch.set_rng_state(checkpoint.training["random/torch"])
    state.saved_at = Position(**vars(state.position))
    return state


def restore_reading(learner: Learner, checkpoint: Checkpoint) -> None:
    """Continue in the data where a checkpoint stopped."""
    learner.loader.load_state_dict(checkpoint.state["loader"])
    if learner.negatives is not None and checkpoint.state["negatives"] is not None:
        learner.negatives.load_state_dict(checkpoint.state["negatives"])


def restore_learning(learner: Learner, checkpoint: Checkpoint) -> None:
    """Load the learned state of a checkpoint: weights, the optimizer's moments, and the objective's own state."""
    system, training = learner.objective.system, checkpoint.training
    system.load_state_dict(checkpoint.model)
    if learner.average is not None:
        learner.average.load(checkpoint.model)
    learner.objective.load_extra_state(training)
    tables = {id(x) for group in learner.optimizer.param_groups if group["table"] for x in group["params"]}
    for name, parameter in system.named_parameters():
        keys = ("step", "exp_avg", "exp_avg_sq")
        moments = {key: training.get(f"optimizer/{name}/{key}") for key in keys}
        if id(parameter) in tables:
            step, _, squares = moments.values()
            moments = {"squares": training.get(f"optimizer/{name}/squares")}
            if step is not None and squares is not None:
                log.info(
                    "%s was trained by AdamW, and is by Adagrad from now on: another path than without this stop", name
                )
                moments["squares"] = squares.mean(1) * step
        if parameter.requires_grad and all(x is not None for x in moments.values()):
            learner.optimizer.state[parameter] = {
                # also the step: a fused update reads it where the weights are
                key: x.to(parameter.device, x.dtype if key == "step" else parameter.dtype, copy=True)
                for key, x in moments.items()
                if x is not None
            }


@dataclass
class Validation:
    """Validation of a system on a fixed subset.

    Attributes:
        windows: the subset.
        exact: score by the exact loss, else by the IEM loss.
        lexicon: the known chunks of a mixture, which is then the likelihood.
    """

    windows: Windows
    exact: bool = True
    lexicon: Lexicon | None = None

    @property
    def figure(self) -> str:
        """The name of the metric that decides; lower is better."""
        return "validation/bits_per_token" if self.exact else "validation/iem"

    @torch.no_grad()
    def score(self, system: System, compute: Compute, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the metric and its standard error over windows; empty if `stop` became true before the end."""
        training = system.training
        system.eval()
        found: list[Tensor] = []
        with compute.precision(), suppress(StopRequested), interruptible(), self._known(system):
            for losses in self._bits(system) if self.exact else self._nats(system):
                found.append(losses)
                if stop():
                    break
        system.train(training)
        if sum(len(each) for each in found) < len(self.windows):
            return {}
        total = torch.cat(found)
        size = (self.windows.lengths if self.exact else self.windows.real).double().sum(1)
        mean = total.sum() / size.sum()
        deviation = ((total - mean * size) ** 2).sum().sqrt() / size.sum()
        return {self.figure: float(mean), "validation/standard_error": float(deviation)}

    @contextmanager
    def _known(self, system: System) -> Iterator[None]:
        """Give the system the known chunks with their present embeddings, for the length of the context."""
        if self.lexicon is None or not isinstance(system, HAED):
            yield
            return
        system.known = system.embedded(self.lexicon, torch.bfloat16)
        try:
            yield
        finally:
            system.known = None

    def _bits(self, system: System) -> Iterator[Tensor]:
        """Yield exact bits (b,) float64 on the CPU, one value a window, for some windows at a time."""
        for part in some_at_once(self.windows):
            yield -system.log_likelihood(part).double().sum(1).cpu() / math.log(2)

    def _nats(self, system: System) -> Iterator[Tensor]:
        """Yield the IEM loss (b,) float64 on the CPU, one value a window, for some windows at a time."""
        assert isinstance(system, HAED)
        real = self.windows.real
        found = distinct(self.windows.tokens[real], self.windows.lengths[real])
        chunks = Chunks(found.tokens, found.lengths)
        prior = 0.0 if system.mixture is None else system.mixture.prior
        lexicon = Lexicon(chunks, None if self.lexicon is None else self.lexicon.told(chunks)[0].clamp(min=1))
        closed = system.embedded(lexicon)
        for part in some_at_once(self.windows):
            nats = torch.zeros(part.real.shape, dtype=torch.float64)
            rows = lexicon.find(Chunks(part.tokens, part.lengths)[part.real])
            nats[part.real] = -closed.log_softmax(system.query(system.predictions(part)), rows, prior).double().cpu()
            yield nats.sum(1)


Item = TypeVar("Item")


def ahead(items: Generator[Item]) -> Generator[Item]:
    """Yield the items of an endless generator in order, and make the next one in a thread meanwhile.

    No item is made before the first is requested. An exception of the generator is raised in place of its item. Closing
    this generator waits for the pending item, closes the other generator in its own thread, and ends the thread.
    """
    with ThreadPoolExecutor(1, "ahead") as thread:
        try:
            waiting = thread.submit(next, items)
            while True:
                item = waiting.result()
                waiting = thread.submit(next, items)
                yield item
        finally:
            thread.submit(items.close).result()


log = logging.getLogger(__name__)
EARLY_RECORDS = (1, 2, 5, 10, 20)  # when steps take seconds, the first metrics need not wait for minutes
AHEAD = {"cuda"}  # devices that compute while the host prepares; on a CPU both want the same cores
Stop = Callable[[], bool]


class Interrupted(Exception):
    """A stop of training that was requested; a checkpoint was saved first."""


class Unsaved(Exception):
    """Loss of the run's folder, in which nothing was written; `step` and `captured` are the unsaved checkpoint."""

    def __init__(self, why: FolderLost, step: int, captured: tuple[dict[str, dict[str, Tensor]], State]) -> None:
        super().__init__(str(why))
        self.step, self.captured = step, captured


class NotFinite(FloatingPointError):
    """A loss, gradient or weight that is NaN or infinite."""


class Trainer:
    """Trainer of an objective through one phase, from its last checkpoint if it has one.

    Args:
        phase: limits and rates of the phase.
        options: the run's options.
        objective: system and loss, on the device.
        loader: batches of windows.
        negatives: batches that are read only for their chunks, or None.
        checkpoints: folder of the phase's checkpoints.
        compute: device and precision.
        identity: everything that must match for a checkpoint to be resumed; see `pipeline.run.checkpoints.identity`.
        stop: called after every step; true makes the phase save and raise `Interrupted`.
        validation: scores the model at intervals, or None.
        decoder_alone: number of first steps in which only the decoder is trained.
    """

    def __init__(
        self,
        phase: PhaseOptions,
        options: Options,
        objective: Objective,
        loader: Loader,
        negatives: Loader | None,
        checkpoints: Checkpoints,
        compute: Compute,
        identity: Identity,
        stop: Stop,
        validation: Validation | None,
        decoder_alone: float = 0,
    ) -> None:
        self.phase, self.options, self.objective = phase, options, objective
        self.checkpoints, self.compute, self.identity = checkpoints, compute, identity
        self.stop, self.validation, self.decoder_alone = stop, validation, decoder_alone
        system, self.ranks = objective.system, objective.ranks
        self.learner = Learner(
            objective,
            make_optimizer(system, options.optimizer, phase.layer_decay),
            Average(system, options.optimizer.ema) if options.optimizer.ema else None,
            loader,
            negatives,
        )
        others = [parameter for group in system.groups() if group.role != "decoder" for parameter in group.parameters]
        self.others = [parameter for parameter in others if parameter.requires_grad]
        self.tables = [x for group in self.learner.optimizer.param_groups if group["table"] for x in group["params"]]
        self.module: torch.nn.Module | None = None
        self.state = TrainState()
        self.diagnosis: dict[str, Tensor] = {}
        self.metrics: Metrics | None = None
        self.keep: Callable[[], object] = lambda: None
        self._read: Read | None = None  # up to the last step, if more was read since
        self._best_before = math.inf  # the best validation, should the checkpoint that is being written be lost
        self._share = 1.0  # of the peak learning rates, in the last step
        self.at: Callable[[str], None] = lambda part: None  # a profile puts its clock here, and at `System.mark`

    @property
    def position(self) -> Position:
        """The position in the schedule."""
        return self.state.position

    def fit(self, metrics: Metrics | None, keep: Callable[[], object] = lambda: None) -> Position:
        """Train until a limit of the phase is reached or `patience` ends it.

        Args:
            metrics: writer of metrics, on the first rank.
            keep: called before each checkpoint, on the first rank; it writes removed files of the run again.

        Raises:
            Interrupted: `stop` was true; a checkpoint was written first.
            NotFinite: the loss, a gradient or a weight became NaN or infinite; the last checkpoint stays.
            OSError: the last checkpoint, or that of an interruption, could not be written; or data could not be read.
            ValueError: data are damaged; a checkpoint was written first, unless there are other ranks.
            Unsaved: the run's folder was removed, moved or replaced.
        """
        keep_whole()
        self.metrics, self.keep = metrics, keep
        with closing(self._ahead()) as batches:
            return self._fit(batches)

    def _fit(self, batches: Iterator[object]) -> Position:
        self.objective.train()
        self._validate()  # one that was interrupted
        while not self.state.is_finished(self.phase):
            began = time.perf_counter()
            self.step(self._next(batches))
            if self._is_recorded(self.position.step + 1) or self.position.step + 1 == self.phase.steps:
                self.compute.wait()  # what is queued belongs to the time
            mine = self.position.seconds + time.perf_counter() - began
            self.position.step += 1
            self.position.epochs = self.read().epochs
            self.position.seconds, stopped = self.ranks.max(
                [mine if self.ranks.first else 0.0, float(self._is_to_stop())]
            )
            if self._is_recorded(self.position.step) or self.position.progress(self.phase) >= 1:
                self._write(self._record())
            if self.metrics is not None:
                self.metrics.moved(self.position)
            if stopped:
                self._interrupt()
            self._validate()
            if self._save_is_due():
                self._save()
        if self.state.saved_at.step != self.position.step:
            self._save()
        self._end()
        return self.position

    def _next(self, batches: Iterator[object]) -> object:
        """Return the next batch; if it cannot be read, save the steps before first."""
        before, read = self._read, self.read()
        try:
            return next(batches)
        except (OSError, ValueError):
            if self.ranks.size > 1 or not self.position.step:  # the others wait elsewhere
                raise
            self._read = read
            if self.state.saved_at.step != self.position.step:
                self._save()
            self.checkpoints.wait()
            log.info("saved step %d: the data of the next one cannot be read", self.position.step)
            self._read = before
            raise

    def _interrupt(self) -> None:
        self._save()
        self._end()
        raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"saved step {self.position.step}")

    def _end(self) -> None:
        """Wait for the last checkpoint, and save it again if the run's folder was lost."""
        with suppress(FolderLost):
            self.checkpoints.wait()
        if any(self.ranks.max([float(self._is_lost())])):
            self._save()

    def _is_to_stop(self) -> bool:
        """Return whether a stop was requested, or the run's folder was lost."""
        return self.stop() or self._is_lost()

    def _is_lost(self) -> bool:
        try:
            check_guards(self.checkpoints.folder)
        except FolderLost:
            return True
        return False

    def batches(self) -> Iterator[object]:
        """Yield prepared batches from the present position on, without end."""
        negatives = iter(self.learner.negatives) if self.learner.negatives is not None else None
        for step, batch in enumerate(self.learner.loader, self.position.step):
            extra = None
            if negatives is not None:
                extra = Windows.cat([as_windows(next(negatives)) for _ in range(self.options.iem.extra_batches)])
            self.at("data")
            generator = torch.Generator().manual_seed(_seed(self.options.seed, self.ranks.rank, step))
            prepared = self.objective.prepare(as_windows(batch), extra, generator)
            self.at("candidates")
            yield prepared

    def _ahead(self) -> Generator[object]:
        """Yield prepared batches, each prepared in a thread during the step before if the device leaves the host free.

        With several ranks, batches are prepared in turn. Ranks exchange candidates while they prepare, and times and
        stops in between, and these exchanges must have the same order on all ranks.
        """
        if self.compute.device.type not in AHEAD or self.ranks.size > 1:
            yield from self.batches()

        def copied() -> Generator[tuple[object, Read]]:
            kept = cycle([dict[str, Tensor]() for _ in range(3)])  # of the last step, of the next one, and being made
            for batch in self.batches():
                read, own = self.learner.read(), next(kept)
                for name, x in read.objective.items():  # fresh memory would take many times as long
                    own[name] = own[name].copy_(x) if name in own else x.clone()
                yield batch, replace(read, objective=dict(own))

        with closing(ahead(copied())) as made:
            for batch, self._read in made:
                yield batch

    def endless(self, *, ahead: bool = False) -> Iterator[None]:
        """Take one step after another, for measurements: nothing is saved, written or validated.

        Args:
            ahead: prepare batches as a training does; else in turn, so that their time can be measured separately.
        """
        if math.isfinite(self.decoder_alone):
            self.decoder_alone = 0  # most steps are of everything
        for batch in self._ahead() if ahead else self.batches():
            self.step(batch)
            self.position.step += 1
            yield

    def read(self) -> Read:
        """Return the position in the data up to the last step, which a checkpoint holds."""
        return self._read or self.learner.read()

    def step(self, batch: object) -> None:
        """Take one training step; nothing in it waits for the device."""
        with self.compute.algorithms():
            self._step(batch)

    def _step(self, batch: object) -> None:
        diagnose = self._is_recorded(self.position.step + 1)
        self._choose_what_is_trained()
        assert self.module is not None
        there = moved(batch, self.compute.device)
        self.at("candidates")
        torch.manual_seed(_seed(self.options.seed, self.ranks.rank, self.position.step, 1))  # of dropout
        with self.compute.precision():
            losses: Losses = self.module(there, diagnose)
        losses.total.backward()
        self.at("backward")
        if diagnose:
            self._diagnose(losses)
        self._add("gradient_norm", self.update())
        self.position.flops += self.objective.flops(batch)
        self._add("steps", 1.0)
        self._add("loss", losses.total)
        for name, value in losses.figures.items():
            self._add(name, value)
        self._add("chunks", float(losses.chunks))
        if losses.nats is not None:
            self._add("decoder_nats", losses.nats)
            self._add("decoded_tokens", float(losses.tokens))
        self.at("optimizer")

    def update(self) -> Tensor:
        """Update the weights with the present gradients, clipped, and return the gradients' norm before clipping."""
        self._share = rate(self.position, self.phase, self.options.optimizer)
        for group in self.learner.optimizer.param_groups:
            group["lr"] = group["peak"] * self._share
        for table in self.tables:
            table.grad = self.ranks.mean_rows(table)
        clipped = [x for group in self.learner.optimizer.param_groups if not group["table"] for x in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(clipped, self.options.optimizer.clip_norm)
        self.learner.optimizer.step()
        self.learner.optimizer.zero_grad(set_to_none=True)
        if self.learner.average is not None:
            self.learner.average.update(self.position.step + 1)
        return norm

    def _choose_what_is_trained(self) -> None:
        """Train only the decoder at first, if requested, and wrap the module anew when that changes.

        DistributedDataParallel must know which parameters have gradients.
        """
        alone = self.position.step < self.decoder_alone
        if self.module is None or (self.others and self.others[0].requires_grad == alone):
            for parameter in self.others:
                parameter.requires_grad_(not alone)
            self.module = self.ranks.averaging(self.objective, self.tables)

    def _diagnose(self, losses: Losses) -> None:
        """Record metrics of this step alone: the objective's own, and the gradient norms of the system's parts."""
        self.diagnosis = {name: value.detach() for name, value in losses.diagnosis.items()}
        for name in self.objective.system.parts:
            parameters = getattr(self.objective.system, name).parameters()
            gradients = [x.grad for x in parameters if x.grad is not None and not x.grad.is_sparse]
            if gradients:
                self.diagnosis[f"gradient_norm_{name}"] = torch.nn.utils.get_total_norm(gradients)

    def _add(self, name: str, value: Tensor | float) -> None:
        value = value.detach().double() if isinstance(value, Tensor) else value
        self.state.sums[name] = self.state.sums.get(name, 0.0) + value

    def _is_recorded(self, step: int) -> bool:
        return step % self.options.log_steps == 0 or step in EARLY_RECORDS

    def _record(self) -> Record:
        """Return the means since the last record over all ranks; the host waits for the device."""
        since, steps = float(self.state.sums.pop("seconds_before", 0.0)), float(self.state.sums.pop("steps"))
        names = [*self.state.sums, *self.diagnosis]
        values = [float(value) / steps for value in self.state.sums.values()] + [
            float(x) for x in self.diagnosis.values()
        ]
        values = [value / self.ranks.size for value in self.ranks.sum([*values, float(self.read().skipped)])]
        means = dict(zip(names, values, strict=False))
        decoder, tokens, chunks = (means.pop(name, 0.0) for name in ("decoder_nats", "decoded_tokens", "chunks"))
        self.state.sums, self.diagnosis = {"seconds_before": self.position.seconds}, {}
        record: Record = {"step": self.position.step, "seconds": self.position.seconds}
        record |= {"epoch": self.position.epochs, "flops": self.position.flops}
        if values[-1]:
            record["skipped_windows"] = round(values[-1] * self.ranks.size)
        record |= means
        self._check(means | {"decoder": decoder})
        if tokens:
            record["bits_per_token"] = decoder / tokens / math.log(2)
        elapsed = max(self.position.seconds - since, 1e-9) / steps
        record["learning_rate"] = self.options.optimizer.learning_rate * self._share
        record["steps_per_second"], record["chunks_per_second"] = 1 / elapsed, chunks / elapsed
        return record

    def _check(self, figures: dict[str, float]) -> None:
        """Raise NotFinite naming the metrics that are NaN or infinite."""
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        if wrong:
            raise NotFinite(
                f"not finite at step {self.position.step}: {', '.join(wrong)} (learning rate "
                f"{self.options.optimizer.learning_rate * self._share:.2g}); the last checkpoint stands: lower "
                "optimizer.learning_rate or optimizer.clip_norm and resume"
            )

    def _write(self, record: Record) -> None:
        if self.metrics is not None:
            self.metrics.write(record)

    def _validate(self) -> None:
        """Validate if the phase has passed another n-th of its limit, also of a raised limit."""
        times = self.options.validation.times
        last, now = (
            math.floor(x.progress(self.phase) * times + 1e-9) for x in (self.state.validated_at, self.position)
        )
        if self.validation is None or now <= last:
            return
        record, score = {}, -math.inf
        if self.ranks.first:
            with self.learner.average.applied() if self.learner.average is not None else nullcontext():
                record = self.validation.score(self.objective.system, self.compute, self._is_to_stop)
            score = record.get(self.validation.figure, -math.inf)
            self._settle()
        best = self.state.best if self.ranks.first else -math.inf
        asked = float(self.stop())
        score, interrupted, best, asked = self.ranks.max([score, float(self.ranks.first and not record), best, asked])
        if interrupted:
            self._interrupt()
        self.state.validated_at = Position(**vars(self.position))
        if self.ranks.first:
            where = {name: value for name, value in vars(self.position).items() if name != "epochs"}
            self._write(where | record)
            line, windows = validated(self.position.step, record), len(self.validation.windows)
            log.info("%s, on %d windows in %s", line, windows, self.compute.name)
        improved = score < best
        self.state.best, self.state.stale = min(best, score), 0 if improved else self.state.stale + 1
        if self.state.has_converged(self.phase):
            log.info("no better validation in the last %d: the phase ends here", self.state.stale)
            if "steps" in self.state.sums:  # those since the last record
                self._write(self._record())
        self._save(best if improved else None)
        if asked:  # the next step may be slow
            self._end()
            raise self._interrupted()

    def _save_is_due(self) -> bool:
        limits, last = self.options.checkpoint, self.state.saved_at
        steps, seconds = self.position.step - last.step, self.position.seconds - last.seconds
        return bool(
            (limits.every_steps and steps >= limits.every_steps)
            or (limits.every_seconds and seconds >= limits.every_seconds)
        )

    def _settle(self) -> None:
        """Wait for the pending checkpoint; if it was the best and is lost, restore the best validation before it."""
        try:
            self.checkpoints.wait()
        except FolderLost:  # the next save says so
            self.state.best = self._best_before
        except OSError as error:
            log.warning("%s; training goes on", error)
            self.state.best = self._best_before

    def _save(self, best_before: float | None = None) -> None:
        """Start writing a checkpoint on the first rank, with the metrics of all ranks.

        A failed write does not end the training; `fit` raises if it was the last checkpoint.

        Args:
            best_before: the best validation before this one, if this one is better; else None.
        """
        self.state.saved_at = Position(**vars(self.position))
        weights = torch.stack(
            [torch.linalg.vector_norm(x.detach(), torch.inf) for x in self.objective.parameters()]
        ).max()
        self._check({name: float(value) for name, value in self.state.sums.items()} | {"weights": float(weights)})
        mine = [*(float(value) for value in self.state.sums.values()), float(self.read().skipped)]
        sums = self.ranks.gather(torch.tensor([mine], dtype=torch.float64))
        if not self.ranks.first:
            return
        self._settle()
        self._best_before = self.state.best if best_before is None else best_before
        each = [rank[0].tolist() for rank in sums]
        found = capture(self.state, self.learner, self.read(), each, self.identity, self.options)
        try:
            check_guards(self.checkpoints.folder)
            self.keep()
            if self.metrics is not None:
                self.metrics.sync()
        except FolderLost as error:
            raise Unsaved(error, self.position.step, found) from None
        except OSError as error:  # a checkpoint must not be ahead of the metrics
            why = f"no checkpoint of step {self.position.step}, what belongs to it could not be written: {error}"
            self.checkpoints.refuse(OSError(why))
            return
        log.info("saving step %d", self.position.step)
        self.checkpoints.save(self.position.step, *found, best_before is not None)


def _seed(*parts: int) -> int:
    """Derive a seed from the run's seed, the rank and the step, so that no random state of a step is saved."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
