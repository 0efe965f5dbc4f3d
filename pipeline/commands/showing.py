"""The commands that show runs: compare, profile, report."""

import argparse
import re
from dataclasses import asdict
from pathlib import Path

from pipeline.arguments import (
    Command,
    Result,
    run_options,
    run_settings,
)
from pipeline.config import ConfigError, load
from pipeline.kinds import phases
from pipeline.verbatim import is_option, write_override

DEVICES, LINK = [4**i for i in range(6)], 25.0
_LEAST, _MOST = 1e-6, 1e9  # bounds of the numbers that a plan uses


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names under runs_dir, or folders")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for by name; runs_dir= is the same")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the page (default: RUNS_DIR/comparison)")


def _compare(arguments: argparse.Namespace) -> Result:
    from pipeline.show.compare import compare, table

    runs = [word for word in arguments.runs if not is_option(word)]
    words = [word for word in arguments.runs if is_option(word)]
    for word in words:
        if not word.startswith("runs_dir="):
            raise ConfigError(f"{word}: runs are compared as they are; runs_dir= says where they are looked for")
    if not runs:
        raise ConfigError("compare needs the names or folders of runs")
    runs_dir = load(None, words or [write_override("runs_dir", arguments.runs_dir)]).runs_dir
    found = compare(runs, runs_dir, arguments.output or Path(runs_dir) / "comparison")
    return Result(f"{table(found)}\n{found.page}", asdict(found))


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
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


def _devices(word: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", word):
        raise ConfigError(f"--devices {word}: expected whole numbers from 1 on, and below {_MOST:g}")
    return int(word)


def _profile(arguments: argparse.Namespace) -> Result:
    others = [word for word in arguments.devices or () if "=" in word]  # options may stand anywhere
    options = run_options(arguments.run, [*arguments.words, *others], "profile")
    if not 1 <= arguments.steps <= _MOST:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {_MOST:g}")
    for name in ("link", "rate", "devices"):
        if (value := getattr(arguments, name)) is not None and not arguments.plan:
            raise ConfigError(f"--{name} is of a plan: give --plan as well")
        if isinstance(value, float) and not _LEAST <= value <= _MOST:
            raise ConfigError(f"--{name} {value}: must be a number from {_LEAST:g} to {_MOST:g}")
    devices = [_devices(word) for word in arguments.devices or () if word not in others] or DEVICES
    phase = arguments.phase or phases(options.model.kind)[0]
    if arguments.plan:
        from haed.ranks import group_size
        from pipeline.train import plan

        rate, link = arguments.rate and arguments.rate * 1e12, (arguments.link or LINK) * 1e9
        if options.iem.group is not None and getattr(options, phase).iem_weight:
            for number in devices:  # fail before the measurement
                group_size(options.iem.group, number, "devices")
        step = plan.measure(options, phase, arguments.steps, rate)
        plans = [asdict(step.plan(number, link)) for number in devices]
        return Result(plan.table(step, devices, link), plans)
    from pipeline.train.profile import profile, table

    found = profile(options, phase, arguments.steps)
    return Result(table(found), asdict(found))


def _report(arguments: argparse.Namespace) -> Result:
    from pipeline.show.report import report

    path = report(run_options(arguments.run, arguments.words, "report"))
    return Result(str(path), {"report": str(path)})


COMMANDS = (
    Command("compare", "table and curves of several runs", _compare_arguments, _compare),
    Command("profile", "where the time of a training step goes", _profile_arguments, _profile),
    Command("report", "write report.html and report.md of a run", run_settings, _report),
)
