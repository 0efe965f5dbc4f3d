"""The flows: one for each command, and `haed`, which runs all stages in order.

Flows that shard and train take a preset and changes to it. The others take the names of runs; see `flows.forms`. Flows
exchange names and paths, never tensors. Stages keep their results on disk; Prefect caches nothing. Artifacts name the
run, phase, step and checkpoint that they are about.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from prefect.runtime import flow_run
from prefect.settings import PREFECT_UI_URL
from pydantic import Field

from data.chunkers import Chunker
from data.filesystem import FLOW_RUN, PICTURE, read_bytes
from data.sources.source import source_title
from flows.artifacts import (
    LiveArtifact,
    PipelineArtifact,
    ShardingStatus,
    artifact_key,
    post_markdown,
    post_table,
    run_artifact_key,
    update_parent_progress,
)
from flows.forms import (
    Count,
    FormSubmission,
    Place,
    Run,
    Split,
    Temperature,
    Words,
    check_all_stages,
    config_flow,
    divide_training_time,
    load_tagged_options,
    stage_flow,
    tag_with_runs,
    unlabel_run,
)
from flows.lifecycle import acquire_device, is_inner, stop_on_signals
from flows.mappers import as_tasks
from flows.sweep import sweep
from haed.options import SYSTEMS
from pipeline.arguments import load_run_options
from pipeline.config import ConfigError, Options, Phase, PhaseOptions, phases_to_train, write_override
from pipeline.console import code_fence, escape_control_characters, format_duration, markdown_code, markdown_text
from pipeline.reporting.findings import precision_table
from pipeline.reporting.rendering import data_uri
from pipeline.reporting.report import summarise_report, write_report
from pipeline.run.analysis_results import Analysis
from pipeline.run.files import Evaluation, Sample, describe_speed, read_as
from pipeline.run.index.chunk_index import ChunkIndex
from pipeline.run.index.queries import PIXELS, Neighbour, Passage, QueryResult
from pipeline.run.index.storage import IndexMetadata, IndexSummary, space_folder
from pipeline.run.metrics import PhaseStatus, Record
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import SplitSize, check_split, shard_source, split_sizes
from pipeline.suggestions import name_flows
from pipeline.web.app import served_page_url, tensorboard_url

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.reporting.comparison import Comparison
    from pipeline.run.opened import NextChunks
    from pipeline.training.trainer import TrainingResult

log = logging.getLogger(__name__)
_FIELDS = "preset name source seconds phase batch model iem optimizer validation checkpoint launcher overrides"


def format_headline_metric(evaluation: Evaluation) -> str:
    """Return the headline metric of an evaluation, with its split, phase and step."""
    metric = evaluation.headline
    return f"{metric.value:.3f} {metric.unit}, {evaluation.split}, {evaluation.stage} step {evaluation.step:,}"


def describe_origin(options: Options, stage: str, step: int, digest: str) -> str:
    """Return the origin of results: run, phase, step, checkpoint and folder."""
    folder = RunFolder.from_options(options).path.resolve()
    return f"run {options.name} · {stage} step {step:,} · checkpoint {digest[:12] or 'unknown'} · {folder}"


def describe_checkpoint(options: Options) -> str:
    """Return the origin (see `describe_origin`) for the checkpoint that stages read."""
    checkpoint = RunFolder.from_options(options).select_checkpoint(options.evaluate.stage)
    return describe_origin(options, checkpoint.phase, checkpoint.step, checkpoint.digest)


def show_places(options: Options) -> None:
    """Post the locations of the run folder, its report, its page and TensorBoard, before training starts."""
    folder = RunFolder.from_options(options).path.resolve()
    lines = [f"Run folder: {markdown_code(str(folder))}"]
    lines.append(f"Report: {markdown_code(str(folder / 'report.html'))}, after the first phase")
    # Beside the pages of runs by whatever name the server was reached.
    if interface := "/v2" if os.environ.get("HAED_PAGES") else PREFECT_UI_URL.value():
        lines[-1] += f", and [as an artifact]({interface}/artifacts/key/{run_artifact_key('report', options)})"
    if page := served_page_url(RunFolder.from_options(options)):
        lines.append(f"[Page of the run]({page}): state, curves, downloads, and queries to the model")
    if link := tensorboard_url(options.name):
        lines.append(f"Curves during training: [TensorBoard of this run]({link})")
    post_markdown("\n\n".join(lines), run_artifact_key("places", options), f"{options.name}: links")


def show_report(options: Options) -> str:
    """Write the report of a run, post its summary as an artifact, and return its path."""
    path = write_report(options)
    post_report(options)
    return str(path)


def post_report(options: Options) -> None:
    """Post the summary of a run's report as an artifact of this flow run."""
    folder = RunFolder.from_options(options)
    origin = describe_checkpoint(options) if folder.is_trained() else f"run {options.name}, not trained yet"
    text = f"{summarise_report(options)}\n\n{markdown_text(origin)}"
    if page := served_page_url(folder):
        text += f" · [page of the run]({page}), with the report, downloads and queries to the model"
    post_markdown(f"{text}\n", run_artifact_key("report", options), f"report of {origin}")


