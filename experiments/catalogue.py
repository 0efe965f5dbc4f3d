"""Experiments as they are declared in YAML, plans for running them, and the command `haed experiment`.

A file `NAME.yaml` beside this module declares a table or figure: its variants, and the claims of the paper. A variant is
a row of the table or a curve of the figure. Its options are those of its size for all variants, its own for both sizes,
and its own for this size, in that order. An option without `=` is the name of a set of options in `common.yaml`.
"""

import argparse
import hashlib
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from pipeline.arguments import CommandResult
from pipeline.config import (
    ConfigError,
    Options,
    Phase,
    check_output_folder,
    list_presets,
    load_options,
    training_phases,
)
from pipeline.config.loading import parse_yaml
from pipeline.config.messages import suggest_name
from pipeline.run.files import read_as

FOLDER = Path(__file__).parent
COMMON = "common"  # the file of option sets
DATA = Path("../shared/data")  # with the corpora, beside the checkout
PACKAGE_OPTIONS = ("source.", "chunker.", "shard.", "threads=", "device=", "precision=")  # that packages of others read
OURS = "this project"  # the source of what no paper has
Measure = Literal[
    "bags",
    "copies",
    "distance",
    "frequency",
    "layer",
    "memory",
    "passages",
    "phase one",
    "profile",
    "remembered",
    "samples",
    "speed",
]
Data = Literal["text", "articles", "pictures", "sound", "copies"]
Clock = Literal["wall", "process"]
Size = Literal["small", "full"]
Relation = Literal["better", "no_better", "alike"]  # of the first variant of a pair to the second
ROW_METRICS = ("bits", "seconds", "TFLOP")  # that every row has
_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class Variant:
    """A model of an experiment at one size: a row of its table, a curve of its figure.

    Attributes:
        name: the paper's name for it.
        preset: base of its options.
        options: `key=value`.
        paper: the paper's results for it, by metric.
        data: kind of its training data.
        only: the phases that are trained; empty: those of its kind of model.
        package: one of `experiments.external_models.PACKAGES`, instead of a preset.
        equal_data: true if its phases get equal numbers of steps; else they share seconds as the preset's phases do.
    """

    name: str
    preset: str = ""
    options: tuple[str, ...] = ()
    paper: dict[str, float] = field(default_factory=dict)
    data: Data = "text"
    only: tuple[Phase, ...] = ()
    package: str = ""
    equal_data: bool = False

    @property
    def described(self) -> str:
        """Return its package, or its preset and options, and the phases if they are not those of its kind, as words."""
        return " ".join([self.package or self.preset, *self.options, *self.only, *["equal data"] * self.equal_data])

    @cached_property
    def settings(self) -> Options:
        """Return the options of its preset with its own; not to be changed. A package has none."""
        try:
            return load_options(self.preset, list(self.options))
        except ConfigError as error:
            raise ConfigError(f"variant {self.name!r}: {error}") from error

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases that are trained, in order."""
        if self.package:
            return ("train",)
        return self.only or training_phases(self.settings.model.kind)


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class Claim:
    """A finding, and the comparisons that it holds by.

    Attributes:
        text: the finding, as the end of "the paper finds that …".
        better: a variant, and those than which it is lower in each metric of `by`.
        no_better: a variant, and those of which it is not ahead in `by`.
        alike: a variant, and those that are neither ahead of it nor behind it in `by`.
        by: "bits", "seconds" and "TFLOP" of training (for equal steps), or metrics computed by `measures`.
        margin: the least lead of a variant that is better.
        tolerance: bits, or a share of other metrics, by which variants of `no_better` and `alike` may lead.
        below: upper bounds of metrics, for each variant that has them.
    """

    text: str
    better: dict[str, tuple[str, ...]] = field(default_factory=dict)
    no_better: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alike: dict[str, tuple[str, ...]] = field(default_factory=dict)
    by: Annotated[tuple[str, ...], Field(min_length=1)] = ("bits",)
    margin: Annotated[float, Field(ge=0)] = 0.0
    tolerance: Annotated[float, Field(ge=0)] = 0.02
    below: dict[str, float] = field(default_factory=dict)

    def list_pairs(self) -> list[tuple[Relation, str, str]]:
        """Return each relation that is claimed, with its two variants."""
        relations: dict[Relation, dict[str, tuple[str, ...]]]
        relations = {"better": self.better, "no_better": self.no_better, "alike": self.alike}
        return [
            (relation, first, other)
            for relation, pairs in relations.items()
            for first, others in pairs.items()
            for other in others
        ]


@dataclass(frozen=True, kw_only=True)
class ExperimentSettings:
    """The settings of an experiment beside its variants.

    Attributes:
        source: the paper, and the place in it.
        question: what is compared.
        claims: the paper's findings. Plots show the first metric of the first one.
        equal: what the variants share equally; seconds are those of a clock, `experiments.timing`.
        measures: further measures of each run, by name; see `experiments.measures`.
        across: a metric of `measures` on the x-axis, with bits on the y-axis; None: curves are drawn.
        enough: training seconds, of all variants once, beyond which results no longer change; None: no such limit.
        beside: seconds on two cores that a run takes besides training, at `--budget minutes`: evaluation, validation
            and measures.
    """

    source: str
    question: str
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]
    equal: Literal["seconds", "steps"] = "steps"
    measures: tuple[Measure, ...] = ()
    across: str | None = None
    enough: Annotated[float, Field(gt=0)] | None = None
    beside: Annotated[float, Field(ge=0)] = 30


@dataclass(frozen=True, kw_only=True)
class Experiment(ExperimentSettings):
    """A table or figure.

    Attributes:
        name: name for the command.
        variants: its models at small sizes.
        full: the variants at the paper's sizes, under the same names, for `--budget paper`.
    """

    name: str
    variants: tuple[Variant, ...]
    full: tuple[Variant, ...] = ()


@with_config(_STRICT)
@dataclass(frozen=True)
class SizeFile:
    """A preset and options of one size, as they are written in a file."""

    preset: str = ""
    options: tuple[str, ...] = ()


@with_config(_STRICT)
@dataclass(frozen=True)
class VariantFile:
    """A variant as it is written in a file. A size that is null leaves it out there."""

    options: tuple[str, ...] = ()
    small: SizeFile | None = SizeFile()
    full: SizeFile | None = SizeFile()
    paper: dict[str, float] = field(default_factory=dict)
    data: Data = "text"
    phases: tuple[Phase, ...] = ()
    package: str = ""
    equal_data: bool = False


@with_config(_STRICT)
@dataclass(frozen=True, kw_only=True)
class ExperimentFile(ExperimentSettings):
    """An experiment as it is written in a file."""

    variants: Annotated[dict[str, VariantFile], Field(min_length=2)]
    small: SizeFile = SizeFile()
    full: SizeFile = SizeFile()


def list_experiments() -> list[str]:
    """Return the names of all experiments, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != COMMON)


