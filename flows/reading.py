"""The flows that read a trained run, or several: they take its name, and options to change as on the command line."""

import os
from pathlib import Path
from typing import Annotated

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from pydantic import Field

from flows.forms import Words, staged
from flows.live import key
from pipeline.arguments import run_options
from pipeline.options import Options
from pipeline.run.files import Evaluation, Sample, pace
from pipeline.run.folder import RunFolder
from pipeline.run.index import Indexed, Neighbours
from pipeline.run.opened import NextChunks


def show_report(options: Options) -> str:
    """Writes the report of a run and shows it as an artifact with its pictures; returns its path."""
    from pipeline.show.report import inline_markdown
    from pipeline.show.report import report as run_stage

    path = run_stage(options)
    board = os.environ.get("HAED_TENSORBOARD_URL")
    places = f"Run folder: `{path.parent.resolve()}`" + (f" · [TensorBoard]({board})" if board else "")
    text = f"{inline_markdown(RunFolder.of(options))}\n\n{places}\n"
    create_markdown_artifact(text, key=key("report", options.name), description=f"{options.name}: report")
    return str(path)


@staged("evaluate")
def evaluate(run: str = "quickstart", overrides: Words = []) -> Evaluation:  # noqa: B006
    """Exact bits of a split, beside yardsticks measured on the same bytes.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line, such as evaluate.split=valid
    """
    from pipeline.score.evaluate import evaluate as run_stage

    found = run_stage(run_options(run, overrides, "evaluate"))
    own = found.headline
    figures = [(item.bits_per_char, item.name) for item in found.yardsticks] + [(own.value, run)]
    if found.decoder is not None:
        figures.append((found.decoder, f"{run}, decoder alone"))
    rows = [{"model": name, own.unit: round(bits, 4)} for bits, name in sorted(figures)]
    create_table_artifact(
        rows, key=key("evaluation", Path(run).name), description=f"{run}: {found.split}. {found.whose}"
    )
    return found


@staged("sample")
def sample(
    run: str = "quickstart",
    prompts: Words = [],  # noqa: B006
    samples: Annotated[int, Field(ge=1, le=64)] = 1,
    overrides: Words = [],  # noqa: B006
) -> list[Sample]:
    """Continues prompts; a model of pictures completes the lower halves of held-out ones.

    Args:
        run: a name under runs, or a folder
        prompts: texts to continue; empty: those of sample.prompts, which also go into the report
        samples: continuations of each
        overrides: options to change, each key=value as on the command line, such as sample.temperature=0.5
    """
    from pipeline.probe.sample import sample as run_stage
    from pipeline.show.page import data_uri
    from pipeline.shown import fenced

    options = run_options(run, overrides, "sample")
    written = run_stage(options, prompts or None, samples)
    text = "\n\n".join([*(fenced(item.prompt + item.text) for item in written), pace(written)])
    grid = RunFolder.of(options).path / "samples.png"
    if written and written[0].text == str(grid):
        text = f"![held-out pictures, completed]({data_uri(grid.read_bytes())})"
    create_markdown_artifact(text, key=key("samples", options.name), description=f"{run}: samples")
    return written


@staged("next")
def following(
    run: str = "quickstart",
    prompts: Words = [],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=1000)] = 10,
    overrides: Words = [],  # noqa: B006
) -> list[NextChunks]:
    """The likeliest next chunks after each prompt, with their probabilities, as a table.

    Args:
        run: a name under runs, or a folder
        prompts: texts, white space at the end counts; none: what a document begins with
        count: chunks after each prompt
        overrides: options to change, each key=value as on the command line, such as evaluate.likelihood=decoder
    """
    from pipeline.probe.next import following as run_stage
    from pipeline.probe.next import heading, rows

    found = run_stage(run_options(run, overrides, "next"), prompts, count)
    table = [{"prompt": heading(item)} | row for item in found for row in rows(item)]
    create_table_artifact(table, key=key("next", Path(run).name), description=f"{run}: next chunks")
    return found


@staged("index")
def index(run: str = "quickstart", overrides: Words = []) -> Indexed:  # noqa: B006
    """FAISS index of the embeddings of all distinct chunks.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line, such as index.min_count=2
    """
    from pipeline.probe.index import index as run_stage

    return run_stage(run_options(run, overrides, "index"))


@staged("neighbours")
def neighbours(
    run: str = "quickstart",
    queries: Words = [],  # noqa: B006
    count: Annotated[int, Field(ge=1, le=100)] = 8,
    overrides: Words = [],  # noqa: B006
) -> list[Neighbours]:
    """Nearest chunks in the index, as a table, and as a picture if they are of pixels.

    Args:
        run: a name under runs, or a folder
        queries: chunks, white space at the end counts; of pictures, colours such as #4080c0; none: chunks of the corpus
        count: neighbours of each query
        overrides: options to change, each key=value as on the command line, such as runs_dir=/data/runs
    """
    from pipeline.probe.neighbours import neighbours as run_stage
    from pipeline.show import plots
    from pipeline.show.page import data_uri
    from pipeline.shown import visible

    found = run_stage(run_options(run, overrides, "neighbours"), queries, count)
    rows = [
        {"query": visible(item.query), "chunk": visible(n.text), "cosine": round(n.score, 3), "count": n.count}
        for item in found
        for n in item.neighbours
    ]
    create_table_artifact(rows, key=key("neighbours", Path(run).name), description=f"{run}: neighbours")
    if drawn := plots.neighbours(found):
        text = f"![queries and their neighbours, with cosines]({data_uri(drawn)})"
        create_markdown_artifact(text, key=key("neighbours", Path(run).name, "drawn"), description=f"{run}: neighbours")
    return found


@staged("compare")
def compare(runs: Words = ["quickstart"], runs_dir: str = "runs") -> str:  # noqa: B006
    """Table and curves of several runs, against steps, seconds and model FLOPs (the paper's Figure 4).

    Args:
        runs: names under runs_dir, or folders
        runs_dir: where runs are looked for by name, and the comparison is written
    """
    from pipeline.show.compare import compare as run_stage
    from pipeline.show.compare import markdown
    from pipeline.show.page import data_uri

    found = run_stage(runs, runs_dir, Path(runs_dir) / "comparison")
    picture = data_uri(Path(found.picture).read_bytes())
    text = f"![curves]({picture})\n\n{markdown(found.rows)}"
    create_markdown_artifact(text, key="comparison", description=", ".join(runs))
    return found.page


@staged("report")
def report(run: str = "quickstart", overrides: Words = []) -> str:  # noqa: B006
    """Writes the report of a run, and shows it as an artifact with its pictures.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line
    """
    return show_report(run_options(run, overrides, "report"))
