"""Stage `compare`: table of several runs, and curves over steps, seconds and model FLOPs (as the paper's Figure 4).

A verdict needs equal budgets, within a tenth. If the steps of all runs do the same work, the budget is steps: a busy
machine takes longer for them, but learns no more. If steps differ in cost, the budget is seconds if all runs were
limited by seconds on the same kind of device, otherwise model FLOPs.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from data.filesystem import write_atomically
from pipeline.config import (
    PHASES,
    ConfigError,
    Options,
    applies_to,
    check_output_folder,
    explain_no_effect,
    flatten_tree,
)
from pipeline.console import markdown_text, warn_once
from pipeline.reporting.plots import Point, plot_comparison
from pipeline.reporting.rendering import Column, Table, data_uri, render_file
from pipeline.reporting.run_state import count_parameters, phase_metrics
from pipeline.run.checkpoints import read_newest_state, read_phase_one_cost, read_position
from pipeline.run.files import CorpusRecord, Evaluation, format_number, read_as
from pipeline.run.metrics import Record
from pipeline.run.run_directory import CORPUS, RunFolder
from pipeline.suggestions import format_command, name_flows

T = TypeVar("T")
BITS = "validation/bits_per_token"
Budget = Literal["steps", "seconds", "flops"]
WITHIN = 0.1  # largest relative difference of equal budgets
# Bits by which two seeds of one model may differ: twice the largest deviation of a difference that was seen (dev/LOG.md).
SEED_NOISE = 0.08
SHOWN = 12  # maximum number of options in a text; JSON has all
_NARROW = 6  # columns of a table in an artifact, beside which Prefect shows a column of its own
_ENDS = ("steps", "seconds", "epochs")
_LIMITS = (*_ENDS, "patience", "part_from", "part_to")
# Options that change the cost of a step.
_WORK = ("model.", "batch.", "iem.", "chunker.", "precision", "launcher.processes")
_TOLD = ("seed", "threads", "device", *_WORK, "optimizer.", "pretrain.", "finetune.", "train.", "validation.")
_NAMES: dict[Budget, str] = {"steps": "steps", "seconds": "seconds", "flops": "model FLOPs"}


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
        validated: how it was validated: the number of windows, their chunks, and the precision.
        evaluation: metric of evaluation.json of the model alone, or None if the run was not evaluated.
        unit: unit of `evaluation`: bits/char, or bits/dim for pictures and sound.
        decoder: the same metric by the decoder of a mixture alone.
        unknown: share of chunks outside the vocabulary of the mixture, which its decoder spells.
        split: split of the evaluation.
        likelihood: for a run with a mixture, `mixture`, or `decoder` if only the decoder was evaluated.
        stage: phase of the evaluated checkpoint.
        corpus: digest of the corpus and its chunking. Validations on different ones are not comparable.
        text: digest of the evaluated text. Evaluations of different texts are not comparable.
        remembering: the same metric with memory, or None without one. Runs are compared without it.
        fallback: why a checkpoint other than the best is used, or None.
        stale: true if an earlier checkpoint than the present one was evaluated.
        scoring: how it was evaluated: the share of a window that is newly scored, the length of a window relative to
            that of training, and the precision.
    """

    run: str
    phases: list[str]
    parameters: int | None
    steps: int
    seconds: float
    flops: float
    validation: float | None = None
    validation_error: float | None = None
    validated: tuple[int, int, str] | None = None
    evaluation: float | None = None
    unit: str | None = None
    decoder: float | None = None
    unknown: float | None = None
    likelihood: str | None = None
    split: str | None = None
    stage: str | None = None
    corpus: str | None = None
    text: str | None = None
    remembering: float | None = None
    fallback: str | None = None
    stale: bool = False
    scoring: tuple[float, float, str] | None = None


def _format_validation(row: Row) -> str | None:
    error = "" if row.validation_error is None else f" ± {row.validation_error:.4f}"
    return None if row.validation is None else f"{row.validation:.4f}{error}"


def _format_evaluation(row: Row) -> str | None:
    alone = ", decoder alone" if row.likelihood == "decoder" else ""
    alone += ", of an earlier checkpoint" if row.stale else ""
    return None if row.evaluation is None else f"{row.evaluation:.4f} {row.unit} ({row.split}, {row.stage}{alone})"


