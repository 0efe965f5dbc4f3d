"""Results of an experiment, computed from run folders alone: rows, verdicts, a plot, and a page."""

import csv
import io
import platform
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from data.filesystem import write_atomically, write_json
from experiments.catalogue import OURS, PACKAGE_OPTIONS, ROW_METRICS, Claim, Experiment, Plan, Relation, Variant
from experiments.measures import Measurement
from experiments.plots import PlottedModel, plot_experiment
from pipeline.config import Phase
from pipeline.reporting.comparison import BITS, SEED_NOISE
from pipeline.reporting.rendering import Column, Table, data_uri, render_file
from pipeline.run.files import Environment, Evaluation, read_as
from pipeline.run.metrics import read_metrics

# With fewer than three seeds, differences below SEED_NOISE are not told apart, nor these shares of other metrics.
NOISE, TIME_NOISE, COUNT_NOISE = 0.05, 0.1, 0.02
# Bits that 3 % of the seconds are worth, the error of a clock: a doubling is worth 0.09 to 0.28 (56 to 200 s, WikiText-2).
CLOCK_NOISE = 0.01  # of a pair
HARDLY_LEARNED = 6.4  # bits a token: four fifths of chance, above which the order of models says nothing
_MOST_COMPARISONS = 6  # of more, only those that do not agree are listed


@dataclass
class RunTotals:
    """Steps and seconds of a finished run by phase, its model FLOPs of training, and its parameters."""

    steps: dict[Phase, int]
    seconds: dict[Phase, float]
    flops: float
    parameters: int | None


@dataclass
class VariantRun:
    """A run of a variant: its folder, its totals or why it failed, its measures, and why others are missing."""

    variant: Variant
    seed: int
    folder: Path
    totals: RunTotals | None = None
    failure: str | None = None
    measured: dict[str, Measurement] = field(default_factory=dict, repr=False)
    unmeasured: dict[str, str] = field(default_factory=dict)


@dataclass
class Metric:
    """The mean of a metric over runs, and half of its range."""

    mean: float
    spread: float
    runs: int = 1

    @classmethod
    def summarize(cls, values: Sequence[float]) -> "Metric":
        """Summarise the values of all seeds."""
        return cls(statistics.mean(values), (max(values) - min(values)) / 2, len(values))


@dataclass
class Row:
    """The results of a variant.

    Attributes:
        variant: its name.
        bits: mean of the headline metric over seeds, or None if no run was finished.
        spread: half of the range.
        unit: of both.
        seeds: number of finished runs.
        word_perplexity: 2 to the bits per word, for text; None for data without words. Words are separated by white
            space, and each line end counts as one.
        steps: of all phases.
        seconds: of training, by the clock.
        flops: model FLOPs of training.
        parameters: of the model.
        metrics: further metrics, by name.
        paper: the paper's results.
        failures: messages on unfinished seeds and failed measures.
        untold: metrics that nothing can be said of, see `Measurement`.
        bits_per_token: mean of the same per token. A character of UTF-8 has up to four.
        options: its preset and options, as the experiment declared them when it was run.
    """

    variant: str
    bits: float | None = None
    spread: float = 0
    unit: str = ""
    seeds: int = 0
    word_perplexity: float | None = None
    steps: int = 0
    seconds: float = 0
    flops: float = 0
    parameters: int | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    bits_per_token: float | None = None
    options: str = ""

    def find_metric(self, name: str) -> Metric | None:
        """Return a metric by name: "bits", "seconds" by the one clock of all seeds, "TFLOP", or one of the measures."""
        if name not in ROW_METRICS:
            return self.metrics.get(name)
        if self.bits is None:
            return None
        if name == "bits":
            return Metric(self.bits, self.spread, self.seeds)
        return Metric(self.seconds if name == "seconds" else self.flops / 1e12, 0)


@dataclass
class Verdict:
    """The judgement of a claim.

    Attributes:
        claim: the claim with its source, as a clause.
        word: "agrees", "disagrees" or "cannot tell at this size".
        findings: the differences found, and what is missing.
    """

    claim: str
    word: str
    findings: list[str]

    def __str__(self) -> str:
        return f"{self.word}: {self.claim}; here {'; '.join(self.findings)}."


