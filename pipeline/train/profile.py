"""Where the time of a training step goes, and how much of the device's arithmetic it uses."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.options import Options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import Compute, compute
from pipeline.run.folder import RunFolder
from pipeline.train.stages import build_trainer

_WARM_UP, _SIDE = 3, {"cpu": 2048, "cuda": 8192}


@dataclass
class Profile:
    """A profile of some steps.

    Attributes:
        phase: pretrain, finetune or train.
        steps: number of steps measured.
        milliseconds: of a step, by part: reading the data, finding candidates and laying out the batch, the system's parts
            and the IEM loss, each with its backward pass, and the optimizer.
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


class Clock:
    """Seconds by part, with the device waited for at each mark.

    A part of the forward pass lasts from one mark to the next. Its backward pass begins when the gradient of the tensor that
    ends it is there, and lasts until that of another part's is, or the whole pass is over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.running, self.since = "", time.perf_counter()

    def at(self, part: str) -> None:
        """The `part` that ran since the last mark has ended; "backward": the whole backward pass."""
        self._ended(self.running if part == "backward" else part)

    def mark(self, part: str, tensor: Tensor) -> Tensor:
        """The same, with the tensor that ends it, whose gradient will tell when its backward pass begins."""
        self._ended(part)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._backward(part))
        return tensor

    def _backward(self, part: str) -> None:
        self._ended(self.running)
        self.running = part

    def _ended(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.running, self.since = part, now


def profile(options: Options, phase: Literal["pretrain", "finetune", "train"], steps: int = 20) -> Profile:
    """Trains a fresh model of a run's configuration for some steps of its trainer and measures their parts; writes nothing.

    Raises:
        FileNotFoundError: the run's corpus is not there.
    """
    run = RunFolder.of(options)
    if run.is_trained():
        run.check()
    machine = compute(options)
    unused = Checkpoints(run.phase(phase) / "profile")
    trainer = build_trainer(getattr(options, phase), options, run.corpus(), unused, machine, lambda: False)
    clock, flops = Clock(machine.device), 0.0
    trainer.at, trainer.objective.system.mark = clock.at, clock.mark
    batches = trainer.batches()
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            clock.seconds, flops = {}, trainer.position.flops
        trainer.step(next(batches))
    flops = trainer.position.flops - flops
    parts = trainer.objective.system.parts if "system" not in clock.seconds else ("system",)
    order = ("data", "candidates", *parts, "loss", "optimizer")
    milliseconds = {part: 1e3 * clock.seconds.get(part, 0.0) / steps for part in order}
    rate, seconds = product_rate(machine), sum(clock.seconds.values())
    return Profile(phase, steps, milliseconds, flops / steps, rate, flops / seconds / rate)


def product_rate(machine: Compute, repeats: int = 5) -> float:
    """FLOPs per second of a product of large square matrices, the best of some."""
    side = _SIDE.get(machine.device.type, 2048)
    dtype = machine.autocast or torch.float32
    a, b = (torch.randn(side, side, device=machine.device).to(dtype) for _ in range(2))
    clock = Clock(machine.device)
    for repeat in range(repeats + 1):
        clock.at("before")
        a @ b
        clock.at(f"product {repeat}")
    return 2 * side**3 / min(clock.seconds[f"product {repeat}"] for repeat in range(repeats + 1))


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
