"""Where the time of a training step goes, and how much of the device's arithmetic it uses."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from haed.candidates import Prepared
from haed.encoder import Embedding
from haed.flops import flops_of_step
from haed.objective import Losses
from pipeline.checkpoints import Checkpoints
from pipeline.device import Compute, compute
from pipeline.options import Options
from pipeline.runs import RunFolder
from pipeline.trainer import Trainer
from pipeline.training import build_trainer

PARTS = ("data", "candidates", "encoder", "main", "loss", "decoder", "optimizer")
_WARM_UP, _SIDE = 3, {"cpu": 2048, "cuda": 8192}


@dataclass
class Profile:
    """A profile of some steps.

    Attributes:
        phase: pretrain, finetune or train.
        steps: number of steps measured.
        milliseconds: of a step, by part; each part with its share of the backward pass.
        flops: model FLOPs of a step.
        device_flops: FLOPs per second of a large matrix product on the same device, in the same precision.
        utilisation: share of that rate which a step reaches.
    """

    phase: str
    steps: int
    milliseconds: dict[str, float]
    flops: float
    device_flops: float
    utilisation: float


class _Clock:
    """Seconds by part, with the device waited for before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.seconds[part] += time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def profile(options: Options, phase: Literal["pretrain", "finetune", "train"], steps: int = 20) -> Profile:
    """Trains a fresh model of a run's configuration for some steps and measures their parts; writes nothing.

    Raises:
        FileNotFoundError: the run's corpus is not there.
    """
    run = RunFolder(Path(options.runs_dir) / options.name)
    machine = compute(options)
    unused = Checkpoints(run.phase(phase) / "profile")
    trainer = build_trainer(getattr(options, phase), options, run.corpus(), unused, machine, lambda: False)
    clock, flops = _Clock(machine.device), 0.0
    batches = _timed_batches(trainer, clock)
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            clock.seconds, flops = dict.fromkeys(PARTS, 0.0), 0.0
        batch = next(batches)
        flops += flops_of_step(trainer.objective.model, batch)
        _staged(trainer, batch, machine, clock)
    seconds = sum(clock.seconds.values())
    rate = product_rate(machine)
    milliseconds = {part: 1e3 * spent / steps for part, spent in clock.seconds.items()}
    return Profile(phase, steps, milliseconds, flops / steps, rate, flops / seconds / rate)


def _timed_batches(trainer: Trainer, clock: _Clock) -> Iterator[Prepared]:
    """The trainer's batches; what the loaders take is `data`, the rest of preparing them `candidates`."""
    loaders = [loader for loader in (trainer.loader, trainer.negatives) if loader is not None]
    for loader in loaders:
        _time_loader(loader, clock)
    batches = trainer.batches()
    while True:
        before = clock.seconds["data"]
        with clock("candidates"):
            batch = next(batches)
        clock.seconds["candidates"] -= clock.seconds["data"] - before
        yield batch


def _time_loader(loader: object, clock: _Clock) -> None:
    made = iter(loader)  # type: ignore[call-overload]

    def timed() -> Iterator[object]:
        while True:
            with clock("data"):
                batch = next(made)
            yield batch

    kind = type(loader)
    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": lambda self: timed()})


def _staged(trainer: Trainer, batch: Prepared, machine: Compute, clock: _Clock) -> None:
    """The same step as `Trainer.step`, its graph cut between the parts so that each has its own backward pass."""
    objective = trainer.objective
    with machine.precision():
        with clock("candidates"):
            batch = batch.to(machine.device)
        with clock("encoder"):
            found = objective.model.embed(batch.tokens, batch.lengths)
        cut = Embedding(found.vector.detach().requires_grad_(), found.bias.detach().requires_grad_())
        with clock("main"):
            prediction = torch.cat([objective.predict(cut.vector, piece) for piece in batch.pieces])
        ahead = prediction.detach().requires_grad_()
        if batch.adjustment is not None:
            with clock("loss"):
                losses = Losses(prediction.new_zeros((), dtype=torch.float32))
                objective.score(losses, batch, cut, ahead, False)
                losses.total.backward()
        if objective.decode_fraction:
            with clock("decoder"):
                parts = ahead.split([len(piece.where) for piece in batch.pieces])
                scores = [objective.decode(*pair) for pair in zip(parts, batch.pieces, strict=True)]
                (-torch.stack(scores).sum() / max(1, batch.decoded)).backward()
    with clock("main"):
        prediction.backward(ahead.grad)
    with clock("encoder"):
        ends = [(x, y.grad) for x, y in ((found.vector, cut.vector), (found.bias, cut.bias)) if y.grad is not None]
        torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])
    with clock("optimizer"):
        trainer.update()


def product_rate(machine: Compute, repeats: int = 5) -> float:
    """FLOPs per second of a product of large square matrices, the best of some."""
    side = _SIDE.get(machine.device.type, 2048)
    dtype = machine.autocast or torch.float32
    a, b = (torch.randn(side, side, device=machine.device).to(dtype) for _ in range(2))
    clock, best = _Clock(machine.device), float("inf")
    for _ in range(repeats + 1):
        clock.seconds["main"] = 0.0
        with clock("main"):
            a @ b
        best = min(best, clock.seconds["main"])
    return 2 * side**3 / best


def table(found: Profile) -> str:
    """For people."""
    total = sum(found.milliseconds.values())
    lines = [f"{found.phase}: {total:.1f} ms a step, mean of {found.steps}"]
    lines += [f"  {part:<11} {spent:9.2f} ms  {spent / total:6.1%}" for part, spent in found.milliseconds.items()]
    lines.append(
        f"  {found.flops / 1e9:,.1f} model GFLOP a step, {found.utilisation:.1%} of the "
        f"{found.device_flops / 1e12:.2f} TFLOP/s that a matrix product reaches here"
    )
    return "\n".join(lines)
