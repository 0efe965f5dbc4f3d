"""Curves of a training as SVG: bits per token and the IEM loss against seconds, as in the report, but drawn in a millisecond."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from pipeline.run.metrics import Record

Points = list[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 204, 46, 8, 24, 34
_MOST = 300  # points of a line


@dataclass
class Line:
    """Points (x, y) in a phase's colour, joined; validations are few, and dots as well."""

    phase: str
    points: Points
    dots: bool = False


def curves(phases: dict[str, list[Record]]) -> str:
    """Both pictures of a run, the phases one after the other; nothing without metrics."""
    pictures = (
        ("exact bits per token", "bits_per_token"),
        ("IEM loss, nats per chunk (not a likelihood)", "iem"),
    )
    drawn = [(title, _lines(phases, name)) for title, name in pictures]
    return "".join(_picture(title, lines) for title, lines in drawn if any(line.points for line in lines))


def _lines(phases: dict[str, list[Record]], name: str) -> list[Line]:
    offset, found = 0.0, []
    for phase, records in phases.items():
        for key, dots in ((name, False), (f"validation/{name}", True)):
            points = [(offset + r["seconds"], r[key]) for r in records if key in r and "seconds" in r]
            found.append(Line(phase, _thinned(points) if not dots else points, dots))
        offset += max((record.get("seconds", 0.0) for record in records), default=0.0)
    return found


def _thinned(points: Points) -> Points:
    """Means of as many neighbours as leave `_MOST` points."""
    size = -(-len(points) // _MOST)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else []
    return [tuple(sum(each) / len(group) for each in zip(*group, strict=True)) for group in groups] or points


def _picture(title: str, lines: list[Line]) -> str:
    every = [point for line in lines for point in line.points]
    right = max(x for x, _ in every) or 1.0
    values = sorted(y for x, y in every if x > 0.05 * right) or sorted(y for _, y in every)  # without the first fall
    low, high = values[0], values[min(len(values) - 1, int(len(values) * 0.97))]
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        down = (high - y) / (high - low)
        return (
            _LEFT + x / right * (_WIDTH - _LEFT - _RIGHT),
            _TOP + min(1.0, max(0.0, down)) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f"<text x='{_LEFT}' y='14' class='title'>{escape(title)}</text>"]
    for y in _ticks(low, high):
        at = place(0, y)[1]
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' class='grid'/>")
        parts.append(f"<text x='{_LEFT - 5}' y='{at + 3.5:.1f}' text-anchor='end'>{y:.4g}</text>")
    for x in _ticks(0, right):
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


def _ticks(low: float, high: float) -> Iterable[float]:
    """Three to six round numbers between two others."""
    span = high - low
    unit = 10.0 ** floor(log10(span / 3))
    step = next(unit * each for each in (5, 2, 1) if span / (unit * each) >= 2.5 or each == 1)
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]