COLUMNS = (
    Column("run", lambda row: row.run),
    Column("phases", lambda row: " + ".join(row.phases)),
    Column("parameters", lambda row: row.parameters, "{:,}"),
    Column("steps", lambda row: row.steps, "{:,}"),
    Column("seconds", lambda row: row.seconds, "{:,.0f}"),
    Column("model FLOPs", lambda row: row.flops, "{:.3g}"),
    Column("validation, bits/token", _format_validation, "{}"),
    Column("evaluation", _format_evaluation, "{}"),
    Column("with memory", lambda row: row.remembering, "{:.4f}"),
    Column("decoder alone", lambda row: row.decoder, "{:.4f}"),
    Column("unknown chunks", lambda row: row.unknown, "{:.2%}"),
)


@dataclass
class RunDifference:
    """Difference between runs: a name or the key of an option, and its value by run."""

    what: str
    values: dict[str, Any]

    def __str__(self) -> str:
        by_value: dict[str, list[str]] = {}
        for run, value in self.values.items():
            by_value.setdefault(_format_value(value), []).append(run)
        values = [f"{value} ({', '.join(runs)})" for value, runs in by_value.items()]
        return f"{self.what}: {'; '.join(values)}"


@dataclass
class Comparison:
    """Result of a comparison of runs.

    Attributes:
        rows: the runs, from fewest to most bits.
        page: path of the HTML page; empty if none was written.
        picture: path of the plot of their curves; empty if none was written.
        verdict: the run with the fewest bits at an equal budget; None: there is no verdict.
        refused: why there is no verdict; None: there is one, or nothing to compare.
        differing: differences in data, steps, seconds, FLOPs and options.
    """

    rows: list[Row]
    page: str = ""
    picture: str = ""
    verdict: str | None = None
    refused: str | None = None
    differing: list[RunDifference] = field(default_factory=list)

    @property
    def table(self) -> Table:
        """Return the table of the runs."""
        return Table.from_columns(COLUMNS, self.rows)

    @property
    def verdict_summary(self) -> str:
        """Return the verdict, or why there is none, after a note on each run that used a fallback checkpoint."""
        fallen = [f"{row.run}: {row.fallback}." for row in self.rows if row.fallback]
        return " ".join([*fallen, *filter(None, [self.verdict, self.refused])])

    @property
    def shown_differences(self) -> list[RunDifference]:
        """Return the differences between the runs, with at most 12 options."""
        budgets = sum("." not in each.what for each in self.differing)  # data and budgets; the rest are options
        return self.differing[: budgets + SHOWN]

    @property
    def hidden_differences(self) -> str:
        """Return how many differences are not shown, as a sentence; empty if all are."""
        left = len(self.differing) - len(self.shown_differences)
        return f"and {left} more options (the JSON output has all)" if left else ""

    @property
    def difference_lines(self) -> list[str]:
        """Return the differences between the runs as lines of text, with at most 12 options."""
        return [*map(str, self.shown_differences), *filter(None, [self.hidden_differences])]

    @property
    def difference_table(self) -> Table:
        """Return a table with the runs as rows, and with their differences as columns."""
        shown = self.shown_differences
        cells = [[_format_value(each.values.get(row.run)) for each in shown] for row in self.rows]
        numeric = [all(isinstance(value, int | float) for value in each.values.values()) for each in shown]
        rows = [[row.run, *line] for row, line in zip(self.rows, cells, strict=True)]
        return Table(["run", *(each.what for each in shown)], rows, [False, *numeric])


def choose_output(runs_dir: str) -> Path:
    """Return the folder of comparisons beside runs: `comparison`, or `comparison-of-runs` if that is a run."""
    folder = Path(runs_dir) / "comparison"
    return folder.with_name("comparison-of-runs") if (folder / "config.yaml").exists() else folder


def compare_runs(runs: list[str], runs_dir: str, output: Path) -> Comparison:
    """Read the metrics of runs and write comparison.html and comparison.png into `output`.

    Raises:
        ConfigError: the output is a URL.
        FileNotFoundError: a run does not exist, or was not trained.
        ValueError: a file of a run is damaged.
    """
    check_output_folder(runs_dir, "runs_dir")
    check_output_folder(output, "output")
    if (output / "config.yaml").exists():
        raise ConfigError(f"{output} is a run. Name another folder for the comparison with `--output`")
    named: dict[Path, tuple[str, RunFolder]] = {}
    for name in runs:
        folder = RunFolder.find(name, runs_dir)
        named.setdefault(folder.path.resolve(), (name, folder))
    result, curves = make_comparison(dict(named.values()))
    picture = plot_comparison(curves)
    output.mkdir(parents=True, exist_ok=True)
    result.page, result.picture = str(output / "comparison.html"), str(output / "comparison.png")
    write_atomically(Path(result.picture), picture)
    page = render_file("comparison.html", comparison=result, picture=data_uri(picture))
    write_atomically(Path(result.page), page.encode())
    return result