@dataclass
class ShardedCorpus:
    """The location of a corpus and the sizes of its splits."""

    folder: str
    splits: dict[str, SplitSize]


def _summarize_corpus(corpus_sizes: ShardedCorpus) -> str:
    return f"{corpus_sizes.folder}: {', '.join(f'{size.chunks:,} chunks {split}' for split, size in corpus_sizes.splits.items())}"


@config_flow("shard", "preset source sources chunker sharding launcher overrides", _summarize_corpus)
def shard(form: FormSubmission) -> ShardedCorpus:
    """Cut a source into WebDataset shards with a manifest, one task per part. Finished parts are not repeated."""
    title = source_title(form.options.source)
    with LiveArtifact(artifact_key("live", title, "shard"), ShardingStatus(f"{title}: shard")) as live:
        corpus = shard_source(form.options, as_tasks(form.options), live)
    corpus_sizes = ShardedCorpus(corpus.location, split_sizes(corpus))
    rows = [{"split": split, **asdict(size)} for split, size in corpus_sizes.splits.items()]
    post_table(rows, artifact_key("corpus", Path(corpus_sizes.folder).name), corpus_sizes.folder)
    return corpus_sizes


def _train_phase(phase: Phase, form: FormSubmission) -> "TrainingResult":
    """Train a phase with a live artifact. Save if it is stopped. Post a report of the run afterwards."""
    from pipeline.training.stages import check_run, run_phase

    options = form.options
    check_run(phase, options)
    os.environ[FLOW_RUN] = str(flow_run.name)
    status = PhaseStatus(f"{options.name}: {phase}", getattr(options, phase))
    live_artifact = LiveArtifact(f"{run_artifact_key('live', options)}-{phase}", status)
    with ExitStack() as held:
        if not is_inner():  # the outer flow has the run and its devices
            held.enter_context(RunFolder.from_options(options).reserve())
            show_places(options)
        stop = held.enter_context(stop_on_signals())
        if not is_inner():
            held.enter_context(acquire_device(options, stop))
        live = held.enter_context(live_artifact)

        def listen(record: Record) -> None:
            live(record)
            update_parent_progress(phase, record)

        result = run_phase(phase, options, stop, listen)
    show_report(options)
    return result


def _summarize_training(result: "TrainingResult") -> str:
    from pipeline.training.stages import format_outcome

    remark = f"; {result.remark}" if result.remark else ""
    return format_outcome(result).removeprefix(f"{result.phase}: ") + remark


@config_flow("pretrain", _FIELDS, _summarize_training)
def pretrain(form: FormSubmission) -> "TrainingResult":
    """Train phase one, in the space of chunk embeddings. An existing run continues from its last checkpoint."""
    return _train_phase("pretrain", form)


@config_flow("finetune", _FIELDS, _summarize_training, preset=None)
def finetune(form: FormSubmission) -> "TrainingResult":
    """Train phase two, for exact likelihood, from phase one. An existing run continues from its last checkpoint."""
    return _train_phase("finetune", form)


@config_flow("train", _FIELDS, _summarize_training)
def train(form: FormSubmission) -> "TrainingResult":
    """Train end to end, without a phase one. An existing run continues from its last checkpoint."""
    return _train_phase("train", form)


