"""Stages that query a trained run: `sample` continues prompts, `next` lists chunks, `neighbours` searches an index."""

import logging
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np

from data.filesystem import encode_checked_json, write_atomically
from pipeline.config import ConfigError, Options, Phase, SampleOptions
from pipeline.config.loading import format_value
from pipeline.console import escape_control_characters, format_probability
from pipeline.run.files import KeptSample, Sample, write_or_log
from pipeline.run.index.chunk_index import check_chunks
from pipeline.run.index.probe import Probe
from pipeline.run.index.queries import PIXELS, SearchResults, Texts, to_texts
from pipeline.run.metrics import ProgressCounter
from pipeline.run.run_directory import RunFolder, guard_results
from pipeline.run.trackers import publish_results

if TYPE_CHECKING:
    from pipeline.run.opened import NextChunk, NextChunks, Run

log = logging.getLogger(__name__)


@guard_results
def sample(options: Options, prompts: Texts | None = None, samples: int = 1) -> list[Sample]:
    """Continue prompts, by default those of `sample.prompts`.

    If `sample.prompts` is empty, the prompts are frequent chunks of the corpus and the empty prompt. Samples of default
    prompts are also written to samples.json, with the digest of the checkpoint. A model of pictures completes the lower
    halves of `sample.pictures` held-out pictures instead, and writes samples.png.

    Raises:
        FileNotFoundError: nothing was trained in the run.
        ValueError: a prompt was given for a model of pictures.
    """
    from pipeline.run.opened import Run

    folder = RunFolder.from_options(options)
    run = Run(folder, options)
    if run.chunker.name == PIXELS:
        if prompts:
            raise ValueError("this run's model completes pictures. Use sample.pictures= instead of `--prompt`")
        return _complete_pictures(run, samples)
    default = options.sample.prompts or [*folder.read_corpus_record().frequent, ""]
    texts = to_texts(default if prompts is None else prompts, 'sample(options, ["import "])')
    log.info("continuing %d prompt%s by %s step %s", len(texts), "s" * (len(texts) != 1), run.phase, f"{run.step:,}")
    written, progress = list[Sample](), ProgressCounter("sample", len(texts), "prompts")
    for prompt in texts:
        written += continue_prompt(run, prompt, samples, options.sample)
        progress.add_done()
    if prompts is None:
        kept = [KeptSample(**asdict(item), checkpoint=run.digest, fallback=run.checkpoint.fallback) for item in written]
        if write_or_log(folder.path / "samples.json", encode_checked_json([asdict(item) for item in kept])):
            publish_results(options)
    return written


def continue_prompt(run: "Run", prompt: bytes, samples: int, options: SampleOptions) -> list[Sample]:
    """Return `samples` continuations of a prompt, as displayed text and as bytes."""
    continuations = run.continued(prompt, samples, options)
    shown, speed = prompt.decode(errors="backslashreplace"), continuations.characters_per_second
    unit = "values" if run.of_values else "characters"
    shares = [None] * samples if continuations.parts is None else continuations.parts
    return [
        Sample(shown, decode_whole_characters(text), (prompt + text).hex(), share, speed, unit)
        for text, share in zip(continuations.texts, shares, strict=True)
    ]


def decode_whole_characters(written: bytes) -> str:
    """Decode UTF-8 without an incomplete character at the end. Other invalid bytes become escapes."""
    return getincrementaldecoder("utf-8")("backslashreplace").decode(written)


