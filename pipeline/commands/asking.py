"""The commands that use a trained run: sample, next, index, neighbours, explore, analyse."""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from pipeline.arguments import (
    Command,
    CommandResult,
    add_run_arguments,
    load_run_options,
    parse_port,
)
from pipeline.config import ConfigError
from pipeline.run.files import describe_speed, write_or_log
from pipeline.run.run_directory import RunFolder
from pipeline.verbatim import write_override

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
    from pipeline.probe.sample import sample

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
    from pipeline.probe.index import build_index, describe_index

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
    from pipeline.probe.neighbours import IndexQuery, query_index

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
        from pipeline.show import plots

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
    from pipeline.probe.analyse.result import format_analysis
    from pipeline.probe.analyse.stage import analyse_run

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
    from pipeline.probe.next import format_predictions, next_chunks

    found = next_chunks(options, [os.fsencode(prompt) for prompt in arguments.queries], arguments.count)
    return CommandResult(format_predictions(found), [asdict(item) for item in found])


def _explore_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--port", type=parse_port, help="on this machine alone (default: 7300, or one that is free)")


def _run_explore(arguments: argparse.Namespace) -> CommandResult:
    options = load_run_options(arguments.run, arguments.words, "neighbours")
    from pipeline.pages.explore import serve_run_pages

    serve_run_pages(RunFolder.from_options(options), arguments.port, tuple(arguments.words), arguments.json)
    return CommandResult("", None)


COMMANDS = (
    Command("sample", "continue prompts", _sample_arguments, _run_sample),
    Command("next", "the likeliest next chunks, with their probabilities", _next_arguments, _run_next),
    Command("index", "FAISS index of chunks, or of places in the text", _index_arguments, _run_index),
    Command(
        "neighbours",
        "what is near to chunks, sums of them, passages and predictions",
        _neighbours_arguments,
        _run_neighbours,
    ),
    Command(
        "explore", "pages of a run, with questions to its model, in a browser", _explore_arguments, _run_explore, ""
    ),
    Command("analyse", "what the embeddings know, in figures and a map", add_run_arguments, _run_analyse),
)