@stage_flow("evaluate", format_headline_metric)
def evaluate(run: Run, split: Split = None, overrides: Words = []) -> Evaluation:  # noqa: B006
    """Compute the exact bits of a split, with baselines measured on the same bytes.

    Args:
        run: a name under runs, or a folder
        split: the split to score; empty: as in the run, test by default
        overrides: options to change, each key=value, such as evaluate.stage=pretrain
    """
    from pipeline.evaluation.evaluate import evaluate_run as run_stage

    options = load_tagged_options(run, overrides, "evaluate", evaluate__split=split)
    evaluation = run_stage(options)
    metric = evaluation.headline
    origin = describe_origin(options, evaluation.stage, evaluation.step, evaluation.checkpoint)
    scalars = {name: value for name, value in asdict(evaluation).items() if isinstance(value, str | int | float)}
    rows: list[dict[str, Any]] = [{"model": options.name, metric.unit: metric.value} | scalars]
    if evaluation.decoder_metric is not None:
        rows.append({"model": f"{options.name}, decoder alone", metric.unit: evaluation.decoder_metric})
    rows += [
        {"model": item.name, metric.unit: item.bits_per_char, "bits": item.bits, "bits_per_byte": item.bits_per_byte}
        for item in evaluation.baselines
    ]
    table = [
        {name: round(value, 4) if isinstance(value := row.get(name, ""), float) else value for name in rows[0]}
        for row in [rows[0], *sorted(rows[1:], key=lambda row: row[metric.unit])]
    ]
    headline = f"{format_headline_metric(evaluation)}. {evaluation.likelihood_note}"
    post_table(table, run_artifact_key("evaluation", options), headline, origin)
    return evaluation


def _describe_samples(samples: list[Sample]) -> str:
    count = f"{len(samples)} sample{'s' * (len(samples) != 1)}"
    return "; ".join(filter(None, [count, describe_speed(samples)]))


@stage_flow("sample", _describe_samples)
def sample(
    run: Run,
    prompts: Words = [],  # noqa: B006
    prompt_count: Count = None,
    samples: Annotated[int, Field(ge=1, le=64)] = 1,
    temperature: Temperature = None,
    overrides: Words = [],  # noqa: B006
) -> list[Sample]:
    """Continue prompts. An image model completes the lower halves of held-out images.

    Args:
        run: a name under runs, or a folder
        prompts: texts to continue; none: those of sample.prompts, or frequent chunks, which also go into the report
        prompt_count: number of these prompts, or of held-out images; empty: all prompts, or the run's number of images
        samples: continuations of each
        temperature: 0: always the likeliest token; empty: as in the run, 0.8 by default
        overrides: options to change, each key=value, such as sample.chunks=100
    """
    from pipeline.inference import sample as run_stage

    options = load_tagged_options(
        run, overrides, "sample", sample__temperature=temperature, sample__pictures=prompt_count
    )
    folder, origin = RunFolder.from_options(options), describe_checkpoint(options)
    if prompt_count and options.chunker.kind != PIXELS:
        options.sample.prompts = (options.sample.prompts or [*folder.read_corpus_record().frequent, ""])[:prompt_count]
    written = run_stage(options, prompts or None, samples)
    text = "\n\n".join([*(code_fence(item.prompt + item.text) for item in written), describe_speed(written)])
    grid = folder.path / "samples.png"
    if written and written[0].text == str(grid):
        text = f"![held-out pictures, completed]({data_uri(read_bytes(grid, PICTURE))})"
    drawn = f"temperature {options.sample.temperature:g}, seed {options.sample.seed}"
    text += f"\n\n{markdown_text(f'{drawn}; {origin}')}"
    post_markdown(text, run_artifact_key("samples", options), f"samples, {drawn}, of {origin}")
    return written


@stage_flow("compare", lambda comparison: f"{comparison.verdict_summary} {comparison.page}")
def compare(runs: Annotated[Words, Field(min_length=1)], runs_dir: Place = "runs") -> "Comparison":
    """Compare several runs in a table and curves, against steps, seconds and model FLOPs (the paper's Figure 4).

    Args:
        runs: names under runs_dir, or folders
        runs_dir: where runs are looked for by name, and the comparison is written
    """
    from pipeline.reporting.comparison import choose_output, format_markdown
    from pipeline.reporting.comparison import compare_runs as run_stage

    runs = [unlabel_run(run) for run in runs if run.strip()]
    if not runs:
        raise ConfigError("no run is named. Give the names of the runs to compare")
    tag_with_runs(runs, runs_dir)
    options = [load_run_options(run, [write_override("runs_dir", runs_dir)]) for run in runs]
    comparison = run_stage(runs, runs_dir, choose_output(runs_dir))
    picture = data_uri(read_bytes(comparison.picture, PICTURE))
    trained = [each for each in options if RunFolder.from_options(each).is_trained()]
    places = "\n".join(f"- {markdown_text(describe_checkpoint(each))}" for each in trained)
    text = f"{format_markdown(comparison)}\n\n![curves]({picture})\n\n{places}"
    names = "-".join(sorted(each.name for each in options))
    digits = hashlib.sha256("\n".join(sorted(runs)).encode()).hexdigest()[:4]
    post_markdown(text, f"{artifact_key('comparison', names)[:60]}-{digits}", ", ".join(runs))
    return comparison