def make_comparison(folders: Mapping[str, RunFolder]) -> tuple[Comparison, dict[str, list[Point]]]:
    """Compare runs, and return the comparison with the points of their curves.

    Raises:
        FileNotFoundError: a run was not trained.
        ValueError: a file of a run is damaged.
    """
    options = {name: folder.load_options() for name, folder in folders.items()}
    loaded = {name: _read_row(name, folder, options[name]) for name, folder in folders.items()}
    rows = sorted((row for row, _ in loaded.values()), key=_ranking_bits)
    result = Comparison(rows)
    result.differing = find_differences(rows, options)
    by = choose_budget(rows, options, result.differing)
    if refused := _explain_incomparable(rows, folders, options):
        result.refused = refused
    elif refused := explain_unequal_budgets(rows, options, by):
        result.refused = f"{refused}."
    else:
        result.verdict = _format_verdict(rows, by)
    return result, {row.run: loaded[row.run][1] for row in rows}


def _ranking_bits(row: Row) -> float:
    """Return the bits that rows are sorted by: of the evaluation, or of the validation if there is no evaluation."""
    return next((bits for bits in (row.evaluation, row.validation) if bits is not None), float("inf"))


def _read_row(name: str, folder: RunFolder, options: Options) -> tuple[Row, list[Point]]:
    """Read the row of a run and the points of its curve, its phases one after the other.

    If the run is not being trained, a phase counts only up to its newest checkpoint, since training would resume there.
    """
    where = folder.phase_history(options)
    if not (metrics := phase_metrics(folder, where)):
        raise FileNotFoundError(f"{folder.path} is not trained, so it has no metrics to compare")
    # What phase one costs is known from the phase two that began with it, whatever became of its folder.
    first = read_phase_one_cost(where["finetune"] / "checkpoints")
    if "finetune" in metrics or "train" not in metrics:
        phases = [
            phase for phase in where if phase != "train" and (phase in metrics or (first and phase != "finetune"))
        ]
    else:
        phases = ["train"]  # an end-to-end baseline in the folder of a run that has a phase one
    totals = {"step": 0.0, "seconds": 0.0, "flops": 0.0}
    points: list[Point] = []
    last: Record = {}
    for phase in phases:
        last = {}  # a validation of an earlier phase is of another loss
        costs = [first] if first and phase != "finetune" else [read_position(where[phase] / "checkpoints")]
        records = metrics.get(phase, [])
        if phase != "finetune":
            records = [record for record in records if record["step"] <= first.get("step", math.inf)]
        for record in records:
            if BITS in record:
                points.append(Point(**{key: totals[key] + record.get(key, 0.0) for key in totals}, bits=record[BITS]))
                last = record
        for key in totals:
            totals[key] += max(record.get(key, 0.0) for record in [*records, *costs])
    _warn_missing_validation(where[phases[-1]], metrics.get(phases[-1], []))
    present = folder.select_checkpoint() if folder.is_trained() else None
    if present is not None:
        folder.check_unchanged(checkpoint=present)  # a process reads the options of a run only once
    corpus = _read_if(CorpusRecord, folder, CORPUS)
    row = Row(
        run=name,
        phases=phases,
        parameters=count_parameters(folder),
        steps=int(totals["step"]),
        seconds=totals["seconds"],
        flops=totals["flops"],
        validation=last.get(BITS),
        validation_error=last.get("validation/standard_error"),
        validated=(options.validation.windows, options.batch.context, options.precision) if last else None,
        corpus=corpus.digest if corpus else None,
        fallback=present.fallback if present else None,
    )
    if evaluation := _read_if(Evaluation, folder, "evaluation.json"):
        row.split, row.stage, row.text = evaluation.split, evaluation.stage, evaluation.text
        row.evaluation, row.unit = evaluation.alone.value, evaluation.headline.unit
        row.remembering = evaluation.headline.value if evaluation.remembered else None
        row.likelihood, row.decoder = evaluation.likelihood, evaluation.decoder_metric
        row.unknown = evaluation.parts.unknown_share if evaluation.parts else None
        if present is not None:
            windows = (evaluation.stride / evaluation.context, evaluation.context / options.batch.context)
            row.scoring = (*windows, evaluation.precision)
            row.stale = evaluation.checkpoint != folder.select_checkpoint(options.evaluate.stage).digest
    return row, points


def _warn_missing_validation(folder: Path, records: list[Record]) -> None:
    """Warn if the records of a phase's metrics end before its last validation, as after a power cut."""
    steps = [record["step"] for record in records if any(key.startswith("validation/") for key in record)]
    validated = read_newest_state(folder / "checkpoints").get("validated_at", {}).get("step", 0)
    if validated > max(steps, default=0):
        warn_once(
            f"{folder}/metrics.jsonl ends before the validation of step {validated:,}, so an older one is compared"
        )


