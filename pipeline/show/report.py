"""Stage `report`: `report.html`, self-contained, and `report.md` with its pictures beside it.

Both are made only from files of the run, so the report can be made again at any time. Parts that were not run are
left out.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.checked import CONFIG, PICTURE, RESULT, read_bytes, read_text
from data.filesystem import write_atomically
from pipeline.config import Options
from pipeline.console import code_fence, escape_control_characters, make_printable, markdown_code, markdown_text
from pipeline.run.checkpoints import explain_too_few_steps, list_checkpoints
from pipeline.run.files import (
    MIXTURE_COLUMNS,
    AnalysisSummary,
    Evaluation,
    KeptSample,
    describe_speed,
    read_as,
    read_json,
)
from pipeline.run.index import ChunkIndex, SearchResults, StaleIndexError
from pipeline.run.metrics import Record, read_metrics
from pipeline.run.run_directory import RunFolder, format_command, guard_results, stage_overrides
from pipeline.show.page import data_uri, escape, markdown_table, render_image, render_page, render_table

CAPTIONS = {
    "yardsticks.png": "",
    "curves.png": "<h2>Training</h2>",
    "corpus.png": "<h2>The training split</h2>",
    "samples.png": "<h2>Held-out pictures, their lower halves completed</h2>",
    "neighbours.png": "<h2>Neighbours of chunks</h2><p>by the {score} of their embeddings</p>",
    "map.png": "<h2>A map of the embeddings</h2>",
}
ANALYSIS = "analysis"  # folder that `haed analyse` writes to
PAGES = {"report.html": "all figures and pictures", "map.html": "the map, to zoom and search"}


@dataclass
class ReportData:
    """Data of a report, as far as available.

    Attributes:
        name: name of the run.
        phases: metrics of each phase.
        evaluation: content of evaluation.json, or None.
        remarks: sentences on the checkpoint, and on outdated or missing parts.
        pictures: PNG files by name.
        neighbours: neighbours of chunks with their scores; empty if they are drawn as a picture.
        samples: content of samples.json.
        analysis: content of analysis.json, or None if it has none of this checkpoint.
        environment: text of environment.json, empty if there is none.
        configuration: text of config.yaml.
    """

    name: str
    phases: dict[str, list[Record]]
    evaluation: Evaluation | None
    remarks: list[str]
    pictures: dict[str, bytes]
    neighbours: SearchResults
    samples: list[KeptSample]
    analysis: AnalysisSummary | None
    environment: str
    configuration: str


@guard_results
def write_report(options: Options) -> Path:
    """Write report.html, report.md and the pictures of a run; return the path of report.html.

    Raises:
        ValueError: a file of the run is damaged, or its configuration was changed since it was trained.
    """
    folder = RunFolder.from_options(options)
    found = _load_report_data(folder, options)
    for name, content in found.pictures.items():
        write_atomically(folder.path / name, content)
    write_atomically(folder.path / "report.md", format_markdown(found).encode())
    write_atomically(folder.path / "report.html", _render_html(found).encode())
    return folder.path / "report.html"


def inline_markdown(folder: RunFolder) -> str:
    """Return report.md with its pictures embedded, for viewers that cannot read the folder."""
    text = read_text(folder.path / "report.md", RESULT, folder.path)
    for name in CAPTIONS:
        if (path := folder.path / name).is_file():  # replace the first match only: a sample may look like it
            line = f"![{name}]({data_uri(read_bytes(path, PICTURE, folder.path))})"
            text = re.sub(rf"^!\[{name}\]\({name}\)$", line, text, count=1, flags=re.MULTILINE)
    return text


def _load_report_data(folder: RunFolder, options: Options) -> ReportData:
    from pipeline.show import plots

    phases = {name: read_metrics(path / "metrics.jsonl") for name, path in folder.phase_history(options).items()}
    phases = {name: records for name, records in phases.items() if records}
    path = folder.path / "evaluation.json"
    evaluation = read_as(Evaluation, path) if os.path.lexists(path) else None
    path = folder.path / "samples.json"
    samples = read_as(list[KeptSample], path) if os.path.lexists(path) else []
    remarks = _collect_remarks(folder, options, evaluation, samples)
    pictures = {}
    if phases:
        pictures["curves.png"] = plots.plot_curves(phases)
    if evaluation and evaluation.yardsticks:
        pictures["yardsticks.png"] = plots.plot_baselines(evaluation, options.name)
    if statistics := folder.split_statistics("train"):
        pictures["corpus.png"] = plots.plot_corpus(statistics)
    if os.path.lexists(folder.path / "samples.png"):
        pictures["samples.png"] = read_bytes(folder.path / "samples.png", PICTURE, folder.path)
    near = SearchResults([])
    if ChunkIndex.is_there(folder):
        try:
            near = _find_neighbours(folder, options)
        except StaleIndexError as error:
            remarks.append(f"No neighbours are shown: {error}.")
    if near and (drawn := plots.draw_neighbours(near)):
        pictures["neighbours.png"], near = drawn, SearchResults([], score=near.score)
    analysis = _read_analysis(folder, options, remarks)
    if analysis and os.path.lexists(folder.path / ANALYSIS / "map.png"):
        pictures["map.png"] = read_bytes(folder.path / ANALYSIS / "map.png", PICTURE, folder.path)
    path = folder.path / "environment.json"
    environment = json.dumps(read_json(path), indent=2, ensure_ascii=False) if os.path.lexists(path) else ""
    configuration = read_text(folder.path / "config.yaml", CONFIG, folder.path)
    return ReportData(
        options.name, phases, evaluation, remarks, pictures, near, samples, analysis, environment, configuration
    )


def _read_analysis(folder: RunFolder, options: Options, remarks: list[str]) -> AnalysisSummary | None:
    """Read the analysis of the present checkpoint; if it is of another checkpoint, add a remark and return None."""
    path = folder.path / ANALYSIS / "analysis.json"
    if not os.path.lexists(path):
        return None
    found = read_as(AnalysisSummary, path, folder.path)
    if found.checkpoint == folder.checkpoint_digest(options.evaluate.stage):
        return found
    remarks.append(
        f"The analysis is of another checkpoint ({found.stage} step {found.step:,}) and not shown: run "
        f"`{_repeat_command('analyse', folder, options)}` again."
    )
    return None


def _repeat_command(stage: str, folder: RunFolder, options: Options) -> str:
    """Return the command that repeats a stage for the reported checkpoint."""
    return format_command(stage, folder, *stage_overrides(options.evaluate.stage))


def _find_neighbours(folder: RunFolder, options: Options) -> SearchResults:
    """Find the neighbours of the configured queries. The model is opened only for chunks missing from the corpus."""
    index = ChunkIndex.open(folder)

    def embed(chunks: list[bytes]) -> np.ndarray:
        from pipeline.run.opened import Run

        of_index = replace(options, evaluate=replace(options.evaluate, stage=index.meta.stage))
        return Run(folder, of_index).embed(chunks)

    count = min(options.index.neighbours, index.count_known())
    return index.nearest_chunks(options.index.queries, count, embed, strict=False)


def _collect_remarks(
    folder: RunFolder, options: Options, evaluation: Evaluation | None, samples: list[KeptSample]
) -> list[str]:
    """Collect remarks on the reported checkpoint, which is the best and need not be the newest."""
    if not folder.is_trained():
        return []
    present = folder.select_checkpoint(options.evaluate.stage)
    folder.check_unchanged(options, present)
    phase, step = present.phase, present.step
    found = [present.fallback] if present.fallback else []
    phases = folder.phase_history(options).values()
    found += [f"{few}." for each in phases if (few := explain_too_few_steps(each / "checkpoints"))]
    if (newest := list_checkpoints(present.path.parent)[-1]) != present.path:
        found.append(f"The best validation of {phase} was at step {step:,}, not at the end ({newest.name}).")
    if evaluation and evaluation.checkpoint != present.digest:
        found.append(
            f"The likelihood is of {evaluation.stage} step {evaluation.step:,}, the run's present checkpoint is {phase} "
            f"step {step:,}: run `{_repeat_command('evaluate', folder, options)}` again."
        )
    if any(sample.checkpoint not in (None, present.digest) for sample in samples):
        found.append(
            f"The samples are of another checkpoint than the run's present one, {phase} step {step:,}: run "
            f"`{_repeat_command('sample', folder, options)}` again."
        )
    return found


def _describe_training(found: ReportData) -> str:
    """Describe the training in a sentence: phases, steps, seconds."""
    parts = [
        f"{phase} {records[-1]['step']:,} steps in {max(r['seconds'] for r in records):,.0f} s"
        for phase, records in found.phases.items()
    ]
    return ", ".join(parts) or "not trained yet"


def _describe_beaten(evaluation: Evaluation) -> str:
    """List the baselines that the model beats, and those that it does not beat."""
    if not evaluation.yardsticks:
        return ""
    worse = evaluation.not_beaten
    beaten = [item.name for item in evaluation.yardsticks if item.name not in worse]
    return f"Beaten: {', '.join(beaten) or 'none'}. Not beaten: {', '.join(worse) or 'none'}."


def _render_likelihood(evaluation: Evaluation) -> str:
    figure, error = evaluation.headline, evaluation.standard_error
    rows = [[escape(cell) for cell in row] for row in _mixture_rows(evaluation)]
    return (
        f"<h2>Exact likelihood</h2><p><span class=figure>{figure.value:.3f}</span> {figure.unit} on the "
        f"{escape(evaluation.split)} split{f', standard error {error:.3f} over documents' if error else ''}: "
        f"{evaluation.characters:,} {figure.over}, {evaluation.stage} step {evaluation.step:,}, "
        f"checkpoint {escape(evaluation.checkpoint[:12])}, context {evaluation.context} chunks, "
        f"{evaluation.precision} on {escape(evaluation.processor)}.</p>"
        f"<p>{escape(_describe_beaten(evaluation))}</p><p>{escape(evaluation.whose)}</p>"
        f"{render_table(MIXTURE_COLUMNS, rows, 1) if rows else ''}"
    )


def _mixture_rows(evaluation: Evaluation) -> list[tuple[str, ...]]:
    return evaluation.breakdown.mixture_rows() if evaluation.breakdown is not None else []


def _render_html(found: ReportData) -> str:
    parts = [f"<h1>{escape(found.name)}</h1><p class=lead>{escape(_describe_training(found))}</p>"]
    parts += [_render_likelihood(found.evaluation)] if found.evaluation else []
    parts += [f"<p>{escape(remark)}</p>" for remark in found.remarks]
    captions = CAPTIONS | {"neighbours.png": CAPTIONS["neighbours.png"].format(score=found.neighbours.score)}
    parts += [captions[name] + render_image(name, found.pictures[name]) for name in captions if name in found.pictures]
    if found.neighbours:
        parts += [captions["neighbours.png"], "<div class=grid>"]
        for item in found.neighbours:
            rows = [(_render_code(n.text), f"{n.score:.3f}", f"{n.count:,}") for n in item.neighbours]
            parts.append(render_table((_render_code(item.query), escape(found.neighbours.score), "count"), rows, 1))
        parts.append("</div>")
    if found.analysis:
        told = "".join(f"<li>{escape(sentence)}" for sentence in found.analysis.findings)
        links = ", ".join(f"<a href='{ANALYSIS}/{name}'>{about}</a>" for name, about in PAGES.items())
        parts.append(f"<h2>What the embeddings know</h2><ul>{told}</ul><p>More: {links}.</p>")
    if found.samples:
        parts.append(f"<h2>Samples</h2><p>{describe_speed(found.samples)}</p>")
        parts += [f"<pre><b>{escape(s.prompt)}</b>{escape(s.text)}</pre>" for s in found.samples]
    parts.append("<h2>Configuration and versions</h2>")
    for title, text in (
        ("versions, commit, machine", found.environment),
        ("complete configuration", found.configuration),
    ):
        parts.append(f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>")
    return render_page(found.name, "".join(parts))


def _render_code(chunk: str) -> str:
    return f"<code>{escape(escape_control_characters(chunk))}</code>"


def format_markdown(found: ReportData) -> str:
    """Format the report as Markdown, with links to the picture files beside it."""
    lines = [f"# {markdown_text(found.name)}", "", markdown_text(_describe_training(found)), ""]
    if found.evaluation:
        figure = found.evaluation.headline
        lines += [f"**{figure.value:.3f} {figure.unit}** on the {markdown_text(found.evaluation.split)} split. "]
        lines[-1] += f"{markdown_text(_describe_beaten(found.evaluation))}\n\n{markdown_text(found.evaluation.whose)}\n"
        if rows := _mixture_rows(found.evaluation):
            lines += [markdown_table(MIXTURE_COLUMNS, [[markdown_text(cell) for cell in row] for row in rows], 1), ""]
    lines += [f"{markdown_text(remark)}\n" for remark in found.remarks]
    lines += [f"![{name}]({name})\n" for name in found.pictures]
    for item in found.neighbours:
        rows = [
            (markdown_code(escape_control_characters(n.text)), f"{n.score:.3f}", f"{n.count:,}")
            for n in item.neighbours
        ]
        head = (markdown_code(escape_control_characters(item.query)), markdown_text(found.neighbours.score), "count")
        lines += [markdown_table(head, rows, 1), ""]
    if found.analysis:
        lines += [f"- {markdown_text(sentence)}" for sentence in found.analysis.findings]
        lines += ["", ", ".join(f"[{about}]({ANALYSIS}/{name})" for name, about in PAGES.items()), ""]
    for sample in found.samples:
        lines += [code_fence(sample.prompt + sample.text), ""]
    lines += [describe_speed(found.samples), ""]
    lines += ["<details><summary>Configuration and versions</summary>", "", code_fence(found.configuration, "yaml"), ""]
    lines += [code_fence(found.environment, "json"), "</details>", ""]
    return make_printable("\n".join(lines))
