"""Small charts as SVG: curves of a training, and statistics of a split. Each is drawn in a millisecond."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil, floor, log10
from typing import Any

from data.statistics import Summary
from pipeline.run.metrics import Record

_POSITIONS = ("step", "seconds", "flops")
Points = list[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 204, 46, 8, 24, 34
_MOST = 300  # maximum number of points of a line
_SKIPPED = 0.05  # share of a phase before which its training line is not drawn: the first losses would flatten the rest
_FEWEST_POINTS, _FEWEST_DOCUMENTS = 3, 20  # of a distribution that is worth a chart


@dataclass
class CurveLine:
    """A line of a chart, in its phase's colour.

    Attributes:
        phase: name of the phase, which begins with pretrain, finetune or train.
        points: points (x, y), joined in order.
        dots: also draw each point as a dot, for the few validations.
    """

    phase: str
    points: Points
    dots: bool = False


def draw_curves(phases: Mapping[str, list[Record]]) -> str:
    """Return charts of bits per token and of the IEM loss over seconds, the phases one after another.

    The training line of a phase begins after the first 5 % of the phase. Metrics that no phase has are left out.
    Without any metric the text is empty.
    """
    charts = (("bits per token", "bits_per_token"), ("IEM loss, nats per chunk", "iem"))
    drawn = []
    for title, metric in charts:
        if lines := [line for line in _curve_lines(phases, metric) if line.points]:
            right = max(x for line in lines for x, _ in line.points) or 1.0
            trained = sorted(y for line in lines if not line.dots for _, y in line.points)
            values = sorted(y for line in lines if line.dots for _, y in line.points)
            values += trained[: max(1, ceil(0.97 * len(trained)))]  # without outliers
            drawn.append(_draw_chart(title, "seconds of training", lines, (0.0, right), (min(values), max(values))))
    return "".join(drawn)


def list_series(phases: Mapping[str, list[Record]]) -> list[dict[str, Any]]:
    """Return every metric of a run over steps, seconds and FLOPs, the phases one after another.

    Returns:
        For each phase and metric: `phase`, `metric`, `validation`, and lists of at most 600 points: `step`, `seconds`,
        `flops`, `value`, and `share` of the phase.
    """
    offsets, series = dict.fromkeys(_POSITIONS, 0.0), []
    for phase, records in phases.items():
        ends = {name: max((record.get(name, 0.0) for record in records), default=0.0) for name in _POSITIONS}
        names = dict.fromkeys(name for record in records for name in record if name not in (*_POSITIONS, "epoch"))
        for name in names:
            measured = [record for record in records if name in record]
            columns = {key: [offsets[key] + record.get(key, 0.0) for record in measured] for key in _POSITIONS}
            columns["value"] = [record[name] for record in measured]
            columns["share"] = [record["step"] / (ends["step"] or 1) for record in measured]
            thinned = zip(*_thin_points([*zip(*columns.values(), strict=True)], 2 * _MOST), strict=True)
            line = {key: list(values) for key, values in zip(columns, thinned, strict=True)}
            metric, is_validation = name.removeprefix("validation/"), name.startswith("validation/")
            series.append({"phase": phase, "metric": metric, "validation": is_validation} | line)
        offsets = {name: offsets[name] + ends[name] for name in _POSITIONS}
    return series


def draw_corpus(statistics: Summary) -> str:
    """Return charts of a split: its chunks by length, their counts by rank (Zipf), and its documents by length.

    A distribution of fewer than three values, or of fewer than 20 documents, is left out.
    """
    chunks = max(1, sum(statistics.chunk_lengths))
    lengths: Points = [(n, 100 * count / chunks) for n, count in enumerate(statistics.chunk_lengths) if n]
    ranks: Points = [(log10(rank), log10(count)) for rank, count in statistics.rank_frequency if rank and count]
    histogram = sorted((int(start), count) for start, count in statistics.tokens_per_document.documents_from.items())
    documents: Points = [(log10(start), count) for start, count in histogram if start]
    if sum(count for _, count in histogram) < _FEWEST_DOCUMENTS:
        documents = []
    distinct = f"{'' if statistics.distinct_chunks_exact else 'about '}{statistics.distinct_chunks:,}"
    charts = (
        ("% of the chunks, by length", "tokens", lengths, False, False),
        (f"count of each chunk, by rank ({distinct} distinct)", "rank", ranks, True, True),
        ("number of documents, by length", "tokens", documents, True, False),
    )
    drawn = []
    for title, unit, points, log_x, log_y in charts:
        if len(points) >= _FEWEST_POINTS:
            across, upwards = zip(*points, strict=True)
            ranges = (min(across), max(across)), (min(upwards) if log_y else 0.0, max(upwards))
            lines = [CurveLine("train", points, dots=len(points) <= 64)]
            drawn.append(_draw_chart(title, unit, lines, *ranges, log_x, log_y))
    return "".join(drawn)


def _curve_lines(phases: Mapping[str, list[Record]], name: str) -> list[CurveLine]:
    offset, lines = 0.0, []
    for phase, records in phases.items():
        length = max((record.get("seconds", 0.0) for record in records), default=0.0)
        for key, dots in ((name, False), (f"validation/{name}", True)):
            points = [(offset + r["seconds"], r[key]) for r in records if key in r and "seconds" in r]
            late = [point for point in points if point[0] > offset + _SKIPPED * length]
            lines.append(CurveLine(phase, points if dots else _thin_points(late or points), dots))
        offset += length
    return lines


def _thin_points(points: Sequence[tuple[float, ...]], most: int = _MOST) -> list[Any]:
    """Return at most `most` points, each the mean of neighbouring points."""
    size = -(-len(points) // most)
    groups = [points[i : i + size] for i in range(0, len(points), size)] if size > 1 else []
    return [tuple(sum(each) / len(group) for each in zip(*group, strict=True)) for group in groups] or list(points)


def _draw_chart(
    title: str,
    unit: str,
    lines: Sequence[CurveLine],
    across: tuple[float, float],
    upwards: tuple[float, float],
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return the SVG of lines over a range of x, in a range of y: a line is interrupted where it leaves that.

    On a logarithmic axis, coordinates are decimal logarithms.
    """
    left, right = across if across[0] < across[1] else (across[0] - 0.5, across[0] + 0.5)
    low, high = upwards
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT),
            _TOP + (high - y) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [f"<text x='{_LEFT}' y='14' class='title'>{escape(title)}</text>"]
    for y in _tick_values(low, high, log_y):
        at = place(left, y)[1]
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' class='grid'/>")
        parts.append(f"<text x='{_LEFT - 5}' y='{at + 3.5:.1f}' text-anchor='end'>{10**y if log_y else y:,.6g}</text>")
    for x in _tick_values(left, right, log_x):
        at = place(x, low)[0]
        shown = 10**x if log_x else x
        parts.append(f"<text x='{at:.1f}' y='{_HEIGHT - 19}' text-anchor='middle'>{shown:,.6g}</text>")
    parts.append(f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 5}' text-anchor='end'>{escape(unit)}</text>")
    for line in lines:
        colour = escape(line.phase.split()[0])  # `pretrain of OTHER` too
        for is_shown, group in groupby(line.points, lambda point: low <= point[1] <= high):
            places = [place(x, y) for x, y in group] if is_shown else []
            if line.dots or len(places) == 1:
                parts += [f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' class='{colour}'/>" for x, y in places]
            if len(places) > 1:
                joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
                parts.append(f"<polyline points='{joined}' class='{colour}{' dashed' if line.dots else ''}'/>")
    phases = list(dict.fromkeys(line.phase.split()[0] for line in lines))
    for number, phase in enumerate(phases if len(phases) > 1 or unit.startswith("seconds") else ()):
        x = _WIDTH - _RIGHT - 70 * (len(phases) - number) + 8
        parts.append(f"<circle cx='{x}' cy='10' r='3.5' class='{escape(phase)}'/>")
        parts.append(f"<text x='{x + 7}' y='14'>{escape(phase)}</text>")
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{escape(title)}'>{''.join(parts)}</svg>"


def _tick_values(low: float, high: float, log: bool) -> Iterable[float]:
    """Return about three to six round numbers between two others.

    Of a logarithmic axis these are whole powers of ten. If there are fewer than two, 1, 2 and 5 times these; if these are
    too few, the ends as well, unless they are close to one.
    """
    span = (high - low) or abs(high) or 1.0
    if log and floor(high) <= ceil(low):
        powers = range(floor(low), ceil(high) + 1)
        ticks = [power + log10(factor) for power in powers for factor in (1, 2, 5)]
        ticks = [tick for tick in ticks if low <= tick <= high]
        ends = [log10(float(f"{10**end:.3g}")) for end in (low, high)]
        if len(ticks) < 2:
            ticks = sorted(ticks + [x for x in ends if all(abs(x - at) > span / 4 for at in ticks)])
        return ticks
    unit = 10.0 ** floor(log10(span / 3))
    step = next(unit * each for each in (5, 2, 1) if span / (unit * each) >= 2.5 or each == 1)
    if log:
        step = max(1, round(step))
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]
