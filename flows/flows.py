"""The flows: one for each stage, and `haed`, which runs all stages in order.

Training flows take a preset and changes to it. The others take the name of a run; see `flows.forms`. Flows exchange
names and paths, never tensors. Stages keep their results on disk; Prefect caches nothing.
"""

import logging
from dataclasses import dataclass, field

from flows.forms import FormSubmission, config_flow, divide_training_time
from flows.page.live import PipelineArtifact
from flows.page.stages import StageLog
from flows.probing import analyse, index, neighbours, next_chunks
from flows.reading import compare, evaluate, format_headline_metric, post_report, report, sample, show_places
from flows.training import finetune, pretrain, shard, train
from haed.options import SYSTEMS
from pipeline.config import check_training, requested_likelihood, training_phases
from pipeline.run.files import Evaluation, read_as
from pipeline.run.memory import check_system
from pipeline.run.run_directory import RunFolder
from pipeline.run.shards import check_corpus, check_split
from pipeline.run.spaces.storage import choose_metric

log = logging.getLogger(__name__)
TRAINS = {"pretrain": pretrain, "finetune": finetune, "train": train}


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


FLOWS = (
    *(run_pipeline, shard, pretrain, finetune, train, evaluate, sample, report, compare),
    *(next_chunks, index, neighbours, analyse),
)