@cache
def load_experiment(name: str) -> Experiment:
    """Return an experiment by name.

    Raises:
        ConfigError: there is no such experiment.
    """
    if name not in (known := list_experiments()):
        raise ConfigError(f"there is no experiment {name!r}. {suggest_name(name, known)}Use one of {', '.join(known)}")
    return read_experiment(FOLDER / f"{name}.yaml")


def read_experiment(path: Path) -> Experiment:
    """Return the experiment that a file declares.

    Raises:
        ConfigError: the file is not valid; with the key that is wrong, and what it may be.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse_yaml(text)  # refuses a key that is there twice
        tree = yaml.safe_load(text)
        file = TypeAdapter(ExperimentFile).validate_json(json.dumps(tree, default=str))
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {_explain_error(error)}") from error
    sets: dict[str, list[str]] = yaml.safe_load((FOLDER / f"{COMMON}.yaml").read_text(encoding="utf-8"))
    variants, full = (_variants_of_size(path, file, size, sets) for size in ("small", "full"))
    for number, claim in enumerate(file.claims):
        _check_claim(claim, f"{path}: claims.{number}", {variant.name for variant in variants}, file)
    settings = {each.name: getattr(file, each.name) for each in fields(ExperimentSettings)}
    return Experiment(name=path.stem, variants=variants, full=full, **settings)


def list_outdated(experiment: Experiment, options: Mapping[str, str]) -> list[str]:
    """Return the variants that an experiment declares otherwise now than a result has them.

    Args:
        experiment: the experiment.
        options: options of the result's rows by variant, see `Variant.described`.
    """
    now = {(variant.name, variant.described) for variant in (*experiment.variants, *experiment.full)}
    return [name for name, described in options.items() if (name, described) not in now]


def _check_claim(claim: Claim, place: str, names: set[str], file: ExperimentFile) -> None:
    """Raise ConfigError if a claim is of variants or metrics that its file does not have, or of nothing."""
    pairs = claim.list_pairs()
    for relation, *pair in pairs:
        for named in pair:
            if named in file.variants and named not in names:
                raise ConfigError(f"{place}.{relation}: variant {named!r} has no preset. Give it one, or small.preset")
            if named not in names:
                known = ", ".join(file.variants)
                raise ConfigError(f"{place}.{relation}: there is no variant {named!r}. Variants are {known}")
        if pair[0] == pair[1]:
            raise ConfigError(f"{place}.{relation}: {pair[0]!r} is compared with itself. Name another variant")
        if relation == "better" and ("better", *reversed(pair)) in pairs:
            raise ConfigError(f"{place}.better: {pair[0]!r} and {pair[1]!r} cannot both be better. Leave one out")
    if not (pairs or claim.below):
        raise ConfigError(f"{place}: nothing to judge the claim by. Give better, no_better, alike or below")
    measured = [name for name in claim.by if name not in ROW_METRICS]
    if measured and not file.measures:
        raise ConfigError(f"{place}.by: {', '.join(measured)} needs measures, but there are none")


def _explain_error(error: Exception) -> str:
    """Return the first mistake of a file, with the keys or values that are possible."""
    if not isinstance(error, ValidationError):
        return str(error)
    unknown = "unexpected_keyword_argument"
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != unknown)
    *parents, last = (str(part) for part in first["loc"]) if first["loc"] else ("the file",)
    place = ".".join([*parents, last])
    if first["type"] == unknown:
        by_depth = {0: ExperimentFile, 2: VariantFile}
        schema: type[Any] = Claim if parents[:1] == ["claims"] else by_depth.get(len(parents), SizeFile)
        return f"{place} is not a key; keys are {', '.join(each.name for each in fields(schema))}"
    return f"{place}: {first['msg']}"


def _variants_of_size(path: Path, file: ExperimentFile, size: Size, sets: dict[str, list[str]]) -> tuple[Variant, ...]:
    """Return the variants that a file has at a size."""
    variants, common = [], getattr(file, size)
    for name, each in file.variants.items():
        at_size: SizeFile | None = getattr(each, size)
        preset = "" if at_size is None or each.package else at_size.preset or common.preset
        if at_size is None or not (preset or (each.package and size == "small")):
            continue
        options: list[str] = []
        for word in (*common.options, *each.options, *at_size.options) if preset else ():
            if "=" not in word and word not in sets:
                raise ConfigError(
                    f"{path}: {name}: {word!r} is neither key=value nor a set. Sets are {', '.join(sets)}"
                )
            options += [word] if "=" in word else sets[word]
        if preset and preset not in list_presets():
            raise ConfigError(f"{path}: {name}: there is no preset {preset!r}")
        of_both = (each.paper, each.data, each.phases, each.package, each.equal_data)
        variants.append(Variant(name, preset, tuple(options), *of_both))
    return tuple(variants)


@dataclass(frozen=True)
class Plan:
    """The settings for running an experiment.

    Attributes:
        folder: folder of its results.
        runs_dir: folder of the runs of all experiments.
        seconds: training seconds of all variants and seeds together; None: the paper's sizes, with their own limits.
        seeds: number of seeds of each variant.
        parallel: number of concurrent runs, which share the cores.
        data: folder with the corpora.
        scored: bytes kept of each split except train; None: all.
        overrides: `key=value`, for all variants.
        clock: how steps are timed: by wall time, or by CPU time of the process ("process").
        command: the command of these settings.
    """

    folder: Path
    runs_dir: Path
    seconds: float | None
    seeds: int = 1
    parallel: int = 1
    data: Path = DATA
    scored: int | None = None
    overrides: tuple[str, ...] = ()
    clock: Clock = "wall"
    command: str = ""


@dataclass(frozen=True)
class Budget:
    """Limits on the runs of an experiment together.

    Attributes:
        description: what users read of it.
        seconds: training seconds; None: the models have the paper's sizes and limits.
        seeds: number of seeds of each variant.
        scored: bytes of valid; None: all.
        whole: seconds in total, including what runs take besides training.
        beside: factor applied to `Experiment.beside`.
    """

    description: str
    seconds: float | None
    seeds: int
    scored: int | None
    whole: float = 0
    beside: float = 0

    def seconds_beside(self, experiment: Experiment, seeds: int) -> float:
        """Return the seconds of an experiment that are not training."""
        return len(experiment.variants) * seeds * self.beside * experiment.beside


BUDGETS = {
    "minutes": Budget("20 minutes of two cores in all", 840, 1, 200_000, 1200, 1),
    "hour": Budget("an hour of training, three seeds, at most three hours in all", 3600, 3, 500_000, 10_800, 2),
    "paper": Budget("the paper's sizes and limits: see --plan first", None, 1, None),
}
_LEAST = 60.0  # seconds of training
_FIXED = ("name", "seed", "runs_dir", "shards_dir", "evaluate.split")  # options that an experiment sets itself
_INSTEAD = dict.fromkeys(("steps", "seconds", "epochs"), "; --seconds N is for all runs together")
_INSTEAD |= {"seed": "; see --seeds"}


def plan_experiment(
    name: str,
    budget: str,
    output: Path,
    data: Path = DATA,
    overrides: tuple[str, ...] = (),
    seconds: float | None = None,
    seeds: int | None = None,
    parallel: int = 1,
    clock: Clock = "wall",
) -> tuple[Experiment, Plan]:
    """Return an experiment and the plan for running it.

    Args:
        name: name of the experiment.
        budget: one of `BUDGETS`.
        output: folder of results and runs. Results with custom settings get their own folder.
        data: folder with the corpora.
        overrides: `key=value`, for all of its models.
        seconds: training seconds in total; None: the budget's.
        seeds: number of seeds of each variant; None: the budget's.
        parallel: number of concurrent runs.
        clock: see `Plan`.

    Raises:
        ConfigError: the experiment or its budget does not exist, or it sets one of the overridden options itself.
    """
    experiment, limits = load_experiment(name), BUDGETS[budget]
    for word in overrides:
        if (key := word.split("=")[0]) in _FIXED or key.endswith((".steps", ".seconds", ".epochs")):
            raise ConfigError(f"{word}: an experiment sets {key} itself{_INSTEAD.get(key.split('.')[-1], '')}")
    if limits.seconds is None and not experiment.full:
        raise ConfigError(f"{name} has no models of a paper's sizes. Use --budget minutes or --budget hour")
    if limits.seconds is None and seconds is not None:
        raise ConfigError(
            f"--seconds {seconds:g}: models of the paper's sizes keep the paper's limits. Leave --seconds out"
        )
    bound, number = None, seeds or limits.seeds
    if limits.seconds is not None:
        beside = limits.seconds_beside(experiment, number)
        if (left := limits.whole - beside) < _LEAST and seconds is None:
            raise ConfigError(
                f"--budget {budget} is {limits.whole / 60:.0f} min, of which evaluations with {number} "
                f"seeds take about {beside / 60:.0f}, so nothing is left to train. Add --seconds N for the training, "
                f"such as --seconds {limits.seconds * number:g}"
            )
        bound = min(limits.seconds, left, (experiment.enough or math.inf) * number)
    elsewhere = [] if data == DATA else [str(data)]
    custom = (seconds, seeds, overrides, *([clock] if clock != "wall" else []), *elsewhere)
    words = ["haed", "experiment", name, "--budget", budget]
    words += [f"--seconds={seconds:g}"] if seconds is not None else []
    words += [f"--seeds={seeds}"] if seeds is not None else []
    words += [f"--parallel={parallel}"] if parallel != 1 else []
    words += [f"--clock={clock}"] if clock != "wall" else []
    words += [f"--data={each}" for each in elsewhere]
    suffix = f"-{hashlib.sha256(repr(custom).encode()).hexdigest()[:8]}" if any(custom) else ""
    return experiment, Plan(
        folder=output / name / f"{budget}{suffix}",
        runs_dir=output / "runs",
        seconds=seconds or bound,
        seeds=number,
        parallel=parallel,
        data=data,
        scored=limits.scored,
        overrides=overrides,
        clock=clock,
        command=shlex.join([*words, *overrides]),
    )


def format_list(output: Path) -> str:
    """Return a table of the experiments: number of models, cost, state, and question."""
    lines = [f"{'':19}  models  minutes   hour"]
    for name, state in read_states(output).items():
        experiment, costs = load_experiment(name), ""
        for budget in ("minutes", "hour"):
            _, plan = plan_experiment(name, budget, output)
            minutes = ((plan.seconds or 0) + BUDGETS[budget].seconds_beside(experiment, plan.seeds)) / 60
            costs += f"{'  ' if costs else ''}{minutes:>4.0f} min"
        paper, description = ", paper" if experiment.full else "", f"{experiment.question} ({experiment.source})"
        lines.append(f"{name:19}  {len(experiment.variants):>6}  {costs}{paper:7}  {state:<22}  {description}")
    costs = ", ".join(f"--budget {name}: {budget.description}" for name, budget in BUDGETS.items())
    return "\n".join([*lines, "", f"haed experiment NAME, {costs}; --seconds N: what you say"])


def read_states(output: Path) -> dict[str, str]:
    """Return the state of each experiment's results: done, done with other options, begun, damaged, or not run."""
    states = {}
    for name in list_experiments():
        words = dict[str, None]()
        for budget in BUDGETS:
            for folder in sorted((output / name).glob(f"{budget}*/")):
                first, *custom = folder.name.split("-")
                if first == budget:
                    state = _read_state(folder / f"{name}.json", load_experiment(name))
                    words[f"{budget}{' of its own settings' if custom else ''} {state}"] = None
        states[name] = ", ".join(words) or "not run"
    return states


