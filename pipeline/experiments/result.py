"""Results of an experiment, computed from run folders alone: rows, and a verdict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.experiments.experiment import OURS, Arm, Experiment
from pipeline.experiments.measures import Measured
from pipeline.experiments.running import Done
from pipeline.run.files import Evaluation, read_as
from pipeline.run.run_directory import RunFolder

NOISE = 0.02  # of bits, and as a share of other figures: with a single seed, differences below that are not told apart
_TOLD = 6  # comparisons; of more only those that do not agree
_MOST = 64  # bits a word: beyond them white space does not divide the text into words


@dataclass
class Figure:
    """A mean over runs, and half of the range."""

    mean: float
    spread: float
    runs: int = 1

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Summarise the values of all seeds."""
        return cls(statistics.mean(values), (max(values) - min(values)) / 2, len(values))


@dataclass
class Row:
    """The results of an arm.

    Attributes:
        arm: its name.
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
        figures: further metrics, by name.
        paper: the paper's results.
        failures: messages on unfinished seeds and failed measures.
    """

    arm: str
    bits: float | None
    spread: float
    unit: str
    seeds: int
    word_perplexity: float | None
    steps: int
    seconds: float
    flops: float
    parameters: int | None
    figures: dict[str, Figure] = field(default_factory=dict)
    paper: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str) -> Figure | None:
        """Return a metric by name: "bits", or one of the measures."""
        if name == "bits":
            return None if self.bits is None else Figure(self.bits, self.spread, self.seeds)
        return self.figures.get(name)


@dataclass
class Result:
    """The rows in the paper's order, the verdict, notes, and the folder."""

    name: str
    folder: str
    verdict: str
    notes: list[str]
    rows: list[Row]


def columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the names of the metrics and of the paper's results that occur in any row."""
    measured = dict.fromkeys(name for row in rows for name in row.figures)
    return list(measured), list(dict.fromkeys(name for row in rows for name in row.paper))


