"""The commands that show runs: compare, profile, report."""

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from pipeline.arguments import (
    Command,
    CommandResult,
    add_run_arguments,
    load_run_options,
)
from pipeline.config import ConfigError, load_options
from pipeline.kinds import training_phases
from pipeline.verbatim import is_option, write_override

DEVICES, LINK = [4**i for i in range(6)], 25.0
_LEAST, _MOST = 1e-6, 1e9  # bounds of the numbers that a plan uses


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names under runs_dir, or folders")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for by name; runs_dir= is the same")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the page (default: RUNS_DIR/comparison)")


def _run_compare(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.show.compare import compare_runs, format_comparison

    runs = [word for word in arguments.runs if not is_option(word)]
    words = [word for word in arguments.runs if is_option(word)]
    for word in words:
        if not word.startswith("runs_dir="):
            raise ConfigError(f"{word}: runs are compared as they are; runs_dir= says where they are looked for")
    if not runs:
        raise ConfigError("compare needs the names or folders of runs")
    runs_dir = load_options(None, words or [write_override("runs_dir", arguments.runs_dir)]).runs_dir
    found = compare_runs(runs, runs_dir, arguments.output or Path(runs_dir) / "comparison")
    return CommandResult(f"{format_comparison(found)}\n{found.page}", asdict(found))


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--phase", choices=("pretrain", "finetune", "train"), help="default: pretrain, or train of a model of tokens"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to measure")
    parser.add_argument(
        "--plan", action="store_true", help="what a step would cost on more devices, worked out from that"
    )
    parser.add_argument("--devices", nargs="+", help="--plan: how many (default: 1 … 1024)")
    parser.add_argument("--link", type=float, metavar="GB/S", help="--plan: of a device (default: 25)")
    parser.add_argument("--rate", type=float, metavar="TFLOP/S", help="--plan: of a device (default: as measured here)")


def _parse_device_count(word: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", word):
        raise ConfigError(f"--devices {word}: expected whole numbers from 1 on, and below {_MOST:g}")
    return int(word)


def _run_profile(arguments: argparse.Namespace) -> CommandResult:
    others = [word for word in arguments.devices or () if "=" in word]  # options may stand anywhere
    options = load_run_options(arguments.run, [*arguments.words, *others], "profile")
    if not 1 <= arguments.steps <= _MOST:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {_MOST:g}")
    for name in ("link", "rate", "devices"):
        if (value := getattr(arguments, name)) is not None and not arguments.plan:
            raise ConfigError(f"--{name} is of a plan: give --plan as well")
        if isinstance(value, float) and not _LEAST <= value <= _MOST:
            raise ConfigError(f"--{name} {value}: must be a number from {_LEAST:g} to {_MOST:g}")
    devices = [_parse_device_count(word) for word in arguments.devices or () if word not in others] or DEVICES
    phase = arguments.phase or training_phases(options.model.kind)[0]
    if arguments.plan:
        from haed.distributed import group_size
        from pipeline.train import scaling_estimate

        rate, link = arguments.rate and arguments.rate * 1e12, (arguments.link or LINK) * 1e9
        if options.iem.group is not None and getattr(options, phase).iem_weight:
            for number in devices:  # fail before the measurement
                group_size(options.iem.group, number, "devices")
        step = scaling_estimate.measure_step(options, phase, arguments.steps, rate)
        plans = [asdict(step.estimate_step(number, link)) for number in devices]
        return CommandResult(scaling_estimate.format_estimates(step, devices, link), plans)
    from pipeline.train.profile import format_profile, profile_phase

    found = profile_phase(options, phase, arguments.steps)
    return CommandResult(format_profile(found), asdict(found))


def _run_report(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.show.report import write_report

    path = write_report(load_run_options(arguments.run, arguments.words, "report"))
    return CommandResult(str(path), {"report": str(path)})


COMMANDS = (
    Command("compare", "table and curves of several runs", _compare_arguments, _run_compare),
    Command("profile", "where the time of a training step goes", _profile_arguments, _run_profile),
    Command("report", "write report.html and report.md of a run", add_run_arguments, _run_report),
)