@dataclass
class Result:
    """The result of an experiment.

    Attributes:
        name: name of the experiment.
        folder: folder of the result, named by its budget.
        verdicts: of each claim.
        notes: on data, seeds, limits and overrides.
        rows: in the paper's order.
        command: the command that makes the same comparison.
        date: day of the result.
        machine: machines and processors of the runs.
        commit: commits of the code that made the runs; empty if not recorded.
    """

    name: str
    folder: str
    verdicts: list[Verdict]
    notes: list[str]
    rows: list[Row]
    command: str = ""
    date: str = ""
    machine: str = ""
    commit: str = ""


def write_results(experiment: Experiment, runs: Sequence[VariantRun], notes: list[str], plan: Plan) -> Result:
    """Read the runs, and write report.html, the plot, and the rows as CSV and JSON into the plan's folder."""
    by_variant: dict[str, list[VariantRun]] = defaultdict(list)
    for run in runs:
        by_variant[run.variant.name].append(run)
    rows = [make_row(runs_of_variant[0].variant, runs_of_variant) for runs_of_variant in by_variant.values()]
    remarks = dict.fromkeys(note for run in runs for measured in run.measured.values() for note in measured.notes)
    machine, commit, versions = _describe_origin(runs)
    notes = [*notes, *describe_plan(experiment, plan), *versions, *remarks]
    verdicts, today = judge_claims(experiment, rows), date.today().isoformat()
    result = Result(experiment.name, str(plan.folder), verdicts, notes, rows, plan.command, today, machine, commit)
    finished = {run.variant.name: run for run in reversed(runs) if run.failure is None}
    plot = plot_rows(experiment, rows, finished)
    examples = {name: x.examples for name, run in finished.items() for x in run.measured.values() if x.examples}
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_json(plan.folder / f"{experiment.name}.json", asdict(result))
    write_atomically(plan.folder / f"{experiment.name}.csv", _format_csv(rows).encode())
    write_atomically(plan.folder / f"{experiment.name}.png", plot)
    write_atomically(plan.folder / "report.html", format_page(experiment, result, plot, examples).encode())
    return result


def _describe_origin(runs: Sequence[VariantRun]) -> tuple[str, str, list[str]]:
    """Return the machines and the commits of all finished runs, and a note on the versions of packages, if any."""
    paths = [(run.variant.package, run.folder / "environment.json") for run in runs if run.failure is None]
    environments = [(package.partition(",")[0], read_as(Environment, path)) for package, path in paths]
    machines = dict.fromkeys(f"{each.machine}, {each.processor}" for _, each in environments)
    commits = dict.fromkeys(each.commit for _, each in environments if each.commit)
    versions = dict.fromkeys(f"{name} {each.versions[name]}" for name, each in environments if name)
    return "; ".join(machines), ", ".join(commits), [f"versions: {', '.join(versions)}"] * bool(versions)


def describe_plan(experiment: Experiment, plan: Plan) -> list[str]:
    """Return notes on seeds, limits, clock and overrides."""
    limit = "models of the papers' sizes, each with its own preset's limits, neither equal steps nor equal seconds"
    if plan.seconds is not None:
        second = "wall time" if plan.clock == "wall" else "what a core works (--clock process)"
        limit = (
            f"equal {experiment.equal}; {plan.seconds:,.0f} s of training in all, seconds of {second}, by a clock of steps "
            f"timed in turns on {platform.machine()}"
        )
    notes = [f"seeds: {plan.seeds}; {limit}; bits are of the valid split"]
    if plan.overrides:
        has_packages = any(variant.package for variant in experiment.variants)
        shared = [word for word in plan.overrides if not has_packages or word.startswith(PACKAGE_OPTIONS)]
        others = [word for word in plan.overrides if word not in shared]
        for models, words in (("models", shared), ("models of this project, not packages", others)):
            notes += [f"for all {models}: {' '.join(words)}"] if words else []
    return notes


