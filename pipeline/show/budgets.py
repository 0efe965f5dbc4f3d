"""Differences between compared runs, and the check that their budgets are equal.

A verdict needs equal budgets, within a tenth. If the steps of all runs do the same work, the budget is steps: a busy
machine takes longer for them, but learns no more. If steps differ in cost, the budget is seconds if all runs were
limited by seconds, otherwise model FLOPs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from pipeline.config import Options, applies_to, flatten_tree

Budget = Literal["steps", "seconds", "flops"]
WITHIN = 0.1  # largest relative difference of equal budgets
SHOWN = 12  # maximum number of options in a text; JSON has all
_LIMITS = ("steps", "seconds", "epochs", "patience", "part_from", "part_to")
_WORK = ("model.", "batch.", "iem.", "chunker.", "precision")  # options that change the cost of a step
_TOLD = ("seed", "threads", *_WORK, "optimizer.", "pretrain.", "finetune.", "train.", "validation.")
_NAMES: dict[Budget, str] = {"steps": "steps", "seconds": "seconds", "flops": "model FLOPs"}


class TrainedRun(Protocol):
    """Properties of a compared run that the budget check needs; see `pipeline.show.compare.Row`."""

    run: str
    phases: list[str]
    steps: int
    seconds: float
    flops: float
    corpus: str | None


@dataclass
class RunDifference:
    """Difference between runs: a name or the key of an option, and its value by run."""

    what: str
    values: dict[str, Any]

    def __str__(self) -> str:
        by_value: dict[str, list[str]] = {}
        for run, value in self.values.items():
            by_value.setdefault(_format_value(value), []).append(run)
        told = [f"{value} ({', '.join(runs)})" for value, runs in by_value.items()]
        return f"{self.what}: {'; '.join(told)}"


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if type(value) is int else "–" if value is None else str(value)


def find_differences(rows: Sequence[TrainedRun], options: Mapping[str, Options]) -> list[RunDifference]:
    """Return the differences between runs: data, steps, seconds, model FLOPs, then options that affect training.

    Args:
        rows: the runs.
        options: options of each run, by its name.
    """
    told: dict[str, Callable[[TrainedRun], Any]] = {
        "data": lambda row: row.corpus and row.corpus[:12],
        "phases": lambda row: " + ".join(row.phases),
        "steps": lambda row: row.steps,
        "seconds": lambda row: round(row.seconds, 1),
        "model FLOPs": lambda row: row.flops,
    }
    found = [RunDifference(what, {row.run: value(row) for row in rows}) for what, value in told.items()]
    flat = {name: dict(flatten_tree(asdict(each))) for name, each in options.items()}
    trained = {phase.split()[0] for row in rows for phase in row.phases}
    for key in dict.fromkeys(key for each in flat.values() for key in each):
        section = key.split(".")[0]
        if not key.startswith(_TOLD) or (section in ("pretrain", "finetune", "train") and section not in trained):
            continue
        kinds = [each.model.kind for each in options.values()]
        if any(applies_to(key, kind) for kind in kinds):
            found.append(RunDifference(key, {row.run: flat[row.run].get(key) for row in rows}))
    return [each for each in found if len({_format_value(value) for value in each.values.values()}) > 1]


def choose_budget(rows: Sequence[TrainedRun], options: Mapping[str, Options], found: Sequence[RunDifference]) -> Budget:
    """Return the budget by which the runs are compared; see the module's documentation."""
    changed = {each.what for each in found}
    phases = ("pretrain.", "finetune.", "train.")
    of_work = [
        key
        for key in changed
        if key == "phases"
        or key.startswith(_WORK)
        or (key.startswith(phases) and key.rpartition(".")[2] not in _LIMITS)
    ]
    if not of_work:
        return "steps"
    limited = {
        name
        for row in rows
        for phase in row.phases
        for name in ("steps", "seconds", "epochs")
        if getattr(getattr(options[row.run], phase.split()[0]), name)
    }
    return "seconds" if limited == {"seconds"} else "flops"


def explain_unequal_budgets(rows: Sequence[TrainedRun], by: Budget) -> str | None:
    """Explain why unequal budgets allow no verdict, and what to do; return None if the budgets are equal enough."""
    spent = {row.run: float(getattr(row, by)) for row in rows}
    least, most = min(spent, key=lambda run: spent[run]), max(spent, key=lambda run: spent[run])
    if spent[least] >= (1 - WITHIN) * spent[most]:
        return None
    phase = next(row for row in rows if row.run == least).phases[-1].split()[0]
    few, many = (f"{_format_value(_whole_if_exact(spent[run]))}" for run in (least, most))
    return (
        f"No verdict: budgets differ by more than a tenth, {few} {_NAMES[by]} of {least} against {many} of {most}. Train those "
        f"that had less on, by a higher {phase}.{'steps' if by == 'flops' else by}=, and evaluate them again"
    )


def _whole_if_exact(value: float) -> int | float:
    return int(value) if value == int(value) and value < 1e9 else value


def describe_equal_budget(by: Budget) -> str:
    """Return the beginning of a verdict, which names the budget."""
    return f"At equal {_NAMES[by]} (within a tenth)"
