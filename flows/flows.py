"""The flows: one for each stage, and `haed`, which runs them all in order.

Those that train take a preset and what to change of it, the others the name of a run; see `flows.forms`. They pass names and
paths to each other, never tensors. What they write is kept by the stages, on the disk; nothing is cached by Prefect.
"""

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.events import emit_event
from prefect.runtime import flow_run
from pydantic import Field

from data.options import ChunkerOptions, ShardOptions, SourceOptions
from flows.forms import run_name, words
from flows.live import Live, key
from flows.stopping import stopping
from haed.options import IEMOptions, ModelOptions
from pipeline import config
from pipeline.cli import run_options
from pipeline.files import read_json
from pipeline.options import (
    BatchOptions,
    CheckpointOptions,
    FinetuneOptions,
    LauncherOptions,
    OptimizerOptions,
    Options,
    Phase,
    PhaseOptions,
    PretrainOptions,
    TrainOptions,
    ValidationOptions,
)
from pipeline.runs import FLOW_RUN, RunFolder

Words = list[str]
Preset = Annotated[None, Field(title="as the preset")]  # what the form calls a group that stays folded
Seconds = Annotated[float, Field(ge=0)]

for _room in ("pipeline", "data", "haed", "flows"):
    logging.getLogger(_room).setLevel(logging.INFO)


@flow(name="shard", flow_run_name=run_name("shard"))
def shard(
    preset: str = "quickstart",
    source: str = "",
    sources: SourceOptions | Preset = None,
    chunker: ChunkerOptions | Preset = None,
    sharding: ShardOptions | Preset = None,
    launcher: LauncherOptions | Preset = None,
    overrides: Words = [],  # noqa: B006
) -> dict[str, Any]:
    """Cuts a source into WebDataset shards with a manifest; a task for every few parts. What is finished is not done again.

    Args:
        preset: quickstart, wikitext2, paper-wikitext103, paper-imagenet32, or the path of a YAML file
        source: file, folder or URL to read; empty: the preset's
        sources: kind of the source and how it is split
        chunker: how it is cut into chunks
        sharding: size of the shards, and number of worker processes
        launcher: a Dask cluster to work on, if any
        overrides: further options, each key=value as on the command line; these come last
    """
    from flows.sharding import as_tasks
    from pipeline.sharding import shard as run_stage
    from pipeline.sharding import summary

    groups: dict[str, Any] = {"source": sources, "chunker": chunker, "shard": sharding, "launcher": launcher}
    given = words(preset, "", source, 0, overrides, groups)
    options = config.load(preset, given)
    corpus = run_stage(options, as_tasks(options))
    splits = summary(corpus)
    rows = [{"split": split, **size} for split, size in splits.items()]
    create_table_artifact(rows, key=key("corpus", Path(corpus.location).name), description=corpus.location)
    _announce("shard", corpus.location, preset, given)
    return {"folder": corpus.location, "splits": splits}


def _announce(stage: str, what: str, preset: str, overrides: Words) -> None:
    """An event that automations can wait for: `haed.STAGE.completed`; see `haed serve --chain`."""
    emit_event(
        f"haed.{stage}.completed",
        {"prefect.resource.id": f"haed.{stage}.{what}"},
        payload={"preset": preset, "overrides": overrides},
    )


def _train(phase: Phase, preset: str, given: Words) -> dict[str, Any]:
    """Trains a phase with a live artifact, saves if it is stopped, and leaves a report of what there is then."""
    from pipeline.training import run_phase

    options = config.load(preset, given)
    os.environ[FLOW_RUN] = str(flow_run.name)
    with stopping() as stop, Live(options.name, phase, getattr(options, phase)) as live:
        found = asdict(run_phase(phase, options, stop, live))
    _show_report(options)
    _announce(phase, options.name, preset, given)
    return found


def _show_report(options: Options) -> str:
    from pipeline.report import inline_markdown
    from pipeline.report import report as run_stage

    path = run_stage(options)
    board = os.environ.get("HAED_TENSORBOARD_URL")
    places = f"Run folder: `{path.parent.resolve()}`" + (f" · [TensorBoard]({board})" if board else "")
    text = f"{inline_markdown(RunFolder(path.parent))}\n\n{places}\n"
    create_markdown_artifact(text, key=key("report", options.name), description=f"{options.name}: report")
    return str(path)


