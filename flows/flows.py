"""The flows: one for each stage, and `haed`, which runs them all in order.

Every flow takes a preset (or the path of a YAML file) and overrides in the `key=value` form of the command line, or the
name of a run. They pass names and paths to each other, never tensors.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from pydantic import Field

from flows.stopping import stopping
from pipeline import config
from pipeline.options import Options
from pipeline.runs import RunFolder

Preset = Annotated[str, Field(description="a preset (quickstart, wikitext2, …) or the path of a YAML file")]
Name = Annotated[str, Field(description="the run: a name under runs_dir, or a folder")]
Overrides = Annotated[list[str], Field(description="options to change, each key=value, as on the command line")]

for _room in ("pipeline", "data", "haed", "flows"):
    logging.getLogger(_room).setLevel(logging.INFO)


def _of_run(run: str, overrides: list[str]) -> Options:
    given = dict(item.split("=", 1) for item in overrides if "=" in item)
    return RunFolder.find(run, given.get("runs_dir", "runs")).options(overrides)


@flow(name="shard", flow_run_name="shard {preset}")
def shard(preset: Preset = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006 - Prefect shows it
    """Cuts a source into WebDataset shards with a manifest; a task for every few parts."""
    from flows.sharding import as_tasks
    from pipeline.sharding import shard as run_stage
    from pipeline.sharding import summary

    options = config.load(preset, overrides)
    corpus = run_stage(options, as_tasks(options))
    return {"folder": corpus.location, "splits": summary(corpus)}


@flow(name="pretrain", flow_run_name="pretrain {preset}")
def pretrain(preset: Preset = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """Phase one: learns in the space of chunk embeddings; goes on from its last checkpoint."""
    from pipeline.training import pretrain as run_stage

    with stopping() as stop:
        return asdict(run_stage(config.load(preset, overrides), stop))


@flow(name="finetune", flow_run_name="finetune {preset}")
def finetune(preset: Preset = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """Phase two: trains for exact likelihood from a phase one; goes on from its last checkpoint."""
    from pipeline.training import finetune as run_stage

    with stopping() as stop:
        return asdict(run_stage(config.load(preset, overrides), stop))


@flow(name="train", flow_run_name="train {preset}")
def train(preset: Preset = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """Trains end to end, without a phase one; goes on from its last checkpoint."""
    from pipeline.training import train as run_stage

    with stopping() as stop:
        return asdict(run_stage(config.load(preset, overrides), stop))


@flow(name="evaluate", flow_run_name="evaluate {run}")
def evaluate(run: Name = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """Exact bits of a split, beside yardsticks measured on the same bytes."""
    from pipeline.evaluate import evaluate as run_stage

    result = run_stage(_of_run(run, overrides))
    figures = [(item.bits_per_char, item.name) for item in result.yardsticks] + [(result.bits_per_char, run)]
    rows = [{"model": name, "bits/char": round(bits, 4)} for bits, name in sorted(figures)]
    create_table_artifact(rows, key="evaluation", description=f"{run}: {result.split}")
    return asdict(result)


@flow(name="sample", flow_run_name="sample {run}")
def sample(run: Name = "quickstart", overrides: Overrides = []) -> list[dict[str, Any]]:  # noqa: B006
    """Continues the prompts of `sample.prompts`."""
    from pipeline.sampling import sample as run_stage

    written = [asdict(item) for item in run_stage(_of_run(run, overrides))]
    text = "\n".join(f"````\n{item['prompt']}{item['text']}\n````\n" for item in written)
    create_markdown_artifact(text, key="samples", description=f"{run}: samples")
    return written


@flow(name="index", flow_run_name="index {run}")
def index(run: Name = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """FAISS index of the embeddings of all distinct chunks."""
    from pipeline.index import index as run_stage

    return asdict(run_stage(_of_run(run, overrides)))


@flow(name="neighbours", flow_run_name="neighbours {run}")
def neighbours(
    run: Name = "quickstart",
    queries: Annotated[list[str], Field(description="chunks, at most K bytes each")] = ["def ", "import "],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=100, description="neighbours of each query")] = 8,
) -> list[dict[str, Any]]:
    """Nearest chunks in the index, as a table."""
    from pipeline.index import neighbours as run_stage
    from pipeline.index import visible

    found = run_stage(RunFolder.find(run), queries, count)
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
    create_table_artifact(rows, key="neighbours", description=f"{run}: neighbours")
    return found


@flow(name="report", flow_run_name="report {run}")
def report(run: Name = "quickstart", overrides: Overrides = []) -> str:  # noqa: B006
    """Writes the report of a run, and shows it as an artifact with its pictures."""
    from pipeline.report import inline_markdown
    from pipeline.report import report as run_stage

    path = run_stage(_of_run(run, overrides))
    create_markdown_artifact(inline_markdown(RunFolder(path.parent)), key="report", description=f"{run}: report")
    return str(path)


@flow(name="haed", flow_run_name="haed {preset}")
def everything(preset: Preset = "quickstart", overrides: Overrides = []) -> dict[str, Any]:  # noqa: B006
    """All of it, in order: shard, pretrain, finetune, evaluate, index, sample, report."""
    options = config.load(preset, overrides)
    shard(preset, overrides)
    pretrain(preset, overrides)
    finetune(preset, overrides)
    run = str(Path(options.runs_dir) / options.name)
    result = evaluate(run)
    index(run)
    sample(run)
    return {"run": run, "report": report(run), "evaluation": result}


FLOWS = (everything, shard, pretrain, finetune, train, evaluate, sample, index, neighbours, report)
