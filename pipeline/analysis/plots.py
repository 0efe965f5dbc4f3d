"""Plots of an analysis, as PNG bytes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pipeline.analysis.intrinsic import MODEL as OF_MODEL
from pipeline.analysis.intrinsic import WHOLE as OF_WHOLE
from pipeline.console import cut_middle
from pipeline.reporting.plots import COLOURS, GREY, MODEL, MONOSPACE, add_panel, drawable_label, encode_png
from pipeline.run.analysis_results import Agreement, ByLayer, Drift, Intrinsic
from pipeline.run.files import Part

USE, SPELLING = COLOURS["pretrain"], MODEL
_LABELS = 60  # labels on a map
_SIGNS = {
    OF_WHOLE: ("<", "#57606a"),
    "PPMI-SVD": ("D", USE),
    "skip-gram": ("s", COLOURS["train"]),
    "spelling": ("X", "#b08d57"),
}


def plot_agreement(bands: Sequence[Agreement]) -> bytes:
    """Plot similarity in use and spelling over the centred cosine, from chance (0) to best (1), one panel per band."""
    figure = Figure(figsize=(4.8 * len(bands), 3.2))
    for position, band in enumerate(bands, 1):
        last = band.first + band.among - 1
        title = f"chunks of rank {band.first:,} to {last:,}"
        axes = add_panel(figure, position, len(bands), title, "centred cosine of embeddings, minimum")
        for name, kind, colour in (("use", band.use, USE), ("spelling", band.spelling, SPELLING)):
            span = max(kind.best - kind.chance, 1e-9)
            known = [(x, y) for x, y in zip(band.cosines, kind.by_cosine, strict=True) if y is not None]
            if points := [(x, (y - kind.chance) / span) for x, y in known]:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.1, label=name)
            axes.axhline(kind.share, color=colour, linewidth=0.9, linestyle="--")
        axes.plot([], [], "--", color="#57606a", linewidth=0.9, label=f"the {band.neighbours} nearest")
        axes.set_ylabel("from chance (0) to the best (1)", fontsize=8)
        axes.legend(fontsize=8, frameon=False, loc="best")
    return encode_png(figure)


def plot_intrinsic_checks(intrinsic: Intrinsic) -> bytes:
    """Plot precision@10 by set: a bar for the model and a marker for each other system."""
    checks = sorted(intrinsic.checks, key=lambda check: (not check.use, -check.precision[OF_MODEL]))
    figure = Figure(figsize=(9.5, 0.27 * len(checks) + 1.0))
    axes = add_panel(figure, 1, 1, "", "precision@10: more is better")
    names = [name for name in checks[0].precision if name != OF_MODEL]
    places = np.arange(len(checks))[::-1]
    axes.barh(places, [check.precision[OF_MODEL] for check in checks], color=MODEL, height=0.55, label=OF_MODEL)
    for name in names:
        sign, colour = _SIGNS.get(name, ("|", GREY))
        axes.plot([check.precision[name] for check in checks], places, sign, color=colour, markersize=5, label=name)
    titles = [check.name if check.use else f"{check.name} (spelled alike)" for check in checks]
    axes.set_yticks(places, titles, fontsize=8)
    axes.set_xlim(-0.01, 1.02)
    axes.legend(fontsize=8, frameon=False, ncols=len(names) + 1, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return encode_png(figure)


def plot_norms(vectors: np.ndarray, counts: np.ndarray) -> bytes:
    """Plot the norm of each chunk's embedding against its count."""
    figure = Figure(figsize=(6, 3.2))
    axes = add_panel(figure, 1, 1, "norm of the embedding", "occurrences of the chunk")
    axes.semilogx(counts, np.linalg.norm(vectors, axis=1), ".", color=USE, markersize=2, alpha=0.4)
    return encode_png(figure)


def plot_loss(parts: Sequence[Part]) -> bytes:
    """Plot bits per token, and the shares of bits and tokens, by the count of a chunk in the train split."""
    figure = Figure(figsize=(9.5, 2.9))
    names, places = [part.of.replace("–", "–\n") for part in parts], np.arange(len(parts))
    each = add_panel(figure, 1, 2, "bits per token", "times in the train split")
    each.bar(places, [part.bits_per_token or 0.0 for part in parts], color=MODEL, width=0.7)
    each.set_xticks(places, names, fontsize=7)
    shares = add_panel(figure, 2, 2, "share of the total, %", "times in the train split")
    for shift, (name, colour) in zip((-0.2, 0.2), (("bits", MODEL), ("tokens", GREY)), strict=True):
        values = np.array([getattr(part, name) for part in parts], float)
        shares.bar(places + shift, 100 * values / max(values.sum(), 1e-9), color=colour, width=0.38, label=name)
    shares.set_xticks(places, names, fontsize=7)
    shares.legend(fontsize=8, frameon=False)
    return encode_png(figure)


