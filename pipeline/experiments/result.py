"""What came out of an experiment, from run folders alone: rows, and a verdict."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.experiments.experiment import OURS, Arm, Experiment
from pipeline.experiments.measures import Measured
from pipeline.experiments.running import Done
from pipeline.run.files import Evaluation, read_as
from pipeline.run.folder import RunFolder

NOISE = 0.02  # of bits, and as a share of other figures: with a single seed, differences below that are not told apart
_TOLD = 6  # comparisons; of more only those that do not agree
_MOST = 64  # bits a word: beyond them white space does not divide the text into words


@dataclass
class Figure:
    """A mean over seeds, and half of the distance of the extremes."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        """Of each seed's."""
        return cls(statistics.mean(values), (max(values) - min(values)) / 2)


@dataclass
class Row:
    """An arm.

    Attributes:
        arm: its name.
        bits: the mean over seeds of what evaluations put first, or None if none was finished.
        spread: half of the distance of the extremes.
        unit: of these.
        seeds: how many were finished.
        word_perplexity: 2 to the bits per word, of text; words are what white space divides, and the end of a line is one. None
            of what has no words.
        steps: of all phases.
        seconds: of training, by the clock.
        flops: model FLOPs of training.
        parameters: of the model.
        figures: what was measured beside that, by name.
        paper: the paper's figures.
        failures: of seeds that were not finished, and of what was not measured.
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
        """One that verdicts and pictures are made of: "bits", or what was measured."""
        if name == "bits":
            return None if self.bits is None else Figure(self.bits, self.spread)
        return self.figures.get(name)


@dataclass
class Result:
    """The rows in the order of the paper, what follows from them, and where all lies."""

    name: str
    folder: str
    verdict: str
    notes: list[str]
    rows: list[Row]


def columns(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Names of what was measured of any row, and of what a paper has of any."""
    measured = dict.fromkeys(name for row in rows for name in row.figures)
    return list(measured), list(dict.fromkeys(name for row in rows for name in row.paper))


def verdict(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Agrees, disagrees, or cannot tell: the claim, pair by pair, and what is to be below a bound."""
    by = {row.arm: row for row in rows}
    found = [
        *(_ahead(by, pair, name, experiment) for pair in experiment.better for name in experiment.by),
        *(_alike(by, pair, name, experiment) for pair in experiment.alike for name in experiment.by),
    ]
    signs, said = [sign for sign, _ in found], [each for _, each in found]
    if len(said) > _TOLD:
        apart = [each for sign, each in found if sign <= 0]
        said = [*apart, f"{'the other' if apart else 'all'} {len(said) - len(apart)} comparisons are as claimed"]
    for name, most in experiment.below.items():
        known = {row.arm: (row, figure) for row in rows if (figure := row.figure(name)) is not None}
        missing = [row.arm for row in rows if row.arm not in known and (row.bits is None or row.failures)]
        signs += [_sign(most - x.mean, _noise(x.spread, row.seeds, most)) for row, x in known.values()]
        signs += [0] * (len(missing) if known else 1)
        told = [
            *(f"{x.mean:.3f} of {arm}" for arm, (_, x) in known.items()),
            *(f"{arm} is missing" for arm in missing),
        ]
        said.append(f"{name}, below {most:g}: {', '.join(told) or 'of no model'}")
    whose = "this project claims" if experiment.source == OURS else "the paper finds"
    word = "disagrees" if -1 in signs else "cannot tell at this size" if 0 in signs else "agrees"
    return f"{word}: {whose} that {experiment.claim}; here {'; '.join(said)}."


def _ahead(by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment) -> tuple[int, str]:
    """Whether the first of a pair has less of a figure, by the margin, and what is said of that."""
    if (compared := _compared(by, pair, name, asked)) is None:
        return 0, f"{pair[0]} or {pair[1]} is missing"
    ahead, noise, said = compared
    return _sign(ahead - asked.margin, noise), said


def _alike(by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment) -> tuple[int, str]:
    """Whether the two are apart by no more than noise."""
    if (compared := _compared(by, pair, name, asked)) is None:
        return 0, f"{pair[0]} or {pair[1]} is missing"
    ahead, noise, said = compared
    return 1 if abs(ahead) <= max(noise, NOISE) else -1, f"{said} (alike: within {max(noise, NOISE):.3f})"


def _compared(
    by: Mapping[str, Row], pair: tuple[str, str], name: str, asked: Experiment
) -> tuple[float, float, str] | None:
    """How far the first of a pair is ahead in a figure, what of that may be noise, and that in words; None: one has none."""
    first, second = (by[arm].figure(name) if arm in by else None for arm in pair)
    if first is None or second is None:
        return None
    ahead, seeds = second.mean - first.mean, min(by[arm].seeds for arm in pair)
    unit = 1.0 if name == "bits" else max(abs(first.mean), abs(second.mean))
    what = "" if asked.by == ("bits",) else f" in {name}"
    side = "ahead of" if ahead >= 0 else "behind"
    return (
        ahead,
        _noise(first.spread + second.spread, seeds, unit),
        f"{pair[0]} {abs(ahead):.3f} {side} {pair[1]}{what}",
    )


def _noise(spread: float, seeds: int, unit: float) -> float:
    """What may be noise: the spread, and of a single seed at least `NOISE` units."""
    return spread if seeds > 1 else max(spread, NOISE * unit)


def _sign(ahead: float, noise: float) -> int:
    """1 for, −1 against a claim, 0 where noise may be all there is."""
    return 0 if abs(ahead) <= noise else 1 if ahead > 0 else -1


def row_of(arm: Arm, of: Sequence[Done], words: int | None) -> Row:
    """What the runs of an arm, one for each seed, come to; words are those of the text that was scored."""
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
    """What white space divides in the text that was scored, and the ends of its lines, which count as words too."""
    for each in done:
        if each.failure is None and each.arm.data == "text" and not each.arm.package:
            text = b"".join(RunFolder(each.run).corpus().original_blocks("valid"))
            return len(text.split()) + text.count(b"\n")
    return None
