"""Time and memory of a training step by part, and the utilisation of the device's arithmetic."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pipeline.config import Options, check_phase
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import Compute, setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.system import SavedActivations
from pipeline.training.stages import build_trainer

_WARM_UP, _SIDE = 2, {"cpu": 2048, "cuda": 8192}
BATCH = ("candidates", "batch")  # what laying it out is called: with the IEM loss, which has candidates, and without
_AROUND = ("data", "candidates", "loss", "optimizer")  # what of a step is not the system's


@dataclass
class Profile:
    """A profile of some steps.

    Attributes:
        milliseconds: of a step, by part: reading the data, preparing the batch, the system's parts and the IEM loss,
            each with its backward pass, and the optimizer. Preparing is `candidates` with the IEM loss, else `batch`.
        kept: bytes that a part's forward pass saves for its backward pass, see `SavedActivations`.
        flops: model FLOPs of a step.
        device_flops: FLOP/s of a large matrix product on the same device, in the same precision.
        utilisation: share of that rate which a step reaches.
        peak: bytes that PyTorch allocated on a GPU at most, beyond those before the model was built; 0 on a CPU.
        linear_cost: cost of a token in layers of the finest scale, for systems that know it (Nawrot et al. 2021,
            section 3.1).
    """

    phase: str
    steps: int
    milliseconds: dict[str, float]
    kept: dict[str, int]
    flops: float
    device_flops: float
    utilisation: float
    peak: int = 0
    linear_cost: float | None = None


class PartTimer:
    """Timer of seconds by part, which synchronises the device at each mark.

    A part of the forward pass lasts from one mark to the next. Its backward pass begins when the gradient of the tensor
    that ends it is computed. It lasts until that of another part begins, or the whole pass ends.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.running, self.since = "", time.perf_counter()

    def end_part(self, part: str) -> None:
        """End the `part` that ran since the last mark; "backward" ends the whole backward pass."""
        self._record_part(self.running if part == "backward" else part)

    def mark_part(self, part: str, tensor: Tensor) -> Tensor:
        """End a part at the tensor that it returns; the tensor's gradient will begin the part's backward pass.

        What is compiled together is one part.
        """
        if torch.compiler.is_compiling():
            return tensor
        self._record_part(part)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._begin_backward(part))
        return tensor

    def _begin_backward(self, part: str) -> None:
        self._record_part(self.running)
        self.running = part

    def _record_part(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self.since
        self.running, self.since = part, now


def profile_phase(options: Options, phase: Literal["pretrain", "finetune", "train"], steps: int = 20) -> Profile:
    """Train a fresh model of a run's configuration for some steps and measure their parts; nothing is written.

    Raises:
        ConfigError: this kind of model has no such phase.
        FileNotFoundError: the run's corpus is not there.
    """
    check_phase(phase, options)
    run = RunFolder.from_options(options)
    if run.is_trained():
        run.check_unchanged()
    machine = setup_compute(options)
    on_gpu = machine.device.type == "cuda"
    before_model = torch.cuda.memory_allocated(machine.device) if on_gpu else 0
    unused = Checkpoints(run.phase_folder(phase) / "profile")
    trainer = build_trainer(getattr(options, phase), options, run.open_corpus(), unused, machine, lambda: False)
    system, taken = trainer.objective.system, trainer.run_steps()
    system.mark = (kept := SavedActivations(system)).mark_part
    with kept:
        next(taken)
    kept.end_part("loss")
    clock = PartTimer(machine.device)
    trainer.end_part, system.mark = clock.end_part, clock.mark_part
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            clock.seconds, before = {}, trainer.position.flops
            if on_gpu:
                torch.cuda.reset_peak_memory_stats(machine.device)
        next(taken)
    flops = trainer.position.flops - before
    marked = [each for each in clock.seconds if each not in _AROUND]
    parts = marked if "system" in marked else [*marked, *(each for each in system.submodules if each not in marked)]
    seconds = sum(clock.seconds.values())
    laid_out = BATCH[0] if getattr(options, phase).iem_weight else BATCH[1]
    clock.seconds[laid_out], kept.bytes[laid_out] = clock.seconds.get(BATCH[0], 0.0), kept.bytes.get(BATCH[0], 0)
    peak = torch.cuda.max_memory_allocated(machine.device) - before_model if on_gpu else 0
    order = ("data", laid_out, *parts, "loss", "optimizer")
    milliseconds = {part: 1e3 * clock.seconds.get(part, 0.0) / steps for part in order}
    rate = product_rate(machine)
    return Profile(
        phase,
        steps,
        milliseconds,
        {part: kept.bytes.get(part, 0) for part in order},
        flops / steps,
        rate,
        flops / seconds / rate,
        peak,
        getattr(system, "linear_cost", None),
    )


def product_rate(machine: Compute, repeats: int = 5) -> float:
    """Return the FLOP/s of a product of large square matrices, the best of several trials."""
    side = _SIDE.get(machine.device.type, 2048)
    dtype = machine.autocast or torch.float32
    a, b = (torch.randn(side, side, device=machine.device).to(dtype) for _ in range(2))
    clock = PartTimer(machine.device)
    for repeat in range(repeats + 1):
        clock.end_part("before")
        a @ b
        clock.end_part(f"product {repeat}")
    return 2 * side**3 / min(clock.seconds[f"product {repeat}"] for repeat in range(repeats + 1))


def format_profile(profile: Profile) -> str:
    """Format a profile for people."""
    total, kept = sum(profile.milliseconds.values()), sum(profile.kept.values())
    lines = [
        f"{profile.phase}: {total:.1f} ms per step, mean of {profile.steps}; {kept / 1e6:,.1f} MB kept for the backward pass"
    ]
    for part, spent in profile.milliseconds.items():
        if part == "loss" and BATCH[1] in profile.milliseconds:
            continue
        line = f"  {part:<11} {spent:9.2f} ms  {spent / total:6.1%}"
        if bytes_kept := profile.kept[part]:
            line += f"  {bytes_kept / 1e6:10,.2f} MB  {bytes_kept / kept:6.1%}"
        lines.append(line)
    lines.append(
        f"  {profile.flops / 1e9:,.1f} model GFLOP per step, {profile.utilisation:.1%} of the {profile.device_flops / 1e12:.2f} "
        "TFLOP/s of a matrix product on this device"
    )
    if profile.peak:
        lines.append(f"  {profile.peak / 1e9:,.2f} GB of GPU memory at the peak")
    if profile.linear_cost is not None:
        lines.append(f"  a token costs as much as {profile.linear_cost:.2f} layers of the finest scale (linear cost)")
    return "\n".join(lines)