def make_row(variant: Variant, runs: Sequence[VariantRun]) -> Row:
    """Summarise the runs of a variant, one for each seed."""
    finished = [run for run in runs if run.failure is None]
    failures = [f"seed {run.seed}: {run.failure}" for run in runs if run.failure is not None]
    failures += [f"seed {run.seed}, {measure}: {why}" for run in runs for measure, why in run.unmeasured.items()]
    if not finished:
        return Row(variant.name, paper=variant.paper, failures=failures, options=variant.described)
    evaluations = [read_as(Evaluation, run.folder / "evaluation.json") for run in finished]
    bits = Metric.summarize([each.alone.value for each in evaluations])
    totals = finished[0].totals
    assert totals is not None
    perplexities = [each.word_perplexity_alone for each in evaluations if each.word_perplexity_alone is not None]
    metrics: dict[str, list[float]] = defaultdict(list)
    for measured in (each for run in finished for each in run.measured.values()):
        for name, value in measured.metrics.items():
            metrics[name].append(value)
    return Row(
        variant=variant.name,
        bits=bits.mean,
        spread=bits.spread,
        unit=evaluations[0].headline.unit,
        seeds=len(finished),
        word_perplexity=statistics.mean(perplexities) if len(perplexities) == len(finished) else None,
        steps=sum(totals.steps.values()),
        seconds=sum(totals.seconds.values()),
        flops=totals.flops,
        parameters=totals.parameters,
        metrics={name: Metric.summarize(values) for name, values in metrics.items()},
        paper=variant.paper,
        failures=failures,
        untold=sorted({name for run in finished for measured in run.measured.values() for name in measured.untold}),
        bits_per_token=statistics.mean(each.bits_alone / each.tokens for each in evaluations),
        options=variant.described,
    )


def judge_claims(experiment: Experiment, rows: Sequence[Row]) -> list[Verdict]:
    """Judge the claims of an experiment."""
    return [judge_claim(claim, experiment, rows) for claim in experiment.claims]


def judge_claim(claim: Claim, experiment: Experiment, rows: Sequence[Row]) -> Verdict:
    """Compare the rows with a claim, pair by pair and bound by bound."""
    sentence = f"{'this project claims' if experiment.source == OURS else 'the paper finds'} that {claim.text}"
    trained = [row for row in rows if row.bits is not None]
    if trained and all(map(_has_hardly_learned, trained)):
        limit = f"every model needs more than {HARDLY_LEARNED} bits of 8 by chance"
        return Verdict(sentence, "cannot tell at this size", [f"no model has learned much: {limit}"])
    if experiment.equal == "seconds":
        rows = [replace(row, spread=row.spread + CLOCK_NOISE / 2) for row in rows]
    by_name = {row.variant: row for row in rows}
    compared = [((first, other), name, relation) for relation, first, other in claim.list_pairs() for name in claim.by]
    bounded = {
        name: {row.variant: metric for row in rows if (metric := row.find_metric(name)) is not None}
        for name in claim.below
    }
    number = len(compared) + sum(map(len, bounded.values()))
    judged = [_judge_pair(by_name, pair, name, claim, relation, number) for pair, name, relation in compared]
    signs, texts = [sign for sign, _ in judged], [text for _, text in judged]
    if len(texts) > _MOST_COMPARISONS:
        texts = [text for sign, text in judged if sign <= 0]
        if left := len(judged) - len(texts):
            texts.append(f"{'the other' if texts else 'all'} {left} are as claimed")
    for name, bound in claim.below.items():
        metrics = bounded[name]
        missing = [row.variant for row in rows if row.variant not in metrics and _lacks(row, name, experiment)]
        signs += [_sign(bound - metric.mean, [metric], name, bound, number) for metric in metrics.values()]
        signs += [0] * (len(missing) if metrics else 1)
        values = [f"{metric.mean:.3f} of {variant}" for variant, metric in metrics.items()]
        untold = [row.variant for row in rows if row.variant in missing and name in row.untold]
        values += [f"{variant} is missing" for variant in missing if variant not in untold]
        values += [f"nothing can be said of {', '.join(untold)}"] if untold else []
        texts.append(f"{name}, below {bound:g}: {', '.join(values) or 'of no model'}")
    word = "disagrees" if -1 in signs else "cannot tell at this size" if 0 in signs else "agrees"
    return Verdict(sentence, word, texts)


def _lacks(row: Row, name: str, experiment: Experiment) -> bool:
    """Return whether a row lacks a metric that it should have: it failed, or nothing can be said of it."""
    failed = any(f", {measure}: " in failure for measure in experiment.measures for failure in row.failures)
    return row.bits is None or failed or name in row.untold


