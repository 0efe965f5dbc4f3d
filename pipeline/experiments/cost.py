"""Cost estimates of an experiment at the paper's sizes, computed without training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from data.corpus import Corpus
from data.loader import Loader
from haed.base import TokenBatch
from haed.registry import make_objective
from pipeline.config import Phase
from pipeline.experiments.arms import Ours
from pipeline.experiments.running import shard_all
from pipeline.run.device import setup_compute
from pipeline.run.memory import build_system
from pipeline.run.windows import as_windows
from pipeline.show.page import text_table
from pipeline.train.profile import product_rate

_DAY = 86_400


@dataclass
class Cost:
    """The cost of one phase of a run.

    Attributes:
        arm: name of the arm.
        phase: the phase that is trained.
        parameters: of the model.
        steps: by the preset's limits; epochs are converted with the corpus at hand.
        flops: model FLOPs of a step.
        days: days of one device at the rate of its matrix products, a lower bound.
    """

    arm: str
    phase: str
    parameters: int
    steps: int
    flops: float
    days: float


def costs(arms: Sequence[Ours]) -> list[Cost]:
    """Return the cost of every phase of every arm. Models lie on the meta device, so any size is possible."""
    rate = product_rate(setup_compute(arms[0].options))
    corpora = shard_all(arms)
    return [_cost(each, phase, rate, corpora[each.data]) for each in arms for phase in each.arm.phases]


def _cost(ready: Ours, phase: Phase, rate: float, corpus: Corpus) -> Cost:
    options, limits = ready.options, getattr(ready.options, phase)
    batch = options.batch
    loader = Loader(
        corpus,
        "train",
        context=batch.context,
        sequences=batch.sequences,
        seed=options.seed,
        part=(limits.part_from, limits.part_to),
    )
    with torch.device("meta"):
        system = build_system(options, corpus.build_chunker())
    objective = make_objective(
        system, options.iem, iem_weight=limits.iem_weight, decode_fraction=limits.decode_fraction, pieces=batch.pieces
    )
    further = options.iem.extra_batches if limits.iem_weight else 0
    windows, *negatives = (as_windows(each) for each in islice(loader, 1 + further))
    prepared = objective.prepare_batch(
        windows, TokenBatch.concatenate_batches(negatives) if negatives else None, torch.Generator()
    )
    flops = objective.estimate_flops(prepared)
    steps = limits.steps or math.ceil((limits.epochs or 1) * loader.windows_per_epoch / batch.sequences)
    parameters = sum(each.numel() for each in system.parameters())
    return Cost(ready.arm.name, phase, parameters, steps, flops, steps * flops / rate / _DAY)


def table(found: Sequence[Cost]) -> str:
    """Format costs as a table with a total."""
    rows = [
        [
            each.arm,
            each.phase,
            f"{each.parameters:,}",
            f"{each.steps:,}",
            f"{each.flops / 1e12:,.3f}",
            f"{each.days:,.2f}",
        ]
        for each in found
    ]
    shown = text_table(["", "phase", "parameters", "steps", "TFLOP a step", "days, at least"], rows, 2)
    total = sum(each.days for each in found)
    return (
        f"{shown}\n\n{total:,.1f} days of a device like this one at the rate of its matrix products, which no step reaches; "
        "`benchmarks/scaling_estimate.py RUN` tells what more devices would do"
    )
