"""The command line: `python -m pipeline STAGE`, and, with the flows beside it, `haed STAGE`.

Results go to standard output, for people or, with --json, for programs, as the last line; progress goes to standard
error. Exit status: 2 for a usage error, 1 for a failure, 130 and 143 after SIGINT and SIGTERM. Heavy packages are imported
by the command that needs them.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError, dump, load, presets
from pipeline.files import write_atomically
from pipeline.options import Options
from pipeline.runs import RunFolder

log = logging.getLogger(__name__)
Stop = Callable[[], bool]


class Interrupt(BaseException):
    """A signal ended a command that has nothing to save."""


@dataclass
class Result:
    """What a command found: text for people, a value for programs."""

    text: str
    value: Any


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, one line of help, its arguments, and what it does."""

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace, Stop], Result]


def settings(parser: argparse.ArgumentParser) -> None:
    """Arguments of a stage that reads a configuration."""
    parser.add_argument("--config", metavar="PRESET_OR_FILE", help=f"one of {', '.join(presets())}, or a YAML file")
    parser.add_argument(
        "words", nargs="*", metavar="[RUN] key=value", help="a run to go on with, and options to change"
    )


def run_settings(parser: argparse.ArgumentParser) -> None:
    """Arguments of a stage that reads a trained run."""
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options to change")


def options_of(arguments: argparse.Namespace) -> Options:
    """The configuration that a stage's arguments ask for: a preset or file, or that of an existing run."""
    overrides = [word for word in arguments.words if "=" in word]
    named = [word for word in arguments.words if "=" not in word]
    if named and (len(named) > 1 or arguments.config):
        raise ConfigError(f"{named[-1]!r} is not of the form key=value")
    if named:
        return run_options(named[0], overrides)
    return load(arguments.config, overrides)


def run_options(run: str, overrides: list[str]) -> Options:
    """The configuration of an existing run, with some options changed."""
    given = dict(item.split("=", 1) for item in overrides if "=" in item)
    return RunFolder.find(run, given.get("runs_dir", "runs")).options(overrides)


def _shard(arguments: argparse.Namespace, stop: Stop) -> Result:
    from pipeline.sharding import shard, summary

    for number in (signal.SIGINT, signal.SIGTERM):  # nothing to finish: what is written is found again
        signal.signal(number, _raise_interrupt)
    began = time.perf_counter()
    corpus = shard(options_of(arguments))
    seconds = time.perf_counter() - began
    splits = summary(corpus)
    value = {"folder": corpus.location, "digest": corpus.digest, "splits": splits, "seconds": seconds}
    lines = [f"{corpus.location}"] + [
        f"  {split:<6} {size['documents']:>9,} documents {size['chunks']:>13,} chunks {size['tokens']:>15,} tokens"
        + (f" {size['distinct_chunks']:>11,} distinct chunks" if size["distinct_chunks"] is not None else "")
        for split, size in splits.items()
    ]
    total = sum(size["source_bytes"] for size in splits.values())
    lines.append(f"  {total / 1e6:,.1f} MB in {seconds:.1f} s")
    return Result("\n".join(lines), value)


def _raise_interrupt(number: int, _: object) -> None:
    raise Interrupt(number)


def _training(phase: str) -> Callable[[argparse.Namespace, Stop], Result]:
    def execute(arguments: argparse.Namespace, stop: Stop) -> Result:
        options = options_of(arguments)
        from pipeline import training

        trained = getattr(training, phase)(options, stop)
        return Result(training.outcome(trained), asdict(trained))

    return execute


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="score this file instead of a split")


def _evaluate(arguments: argparse.Namespace, stop: Stop) -> Result:
    options = run_options(arguments.run, arguments.words)
    if arguments.text is not None and not arguments.text.is_file():
        raise FileNotFoundError(f"--text {arguments.text}: no such file")
    from pipeline.evaluate import evaluate, table

    result = evaluate(options, arguments.text)
    return Result(table(result), asdict(result))


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument("--prompt", action="append", help="text to continue (may be repeated; default sample.prompts)")
    parser.add_argument("--samples", type=int, default=1, help="continuations of each prompt")


def _sample(arguments: argparse.Namespace, stop: Stop) -> Result:
    options = run_options(arguments.run, arguments.words)
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: must be at least 1")
    from pipeline.sampling import sample

    written = sample(options, arguments.prompt, arguments.samples)
    text = "\n\n".join(f"--- {item.prompt!r}\n{item.prompt}{item.text}" for item in written)
    return Result(text, [asdict(item) for item in written])


def _index(arguments: argparse.Namespace, stop: Stop) -> Result:
    options = run_options(arguments.run, arguments.words)
    from pipeline.index import index

    found = index(options)
    return Result(f"{found.folder}: {found.chunks:,} chunks, {found.width} dimensions", asdict(found))


def _neighbours_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument("queries", nargs="*", metavar="QUERY", help="a chunk, or a colour; none: some of the corpus")
    parser.add_argument("--count", type=int, default=8, help="neighbours of each query")
    parser.add_argument("--runs-dir", default="runs", help="where RUN is looked for by name")


def _neighbours(arguments: argparse.Namespace, stop: Stop) -> Result:
    from pipeline.neighbours import neighbours, picture, table

    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: must be at least 1")
    queries = [os.fsencode(query) for query in arguments.queries]
    folder = RunFolder.find(arguments.run, arguments.runs_dir)
    found, text = neighbours(folder, queries, arguments.count), ""
    if drawn := picture(found):
        write_atomically(folder.path / "neighbours.png", drawn)
        text = f"\n{folder.path / 'neighbours.png'}"
    return Result(table(found) + text, found)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument("--phase", choices=("pretrain", "finetune", "train"), default="pretrain")
    parser.add_argument("--steps", type=int, default=20, help="steps to measure")