def _judge_pair(
    rows: Mapping[str, Row], pair: tuple[str, str], name: str, claim: Claim, relation: Relation, number: int
) -> tuple[int, str]:
    """Return 1, 0 or −1 for agreement on a pair of variants in a metric, and a text. It is one of `number` comparisons.

    The first is to be lower than the second by the margin, or lower by at most the tolerance, or apart by at most that.
    """
    first, second = (rows[variant].find_metric(name) if variant in rows else None for variant in pair)
    if first is None or second is None:
        of_any = any(row.find_metric(name) is not None for row in rows.values())
        return 0, f"{pair[0]} or {pair[1]} is missing" if of_any else f"no model has {name}"
    lead, unit = second.mean - first.mean, 1.0 if name == "bits" else max(abs(first.mean), abs(second.mean))
    judge = partial(_sign, metrics=[first, second], name=name, unit=unit, number=number)
    suffix = "" if claim.by == ("bits",) else f" in {name}"
    text = f"{pair[0]} {abs(lead):.3f} {'ahead of' if lead >= 0 else 'behind'} {pair[1]}{suffix}"
    if "bits" in name and all(_has_hardly_learned(rows[variant]) for variant in pair):
        return 0, f"{text}, but neither has learned much"
    if relation == "better":
        margin = f" (asked: {claim.margin:g})" if claim.margin else ""
        return judge(lead - claim.margin), text + margin
    bound = claim.tolerance * unit
    if relation == "alike":
        apart = f"{pair[0]} and {pair[1]} {abs(lead):.3f} apart{suffix}"
        return judge(bound - abs(lead)), f"{apart} (no more than {bound:.3f} was asked)"
    return judge(bound - lead), f"{text} (no more than {bound:.3f} ahead was asked)"


def _has_hardly_learned(row: Row) -> bool:
    bits = row.bits if row.bits_per_token is None else row.bits_per_token
    return bits is not None and bits > HARDLY_LEARNED


def _sign(lead: float, metrics: Sequence[Metric], name: str, unit: float, number: int) -> int:
    """Return 1 for, −1 against a claim, 0 if the difference is within noise.

    The noise is the sum of the spreads, and at least that of few seeds if there are fewer than three. A claim fails by
    the worst of its comparisons, and chance has as many trials. So what speaks against it is to exceed the noise times
    the cube root of their number: of equal models with three seeds, one claim in twenty does (simulated).
    """
    noise = sum(each.spread for each in metrics)
    if min(each.runs for each in metrics) < 3:
        is_time, is_count = name.startswith(("seconds", "milliseconds")), name.startswith(("MB", "TFLOP"))
        share = TIME_NOISE if is_time else COUNT_NOISE if is_count else NOISE
        noise = max(noise, SEED_NOISE if name == "bits" else share * unit)
    return 1 if lead > noise else -1 if lead < -(number ** (1 / 3)) * noise else 0


def list_columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the metrics and of the paper's results that occur in any row."""
    measured = dict.fromkeys(name for row in rows for name in row.metrics)
    return list(measured), list(dict.fromkeys(name for row in rows for name in row.paper))


def tabulate_rows(rows: Sequence[Row]) -> Table:
    """Return the table of the rows."""

    def format_mean(metric: Metric) -> str:
        return f"{metric.mean:,.3f}" if metric.mean < 10 else f"{metric.mean:,.1f}"

    def getter(values: str, name: str) -> Callable[[Row], Any]:
        return lambda row: getattr(row, values).get(name)

    def format_bits(row: Row) -> str:
        spread = f" ± {row.spread:.3f}" if row.seeds > 1 else ""
        return "failed" if row.bits is None else f"{row.bits:.3f}{spread} {row.unit}"

    measured, paper = list_columns(rows)
    columns = [
        Column("", lambda row: row.variant),
        Column("bits", format_bits, "{}"),
        Column("seeds", lambda row: row.seeds, "{}"),
        Column("words, perplexity", lambda row: row.word_perplexity, "{:,.0f}"),
        Column("steps", lambda row: row.steps, "{:,}"),
        Column("seconds", lambda row: row.seconds, "{:,.0f}"),
        Column("parameters", lambda row: row.parameters, "{:,}"),
        Column("TFLOP", lambda row: row.flops / 1e12, "{:.2f}"),
        *(Column(name, getter("metrics", name), format_mean) for name in measured),
        *(Column(f"paper: {name}", getter("paper", name), "{:g}") for name in paper),
    ]
    return Table.from_columns(columns, rows)


