"""The commands that show runs: compare, profile, report."""

import argparse
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

_MOST_STEPS = 1e9


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


def _run_profile(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "profile")
    if not 1 <= arguments.steps <= _MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {_MOST_STEPS:g}")
    phase = arguments.phase or training_phases(options.model.kind)[0]
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