def _training(stage: Phase, limits: type[PhaseOptions], what: str) -> Any:
    """The flow of a training stage; all have the same form, but for the options of the phase."""

    def train_stage(
        preset: str = "quickstart",
        name: str = "",
        source: str = "",
        seconds: Seconds = 0,
        phase: PhaseOptions | Preset = None,
        batch: BatchOptions | Preset = None,
        model: ModelOptions | Preset = None,
        iem: IEMOptions | Preset = None,
        optimizer: OptimizerOptions | Preset = None,
        validation: ValidationOptions | Preset = None,
        checkpoint: CheckpointOptions | Preset = None,
        launcher: LauncherOptions | Preset = None,
        overrides: Words = [],  # noqa: B006
    ) -> dict[str, Any]:
        """A run of the same name goes on from its last checkpoint.

        Args:
            preset: quickstart, wikitext2, paper-wikitext103, paper-imagenet32, or the path of a YAML file
            name: of the run, a folder under runs; empty: the preset's
            source: file, folder or URL that was sharded; empty: the preset's
            seconds: of training; 0: the preset's limits
            phase: limits and weights of the phase
            batch: windows of a step
            model: encoder, main model and decoder; the same in phase two as in phase one
            iem: the IEM loss, where the phase gives it a weight
            optimizer: learning rates and the rest
            validation: how often, and on how much
            checkpoint: when to save
            launcher: processes that train together
            overrides: further options, each key=value as on the command line; these come last
        """
        groups: dict[str, Any] = {stage: phase, "batch": batch, "model": model, "iem": iem, "optimizer": optimizer}
        groups |= {"validation": validation, "checkpoint": checkpoint, "launcher": launcher}
        return _train(stage, preset, words(preset, name, source, seconds, overrides, groups, (stage,)))

    train_stage.__name__ = train_stage.__qualname__ = stage  # by which a worker finds it in this module
    train_stage.__annotations__["phase"] = limits | Preset
    train_stage.__doc__ = f"{what} {train_stage.__doc__}"
    return flow(name=stage, flow_run_name=run_name(stage))(train_stage)


pretrain = _training("pretrain", PretrainOptions, "Phase one: learns in the space of chunk embeddings.")
finetune = _training("finetune", FinetuneOptions, "Phase two: trains for exact likelihood from a phase one.")
train = _training("train", TrainOptions, "Trains end to end, without a phase one.")


@flow(name="evaluate", flow_run_name=run_name("evaluate"))
def evaluate(run: str = "quickstart", overrides: Words = []) -> dict[str, Any]:  # noqa: B006
    """Exact bits of a split, beside yardsticks measured on the same bytes.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line, such as evaluate.split=valid
    """
    from pipeline.evaluate import evaluate as run_stage
    from pipeline.report import headline

    result = run_stage(run_options(run, overrides))
    found = asdict(result)
    figure, unit = headline(found)
    figures = [(item.bits_per_char, item.name) for item in result.yardsticks] + [(figure, run)]
    rows = [{"model": name, unit: round(bits, 4)} for bits, name in sorted(figures)]
    create_table_artifact(rows, key=key("evaluation", Path(run).name), description=f"{run}: {result.split}")
    return found


@flow(name="sample", flow_run_name=run_name("sample"))
def sample(
    run: str = "quickstart",
    prompts: Words = [],  # noqa: B006
    samples: Annotated[int, Field(ge=1, le=64)] = 1,
    overrides: Words = [],  # noqa: B006
) -> list[dict[str, Any]]:
    """Continues prompts; a model of pictures completes the lower halves of held-out ones.

    Args:
        run: a name under runs, or a folder
        prompts: texts to continue; empty: those of sample.prompts, which also go into the report
        samples: continuations of each
        overrides: options to change, each key=value as on the command line, such as sample.temperature=0.5
    """
    from pipeline.neighbours import printable
    from pipeline.report import data_uri
    from pipeline.sampling import sample as run_stage

    options = run_options(run, overrides)
    written = [asdict(item) for item in run_stage(options, prompts or None, samples)]
    text = "\n".join(f"````\n{printable(item['prompt'] + item['text'])}\n````\n" for item in written)
    grid = Path(options.runs_dir) / options.name / "samples.png"
    if written and written[0]["text"] == str(grid):
        text = f"![held-out pictures, completed]({data_uri(grid.read_bytes())})"
    create_markdown_artifact(text, key=key("samples", options.name), description=f"{run}: samples")
    return written


@flow(name="index", flow_run_name=run_name("index"))
def index(run: str = "quickstart", overrides: Words = []) -> dict[str, Any]:  # noqa: B006
    """FAISS index of the embeddings of all distinct chunks.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line, such as index.min_count=2
    """
    from pipeline.index import index as run_stage

    return asdict(run_stage(run_options(run, overrides)))


