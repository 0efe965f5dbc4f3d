"""The flows that shard and train. They take a preset and changes to it; their forms differ only in their fields."""

import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from prefect.events import emit_event
from prefect.runtime import deployment, flow_run

from data.filesystem import FLOW_RUN
from data.sources.source import source_title
from flows.artifacts import (
    LivePhaseArtifact,
    LiveShardingArtifact,
    artifact_key,
    post_table,
    update_parent_progress,
)
from flows.devices import acquire_device
from flows.forms import FormSubmission, config_flow, is_inner
from flows.lifecycle import stop_on_signals
from flows.mappers import as_tasks
from flows.reading import show_places, show_report
from pipeline.config import Phase, training_phases
from pipeline.run.metrics import Record
from pipeline.run.shards import SplitSize, split_sizes

if TYPE_CHECKING:
    from pipeline.training.trainer import TrainingResult

FIELDS = "preset name source seconds phase batch model iem optimizer validation checkpoint launcher overrides"


@dataclass
class ShardedCorpus:
    """The location of a corpus and the sizes of its splits."""

    folder: str
    splits: dict[str, SplitSize]


def _summarize_corpus(found: ShardedCorpus) -> str:
    return f"{found.folder}: {', '.join(f'{size.chunks:,} chunks {split}' for split, size in found.splits.items())}"


@config_flow("shard", "preset source sources chunker sharding launcher overrides", _summarize_corpus)
def shard(asked: FormSubmission) -> ShardedCorpus:
    """Cut a source into WebDataset shards with a manifest, one task per part. Finished parts are not repeated."""
    from pipeline.run.shards import shard_source as run_stage

    with LiveShardingArtifact(source_title(asked.options.source)) as live:
        corpus = run_stage(asked.options, as_tasks(asked.options), live)
    found = ShardedCorpus(corpus.location, split_sizes(corpus))
    rows = [{"split": split, **asdict(size)} for split, size in found.splits.items()]
    post_table(rows, artifact_key("corpus", Path(found.folder).name), found.folder)
    _emit_completed("shard", found.folder, asked)
    return found


def _emit_completed(stage: str, what: str, asked: FormSubmission) -> None:
    """Emit the event `haed.STAGE.completed`, on which automations can act; see `haed serve --chain`.

    Stages within the flow `haed` emit none. `haed.next` of its resource is the following training stage of this kind of
    model.
    """
    if is_inner():
        return
    follows = dict(pairwise(("shard", *training_phases(asked.options.model.kind)))).get(stage, "")
    known = {"haed.deployment": deployment.name or "", "haed.next": follows}
    emit_event(
        f"haed.{stage}.completed",
        {"prefect.resource.id": f"haed.{stage}.{what}", **known},
        payload={"preset": asked.preset, "overrides": asked.overrides},
    )


def _train_phase(phase: Phase, asked: FormSubmission) -> "TrainingResult":
    """Train a phase with a live artifact. Save if it is stopped. Post a report of the run afterwards."""
    from pipeline.training.stages import check_run, run_phase

    options = asked.options
    check_run(phase, options)
    os.environ[FLOW_RUN] = str(flow_run.name)
    if not is_inner():
        show_places(options)
    with stop_on_signals() as stop, acquire_device(options, stop), LivePhaseArtifact(phase, options) as live:

        def listen(record: Record) -> None:
            live(record)
            update_parent_progress(phase, record)

        found = run_phase(phase, options, stop, listen)
    show_report(options)
    _emit_completed(phase, options.name, asked)
    return found


def _summarize_training(found: "TrainingResult") -> str:
    from pipeline.training.stages import format_outcome

    remark = f"; {found.remark}" if found.remark else ""
    return format_outcome(found).removeprefix(f"{found.phase}: ") + remark


@config_flow("pretrain", FIELDS, _summarize_training)
def pretrain(asked: FormSubmission) -> "TrainingResult":
    """Train phase one, in the space of chunk embeddings. An existing run continues from its last checkpoint."""
    return _train_phase("pretrain", asked)


@config_flow("finetune", FIELDS, _summarize_training, preset=None)
def finetune(asked: FormSubmission) -> "TrainingResult":
    """Train phase two, for exact likelihood, from phase one. An existing run continues from its last checkpoint."""
    return _train_phase("finetune", asked)


@config_flow("train", FIELDS, _summarize_training)
def train(asked: FormSubmission) -> "TrainingResult":
    """Train end to end, without a phase one. An existing run continues from its last checkpoint."""
    return _train_phase("train", asked)
