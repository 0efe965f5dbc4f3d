"""The commands that need no Prefect, a row each: their arguments, and what they do. Who needs heavy packages imports them."""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline.arguments import (
    GOES_ON,
    Command,
    Result,
    asked_options,
    options_of,
    run_options,
    run_settings,
    settings,
)
from pipeline.config import ConfigError, dump
from pipeline.kinds import phases
from pipeline.options import Phase
from pipeline.run.files import pace, write_or_say
from pipeline.run.folder import RunFolder
from pipeline.stopping import postponed


def _shard(arguments: argparse.Namespace) -> Result:
    from pipeline.run.shards import shard, sizes

    began = time.perf_counter()
    corpus = shard(options_of(arguments))
    seconds = time.perf_counter() - began
    splits = sizes(corpus)
    lines = [f"{corpus.location}"] + [
        f"  {split:<6} {size.documents:>9,} documents {size.chunks:>13,} chunks {size.tokens:>15,} tokens"
        + (f" {size.distinct_chunks:>11,} distinct chunks" if size.distinct_chunks is not None else "")
        for split, size in splits.items()
    ]
    lines.append(f"  {sum(size.source_bytes for size in splits.values()) / 1e6:,.1f} MB in {seconds:.1f} s")
    shown = {split: asdict(size) for split, size in splits.items()}
    value = {"folder": corpus.location, "digest": corpus.digest, "splits": shown, "seconds": seconds}
    return Result("\n".join(lines), value)


def _training(phase: Phase) -> Callable[[argparse.Namespace], Result]:
    def execute(arguments: argparse.Namespace) -> Result:
        options = options_of(arguments)
        from pipeline.train import stages

        with postponed() as stop:
            trained = stages.run_phase(phase, options, stop)
        return Result(stages.outcome(trained), asdict(trained))

    return execute


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="score this file instead of a split; a pipe, or - for standard input"
    )


def _evaluate(arguments: argparse.Namespace) -> Result:
    options, text = run_options(arguments.run, arguments.words, "evaluate"), arguments.text
    if text is not None and str(text) != "-" and (text.is_dir() or not text.exists()):
        raise FileNotFoundError(f"--text {text}: {'a folder, not a file' if text.is_dir() else 'no such file'}")
    from pipeline.score.evaluate import evaluate, table

    result = evaluate(options, text)
    return Result(table(result), asdict(result))


def _sample_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument("--prompt", action="append", help="text to continue (may be repeated; default sample.prompts)")
    parser.add_argument("--samples", type=int, default=1, help="continuations of each prompt")
    parser.add_argument(
        "--raw", action="store_true", help="write prompts and continuations as bytes, and nothing between"
    )


def _sample(arguments: argparse.Namespace) -> Result:
    options = run_options(arguments.run, arguments.words, "sample")
    if arguments.samples < 1:
        raise ConfigError(f"--samples {arguments.samples}: must be at least 1")
    if arguments.raw and arguments.json:
        raise ConfigError("--raw and --json: choose one of them; --json gives the bytes too, in hexadecimal")
    from pipeline.probe.sample import sample

    prompts = None if arguments.prompt is None else [os.fsencode(prompt) for prompt in arguments.prompt]
    written = sample(options, prompts, arguments.samples)
    if arguments.raw:
        if any(item.hex is None for item in written):
            raise ConfigError("--raw: this run's model is of pictures, which are in samples.png")
        return Result("", None, [bytes.fromhex(item.hex or "") for item in written])
    text = "\n\n".join(f"--- {item.prompt!r}\n{item.prompt}{item.text}" for item in written)
    text += f"\n\n{speed}" if (speed := pace(written)) else ""
    return Result(text, [asdict(item) for item in written])


def _index(arguments: argparse.Namespace) -> Result:
    options = run_options(arguments.run, arguments.words, "index")
    from pipeline.probe.index import index

    found = index(options)
    left_out = f" ({found.left_out:,} rarer ones left out by index.max_chunks)" if found.left_out else ""
    return Result(f"{found.folder}: {found.chunks:,} chunks{left_out}, {found.width} dimensions", asdict(found))


def _neighbours_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name under runs_dir, or folder")
    parser.add_argument(
        "queries",
        nargs="*",
        metavar="QUERY",
        help="a chunk, or a colour; none: some of the corpus. What is key=value with the key of an option changes that "
        "option; after `--` everything is a query",
    )
    parser.add_argument("--count", type=int, default=8, help="neighbours of each query")
    parser.add_argument("--runs-dir", default="runs", help="where RUN is looked for by name")


def _neighbours(arguments: argparse.Namespace) -> Result:
    from pipeline.probe.neighbours import neighbours, table
    from pipeline.show import plots

    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: must be at least 1")
    options = run_options(arguments.run, [f"runs_dir={arguments.runs_dir}", *arguments.words], "neighbours")
    found = neighbours(options, [os.fsencode(query) for query in arguments.queries], arguments.count)
    text, path = table(found), RunFolder.of(options).path / "neighbours.png"
    if (drawn := plots.neighbours(found)) and write_or_say(path, drawn):
        text += f"\n{path}"
    return Result(text, [asdict(item) for item in found])


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


