"""The flows: one for each stage, and `haed`, which runs all stages in order.

Training flows take a preset and changes to it. The others take the name of a run; see `flows.forms`. Flows exchange
names and paths, never tensors. Stages keep their results on disk; Prefect caches nothing.
"""

import logging
from dataclasses import dataclass, field

from flows.forms import Asked, configured, shares
from flows.page.live import Story
from flows.page.stages import Stages
from flows.probing import analyse, following, index, neighbours
from flows.reading import compare, evaluate, figure, post_report, report, sample, show_places
from flows.training import experiment, finetune, pretrain, shard, train
from haed.options import SYSTEMS
from pipeline.config import check_training
from pipeline.kinds import likelihood, phases
from pipeline.run.files import Evaluation, read_as
from pipeline.run.folder import RunFolder
from pipeline.run.memory import check_system
from pipeline.run.shards import check_corpus, check_split
from pipeline.run.spaces.stored import metric_of

log = logging.getLogger(__name__)
TRAINS = {"pretrain": pretrain, "finetune": finetune, "train": train}


@dataclass
class Everything:
    """The result of a complete run: its folder, report, evaluation, and warnings about its training."""

    run: str
    report: str
    evaluation: Evaluation
    remarks: list[str] = field(default_factory=list)


def _told(found: Everything) -> str:
    """Return the headline metric and the training warnings, in one line."""
    return "; ".join([figure(found.evaluation), *found.remarks])


@configured(
    "haed",
    "preset name source seconds sources model batch optimizer launcher overrides",
    _told,
)
def everything(asked: Asked) -> Everything:
    """Run all stages in order: shard, pretrain, finetune, evaluate, index, sample, report. Finished stages are skipped.

    A token model is trained in a single phase, `train`, and has no index.
    """
    options = asked.options
    for phase in phases(options.model.kind):
        check_training(phase, options)  # not after the corpus was sharded
    check_system(options)
    check_corpus(options)
    show_places(options)
    with Story(options, shares(options, phases(options.model.kind))):
        found = _all_stages(asked)
    post_report(options)
    return found


def _all_stages(asked: Asked) -> Everything:
    preset, given, options = asked.preset, asked.overrides, asked.options
    stages, chunks = Stages(options), SYSTEMS[options.model.kind].chunks
    if not chunks:
        log.info("model.kind=%s: trained end to end, without a phase one; no index of chunks", options.model.kind)
    with stages.begin("shard"):
        corpus = shard(preset, overrides=given)
    splits = {"evaluate.split": options.evaluate.split} | ({"index.split": options.index.split} if chunks else {})
    for option, split in splits.items():
        check_split(corpus.splits[split].chunks, corpus.folder, option, split)
    trained = []
    for phase in phases(options.model.kind):
        with stages.begin(phase):
            trained.append(TRAINS[phase](preset, overrides=given))
    folder, limits = RunFolder.of(options), options.evaluate
    run = str(folder.path)
    whose = likelihood(options, folder.trained_phase(limits.stage))
    if folder.is_made("evaluation.json", options, split=limits.split, likelihood=whose):
        stages.skip("evaluate")
    else:
        with stages.begin("evaluate", stages.of_evaluation(corpus.splits[limits.split].chunks)):
            evaluate(run)
    wanted = {name: getattr(options.index, name) for name in ("split", "min_count", "max_chunks")}
    wanted["metric"] = metric_of(options.index, "chunks")
    if chunks and folder.is_made("index/chunks/meta.json", options, **wanted):
        stages.skip("index")
    elif chunks:
        with stages.begin("index"):
            index(run)
    with stages.begin("sample"):
        sample(run)
    with stages.begin("report"):
        written = report(run)
    remarks = [each.remark for each in trained if each.remark]
    return Everything(run, written, read_as(Evaluation, folder.path / "evaluation.json"), remarks)


FLOWS = (
    *(everything, shard, pretrain, finetune, train, evaluate, sample, report, compare),
    *(following, index, neighbours, analyse, experiment),
)
