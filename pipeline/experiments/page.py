"""Presentation of an experiment's result: a table, a picture, and a page."""

import re
from collections.abc import Sequence

from pipeline.console import markdown_text
from pipeline.experiments.experiment import Experiment
from pipeline.experiments.result import Result, Row, columns
from pipeline.experiments.running import Done
from pipeline.run.metrics import read_metrics
from pipeline.show.compare import BITS
from pipeline.show.page import escape, markdown_table, render_image, render_page, text_table
from pipeline.show.page import render_table as html_table
from pipeline.show.plots import PlottedModel, plot_experiment


def cells(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table."""
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
    return head, lines


def table(result: Result) -> str:
    """Format the result as a text table for a terminal."""
    shown = text_table(*cells(result), words=1)
    return "\n".join([shown, "", result.verdict, "", _notes(result), "", f"{result.folder}/report.html"])


def _notes(result: Result) -> str:
    return "\n".join(f"- {note}" for note in _noted(result))


def _noted(result: Result) -> list[str]:
    failed = [f"failed: {row.arm}, {why}" for row in result.rows for why in row.failures]
    return [*result.notes, *failed]


def markdown(asked: Experiment, result: Result, picture: str) -> str:
    """Return the page as Markdown, with the address of its picture."""
    head, lines = cells(result)
    escaped = [[markdown_text(cell) for cell in line] for line in (head, *lines)]
    question, notes = markdown_text(asked.question), "\n".join(f"- {markdown_text(note)}" for note in _noted(result))
    return (
        f"{markdown_text(asked.source)}: {question}\n\n**{markdown_text(result.verdict)}**\n\n![{question}]({picture})\n\n"
        f"{markdown_table(escaped[0], escaped[1:], 1)}\n\n{notes}\n"
    )


def html(asked: Experiment, result: Result, picture: bytes, examples: dict[str, list[list[str]]]) -> str:
    """Return report.html, with tables of examples by arm."""
    head, lines = cells(result)
    shown = html_table(
        [escape(each) for each in head], [[escape(cell).replace(" ", "&nbsp;") for cell in line] for line in lines], 1
    )
    notes = "".join(f"<li>{escape(note)}" for note in result.notes)
    failed = "".join(f"<li>{escape(row.arm)}, {escape(why)}" for row in result.rows for why in row.failures)
    body = (
        f"<h1>{escape(asked.name)}</h1><p class=lead>{escape(asked.source)}: {escape(asked.question)}</p>"
        f"<p>{escape(result.verdict)}</p>{render_image(asked.question, picture)}<h2>Figures</h2><div class=wide>{shown}</div>"
        f"<ul>{notes}</ul>"
    )
    if failed:
        body += f"<h2>Failed</h2><ul>{failed}</ul>"
    for name, rows in examples.items():
        escaped = [[escape(cell) for cell in row] for row in rows]
        words = 1 if all(_is_number(cell) for row in rows[1:] for cell in row[1:]) else len(escaped[0])
        style = "examples wide" if words == 1 else "examples"
        body += f"<h2>{escape(name)}</h2><div class='{style}'>{html_table(escaped[0], escaped[1:], words)}</div>"
    return render_page(asked.name, body)


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