def plot_drift(drift: Drift) -> bytes:
    """Plot the frequent chunks that moved most and least, by the cosine of their embeddings before and after."""
    figure = Figure(figsize=(9.5, 0.2 * max(len(drift.most), len(drift.least)) + 0.9))
    for position, (title, moved) in enumerate((("moved most", drift.most), ("moved least", drift.least)), 1):
        axes = add_panel(figure, position, 2, title, "cosine with itself, after the best rotation")
        places = np.arange(len(moved))[::-1]
        bars = axes.barh(places, [each.cosine for each in moved], color=USE, height=0.6)
        axes.bar_label(bars, fmt="{:z.3f}", fontsize=7, padding=2)
        labels = [drawable_label(cut_middle(each.chunk, _LONGEST_LABEL)) for each in moved]
        axes.set_yticks(places, labels, fontsize=8, family=MONOSPACE)
        axes.set_xlim(min(0.0, *(each.cosine for each in (*drift.most, *drift.least))), 1.12)  # room for the values
    return encode_png(figure)


def plot_passages(passages: ByLayer) -> bytes:
    """Plot the neighbours each layer shares with the previous layer, and the shares with equal chunks or documents."""
    figure = Figure(figsize=(9.5, 3.0))
    names, places = [each.name for each in passages.layers], np.arange(len(passages.layers))
    kept = add_panel(figure, 1, 2, "nearest passages shared with the layer before, %", "")
    kept.bar(places[1:], [100 * (each.overlap or 0) for each in passages.layers[1:]], color=USE, width=0.6)
    kept.axhline(100 * (passages.chance.overlap or 0), color=GREY, linewidth=1, linestyle="--")
    kept.set_ylim(0, 100)
    shared = add_panel(figure, 2, 2, "nearest passages with the same …, %; dashed: by chance", "")
    for name, shares, colour in (
        ("chunk before", "last", USE),
        ("chunk behind", "following", MODEL),
        ("document", "document", COLOURS["train"]),
    ):
        values = [100 * getattr(each, shares) for each in passages.layers]
        shared.plot(places, values, "o-", color=colour, markersize=4, label=name)
        shared.axhline(100 * getattr(passages.chance, shares), color=colour, linewidth=0.9, linestyle="--")
    shared.set_ylim(bottom=0)
    shared.legend(fontsize=8, frameon=False)
    for axes in (kept, shared):
        axes.set_xticks(places, names, fontsize=8)
        axes.set_xlim(-0.5, len(names) - 0.5)
    return encode_png(figure)


_LONGEST_LABEL = 32  # characters of a chunk, which leave room for what is plotted


def choose_pixel_colours(labels: Sequence[str]) -> list[str]:
    """Return the colour of each chunk's first pixel; a part of a pixel has its last value in place of what is missing."""
    firsts = [label.split(",")[0] for label in labels]
    return [(first + 2 * first[-2:])[: len("#rrggbb")] for first in firsts]


def plot_map(
    places: np.ndarray, clusters: np.ndarray, labels: Sequence[str], name: str, colours: Sequence[str]
) -> bytes:
    """Plot points (n, 2) in their cluster's colour, or in `colours`, with labels of frequent chunks where they fit."""
    figure = Figure(figsize=(9.5, 7))
    axes = figure.add_subplot()
    point_colours = colours or [f"C{cluster % 10}" for cluster in clusters.tolist()]
    axes.set_facecolor("#776b8f" if colours else "none")  # few pixels have this colour; many are black or white
    alpha = 1.0 if colours else 0.45
    axes.scatter(places[:, 0], places[:, 1], c=point_colours, s=3, alpha=alpha, linewidths=0)
    span = np.maximum(np.ptp(places, axis=0), 1e-9)
    taken: list[np.ndarray] = []
    for place, label in zip(places, () if colours else labels, strict=False):
        label = drawable_label(cut_middle(label, _LONGEST_LABEL))
        size = np.array([0.012 * (len(label) + 1), 0.026])  # size of a label, as a share of the picture
        middle = (place / span) + size / 2
        if all((np.abs(middle - other[:2]) > (size + other[2:]) / 2).any() for other in taken):
            taken.append(np.concatenate([middle, size]))
            axes.annotate(label, place, fontsize=7, family=MONOSPACE, xytext=(2, 2), textcoords="offset points")
        if len(taken) == _LABELS:
            break
    meaning = "the first pixel" if colours else "cluster"
    axes.set_title(f"{name} of embeddings, coloured by {meaning}", fontsize=10, loc="left")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(GREY)
    return encode_png(figure)