def _read_if(kind: type[T], folder: RunFolder, name: str) -> T | None:
    """Read a file of a run; return None if it is missing, raise ValueError if it is damaged."""
    try:
        return read_as(kind, folder.path / name)
    except FileNotFoundError:
        return None


def _share_corpus_and_text(rows: list[Row]) -> tuple[bool, bool]:
    """Return whether the runs were trained on one corpus, and whether they were evaluated on the same bytes."""
    texts = {row.text for row in rows}
    return len({row.corpus for row in rows}) == 1, len(texts) == 1 and None not in texts


def _explain_incomparable(
    rows: list[Row], folders: Mapping[str, RunFolder], options: Mapping[str, Options]
) -> str | None:
    """Explain why bits are not comparable whatever the budgets, and what to do; return None if they are."""

    def suggest_evaluations(evaluated: Iterable[Row], *words: str) -> str:
        return " and ".join(format_command("evaluate", folders[row.run].path, *words) for row in evaluated)

    if len(rows) < 2:
        return f"{rows[0].run} is the only run. Name another one beside it."
    alike, same = _share_corpus_and_text(rows)
    if not (alike or same):
        of_values = any(row.unit == "bits/dim" for row in rows)  # such as pictures, which `--text` does not read
        return (
            "The runs have different corpora or chunkers, and were not evaluated on the same bytes. Their bits are not comparable."
            + ("" if of_values else " To compare them, score one file with each: `haed evaluate RUN --text FILE`.")
        )
    if _ranking_bits(rows[0]) == float("inf"):
        return f"No run has a validation or an evaluation yet. Run {suggest_evaluations(rows)}."
    if rows[0].evaluation is None and len({row.validated for row in rows}) > 1:
        each = "; ".join(
            f"{row.run}: {row.validated[0]} windows of {row.validated[1]} chunks, {row.validated[2]}"
            if row.validated
            else f"{row.run}: not validated in its last phase"
            for row in rows
        )
        return f"The runs were not validated in the same way ({each}). Run {suggest_evaluations(rows)}."
    if 0 < len(missing := [row for row in rows if row.evaluation is None]) < len(rows):
        return f"{_name_runs(missing)}: not evaluated. Run {suggest_evaluations(missing)}, or compare the validation."
    if not same and (other_splits := [row for row in rows if row.split != rows[0].split]):
        return (
            "The runs were evaluated on different splits. Compare the validation, or evaluate them on one: "
            f"{suggest_evaluations(other_splits, f'evaluate.split={rows[0].split}')}."
        )
    if alone := [row for row in rows if row.likelihood == "decoder"]:
        by_mixture = suggest_evaluations(alone, "evaluate.likelihood=mixture")
        return f"{_name_runs(alone)}: evaluated by the decoder alone, not by the mixture. Run {by_mixture} to compare."
    if stale := [row for row in rows if row.stale]:
        checkpoint = "the evaluation is of another checkpoint than the present one"
        return f"{_name_runs(stale)}: {checkpoint}. Run {suggest_evaluations(stale)} again to compare."
    if len({row.scoring for row in rows if row.scoring}) > 1:
        each = "; ".join(
            f"{row.run}: {row.scoring[0]:.3g} of a window at a time, windows {row.scoring[1]:.3g} times those of training, {row.scoring[2]}"
            for row in rows
            if row.scoring
        )
        share, length, precision = next(row.scoring for row in rows if row.scoring)
        again = []
        for row in (row for row in rows if row.scoring != (share, length, precision)):
            context = round(length * options[row.run].batch.context)
            words = (f"evaluate.stride={max(1, round(share * context))}", f"batch.context={context}")
            again.append(suggest_evaluations([row], *words, f"evaluate.precision={precision}"))
        return f"The runs were not evaluated in the same way ({each}). Run {' and '.join(again)}."
    return None


def _name_runs(rows: Iterable[Row]) -> str:
    return ", ".join(row.run for row in rows)


def _format_verdict(rows: list[Row], by: Budget) -> str:
    """Name the run with the fewest bits, or the first two if they are equal to four decimals."""
    more = f"{_ranking_bits(rows[1]) - _ranking_bits(rows[0]):.4f}"
    verdict = f"{rows[0].run} needs the fewest bits. {rows[1].run} needs {more} more."
    if float(more) == 0:
        verdict = f"{rows[0].run} and {rows[1].run} need the same bits, to four decimals."
    elif float(more) < SEED_NOISE:
        verdict += f" Two seeds may differ by as much as {SEED_NOISE} bits, so compare several."
    if not _share_corpus_and_text(rows)[0]:
        verdict += (
            " The evaluated bytes are the same, but the corpora or chunkers differ. So validations are not comparable."
        )
    return f"At equal {_NAMES[by]} (within a tenth) {verdict}"