def _next(arguments: argparse.Namespace) -> Result:
    if arguments.count < 1:
        raise ConfigError(f"--count {arguments.count}: must be at least 1")
    options = run_options(arguments.run, arguments.words, "next")
    from pipeline.probe.next import following, table

    found = following(options, [os.fsencode(prompt) for prompt in arguments.queries], arguments.count)
    return Result(table(found), [asdict(item) for item in found])


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    run_settings(parser)
    parser.add_argument(
        "--phase", choices=("pretrain", "finetune", "train"), help="default: pretrain, or train of a model of tokens"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps to measure")
    parser.add_argument(
        "--plan", action="store_true", help="what a step would cost on more devices, worked out from that"
    )
    parser.add_argument(
        "--devices",
        type=int,
        nargs="+",
        default=[4**i for i in range(6)],
        help="--plan: their numbers (default: 1 … 1024)",
    )
    parser.add_argument(
        "--link", type=float, default=25.0, metavar="GB/S", help="--plan: that a device receives (default: 25)"
    )
    parser.add_argument(
        "--rate",
        type=float,
        metavar="TFLOP/S",
        help="--plan: of matrix products on a device (default: as measured here)",
    )


def _profile(arguments: argparse.Namespace) -> Result:
    options = run_options(arguments.run, arguments.words, "profile")
    for name in ("steps", "link", "rate"):
        if (value := getattr(arguments, name)) is not None and not value > 0:
            raise ConfigError(f"--{name} {value}: must be more than 0")
    if min(arguments.devices) < 1:
        raise ConfigError(f"--devices {min(arguments.devices)}: must be at least 1")
    phase = arguments.phase or phases(options.model.kind)[0]
    if arguments.plan:
        from haed.ranks import group_size
        from pipeline.train import plan

        rate, link = arguments.rate and arguments.rate * 1e12, arguments.link * 1e9
        if options.iem.group is not None and getattr(options, phase).iem_weight:
            for number in arguments.devices:  # said before anything is measured
                group_size(options.iem.group, number, "devices")
        step = plan.measure(options, phase, arguments.steps, rate)
        plans = [asdict(step.plan(number, link)) for number in arguments.devices]
        return Result(plan.table(step, arguments.devices, link), plans)
    from pipeline.train.profile import profile, table

    found = profile(options, phase, arguments.steps)
    return Result(table(found), asdict(found))


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names under runs_dir, or folders")
    parser.add_argument("--runs-dir", default="runs", help="where runs are looked for by name")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="of the page (default: RUNS_DIR/comparison)")


def _compare(arguments: argparse.Namespace) -> Result:
    from pipeline.show.compare import compare, table

    found = compare(arguments.runs, arguments.runs_dir, arguments.output or Path(arguments.runs_dir) / "comparison")
    return Result(f"{table(found)}\n{found.page}", asdict(found))


def _report(arguments: argparse.Namespace) -> Result:
    from pipeline.show.report import report

    path = report(run_options(arguments.run, arguments.words, "report"))
    return Result(str(path), {"report": str(path)})


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="[PRESET_OR_FILE] key=value", help="nothing: the defaults")


def _config(arguments: argparse.Namespace) -> Result:
    named = [word for word in arguments.words if "=" not in word]
    options = asked_options(named[0] if named else None, [word for word in arguments.words if word not in named[:1]])
    return Result(dump(options, scheduler=True).rstrip(), asdict(options))


def _cat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", metavar="SHARDS", help="a sharded corpus: folder or URL")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="train")


def _cat(arguments: argparse.Namespace) -> Result:
    from data.corpus import Corpus

    return Result("", None, Corpus.open(arguments.shards).original_blocks(arguments.split))


COMMANDS = (
    Command("shard", "cut a source into WebDataset shards with a manifest", settings, _shard, GOES_ON),
    Command("pretrain", "phase one: learn in the space of chunk embeddings", settings, _training("pretrain"), GOES_ON),
    Command(
        "finetune", "phase two: train for exact likelihood, from a phase one", settings, _training("finetune"), GOES_ON
    ),
    Command("train", "train end to end, without a phase one", settings, _training("train"), GOES_ON),
    Command("evaluate", "exact bits on a split or a file, beside yardsticks", _evaluate_arguments, _evaluate),
    Command("sample", "continue prompts", _sample_arguments, _sample),
    Command("next", "the likeliest next chunks, with their probabilities", _next_arguments, _next),
    Command("index", "FAISS index of the embeddings of all chunks", run_settings, _index),
    Command("neighbours", "nearest chunks in the index", _neighbours_arguments, _neighbours),
    Command("compare", "table and curves of several runs", _compare_arguments, _compare),
    Command("profile", "where the time of a training step goes", _profile_arguments, _profile),
    Command("report", "write report.html and report.md of a run", run_settings, _report),
    Command("config", "print a resolved configuration", _config_arguments, _config),
    Command("cat", "write the original bytes of a split to standard output", _cat_arguments, _cat),
)
