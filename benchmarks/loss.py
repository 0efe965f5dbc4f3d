"""Time and memory of the IEM loss in blocks, beside its formula: a softmax over the whole matrix.

    python benchmarks/loss.py [--repeats 3] [--device auto]

Queries × candidates of 256 dimensions, forward and backward; the formula only where it fits. Seconds are medians of passes in
turns. Peak memory is that of a process of its own, beyond inputs and gradients, also as a share of that matrix (float32).
Steps of both phases, and of training end to end, are measured by `benchmarks/gpu.py`, also on a CPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch

from haed.iem.sampled_softmax import blockwise_cross_entropy
from pipeline.config import load_options
from pipeline.run.device import setup_compute

SIZES = {"cpu": (4096, 16384, 32768), "cuda": (16384, 65536, 131072)}


def wait_for_device() -> None:
    """Wait for all that is queued on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Peak:
    """Peak memory since it was made, beyond what was in use then, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._read_status("VmRSS")

    def bytes(self) -> int:
        """Return the peak so far."""
        now = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._read_status("VmHWM")
        return now - self.before

    @staticmethod
    def _read_status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def compute_formula(
    queries: torch.Tensor, candidates: torch.Tensor, bias: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """Return the loss by its formula."""
    return torch.nn.functional.cross_entropy((queries @ candidates.t()).float() + bias, target)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "in blocks": lambda *parts: blockwise_cross_entropy(*parts).loss,
    "by its formula": compute_formula,
}


def make_inputs(size: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return queries, candidates and biases, and the targets."""
    parts = [torch.randn(size, 256, device=device, dtype=torch.bfloat16) / 4 for _ in range(2)]
    parts = [part.requires_grad_() for part in (*parts, torch.zeros(size, device=device))]
    return parts, torch.arange(size, device=device)


def compute_gradients(name: str, parts: list[torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a loss."""
    return torch.autograd.grad(LOSSES[name](*parts, target), parts)


def measure_memory(name: str, size: int, device: torch.device) -> int:
    """Return the peak bytes of a loss and its gradients, beyond inputs and gradients."""
    for rows in (256, size):  # the first one loads what products need
        parts, target = make_inputs(rows, device)
        peak = Peak()
        gradients = compute_gradients(name, parts, target)
    return peak.bytes() - sum(each.numel() * each.element_size() for each in gradients)


def measure_seconds(name: str, parts: list[torch.Tensor], target: torch.Tensor) -> float:
    """Return the seconds of a loss and its gradients."""
    wait_for_device()
    began = time.perf_counter()
    compute_gradients(name, parts, target)
    wait_for_device()
    return time.perf_counter() - began


def main() -> None:
    """Measure all sizes, or with `--memory` one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = setup_compute(load_options(None, [f"device={arguments.device}"])).device
    if arguments.memory:
        name, size = json.loads(arguments.memory)
        print(measure_memory(name, size, device))
        return
    print("The IEM loss, forward and backward, bfloat16, 256 dimensions; memory beyond inputs and gradients")
    for size in SIZES[device.type]:
        parts, target = make_inputs(size, device)
        names = [*LOSSES][: 2 if size < SIZES[device.type][-1] else 1]
        took: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.repeats + 1):
            for name in names:
                took[name].append(measure_seconds(name, parts, target))
        line = f"  {size:,} x {size:,}:"
        for name in names:
            command = [sys.executable, __file__, "--device", arguments.device, "--memory", json.dumps([name, size])]
            used = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
            line += f"  {name} {statistics.median(took[name][1:]):.3f} s, {used / 1e6:.0f} MB"
            line += f" = {used / (4 * size * size):.3f} of the matrix"
        print(line, flush=True)


if __name__ == "__main__":
    main()
