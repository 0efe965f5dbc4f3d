"""One trainer for every phase.

A step reads a batch, works out its shapes on the CPU, and minimises an `Objective`. The learning rate is a function of
progress alone: the largest of steps done / steps, seconds trained / seconds, and epochs / epochs. Seconds are those spent
in steps; validation and saving do not count. Everything that influences the next step goes into a checkpoint.

With several ranks (torchrun) each has its own windows, gradients are averaged by DistributedDataParallel, and the first
rank alone keeps the clock, writes metrics and saves; see `haed.ranks`.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from data.loader import Batch, Loader
from haed.candidates import Prepared
from haed.flops import flops_of_step
from haed.objective import Losses, Objective
from pipeline.checkpoints import Checkpoints
from pipeline.device import Compute
from pipeline.learning import Average, make_optimizer, rate
from pipeline.metrics import Metrics, Position
from pipeline.mining import Miner
from pipeline.options import Options, PhaseOptions
from pipeline.resuming import capture
from pipeline.validation import Validation

log = logging.getLogger(__name__)
EARLY_RECORDS = (1, 2, 5, 10, 20)  # when steps take seconds, the first metrics need not wait for minutes
Stop = Callable[[], bool]


class Interrupted(Exception):
    """Training was asked to stop; it saved first."""


class NotFinite(FloatingPointError):
    """The loss is NaN or infinite."""


class Trainer:
    """Trains an objective through one phase, from its last checkpoint if it has one.

    Args:
        phase: limits and rates of the phase.
        options: the run's options.
        objective: model and loss, on the device.
        loader: batches; `negatives` are those read only for their chunks, or None.
        negatives: see above.
        checkpoints: where to save.
        compute: device and precision.
        identity: what a checkpoint must agree with to be resumed; see `pipeline.training`.
        stop: asked after every step; true makes the phase save and raise `Interrupted`.
        validation: scores the model now and then, or None.
        decoder_alone: for so many steps the decoder is trained alone.
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
        identity: dict[str, Any],
        stop: Stop,
        validation: Validation | None,
        decoder_alone: float = 0,
    ) -> None:
        self.phase, self.options, self.objective = phase, options, objective
        self.loader, self.negatives, self.checkpoints = loader, negatives, checkpoints
        self.compute, self.identity, self.stop, self.validation = compute, identity, stop, validation
        self.ranks = objective.ranks
        self.miner = None
        if objective.candidates is not None and objective.candidates.bank is not None and options.iem.mined:
            self.miner = objective.miner = Miner(objective.model, objective.candidates.bank, options.iem.mined)
        self.optimizer = make_optimizer(objective.model, options.optimizer, phase.layer_decay)
        self.average = Average(objective.model, options.optimizer.ema) if options.optimizer.ema else None
        self.decoder_alone = decoder_alone
        self.others = [
            parameter
            for name, parameter in objective.model.named_parameters()
            if parameter.requires_grad and not name.startswith("decoder.")
        ]
        self.module: torch.nn.Module | None = None
        self.position = Position()
        self.sums: dict[str, Tensor | float] = {}
        self.figures: dict[str, Tensor] = {}
        self.metrics: Metrics | None = None
        self.validated = self.stale = 0  # validations so far, and those since the best one
        self.best = math.inf
        self.saved_at = Position()

    def fit(self, metrics: Metrics | None) -> Position:
        """Trains until a limit of the phase is reached; metrics are the first rank's.

        Raises:
            Interrupted: `stop` was true; a checkpoint was written first.
            NotFinite: the loss, a gradient or a weight became NaN or infinite; the last checkpoint stands.
            OSError: the last checkpoint, or that of an interruption, could not be written.
        """
        if not any((self.phase.steps, self.phase.seconds, self.phase.epochs)):
            raise ValueError("the phase has no limit: set its steps, seconds or epochs")
        self.metrics = metrics
        batches = self.batches()
        self.objective.train()
        self._validate()  # one that was interrupted
        while self.position.progress(self.phase) < 1 and not self.has_converged():
            began = time.perf_counter()
            self.step(next(batches))
            mine = self.position.seconds + time.perf_counter() - began
            self.position.step += 1
            if self.miner is not None and self.position.step % self.options.iem.mined_refresh == 0:
                self.miner.refresh()
            self.position.epochs = self.loader.epochs
            self.position.seconds, stopped = self.ranks.max([mine if self.ranks.first else 0.0, float(self.stop())])
            if self._is_recorded(self.position.step):
                self._write(self._record())
            if metrics is not None:
                metrics.moved(self.position)
            if stopped:
                self._interrupt()
            self._validate()
            if self._save_is_due():
                self._save()
        if self.saved_at.step != self.position.step:
            self._save()
        self.checkpoints.wait()
        return self.position

    def _interrupt(self) -> None:
        self._save()
        self.checkpoints.wait()
        raise Interrupted(f"stopped after step {self.position.step}, saved")

    def has_converged(self) -> bool:
        """The validations of the last `patience` times were no better than one before."""
        return bool(self.phase.patience) and self.stale >= self.phase.patience

    def batches(self) -> Iterator[Prepared]:
        """Prepared batches from the present position on, without end."""
        negatives = iter(self.negatives) if self.negatives is not None else None
        for step, batch in enumerate(self.loader, self.position.step):
            extra = None
            if negatives is not None:
                others = [_flat(next(negatives)) for _ in range(self.options.iem.extra_batches)]
                extra = torch.cat([x[0] for x in others]), torch.cat([x[1] for x in others])
            generator = torch.Generator().manual_seed(_seed(self.options.seed, self.ranks.rank, step))
            yield self.objective.prepare(*_tensors(batch), extra, generator)

    def step(self, batch: Prepared) -> None:
        """One update of the weights; nothing in it waits for the device."""
        diagnose = self._is_recorded(self.position.step + 1)
        self._choose_what_is_trained()
        assert self.module is not None
        with self.compute.precision():
            losses: Losses = self.module(batch.to(self.compute.device), diagnose)
        losses.total.backward()
        if diagnose:
            self._diagnose(losses)
        self._add("gradient_norm", self.update())
        self.position.flops += flops_of_step(self.objective.model, batch, self.ranks.size)
        self._add("steps", 1.0)
        self._add("loss", losses.total)
        self._add("candidates", float(batch.candidates))
        self._add("chunks", float(batch.targets_of_all))
        for name, value in (("iem", losses.iem), ("iem_accuracy", losses.accuracy)):
            if value is not None:
                self._add(name, value)
        if losses.decoder is not None:
            self._add("decoder_nats", losses.decoder * batch.decoded)
            self._add("decoded_tokens", float(batch.decoded_tokens * self.ranks.size))

    def update(self) -> Tensor:
        """Takes the gradients that are there, clipped, into the weights; returns their norm before."""
        share = rate(self.position, self.phase, self.options.optimizer.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.position.step + 1)
        return norm

    def _choose_what_is_trained(self) -> None:
        """The decoder alone at first, if so asked; DistributedDataParallel must know what has gradients."""
        alone = self.position.step < self.decoder_alone
        if self.module is None or (self.others and self.others[0].requires_grad == alone):
            for parameter in self.others:
                parameter.requires_grad_(not alone)
            self.module = self.objective
            if self.ranks.size > 1:
                self.module = DistributedDataParallel(self.objective, gradient_as_bucket_view=True)

    def _diagnose(self, losses: Losses) -> None:
        """Figures of this step alone: place of the target, candidates in question, gradients of the two models."""
        figures = {"iem_rank": losses.rank, "iem_effective": losses.effective}
        for name in ("encoder", "main"):
            parts = getattr(self.objective.model, name).parameters()
            gradients = [parameter.grad for parameter in parts if parameter.grad is not None]
            figures[f"gradient_norm_{name}"] = torch.nn.utils.get_total_norm(gradients)
        self.figures = {name: value.detach() for name, value in figures.items() if value is not None}

    def _add(self, name: str, value: Tensor | float) -> None:
        value = value.detach().double() if isinstance(value, Tensor) else value
        self.sums[name] = self.sums.get(name, 0.0) + value

    def _is_recorded(self, step: int) -> bool:
        return step % self.options.log_steps == 0 or step in EARLY_RECORDS

    def _record(self) -> dict[str, Any]:
        """Means since the last record over all ranks; the only place where the host waits for the device."""
        since, steps = float(self.sums.pop("seconds_before", 0.0)), float(self.sums.pop("steps"))
        names = [*self.sums, *self.figures]
        values = [float(value) / steps for value in self.sums.values()] + [float(x) for x in self.figures.values()]
        values = [value / self.ranks.size for value in self.ranks.sum([*values, float(self.loader.skipped)])]
        means = dict(zip(names, values, strict=False))
        decoder, tokens, chunks = (means.pop(name, 0.0) for name in ("decoder_nats", "decoded_tokens", "chunks"))
        self.sums, self.figures = {"seconds_before": self.position.seconds}, {}
        record: dict[str, Any] = {"step": self.position.step, "seconds": self.position.seconds}
        record |= {"epoch": self.position.epochs, "flops": self.position.flops}
        if values[-1]:
            record["skipped_windows"] = round(values[-1] * self.ranks.size)
        record |= means
        self._check(means | {"decoder": decoder})
        if tokens:
            record["bits_per_token"] = decoder / tokens / math.log(2)
        elapsed = max(self.position.seconds - since, 1e-9) / steps
        record["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        record["steps_per_second"], record["chunks_per_second"] = 1 / elapsed, chunks / elapsed
        return record

    def _check(self, figures: dict[str, float]) -> None:
        """Raises NotFinite naming those that are NaN or infinite."""
        wrong = [name for name, value in figures.items() if not math.isfinite(value)]
        if wrong:
            raise NotFinite(
                f"not finite at step {self.position.step}: {', '.join(wrong)} (learning rate "
                f"{self.optimizer.param_groups[0]['lr']:.2g}); the last checkpoint stands: lower "
                "optimizer.learning_rate or optimizer.clip_norm and resume"
            )

    def _write(self, record: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(record)

    def _validate(self) -> None:
        """Scores the fixed subset when the phase has passed another n-th of its limit."""
        times = self.options.validation.times
        due = math.floor(self.position.progress(self.phase) * times + 1e-9)
        if self.validation is None or due <= self.validated:
            return
        record, score = {}, -math.inf
        if self.ranks.first:
            with self.average.applied() if self.average is not None else nullcontext():
                record = self.validation.score(self.objective.model, self.compute, self.stop)
            score = record.get("validation/bits_per_token", -math.inf)
        score, interrupted = self.ranks.max([score, float(self.ranks.first and not record)])
        if interrupted:
            self._interrupt()
        self.validated = due
        if self.ranks.first:
            where = {name: value for name, value in vars(self.position).items() if name != "epochs"}
            self._write(where | record)
            log.info("%s", "  ".join(f"{name} {value:.4f}" for name, value in record.items()))
        improved = score < self.best
        self.best, self.stale = min(self.best, score), 0 if improved else self.stale + 1
        if self.has_converged():
            log.info("no better validation in the last %d: the phase ends here", self.stale)
        self._save(improved)

    def _save_is_due(self) -> bool:
        limits, last = self.options.checkpoint, self.saved_at
        steps, seconds = self.position.step - last.step, self.position.seconds - last.seconds
        return bool(
            (limits.every_steps and steps >= limits.every_steps)
            or (limits.every_seconds and seconds >= limits.every_seconds)
        )

    def _save(self, best: bool = False) -> None:
        """Has a checkpoint written, by the first rank; the others tell it of theirs.

        What cannot be written does not end the training; `fit` raises if it was the last checkpoint.
        """
        self.saved_at = Position(**vars(self.position))
        weights = torch.stack([parameter.detach().abs().max() for parameter in self.objective.parameters()]).max()
        self._check({name: float(value) for name, value in self.sums.items()} | {"weights": float(weights)})
        mine = [*(float(value) for value in self.sums.values()), float(self.loader.skipped)]
        sums = self.ranks.gather(torch.tensor([mine], dtype=torch.float64))
        if not self.ranks.first:
            return
        try:
            self.checkpoints.wait()
        except OSError as error:
            log.warning("%s; training goes on", error)
        try:
            if self.metrics is not None:
                self.metrics.sync()
        except OSError as error:  # a checkpoint must not be ahead of the metrics
            log.warning("no checkpoint of step %d, its metrics could not be written: %s", self.position.step, error)
            return
        self.checkpoints.save(self.position.step, *capture(self, [rank[0].tolist() for rank in sums]), best)


def _seed(*parts: int) -> int:
    """Of what is random in a step, from the run's seed, the rank and the step: nothing of it need be saved."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def _tensors(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(batch.tokens), torch.from_numpy(batch.lengths), torch.from_numpy(batch.starts)


def _flat(batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, lengths, _ = _tensors(batch)
    real = lengths > 0
    return tokens[real], lengths[real]
