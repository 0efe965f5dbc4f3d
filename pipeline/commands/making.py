"""The commands that make and evaluate runs, and `config` and `cat`.

They are shard, pretrain, finetune, train, evaluate and experiment.
"""

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline.arguments import (
    GOES_ON,
    Command,
    CommandResult,
    add_config_arguments,
    add_run_arguments,
    describe_runs,
    load_options_and_log,
    load_run_options,
    options_from_arguments,
)
from pipeline.config import ConfigError, check_output_folder, dump_options
from pipeline.options import Phase
from pipeline.signals import postponed_signals
from pipeline.verbatim import is_option


def _run_shard(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.run.shards import shard_source, split_sizes

    began = time.perf_counter()
    corpus = shard_source(options_from_arguments(arguments))
    seconds = time.perf_counter() - began
    splits = split_sizes(corpus)
    lines = [f"{corpus.location}"] + [
        f"  {split:<6} {size.documents:>9,} documents {size.chunks:>13,} chunks {size.tokens:>15,} tokens"
        + _format_distinct(size.distinct_chunks, size.distinct_chunks_exact)
        for split, size in splits.items()
    ]
    lines.append(f"  {sum(size.source_bytes for size in splits.values()) / 1e6:,.1f} MB in {seconds:.1f} s")
    shown = {split: asdict(size) for split, size in splits.items()}
    value = {"folder": corpus.location, "digest": corpus.digest, "splits": shown, "seconds": seconds}
    return CommandResult("\n".join(lines), value)


def _format_distinct(count: int | None, exact: bool | None) -> str:
    return "" if count is None else f"{'' if exact else 'about '}{count:,} distinct chunks".rjust(34)


def _names_run(word: str) -> bool:
    """Return whether a word names a run."""
    return word.startswith("name=") or not is_option(word)


def _make_phase_runner(phase: Phase) -> Callable[[argparse.Namespace], CommandResult]:
    def execute(arguments: argparse.Namespace) -> CommandResult:
        if phase == "finetune" and not arguments.config and not any(_names_run(word) for word in arguments.words):
            raise ConfigError(f"finetune goes on from a phase one, which haed finetune RUN names; {describe_runs()}")
        options = options_from_arguments(arguments)
        from pipeline.train import stages

        with postponed_signals() as stop:
            trained = stages.run_phase(phase, options, stop)
        return CommandResult(stages.format_outcome(trained), asdict(trained))

    return execute


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    from pipeline.experiments.experiment import BUDGETS

    parser.add_argument(
        "words", nargs="*", metavar="[NAME] key=value", help="nothing: lists them; options are for all of its runs"
    )
    about = "; ".join(f"{name}: {budget.about}" for name, budget in BUDGETS.items())
    parser.add_argument("--budget", choices=tuple(BUDGETS), default="minutes", help=f"{about} (default: minutes)")
    parser.add_argument("--plan", action="store_true", help="tell what the paper's sizes would cost, and train nothing")
    most = ", ".join(f"{budget.seconds:,} of {name}" for name, budget in BUDGETS.items() if budget.seconds)
    parser.add_argument(
        "--seconds", type=float, help=f"of training in all (default: {most}, or what their limits leave)"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="a second of training is one of wall time, or one that a core works, for a machine that is shared "
        "(process, with threads=1; default: wall)",
    )
    parser.add_argument("--seeds", type=int, help="of each run (default: 1, of an hour 3)")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side, which share the cores (default: 1)")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="folder with wikitext-2, imagenette32"
    )
    parser.add_argument("--output", type=Path, default=Path("experiments"), help="where results and runs go")


def _run_experiment(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.experiments import catalogue

    named = [word for word in arguments.words if "=" not in word]
    if not named:
        return CommandResult(catalogue.listed(arguments.output), catalogue.states(arguments.output))
    for name in ("seconds", "seeds", "parallel"):
        if (value := getattr(arguments, name)) is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value}: must be a number above 0")
    check_output_folder(arguments.output, "--output")
    overrides = tuple(word for word in arguments.words if "=" in word)
    budget = "paper" if arguments.plan else arguments.budget
    own = {name: getattr(arguments, name) for name in ("seconds", "seeds", "parallel", "clock")}
    experiment, plan = catalogue.planned(" ".join(named), budget, arguments.output, arguments.data, overrides, **own)
    if arguments.plan:
        from pipeline.experiments import cost
        from pipeline.experiments.arms import ours, ready

        arms, notes = ready(experiment, plan)
        costs = cost.costs(ours(arms))
        told = "\n".join([cost.table(costs), *(f"- {note}" for note in notes)])
        return CommandResult(told, {"name": experiment.name, "notes": notes, "rows": [asdict(each) for each in costs]})
    from pipeline.experiments.page import table
    from pipeline.experiments.stage import run

    with postponed_signals() as stop:
        found = run(experiment, plan, stop)
    rows = [asdict(row) for row in found.rows]
    return CommandResult(table(found), {"name": found.name, "folder": found.folder, "rows": rows})


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="score this file instead of a split; a pipe, or - for standard input"
    )


def _run_evaluate(arguments: argparse.Namespace) -> CommandResult:
    options, text = load_run_options(arguments.run, arguments.words, "evaluate"), arguments.text
    if text is not None and str(text) != "-" and (text.is_dir() or not text.exists()):
        raise FileNotFoundError(f"--text {text}: {'a folder, not a file' if text.is_dir() else 'no such file'}")
    from pipeline.score.evaluate import evaluate_run, format_evaluation

    result = evaluate_run(options, text)
    return CommandResult(format_evaluation(result), asdict(result))


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="PRESET_OR_FILE", help="the same as the preset or file alone")
    parser.add_argument("words", nargs="*", metavar="[PRESET_OR_FILE] key=value", help="nothing: the defaults")


def _run_config(arguments: argparse.Namespace) -> CommandResult:
    named = [word for word in arguments.words if "=" not in word][: 0 if arguments.config else 1]
    options = load_options_and_log(
        arguments.config or (named or [None])[0], [w for w in arguments.words if w not in named]
    )
    return CommandResult(dump_options(options, scheduler=True).rstrip(), asdict(options))


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="a sharded corpus: folder or URL")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="train")


def _run_cat(arguments: argparse.Namespace) -> CommandResult:
    from data.corpus import Corpus

    if arguments.json:
        raise ConfigError("--json: cat writes the bytes of a corpus, and no line beside them; leave it out")
    return CommandResult("", None, Corpus.open(arguments.shards).iterate_original_blocks(arguments.split))


COMMANDS = (
    Command("shard", "cut a source into WebDataset shards with a manifest", add_config_arguments, _run_shard, GOES_ON),
    Command(
        "pretrain",
        "phase one: learn in the space of chunk embeddings",
        add_config_arguments,
        _make_phase_runner("pretrain"),
        GOES_ON,
    ),
    Command(
        "finetune",
        "phase two: train for exact likelihood, from a phase one",
        add_config_arguments,
        _make_phase_runner("finetune"),
        GOES_ON,
    ),
    Command(
        "train", "train end to end, without a phase one", add_config_arguments, _make_phase_runner("train"), GOES_ON
    ),
    Command("evaluate", "exact bits on a split or a file, beside yardsticks", _evaluate_arguments, _run_evaluate),
    Command("experiment", "a table or figure of a paper", _experiment_arguments, _run_experiment, GOES_ON),
    Command("config", "print a resolved configuration", _config_arguments, _run_config),
    Command("cat", "write the original bytes of a split to standard output", _cat_arguments, _run_cat),
)
