"""Several runs side by side: a table, and curves against steps, seconds and model FLOPs (compare the paper's Figure 4)."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from data.durable import write_atomically
from pipeline.config import check_written
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.files import Evaluation, Remembered, read_as
from pipeline.run.folder import CORPUS, RunFolder
from pipeline.run.metrics import Record, read
from pipeline.run.saved import reached
from pipeline.run.tensors import read_shapes
from pipeline.show.page import escape, image, markdown_table, page, text_table
from pipeline.show.page import table as html_table
from pipeline.show.plots import Point, comparison
from pipeline.shown import markdown_text

T = TypeVar("T")
BITS = "validation/bits_per_token"


@dataclass
class Row:
    """A run in the table.

    Attributes:
        run: its name.
        phases: what was trained, in order.
        parameters: of the model.
        steps: of all phases together.
        seconds: of training in them.
        flops: model FLOPs of them.
        validation: last bits per token on the fixed subset of the validation split.
        validation_error: its standard error.
        evaluation: the headline of evaluation.json, or None if the run was not evaluated.
        unit: of that, bits/char, or bits/dim of pictures and sound.
        decoder: the same by the decoder of a mixture alone.
        unknown: the share of chunks that this mixture spells.
        split: that it is of.
        likelihood: whose it is, of a run with a mixture: `mixture`, or `decoder` alone.
        stage: the phase whose checkpoint it is of.
        corpus: digest of the corpus and of how it is cut; validations of different ones do not compare.
        text: digest of what was evaluated; evaluations of different ones do not compare.
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


@dataclass
class Comparison:
    """Rows from fewest to most bits, and the page that shows them."""

    rows: list[Row]
    page: str
    picture: str


def compare(runs: list[str], runs_dir: str, output: Path) -> Comparison:
    """Reads the metrics of runs and writes comparison.html and comparison.png into `output`.

    Raises:
        ConfigError: the output is a URL.
        FileNotFoundError: a run is not there, or was not trained.
        ValueError: a file of a run is damaged.
    """
    check_written(runs_dir, "runs_dir")
    check_written(output, "output")
    folders = {name: RunFolder.find(name, runs_dir) for name in dict.fromkeys(runs)}
    found = {name: _read(name, folder) for name, folder in folders.items()}
    rows = sorted((row for row, _ in found.values()), key=_bits)
    picture = comparison({row.run: found[row.run][1] for row in rows})
    output.mkdir(parents=True, exist_ok=True)
    result = Comparison(rows, str(output / "comparison.html"), str(output / "comparison.png"))
    write_atomically(Path(result.picture), picture)
    write_atomically(Path(result.page), _html(rows, picture).encode())
    return result


def _bits(row: Row) -> float:
    """What rows are ordered by: the evaluation, or, of those without one, the validation."""
    return next((bits for bits in (row.evaluation, row.validation) if bits is not None), float("inf"))


def _read(name: str, folder: RunFolder) -> tuple[Row, list[Point]]:
    """A run's row, and the points of its curve; phases follow each other."""
    where = folder.history(folder.options())
    metrics = {phase: read(path / "metrics.jsonl") for phase, path in where.items()}
    metrics = {phase: records for phase, records in metrics.items() if records}
    if not metrics:
        raise FileNotFoundError(f"{folder.path} was not trained yet: it has no metrics to compare")
    if len(metrics) == 3:  # an end-to-end baseline in the folder of a two-phase run
        del metrics["train"]
    totals = {"step": 0.0, "seconds": 0.0, "flops": 0.0}
    points: list[Point] = []
    last: Record = {}
    for phase, records in metrics.items():
        for record in records:
            if BITS in record:
                points.append(Point(**{key: totals[key] + record.get(key, 0.0) for key in totals}, bits=record[BITS]))
                last = record
        saved = reached(where[phase] / "checkpoints")
        for key in totals:
            totals[key] += max(record.get(key, 0.0) for record in [*records, saved])
    if folder.is_trained():
        folder.check()
    evaluation, remembered = _read_if(Evaluation, folder, "evaluation.json"), _read_if(Remembered, folder, CORPUS)
    row = Row(
        run=name,
        phases=list(metrics),
        parameters=parameters(folder),
        steps=int(totals["step"]),
        seconds=totals["seconds"],
        flops=totals["flops"],
        validation=last.get(BITS),
        validation_error=last.get("validation/standard_error"),
        evaluation=evaluation.headline.value if evaluation else None,
        unit=evaluation.headline.unit if evaluation else None,
        decoder=evaluation.decoder if evaluation else None,
        unknown=evaluation.parts.unknown_share if evaluation and evaluation.parts else None,
        likelihood=evaluation.likelihood if evaluation else None,
        split=evaluation.split if evaluation else None,
        stage=evaluation.stage if evaluation else None,
        corpus=remembered.digest if remembered else None,
        text=evaluation.text if evaluation else None,
    )
    return row, points


