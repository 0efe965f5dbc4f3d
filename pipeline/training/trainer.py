"""Trainer of every phase: steps, validation, and saving and restoring its state.

A step reads a batch, prepares it, and minimises an `Objective`. The learning rate is a function of
progress, and of steps during warm-up or with `schedule=inverse_root`. Progress is the largest of steps done / steps,
seconds trained / seconds, and epochs / epochs. Seconds are those spent in steps; validation and saving do not count.

With several ranks (torchrun) each has its own windows, and gradients are averaged by DistributedDataParallel, or with
sharded weights (`haed.fsdp`) by FSDP. The first rank alone keeps the clock, writes metrics and saves; see
`haed.distributed`. On a GPU the next batch is read while the device still computes; it is waited for once a step, in the
preparation of the batch.

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
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from data.filesystem import FolderLostError, check_guards
from data.loader import Loader
from haed.base import Objective, SequenceModel, StepOutput, TokenBatch, to_device
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.chunk.packing import find_distinct
from haed.distributed import copy_to_cpu, local_part, shard_like, total_norm
from pipeline.config import Options, PhaseOptions
from pipeline.console import is_out_of_memory
from pipeline.run.checkpoints import (
    AVERAGE,
    MODEL,
    TRAINING,
    Checkpoint,
    Checkpoints,
    Identity,
    PhaseOne,
    State,
    advise_on_disk,
    list_checkpoints,
    load_weights,
)
from pipeline.run.device import Compute
from pipeline.run.metrics import Metrics, Position, Record, format_validation
from pipeline.run.system import BATCH_OPTIONS, MODEL_OPTIONS, check_memory, count_activations, free_memory
from pipeline.run.windows import as_windows, split_windows
from pipeline.signals import StopRequested, TrainingInterrupted, end_interruptible, interruptible_section
from pipeline.training.optimizer import WeightAverage, clip_gradients, learning_rate_share, make_optimizer

if TYPE_CHECKING:
    from haed.fsdp import ShardedModule

SKIPPED = "skipped_windows"
_RECORDED_AS = {"decoder_nats": "bits_per_token"}  # sums that metrics show under another name


@dataclass
class TrainingResult:
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
class PhaseProgress:
    """Progress of a phase: the positions now, at the last validation and at the last checkpoint.

    Attributes:
        sums: sums of metrics since the last record, by name.
        stale: number of validations since the best one.
        best: metric of the best one: bits per token, or nats per chunk for a phase one that decodes nothing.
        rate_share: learning rate of the last step, as a share of its peak.
    """

    position: Position = field(default_factory=Position)
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    validated_at: Position = field(default_factory=Position)
    stale: int = 0
    best: float = math.inf
    rate_share: float = 1.0
    saved_at: Position = field(default_factory=Position)

    def has_converged(self, limits: PhaseOptions) -> bool:
        """Return whether the last `patience` validations were no better than one before."""
        return bool(limits.patience) and self.stale >= limits.patience

    def is_finished(self, limits: PhaseOptions) -> bool:
        """Return whether a limit of the phase is reached or the phase has converged."""
        return self.position.progress(limits) >= 1 or self.has_converged(limits)


@dataclass
class DataPosition:
    """Position in the data up to a step's batch; `skipped` windows were not read."""

    loader: dict[str, int]
    negatives: dict[str, int] | None
    skipped: int


@dataclass
class TrainingState:
    """Model on the device, optimizer and data of a phase; `negatives` are batches that are read only for their chunks."""

    objective: Objective
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    loader: Loader
    negatives: Loader | None

    def data_position(self) -> DataPosition:
        """Return the present position in the data."""
        negatives = self.negatives.state_dict() if self.negatives is not None else None
        return DataPosition(self.loader.state_dict(), negatives, self.loader.skipped)


