"""Stage `compare`: table of several runs, and curves over steps, seconds and model FLOPs (as the paper's Figure 4)."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from data.filesystem import write_atomically
from pipeline.config import Options, check_output_folder
from pipeline.console import markdown_text
from pipeline.run.checkpoints import read_position
from pipeline.run.files import CorpusRecord, Evaluation, read_as
from pipeline.run.metrics import Record, read_metrics
from pipeline.run.run_directory import CORPUS, RunFolder
from pipeline.run.tensors import read_shapes
from pipeline.show.budgets import (
    SHOWN,
    Budget,
    RunDifference,
    choose_budget,
    describe_equal_budget,
    explain_unequal_budgets,
    find_differences,
)
from pipeline.show.page import escape, markdown_table, render_image, render_page, text_table
from pipeline.show.page import render_table as html_table
from pipeline.show.plots import Point, plot_comparison

T = TypeVar("T")
BITS = "validation/bits_per_token"


@dataclass
class Row:
    """Row of the table: a run.

    Attributes:
        run: name of the run.
        phases: trained phases, in order.
        parameters: number of parameters of the model.
        steps: steps of all phases together.
        seconds: training time of all phases.
        flops: model FLOPs of all phases.
        validation: last bits per token on the fixed subset of the validation split.
        validation_error: standard error of `validation`.
        evaluation: headline metric of evaluation.json, or None if the run was not evaluated.
        unit: unit of `evaluation`: bits/char, or bits/dim for pictures and sound.
        decoder: the same metric by the decoder of a mixture alone.
        unknown: share of chunks outside the vocabulary of the mixture, which its decoder spells.
        split: split of the evaluation.
        likelihood: for a run with a mixture, `mixture`, or `decoder` if only the decoder was evaluated.
        stage: phase of the evaluated checkpoint.
        corpus: digest of the corpus and its chunking. Validations on different ones are not comparable.
        text: digest of the evaluated text. Evaluations of different texts are not comparable.
        fallback: why a checkpoint other than the best is used, or None.
    """

    run: str
    phases: list[str]
    parameters: int | None
    steps: int
    seconds: float
    flops: float
    validation: float | None
    validation_error: float | None
    evaluation: float | None
    unit: str | None
    decoder: float | None
    unknown: float | None
    likelihood: str | None
    split: str | None
    stage: str | None
    corpus: str | None
    text: str | None
    fallback: str | None = None


@dataclass
class Comparison:
    """Result of a comparison of runs.

    Attributes:
        rows: the runs, from fewest to most bits.
        page: path of the HTML page.
        picture: path of the plot of their curves.
        verdict: the run with the fewest bits at an equal budget; None: there is no verdict.
        refused: why there is no verdict; None: there is one, or nothing to compare.
        differing: differences in data, steps, seconds, FLOPs and options.
    """

    rows: list[Row]
    page: str
    picture: str
    verdict: str | None = None
    refused: str | None = None
    differing: list[RunDifference] = field(default_factory=list)

    @property
    def verdict_summary(self) -> str:
        """Return the verdict, or why there is none, after a note on each run that used a fallback checkpoint."""
        fallen = [f"{row.run}: {row.fallback}." for row in self.rows if row.fallback]
        return " ".join([*fallen, *filter(None, [self.verdict, self.refused])])

    @property
    def difference_lines(self) -> list[str]:
        """Return the differences between the runs as lines of text, with at most 12 options."""
        lines = [str(each) for each in self.differing]
        own = sum("." not in each.what for each in self.differing)  # data and budgets; the rest are options
        left = len(lines) - own - SHOWN
        more = f"and {left} more options (--json has all)"
        return lines if left <= 0 else [*lines[: own + SHOWN], more]


def compare_runs(runs: list[str], runs_dir: str, output: Path) -> Comparison:
    """Read the metrics of runs and write comparison.html and comparison.png into `output`.

    Raises:
        ConfigError: the output is a URL.
        FileNotFoundError: a run does not exist, or was not trained.
        ValueError: a file of a run is damaged.
    """
    check_output_folder(runs_dir, "runs_dir")
    check_output_folder(output, "output")
    folders = {name: RunFolder.find(name, runs_dir) for name in dict.fromkeys(runs)}
    options = {name: folder.load_options() for name, folder in folders.items()}
    found = {name: _read_row(name, folder, options[name]) for name, folder in folders.items()}
    rows = sorted((row for row, _ in found.values()), key=_ranking_bits)
    picture = plot_comparison({row.run: found[row.run][1] for row in rows})
    output.mkdir(parents=True, exist_ok=True)
    result = Comparison(rows, str(output / "comparison.html"), str(output / "comparison.png"))
    result.differing = find_differences(rows, options)
    by = choose_budget(rows, options, result.differing)
    if (refused := _explain_incomparable(rows)) or len(rows) < 2 or _ranking_bits(rows[0]) == float("inf"):
        result.refused = refused
    elif refused := explain_unequal_budgets(rows, by):
        result.refused = f"{refused}."
    else:
        result.verdict = _format_verdict(rows, by)
    write_atomically(Path(result.picture), picture)
    write_atomically(Path(result.page), _render_html(result, picture).encode())
    return result


def _ranking_bits(row: Row) -> float:
    """Return the bits that rows are sorted by: of the evaluation, or of the validation if there is no evaluation."""
    return next((bits for bits in (row.evaluation, row.validation) if bits is not None), float("inf"))


def _read_row(name: str, folder: RunFolder, options: Options) -> tuple[Row, list[Point]]:
    """Read the row of a run and the points of its curve, its phases one after the other.

    If the run is not being trained, a phase counts only up to its newest checkpoint, since training would resume there.
    """
    where, holder = folder.phase_history(options), folder.lock_holder()
    metrics = {phase: read_metrics(path / "metrics.jsonl") for phase, path in where.items()}
    metrics = {phase: records for phase, records in metrics.items() if records}
    if not metrics:
        raise FileNotFoundError(f"{folder.path} was not trained yet: it has no metrics to compare")
    if len(metrics) == 3:  # an end-to-end baseline in the folder of a two-phase run
        del metrics["train"]
    totals = {"step": 0.0, "seconds": 0.0, "flops": 0.0}
    points: list[Point] = []
    last: Record = {}
    for phase, records in metrics.items():
        saved = read_position(where[phase] / "checkpoints")
        if saved and holder is None:
            records = [record for record in records if record.get("step", 0.0) <= saved["step"]]
        for record in records:
            if BITS in record:
                points.append(Point(**{key: totals[key] + record.get(key, 0.0) for key in totals}, bits=record[BITS]))
                last = record
        for key in totals:
            totals[key] += max(record.get(key, 0.0) for record in [*records, saved])
    present = folder.select_checkpoint() if folder.is_trained() else None
    if present is not None:
        folder.check_unchanged(of=present)  # a process reads the options of a run only once
    evaluation, remembered = _read_if(Evaluation, folder, "evaluation.json"), _read_if(CorpusRecord, folder, CORPUS)
    row = Row(
        run=name,
        phases=list(metrics),
        parameters=count_parameters(folder),
        steps=int(totals["step"]),
        seconds=totals["seconds"],
        flops=totals["flops"],
        validation=last.get(BITS),
        validation_error=last.get("validation/standard_error"),
        evaluation=evaluation.headline.value if evaluation else None,
        unit=evaluation.headline.unit if evaluation else None,
        decoder=evaluation.decoder_metric if evaluation else None,
        unknown=evaluation.parts.unknown_share if evaluation and evaluation.parts else None,
        likelihood=evaluation.likelihood if evaluation else None,
        split=evaluation.split if evaluation else None,
        stage=evaluation.stage if evaluation else None,
        corpus=remembered.digest if remembered else None,
        text=evaluation.text if evaluation else None,
        fallback=present.fallback if present else None,
    )
    return row, points


def _read_if(kind: type[T], folder: RunFolder, name: str) -> T | None:
    """Read a file of a run; return None if it is missing, raise ValueError if it is damaged."""
    try:
        return read_as(kind, folder.path / name)
    except FileNotFoundError:
        return None


def count_parameters(folder: RunFolder) -> int | None:
    """Count the parameters of the present checkpoint; return None if it cannot be read."""
    try:
        return sum(
            math.prod(shape) for shape in read_shapes(folder.select_checkpoint().path / "model.safetensors").values()
        )
    except (OSError, ValueError):
        return None


HEAD = (
    "run",
    "phases",
    "parameters",
    "steps",
    "seconds",
    "model FLOPs",
    "validation, bits/token",
    "evaluation",
    "decoder alone",
    "unknown chunks",
)


def _format_cells(row: Row) -> list[str]:
    validation = "–" if row.validation is None else f"{row.validation:.4f} ± {row.validation_error or 0:.4f}"
    alone = ", decoder alone" if row.likelihood == "decoder" else ""
    return [
        row.run,
        " + ".join(row.phases),
        "–" if row.parameters is None else f"{row.parameters:,}",
        f"{row.steps:,}",
        f"{row.seconds:,.0f}",
        f"{row.flops:.3g}",
        validation,
        "–" if row.evaluation is None else f"{row.evaluation:.4f} {row.unit} ({row.split}, {row.stage}{alone})",
        "–" if row.decoder is None else f"{row.decoder:.4f}",
        "–" if row.unknown is None else f"{row.unknown:.2%}",
    ]


def _share_corpus_and_text(rows: list[Row]) -> tuple[bool, bool]:
    """Return whether the runs were trained on one corpus, and whether they were evaluated on the same bytes."""
    texts = {row.text for row in rows}
    return len({row.corpus for row in rows}) == 1, len(texts) == 1 and None not in texts


def _explain_incomparable(rows: list[Row]) -> str | None:
    """Explain why bits are not comparable whatever the budgets; return None if they are."""
    alike, same = _share_corpus_and_text(rows)
    if not (alike or same):
        return (
            "The runs were trained on different corpora or chunkers, and not evaluated on the same bytes: their bits do not "
            "compare (`haed evaluate` notes which they are)."
        )
    if len(rows) < 2 or _ranking_bits(rows[0]) == float("inf"):
        return None
    if 0 < len(missing := [row.run for row in rows if row.evaluation is None]) < len(rows):
        return f"{', '.join(missing)}: not evaluated yet (`haed evaluate`); till then compare the validation."
    if not same and len({row.split for row in rows}) > 1:
        return "Not all runs were evaluated on the same split; compare the validation."
    if alone := [row.run for row in rows if row.likelihood == "decoder"]:
        return f"{', '.join(alone)}: evaluated by the decoder alone, not by the mixture; evaluate again to compare."
    return None


def _format_verdict(rows: list[Row], by: Budget) -> str:
    """Name the run with the fewest bits, or the first two if they are equal to four decimals."""
    more = f"{_ranking_bits(rows[1]) - _ranking_bits(rows[0]):.4f}"
    found = f"{describe_equal_budget(by)} {rows[0].run} needs the fewest bits, {rows[1].run} {more} more."
    if float(more) == 0:
        found = f"{describe_equal_budget(by)} {rows[0].run} and {rows[1].run} need the same bits, to four places."
    if not _share_corpus_and_text(rows)[0]:
        found += " Evaluated on the same bytes; their corpora or chunkers differ, so validations do not compare."
    return found


def _render_html(found: Comparison, picture: bytes) -> str:
    rows = found.rows
    drawn = render_image("bits against steps, seconds and model FLOPs", picture)
    cells = [[escape(cell) for cell in _format_cells(row)] for row in rows]
    differ = "".join(f"<li>{escape(line)}" for line in found.difference_lines)
    differ = f"<h2>What differs</h2><ul>{differ}</ul>" if differ else ""
    return render_page(
        "Comparison",
        f"<h1>Comparison of {len(rows)} runs</h1><p class=lead>{escape(found.verdict_summary)}</p>{drawn}<h2>Figures</h2>"
        f"{html_table(HEAD, cells, 2)}{differ}<p>Phases of a run follow each other; a phase one counts as far as it is now. "
        "Validation is a fixed subset of the "
        "validation split, with its standard error over windows; phases without a decoded share have none.</p>",
    )


def format_markdown(found: Comparison) -> str:
    """Format the comparison as Markdown: table, differences, and the verdict or why there is none."""
    cells = [[markdown_text(cell) for cell in _format_cells(row)] for row in found.rows]
    lines = [markdown_table(HEAD, cells, 2), ""]
    if found.differing:
        lines += ["What differs:", "", *(f"- {markdown_text(line)}" for line in found.difference_lines), ""]
    return "\n".join([*lines, markdown_text(found.verdict_summary)])


def format_comparison(found: Comparison) -> str:
    """Format the comparison as text for a terminal."""
    shown = text_table(HEAD, [_format_cells(row) for row in found.rows], 2)
    differ = ["what differs", *(f"  {line}" for line in found.difference_lines)] if found.differing else []
    return "\n".join([shown, *differ, *filter(None, [found.verdict_summary])])