def format_markdown(comparison: Comparison) -> str:
    """Format the comparison as Markdown: the verdict or why there is none, narrow tables, and the differences."""
    tables = [part.to_markdown() for part in comparison.table.split_columns(_NARROW)]
    text = "\n\n".join([*filter(None, [markdown_text(name_flows(comparison.verdict_summary))]), *tables])
    if comparison.differing:
        text += "\n\nWhat differs:\n\n" + "\n".join(f"- {markdown_text(line)}" for line in comparison.difference_lines)
    return text


def format_comparison(comparison: Comparison) -> str:
    """Format the comparison as text for a terminal."""
    differ = ["what differs", *(f"  {line}" for line in comparison.difference_lines)] if comparison.differing else []
    return "\n".join([comparison.table.to_text(), *differ, *filter(None, [comparison.verdict_summary])])


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    return f"{value:,}" if type(value) is int else "–" if value is None else str(value)


def find_differences(rows: Sequence[Row], options: Mapping[str, Options]) -> list[RunDifference]:
    """Return the differences between runs: data, steps, seconds, model FLOPs, then options that affect training.

    Args:
        rows: the runs.
        options: options of each run, by its name.
    """
    spent: dict[str, Callable[[Row], Any]] = {
        "data": lambda row: row.corpus and row.corpus[:12],
        "phases": lambda row: " + ".join(row.phases),
        "steps": lambda row: row.steps,
        "seconds": lambda row: round(row.seconds, 1),
        "model FLOPs": lambda row: row.flops,
    }
    differences = [RunDifference(title, {row.run: value(row) for row in rows}) for title, value in spent.items()]
    flat = {name: dict(flatten_tree(asdict(each))) for name, each in options.items()}
    for key in dict.fromkeys(key for each in flat.values() for key in each):
        section = key.split(".")[0]
        # A phase's options are those of the runs that trained it; "phases" tells who did.
        # So are those of a part of the model; "model.kind" and the kinds of parts tell who has it.
        compared = [
            row
            for row in rows
            if (section not in PHASES or section in {phase.split()[0] for phase in row.phases})
            and applies_to(key, options[row.run].model.kind)
            and not explain_no_effect(key, options[row.run])
        ]
        if key.startswith(_TOLD) and compared:
            differences.append(RunDifference(key, {row.run: flat[row.run].get(key) for row in compared}))
    return [each for each in differences if len({_format_value(value) for value in each.values.values()}) > 1]


def choose_budget(rows: Sequence[Row], options: Mapping[str, Options], differences: Sequence[RunDifference]) -> Budget:
    """Return the budget by which the runs are compared; see the module's documentation."""
    changed = {each.what for each in differences}
    phases = ("pretrain.", "finetune.", "train.")
    if not any(
        key == "phases" or key.startswith(_WORK) or (key.startswith(phases) and key.rpartition(".")[2] not in _LIMITS)
        for key in changed
    ):
        return "steps"
    limited = {
        name
        for row in rows
        for phase in row.phases
        for name in _ENDS
        if getattr(getattr(options[row.run], phase.split()[0]), name)
    }
    return "seconds" if limited == {"seconds"} and "device" not in changed else "flops"


def explain_unequal_budgets(rows: Sequence[Row], options: Mapping[str, Options], by: Budget) -> str | None:
    """Explain why unequal budgets allow no verdict, and what to do; return None if the budgets are equal enough."""
    spent = {row.run: float(getattr(row, by)) for row in rows}
    least, most = min(spent, key=lambda run: spent[run]), max(spent, key=lambda run: spent[run])
    if spent[least] >= (1 - WITHIN) * spent[most]:
        return None
    trained = [phase.split()[0] for row in rows if row.run == least for phase in row.phases]
    limits = [
        f"{phase}.{name}=" for phase in trained for name in _ENDS if getattr(getattr(options[least], phase), name)
    ]
    whole = all(value == int(value) and value < 1e9 for value in (spent[least], spent[most]))
    few, many = (_format_value(int(spent[run]) if whole else spent[run]) for run in (least, most))
    return (
        f"No verdict: the budgets differ by more than a tenth. {least} has {few} {_NAMES[by]}, {most} "
        f"has {many}. Train the shorter runs further with a higher {' and '.join(limits)}, and evaluate them again"
    )