def _read_if(kind: type[T], folder: RunFolder, name: str) -> T | None:
    """A file of a run, unless it is missing; it raises ValueError where it is damaged."""
    try:
        return read_as(kind, folder.path / name)
    except FileNotFoundError:
        return None


def parameters(folder: RunFolder) -> int | None:
    """Numbers in the model of the newest checkpoint."""
    latest = Checkpoints(folder.phase(folder.trained_phase()) / "checkpoints").latest()
    try:
        return sum(math.prod(shape) for shape in read_shapes(Path(str(latest)) / "model.safetensors").values())
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


def _cells(row: Row) -> list[str]:
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


def _remark(rows: list[Row]) -> str:
    """Who needs the fewest bits, or why that cannot be said."""
    alike, texts = len({row.corpus for row in rows}) == 1, {row.text for row in rows}
    same = len(texts) == 1 and None not in texts
    if not (alike or same):
        return (
            "The runs were trained on different corpora or chunkers, and not evaluated on the same bytes: their bits do not "
            "compare (`haed evaluate` notes which they are)."
        )
    if len(rows) < 2 or _bits(rows[0]) == float("inf"):
        return ""
    if 0 < len(missing := [row.run for row in rows if row.evaluation is None]) < len(rows):
        return f"{', '.join(missing)}: not evaluated yet (`haed evaluate`); till then compare the validation."
    if not same and len({row.split for row in rows}) > 1:
        return "Not all runs were evaluated on the same split; compare the validation."
    if alone := [row.run for row in rows if row.likelihood == "decoder"]:
        return f"{', '.join(alone)}: evaluated by the decoder alone, not by the mixture; evaluate again to compare."
    found = f"{rows[0].run} needs the fewest bits, {rows[1].run} {_bits(rows[1]) - _bits(rows[0]):.4f} more."
    if not alike:
        found += " Evaluated on the same bytes; their corpora or chunkers differ, so validations do not compare."
    return found


def _html(rows: list[Row], picture: bytes) -> str:
    drawn = image("bits against steps, seconds and model FLOPs", picture)
    cells = [[escape(cell) for cell in _cells(row)] for row in rows]
    return page(
        "Comparison",
        f"<h1>Comparison of {len(rows)} runs</h1><p class=lead>{escape(_remark(rows))}</p>{drawn}<h2>Figures</h2>"
        f"{html_table(HEAD, cells, 2)}<p>Phases of a run follow each other; a phase one counts as far as it is now. "
        "Validation is a fixed subset of the "
        "validation split, with its standard error over windows; phases without a decoded share have none.</p>",
    )


def markdown(rows: list[Row]) -> str:
    """The table as Markdown, and who needs the fewest bits."""
    cells = [[markdown_text(cell) for cell in _cells(row)] for row in rows]
    return f"{markdown_table(HEAD, cells, 2)}\n\n{markdown_text(_remark(rows))}"


def table(found: Comparison) -> str:
    """For people."""
    shown = text_table(HEAD, [_cells(row) for row in found.rows], 2)
    return "\n".join([shown, *filter(None, [_remark(found.rows)])])