def verdict(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Judge the claim, pair by pair and bound by bound: the result agrees, disagrees, or cannot tell at this size."""
    by = {row.arm: row for row in rows}
    found = [
        *(_ahead(by, pair, name, experiment) for pair in experiment.better for name in experiment.by),
        *(_no_better(by, pair, name, experiment) for pair in experiment.no_better for name in experiment.by),
    ]
    signs, said = [sign for sign, _ in found], [each for _, each in found]
    if len(said) > _TOLD:
        apart = [each for sign, each in found if sign <= 0]
        said = [*apart, f"{'the other' if apart else 'all'} {len(said) - len(apart)} comparisons are as claimed"]
    for name, most in experiment.below.items():
        known = {row.arm: (row, figure) for row in rows if (figure := row.figure(name)) is not None}
        missing = [row.arm for row in rows if row.arm not in known and _lacks(row, name, experiment, rows)]
        signs += [_sign(most - x.mean, _noise([x], most)) for _, x in known.values()]
        signs += [0] * (len(missing) if known else 1)
        told = [
            *(f"{x.mean:.3f} of {arm}" for arm, (_, x) in known.items()),
            *(f"{arm} is missing" for arm in missing),
        ]
        said.append(f"{name}, below {most:g}: {', '.join(told) or 'of no model'}")
    whose = "this project claims" if experiment.source == OURS else "the paper finds"
    word = "disagrees" if -1 in signs else "cannot tell at this size" if 0 in signs else "agrees"
    return f"{word}: {whose} that {experiment.claim}; here {'; '.join(said)}."


def _lacks(row: Row, name: str, asked: Experiment, rows: Sequence[Row]) -> bool:
    """Return whether a row lacks a metric that it should have.

    It should if it failed, or if it has all metrics of another row except this one.
    """
    failed = any(f", {measure}: " in failure for measure in asked.measures for failure in row.failures)
    alike = any(name in other.figures and {*row.figures, name} == {*other.figures} for other in rows)
    return row.bits is None or failed or alike


def _ahead(by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment) -> tuple[int, str]:
    """Return the sign of whether the first of a pair is lower in a metric by the margin, and a text."""
    if (compared := _compared(by, pair, name, asked)) is None:
        return 0, f"{pair[0]} or {pair[1]} is missing"
    said = f"{compared.said} (asked: {asked.margin:g})" if asked.margin else compared.said
    return _sign(compared.ahead - asked.margin, compared.noise), said


def _no_better(by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment) -> tuple[int, str]:
    """Return the sign of whether the first is ahead of the second by at most `NOISE`, and a text.

    It is undecided if the seeds differ by more.
    """
    if (compared := _compared(by, pair, name, asked)) is None:
        return 0, f"{pair[0]} or {pair[1]} is missing"
    bound = NOISE * compared.unit
    said = f"{compared.said} (no more than {bound:.3f} ahead was asked)"
    return (1 if compared.ahead <= bound else 0 if compared.ahead <= compared.noise else -1), said


@dataclass
class _Compared:
    """The lead of the first of a pair in a metric, the part of it that may be noise, its unit, and a text."""

    ahead: float
    noise: float
    unit: float
    said: str


def _compared(by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment) -> _Compared | None:
    """Compare a pair of arms in a metric. Return None if one of them does not have it."""
    first, second = (by[arm].figure(name) if arm in by else None for arm in pair)
    if first is None or second is None:
        return None
    ahead, unit = second.mean - first.mean, 1.0 if name == "bits" else max(abs(first.mean), abs(second.mean))
    what = "" if asked.by == ("bits",) else f" in {name}"
    side = "ahead of" if ahead >= 0 else "behind"
    return _Compared(ahead, _noise([first, second], unit), unit, f"{pair[0]} {abs(ahead):.3f} {side} {pair[1]}{what}")


def _noise(figures: Sequence[Figure], unit: float) -> float:
    """Return the bound of noise: the sum of the spreads, and at least `NOISE` units if a metric is of a single run."""
    spread = sum(each.spread for each in figures)
    return spread if min(each.runs for each in figures) > 1 else max(spread, NOISE * unit)


def _sign(ahead: float, noise: float) -> int:
    """Return 1 for, −1 against a claim, 0 if the difference is within noise."""
    return 0 if abs(ahead) <= noise else 1 if ahead > 0 else -1


def row_of(arm: Arm, of: Sequence[Done], words: int | None) -> Row:
    """Summarise the runs of an arm, one for each seed. `words` is the number of words in the scored text."""
    whole = [each for each in of if each.failure is None]
    failures = [f"seed {each.seed}: {each.failure}" for each in of if each.failure is not None]
    failures += [f"seed {each.seed}, {what}: {why}" for each in of for what, why in each.unmeasured.items()]
    if not whole:
        return Row(arm.name, None, 0, "", 0, None, 0, 0, 0, None, {}, arm.paper, failures)
    evaluations = [read_as(Evaluation, each.run / "evaluation.json") for each in whole]
    bits = Figure.of([each.headline.value for each in evaluations])
    finished = whole[0].finished
    assert finished is not None
    perplexity = None
    if words and max(each.bits / words for each in evaluations) < _MOST:
        perplexity = statistics.mean(2 ** (each.bits / words) for each in evaluations)
    measured: list[Measured] = [found for each in whole for found in each.measured.values()]
    names = dict.fromkeys(name for found in measured for name in found.figures)
    return Row(
        arm=arm.name,
        bits=bits.mean,
        spread=bits.spread,
        unit=evaluations[0].headline.unit,
        seeds=len(whole),
        word_perplexity=perplexity,
        steps=sum(finished.steps.values()),
        seconds=sum(finished.seconds.values()),
        flops=finished.flops,
        parameters=finished.parameters,
        figures={name: Figure.of([x.figures[name] for x in measured if name in x.figures]) for name in names},
        paper=arm.paper,
        failures=failures,
    )


def words(done: Sequence[Done]) -> int | None:
    """Return the number of words in the scored text, separated by white space; line ends count as words too."""
    for each in done:
        if each.failure is None and each.arm.data == "text" and not each.arm.package:
            text = b"".join(RunFolder(each.run).open_corpus().iterate_original_blocks("valid"))
            return len(text.split()) + text.count(b"\n")
    return None