@stage_flow("report", str)
def report(run: Run, overrides: Words = []) -> str:  # noqa: B006
    """Write the report of a run, and post its summary as an artifact.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value
    """
    return show_report(load_tagged_options(run, overrides, "report"))


@stage_flow("next", lambda predictions: f"after {len(predictions)} prompt{'s' if predictions[1:] else ''}")
def next_chunks(
    run: Run,
    prompts: Words = [],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=1000)] = 10,
    overrides: Words = [],  # noqa: B006
) -> "list[NextChunks]":
    """Compute the likeliest next chunks after each prompt, with their probabilities, as a table.

    Args:
        run: a name under runs, or a folder
        prompts: texts, where trailing white space matters; none: the start of a document
        count: chunks after each prompt
        overrides: options to change, each key=value, such as evaluate.likelihood=decoder
    """
    from pipeline.inference import next_chunks as run_stage
    from pipeline.inference import prediction_heading, prediction_rows

    options = load_tagged_options(run, overrides, "next")
    predictions = run_stage(options, prompts, count)
    table = [{"prompt": prediction_heading(item)} | row for item in predictions for row in prediction_rows(item)]
    post_table(table, run_artifact_key("next", options), f"next chunks, by {describe_checkpoint(options)}")
    return predictions


def _summarize_index(summary: IndexSummary) -> str:
    from pipeline.run.index.build import describe_index

    origin = f"of {summary.split}, {summary.stage} step {summary.step:,}"
    return "; ".join([*describe_index(summary).splitlines(), origin])


@stage_flow("index", _summarize_index)
def index(
    run: Run,
    space: Literal["chunks", "contexts"] | None = None,
    split: Split = None,
    overrides: Words = [],  # noqa: B006
) -> IndexSummary:
    """Build a FAISS index of the embeddings of all distinct chunks, or of the model's states throughout the text.

    Args:
        run: a name under runs, or a folder
        space: chunks, or contexts, which are positions in the text; empty: as in the run, chunks by default
        split: the split to index; empty: as in the run, train by default
        overrides: options to change, each key=value, such as index.kind=hnsw
    """
    from pipeline.run.index.build import build_index as run_stage

    return run_stage(load_tagged_options(run, overrides, "index", index__split=split, index__space=space))


@stage_flow("neighbours", lambda results: f"of {len(results)} {'queries' if results[1:] else 'query'}")
def neighbours(
    run: Run,
    queries: Words = [],  # noqa: B006
    space: Literal["chunks", "contexts", "predictions"] = "chunks",
    count: Annotated[int | None, Field(ge=1, le=1000)] = None,
    min_count: Annotated[int | None, Field(ge=1, le=10**12)] = None,
    overrides: Words = [],  # noqa: B006
) -> list[QueryResult]:
    """Find the nearest chunks or passages in an index, as a table, and as an image if they are chunks of pixels.

    Args:
        run: a name under runs, or a folder
        queries: chunks, or texts for the other spaces, where trailing white space matters; for images, colours such as
            #4080c0, or PICTURE:CHUNK, counted from 0; none: chunks of the corpus
        space: chunks similar to a query, contexts similar to the end of a text, or predictions of chunks after a text
        count: neighbours of each query; empty: 8; fewer if there are no more, which is noted
        min_count: least occurrences of a chunk in the results; empty: those of a known chunk; 1: all
        overrides: options to change, each key=value, such as runs_dir=/data/runs
    """
    from pipeline.inference import query_index
    from pipeline.reporting import plots

    options = load_tagged_options(run, overrides, "neighbours")
    typed = [query for query in queries if query]
    results = query_index(options, space=space, queries=typed, count=count, min_count=min_count)
    folder = RunFolder.from_options(options)
    meta = read_as(IndexMetadata, space_folder(folder, "contexts" if space == "contexts" else "chunks") / "meta.json")
    nothing = "" if typed else "no query was given, so these are frequent chunks; "
    description = f"{nothing}{results.summary}; by {describe_origin(options, meta.stage, meta.step, meta.checkpoint)}"
    notes: list[dict[str, Any]] = [{} for _ in results]
    if space == "chunks":
        opened, chunker = ChunkIndex(folder, meta.checkpoint), folder.load_chunker()
        notes = [{"note": _note_query(item, opened, chunker)} for item in results]
    rows = [
        note | _neighbour_row(item, each, results.score)
        for item, note in zip(results, notes, strict=True)
        for each in item.neighbours
    ]
    post_table(rows, run_artifact_key("neighbours", options), f"neighbours: {description}")
    if picture := plots.draw_neighbours(results):
        text = f"![queries and their neighbours, with scores]({data_uri(picture)})\n\n{markdown_text(description)}"
        post_markdown(text, run_artifact_key("neighbours-drawn", options), f"neighbours: {description}")
    return list(results)