def _read_state(result: Path, experiment: Experiment) -> str:
    if not result.exists():
        return "begun"
    try:
        rows = read_as(dict[str, Any], result)["rows"]
        outdated = list_outdated(experiment, {row["variant"]: row["options"] for row in rows})
        done = "done with other options" if outdated else "done"
        return "begun" if any(row["failures"] for row in rows) else done
    except (OSError, ValueError, TypeError, KeyError):
        return "damaged"


def execute_command(arguments: argparse.Namespace) -> CommandResult:
    """Execute `haed experiment` with its parsed arguments: list the experiments, estimate one's cost, or run it."""
    names = [word for word in arguments.words if "=" not in word]
    if not names:
        return CommandResult(format_list(arguments.output), read_states(arguments.output))
    settings = {name: getattr(arguments, name) for name in ("seconds", "seeds", "parallel", "clock")}
    for name in ("seconds", "seeds", "parallel"):
        if (value := settings[name]) is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name} {value}: must be a number above 0")
    check_output_folder(arguments.output, "--output")
    overrides = tuple(word for word in arguments.words if "=" in word)
    budget = "paper" if arguments.plan else arguments.budget
    experiment, plan = plan_experiment(" ".join(names), budget, arguments.output, arguments.data, overrides, **settings)
    if arguments.plan:
        from experiments.run import estimate_costs, format_costs, prepare_variants, select_own

        variants, notes = prepare_variants(experiment, plan)
        costs = estimate_costs(select_own(variants))
        text = "\n".join([format_costs(costs), *(f"- {note}" for note in notes)])
        return CommandResult(text, {"name": experiment.name, "notes": notes, "rows": [asdict(each) for each in costs]})
    from experiments.results import format_result
    from experiments.run import run_experiment
    from pipeline.signals import postponed_signals

    with postponed_signals() as stop:
        result = run_experiment(experiment, plan, stop)
    return CommandResult(format_result(result), asdict(result))
