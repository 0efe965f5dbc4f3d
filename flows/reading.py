"""The flows that read one or several trained runs. They take run names, and overrides as on the command line.

Their artifacts name the run, phase, step and checkpoint.
"""

import hashlib
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from prefect.settings import PREFECT_UI_URL
from pydantic import Field

from data.checked import PICTURE, read_bytes
from flows.artifacts import artifact_key, post_link, post_markdown, post_table, run_artifact_key
from flows.forms import Count, Place, Run, Split, Temperature, Words, stage_flow
from flows.lifecycle import tag_flow_run
from pipeline.arguments import load_run_options
from pipeline.config import ConfigError, Options, write_override
from pipeline.console import code_fence, markdown_code, markdown_text
from pipeline.run.files import Evaluation, Sample, describe_speed
from pipeline.run.index.queries import PIXELS
from pipeline.run.run_directory import RunFolder
from pipeline.web.app import served_page_url

log = logging.getLogger(__name__)


def format_headline_metric(found: Evaluation) -> str:
    """Return the headline metric of an evaluation, with its split, phase and step."""
    own = found.headline
    return f"{own.value:.3f} {own.unit}, {found.split}, {found.stage} step {found.step:,}"


def load_tagged_options(run: str, overrides: list[str], reader: str, **given: object) -> Options:
    """Return the options of a run with the form's changes, and tag the flow run with the run's name."""
    fields = [write_override(key.replace("__", "."), value) for key, value in given.items() if value is not None]
    options = load_run_options(run.strip(), [*fields, *filter(None, overrides)], reader)
    tag_flow_run(options.name)
    return options


def describe_origin(options: Options, stage: str, step: int, digest: str) -> str:
    """Return the origin of results: run, phase, step, checkpoint and folder."""
    folder = RunFolder.from_options(options).path.resolve()
    return f"run {options.name} · {stage} step {step:,} · checkpoint {digest[:12] or 'unknown'} · {folder}"


def describe_checkpoint(options: Options) -> str:
    """Return the origin (see `origin`) for the checkpoint that stages read."""
    found = RunFolder.from_options(options).select_checkpoint(options.evaluate.stage)
    return describe_origin(options, found.phase, found.step, found.digest)


def show_places(options: Options) -> None:
    """Post the locations of the run folder, its report, its page and TensorBoard, before training starts."""
    folder = RunFolder.from_options(options).path.resolve()
    lines = [f"Run folder: {markdown_code(str(folder))}"]
    lines.append(f"Report: {markdown_code(str(folder / 'report.html'))}, once a phase is done")
    if interface := PREFECT_UI_URL.value():
        lines[-1] += f", and [as an artifact]({interface}/artifacts/key/{run_artifact_key('report', options)})"
    if page := served_page_url(RunFolder.from_options(options)):
        lines.append(f"[The run's page]({page}): state, curves, downloads, and questions to its model")
    if board := os.environ.get("HAED_TENSORBOARD_URL"):
        link = f"{board}/?runFilter={quote(f'^{re.escape(options.name)}/')}"
        lines.append(f"Curves while it trains: [TensorBoard, of this run alone]({link})")
        post_link(
            link,
            "TensorBoard, of this run alone",
            run_artifact_key("tensorboard", options),
            f"curves of {options.name}",
        )
    post_markdown("\n\n".join(lines), run_artifact_key("places", options), f"{options.name}: where it is")


def show_report(options: Options) -> str:
    """Write the report of a run, post its summary as an artifact, and return its path."""
    from pipeline.reporting.report import write_report as run_stage

    path = run_stage(options)
    post_report(options)
    return str(path)


def post_report(options: Options) -> None:
    """Post the summary of a run's report as an artifact of this flow run."""
    from pipeline.reporting.report import summarise_report

    folder = RunFolder.from_options(options)
    about = describe_checkpoint(options) if folder.is_trained() else f"run {options.name}, not trained yet"
    page = (
        f" · [the run's page]({address}), with the report, downloads and questions to its model"
        if (address := served_page_url(folder))
        else ""
    )
    post_markdown(
        f"{summarise_report(options)}\n\n{markdown_text(about)}{page}\n",
        run_artifact_key("report", options),
        f"report of {about}",
    )


