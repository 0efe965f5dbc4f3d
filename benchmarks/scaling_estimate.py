"""Estimate the cost of a training step on more devices, from a step here, the growth of distinct chunks, and given rates.

    python benchmarks/scaling_estimate.py RUN [key=value …] [--phase pretrain] [--steps 20]
        [--devices 1 4 16 64 256 1024] [--link 25] [--rate 400] [--json]

Each device has the run's batch. Every part that is not in this table costs on each device the same as here:

| part | on n devices, in groups of g that share candidates (`iem.group`) |
|---|---|
| candidates | a constant time more for the distinct chunks of each further device of a group |
| encoder | a device's share of the group's C distinct chunks |
| loss | the scores of a device's own chunks with all C |
| exchange | bytes that a device receives: gradients 8P(n − 1)/n; embeddings 12C(E + 1)(g − 1)/g; |
| | chunks D(K + 9)(g − 1); counts 16C, with several groups; |
| | tables Σ (R + U)(4W + 8)(n − 1)/n, below four devices Σ R(4W + 8)(n − 1), |
| | where R of the encoder's table shrinks as its share does |

P is the number of parameters without tables. D is the number of distinct chunks of a device, with K tokens each. E is
the width of an embedding. A step looks up R rows of width W in a table, U different ones on all devices. All-reduces
and all-gathers run as rings.

The seconds of exchange are bytes divided by the rate of a link, without overlap with computing and without latency. So a
real step lies between this estimate and one that hides all exchange. On an accelerator, the host reads a step's data
while the device computes the one before, and the longer of the two counts. This does not hold where several devices wait
for each other's rows of tables. Candidates are found on the device. This is sorting and hashing, not multiplying: for an
accelerator planned on a CPU it is assumed to take a fiftieth of the time here, by the bandwidths of their memories.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

from experiments.timing import build_phase_trainer
from haed.base import TokenBatch, to_device
from haed.chunk.packing import chunk_keys, find_distinct
from haed.distributed import SUMMED_IN_SHARES, group_size, sum_gradient_rows
from haed.options import SYSTEMS, IEMOptions
from pipeline.arguments import load_run_options
from pipeline.config import PHASES, Options, Phase, training_phases
from pipeline.console import exit_on_error
from pipeline.reporting.rendering import Table
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import as_windows
from pipeline.training.profile import Profile, profile_phase
from pipeline.training.trainer import Trainer

_BATCHES, _DOUBLINGS = 128, 3  # that are read for the growth of chunks; by which it goes on
_BATCHES_OF_ROWS = 8  # that are computed for the growth of the rows of tables
_BLOCK = 2048  # queries scored at a time on a GPU
_PREPARING = 1 / 50  # time to prepare a batch on an accelerator, for that on a core
_HOST = ("data", "batch")
_GOOD = 0.7  # an efficiency that needs no advice
_MENDS = dict.fromkeys(("loss", "candidates", "embeddings", "chunks"), "iem.group makes groups that share candidates")
_MENDS |= {"tables": "no table, or fewer n-grams: model.encoder.rows=0, model.*.grams.rows=0"}


@dataclass
class DistinctGrowth:
    """Number of distinct chunks or rows in a number of batches: counted, then extrapolated by a power law (Heaps' law).

    Attributes:
        counted: distinct ones of 1, 2, 4, … batches.
        exponent: exponent of the power law, from the last counted doublings.
        most: all that there are; None if unknown.
    """

    counted: list[int]
    exponent: float
    most: int | None

    @classmethod
    def from_batches(cls, batches: Iterable[Tensor], most: int | None) -> "DistinctGrowth":
        """Count the distinct integers, 1-d, of some batches."""
        distinct, counted = torch.empty(0, dtype=torch.long), []
        for number, batch in enumerate(batches, 1):
            distinct = torch.cat([distinct, batch.cpu()]).unique()
            if number & (number - 1) == 0:
                counted.append(len(distinct))
        last = counted[-1 - _DOUBLINGS :]
        return cls(counted, math.log2(max(1, last[-1]) / max(1, last[0])) / max(1, len(last) - 1), most)

    def __call__(self, batches: float) -> int:
        """Return the number of distinct ones of this many batches, one or more."""
        place = math.log2(batches)
        below = min(int(place), len(self.counted) - 1)
        slope = self.exponent
        if below + 1 < len(self.counted):
            slope = math.log2(max(1, self.counted[below + 1]) / max(1, self.counted[below]))
        expected = round(self.counted[below] * 2 ** (slope * (place - below)))
        return expected if self.most is None else min(expected, max(self.most, self.counted[-1]))


@dataclass
class TableUse:
    """How a step uses a table.

    Attributes:
        growth: distinct rows that are looked up, by batches.
        width: W.
        rows: number of rows of the table.
        is_encoder: it is the encoder's, of which a device looks up the rows of its share of the chunks.
    """

    growth: DistinctGrowth
    width: int
    rows: int
    is_encoder: bool


@dataclass
class ScalingEstimate:
    """Estimate of a step on several devices.

    Attributes:
        devices: number of devices.
        candidates: distinct chunks that are candidates on a device; 0 without an IEM loss.
        milliseconds: computing time by part, of host and device.
        exchanged: bytes that a device receives, by kind.
        memory: bytes on a device, by kind.
        seconds: time of a step, if no exchange is hidden.
        chunks_per_second: throughput of all devices.
        efficiency: throughput divided by n times that of one device.
    """

    devices: int
    candidates: int
    milliseconds: dict[str, float]
    exchanged: dict[str, float]
    memory: dict[str, float]
    seconds: float
    chunks_per_second: float
    efficiency: float


@dataclass
class MeasuredStep:
    """A measured step on this machine, from which `plan` makes an estimate; see the module.

    Attributes:
        profile: profile of the step.
        speed: factor by which a part on the planned device takes longer than here.
        preparing: factor by which finding candidates takes longer there.
        further: milliseconds of finding candidates among the chunks of one more device.
        ahead: the host reads a step's data while the device computes the one before.
        chunks: chunks of a device.
        tokens: K.
        width: E.
        parameters: P.
        tables: the tables and their use.
        growth: distinct chunks by batches; None without an IEM loss.
        iem: options of the IEM loss.
        average: there is a moving average of the weights.
    """

    profile: Profile
    speed: float
    chunks: int
    tokens: int
    width: int
    parameters: int
    tables: list[TableUse]
    growth: DistinctGrowth | None
    preparing: float = 1.0
    further: float = 0.0
    ahead: bool = False
    iem: IEMOptions = field(default_factory=IEMOptions)
    average: bool = False

    def estimate_step(self, devices: int, link: float) -> ScalingEstimate:
        """Estimate a step on this many devices, each of which receives `link` bytes a second.

        Raises:
            ValueError: the devices do not divide into groups.
        """
        parts, kept = dict(self.profile.milliseconds), dict(self.profile.kept)
        for part in set(parts) - set(_HOST):
            parts[part] *= self.preparing if part == "candidates" else self.speed
        n, g, candidates, share = devices, 1, 0, 1.0
        exchanged = {"gradients": 8 * self.parameters * (n - 1) / n}
        average = 4 * self.average  # bytes of a number's average
        memory = {"weights, gradients and moments": (16.0 + average) * self.parameters}
        if self.growth is not None:
            g, batches = group_size(self.iem.group, devices, "devices"), 1 + self.iem.extra_batches
            candidates, one = self.growth(g * batches), self.growth(batches)
            share = candidates / one / g
            parts["candidates"] += self.preparing * self.further * (g - 1)
            parts["loss"] *= candidates / one
            parts["encoder"] *= share
            kept["encoder"] = round(kept["encoder"] * share)
            exchanged["embeddings"] = 12 * candidates * (self.width + 1) * (g - 1) / g
            exchanged["chunks"] = one * (self.tokens + 9) * (g - 1)
            exchanged["counts"] = 16.0 * candidates * (self.iem.correction == "inclusion" and n > g)
            if self.iem.correction == "inclusion":
                memory["counts of windows"] = 16.0 * self.iem.choose_cells(self.growth.most or 0)
            memory["candidates"] = 12.0 * candidates * (self.width + 1)
            memory["scores"] = 10.0 * candidates * min(self.iem.block or _BLOCK, self.chunks)
        exchanged["tables"] = memory["tables"] = 0.0
        for each in self.tables:
            rows = each.growth(1) * (share if each.is_encoder else 1.0)
            received = (rows + each.growth(n)) / n if n >= SUMMED_IN_SHARES else rows
            exchanged["tables"] += received * (4 * each.width + 8) * (n - 1)
            memory["tables"] += (4.0 * (each.width + 1) + average * each.width) * each.rows
        memory["kept for the backward pass"] = float(sum(kept.values()))
        if self.profile.peak:  # of a GPU: what a backward pass, for example, has for a moment
            rest = max(0.0, self.profile.peak - sum(memory.values()))
            memory["the rest"] = rest if n == 1 else self.estimate_step(1, link).memory["the rest"]
        host = sum(parts.get(part, 0.0) for part in _HOST)
        device = sum(parts.values()) - host
        hidden = self.ahead and (n == 1 or not exchanged["tables"])
        computing = max(host, device) if hidden else host + device
        seconds = computing / 1e3 + sum(exchanged.values()) / link
        alone = seconds if n == 1 else self.estimate_step(1, link).seconds
        return ScalingEstimate(
            n, candidates, parts, exchanged, memory, seconds, n * self.chunks / seconds, alone / seconds
        )


def measure_step(options: Options, phase: Phase, steps: int = 20, rate: float | None = None) -> MeasuredStep:
    """Measure some steps of a run on this machine; nothing is written.

    Args:
        options: options of the run.
        phase: phase that is trained.
        steps: number of measured steps.
        rate: FLOP/s of matrix products on the planned accelerator, which is assumed to reach the same utilisation as
            this device; None if the planned device is like this one.

    Raises:
        ConfigError: this kind of model has no such phase.
        FileNotFoundError: the run's corpus is not there.
    """
    measured, run = profile_phase(options, phase, steps), RunFolder.from_options(options)
    corpus = run.open_corpus()
    trainer = build_phase_trainer(phase, options, corpus, run.phase_folder(phase) / "profile")
    objective = trainer.objective
    chunks, tables = _count_rows(trainer)
    owned = {id(x) for x in trainer.tables}
    parameters = sum(x.numel() for x in objective.parameters() if x.requires_grad and id(x) not in owned)
    growth, width, further = None, 0, 0.0
    if SYSTEMS[options.model.kind].chunks and getattr(options, phase).iem_weight:
        summary = corpus.statistics.get("train")
        read = (as_windows(batch) for batch in itertools.islice(trainer.training_state.loader, _BATCHES))
        keys = (chunk_keys(each.tokens[each.chunk_mask], each.lengths[each.chunk_mask]) for each in read)
        growth = DistinctGrowth.from_batches(keys, summary.distinct_chunks if summary is not None else None)
        width, further = options.model.encoder.width, _further_device_time(trainer, 1 + options.iem.extra_batches)
    speed = measured.device_flops / rate if rate else 1.0
    return MeasuredStep(
        profile=measured,
        speed=speed,
        chunks=chunks,
        tokens=corpus.build_chunker().k,
        width=width,
        parameters=parameters,
        tables=tables,
        growth=growth,
        preparing=_PREPARING if rate is not None and trainer.compute.device.type == "cpu" else 1.0,
        further=further,
        ahead=rate is not None or trainer.compute.device.type == "cuda",
        iem=options.iem,
        average=bool(options.optimizer.ema),
    )


def _count_rows(trainer: Trainer) -> tuple[int, list[TableUse]]:
    """Return the chunks of a trainer's first batch, and the rows of tables that its first batches look up."""
    objective, machine, chunks = trainer.objective, trainer.compute, 0
    rows_by_table: list[list[Tensor]] = [[] for _ in trainer.tables]
    for batch in itertools.islice(trainer.prepare_batches(), _BATCHES_OF_ROWS if trainer.tables else 1):
        with machine.use_precision():
            losses = objective(to_device(batch, machine.device))
        losses.total.backward()
        chunks = chunks or losses.chunks
        for rows, table in zip(rows_by_table, trainer.tables, strict=True):
            rows.append(torch.empty(0, dtype=torch.long) if table.grad is None else sum_gradient_rows(table.grad)[0])
        objective.zero_grad()
    of_encoder = {id(x) for name, x in objective.system.named_parameters() if name.startswith("encoder.")}
    return chunks, [
        TableUse(DistinctGrowth.from_batches(rows, len(table)), table.shape[1], len(table), id(table) in of_encoder)
        for rows, table in zip(rows_by_table, trainer.tables, strict=True)
    ]


def _further_device_time(trainer: Trainer, batches: int, devices: int = 8, times: int = 3) -> float:
    """Return the milliseconds that one more device's distinct chunks add to finding all; the least of several."""
    windows_read = (as_windows(batch) for batch in itertools.islice(trainer.training_state.loader, batches * devices))
    distinct = []
    while read := list(itertools.islice(windows_read, batches)):
        windows = TokenBatch.concatenate_batches(read)
        chunks = find_distinct(windows.tokens[windows.chunk_mask].to(torch.uint8), windows.lengths[windows.chunk_mask])
        distinct.append((chunks.tokens, chunks.lengths))
    spent: dict[int, float] = {}
    for _ in range(times):
        for number in {1, len(distinct)}:
            began = time.perf_counter()
            find_distinct(*(torch.cat(column) for column in zip(*distinct[:number], strict=True)))
            spent[number] = min(spent.get(number, math.inf), 1e3 * (time.perf_counter() - began))
    return max(0.0, spent[len(distinct)] - spent[1]) / max(1, len(distinct) - 1)


def format_estimates(step: MeasuredStep, devices: list[int], link: float) -> str:
    """Format the estimates as a table, followed by the first bottleneck and its remedy."""
    heads = ["devices", "candidates", "ms a step", "host", "device", "exchanging", "efficiency", "chunks/s"]
    heads += ["MB exchanged", "GB held"]
    rows, advice = list[list[str]](), ""
    alone = step.estimate_step(1, link)
    for plan in (step.estimate_step(number, link) for number in sorted(devices)):
        host = sum(plan.milliseconds.get(part, 0.0) for part in _HOST)
        device, exchanging = sum(plan.milliseconds.values()) - host, 1e3 * sum(plan.exchanged.values()) / link
        figures = [plan.devices, plan.candidates, 1e3 * plan.seconds, host, device, exchanging]
        figures += [100 * plan.efficiency, plan.chunks_per_second, sum(plan.exchanged.values()) / 1e6]
        texts = [f"{x:,.0f}" if x >= 100 or isinstance(x, int) else f"{x:,.1f}" for x in figures]
        rows.append([*texts[:6], texts[6] + " %", *texts[7:], f"{sum(plan.memory.values()) / 1e9:,.2f}"])
        if plan.efficiency < _GOOD and not advice:
            hidden = _HOST if host < device and step.ahead else ()
            added = {
                part: ms - alone.milliseconds[part] for part, ms in plan.milliseconds.items() if part not in hidden
            }
            added |= {name: 1e3 * size / link for name, size in plan.exchanged.items()}
            worst = max(added, key=added.__getitem__)
            advice = (
                f"first below {_GOOD:.0%}: {plan.devices:,} devices, where {worst} takes {added[worst]:,.1f} of "
                f"{1e3 * plan.seconds:,.1f} ms more than on one; {_MENDS.get(worst, 'more work a step: batch.sequences')}"
            )
    table = Table(heads, rows, [True] * len(heads)).to_text()
    return f"{table}\n{advice}" if advice else table


def _parse_amount(word: str) -> float:
    amount = float(word)
    if not 1e-6 <= amount <= 1e9:
        raise argparse.ArgumentTypeError(f"{word}: must be a number from 1e-06 to 1e+09")
    return amount


def _parse_count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 10**9:
        raise argparse.ArgumentTypeError(f"{word}: must be a whole number from 1 to 1,000,000,000")
    return int(word)


def main(argv: list[str] | None = None) -> None:
    """Print the estimates for a run, which must have been begun here or elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="name under runs/, or folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options to change")
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--steps", type=_parse_count, default=20, help="steps to measure")
    parser.add_argument("--devices", type=_parse_count, nargs="+", default=[4**i for i in range(6)])
    parser.add_argument("--link", type=_parse_amount, default=25.0, metavar="GB/S", help="of a device")
    parser.add_argument("--rate", type=_parse_amount, metavar="TFLOP/S", help="of a device (default: as measured here)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_intermixed_args(argv)
    options = load_run_options(arguments.run, arguments.words, "profile")
    phase = arguments.phase or training_phases(options.model.kind)[0]
    if options.iem.group is not None and getattr(options, phase).iem_weight:
        for number in arguments.devices:  # fail before the measurement
            group_size(options.iem.group, number, "devices")
    step = measure_step(options, phase, arguments.steps, arguments.rate and arguments.rate * 1e12)
    link = arguments.link * 1e9
    if arguments.json:
        print(json.dumps([asdict(step.estimate_step(number, link)) for number in arguments.devices]))
    else:
        print(format_estimates(step, arguments.devices, link))


if __name__ == "__main__":
    with exit_on_error():
        main()