def restore_checkpoint(training_state: TrainingState, checkpoint: Checkpoint, options: Options) -> PhaseProgress:
    """Restore everything that a checkpoint holds, so that the phase continues exactly where it was saved.

    Returns:
        how far the phase was.
    """
    saved, ranks = checkpoint.state, training_state.objective.ranks
    restore_learning(training_state, checkpoint)
    restore_reading(training_state, checkpoint)
    progress = PhaseProgress(Position(saved["step"], **saved["phase"]), rate_share=saved["rate_share"])
    skipped = sum(int(each[SKIPPED]) for each in saved["sums"])
    training_state.loader.skipped = skipped if ranks.is_first else 0  # records have the sum over ranks
    progress.sums = dict(saved["sums"][ranks.rank if ranks.size == len(saved["sums"]) else 0])
    progress.sums.pop(SKIPPED, None)
    progress.validated_at = Position(**cast(Any, saved["validated_at"]))
    if saved["best"] is not None:
        if saved["options"]["validation"]["windows"] == options.validation.windows:
            progress.best, progress.stale = saved["best"], saved["stale"]
        else:
            log.info("validation.windows changed, so earlier validations are not compared")
    if training_state.average is not None and checkpoint.average is not None:
        training_state.average.load_weights(checkpoint.average)
    torch.set_rng_state(checkpoint.training["random/torch"])
    progress.saved_at = Position(**vars(progress.position))
    return progress


def restore_reading(training_state: TrainingState, checkpoint: Checkpoint) -> None:
    """Continue in the data where a checkpoint stopped."""
    training_state.loader.load_state_dict(checkpoint.state["loader"])
    if training_state.negatives is not None and checkpoint.state["negatives"] is not None:
        training_state.negatives.load_state_dict(checkpoint.state["negatives"])


def restore_learning(training_state: TrainingState, checkpoint: Checkpoint) -> None:
    """Load the learned state of a checkpoint: weights, the optimizer's moments, and the objective's own state."""
    system, training = training_state.objective.system, checkpoint.training
    load_weights(system, checkpoint)
    if training_state.average is not None:
        training_state.average.load_weights(checkpoint.model)
    training_state.objective.load_extra_state(training)
    tables = {id(x) for group in training_state.optimizer.param_groups if group["table"] for x in group["params"]}
    for name, parameter in system.named_parameters():
        keys = ("squares",) if id(parameter) in tables else ("step", "exp_avg", "exp_avg_sq")
        names = {key: f"optimizer/{name}/{key}" for key in keys}
        if parameter.requires_grad and training.keys() >= set(names.values()):
            moments = {key: training[each] for key, each in names.items()}
            training_state.optimizer.state[parameter] = {
                # also the step: a fused update reads it where the weights are
                key: x.to(parameter.device, copy=True)
                if key == "step"
                else shard_like(x.to(parameter.device, parameter.dtype, copy=True), parameter)
                for key, x in moments.items()
            }


@dataclass
class Validation:
    """Validation of a system on a fixed subset.

    Attributes:
        windows: the subset.
        exact: score by the exact loss, else by the IEM loss.
        lexicon: the known chunks of a mixture, which is then the likelihood.
    """

    windows: TokenBatch
    exact: bool = True
    lexicon: ChunkVocabulary | None = None

    @property
    def metric_name(self) -> str:
        """The name of the metric that decides; lower is better."""
        return "validation/bits_per_token" if self.exact else "validation/iem"

    @torch.no_grad()
    def score(
        self,
        system: SequenceModel,
        compute: Compute,
        stop: Callable[[], bool] = lambda: False,
        is_interruptible: bool = True,
    ) -> dict[str, float]:
        """Return the metric and, of several windows, its standard error; empty if `stop` became true before the end.

        `is_interruptible` lets a signal end it within a part of the windows, which would part the ranks of a sharded model.
        """
        training = system.training
        system.eval()
        losses_of_parts: list[Tensor] = []
        section = interruptible_section() if is_interruptible else nullcontext()
        with compute.use_precision(), suppress(StopRequested), section, self._lend_known_chunks(system):
            for losses in self._exact_bits(system) if self.exact else self._iem_nats(system):
                losses_of_parts.append(losses)
                if stop():
                    break
        system.train(training)
        if sum(len(each) for each in losses_of_parts) < len(self.windows):
            return {}
        total = torch.cat(losses_of_parts)
        size = (self.windows.lengths if self.exact else self.windows.chunk_mask).double().sum(1)
        mean = total.sum() / size.sum()
        standard_error = ((total - mean * size) ** 2).sum().sqrt() / size.sum()
        error = {"validation/standard_error": float(standard_error)} if len(total) > 1 else {}
        return {self.metric_name: float(mean)} | error

    @contextmanager
    def _lend_known_chunks(self, system: SequenceModel) -> Iterator[None]:
        """Give the system the known chunks with their present embeddings, for the length of the context."""
        if self.lexicon is None or not isinstance(system, HAED):
            yield
            return
        system.known = system.embed_vocabulary(self.lexicon, torch.bfloat16)
        try:
            yield
        finally:
            system.known = None

    def _exact_bits(self, system: SequenceModel) -> Iterator[Tensor]:
        """Yield exact bits (b,) float64 on the CPU, one value a window, for some windows at a time."""
        for part in split_windows(self.windows):
            yield -system.log_likelihood(part).double().sum(1).cpu() / math.log(2)

    def _iem_nats(self, system: SequenceModel) -> Iterator[Tensor]:
        """Yield the IEM loss (b,) float64 on the CPU, one value a window, for some windows at a time."""
        assert isinstance(system, HAED)
        real = self.windows.chunk_mask
        chunks = find_distinct(self.windows.tokens[real], self.windows.lengths[real])
        prior = 0.0 if system.mixture is None else system.mixture.prior
        counts = None if self.lexicon is None else self.lexicon.counts_of(chunks)[0].clamp(min=1)
        closed = system.embed_vocabulary(ChunkVocabulary(chunks, counts))
        for part in split_windows(self.windows):
            yield -system.closed_log_prob(part, closed, prior).double().sum(1).cpu()