def _profile(arguments: argparse.Namespace, stop: Stop) -> Result:
    options = run_options(arguments.run, arguments.words)
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: must be at least 1")
    from pipeline.profile import profile, table

    found = profile(options, arguments.phase, arguments.steps)
    return Result(table(found), asdict(found))


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names under runs_dir, or folders")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for by name")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the page (default: RUNS_DIR/comparison)")


def _compare(arguments: argparse.Namespace, stop: Stop) -> Result:
    from pipeline.compare import compare, table

    found = compare(arguments.runs, arguments.runs_dir, arguments.output or Path(arguments.runs_dir) / "comparison")
    return Result(f"{table(found)}\n{found.page}", asdict(found))


def _report(arguments: argparse.Namespace, stop: Stop) -> Result:
    from pipeline.report import report

    path = report(run_options(arguments.run, arguments.words))
    return Result(str(path), {"report": str(path)})


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", nargs="?", metavar="PRESET_OR_FILE", help="nothing: the defaults")
    parser.add_argument("words", nargs="*", metavar="key=value", help="options to change")


def _config(arguments: argparse.Namespace, stop: Stop) -> Result:
    words = [word for word in (arguments.preset, *arguments.words) if word]
    if words and "=" not in words[0]:
        options = load(words[0], words[1:])
    else:
        options = load(None, words)
    return Result(dump(options).rstrip(), asdict(options))


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="a sharded corpus: folder or URL")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="train")


def _cat(arguments: argparse.Namespace, stop: Stop) -> Result:
    from data.corpus import Corpus

    for block in Corpus.open(arguments.shards).original_blocks(arguments.split):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    return Result("", None)


COMMANDS = (
    Command("shard", "cut a source into WebDataset shards with a manifest", settings, _shard),
    Command("pretrain", "phase one: learn in the space of chunk embeddings", settings, _training("pretrain")),
    Command("finetune", "phase two: train for exact likelihood, from a phase one", settings, _training("finetune")),
    Command("train", "train end to end, without a phase one", settings, _training("train")),
    Command("evaluate", "exact bits on a split or a file, beside yardsticks", _evaluate_arguments, _evaluate),
    Command("sample", "continue prompts", _sample_arguments, _sample),
    Command("index", "FAISS index of the embeddings of all chunks", run_settings, _index),
    Command("neighbours", "nearest chunks in the index", _neighbours_arguments, _neighbours),
    Command("compare", "table and curves of several runs", _compare_arguments, _compare),
    Command("profile", "where the time of a training step goes", _profile_arguments, _profile),
    Command("report", "write report.html and report.md of a run", run_settings, _report),
    Command("config", "print a resolved configuration", _config_arguments, _config),
    Command("cat", "write the original bytes of a split to standard output", _cat_arguments, _cat),
)


def build_parser(program: str, commands: tuple[Command, ...]) -> argparse.ArgumentParser:
    """The parser of a program with these commands."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Two-phase training of Hierarchical Attention Encoder-Decoders.",
        epilog=f"Options are key=value; `{program} config` lists them. Presets: {', '.join(presets())}.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in commands:
        sub = subparsers.add_parser(command.name, help=command.help, description=command.help)
        command.arguments(sub)
        sub.add_argument("--json", action="store_true", help="end with one line of JSON")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(execute=command.execute)
    return parser


def main(argv: list[str] | None = None, program: str = "pipeline", extra: tuple[Command, ...] = ()) -> int:
    """Runs a command and returns the exit status."""
    parser = build_parser(program, (*COMMANDS, *extra))
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes no positional after an option; key=value may stand anywhere.
    if rest and (not hasattr(arguments, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.words += rest
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    for room in ("pipeline", "data", "haed", "flows"):
        logging.getLogger(room).setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    caught: list[int] = []
    try:
        with _signals(caught) as stop:
            result = arguments.execute(arguments, stop)
    except ConfigError as error:
        return _failed(arguments, error, 2)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
    except Interrupt as error:
        print("stopped; the same command goes on from there", file=sys.stderr)
        return 128 + int(error.args[0])
    except Exception as error:
        if caught:
            print(f"{error}; the same command goes on from there", file=sys.stderr)
            return 128 + caught[0]
        return _failed(arguments, error, 1)
    if os.environ.get("RANK", "0") != "0":  # of torchrun's processes the first one speaks
        return 0
    shown = json.dumps(result.value) if arguments.json else result.text
    try:
        if shown:
            print(shown, flush=True)
    except BrokenPipeError:  # `haed … | head`
        sys.stderr.close()
        return 1
    return 0


def _failed(arguments: argparse.Namespace, error: Exception, status: int) -> int:
    """Says what is wrong in a line or two; the traceback only if it was asked for."""
    if arguments.debug:
        raise error
    expected = isinstance(error, ValueError | OSError | FloatingPointError)
    reason = " ".join(str(error).split()) or type(error).__name__
    hint = "" if expected else f" ({type(error).__name__}; --debug shows where)"
    print(f"error: {reason}{hint}", file=sys.stderr)
    return status


@contextmanager
def _signals(caught: list[int]) -> Iterator[Stop]:
    """Turns SIGINT and SIGTERM into a request to stop, which training honours after its step; a second one ends it."""

    def handler(number: int, _: object) -> None:
        if caught:
            sys.exit(128 + number)
        caught.append(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