def _format_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    measured, paper = list_columns(rows)
    columns = [name for name in asdict(rows[0]) if name not in ("metrics", "paper", "failures")]
    writer = csv.writer(text)
    heads = [head for name in measured for head in (name, f"{name}, spread")]
    writer.writerow([*columns, *heads, *(f"paper: {name}" for name in paper)])
    for row in rows:
        metrics = [row.metrics.get(name) for name in measured]
        values = [value for each in metrics for value in ((each.mean, each.spread) if each else ("", ""))]
        writer.writerow([*(getattr(row, name) for name in columns), *values, *(row.paper.get(x, "") for x in paper)])
    return text.getvalue()


def format_result(result: Result) -> str:
    """Format the result as a text table for a terminal."""
    notes = "\n".join(f"- {note}" for note in list_notes(result))
    table = tabulate_rows(result.rows).to_text()
    verdicts = [line for verdict in result.verdicts for line in (str(verdict), "")]
    return "\n".join([table, "", *verdicts, notes, "", f"{result.folder}/report.html"])


def list_notes(result: Result) -> list[str]:
    """Return the notes, what few seeds cannot show, and messages on unfinished runs and failed measures."""
    few = f"fewer than three seeds: differences below {SEED_NOISE} bits are not told apart"
    failures = [f"failed: {row.variant}, {why}" for row in result.rows for why in row.failures]
    return [*result.notes, *([few] if any(row.seeds < 3 for row in result.rows) else []), *failures]


def format_page(experiment: Experiment, result: Result, plot: bytes, examples: dict[str, list[list[str]]]) -> str:
    """Return report.html, with tables of examples by variant."""
    return render_file(
        "experiment.html",
        title=experiment.name,
        source=experiment.source,
        question=experiment.question,
        verdicts=result.verdicts,
        picture=data_uri(plot),
        results=tabulate_rows(result.rows),
        notes=list_notes(result),
        examples={name: _tabulate_examples(rows) for name, rows in examples.items()},
    )


def _tabulate_examples(rows: list[list[str]]) -> Table:
    head, *lines = rows
    numbers = all(re.fullmatch(r"–|-?[0-9,]+(\.[0-9]+)?", cell) for line in lines for cell in line[1:])
    return Table(head, lines, [False, *(numbers for _ in head[1:])])


def plot_rows(experiment: Experiment, rows: Sequence[Row], finished: dict[str, VariantRun]) -> bytes:
    """Plot the metric of the first claim beside the paper's, and a second plot.

    The second plot has bits against the metric `across`, the lines that were measured, or validation curves.

    Args:
        experiment: the experiment.
        rows: of all variants.
        finished: a finished run of each variant that has one.
    """
    models, axes, plotted = [], ("seconds of training", "validation, bits per token"), experiment.claims[0].by[0]
    _, paper = list_columns(rows)
    paper.sort(key=lambda name: name != plotted)  # first the metric that is plotted of ours
    for row in rows:
        metric, unit = row.find_metric(plotted), row.unit if plotted == "bits" else plotted
        models.append(model := PlottedModel(row.variant, unit, paper=[row.paper.get(name) for name in paper]))
        if metric is not None:
            model.value, model.spread = metric.mean, metric.spread
        if experiment.across is not None:
            axes = (experiment.across, "bits")
            if (across := row.find_metric(experiment.across)) is not None and row.bits is not None:
                model.place = (across.mean, row.bits)
        elif row.variant in finished:
            lines = [each for each in finished[row.variant].measured.values() if each.line]
            model.line = lines[0].line if lines else _read_curve(finished[row.variant])
            axes = lines[0].axes if lines else axes
    return plot_experiment(models, paper, axes)


def _read_curve(run: VariantRun) -> list[tuple[float, float]]:
    """Return seconds and bits of a run's validations, the phases one after the other."""
    before, points = 0.0, []
    assert run.totals is not None
    for phase, seconds in run.totals.seconds.items():
        path, step_seconds = run.folder / phase / "metrics.jsonl", seconds / max(1, run.totals.steps[phase])
        records = read_metrics(path) if path.is_file() else []
        points += [(before + record["step"] * step_seconds, record[BITS]) for record in records if BITS in record]
        before += seconds
    return points