log = logging.getLogger(__name__)
EARLY_RECORDS = (1, 2, 5, 10, 20)  # when steps take seconds, the first metrics need not wait for minutes
Stop = Callable[[], bool]


class UnsavedCheckpointError(Exception):
    """Loss of the run's folder, in which nothing was written.

    `step` and `captured` are the unsaved checkpoint; `is_best` says whether it has the best validation.
    """

    def __init__(
        self, why: FolderLostError, step: int, captured: tuple[dict[str, dict[str, Tensor]], State], is_best: bool
    ) -> None:
        super().__init__(str(why))
        self.step, self.captured, self.is_best = step, captured, is_best


class NonFiniteLossError(FloatingPointError):
    """A loss, gradient or weight that is NaN or infinite."""


class Trainer:
    """Trainer of an objective through one phase, from its last checkpoint if it has one.

    Args:
        phase: limits and rates of the phase.
        options: options of the run.
        objective: system and loss, on the device.
        loader: batches to train on.
        negatives: batches that are read only for their chunks, or None.
        checkpoints: those of the phase.
        compute: device, precision and threads.
        identity: everything that must match for a checkpoint to be resumed; see `pipeline.run.checkpoints.make_identity`.
        stop: called after every step; true makes the phase save and raise `TrainingInterrupted`.
        validation: scores the model at intervals, or None.
        decoder_only_steps: number of first steps in which only the decoder is trained; infinite for a whole phase.
        sharded: the objective, if it is sharded over the ranks.
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
        decoder_only_steps: float = 0,
        sharded: "ShardedModule | None" = None,
    ) -> None:
        self.phase, self.options, self.objective = phase, options, objective
        self.checkpoints, self.compute, self.identity = checkpoints, compute, identity
        self.stop, self.validation, self.sharded = stop, validation, sharded
        self.decoder_only_steps = decoder_only_steps
        system, self.ranks = objective.system, objective.ranks
        self.training_state = TrainingState(
            objective,
            make_optimizer(system, options.optimizer, phase.layer_decay),
            WeightAverage(system, options.optimizer.ema) if options.optimizer.ema else None,
            loader,
            negatives,
        )
        others = [x for group in system.parameter_groups() if group.role != "decoder" for x in group.parameters]
        self.others = [parameter for parameter in others if parameter.requires_grad]
        groups = self.training_state.optimizer.param_groups
        self.tables = [x for group in groups if group["table"] for x in group["params"]]
        self.dense = [x for group in groups if not group["table"] for x in group["params"]]
        self.module: Callable[[Any, bool], StepOutput] | None = None
        self.progress = PhaseProgress()
        self.diagnosis: dict[str, Tensor] = {}
        self.metrics: Metrics | None = None
        self.keep: Callable[[], object] = lambda: None
        self._data_position: DataPosition | None = None  # up to the last step, if reading the next batch failed
        # Of phase two: the digest of the phase-one checkpoint that it began with, and what phase one had cost by then.
        self.first: PhaseOne = {}
        self._best_before = (math.inf, 0)  # best and stale, should the checkpoint that is being written be lost
        self._is_updating = False  # weights are changed, but the step is not complete
        # A profile puts its clock here, and at `SequenceModel.mark`.
        self.end_part: Callable[[str], None] = lambda part: None

    @property
    def position(self) -> Position:
        """The position in the schedule."""
        return self.progress.position

    def fit(self, metrics: Metrics | None, keep: Callable[[], object] = lambda: None) -> Position:
        """Train until a limit of the phase is reached or `patience` ends it.

        Args:
            metrics: writer of metrics, on the first rank.
            keep: called before each checkpoint, on the first rank; it writes removed files of the run again.

        Raises:
            TrainingInterrupted: `stop` was true; a checkpoint was written first.
            NonFiniteLossError: the loss, a gradient or a weight became NaN or infinite; the last checkpoint stays.
            OSError: the last checkpoint, or that of an interruption, could not be written; or data could not be read.
            ValueError: data are damaged; a checkpoint was written first, unless there are other ranks.
            UnsavedCheckpointError: the run's folder was removed, moved or replaced.
        """
        if self.position.step:
            end_interruptible()
        self.metrics, self.keep = metrics, keep
        self.objective.train()
        self._validate_if_due()  # one that was interrupted
        with closing(self.prepare_batches()) as batches:
            while not self.progress.is_finished(self.phase):
                began = self._take_next_step(batches)
                end_interruptible()  # from the first step on there is something to save
                if self._is_recorded(self.position.step + 1) or self.position.step + 1 == self.phase.steps:
                    self.compute.wait_for_device()  # what is queued belongs to the time
                seconds = self.position.seconds + time.perf_counter() - began
                self.position.step += 1
                self.position.epochs = self.training_state.loader.epochs_passed
                figures = [seconds if self.ranks.is_first else 0.0, float(self._is_stop_due())]
                self.position.seconds, stopped = self.ranks.max_over_ranks(figures)
                if self._is_recorded(self.position.step) or self.position.progress(self.phase) >= 1:
                    self._write_record(self._make_record())
                if self.metrics is not None:
                    self.metrics.report_position(self.position)
                if stopped:
                    self._save_and_interrupt()
                self._validate_if_due()
                if self._is_save_due():
                    self._save_checkpoint()
            # Before the batches are closed, which waits for processes that may hang at a dead disk.
            if self.progress.saved_at.step != self.position.step:
                self._save_checkpoint()
            self._finish_saving()
        return self.position

    def _take_next_step(self, batches: Iterator[object]) -> float:
        """Read a batch, train on it, and return when this began.

        Before the first step, check that there is memory for one, and wrap the module. That takes no time of the phase:
        DistributedDataParallel imports PyTorch's compiler.
        """
        began = time.perf_counter()
        with self._steps_before_saved():
            batch = next(batches)
            try:
                if self.module is None:
                    paused = time.perf_counter()
                    self._check_memory(batch)
                    self._set_trainable_parameters()
                    began += time.perf_counter() - paused
                self.step(batch)
            except Exception:
                self.objective.undo_preparation()
                raise
        return began

    def _check_memory(self, batch: object) -> None:
        """Raise ValueError before the first step if there is no memory for it.

        What is compiled saves less, and what is sharded is elsewhere, so these are not checked.
        """
        if not self.options.compile and self.sharded is None:
            available = free_memory(self.compute.device)
            check_memory(self.count_memory(batch), available)

    @contextmanager
    def _steps_before_saved(self) -> Iterator[None]:
        """If the data cannot be read, or memory runs out, save the steps done before, with their position in the data.

        With several ranks nothing is saved: the others wait elsewhere.
        """
        read = self.training_state.data_position()
        try:
            yield
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            memory_ran_out = is_out_of_memory(error)
            if isinstance(error, RuntimeError) and not memory_ran_out:  # of a device that may be unusable
                raise
            if self._is_updating or self.ranks.size > 1 or not self.position.step:
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            self.training_state.optimizer.zero_grad(set_to_none=True)
            self._data_position = read
            if self.progress.saved_at.step != self.position.step:
                self._save_checkpoint()
            self.checkpoints.wait_until_written()
            why = "memory ran out" if memory_ran_out else "what comes next failed"
            log.info("saved step %s: %s", f"{self.position.step:,}", why)
            raise

    def _save_and_interrupt(self, best_before: tuple[float, int] | None = None) -> NoReturn:
        self._save_checkpoint(best_before)
        self._finish_saving()
        raise TrainingInterrupted(f"saved step {self.position.step:,}")

    def _finish_saving(self) -> None:
        """Wait for the last checkpoint, and save it again if the run's folder was lost."""
        with suppress(FolderLostError):
            self.checkpoints.wait_until_written()
        if any(self.ranks.max_over_ranks([float(self._is_lost())])):
            is_best = self.progress.best < self._best_before[0]  # that of the lost checkpoint
            self._save_checkpoint(self._best_before if is_best else None)

    def _is_stop_due(self) -> bool:
        """Return whether a stop was requested, or the run's folder was lost."""
        return self.stop() or self._is_lost()

    def _is_lost(self) -> bool:
        try:
            check_guards(self.checkpoints.folder)
        except FolderLostError:
            return True
        return False

    def prepare_batches(self) -> Generator[object]:
        """Yield prepared batches from the present position on, without end."""
        negatives = iter(self.training_state.negatives) if self.training_state.negatives is not None else None
        for step, batch in enumerate(self.training_state.loader, self.position.step):
            extra = None
            if negatives is not None:
                batches = [as_windows(next(negatives)) for _ in range(self.options.iem.extra_batches)]
                extra = TokenBatch.concatenate_batches(batches)
            self.end_part("data")
            generator = torch.Generator().manual_seed(_derive_seed(self.options.seed, self.ranks.rank, step))
            with self.compute.use_algorithms():
                prepared = self.objective.prepare_batch(as_windows(batch), extra, generator)
            self.end_part("candidates")
            yield prepared

    def run_steps(self) -> Iterator[None]:
        """Take one step after another, for measurements: nothing is saved, written or validated."""
        if math.isfinite(self.decoder_only_steps):
            self.decoder_only_steps = 0  # most steps are of everything
        for batch in self.prepare_batches():
            if self.module is None:
                self._check_memory(batch)
            self.step(batch)
            self.position.step += 1
            yield

    def data_position(self) -> DataPosition:
        """Return the position in the data up to the last step, which a checkpoint holds."""
        return self._data_position or self.training_state.data_position()

    def step(self, batch: object) -> None:
        """Take one training step; nothing in it waits for the device."""
        with self.compute.use_algorithms():
            diagnose = self._is_recorded(self.position.step + 1)
            self._set_trainable_parameters()
            assert self.module is not None
            there = to_device(batch, self.compute.device)
            self.end_part("candidates")
            torch.manual_seed(_derive_seed(self.options.seed, self.ranks.rank, self.position.step, 1))  # of dropout
            with self.compute.use_precision():
                losses = self.module(there, diagnose)
            losses.total.backward()
            if self.sharded is not None:
                self.sharded.average_scalars()
            self.end_part("backward")
            if diagnose:
                self._record_diagnosis(losses)
            figures: dict[str, Tensor | float] = {"gradient_norm": self.update(), "steps": 1.0, "loss": losses.total}
            self.position.flops += self.objective.estimate_flops(batch)
            figures |= losses.figures | {"chunks": float(losses.chunks)}
            if losses.nats is not None:
                figures |= {"decoder_nats": losses.nats, "decoded_tokens": losses.tokens}
            for name, value in figures.items():
                value = value.detach().double() if isinstance(value, Tensor) else value
                self.progress.sums[name] = self.progress.sums.get(name, 0.0) + value
            self._is_updating = False
            self.end_part("optimizer")

    def count_memory(self, batch: object) -> dict[str, int]:
        """Return the bytes that the first step needs beside the weights at least, by the options that determine them.

        It is to be called before that step, and changes none of its random numbers.
        """
        for parameter in self.others:
            parameter.requires_grad_(math.isfinite(self.decoder_only_steps))  # the largest step counts
        moments = (
            0 if self.training_state.optimizer.state else sum(8 * x.numel() for x in self.dense if x.requires_grad)
        )
        with self.compute.use_algorithms(), self.compute.use_precision():
            activations = count_activations(self.objective, to_device(batch, self.compute.device))
        return {MODEL_OPTIONS: moments, BATCH_OPTIONS: activations}

    def update(self) -> Tensor:
        """Update the weights with the present gradients, clipped, and return the gradients' norm before clipping."""
        self.progress.rate_share = learning_rate_share(self.position, self.phase, self.options.optimizer)
        for group in self.training_state.optimizer.param_groups:
            group["lr"] = group["peak"] * self.progress.rate_share
        for table in self.tables:
            table.grad = self.ranks.average_sparse_gradient(table)
        norm = clip_gradients(self.dense, self.options.optimizer.clip_norm)
        self._is_updating = True
        self.training_state.optimizer.step()
        self.training_state.optimizer.zero_grad(set_to_none=True)
        if self.training_state.average is not None:
            self.training_state.average.update(self.position.step + 1)
        return norm

    def _set_trainable_parameters(self) -> None:
        """Train only the decoder at first, if requested, and wrap the module anew when that changes.

        DistributedDataParallel must know which parameters have gradients.
        """
        alone = self.position.step < self.decoder_only_steps
        if self.module is None or (self.others and self.others[0].requires_grad == alone):
            for parameter in self.others:
                parameter.requires_grad_(not alone)
            if self.sharded is not None:
                self.module = self.sharded.compute_losses
            else:
                self.module = self.ranks.wrap_data_parallel(self.objective, self.tables)

    def _record_diagnosis(self, losses: StepOutput) -> None:
        """Record metrics of this step alone: the objective's own, and the gradient norms of the system's parts."""
        self.diagnosis = {name: value.detach() for name, value in losses.diagnosis.items()}
        for name in self.objective.system.submodules:
            parameters = getattr(self.objective.system, name).parameters()
            gradients = [x.grad for x in parameters if x.grad is not None and not x.grad.is_sparse]
            if gradients:
                self.diagnosis[f"gradient_norm_{name}"] = total_norm(gradients)

    def _is_recorded(self, step: int) -> bool:
        return step % self.options.log_steps == 0 or step in EARLY_RECORDS

    def _make_record(self) -> Record:
        """Return the means since the last record over all ranks; the host waits for the device."""
        since, steps = float(self.progress.sums.pop("seconds_before", 0.0)), float(self.progress.sums.pop("steps"))
        names = [*self.progress.sums, *self.diagnosis]
        values = [float(value) / steps for value in self.progress.sums.values()]
        values += [*map(float, self.diagnosis.values()), float(self.data_position().skipped)]
        *values, skipped = (value / self.ranks.size for value in self.ranks.sum_over_ranks(values))
        means = dict(zip(names, values, strict=True))
        decoder, tokens, chunks = (means.pop(name, 0.0) for name in ("decoder_nats", "decoded_tokens", "chunks"))
        self.progress.sums, self.diagnosis = {"seconds_before": self.position.seconds}, {}
        record: Record = {"step": self.position.step, "seconds": self.position.seconds}
        record |= {"epoch": self.position.epochs, "flops": self.position.flops}
        if skipped:
            record[SKIPPED] = round(skipped * self.ranks.size)
        record |= means
        self._check_finite(means | {"decoder_nats": decoder})
        if tokens:
            record["bits_per_token"] = decoder / tokens / math.log(2)
        elapsed = max(self.position.seconds - since, 1e-9) / steps
        record["learning_rate"] = self.options.optimizer.learning_rate * self.progress.rate_share
        record["steps_per_second"], record["chunks_per_second"] = 1 / elapsed, chunks / elapsed
        return record

    def _check_finite(self, figures: dict[str, float]) -> None:
        """Raise NonFiniteLossError naming the metrics that are NaN or infinite."""
        wrong = [_RECORDED_AS.get(name, name) for name, value in figures.items() if not math.isfinite(value)]
        if not wrong:
            return
        terms = [name for name in self.options.iem.split_terms() if f"iem_{name}" in wrong and "iem" not in wrong]
        mend = "Lower optimizer.learning_rate or optimizer.clip_norm"
        if terms:
            mend = f"The loss without {', '.join(terms)} of iem.terms is finite. Mend what computes it, or leave it out"
        again = f"{mend}, and train the run again"
        with suppress(OSError):
            self.checkpoints.wait_until_written()
        if saved := list_checkpoints(self.checkpoints.folder):
            # Its weights may be finite, but too large to compute with.
            again += f". It continues from {saved[-1]}. If it ends like this again, remove that, or begin another run"
        else:
            again = f"This phase has no checkpoint yet. {again}"
        raise NonFiniteLossError(
            f"not finite at step {self.position.step:,}: {', '.join(wrong)} "
            f"(learning rate {self.options.optimizer.learning_rate * self.progress.rate_share:.2g}). {again}"
        )

    def _write_record(self, record: Record) -> None:
        if self.metrics is not None:
            self.metrics.write_record(record)

    def _validate_if_due(self) -> None:
        """Validate if the phase has passed another n-th of its limit, also of a raised limit."""
        times = self.options.validation.times
        positions = (self.progress.validated_at, self.position)
        last, now = (math.floor(each.progress(self.phase) * times + 1e-9) for each in positions)
        if self.validation is None or now <= last:
            return
        record, score, is_undefined = {}, -math.inf, False
        if self.ranks.is_first or self.sharded is not None:
            record = self._score(self.validation)
        if self.ranks.is_first:
            score = record.get(self.validation.metric_name, -math.inf)
            is_undefined = bool(record) and not math.isfinite(score)
            self._wait_for_checkpoint()
        best, stale = (self.progress.best, float(self.progress.stale)) if self.ranks.is_first else (-math.inf, 0.0)
        is_interrupted = self.ranks.is_first and not record
        figures = [-math.inf if is_undefined else score, float(is_undefined), float(is_interrupted), best, stale]
        figures.append(float(self.stop()))
        score, undefined, interrupted, best, stale, stop_requested = self.ranks.max_over_ranks(figures)
        if interrupted:
            self._save_and_interrupt()
        if undefined:
            self._check_finite({self.validation.metric_name: math.nan})
        self.progress.validated_at = Position(**vars(self.position))
        if self.ranks.is_first:
            where = {name: value for name, value in vars(self.position).items() if name != "epochs"}
            self._write_record(where | record)
            line, windows = format_validation(self.position.step, record), len(self.validation.windows)
            log.info("%s, on %d windows in %s", line, windows, self.compute.precision_name)
        improved = score < best
        self.progress.best, self.progress.stale = min(best, score), 0 if improved else int(stale) + 1
        if self.progress.has_converged(self.phase):
            log.info("the last %d validations did not improve, so the phase ends", self.progress.stale)
            if "steps" in self.progress.sums:  # those since the last record
                self._write_record(self._make_record())
        best_before = (best, int(stale)) if improved else None
        if stop_requested:  # the next step may be slow
            self._save_and_interrupt(best_before)
        self._save_checkpoint(best_before)

    def _score(self, validation: Validation) -> dict[str, float]:
        """Return the scores of the averaged weights, or of the weights; of a sharded model all ranks compute them."""
        average, sharded, system = self.training_state.average, self.sharded, self.objective.system
        with self._steps_before_saved(), nullcontext() if average is None else average.use_average():
            if sharded is None:
                return validation.score(system, self.compute, self._is_stop_due)
            together = lambda: bool(self.ranks.max_over_ranks([float(self._is_stop_due())])[0])  # noqa: E731
            score = partial(validation.score, system, self.compute, together, False)
            record: dict[str, float] = sharded.evaluate(score)
            return record

    def _is_save_due(self) -> bool:
        limits, last = self.options.checkpoint, self.progress.saved_at
        steps, seconds = self.position.step - last.step, self.position.seconds - last.seconds
        return bool(
            (limits.every_steps and steps >= limits.every_steps)
            or (limits.every_seconds and seconds >= limits.every_seconds)
        )

    def _wait_for_checkpoint(self) -> None:
        """Wait for the pending checkpoint; if it was the best and is lost, restore the best validation before it."""
        try:
            self.checkpoints.wait_until_written()
        except OSError as error:
            if not isinstance(error, FolderLostError):  # the next save says so
                log.warning("%s. Training continues", error)
            self.progress.best, self.progress.stale = self._best_before

    def _save_checkpoint(self, best_before: tuple[float, int] | None = None) -> None:
        """Start writing a checkpoint on the first rank, with the metrics of all ranks.

        A failed write does not end the training; `fit` raises if it was the last checkpoint.

        Args:
            best_before: the best validation before this one, and how many followed it, if this one is better; else None.
        """
        weights = [local_part(x.detach()) for x in self.objective.parameters()]
        norms = torch.stack([torch.linalg.vector_norm(x, torch.inf) for x in weights if x.numel()] or [torch.zeros(())])
        rank_sums = {name: float(value) for name, value in self.progress.sums.items()}
        self._check_finite(rank_sums | {"weights": self.ranks.sum_over_ranks([float(norms.max())])[0]})
        self.progress.saved_at = Position(**vars(self.position))
        if self.ranks.is_first:
            self._wait_for_checkpoint()
        counted = [*rank_sums.values(), float(self.data_position().skipped)]
        sums = self.ranks.gather_tensors(torch.tensor([counted], dtype=torch.float64))
        if not self.ranks.is_first:
            if self.sharded is not None:
                self._capture_tensors()
            return
        self._best_before = best_before or (self.progress.best, self.progress.stale)
        captured = self._capture_checkpoint([rank[0].tolist() for rank in sums])
        try:
            check_guards(self.checkpoints.folder)
            self.keep()
            if self.metrics is not None:
                self.metrics.sync_to_disk()
        except FolderLostError as error:
            raise UnsavedCheckpointError(error, self.position.step, captured, best_before is not None) from None
        except OSError as error:  # a checkpoint must not be ahead of the metrics
            why = f"step {self.position.step:,} has no checkpoint, because its files could not be written: {error}"
            why += advise_on_disk(error)
            self.checkpoints.fail_next_wait(OSError(why))
            return
        log.info("saving step %s", f"{self.position.step:,}")
        self.checkpoints.save(self.position.step, *captured, best_before is not None)

    def _capture_checkpoint(self, sums: list[list[float]]) -> tuple[dict[str, dict[str, Tensor]], State]:
        """Return the tensors of a checkpoint by file, and the contents of state.json.

        Args:
            sums: each rank's unwritten metrics, in the order of `progress.sums`, and its number of skipped windows.
        """
        progress, read = self.progress, self.data_position()
        return self._capture_tensors(), {
            "identity": self.identity,
            "options": asdict(self.options),
            "threads": torch.get_num_threads(),
            "phase": {name: value for name, value in vars(progress.position).items() if name != "step"},
            "loader": read.loader,
            "negatives": read.negatives,
            "sums": [dict(zip([*progress.sums, SKIPPED], rank, strict=True)) for rank in sums],
            "validated_at": vars(progress.validated_at),
            "stale": progress.stale,
            "best": progress.best if math.isfinite(progress.best) else None,
            "rate_share": progress.rate_share,
            "first": self.first,
        }

    def _capture_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of a checkpoint's tensors by file, on the CPU.

        If the model is sharded, all ranks must call this, and the first one alone has the tensors.
        """
        training_state, system = self.training_state, self.objective.system
        training = dict(self.objective.extra_state())
        names: dict[Tensor, str] = {parameter: name for name, parameter in system.named_parameters()}
        for parameter, moments in training_state.optimizer.state.items():
            training |= {f"optimizer/{names[parameter]}/{key}": value for key, value in moments.items()}
        training["random/torch"] = torch.get_rng_state()
        files = {MODEL: system.state_dict(), TRAINING: training}
        if training_state.average is not None:
            files[AVERAGE] = training_state.average.weights
        is_first = self.ranks.is_first
        return {file: {name: copy_to_cpu(x, is_first) for name, x in each.items()} for file, each in files.items()}


def _derive_seed(*parts: int) -> int:
    """Derive a seed from the run's seed, the rank and the step, so that no random state of a step is saved."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