@flow(name="neighbours", flow_run_name=run_name("neighbours"))
def neighbours(
    run: str = "quickstart",
    queries: Words = [],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=100)] = 8,
    overrides: Words = [],  # noqa: B006
) -> list[dict[str, Any]]:
    """Nearest chunks in the index, as a table, and as a picture if they are of pixels.

    Args:
        run: a name under runs, or a folder
        queries: chunks, white space at the end counts; of pictures, colours such as #4080c0; none: chunks of the corpus
        count: neighbours of each query
        overrides: options to change, each key=value as on the command line, such as runs_dir=/data/runs
    """
    from pipeline.inference import Run
    from pipeline.neighbours import neighbours as run_stage
    from pipeline.neighbours import picture, visible
    from pipeline.report import data_uri

    options = run_options(run, overrides)
    folder = RunFolder(Path(options.runs_dir) / options.name)
    found = run_stage(folder, queries, count, Run(folder, options) if overrides else None)
    rows = [
        {
            "query": visible(item["query"]),
            "chunk": visible(n["text"]),
            "cosine": round(n["score"], 3),
            "count": n["count"],
        }
        for item in found
        for n in item["neighbours"]
    ]
    create_table_artifact(rows, key=key("neighbours", Path(run).name), description=f"{run}: neighbours")
    if drawn := picture(found):
        text = f"![queries and their neighbours, with cosines]({data_uri(drawn)})"
        create_markdown_artifact(text, key=key("neighbours", Path(run).name, "drawn"), description=f"{run}: neighbours")
    return found


@flow(name="compare", flow_run_name=run_name("compare"))
def compare(runs: Words = ["quickstart"], runs_dir: str = "runs") -> list[dict[str, Any]]:  # noqa: B006
    """Table and curves of several runs, against steps, seconds and model FLOPs (the paper's Figure 4).

    Args:
        runs: names under runs_dir, or folders
        runs_dir: where runs are looked for by name, and the comparison is written
    """
    from pipeline.compare import compare as run_stage
    from pipeline.compare import markdown
    from pipeline.report import data_uri

    found = run_stage(runs, runs_dir, Path(runs_dir) / "comparison")
    picture = data_uri(Path(found.picture).read_bytes())
    text = f"![curves]({picture})\n\n{markdown(found.rows)}"
    create_markdown_artifact(text, key="comparison", description=", ".join(runs))
    return [asdict(row) for row in found.rows]


@flow(name="report", flow_run_name=run_name("report"))
def report(run: str = "quickstart", overrides: Words = []) -> str:  # noqa: B006
    """Writes the report of a run, and shows it as an artifact with its pictures.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line
    """
    return _show_report(run_options(run, overrides))


@flow(name="haed", flow_run_name=run_name("haed"))
def everything(
    preset: str = "quickstart",
    name: str = "",
    source: str = "",
    seconds: Seconds = 0,
    sources: SourceOptions | Preset = None,
    model: ModelOptions | Preset = None,
    batch: BatchOptions | Preset = None,
    optimizer: OptimizerOptions | Preset = None,
    launcher: LauncherOptions | Preset = None,
    overrides: Words = [],  # noqa: B006
) -> dict[str, Any]:
    """All of it, in order: shard, pretrain, finetune, evaluate, index, sample, report. Stages that are finished are not redone.

    Args:
        preset: quickstart, wikitext2, paper-wikitext103, paper-imagenet32, or the path of a YAML file
        name: of the run, a folder under runs; empty: the preset's
        source: file, folder or URL to read; empty: the preset's
        seconds: of training, in the preset's proportion over both phases; 0: the preset's limits
        sources: kind of the source and how it is split
        model: encoder, main model and decoder
        batch: windows of a step
        optimizer: learning rates and the rest
        launcher: processes that train together, and a Dask cluster to shard on
        overrides: further options, each key=value as on the command line; these come last
    """
    groups: dict[str, Any] = {
        "source": sources,
        "model": model,
        "batch": batch,
        "optimizer": optimizer,
        "launcher": launcher,
    }
    given = words(preset, name, source, seconds, overrides, groups, ("pretrain", "finetune"))
    options = config.load(preset, given)
    shard(preset, overrides=given)
    pretrain(preset, overrides=given)
    finetune(preset, overrides=given)
    run = str(Path(options.runs_dir) / options.name)
    folder, limits = RunFolder(Path(run)), options.evaluate
    if not folder.is_made("evaluation.json", options, split=limits.split):
        evaluate(run)
    if not folder.is_made("index/meta.json", options, split=options.index.split, min_count=options.index.min_count):
        index(run)
    sample(run)
    return {"run": run, "report": report(run), "evaluation": read_json(folder.path / "evaluation.json")}


FLOWS = (everything, shard, pretrain, finetune, train, evaluate, sample, index, neighbours, compare, report)
