"""The seconds of a step, by which limits in seconds become limits in steps.

On a shared machine seconds are not the same for all, and on another machine they are others. So the arms of a comparison take
some steps in turns first, on a machine that does nothing else, and a run's clock is its steps times what they took. From then
on steps alone decide what is learned: the machine may be shared, several runs may go side by side, and a comparison that was
stopped may go on another day or on another machine. A second is one of wall time, for any number of threads; who asks for
`process` has seconds that a core worked instead: what else the machine does meanwhile does not count.
"""

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

from data.corpus import Corpus
from pipeline.options import Options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import compute
from pipeline.train.stages import build_trainer


def unlimited(*phases: str) -> list[str]:
    """Options without which steps are not the only limit."""
    return [f"{phase}.{limit}=null" for phase in phases for limit in ("seconds", "epochs")]


def training(phase: str, options: Options, corpus: Corpus, folder: Path) -> Iterator[None]:
    """A phase of a run of ours, one step at a time, data and optimizer included."""
    machine = compute(options)
    place = Checkpoints(folder / phase)
    trainer = build_trainer(getattr(options, phase), options, corpus, place, machine, lambda: False)
    yield from trainer.endless(ahead=True)


def seconds_of_a_step(
    arms: dict[str, Iterator[None]],
    rounds: int = 4,
    steps: int = 12,
    before: int = 4,
    clock: Literal["wall", "process"] = "wall",
) -> dict[str, float]:
    """Median over rounds in which each arm takes some steps, in another order each time.

    A first round is not counted, nor are the first steps of a turn, which find caches and memory as another arm left them.

    Raises:
        ValueError: the clock is of the process, and a GPU computes.
    """
    if clock == "process" and torch.cuda.is_available():
        raise ValueError("--clock process counts what the CPU works, not the GPU of this machine: leave it out")
    now = time.process_time if clock == "process" else time.perf_counter
    took: dict[str, list[float]] = {name: [] for name in arms}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None  # a step itself does not
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(arms), len(arms)):
            for step in range(before + steps):
                if step == before:
                    wait()
                    began = now()
                next(arms[name])
            wait()
            took[name] += [(now() - began) / steps] if turn else []
    return {name: statistics.median(each) for name, each in took.items()}
