"""Plots of experiments, as PNG bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.transforms import Affine2D, Bbox

from pipeline.reporting.plots import add_panel, drawable_label, encode_png


@dataclass
class PlottedModel:
    """Model of an experiment, as it is plotted.

    Attributes:
        name: name of the model.
        unit: unit of the compared metric.
        value: value of the metric, or None.
        spread: spread of the value over seeds.
        paper: values from a paper: the metric, then the quantity on the x-axis of its figure.
        place: x and bits in a plot of bits against another quantity, or None.
        line: points of its line, if lines are plotted.
    """

    name: str
    unit: str
    value: float | None = None
    spread: float = 0.0
    paper: list[float | None] = field(default_factory=list)
    place: tuple[float, float] | None = None
    line: list[tuple[float, float]] = field(default_factory=list)


def plot_experiment(models: Sequence[PlottedModel], paper: Sequence[str], axes: tuple[str, str]) -> bytes:
    """Plot models beside the values of a paper, if it has any, and bits against another quantity, or lines.

    Args:
        models: models in the order of the paper.
        paper: names of the quantities that the paper gives.
        axes: labels of the x-axis and the y-axis of the last plot.
    """
    scattered = any(model.place is not None for model in models)
    panels = 2 + bool(paper) + (scattered and len(paper) > 1)
    figure = Figure(figsize=(4.6 * panels + (0 if scattered else 2), max(3.4, 0.3 * len(models) + 1.2)))
    numbered = scattered and len(models) > 10  # more names would cover each other
    spots = [str(number) if numbered else drawable_label(model.name) for number, model in enumerate(models, 1)]
    labels = [
        f"{drawable_label(model.name)}  {spot}" if numbered else spot for model, spot in zip(models, spots, strict=True)
    ]
    units = " or ".join(dict.fromkeys(model.unit for model in models if model.unit))
    for position, title in enumerate([units, *(f"the paper: {name}" for name in paper[:1])], 1):
        drawn = add_panel(figure, position, panels, title, title if position == 1 else "")
        for number, model in enumerate(models):
            value = model.value if position == 1 else model.paper[0] if model.paper else None
            if value is not None:
                spread = model.spread if position == 1 else 0.0
                drawn.errorbar(value, number, xerr=spread, fmt="o", color=_model_colour(number), markersize=5)
        drawn.set_yticks(range(len(models)), labels if position == 1 else [""] * len(models), fontsize=8)
        drawn.set_ylim(len(models) - 0.5, -0.5)
    last = add_panel(figure, 2 + bool(paper), panels, axes[1], axes[0])
    clouds = [(last, [model.place for model in models])]
    for number, model in enumerate(models):
        if model.line:
            style = {"color": _model_colour(number), "label": drawable_label(model.name)}
            last.plot(*zip(*model.line, strict=True), "o-", markersize=3, linewidth=1.1, **style)
    if scattered and len(paper) > 1:
        paper_panel = add_panel(figure, panels, panels, f"the paper: {paper[0]}", paper[1])
        clouds.append((paper_panel, [_paper_position(model.paper) for model in models]))
    elif across := [x for model in models for x, _ in model.line]:
        distances = axes[0] != "seconds of training"
        if distances and 0 < 50 * min(across) < max(across):  # otherwise most points lie at the left
            last.set_xscale("log")
        # Beside the lines, not over them.
        last.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    for drawn, points in clouds:
        _plot_named_points(drawn, points, spots)
    return encode_png(figure, pad=None)


def _paper_position(paper: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the position of a model in a plot of a paper's first quantity over its second, or None."""
    upwards, across, *_ = [*paper, None, None]
    return None if upwards is None or across is None else (across, upwards)


def _model_colour(number: int) -> Any:
    """Return one of ten colours, or for numbers 10 to 19 a lighter shade of it."""
    return colormaps["tab20"](number % 10 * 2 + number // 10 % 2)


def _plot_named_points(axes: Any, points: Sequence[tuple[float, float] | None], names: Sequence[str]) -> None:
    """Plot points with their names, each name on the side where it covers the fewest points and earlier names."""
    shown = [(*point, name, number) for number, (point, name) in enumerate(zip(points, names, strict=True)) if point]
    for x, y, _, number in shown:
        axes.plot(x, y, "o", color=_model_colour(number), markersize=5)
    axes.margins(0.12)
    axes.autoscale_view()
    size, frame = 7, axes.bbox.transformed(Affine2D().scale(72 / axes.figure.dpi))
    pixels = [axes.transData.transform((x, y)) * 72 / axes.figure.dpi for x, y, *_ in shown]
    taken = [Bbox.from_bounds(x - 3, y - 3, 6, 6) for x, y in pixels]
    for (x, y, name, _), at in zip(shown, pixels, strict=True):
        wide = 0.68 * size * len(name)
        sides = [(dx, dy) for dy in (3, -size - 3, -size / 2) for dx in (4, -wide - 4)]
        sides += [(-wide / 2, 5), (-wide / 2, -size - 5)]
        boxes = [Bbox.from_bounds(at[0] + dx, at[1] + dy, wide, size) for dx, dy in sides]
        covered = [box.count_overlaps(taken) + (not frame.x0 <= box.x0 < box.x1 <= frame.x1) for box in boxes]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        axes.annotate(name, (x, y), sides[best], textcoords="offset points", fontsize=size)
