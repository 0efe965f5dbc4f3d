"""The commands that need no Prefect, with their arguments and functions.

Each function imports the heavy packages that it needs.
"""

import argparse
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline import ROOT
from pipeline.arguments import (
    GOES_ON,
    Command,
    CommandResult,
    add_config_arguments,
    add_run_argument,
    add_run_arguments,
    load_run_options,
    options_from_arguments,
    parse_path,
    parse_port,
)
from pipeline.config import PHASES, ConfigError, Phase, is_option, load_options, training_phases, write_override
from pipeline.config.reference import comment_options, format_options, search_options
from pipeline.run.files import describe_speed, write_or_log
from pipeline.run.run_directory import RunFolder, describe_runs
from pipeline.signals import postponed_signals


def _run_shard(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.run.sharding import shard_source, split_sizes

    began = time.perf_counter()
    corpus = shard_source(options_from_arguments(arguments))
    seconds = time.perf_counter() - began
    splits = split_sizes(corpus)
    lines = [corpus.location]
    for split, size in splits.items():
        line = f"  {split:<6} {size.documents:>9,} documents {size.chunks:>13,} chunks {size.tokens:>15,} tokens"
        if size.distinct_chunks is not None:
            approximately = "" if size.distinct_chunks_exact else "about "
            line += f"{approximately}{size.distinct_chunks:,} distinct chunks".rjust(34)
        lines.append(line)
    lines.append(f"  {sum(size.source_bytes for size in splits.values()) / 1e6:,.1f} MB in {seconds:.1f} s")
    shown = {split: asdict(size) for split, size in splits.items()}
    value = {"folder": corpus.location, "digest": corpus.digest, "splits": shown, "seconds": seconds}
    return CommandResult("\n".join(lines), value)


def _run_phase(phase: Phase, arguments: argparse.Namespace) -> CommandResult:
    has_run = any(word.startswith("name=") or not is_option(word) for word in arguments.words)
    if phase == "finetune" and not arguments.config and not has_run:
        raise ConfigError(f"haed finetune needs a run with a phase one, as in haed finetune RUN ({describe_runs()})")
    options = options_from_arguments(arguments)
    from pipeline.training import stages

    with postponed_signals() as stop:
        trained = stages.run_phase(phase, options, stop)
    return CommandResult(stages.format_outcome(trained), asdict(trained))


def _experiment_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[NAME] key=value",
        help="Name of an experiment, and options of all its runs. Without a name, the experiments are listed.",
    )
    parser.add_argument(
        "--budget",
        choices=("minutes", "hour", "paper"),
        default="minutes",
        help="Budget. minutes: 20 minutes of two cores in all. hour: an hour of training, three seeds, at most three hours in "
        "all. paper: the paper's sizes and limits, see --plan first. Default: %(default)s.",
    )
    parser.add_argument(
        "--plan", action="store_true", help="Print what the paper's sizes would cost. Nothing is trained."
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="Training time of all runs together, in seconds. Default: 840 with --budget minutes and 3,600 with hour, or "
        "less if the budget leaves less.",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "process"),
        default="wall",
        help="How training time is measured. wall: wall time. process: CPU time, for a shared machine and with threads=1. "
        "Default: %(default)s.",
    )
    parser.add_argument("--seeds", type=int, help="Seeds of each variant. Default: 1, and 3 with --budget hour.")
    parser.add_argument(
        "--parallel", type=int, default=1, help="Concurrent runs, which share the cores. Default: %(default)s."
    )
    parser.add_argument(
        "--data",
        type=parse_path,
        default=Path("../shared/data"),
        help="Folder with the data sets wikitext-2, wikipedia-en-2015, imagenette32 and fsdd-8khz. Default: %(default)s.",
    )
    parser.add_argument(
        "--output",
        type=parse_path,
        default=Path("experiments/results"),
        help="Folder of results and runs. Default: %(default)s.",
    )


