"""The stage `experiment`: make the missing runs, and write the results of all of them."""

import csv
import io
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict

from data.filesystem import write_atomically, write_json
from pipeline.experiments.experiment import Experiment, Plan
from pipeline.experiments.page import drawn, html
from pipeline.experiments.result import NOISE, Result, Row, columns, row_of, verdict, words
from pipeline.experiments.running import Done, make
from pipeline.run.run_directory import RunFolder


def run(experiment: Experiment, plan: Plan, stop: Callable[[], bool] = lambda: False) -> Result:
    """Make the missing runs and write the results. Only one process at a time works on a result.

    Raises:
        Interrupted: `stop` became true; running trainings have saved, and the same call continues them.
    """
    with RunFolder(plan.folder).lock():
        return gather(experiment, *make(experiment, plan, stop), plan)


def gather(experiment: Experiment, done: Sequence[Done], notes: list[str], plan: Plan) -> Result:
    """Read the runs, and write report.html, the picture, and the rows as CSV and JSON into the plan's folder."""
    found: dict[str, list[Done]] = defaultdict(list)
    for each in done:
        found[each.arm.name].append(each)
    number = words(done)
    rows = [row_of(of[0].arm, of, number if of[0].arm.data == "text" else None) for of in found.values()]
    said = dict.fromkeys(note for each in done for of in each.measured.values() for note in of.notes)
    notes = [*notes, *_notes(experiment, plan), *said]
    result = Result(experiment.name, str(plan.folder), verdict(experiment, rows), notes, rows)
    whole = {name: first for name, of in found.items() if (first := next((x for x in of if x.failure is None), None))}
    picture = drawn(experiment, rows, whole)
    examples = {name: table for name, each in whole.items() for x in each.measured.values() if (table := x.examples)}
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_json(plan.folder / f"{experiment.name}.json", asdict(result))
    write_atomically(plan.folder / f"{experiment.name}.csv", _csv(rows).encode())
    write_atomically(plan.folder / f"{experiment.name}.png", picture)
    write_atomically(plan.folder / "report.html", html(experiment, result, picture, examples).encode())
    return result


def _notes(experiment: Experiment, plan: Plan) -> list[str]:
    limit = "models of the papers' sizes, each with its own preset's limits, neither equal steps nor equal seconds"
    if plan.seconds is not None:
        second = "wall time" if plan.clock == "wall" else "what a core works (--clock process)"
        limit = (
            f"equal {experiment.equal}; {plan.seconds:,.0f} s of training in all, seconds of {second}, by a clock of steps timed "
            f"in turns on {platform.machine()}"
        )
    notes = [f"seeds: {plan.seeds}; {limit}; bits are of the valid split"]
    if plan.overrides:
        whose = "models of this project, not packages" if any(arm.package for arm in experiment.arms) else "models"
        notes.append(f"for all {whose}: {' '.join(plan.overrides)}")
    if plan.seeds == 1:
        notes.append(f"one seed: differences below {NOISE} are not told apart")
    return notes


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    measured, paper = columns(rows)
    own = [name for name in asdict(rows[0]) if name not in ("figures", "paper", "failures")]
    writer = csv.writer(text)
    heads = [head for name in measured for head in (name, f"{name}, spread")]
    writer.writerow([*own, *heads, *(f"paper: {name}" for name in paper)])
    for row in rows:
        figures = [row.figures.get(name) for name in measured]
        found = [part for each in figures for part in ((each.mean, each.spread) if each else ("", ""))]
        writer.writerow([*(getattr(row, name) for name in own), *found, *(row.paper.get(x, "") for x in paper)])
    return text.getvalue()