@stage_flow("evaluate", format_headline_metric)
def evaluate(run: Run, split: Split = None, overrides: Words = []) -> Evaluation:  # noqa: B006
    """Compute the exact bits of a split, with baselines measured on the same bytes.

    Args:
        run: a name under runs, or a folder
        split: the split to score; empty: as in the run, test by default
        overrides: options to change, each key=value as on the command line, such as evaluate.stage=pretrain
    """
    from pipeline.evaluation.evaluate import evaluate_run as run_stage

    options = load_tagged_options(run, overrides, "evaluate", evaluate__split=split)
    found = run_stage(options)
    own, about = found.headline, describe_origin(options, found.stage, found.step, found.checkpoint)
    scalars = {name: value for name, value in asdict(found).items() if isinstance(value, str | int | float)}
    rows: list[dict[str, Any]] = [{"model": options.name, own.unit: own.value} | scalars]
    if found.decoder_metric is not None:
        rows.append({"model": f"{options.name}, decoder alone", own.unit: found.decoder_metric})
    rows += [
        {"model": item.name, own.unit: item.bits_per_char, "bits": item.bits, "bits_per_byte": item.bits_per_byte}
        for item in found.baselines
    ]
    table = [
        {name: round(value, 4) if isinstance(value := row.get(name, ""), float) else value for name in rows[0]}
        for row in [rows[0], *sorted(rows[1:], key=lambda row: row[own.unit])]
    ]
    post_table(
        table,
        run_artifact_key("evaluation", options),
        f"{format_headline_metric(found)}. {found.likelihood_note}",
        about,
    )
    return found


@stage_flow("sample", lambda found: "; ".join(filter(None, [f"{len(found)} samples", describe_speed(found)])))
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
        overrides: options to change, each key=value as on the command line, such as sample.chunks=100
    """
    from pipeline.inference import sample as run_stage
    from pipeline.reporting.rendering import data_uri

    options = load_tagged_options(
        run, overrides, "sample", sample__temperature=temperature, sample__pictures=prompt_count
    )
    folder, about = RunFolder.from_options(options), describe_checkpoint(options)
    if prompt_count and options.chunker.kind != PIXELS:
        options.sample.prompts = (options.sample.prompts or [*folder.read_corpus_record().frequent, ""])[:prompt_count]
    written = run_stage(options, prompts or None, samples)
    text = "\n\n".join([*(code_fence(item.prompt + item.text) for item in written), describe_speed(written)])
    grid = folder.path / "samples.png"
    if written and written[0].text == str(grid):
        text = f"![held-out pictures, completed]({data_uri(read_bytes(grid, PICTURE))})"
    drawn = f"temperature {options.sample.temperature:g}, seed {options.sample.seed}"
    post_markdown(
        f"{text}\n\n{markdown_text(f'{drawn}; {about}')}",
        run_artifact_key("samples", options),
        f"samples, {drawn}, of {about}",
    )
    return written


@stage_flow("compare", str)
def compare(runs: Annotated[Words, Field(min_length=1)], runs_dir: Place = "runs") -> str:
    """Compare several runs in a table and curves, against steps, seconds and model FLOPs (the paper's Figure 4).

    Args:
        runs: names under runs_dir, or folders
        runs_dir: where runs are looked for by name, and the comparison is written
    """
    from pipeline.reporting.comparison import compare_runs as run_stage
    from pipeline.reporting.comparison import format_markdown
    from pipeline.reporting.rendering import data_uri

    runs = [run.strip() for run in runs if run.strip()]
    if not runs:
        raise ConfigError("no run is named: give the names of those to compare")
    options = [load_run_options(run, [write_override("runs_dir", runs_dir)]) for run in runs]
    tag_flow_run(*(each.name for each in options))
    found = run_stage(runs, runs_dir, Path(runs_dir) / "comparison")
    picture = data_uri(read_bytes(found.picture, PICTURE))
    places = "\n".join(
        f"- {markdown_text(describe_checkpoint(each))}" for each in options if RunFolder.from_options(each).is_trained()
    )
    text = f"![curves]({picture})\n\n{format_markdown(found)}\n\n{places}"
    names = "-".join(sorted(each.name for each in options))
    digits = hashlib.sha256("\n".join(sorted(runs)).encode()).hexdigest()[:4]
    post_markdown(text, f"{artifact_key('comparison', names)[:60]}-{digits}", ", ".join(runs))
    return found.page


@stage_flow("report", str)
def report(run: Run, overrides: Words = []) -> str:  # noqa: B006
    """Write the report of a run, and post its summary as an artifact.

    Args:
        run: a name under runs, or a folder
        overrides: options to change, each key=value as on the command line
    """
    return show_report(load_tagged_options(run, overrides, "report"))
