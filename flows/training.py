"""The flows that shard and train: they take a preset and what to change of it, and have the same form but for its fields."""

import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from prefect.artifacts import create_table_artifact
from prefect.events import emit_event
from prefect.runtime import deployment, flow_run

from data.durable import FLOW_RUN
from data.sources.source import title
from flows.devices import turn
from flows.forms import Asked, configured, is_inner
from flows.live import Live, LiveShards, key
from flows.mappers import as_tasks
from flows.reading import show_report
from flows.stopping import stopping
from pipeline.kinds import phases
from pipeline.options import Phase
from pipeline.run.shards import Size, sizes

FIELDS = "preset name source seconds phase batch model iem optimizer validation checkpoint launcher overrides"


@dataclass
class Sharded:
    """A corpus: where it is, and the sizes of its splits."""

    folder: str
    splits: dict[str, Size]


@configured("shard", "preset source sources chunker sharding launcher overrides")
def shard(asked: Asked) -> Sharded:
    """Cuts a source into WebDataset shards with a manifest; a task for every part. What is finished is not done again."""
    from pipeline.run.shards import shard as run_stage

    with LiveShards(title(asked.options.source)) as live:
        corpus = run_stage(asked.options, as_tasks(asked.options), live)
    found = Sharded(corpus.location, sizes(corpus))
    rows = [{"split": split, **asdict(size)} for split, size in found.splits.items()]
    create_table_artifact(rows, key=key("corpus", Path(found.folder).name), description=found.folder)
    _announce("shard", found.folder, asked)
    return found


def _announce(stage: str, what: str, asked: Asked) -> None:
    """An event that automations can wait for: `haed.STAGE.completed`; see `haed serve --chain`. A stage of `haed` tells none.

    `haed.next` of its resource is the stage that follows, of those that a model of this kind is trained in.
    """
    if is_inner():
        return
    follows = dict(pairwise(("shard", *phases(asked.options.model.kind)))).get(stage, "")
    known = {"haed.deployment": deployment.name or "", "haed.next": follows}
    emit_event(
        f"haed.{stage}.completed",
        {"prefect.resource.id": f"haed.{stage}.{what}", **known},
        payload={"preset": asked.preset, "overrides": asked.overrides},
    )


def _train(phase: Phase, asked: Asked) -> str:
    """Trains a phase with a live artifact, saves if it is stopped, and leaves a report of what there is then."""
    from pipeline.train.stages import run_phase

    options = asked.options
    os.environ[FLOW_RUN] = str(flow_run.name)
    with stopping() as stop, turn(options, stop), Live(options.name, phase, getattr(options, phase)) as live:
        found = run_phase(phase, options, stop, live)
    show_report(options)
    _announce(phase, options.name, asked)
    return found.checkpoint


@configured("pretrain", FIELDS)
def pretrain(asked: Asked) -> str:
    """Phase one: learns in the space of chunk embeddings. A run of the same name goes on from its last checkpoint."""
    return _train("pretrain", asked)


@configured("finetune", FIELDS)
def finetune(asked: Asked) -> str:
    """Phase two: trains for exact likelihood from a phase one. A run of the same name goes on from its last checkpoint."""
    return _train("finetune", asked)


@configured("train", FIELDS)
def train(asked: Asked) -> str:
    """Trains end to end, without a phase one. A run of the same name goes on from its last checkpoint."""
    return _train("train", asked)