@stage_flow("analyse", lambda analysis: f"{len(analysis.findings)} findings, {analysis.stage} step {analysis.step:,}")
def analyse(run: Run, overrides: Words = []) -> Analysis:  # noqa: B006
    """Analyse the chunk embeddings: use and spelling, intrinsic checks with baselines, drift, a map.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value, such as analyse.against=other
    """
    from pipeline.analysis.stage import analyse_run as run_stage

    options = load_tagged_options(run, overrides, "analyse")
    analysis = run_stage(options)
    folder, origin = Path(analysis.folder), describe_origin(options, analysis.stage, analysis.step, analysis.checkpoint)
    if analysis.intrinsic is not None:
        table = precision_table(analysis.intrinsic)
        rows = [dict(zip(table.titles, row, strict=True)) for row in table.rows]
        post_table(rows, run_artifact_key("analysis", options), f"precision@10 of words of a kind, by {origin}")
    sentences = [*analysis.findings, *(f"note: {note}" for note in analysis.notes)]
    lines = "\n".join(f"- {markdown_text(name_flows(sentence))}" for sentence in sentences)
    pictures = "\n\n".join(
        f"![{markdown_text(Path(name).stem)}]({data_uri(read_bytes(folder / name, PICTURE))})"
        for name in analysis.files
        if name.endswith(".png")
    )
    place = f"Interactive map: {markdown_code(str(folder.resolve() / 'map.html'))}"
    text = f"{lines}\n\n{markdown_text(origin)}\n\n{place}\n\n{pictures}\n"
    post_markdown(text, run_artifact_key("analysis-drawn", options), f"analysis of the embeddings, by {origin}")
    return analysis


def _neighbour_row(item: QueryResult, near: Neighbour, score: str) -> dict[str, Any]:
    """Return the table row of a neighbour. The UI does not wrap lines, so what may be long comes last."""
    row = {"query": escape_control_characters(item.query), score: round(near.score, 3)}
    text = escape_control_characters(near.text)
    if isinstance(near, Passage):
        after = escape_control_characters(near.after)
        return row | {"document": near.name, "byte": near.offset, "before": text, "after": after}
    return row | {"count": near.count, "neighbour": text}


def _note_query(item: QueryResult, index: ChunkIndex, chunker: Chunker) -> str:
    """Return how often a query chunk occurs in the indexed split, and whether it was cut into several chunks."""
    chunk = bytes.fromhex(item.hex)
    row = index.find_row(chunk)
    split = index.meta.split
    notes = [f"not in {split}" if row is None else f"{int(index.chunks.counts[row]):,} times in {split}"]
    if chunker.name != PIXELS:
        if len(pieces := chunker.cut_text(chunk)) > 1:
            cut = ", ".join(escape_control_characters(piece.decode(errors="backslashreplace")) for piece in pieces)
            notes.append(f"{len(pieces)} chunks ({cut}), embedded as one")
    return "; ".join(notes)


_PHASE_FLOWS = {"pretrain": pretrain, "finetune": finetune, "train": train}


@dataclass
class PipelineResult:
    """The result of a complete run: its folder, report, evaluation, and warnings about its training."""

    run: str
    report: str
    evaluation: Evaluation
    remarks: list[str] = field(default_factory=list)