def _run_experiment(arguments: argparse.Namespace) -> CommandResult:
    if not Path(ROOT, "experiments", "catalogue.py").is_file():
        raise ConfigError(
            "experiments are not part of the installed package. Clone the repository, run `make setup`, "
            "and use .venv/bin/haed experiment"
        )
    from experiments.catalogue import execute_command

    return execute_command(arguments)


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--text",
        type=parse_path,
        metavar="FILE",
        help="File to score instead of a split. It may be a pipe, or - for standard input.",
    )


def _check_is_file(option: str, path: Path) -> None:
    if path.is_dir() or not path.exists():
        raise FileNotFoundError(f"{option} {path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")


def _run_evaluate(arguments: argparse.Namespace) -> CommandResult:
    options, text = load_run_options(arguments.run, arguments.words, "evaluate"), arguments.text
    if text is not None and str(text) != "-":
        _check_is_file("--text", text)
    from pipeline.evaluation.evaluate import evaluate_run, format_evaluation

    result = evaluate_run(options, text)
    return CommandResult(format_evaluation(result), asdict(result))


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="PRESET_OR_FILE", help="Another way to give the preset or file.")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[PRESET_OR_FILE] key=value",
        help="Preset or YAML file, and options to change. Without them, the defaults are printed.",
    )
    parser.add_argument(
        "--search",
        metavar="WORDS",
        help="Print only the options that have these words in their name or meaning, such as --search 'learning rate'.",
    )


def _run_config(arguments: argparse.Namespace) -> CommandResult:
    named = [word for word in arguments.words if "=" not in word][: 0 if arguments.config else 1]
    overrides = [word for word in arguments.words if word not in named]
    options = load_options(arguments.config or (named or [None])[0], overrides, log_changes=True)
    if arguments.search:
        matches = search_options(options, arguments.search)
        return CommandResult(format_options(matches), [asdict(each) for each in matches])
    return CommandResult(comment_options(options), asdict(options))


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="Sharded corpus, as a folder or URL.")
    parser.add_argument(
        "--split", choices=("train", "valid", "test"), default="train", help="Split to write. Default: %(default)s."
    )


def _run_cat(arguments: argparse.Namespace) -> CommandResult:
    from data.corpus import Corpus

    if arguments.json:
        raise ConfigError("haed cat writes the bytes of a corpus and no JSON. Leave out --json")
    return CommandResult("", None, Corpus.open(arguments.shards).iterate_original_blocks(arguments.split))


MOST_SAMPLES = 4096  # continuations of a prompt, sampled in one batch
_OPTIONS_AMONG_WORDS = "A word key=value with the key of an option changes that option. Words after `--` never do."


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--prompt", action="append", help="Text to continue. Repeatable. Default: sample.prompts.")
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help=f"Continuations of each prompt, 1 to {MOST_SAMPLES:,}. Default: %(default)s.",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="Write prompts and continuations as bytes, with nothing between them, and sound as `haed cat` does.",
    )


def _run_sample(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "sample")
    if not 1 <= arguments.samples <= MOST_SAMPLES:
        raise ConfigError(f"--samples {arguments.samples}: must be from 1 to {MOST_SAMPLES:,}")
    if arguments.raw and arguments.json:
        raise ConfigError("--raw and --json exclude each other. Use --json: it has the bytes too, in hexadecimal")
    if arguments.raw and options.chunker.kind == "pixels":
        raise ConfigError("--raw needs a model of text. Leave it out: this run's model draws pictures into samples.png")
    from pipeline.inference import sample

    prompts = None if arguments.prompt is None else [os.fsencode(prompt) for prompt in arguments.prompt]
    written = sample(options, prompts, arguments.samples)
    if arguments.raw:
        drawn, folder = [bytes.fromhex(item.hex or "") for item in written], RunFolder.from_options(options)
        if folder.read_corpus_record().form:
            corpus = folder.open_corpus()
            drawn = [corpus.restore_original(each) for each in drawn]
        return CommandResult("", None, drawn)
    if options.chunker.kind == "pixels":
        return CommandResult("\n".join(item.prompt + item.text for item in written), [asdict(item) for item in written])
    text = "\n\n".join(f"--- {item.prompt!r}\n{item.prompt}{item.text}" for item in written)
    text += f"\n\n{speed}" if (speed := describe_speed(written)) else ""
    return CommandResult(text, [asdict(item) for item in written])


