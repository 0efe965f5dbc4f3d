"""The commands that need no Prefect, with their arguments and functions.

Each function imports the heavy packages that it needs.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline import ROOT
from pipeline.arguments import (
    GOES_ON,
    Command,
    CommandResult,
    add_config_arguments,
    add_run_arguments,
    describe_runs,
    load_run_options,
    options_from_arguments,
    parse_port,
)
from pipeline.config import (
    PHASES,
    ConfigError,
    Phase,
    is_option,
    load_options,
    training_phases,
    write_override,
)
from pipeline.config.reference import comment_options, format_options, search_options
from pipeline.run.files import describe_speed, write_or_log
from pipeline.run.run_directory import RunFolder
from pipeline.signals import postponed_signals


def _run_shard(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.run.sharding import shard_source, split_sizes

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
        from pipeline.training import stages

        with postponed_signals() as stop:
            trained = stages.run_phase(phase, options, stop)
        return CommandResult(stages.format_outcome(trained), asdict(trained))

    return execute


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="[NAME] key=value", help="nothing: lists them; options are for all of its runs"
    )
    parser.add_argument(
        "--budget",
        choices=("minutes", "hour", "paper"),
        default="minutes",
        help="minutes: 20 minutes of two cores in all; hour: an hour of training, three seeds, at most three hours in "
        "all; paper: the paper's sizes and limits, see --plan first (default: minutes)",
    )
    parser.add_argument("--plan", action="store_true", help="tell what the paper's sizes would cost, and train nothing")
    parser.add_argument(
        "--seconds", type=float, help="of training in all (default: 840 of minutes, 3,600 of hour, or what they leave)"
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
    parser.add_argument("--output", type=Path, default=Path("experiments/results"), help="where results and runs go")


def _run_experiment(arguments: argparse.Namespace) -> CommandResult:
    if not Path(ROOT, "experiments", "catalogue.py").is_file():
        raise ConfigError(
            "experiments are part of a checkout, not of the installed package: clone the repository, run `make setup` "
            "there, and then .venv/bin/haed experiment"
        )
    from experiments.catalogue import execute_command

    return execute_command(arguments)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="score this file instead of a split; a pipe, or - for standard input"
    )


def _run_evaluate(arguments: argparse.Namespace) -> CommandResult:
    options, text = load_run_options(arguments.run, arguments.words, "evaluate"), arguments.text
    if text is not None and str(text) != "-" and (text.is_dir() or not text.exists()):
        raise FileNotFoundError(f"--text {text}: {'a folder, not a file' if text.is_dir() else 'no such file'}")
    from pipeline.evaluation.evaluate import evaluate_run, format_evaluation

    result = evaluate_run(options, text)
    return CommandResult(format_evaluation(result), asdict(result))


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="PRESET_OR_FILE", help="the same as the preset or file alone")
    parser.add_argument("words", nargs="*", metavar="[PRESET_OR_FILE] key=value", help="nothing: the defaults")
    parser.add_argument("--search", metavar="WORDS", help="print only options with these words in name or meaning")


def _run_config(arguments: argparse.Namespace) -> CommandResult:
    named = [word for word in arguments.words if "=" not in word][: 0 if arguments.config else 1]
    overrides = [word for word in arguments.words if word not in named]
    options = load_options(arguments.config or (named or [None])[0], overrides, log_changes=True)
    if arguments.search:
        found = search_options(options, arguments.search)
        return CommandResult(format_options(found), [asdict(each) for each in found])
    return CommandResult(comment_options(options), asdict(options))


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="a sharded corpus: folder or URL")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="train")


def _run_cat(arguments: argparse.Namespace) -> CommandResult:
    from data.corpus import Corpus

    if arguments.json:
        raise ConfigError("--json: cat writes the bytes of a corpus, and no line beside them; leave it out")
    return CommandResult("", None, Corpus.open(arguments.shards).iterate_original_blocks(arguments.split))


_MAKING = (
    Command("shard", "Cut a source into WebDataset shards.", add_config_arguments, _run_shard, GOES_ON),
    Command(
        "pretrain",
        "Train phase one: predict chunk embeddings, without a decoder.",
        add_config_arguments,
        _make_phase_runner("pretrain"),
        GOES_ON,
    ),
    Command(
        "finetune",
        "Train phase two: the decoder, for exact likelihood.",
        add_config_arguments,
        _make_phase_runner("finetune"),
        GOES_ON,
    ),
    Command(
        "train", "Train end to end, without a phase one.", add_config_arguments, _make_phase_runner("train"), GOES_ON
    ),
    Command(
        "evaluate", "Compute bits per character of a split or file, with baselines.", _evaluate_arguments, _run_evaluate
    ),
    Command("experiment", "Reproduce a table or figure of a paper.", _experiment_arguments, _run_experiment, GOES_ON),
    Command("config", "Print a resolved configuration.", _config_arguments, _run_config),
    Command("cat", "Write the original bytes of a split to standard output.", _cat_arguments, _run_cat),
)


MOST_SAMPLES = 4096  # continuations of a prompt, sampled in one batch


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--prompt", action="append", help="text to continue (may be repeated; default sample.prompts)")
    parser.add_argument("--samples", type=int, default=1, help="continuations of each prompt")
    parser.add_argument(
        "--raw", action="store_true", help="write prompts and continuations as bytes, and nothing between"
    )


def _run_sample(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "sample")
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise ConfigError(f"--samples {arguments.samples}: must be from 1 to {MOST_SAMPLES:,}")
    if arguments.raw and arguments.json:
        raise ConfigError("--raw and --json: choose one of them; --json gives the bytes too, in hexadecimal")
    if arguments.raw and options.chunker.kind == "pixels":
        raise ConfigError("--raw: this run's model is of pictures, which are drawn into samples.png")
    from pipeline.inference import sample

    prompts = None if arguments.prompt is None else [os.fsencode(prompt) for prompt in arguments.prompt]
    written = sample(options, prompts, arguments.samples)
    if arguments.raw:
        return CommandResult("", None, [bytes.fromhex(item.hex or "") for item in written])
    text = "\n\n".join(f"--- {item.prompt!r}\n{item.prompt}{item.text}" for item in written)
    text += f"\n\n{speed}" if (speed := describe_speed(written)) else ""
    return CommandResult(text, [asdict(item) for item in written])


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--space", choices=("chunks", "contexts", "predictions"), help="the same as index.space=")


def _run_index(arguments: argparse.Namespace) -> CommandResult:
    words = [*arguments.words, *([f"index.space={arguments.space}"] if arguments.space else [])]
    options = load_run_options(arguments.run, words, "index")
    from pipeline.run.index.build import build_index, describe_index

    found = build_index(options)
    return CommandResult(describe_index(found), asdict(found))


def _neighbours_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument(
        "queries",
        nargs="*",
        metavar="QUERY",
        help="a chunk; of pictures a colour, or PICTURE:CHUNK, counted from 0; none: some of the corpus. What is key=value with "
        "the key of an option changes that option; after `--` everything is a query",
    )
    parser.add_argument("--file", metavar="FILE", help="queries, a line each; - for standard input")
    parser.add_argument("--context", action="append", metavar="TEXT", help="which places in the text are like its end")
    parser.add_argument("--context-file", metavar="FILE", help="the same of a file; - for standard input")
    parser.add_argument("--after", action="append", metavar="TEXT", help="chunks like what is expected after it")
    for name, what in (("like", "added"), ("minus", "taken away"), ("plus", "added")):
        parser.add_argument(f"--{name}", action="append", metavar="CHUNK", help=f"chunks like a sum: this is {what}")
    parser.add_argument("--count", type=int, help="neighbours of each query (default: 8, or as many as there are)")
    parser.add_argument(
        "--min-count", type=int, help="occurrences of a neighbour (default: as many as make it known; 1: all)"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="build an index that is missing or of another checkpoint"
    )
    parser.add_argument("--csv", action="store_true", help="comma-separated values")
    parser.add_argument("--runs-dir", default="runs", help="where RUN is looked for by name")


def _run_neighbours(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.inference import IndexQuery, query_index

    for name in ("count", "min_count"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.csv and arguments.json:
        raise ConfigError("--csv and --json: choose one of them")
    options = load_run_options(
        arguments.run, [write_override("runs_dir", arguments.runs_dir), *arguments.words], "neighbours"
    )
    words = {name: [os.fsencode(each) for each in getattr(arguments, name) or ()] for name in _ASKED}
    if arguments.file:
        lines = _read_query_file(arguments.file, "--file").splitlines()
        words["queries"] += [line for line in lines if line]
        if not words["queries"]:
            raise ConfigError(f"--file {arguments.file}: there is no query in it")
    if arguments.context_file:
        words["context"].append(_read_query_file(arguments.context_file, "--context-file"))
    told = [name for name in ("queries", "context", "after") if words[name]]
    if len(told) + any(words[name] for name in ("like", "minus", "plus")) > 1:
        raise ConfigError("one question at a time: queries, --context, --after, or --like with --minus and --plus")
    found = query_index(
        options,
        IndexQuery(
            space="contexts" if words["context"] else "predictions" if words["after"] else "chunks",
            queries=words["queries"] or words["context"] or words["after"],
            **{name: words[name] for name in ("like", "minus", "plus")},
            count=arguments.count,
            min_count=arguments.min_count,
            refresh=arguments.refresh,
        ),
    )
    if arguments.csv:
        return CommandResult(found.csv(), None)
    text, path = str(found), RunFolder.from_options(options).path / "neighbours.png"
    if options.chunker.kind == "pixels" and not (words["context"] or words["after"]):
        from pipeline.reporting import plots

        if (drawn := plots.draw_neighbours(found)) and write_or_log(path, drawn):
            text += f"\n{path}"
    return CommandResult(text, [item.as_record() for item in found])


_ASKED = ("queries", "context", "after", "like", "minus", "plus")


def _read_query_file(name: str, option: str) -> bytes:
    """Return the content of a text file or of standard input. A chunk may end within a character.

    Raises:
        ConfigError: the content is not text.
        FileNotFoundError: no such file exists.
        OSError: standard input is closed.
    """
    if name == "-":
        if sys.stdin is None:
            raise OSError(f"{option} -: standard input is closed")
        content = sys.stdin.buffer.read()
    elif not Path(name).exists() or Path(name).is_dir():
        raise FileNotFoundError(f"{option} {name}: {'a folder, not a file' if Path(name).is_dir() else 'no such file'}")
    else:
        content = Path(name).read_bytes()
    if (at := content.find(0)) >= 0:
        raise ConfigError(f"{option} {name}: no text, since byte {at:,} is 0; give chunks or passages as text")
    return content


def _run_analyse(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "analyse")
    from pipeline.analysis.stage import analyse_run
    from pipeline.reporting.findings import format_analysis

    found = analyse_run(options)
    return CommandResult(format_analysis(found), asdict(found))


def _next_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument(
        "queries",
        nargs="*",
        metavar="PROMPT",
        help="a text; none: where a document begins. What is key=value with the key of an option changes that option; after "
        "`--` everything is a prompt",
    )
    parser.add_argument("--count", type=int, default=10, help="chunks after each prompt")


def _run_next(arguments: argparse.Namespace) -> CommandResult:
    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: must be at least 1")
    options = load_run_options(arguments.run, arguments.words, "next")
    from pipeline.inference import format_predictions, next_chunks

    found = next_chunks(options, [os.fsencode(prompt) for prompt in arguments.queries], arguments.count)
    return CommandResult(format_predictions(found), [asdict(item) for item in found])


def _explore_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--port", type=parse_port, help="on this machine alone (default: 7300, or one that is free)")


def _run_explore(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "neighbours")
    from pipeline.web.explore import serve_run_pages

    serve_run_pages(RunFolder.from_options(options), arguments.port, tuple(arguments.words), arguments.json)
    return CommandResult("", None)


_ASKING = (
    Command("sample", "Continue prompts.", _sample_arguments, _run_sample),
    Command("next", "List the likeliest next chunks with their probabilities.", _next_arguments, _run_next),
    Command("index", "Build a FAISS index of chunks, or of places in the text.", _index_arguments, _run_index),
    Command(
        "neighbours",
        "Find similar chunks or passages.",
        _neighbours_arguments,
        _run_neighbours,
    ),
    Command("explore", "Browse a run and query its model.", _explore_arguments, _run_explore, ""),
    Command("analyse", "Analyse the chunk embeddings.", add_run_arguments, _run_analyse),
)


_MOST_STEPS = 1e9


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names under runs_dir, or folders")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for by name; runs_dir= is the same")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the page (default: RUNS_DIR/comparison)")


def _run_compare(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.reporting.comparison import compare_runs, format_comparison

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
    parser.add_argument("--phase", choices=PHASES, help="default: pretrain, or train of a model of tokens")
    parser.add_argument("--steps", type=int, default=20, help="steps to measure")


def _run_profile(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "profile")
    if not 1 <= arguments.steps <= _MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {_MOST_STEPS:g}")
    phase = arguments.phase or training_phases(options.model.kind)[0]
    from pipeline.training.profile import format_profile, profile_phase

    found = profile_phase(options, phase, arguments.steps)
    return CommandResult(format_profile(found), asdict(found))


def _run_report(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.reporting.report import write_report

    path = write_report(load_run_options(arguments.run, arguments.words, "report"))
    return CommandResult(str(path), {"report": str(path)})


_SHOWING = (
    Command("compare", "Compare several runs in a table and curves.", _compare_arguments, _run_compare),
    Command("profile", "Measure where the time of a training step goes.", _profile_arguments, _run_profile),
    Command("report", "Write report.html of a run.", add_run_arguments, _run_report),
)


COMMANDS = (*_MAKING, *_ASKING, *_SHOWING)
