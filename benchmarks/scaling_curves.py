"""Compare HAED with a flat transformer with n-grams by width and by training compute.

    python benchmarks/scaling_curves.py FOLDER OUTPUT [--system haed|flat] [--widths 128 192] [--budgets 1 2 4 8 16 32] [--rate 1]

FOLDER has train.txt, valid.txt and test.txt. Every width is trained anew for every budget, since each phase has its own
schedule. Budgets are in model TFLOPs of all phases. Two thirds of HAED's budget are phase one, as in the preset. Runs and
shards are kept in OUTPUT, so a second call continues.

Without --system it prints a table of both: the least bits per character of the valid split over the widths, HAED's lead at
each budget, and two fits of the lead. --rate multiplies the preset's learning rates of all dense weights. Runs of each
factor have a table of their own.
"""

import argparse
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np

from pipeline.config import Options, Phase, load_options, training_phases
from pipeline.console import exit_on_error
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.reporting.rendering import Table
from pipeline.run.files import Evaluation, read_as
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training import stages

SYSTEMS = {"haed": "wikitext2", "flat": "flat"}
SHARES = {"pretrain": 2 / 3, "finetune": 1 / 3, "train": 1.0}


def load_system(system: str, width: int, name: str, args: argparse.Namespace, *more: str) -> Options:
    """Return the options of a system with some width of its residual stream; widths of other parts grow in proportion."""
    words = [f"name={name}", f"runs_dir={args.output}/runs", f"shards_dir={args.output}/shards", "evaluate.split=valid"]
    words += ["source.kind=wikitext", f"source.path={args.folder}", "evaluate.baselines=false"]
    words += ["threads=1", "seed=0", "validation.times=0"]
    if system == "flat":
        words += [f"model.token.width={width}", f"model.token.ffn={4 * width}", f"model.token.heads={width // 64}"]
        words += ["model.token.grams.rows=32768"]
    else:
        words += [f"model.main.width={width}", f"model.main.ffn={4 * width}", f"model.main.heads={width // 64}"]
        words += ["model.main.head_width=64", f"model.encoder.width={width}", f"model.encoder.hidden={2 * width}"]
        words += [f"model.decoder.width={2 * width}", "evaluate.memory=0"]
    words += [f"{phase}.seconds=null" for phase in list_phases(system)]
    rates = load_options(SYSTEMS[system]).optimizer
    dense = ["learning_rate"] if system == "flat" else ["learning_rate", "main_learning_rate"]
    words += [f"optimizer.{name}={args.rate * getattr(rates, name)}" for name in dense]
    return load_options(SYSTEMS[system], [*words, *more])


def name_run(system: str, width: int, budget: str, args: argparse.Namespace) -> str:
    """Return the name of a run, `budget` in TFLOPs or a word."""
    return f"{system}-{width}-{budget}" + (f"-rate{args.rate:g}" if args.rate != 1 else "")


def list_phases(system: str) -> tuple[Phase, ...]:
    """Return the phases that a system is trained in."""
    return training_phases(load_options(SYSTEMS[system]).model.kind)


def train_run(system: str, width: int, budget: float, args: argparse.Namespace) -> None:
    """Train a system of some width for a budget of TFLOPs, and evaluate it."""
    phases = list_phases(system)
    few = [f"{phase}.steps=8" for phase in phases]
    probe = load_system(system, width, name_run(system, width, "probe", args), args, *few)
    shard_source(probe)
    for phase in phases:
        stages.run_phase(phase, probe)
    limits = []
    for phase in phases:
        flops = read_metrics(RunFolder.from_options(probe).path / phase / "metrics.jsonl")[-1]["flops"] / 8  # of a step
        limits.append(f"{phase}.steps={max(1, round(SHARES[phase] * budget * 1e12 / flops))}")
    options = load_system(system, width, name_run(system, width, f"{budget:g}", args), args, *limits)
    if not (RunFolder.from_options(options).path / "evaluation.json").exists():
        for phase in phases:
            stages.run_phase(phase, options)
        evaluate_run(options)


def read_bits(system: str, width: int, budget: float, args: argparse.Namespace) -> float:
    """Return the bits per character of a run by the model alone; NaN: it was not run."""
    path = args.output / "runs" / name_run(system, width, f"{budget:g}", args) / "evaluation.json"
    return read_as(Evaluation, path).alone.value if path.exists() else np.nan


def print_curves(args: argparse.Namespace) -> None:
    """Print the bits of all runs, HAED's lead, and a straight line and a decay that fit it."""
    best = {}
    for system in SYSTEMS:
        bits = np.array([[read_bits(system, w, b, args) for b in args.budgets] for w in args.widths])
        heads = [f"{system}, width", *(f"{b:g} TFLOP" for b in args.budgets)]
        cells = [[str(w), *(f"{x:.3f}" for x in row)] for w, row in zip(args.widths, bits, strict=True)]
        print(Table(heads, cells, [True] * len(heads)).to_text(), end="\n\n")
        best[system] = np.nanmin(bits, axis=0)
    lead = best["flat"] - best["haed"]
    if np.isnan(lead).any():
        sys.exit(
            f"error: {args.output} lacks runs of a system and budget. Train them first, with --system haed and flat"
        )
    print("lead of haed, at the best widths:", ", ".join(f"{value:.3f}" for value in lead))
    doublings = np.log2(args.budgets)
    slope, start = np.polyfit(doublings, lead, 1)
    line = lead - (start + slope * doublings)
    print(
        f"straight line: {slope:+.3f} a doubling, {2 ** (-start / slope):.3g} TFLOP to no lead, misses {np.std(line):.4f}"
    )
    rate, rest, misses = fit_decay(doublings, lead)
    print(f"decay by {1 - rate:.0%} a doubling towards a lead of {rest:.3f}, misses {misses:.4f}")


def fit_decay(doublings: np.ndarray, lead: np.ndarray) -> tuple[float, float, float]:
    """Return the rate and the limit of `limit + height * rate**doublings` that fits best, and its root mean square error."""

    def fit_rate(rate: float) -> tuple[float, float, float]:
        terms = np.stack([np.ones_like(lead), rate**doublings], axis=1)
        (rest, height), *_ = np.linalg.lstsq(terms, lead, rcond=None)
        return rate, float(rest), float(np.std(lead - terms @ (rest, height)))

    return min((fit_rate(rate) for rate in np.linspace(0.05, 0.99, 189)), key=lambda fit: fit[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--system", choices=list(SYSTEMS))
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 192], help="multiples of 64")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rate", type=float, default=1.0)
    args = parser.parse_args()
    if wrong := [width for width in args.widths if width < 64 or width % 64]:
        parser.error(f"--widths {wrong[0]}: expected multiples of 64, the width of a head")
    if args.system is None and len(args.budgets) < 3:
        parser.error("--budgets: the fits of the lead need at least three")
    if args.system is None:
        print_curves(args)
    else:
        for width in args.widths:
            for budget in args.budgets:
                train_run(args.system, width, budget, args)


if __name__ == "__main__":
    with exit_on_error():
        main()