@config_flow(
    "haed",
    "preset name source seconds pretrain_seconds finetune_seconds sources model batch optimizer launcher overrides",
    lambda result: "; ".join([format_headline_metric(result.evaluation), *result.remarks]),
)
def run_pipeline(form: FormSubmission) -> PipelineResult:
    """Run all stages in order: shard, pretrain, finetune, evaluate, index, sample, report.

    A stage whose result is up to date is skipped, but for the last two. A token model is trained in a single phase,
    `train`, and has no index.
    """
    options = form.options
    check_all_stages(options)
    os.environ[FLOW_RUN] = str(flow_run.name)
    with RunFolder.from_options(options).reserve():
        show_places(options)
        with PipelineArtifact(options, divide_training_time(options, phases_to_train(options))):
            result = _run_stages(form)
    post_report(options)
    return result


def _run_stages(form: FormSubmission) -> PipelineResult:
    preset, overrides, options = form.preset, form.overrides, form.options
    stages, chunks = StageLog(options), SYSTEMS[options.model.kind].chunks
    if not chunks:
        log.info(
            "model.kind=%s is trained end to end, without a phase one. There is no index of chunks", options.model.kind
        )
    with stages.begin_stage("shard"):
        corpus = shard(preset, overrides=overrides)
    splits = {"evaluate.split": options.evaluate.split} | ({"index.split": options.index.split} if chunks else {})
    for option, split in splits.items():
        check_split(corpus.splits[split].chunks, corpus.folder, option, split)
    folder, trained = RunFolder.from_options(options), []
    run = str(folder.path)
    with ExitStack() as held:
        with stop_on_signals() as stop:  # only while it waits is a signal a request to stop
            held.enter_context(acquire_device(options, stop))  # an evaluation would slow down another run's training
        for phase in phases_to_train(options):
            with stages.begin_stage(phase):
                trained.append(_PHASE_FLOWS[phase](preset, overrides=overrides))
        results = [(evaluate, "evaluation.json")]
        if chunks:
            space = "contexts" if options.index.space == "contexts" else "chunks"
            results.append((index, f"index/{space}/meta.json"))
        for stage, file in results:
            if folder.is_current(file, options, stage.name):
                stages.skip_stage(stage.name)
                continue
            with stages.begin_stage(stage.name):
                stage(run)
        with stages.begin_stage("sample"):
            sample(run)
        with stages.begin_stage("report"):
            written = report(run)
    remarks = [each.remark for each in trained if each.remark]
    return PipelineResult(run, written, read_as(Evaluation, folder.path / "evaluation.json"), remarks)


class StageLog:
    """A log of the stages of a run. It begins with a plan of all stages."""

    def __init__(self, options: Options) -> None:
        self._budgets = {phase: format_budget(getattr(options, phase)) for phase in phases_to_train(options)}
        index = ["index"] if SYSTEMS[options.model.kind].chunks else []
        names = ["shard", *self._budgets, "evaluate", *index, "sample", "report"]
        self._titles = {name: f"stage {number} of {len(names)}: {name}" for number, name in enumerate(names, 1)}
        log.info("%s", self.describe_plan())

    def describe_plan(self) -> str:
        """Return a sentence with the stages and the training budget of each phase."""
        budgets = [f"{phase} {budget}" for phase, budget in self._budgets.items()]
        others = [name for name in self._titles if name not in self._budgets]
        return (
            f"{len(self._titles)} stages: {', '.join(self._titles)}. Training takes its budget ({', '.join(budgets)}), "
            f"plus validations and checkpoints. The time of {', '.join(others[:-1])} and {others[-1]} depends "
            "on the sizes of corpus and model"
        )

    @contextmanager
    def begin_stage(self, name: str) -> Iterator[None]:
        """Log the start of a stage and, at its end, its duration."""
        expected = f", {self._budgets[name]} of training" if name in self._budgets else ""
        log.info("%s%s", self._titles[name], expected)
        began = time.monotonic()
        yield
        log.info("%s took %s", self._titles[name], format_duration(time.monotonic() - began))

    def skip_stage(self, name: str) -> None:
        """Log that a stage was finished before."""
        log.info("%s, already done", self._titles[name])


def format_budget(limits: PhaseOptions) -> str:
    """Return the limits of a phase as text. The first limit reached ends the phase."""
    formats = {"seconds": "{:g} s", "steps": "{:,} steps", "epochs": "{:g} epochs"}
    texts = [text.format(limit) for name, text in formats.items() if (limit := getattr(limits, name))]
    return " or ".join(texts) or "without a limit"


FLOWS = (
    *(run_pipeline, shard, pretrain, finetune, train, evaluate, sample, report, compare),
    *(next_chunks, index, neighbours, analyse, sweep),
)
