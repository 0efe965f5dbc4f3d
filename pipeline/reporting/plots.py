"""Plots of runs and corpora, as PNG bytes."""

import io
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font, get_font_names

from pipeline.console import make_printable, warn_once
from pipeline.run.index.queries import PIXELS, QueryResult, display_chunk

COLOURS = {"pretrain": "#2a6f97", "finetune": "#c8553d", "train": "#588157"}
GREY, MODEL = "#b8bec7", "#c8553d"
# For what the usual font lacks, if they are installed: Chinese, Japanese and Korean, then all else and emoji.
_MORE_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Emoji", "Symbola", "Unifont")
rcParams["font.family"] += [name for name in _MORE_FONTS if name in get_font_names()]
MONOSPACE = ["monospace", *rcParams["font.family"]]


def encode_png(figure: Figure, pad: float | None = 1.08) -> bytes:
    """Return a figure as PNG bytes, laid out with a padding of `pad` font sizes; None: it is laid out already."""
    if pad is not None:
        figure.tight_layout(pad=pad)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=150, bbox_inches="tight", metadata={"Software": None})
    return buffer.getvalue()


def drawable_label(label: str) -> str:
    """Return a label that Matplotlib's fonts can draw, that is no formula, and that is not omitted from a legend.

    A character that they lack, or of a script from right to left, is shown by its code. Every name, chunk or sentence in
    a plot must pass through here: an invalid formula raises an error.
    """
    label = make_printable(label).replace("\n", "↵").replace("\t", "⇥")
    drawn = "".join(each if _can_draw(each) else each.encode("unicode_escape").decode() for each in label)
    if drawn != label:
        warn_once(
            r"pictures show codes such as \u4e2d for characters that Matplotlib cannot draw. Install a font such as Noto Sans CJK"
        )
    shown = drawn.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def _can_draw(character: str) -> bool:
    is_from_right = unicodedata.bidirectional(character) in ("R", "AL")
    return ord(character) in _drawn_characters() and not is_from_right


@cache
def _drawn_characters() -> set[int]:
    files = [findfont(FontProperties(family=[name])) for name in rcParams["font.family"]]
    return {code for file in files for code in get_font(file).get_charmap()}


def add_panel(figure: Figure, position: int, columns: int, title: str, unit: str) -> Any:
    """Add axes in the common style, at a position in a row of `columns`."""
    axes = figure.add_subplot(1, columns, position)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


@dataclass
class Point:
    """Validation of a run: bits per token after a number of steps, seconds and model FLOPs."""

    step: float
    seconds: float
    flops: float
    bits: float


def plot_comparison(curves: dict[str, list[Point]]) -> bytes:
    """Plot validation bits per token of runs over steps, seconds and model FLOPs (as the paper's Figure 4).

    The y-axis fits the run with the fewest bits. A run that stays above the axis is named so in the legend.
    """
    low, high = fit_axis(curves)
    figure = Figure(figsize=(12, 3.8))
    units = (("step", "steps"), ("seconds", "seconds of training"), ("flops", "model FLOPs"))
    for position, (name, unit) in enumerate(units, 1):
        axes = add_panel(figure, position, 3, "validation, bits per token" if position == 1 else "", unit)
        for number, (run, points) in enumerate(curves.items()):
            if shown := [(getattr(point, name), point.bits) for point in points]:
                style = {"color": f"C{number % 10}", "markersize": 3, "linewidth": 1.1}
                style["linestyle"] = ("-", "--", ":")[number // 10 % 3]
                above = " (above the axis)" if min(bits for _, bits in shown) > high else ""
                axes.plot(*zip(*shown, strict=True), marker="o", label=drawable_label(run) + above, **style)
        axes.set_ylim(low, high)
        if position == 3 and any(curves.values()):
            handles = axes.get_legend_handles_labels()
            figure.legend(*handles, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3)
    return encode_png(figure)


def fit_axis(curves: dict[str, list[Point]]) -> tuple[float, float]:
    """Return the range of bits of the best run, without the first tenth of its steps, and of ends up to twice that."""
    if not (runs := [points for points in curves.values() if points]):
        return 0.0, 1.0
    best = min(runs, key=lambda points: points[-1].bits)
    late = [point.bits for point in best if point.step > 0.1 * best[-1].step]
    low, high = min(late), max(late)
    reach = low + 2 * (high - low or 0.05 * low or 1.0)
    high = max(high, *(points[-1].bits for points in runs if points[-1].bits <= reach))
    margin = 0.06 * (high - low or 0.1 * low or 1.0)
    return low - margin, high + margin


def draw_pictures(rows: np.ndarray, titles: list[str]) -> bytes:
    """Draw rows of RGB pictures (n, columns, H, W, 3), with a title over each column."""
    shape = (rows.shape[3] / rows.shape[2]) ** 0.5  # same area for every aspect ratio
    figure = Figure(figsize=(1.3 * shape * rows.shape[1], 1.3 / shape * rows.shape[0] + 0.3))
    for number, raster in enumerate(rows.reshape(-1, *rows.shape[2:])):
        axes = figure.add_subplot(rows.shape[0], rows.shape[1], number + 1)
        axes.imshow(raster, interpolation="nearest")
        axes.set_axis_off()
        if number < len(titles):
            axes.set_title(titles[number], fontsize=8)
    return encode_png(figure, pad=0.3)


def draw_neighbours(results: list[QueryResult]) -> bytes | None:
    """Draw queries and neighbours as strips over captions; return None unless they are chunks of whole RGB pixels."""
    chunks = [(item.query, bytes.fromhex(item.hex)) for item in results]
    if any(shown != display_chunk(chunk, PIXELS) or len(chunk) % 3 for shown, chunk in chunks):
        return None
    rows = [
        [(bytes.fromhex(item.hex), "query"), *((bytes.fromhex(n.hex), f"{n.score:.3f}") for n in item.neighbours)]
        for item in results
    ]
    columns = max(len(row) for row in rows)
    figure = Figure(figsize=(1.25 * columns, 0.62 * len(rows) + 0.1))
    for y, row in enumerate(rows):
        for x, (chunk, caption) in enumerate(row):
            axes = figure.add_subplot(len(rows), columns, y * columns + x + 1)
            axes.imshow(np.frombuffer(chunk, np.uint8).reshape(1, -1, 3), interpolation="nearest", aspect="auto")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_color(GREY)  # a white chunk has an edge too
            axes.set_title(caption, fontsize=7, y=-0.45)
    return encode_png(figure, pad=0.5)