def _index_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--space", choices=("chunks", "contexts", "predictions"), help="What is indexed. Same as index.space=SPACE."
    )


def _run_index(arguments: argparse.Namespace) -> CommandResult:
    words = [*arguments.words, *([f"index.space={arguments.space}"] if arguments.space else [])]
    options = load_run_options(arguments.run, words, "index")
    from pipeline.run.index.build import build_index, describe_index

    index = build_index(options)
    return CommandResult(describe_index(index), asdict(index))


def _neighbours_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "queries",
        nargs="*",
        metavar="QUERY",
        help="Chunk to search for. For pictures, a colour such as '#4080c0', or PICTURE:CHUNK, both counted from 0. "
        f"Default: some chunks of the corpus. {_OPTIONS_AMONG_WORDS}",
    )
    parser.add_argument("--file", metavar="FILE", help="File of queries, one per line. - is standard input.")
    parser.add_argument(
        "--context",
        action="append",
        metavar="TEXT",
        help="Find places of the text whose context is similar to the end of TEXT. Repeatable.",
    )
    parser.add_argument("--context-file", metavar="FILE", help="The same with the text of a file. - is standard input.")
    parser.add_argument(
        "--after",
        action="append",
        metavar="TEXT",
        help="Find chunks that are similar to the prediction after TEXT. Repeatable.",
    )
    for name, effect in (("like", "added to"), ("minus", "subtracted from"), ("plus", "added to")):
        parser.add_argument(
            f"--{name}",
            action="append",
            metavar="CHUNK",
            help=f"Find chunks that are similar to a sum of embeddings. This one is {effect} it. Repeatable.",
        )
    parser.add_argument(
        "--count", type=int, help="Neighbours of each query, at least 1. Default: 8, or fewer if there are fewer."
    )
    parser.add_argument(
        "--min-count",
        type=int,
        help="Minimum number of occurrences of a neighbour, at least 1. It applies to chunks only. 1: all chunks. "
        "Default: 10, or less if fewer than 1,000 chunks occur that often.",
    )
    parser.add_argument(
        "--refresh", action="store_true", help="Build the index if it is missing or of another checkpoint."
    )
    parser.add_argument("--csv", action="store_true", help="Print comma-separated values.")
    parser.add_argument(
        "--runs-dir",
        metavar="FOLDER",
        default="runs",
        help="Folder in which RUN is found by name. Default: %(default)s.",
    )


