"""Seconds per training step, which convert limits in seconds into limits in steps.

Seconds are not comparable on a shared machine, or between machines. So the variants of a comparison first take some
steps in turns, on an idle machine. From then on a run's time is its number of steps times the seconds of a step, and
steps alone are the limit. So the machine may be shared, runs may go side by side, and a stopped comparison may be
resumed later or elsewhere. Seconds are wall time, for any number of threads. With the clock `process` they are CPU time
of this process, without that of other processes.
"""

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from data.corpus import Corpus
from pipeline.config import Options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import setup_compute
from pipeline.training.stages import build_trainer
from pipeline.training.trainer import Trainer


def lift_other_limits(*phases: str) -> list[str]:
    """Return the overrides that remove all limits but steps."""
    return [f"{phase}.{limit}=null" for phase in phases for limit in ("seconds", "epochs")]


def build_phase_trainer(phase: str, options: Options, corpus: Corpus, folder: Path) -> Trainer:
    """Return a trainer of a phase, to be measured: nothing stops it, and what it saves is in `folder`."""
    place, machine = Checkpoints(folder / phase), setup_compute(options)
    return build_trainer(getattr(options, phase), options, corpus, place, machine, lambda: False)


def measure_step_seconds(
    trainings: dict[str, Iterator[None]],
    rounds: int = 4,
    steps: int = 12,
    before: int = 4,
    clock: Literal["wall", "process"] = "wall",
) -> dict[str, float]:
    """Return the median seconds of a step of each training, over rounds in which they take turns in random order.

    The first round is not counted, nor the first steps of a turn, which find caches and memory as another training
    left them.

    Raises:
        ValueError: the clock is `process`, and a GPU computes.
    """
    if clock == "process" and torch.cuda.is_available():
        raise ValueError("--clock process counts CPU time, but this machine computes on a GPU. Leave it out")
    now = time.process_time if clock == "process" else time.perf_counter
    took: dict[str, list[float]] = {name: [] for name in trainings}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None  # a step itself does not
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(trainings), len(trainings)):
            for step in range(before + steps):
                if step == before:
                    wait()
                    began = now()
                next(trainings[name])
            wait()
            took[name] += [(now() - began) / steps] if turn else []
    return {name: statistics.median(each) for name, each in took.items()}
