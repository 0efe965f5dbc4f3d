"""Catalogue of experiments by name, with their costs and the state of their results."""

import hashlib
from pathlib import Path

from pipeline.config import ConfigError
from pipeline.experiments.experiment import BUDGETS, Budget, Clock, Experiment, Plan
from pipeline.experiments.haed.figure2 import FIGURE2
from pipeline.experiments.haed.figure3 import FIGURE3
from pipeline.experiments.haed.figure4 import FIGURE4
from pipeline.experiments.haed.table1 import TABLE1
from pipeline.experiments.hourglass.ablations import TABLE3, TABLE4, TABLE5, TABLE6, TABLE7
from pipeline.experiments.hourglass.copy import COPY
from pipeline.experiments.hourglass.figure6 import FIGURE6
from pipeline.experiments.multiscale import MULTISCALE
from pipeline.experiments.ours.recipe import LOOKED_UP, RECIPE
from pipeline.experiments.ours.systems import PEERS, SYSTEMS
from pipeline.run.files import read_json

_HOURGLASS = (TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, FIGURE6, COPY)
_ALL = (TABLE1, FIGURE2, FIGURE3, FIGURE4, *_HOURGLASS, *MULTISCALE, SYSTEMS, PEERS, RECIPE, LOOKED_UP)
_ITS_OWN = ("name", "seed", "runs_dir", "shards_dir", "evaluate.split")
_INSTEAD = dict.fromkeys(("steps", "seconds", "epochs"), "; --seconds N is for all runs together") | {
    "seed": "; see --seeds"
}
EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in _ALL}


def planned(
    name: str,
    budget: str,
    output: Path,
    data: Path = Path("../shared/data"),
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
        seeds: number of seeds of each arm; None: the budget's.
        parallel: number of concurrent runs.
        clock: see `ScalingEstimate`.

    Raises:
        ConfigError: the experiment or its budget does not exist, or it sets one of the overridden options itself.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    experiment, limits = EXPERIMENTS[name], BUDGETS[budget]
    for word in overrides:
        if (key := word.split("=")[0]) in _ITS_OWN or key.endswith((".steps", ".seconds", ".epochs")):
            raise ConfigError(f"{word}: an experiment sets {key} itself{_INSTEAD.get(key.split('.')[-1], '')}")
    if limits.seconds is None and not experiment.full:
        raise ConfigError(f"{name} has no models of a paper's sizes: --budget minutes or hour")
    if limits.seconds is None and seconds is not None:
        raise ConfigError(f"--seconds {seconds:g}: models of the paper's sizes have the paper's limits")
    known = []
    if limits.seconds is not None:
        left = max(60.0, limits.whole - _beside(experiment, limits, seeds or limits.seeds))
        enough = None if experiment.enough is None else experiment.enough * (seeds or limits.seeds)
        known = [each for each in (limits.seconds, left, enough) if each is not None]
    return experiment, Plan(
        folder=_folder(name, budget, output, seconds, seeds, overrides, *([clock] if clock != "wall" else [])),
        runs_dir=output / "runs",
        seconds=seconds or min(known, default=None),
        seeds=seeds or limits.seeds,
        parallel=parallel,
        data=data,
        scored=limits.scored,
        overrides=overrides,
        clock=clock,
    )


def _folder(name: str, budget: str, output: Path, *own: object) -> Path:
    other = f"-{hashlib.sha256(repr(own).encode()).hexdigest()[:8]}" if any(own) else ""
    return output / name / f"{budget}{other}"


def listed(output: Path) -> str:
    """Return a table of the experiments: number of models, cost, state, and question."""
    lines = [f"{'':19}  models  minutes   hour"]
    for name, state in states(output).items():
        each = EXPERIMENTS[name]
        costs = "  ".join(f"{_whole(name, budget) / 60:>4.0f} min" for budget in ("minutes", "hour"))
        paper = ", paper" if each.full else ""
        lines.append(f"{name:19}  {len(each.arms):>6}  {costs}{paper:7}  {state:<22}  {each.question} ({each.source})")
    costs = ", ".join(f"--budget {name}: {budget.about}" for name, budget in BUDGETS.items())
    return "\n".join([*lines, "", f"haed experiment NAME, {costs}; --seconds N: what you say"])


def _whole(name: str, budget: str) -> float:
    """Return an estimate of the most seconds on two cores that an experiment takes."""
    experiment, plan = planned(name, budget, Path())
    return (plan.seconds or 0) + _beside(experiment, BUDGETS[budget], plan.seeds)


def _beside(experiment: Experiment, limits: Budget, seeds: int) -> float:
    """Return the seconds of an experiment that are not training."""
    return len(experiment.arms) * seeds * limits.beside * experiment.beside


def states(output: Path) -> dict[str, str]:
    """Return the state of each experiment by name: its budgets with complete results, and those that have begun."""
    found = {}
    for name in EXPERIMENTS:
        said = dict[str, None]()
        for budget in BUDGETS:
            for folder in sorted((output / name).glob(f"{budget}*/")):
                first, *own = folder.name.split("-")
                if first == budget:
                    word = _state(folder / f"{name}.json")
                    said[f"{budget}{' of its own settings' if own else ''} {word}"] = None
        found[name] = ", ".join(said) or "not run"
    return found


def _state(result: Path) -> str:
    """Return the state of a result file: done, begun, or damaged if it is not readable."""
    if not result.exists():
        return "begun"
    try:
        return "begun" if any(row["failures"] for row in read_json(result, ("rows",))["rows"]) else "done"
    except (OSError, ValueError, TypeError, KeyError):
        return "damaged"
