"""The parts of a run's page besides its progress: evaluation, checkpoints, configuration, files, and training curves.

Curves show bits per token and the IEM loss against seconds, as the report does. They are SVG, drawn in a millisecond.
"""

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from pipeline.config import Difference, Options, applies_to, diff_trees, flatten_tree, list_presets, load_options
from pipeline.pages.runs import phase_metrics, read_setting, status_of
from pipeline.run.checkpoints import CheckpointSummary, list_checkpoints, read_state, resolve_pointer
from pipeline.run.files import Evaluation, read_as
from pipeline.run.metrics import Record
from pipeline.run.run_directory import PHASES, RunFolder, format_command

Points = list[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 204, 46, 8, 24, 34
_MOST = 300  # maximum number of points of a line


@dataclass
class CurveLine:
    """A line of a chart, in its phase's colour.

    Attributes:
        phase: name of the phase.
        points: points (x, y), joined in order.
        dots: also draw each point as a dot, for the few validations.
    """

    phase: str
    points: Points
    dots: bool = False


def draw_curves(phases: dict[str, list[Record]]) -> str:
    """Return the SVG of both charts of a run, the phases one after another; empty without metrics."""
    pictures = (
        ("exact bits per token", "bits_per_token"),
        ("IEM loss, nats per chunk (not a likelihood)", "iem"),
    )
    drawn = [(title, _curve_lines(phases, name)) for title, name in pictures]
    return "".join(_draw_picture(title, lines) for title, lines in drawn if any(line.points for line in lines))


def _curve_lines(phases: dict[str, list[Record]], name: str) -> list[CurveLine]:
    offset, found = 0.0, []
    for phase, records in phases.items():
        for key, dots in ((name, False), (f"validation/{name}", True)):
            points = [(offset + r["seconds"], r[key]) for r in records if key in r and "seconds" in r]
            found.append(CurveLine(phase, _thin_points(points) if not dots else points, dots))
        offset += max((record.get("seconds", 0.0) for record in records), default=0.0)
    return found


def _thin_points(points: Points) -> Points:
    """Return at most `_MOST` points, each the mean of neighbouring points."""
    size = -(-len(points) // _MOST)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else []
    return [tuple(sum(each) / len(group) for each in zip(*group, strict=True)) for group in groups] or points


def _draw_picture(title: str, lines: list[CurveLine]) -> str:
    every = [point for line in lines for point in line.points]
    right = max(x for x, _ in every) or 1.0
    values = sorted(y for x, y in every if x > 0.05 * right) or sorted(y for _, y in every)  # without the initial drop
    low, high = values[0], values[min(len(values) - 1, int(len(values) * 0.97))]
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        down = (high - y) / (high - low)
        return (
            _LEFT + x / right * (_WIDTH - _LEFT - _RIGHT),
            _TOP + min(1.0, max(0.0, down)) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f"<text x='{_LEFT}' y='14' class='title'>{escape(title)}</text>"]
    for y in _tick_values(low, high):
        at = place(0, y)[1]
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' class='grid'/>")
        parts.append(f"<text x='{_LEFT - 5}' y='{at + 3.5:.1f}' text-anchor='end'>{y:.4g}</text>")
    for x in _tick_values(0, right):
        at = place(x, low)[0]
        parts.append(f"<text x='{at:.1f}' y='{_HEIGHT - 19}' text-anchor='middle'>{x:,.6g}</text>")
    parts.append(f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 5}' text-anchor='end'>seconds of training</text>")
    for line in lines:
        places = [place(x, y) for x, y in line.points]
        if line.dots:
            parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' class='{escape(line.phase)}'/>" for x, y in places]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f"<polyline points='{joined}' class='{escape(line.phase)}{' dashed' if line.dots else ''}'/>")
    phases = list(dict.fromkeys(line.phase for line in lines if line.points))
    for number, phase in enumerate(phases):
        x = _WIDTH - _RIGHT - 70 * (len(phases) - number) + 8
        parts.append(
            f"<circle cx='{x}' cy='10' r='3.5' class='{escape(phase)}'/><text x='{x + 7}' y='14'>{escape(phase)}</text>"
        )
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>{''.join(parts)}</svg>"


def _tick_values(low: float, high: float) -> Iterable[float]:
    """Return about three to six round numbers between two others."""
    span = high - low
    unit = 10.0 ** floor(log10(span / 3))
    step = next(unit * each for each in (5, 2, 1) if span / (unit * each) >= 2.5 or each == 1)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


_OWN = ("name", "runs_dir", "shards_dir")  # options in which every run differs from its preset

# Files of a run that are served, with descriptions. Files in `analysis/` are served as well.
FILES = {
    "report.html": "the report",
    "report.md": "the report as text",
    "evaluation.json": "bits of the evaluated split",
    "samples.json": "samples of the report",
    "samples.png": "pictures, completed",
    "neighbours.png": "neighbours, drawn",
    "config.yaml": "complete configuration",
    "environment.json": "versions, commit, machine",
    **{f"{phase}/metrics.jsonl": f"metrics of {phase}" for phase in reversed(PHASES)},
}


@dataclass
class EvaluationStatus:
    """The evaluation of a run.

    Attributes:
        found: the evaluation; None: there is none that can be read.
        remarks: warnings about it.
        is_stale: whether it belongs to another checkpoint than the present one.
    """

    found: Evaluation | None
    remarks: list[str]
    is_stale: bool = False


def evaluation_status(folder: RunFolder) -> EvaluationStatus:
    """Return the evaluation of a run, if there is one, and whether it belongs to the present checkpoint."""
    path = folder.path / "evaluation.json"
    if (status := status_of(path)) is None:
        present = _present_checkpoint(folder)
        return EvaluationStatus(None, [present.fallback] if present is not None and present.fallback else [])
    try:
        found = _read_evaluation(path, status.st_mtime_ns)
    except (OSError, ValueError) as error:
        return EvaluationStatus(None, [str(error)])
    present = _present_checkpoint(folder)
    fallen = [present.fallback] if present is not None and present.fallback else []
    if present is None or present.digest == found.checkpoint:
        return EvaluationStatus(found, fallen)
    now = f"the run's present checkpoint is {present.phase} step {present.step:,}"
    again = f"{now}, not the one that was evaluated: run `{format_command('evaluate', folder)}` again"
    return EvaluationStatus(found, [*fallen, again], is_stale=True)


@lru_cache(64)
def _read_evaluation(path: Path, changed: int) -> Evaluation:
    return read_as(Evaluation, path)


def _present_checkpoint(folder: RunFolder) -> CheckpointSummary | None:
    try:
        return folder.select_checkpoint(read_setting(folder, "evaluate.stage"))
    except (OSError, ValueError):
        return None


@dataclass
class CheckpointInfo:
    """A checkpoint in a run's folder.

    Attributes:
        phase: its phase.
        step: its step.
        digest: digest of its content; None: it is damaged.
        score: validation loss; None: it was not validated.
        unit: unit of the score.
        megabytes: size of its files in MB.
        notes: best, latest, or asked (questions go to this checkpoint).
    """

    phase: str
    step: int
    digest: str | None
    score: float | None
    unit: str
    megabytes: float
    notes: list[str]


def describe_checkpoints(folder: RunFolder) -> list[CheckpointInfo]:
    """Return the checkpoints of all phases, in the order of training."""
    found, present = [], _present_checkpoint(folder)
    for phase, records in phase_metrics(folder).items():
        place = folder.phase_folder(phase) / "checkpoints"
        names = {"best": resolve_pointer(place, "best"), "latest": resolve_pointer(place, "latest")}
        for path in list_checkpoints(place):
            if not path.name.removeprefix("step-").isdecimal():
                continue
            notes = [name for name, named in names.items() if named == path]
            notes += ["asked"] if present and path == present.path else []
            found.append(_checkpoint_info(phase, path, records, notes))
    return found


def _checkpoint_info(phase: str, path: Path, records: list[Record], notes: list[str]) -> CheckpointInfo:
    digest, step = None, int(path.name.removeprefix("step-"))
    with suppress(OSError, ValueError):
        digest = read_state(path)["digest"]
    names = ("validation/bits_per_token", "validation/iem")
    scores = [(record[name], name) for record in records if record["step"] == step for name in names if name in record]
    score, unit = scores[-1] if scores else (None, "")
    size = sum(status.st_size for file in path.glob("*") if (status := status_of(file)))
    return CheckpointInfo(phase, step, digest, score, unit.partition("/")[2].replace("_", " "), size / 1e6, notes)


@dataclass
class ConfigurationSummary:
    """The configuration of a run.

    Attributes:
        preset: name of the nearest preset.
        changed: differences from that preset.
        all: every option with its value.
    """

    preset: str
    changed: list[Difference]
    all: list[tuple[str, Any]]


def summarise_configuration(folder: RunFolder) -> ConfigurationSummary | None:
    """Return a run's configuration and the nearest preset of its kind; None: it cannot be read."""
    try:
        options = folder.load_options()
    except (OSError, ValueError):
        return None
    now = asdict(options)
    near = {
        name: list(_option_differences(asdict(found), now)) for name, found in _load_presets(options.model.kind).items()
    }
    preset = min(near, key=lambda name: len(near[name]))
    shown = [(key, value) for key, value in flatten_tree(now) if applies_to(key, options.model.kind)]
    return ConfigurationSummary(preset, near[preset], shown)


def _option_differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[Difference]:
    kind = now["model"]["kind"]
    return (each for each in diff_trees(was, now) if each.key not in _OWN and applies_to(each.key, kind))


@cache
def _load_presets(kind: str) -> dict[str, Options]:
    found = {name: load_options(name) for name in list_presets()}
    return {name: options for name, options in found.items() if options.model.kind == kind} or found


@dataclass
class ServedFile:
    """A file of a run that is served.

    Attributes:
        name: its name in the address.
        about: a short description.
        bytes: its size.
        path: its path on disk.
    """

    name: str
    about: str
    bytes: int
    path: Path


def list_served_files(folder: RunFolder) -> list[ServedFile]:
    """Return the files that are served of a run: `FILES` and those in `analysis/`.

    Links are left out, also those to other places within the run.
    """
    names = dict(FILES)
    for path in sorted((folder.path / "analysis").glob("*")):
        if not path.name.startswith("."):
            names[f"analysis/{path.name}"] = "an analysis"
    found, inside = [], folder.path.resolve()
    for name, about in names.items():
        path = (folder.path / name).resolve()
        if path.is_file() and path == inside / name:
            found.append(ServedFile(name, about, path.stat().st_size, path))
    return found


def metrics_csv(folder: RunFolder, phase: str) -> str:
    """Return the metrics of a phase as CSV with a column for each metric; only a line end without metrics."""
    records = phase_metrics(folder).get(phase, [])
    written = io.StringIO()
    table = csv.DictWriter(written, dict.fromkeys(name for record in records for name in record))
    table.writeheader()
    table.writerows(records)
    return written.getvalue()
