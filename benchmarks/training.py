"""Speed and memory of training: a step of phase one against one of training end to end, and the IEM loss against its formula.

    python benchmarks/training.py [key=value …] [--images FOLDER] [--words FOLDER] [--repeats 3] [--device auto]
        [--parts steps loss]

1. Steps: the presets `paper-imagenet32` and `paper-wikitext103` (LSTM decoder of 2000 units), one batch of theirs: phase one
   with `decode_fraction=0`, and end to end. Seconds are medians of interleaved steps, data and optimizer included. Peak
   memory is that of a process of its own, beyond what it had before the model was made (CUDA: allocated by torch), so it
   holds weights, gradients and moments. Without a folder, images are noise, and words the Python standard library's.
2. The loss: queries × candidates of 256 dimensions, forward and backward, beside a softmax over the whole matrix where that
   fits; peak memory beyond inputs and gradients as a share of that matrix (float32).

How much of the device's arithmetic a step uses is told by `haed profile`.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch

from experiments.timing import build_phase_trainer
from haed.iem.sampled_softmax import blockwise_cross_entropy
from pipeline.config import load_options
from pipeline.run.device import setup_compute
from pipeline.run.sharding import shard_source
from pipeline.training.trainer import Trainer

ARMS = ("pretrain", "train")
SIZES = {"cpu": (4096, 16384, 32768), "cuda": (16384, 65536, 131072)}


def options_of(preset: str, source: list[str], device: str, more: list[str]) -> Any:
    limits = [f"{arm}.{limit}={value}" for arm in ARMS for limit, value in (("epochs", "null"), ("steps", 1000))]
    return load_options(preset, [*source, *limits, f"device={device}", "validation.times=0", *more])


def trainer_of(arm: str, options: Any, folder: str) -> Trainer:
    options.shards_dir = f"{folder}/shards"
    return build_phase_trainer(arm, options, shard_source(options), Path(folder))


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any]) -> float:
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


class Peak:
    """Peak memory since it was made, beyond what was in use then, in bytes."""

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._status("VmRSS")

    def bytes(self) -> int:
        now = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._status("VmHWM")
        return now - self.before

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def sources(arguments: argparse.Namespace, folder: str) -> dict[str, list[str]]:
    """Presets, and where their data comes from."""
    images = arguments.images
    if images is None:
        images = Path(folder) / "noise"
        images.mkdir()
        noise = np.random.default_rng(0).integers(0, 256, (4096, 3072), np.uint8)
        np.savez(images / "train_data_batch_1.npz", data=noise, labels=np.zeros(4096, np.int64))
    words = ["source.kind=stdlib"] if arguments.words is None else [f"source.path={arguments.words}"]
    return {"paper-imagenet32": [f"source.path={images}"], "paper-wikitext103": words}


def memory(*job: Any) -> int:
    """Peak bytes of a job, in a process of its own: memory that was freed is kept, and would hide what comes next."""
    done = subprocess.run([sys.executable, __file__, "--memory", json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-1000:])
    return int(done.stdout.splitlines()[-1])


def memory_of_steps(arm: str, preset: str, source: list[str], device: str, folder: str, more: list[str]) -> int:
    options = options_of(preset, source, device, more)
    setup_compute(options)
    torch.ones(64, 64) @ torch.ones(64, 64)
    peak = Peak()
    trainer = trainer_of(arm, options, folder)
    batches = trainer.prepare_batches()
    for _ in range(2):
        trainer.step(next(batches))
    return peak.bytes()


def gradients_of(name: str, parts: list[torch.Tensor], target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(LOSSES[name](*parts, target), parts)


def one_step(trainer: Trainer, batches: Iterator[object]) -> None:
    trainer.step(next(batches))


def memory_of_loss(name: str, size: int, device: str) -> int:
    where = setup_compute(load_options(None, [f"device={device}"])).device
    for rows in (256, size):  # the first one loads what products need
        parts, target = inputs(rows, where)
        peak = Peak()
        gradients = gradients_of(name, parts, target)
    return peak.bytes() - sum(each.numel() * each.element_size() for each in gradients)


def steps(arguments: argparse.Namespace, folder: str) -> None:
    print("\nA step of phase one (decode_fraction=0) against one end to end, 2000 units")
    for preset, source in sources(arguments, folder).items():
        options = options_of(preset, source, arguments.device, arguments.overrides)
        trainers = {arm: trainer_of(arm, options, folder) for arm in ARMS}
        batches = {arm: trainer.prepare_batches() for arm, trainer in trainers.items()}
        took: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for repeat in range(arguments.repeats + 1):
            for arm in ARMS:
                spent = seconds(partial(one_step, trainers[arm], batches[arm]))
                took[arm] += [spent] if repeat else []
        del trainers, batches
        one, end = (statistics.median(took[arm]) for arm in ARMS)
        print(f"  {preset}: {one:.3f} s against {end:.3f} s, {end / one:.1f} times as fast", flush=True)
        low, high = (
            memory("steps", arm, preset, source, arguments.device, folder, arguments.overrides) / 1e9 for arm in ARMS
        )
        print(f"  {preset}: {low:.2f} GB against {high:.2f} GB, 1/{high / low:.1f}", flush=True)


def naive(queries: torch.Tensor, candidates: torch.Tensor, bias: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((queries @ candidates.t()).float() + bias, target)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "ours": lambda *parts: blockwise_cross_entropy(*parts).loss,
    "naive": naive,
}


def inputs(size: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    parts = [torch.randn(size, 256, device=device, dtype=torch.bfloat16) / 4 for _ in range(2)]
    parts = [part.requires_grad_() for part in (*parts, torch.zeros(size, device=device))]
    return parts, torch.arange(size, device=device)


def loss(arguments: argparse.Namespace) -> None:
    device = setup_compute(load_options(None, [f"device={arguments.device}"])).device
    print("\nThe IEM loss, forward and backward, bfloat16, 256 dimensions; memory beyond inputs and gradients")
    for size in SIZES[device.type]:
        parts, target = inputs(size, device)
        names = ("ours", "naive") if size < SIZES[device.type][-1] else ("ours",)
        took: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(arguments.repeats + 1):
            for name in names:
                spent = seconds(partial(gradients_of, name, parts, target))
                took[name] += [spent] if repeat else []
        line = f"  {size:,} x {size:,}:"
        for name in names:
            used = memory("loss", name, size, arguments.device)
            line += f"  {name} {statistics.median(took[name]):.3f} s, {used / 1e6:.0f} MB"
            line += f" = {used / (4 * size * size):.3f} of the matrix"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--words", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=("steps", "loss"), default=["steps", "loss"])
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    if arguments.memory:
        kind, *job = json.loads(arguments.memory)
        jobs: dict[str, Callable[..., int]] = {"steps": memory_of_steps, "loss": memory_of_loss}
        print(jobs[kind](*job))
        return
    with tempfile.TemporaryDirectory() as folder:
        if "loss" in arguments.parts:
            loss(arguments)
        if "steps" in arguments.parts:
            steps(arguments, folder)


if __name__ == "__main__":
    main()