def _complete_pictures(run: "Run", samples: int) -> list[Sample]:
    """Draw held-out pictures, each as its upper half, its completions and the original."""
    from pipeline.reporting import plots

    corpus, sampling = run.folder.open_corpus(), run.options.sample
    split = next((name for name in ("test", "valid", "train") if corpus.split_counts(name).documents), "train")
    originals = np.stack([tokens for tokens, _ in islice(corpus.iterate_documents(split), sampling.pictures)])
    shape = tuple(corpus.form[name] for name in ("height", "width", "channels"))
    chunks = -(-originals.shape[1] // run.chunker.k)  # the last one may be shorter
    upper = originals[:, : chunks // 2 * run.chunker.k]
    beginnings = upper.repeat(samples, 0)
    lower = run.complete(beginnings, chunks - chunks // 2, sampling)[:, : originals.shape[1] - upper.shape[1]]
    completed = np.concatenate([beginnings, lower], 1).reshape(len(upper), samples, -1)
    blank = np.concatenate([upper, np.full_like(originals[:, upper.shape[1] :], 255)], 1)
    rows = np.concatenate([blank[:, None], completed, originals[:, None]], 1)
    picture, titles = run.folder.path / "samples.png", ["given", *["completed"] * samples, "original"]
    write_atomically(picture, plots.draw_pictures(rows.reshape(*rows.shape[:2], *shape), titles))
    log.info("%s", picture)
    return [Sample(f"lower half of picture {number} of {split}: ", str(picture)) for number in range(1, len(rows) + 1)]


def next_chunks(options: Options, prompts: Texts = (), count: int = 10) -> "list[NextChunks]":
    """Return the most probable next chunks after each prompt, by default at the start of a document; see `Run.next`.

    Raises:
        ConfigError: the model predicts tokens, not chunks.
        FileNotFoundError: nothing was trained in the run.
        ValueError: a prompt for a model of pictures.
    """
    from pipeline.run.opened import Run

    run = Run(RunFolder.from_options(options), options)
    return [run.next(prompt, count) for prompt in to_texts(prompts, 'next_chunks(options, ["import "])') or [b""]]


def prediction_rows(item: "NextChunks") -> list[dict[str, str]]:
    """Return table rows of the chunks after one prompt, with visible white space, and the probability of all others."""

    def row(text: str, probability: float, chunk: "NextChunk | None") -> dict[str, str]:
        parts = {f"{name} %": f"{100 * chunk.parts[name]:.1f}" if chunk else "" for name in item.gate or ()}
        count = f"{chunk.count:,}" if chunk and chunk.count is not None else ""
        return {"probability": format_probability(probability)} | parts | {"in train": count, "chunk": text}

    return [
        *(row(escape_control_characters(chunk.text), chunk.probability, chunk) for chunk in item.chunks),
        row("(all others)", item.rest, None),
    ]


def prediction_heading(item: "NextChunks") -> str:
    """Describe the prompt, how it was cut, and the gate."""
    cut = "at the beginning of a document" if item.before is None else f"after {escape_control_characters(item.before)}"
    opened = f", if it begins with {escape_control_characters(item.opened)}" if item.opened is not None else ""
    gate = "".join(f", {name} {share:.3f}" for name, share in (item.gate or {}).items())
    gate = f"; by part{gate.replace(',', ':', 1)}" if gate else ""
    prompt = f"{escape_control_characters(item.prompt)}: " if item.prompt else ""
    return f"{prompt}the chunk {cut}{opened}{gate}"


def format_predictions(predictions: "list[NextChunks]") -> str:
    """Format the next chunks of all prompts as text."""
    lines = []
    for item in predictions:
        lines.append(prediction_heading(item))
        for row in ({name: name for name in prediction_rows(item)[0]}, *prediction_rows(item)):
            *figures, text = row.items()
            lines.append("".join(f"  {value:>{max(9, len(name))}}" for name, value in figures) + f"  {text[1]}")
    return "\n".join(lines)


def query_index(
    options: Options,
    *,
    space: Literal["chunks", "contexts", "predictions"] = "chunks",
    queries: Sequence[str | bytes] = (),
    like: Sequence[str | bytes] = (),
    minus: Sequence[str | bytes] = (),
    plus: Sequence[str | bytes] = (),
    count: int | None = None,
    min_count: int | None = None,
    refresh: bool = False,
) -> SearchResults:
    """Answer a query. Chunks of the corpus are looked up in the index; the model is opened only for other queries.

    Args:
        options: options of the run.
        space: `chunks` finds chunks similar to a query. `contexts` finds positions similar to the end of a text.
            `predictions` finds chunks similar to those that the model expects after a text.
        queries: chunks or texts. If there are none, `chunks` uses frequent chunks of the corpus.
        like: chunks to add up, instead of `queries`.
        minus: chunks to subtract.
        plus: further chunks to add.
        count: neighbours of each query; None: eight, or as many as there are.
        min_count: minimum count of a chunk in the results; None: the threshold of known chunks.
        refresh: build the index first if it is missing, damaged or of another checkpoint.

    Raises:
        ConfigError: the model has no such space, or the query is invalid.
        FileNotFoundError: the run has no such index yet.
        ValueError: a query is invalid, or the index is damaged or of another checkpoint.
    """
    if space != "contexts":
        check_chunks(options)
    elif min_count is not None:
        raise ConfigError("`--min-count` applies to chunks only")
    if space != "chunks" and not queries:
        raise ConfigError(f"{space} are searched by texts. Give a text to search for")
    folder = RunFolder.from_options(options)
    folder.check_unchanged(options)

    def open_model(stage: Phase) -> "Run":
        from pipeline.run.opened import Run

        return Run(folder, replace(options, evaluate=replace(options.evaluate, stage=stage)))

    stage = options.evaluate.stage
    probe = Probe(folder, folder.select_checkpoint(stage).digest if stage else None, open_model)
    if refresh:
        try:
            _ = probe.places if space == "contexts" else probe.index
        except (FileNotFoundError, ValueError) as error:
            from pipeline.run.index.build import build_index
            from pipeline.run.index.storage import list_changed_options

            log.info("building the index: %s", str(error).partition(". ")[0])
            wanted = replace(options.index, space=space)
            for key, before in list_changed_options(folder, wanted).items():
                now = getattr(wanted, key)
                log.warning("index.%s was %s, and is now %s", key, format_value(before), format_value(now))
            build_index(replace(options, index=wanted))
    if like or minus or plus:
        return probe.analogy(like, minus, plus, count, min_count)
    if space == "contexts":
        return probe.contexts(*queries, count=count)
    find = probe.expected if space == "predictions" else probe.neighbours
    return find(*queries, count=count, min_count=min_count)
