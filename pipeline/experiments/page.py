"""Presentation of an experiment's result: a table, a picture, and a page."""

import re
from collections.abc import Sequence

from pipeline.console import markdown_text
from pipeline.experiments.experiment import Experiment
from pipeline.experiments.result import Result, Row, columns
from pipeline.experiments.running import Done
from pipeline.reporting.comparison import BITS
from pipeline.reporting.plots import PlottedModel, plot_experiment
from pipeline.reporting.rendering import Table, data_uri, render_file
from pipeline.run.metrics import read_metrics


def tabulate(result: Result) -> Table:
    """Return the table of the result."""
    measured, paper = columns(result.rows)
    head = ["", "bits", "words, perplexity", "steps", "seconds", "parameters", "TFLOP"]
    head += [*measured, *(f"paper: {name}" for name in paper)]
    lines = []
    for row in result.rows:
        spread = f" ± {row.spread:.3f}" if row.seeds > 1 else ""
        line = [row.arm, "failed" if row.bits is None else f"{row.bits:.3f}{spread} {row.unit}"]
        line += ["–" if row.word_perplexity is None else f"{row.word_perplexity:,.0f}"]
        line += [f"{row.steps:,}", f"{row.seconds:,.0f}", "–" if row.parameters is None else f"{row.parameters:,}"]
        line += [f"{row.flops / 1e12:.2f}"]
        for name in measured:
            found = row.figures.get(name)
            line.append("–" if found is None else f"{found.mean:,.3f}" if found.mean < 10 else f"{found.mean:,.1f}")
        lines.append([*line, *(f"{row.paper[name]:g}" if name in row.paper else "–" for name in paper)])
    return Table(head, lines, [False, *(True for _ in head[1:])])


def table(result: Result) -> str:
    """Format the result as a text table for a terminal."""
    shown = tabulate(result).to_text()
    return "\n".join([shown, "", result.verdict, "", _notes(result), "", f"{result.folder}/report.html"])


def _notes(result: Result) -> str:
    return "\n".join(f"- {note}" for note in _noted(result))


def _noted(result: Result) -> list[str]:
    failed = [f"failed: {row.arm}, {why}" for row in result.rows for why in row.failures]
    return [*result.notes, *failed]


def markdown(asked: Experiment, result: Result, picture: str) -> str:
    """Return the page as Markdown, with the address of its picture."""
    question, notes = markdown_text(asked.question), "\n".join(f"- {markdown_text(note)}" for note in _noted(result))
    return (
        f"{markdown_text(asked.source)}: {question}\n\n**{markdown_text(result.verdict)}**\n\n![{question}]({picture})\n\n"
        f"{tabulate(result).to_markdown()}\n\n{notes}\n"
    )


def html(asked: Experiment, result: Result, picture: bytes, examples: dict[str, list[list[str]]]) -> str:
    """Return report.html, with tables of examples by arm."""
    return render_file(
        "experiment.html",
        title=asked.name,
        source=asked.source,
        question=asked.question,
        verdict=result.verdict,
        picture=data_uri(picture),
        results=tabulate(result),
        notes=result.notes,
        failures=[f"{row.arm}, {why}" for row in result.rows for why in row.failures],
        examples={name: _tabulate_examples(rows) for name, rows in examples.items()},
    )


def _tabulate_examples(rows: list[list[str]]) -> Table:
    head, *lines = rows
    numbers = all(_is_number(cell) for line in lines for cell in line[1:])
    return Table(head, lines, [False, *(numbers for _ in head[1:])])


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"–|-?[0-9,]+(\.[0-9]+)?", cell) is not None


def drawn(asked: Experiment, rows: Sequence[Row], whole: dict[str, Done]) -> bytes:
    """Draw the metric of the claim beside the paper's, and a second plot.

    The second plot has bits against the metric `across`, the lines that were measured, or validation curves.

    Args:
        asked: the experiment.
        rows: of all arms.
        whole: a finished run of each arm that has one.
    """
    sketches, axes = [], ("seconds of training", "validation, bits per token")
    _, paper = columns(rows)
    paper.sort(key=lambda name: name != asked.by[0])  # first what is drawn of ours
    for row in rows:
        shown, unit = row.figure(asked.by[0]), row.unit if asked.by[0] == "bits" else asked.by[0]
        sketches.append(sketch := PlottedModel(row.arm, unit, paper=[row.paper.get(name) for name in paper]))
        if shown is not None:
            sketch.value, sketch.spread = shown.mean, shown.spread
        if asked.across is not None:
            axes = (asked.across, "bits")
            if (found := row.figure(asked.across)) is not None and row.bits is not None:
                sketch.place = (found.mean, row.bits)
        elif row.arm in whole:
            lines = [each for each in whole[row.arm].measured.values() if each.line]
            sketch.line = lines[0].line if lines else _curve(whole[row.arm])
            axes = lines[0].axes if lines else axes
    return plot_experiment(sketches, paper, axes)


def _curve(done: Done) -> list[tuple[float, float]]:
    """Return seconds and bits of a run's validations, the phases one after the other."""
    before, points = 0.0, []
    assert done.finished is not None
    for phase, seconds in done.finished.seconds.items():
        path, a_step = done.run / phase / "metrics.jsonl", seconds / max(1, done.finished.steps[phase])
        records = read_metrics(path) if path.is_file() else []
        points += [(before + record["step"] * a_step, record[BITS]) for record in records if BITS in record]
        before += seconds
    return points
