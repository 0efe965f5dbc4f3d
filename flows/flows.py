"""The flows: one for each stage, and `haed`, which runs all stages in order.

Training flows take a preset and changes to it. The others take the name of a run; see `flows.forms`. Flows exchange
names and paths, never tensors. Stages keep their results on disk; Prefect caches nothing.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flows.artifacts import PipelineArtifact
from flows.forms import FormSubmission, config_flow, divide_training_time
from flows.probing import analyse, index, neighbours, next_chunks
from flows.reading import compare, evaluate, format_headline_metric, post_report, report, sample, show_places
from flows.training import finetune, pretrain, shard, train
from haed.options import SYSTEMS
from pipeline.config import Options, PhaseOptions, check_training, requested_likelihood, training_phases
from pipeline.console import format_duration
from pipeline.run.files import Evaluation, read_as
from pipeline.run.index.storage import choose_metric
from pipeline.run.memory import check_system
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.shards import check_corpus, check_split

log = logging.getLogger(__name__)
TRAINS = {"pretrain": pretrain, "finetune": finetune, "train": train}
_BACKWARD = 3  # times as long as scoring a chunk does learning from it take


@dataclass
class PipelineResult:
    """The result of a complete run: its folder, report, evaluation, and warnings about its training."""

    run: str
    report: str
    evaluation: Evaluation
    remarks: list[str] = field(default_factory=list)


def _summarize_result(found: PipelineResult) -> str:
    """Return the headline metric and the training warnings, in one line."""
    return "; ".join([format_headline_metric(found.evaluation), *found.remarks])


@config_flow(
    "haed",
    "preset name source seconds sources model batch optimizer launcher overrides",
    _summarize_result,
)
def run_pipeline(asked: FormSubmission) -> PipelineResult:
    """Run all stages in order: shard, pretrain, finetune, evaluate, index, sample, report. Finished stages are skipped.

    A token model is trained in a single phase, `train`, and has no index.
    """
    options = asked.options
    for phase in training_phases(options.model.kind):
        check_training(phase, options)  # not after the corpus was sharded
    check_system(options)
    check_corpus(options)
    show_places(options)
    with PipelineArtifact(options, divide_training_time(options, training_phases(options.model.kind))):
        found = _run_stages(asked)
    post_report(options)
    return found


def _run_stages(asked: FormSubmission) -> PipelineResult:
    preset, given, options = asked.preset, asked.overrides, asked.options
    stages, chunks = StageLog(options), SYSTEMS[options.model.kind].chunks
    if not chunks:
        log.info("model.kind=%s: trained end to end, without a phase one; no index of chunks", options.model.kind)
    with stages.begin_stage("shard"):
        corpus = shard(preset, overrides=given)
    splits = {"evaluate.split": options.evaluate.split} | ({"index.split": options.index.split} if chunks else {})
    for option, split in splits.items():
        check_split(corpus.splits[split].chunks, corpus.folder, option, split)
    trained = []
    for phase in training_phases(options.model.kind):
        with stages.begin_stage(phase):
            trained.append(TRAINS[phase](preset, overrides=given))
    folder, limits = RunFolder.from_options(options), options.evaluate
    run = str(folder.path)
    whose = requested_likelihood(options, folder.trained_phase(limits.stage))
    if folder.is_current("evaluation.json", options, split=limits.split, likelihood=whose):
        stages.skip_stage("evaluate")
    else:
        with stages.begin_stage("evaluate", stages.estimate_evaluation_seconds(corpus.splits[limits.split].chunks)):
            evaluate(run)
    wanted = {name: getattr(options.index, name) for name in ("split", "min_count", "max_chunks")}
    wanted["metric"] = choose_metric(options.index, "chunks")
    if chunks and folder.is_current("index/chunks/meta.json", options, **wanted):
        stages.skip_stage("index")
    elif chunks:
        with stages.begin_stage("index"):
            index(run)
    with stages.begin_stage("sample"):
        sample(run)
    with stages.begin_stage("report"):
        written = report(run)
    remarks = [each.remark for each in trained if each.remark]
    return PipelineResult(run, written, read_as(Evaluation, folder.path / "evaluation.json"), remarks)


class StageLog:
    """A log of the stages of a run. It begins with a plan of all stages."""

    def __init__(self, options: Options) -> None:
        self._options, kind = options, options.model.kind
        self._phases = training_phases(kind)
        index = ["index"] if SYSTEMS[kind].chunks else []
        self._names = ["shard", *self._phases, "evaluate", *index, "sample", "report"]
        log.info("%s", self.describe_plan())

    def describe_plan(self) -> str:
        """Return a sentence with the stages and the training budget of each phase."""
        budgets = [f"{phase} {format_budget(getattr(self._options, phase))}" for phase in self._phases]
        others = [name for name in self._names if name not in self._phases]
        return (
            f"{len(self._names)} stages: {', '.join(self._names)}. Training takes what its budget says ({', '.join(budgets)}), "
            f"and validations and checkpoints beside; how long {', '.join(others[:-1])} and {others[-1]} take is not known "
            "before: that goes by the sizes of corpus and model"
        )

    @contextmanager
    def begin_stage(self, name: str, about: float | None = None) -> Iterator[None]:
        """Log the start of a stage and, at its end, its duration.

        Args:
            name: of the stage.
            about: expected seconds, if known.
        """
        number = self._names.index(name) + 1
        if name in self._phases:
            expected = f", {format_budget(getattr(self._options, name))} of training"
        else:
            expected = "" if about is None else f", about {format_duration(about)}"
        log.info("stage %d of %d: %s%s", number, len(self._names), name, expected)
        began = time.monotonic()
        yield
        log.info(
            "stage %d of %d: %s took %s", number, len(self._names), name, format_duration(time.monotonic() - began)
        )

    def skip_stage(self, name: str) -> None:
        """Log that a stage was finished before."""
        log.info("stage %d of %d: %s, done before", self._names.index(name) + 1, len(self._names), name)

    def estimate_evaluation_seconds(self, chunks: int) -> float | None:
        """Return the expected seconds for scoring `chunks` chunks, from the training rate; None if that is unknown."""
        options, folder = self._options, RunFolder.from_options(self._options)
        rates = [
            record.get("chunks_per_second")
            for record in read_metrics(folder.phase_folder(self._phases[-1]) / "metrics.jsonl")
        ]
        known = [rate for rate in rates if rate]
        if not known:
            return None
        context = options.batch.context
        stride = min(options.evaluate.stride or max(1, context // 2), context)
        return chunks * math.ceil(context / stride) / (_BACKWARD * known[-1])


def format_budget(limits: PhaseOptions) -> str:
    """Return the limits of a phase as text. The first limit reached ends the phase."""
    found = [
        *([f"{limits.seconds:g} s"] if limits.seconds else []),
        *([f"{limits.steps:,} steps"] if limits.steps else []),
        *([f"{limits.epochs:g} epochs"] if limits.epochs else []),
    ]
    return " or ".join(found) or "without a limit"


FLOWS = (
    *(run_pipeline, shard, pretrain, finetune, train, evaluate, sample, report, compare),
    *(next_chunks, index, neighbours, analyse),
)
