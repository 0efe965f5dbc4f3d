"""The flows: one for each stage, and `haed`, which runs them all in order.

Those that train take a preset and what to change of it, the others the name of a run; see `flows.forms`. They pass names and
paths to each other, never tensors. What they write is kept by the stages, on the disk; nothing is cached by Prefect.
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
    """What a whole run left: its folder, its report, its evaluation, and what is wrong with its training, if anything is."""

    run: str
    report: str
    evaluation: Evaluation
    remarks: list[str] = field(default_factory=list)


def _told(found: Everything) -> str:
    """What came of it: bits, and what is wrong with the training behind them."""
    return "; ".join([figure(found.evaluation), *found.remarks])


@configured(
    "haed",
    "preset name source seconds sources model batch optimizer launcher overrides",
    _told,
)
def everything(asked: Asked) -> Everything:
    """All of it, in order: shard, pretrain, finetune, evaluate, index, sample, report. What is finished is not done again.

    A model of tokens is trained in one phase, `train`, and has no index.
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