def _run_neighbours(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.inference import query_index

    for name in ("count", "min_count"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if arguments.csv and arguments.json:
        raise ConfigError("--csv and --json exclude each other. Use one of them")
    overrides = [write_override("runs_dir", arguments.runs_dir), *arguments.words]
    options = load_run_options(arguments.run, overrides, "neighbours")
    names = ("queries", "context", "after", "like", "minus", "plus")
    words = {name: [os.fsencode(each) for each in getattr(arguments, name) or ()] for name in names}
    if arguments.file:
        lines = _read_query_file(arguments.file, "--file").splitlines()
        words["queries"] += [line for line in lines if line]
        if not words["queries"]:
            raise ConfigError(f"--file {arguments.file}: the file has no query. Write one query per line")
    if arguments.context_file:
        words["context"].append(_read_query_file(arguments.context_file, "--context-file"))
    kinds = [name for name in ("queries", "context", "after") if words[name]]
    if len(kinds) + any(words[name] for name in ("like", "minus", "plus")) > 1:
        raise ConfigError(
            "only one kind of query is allowed. Use queries, --context, --after, or --like with --minus and --plus"
        )
    results = query_index(
        options,
        space="contexts" if words["context"] else "predictions" if words["after"] else "chunks",
        queries=words["queries"] or words["context"] or words["after"],
        like=words["like"],
        minus=words["minus"],
        plus=words["plus"],
        count=arguments.count,
        min_count=arguments.min_count,
        refresh=arguments.refresh,
    )
    if arguments.csv:
        table = results.csv()
        if sys.stdout is not None and sys.stdout.isatty():
            return CommandResult(table, None)
        return CommandResult("", None, [table.encode("utf-8", "surrogateescape") + b"\n"])  # for programs, as it is
    text, path = str(results), RunFolder.from_options(options).path / "neighbours.png"
    if options.chunker.kind == "pixels" and not (words["context"] or words["after"]):
        from pipeline.reporting import plots

        if (drawn := plots.draw_neighbours(results)) and write_or_log(path, drawn):
            text += f"\n{path}"
    return CommandResult(text, [item.as_record() for item in results])


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
    else:
        _check_is_file(option, Path(name))
        content = Path(name).read_bytes()
    if (at := content.find(0)) >= 0:
        raise ConfigError(
            f"{option} {name}: byte {at:,} is 0, so the file is not text. Give chunks or passages as text"
        )
    return content


def _run_analyse(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "analyse")
    from pipeline.analysis.stage import analyse_run
    from pipeline.reporting.findings import format_analysis

    analysis = analyse_run(options)
    return CommandResult(format_analysis(analysis), asdict(analysis))


def _next_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "queries",
        nargs="*",
        metavar="PROMPT",
        help=f"Text to continue. Default: the beginning of a document. {_OPTIONS_AMONG_WORDS}",
    )
    parser.add_argument(
        "--count", type=int, default=10, help="Chunks listed for each prompt, at least 1. Default: %(default)s."
    )


def _run_next(arguments: argparse.Namespace) -> CommandResult:
    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: must be at least 1")
    options = load_run_options(arguments.run, arguments.words, "next")
    from pipeline.inference import format_predictions, next_chunks

    predictions = next_chunks(options, [os.fsencode(prompt) for prompt in arguments.queries], arguments.count)
    return CommandResult(format_predictions(predictions), [asdict(item) for item in predictions])


def _explore_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument(
        "--port", type=parse_port, help="Port, for this machine only. 0: a free port. Default: 7300, or a free port."
    )


def _run_explore(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "neighbours")
    from pipeline.web.explore import serve_run_pages

    serve_run_pages(RunFolder.from_options(options), arguments.port, tuple(arguments.words), arguments.json)
    return CommandResult("", None)


_MOST_STEPS = 10**9


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Names of runs in runs_dir, or their folders.")
    parser.add_argument(
        "--runs-dir",
        metavar="FOLDER",
        default="runs",
        help="Folder in which runs are found by name. Same as runs_dir=FOLDER. Default: %(default)s.",
    )
    parser.add_argument(
        "--output",
        type=parse_path,
        metavar="FOLDER",
        help="Folder of the page. Default: the folder comparison in runs_dir.",
    )


def _run_compare(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.reporting.comparison import choose_output, compare_runs, format_comparison

    runs = [word for word in arguments.runs if not is_option(word)]
    words = [word for word in arguments.runs if is_option(word)]
    for word in words:
        if not word.startswith("runs_dir="):
            raise ConfigError(f"{word}: haed compare takes no options but runs_dir=, the folder of the runs")
    if not runs:
        raise ConfigError("haed compare needs the names or folders of runs, such as `haed compare runs/a runs/b`")
    runs_dir = load_options(None, words or [write_override("runs_dir", arguments.runs_dir)]).runs_dir
    comparison = compare_runs(runs, runs_dir, arguments.output or choose_output(runs_dir))
    return CommandResult(f"{format_comparison(comparison)}\n{comparison.page}", asdict(comparison))


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "batch.context=64")
    parser.add_argument(
        "--phase", choices=PHASES, help="Phase to measure. Default: pretrain, or train for models of tokens."
    )
    parser.add_argument(
        "--steps", type=int, default=20, help=f"Steps to measure, 1 to {_MOST_STEPS:,}. Default: %(default)s."
    )


def _run_profile(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "profile")
    if not 1 <= arguments.steps <= _MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: must be from 1 to {_MOST_STEPS:,}")
    phase = arguments.phase or training_phases(options.model.kind)[0]
    from pipeline.training.profile import format_profile, profile_phase

    profile = profile_phase(options, phase, arguments.steps)
    return CommandResult(format_profile(profile), asdict(profile))


def _run_report(arguments: argparse.Namespace) -> CommandResult:
    from pipeline.reporting.report import write_report

    path = write_report(load_run_options(arguments.run, arguments.words, "report"))
    return CommandResult(str(path), {"report": str(path)})


COMMANDS = (
    Command(
        "shard",
        "Cut a source into WebDataset shards.",
        "haed shard --config quickstart source.kind=text source.path=my-texts",
        add_config_arguments,
        _run_shard,
        GOES_ON,
    ),
    Command(
        "pretrain",
        "Train phase one: predict chunk embeddings, which needs no decoder.",
        "haed pretrain --config quickstart pretrain.seconds=60",
        add_config_arguments,
        partial(_run_phase, "pretrain"),
        GOES_ON,
    ),
    Command(
        "finetune",
        "Train phase two: decode more chunks, for the exact likelihood.",
        "haed finetune quickstart finetune.seconds=60",
        add_config_arguments,
        partial(_run_phase, "finetune"),
        GOES_ON,
    ),
    Command(
        "train",
        "Train end to end, without a phase one.",
        "haed train --config quickstart train.seconds=60",
        add_config_arguments,
        partial(_run_phase, "train"),
        GOES_ON,
    ),
    Command(
        "evaluate",
        "Compute bits per character of a split or file, with baselines.",
        "haed evaluate quickstart evaluate.split=valid",
        _evaluate_arguments,
        _run_evaluate,
    ),
    Command(
        "experiment",
        "Reproduce a table or figure of a paper.",
        "haed experiment systems --budget minutes",
        _experiment_arguments,
        _run_experiment,
        GOES_ON,
    ),
    Command(
        "config",
        "Print a configuration, and explain its options.",
        "haed config quickstart --search rate",
        _config_arguments,
        _run_config,
    ),
    Command(
        "cat",
        "Write the original bytes of a split to standard output.",
        "haed cat shards/NAME --split valid",
        _cat_arguments,
        _run_cat,
    ),
    Command(
        "sample",
        "Continue prompts.",
        'haed sample quickstart --prompt "def " --samples 3',
        _sample_arguments,
        _run_sample,
    ),
    Command(
        "next",
        "List the likeliest next chunks with their probabilities.",
        'haed next quickstart "import "',
        _next_arguments,
        _run_next,
    ),
    Command(
        "index",
        "Build a FAISS index of chunks, or of places in the text.",
        "haed index quickstart --space contexts",
        _index_arguments,
        _run_index,
    ),
    Command(
        "neighbours",
        "Find similar chunks or passages.",
        'haed neighbours quickstart "self." --count 5',
        _neighbours_arguments,
        _run_neighbours,
    ),
    Command(
        "explore",
        "Browse a run and query its model.",
        "haed explore quickstart --port 7300",
        _explore_arguments,
        _run_explore,
        "",
    ),
    Command(
        "analyse",
        "Analyse the chunk embeddings.",
        "haed analyse quickstart analyse.clusters=20",
        add_run_arguments,
        _run_analyse,
    ),
    Command(
        "compare",
        "Compare several runs in a table and curves.",
        "haed compare quickstart quickstart-hourglass",
        _compare_arguments,
        _run_compare,
    ),
    Command(
        "profile",
        "Measure where the time of a training step goes.",
        "haed profile quickstart --phase pretrain --steps 20",
        _profile_arguments,
        _run_profile,
    ),
    Command("report", "Write report.html of a run.", "haed report quickstart", add_run_arguments, _run_report),
)
