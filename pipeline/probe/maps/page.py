"""A map as one HTML file that needs no network: zoom, search, neighbours on hover, colours by frequency, length or cluster.

The page is `map.html` with the points as JSON inside; labels reach the screen as text, never as markup.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.show.page import escape

_STEPS = 20_000  # of a coordinate


@dataclass
class Points:
    """n chunks on maps, the most frequent first.

    Attributes:
        labels: for people.
        counts: (n,).
        lengths: (n,) in bytes.
        clusters: (n,).
        near: (n, m) rows of the nearest by embedding, with (n, m) cosines in hundredths.
        cosines: these.
        places: (n, 2) by the name of a map, the one to show first.
        pixels: labels are colours.
    """

    labels: list[str]
    counts: np.ndarray
    lengths: np.ndarray
    clusters: np.ndarray
    near: np.ndarray
    cosines: np.ndarray
    places: dict[str, np.ndarray]
    pixels: bool


def map_page(title: str, about: str, points: Points) -> str:
    """The page.

    Args:
        title: its heading.
        about: a sentence on what is shown.
        points: the points.
    """
    values = {
        "labels": points.labels,
        "counts": points.counts.tolist(),
        "lengths": points.lengths.tolist(),
        "clusters": points.clusters.tolist(),
        "near": points.near.tolist(),
        "cosines": points.cosines.tolist(),
        "places": {name: _whole(xy) for name, xy in points.places.items()},
        "pixels": points.pixels,
    }
    content = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    page = (Path(__file__).parent / "map.html").read_text(encoding="utf-8")
    before, rest = page.split("@POINTS@")
    return before.replace("@ABOUT@", escape(about)).replace("@TITLE@", escape(title)) + content + rest


def _whole(places: np.ndarray) -> list[int]:
    """Places (n, 2) as whole numbers x, y, x, y, … of which the longer side has `_STEPS`; y grows downwards."""
    low = places.min(0)
    scale = _STEPS / max(float((places.max(0) - low).max()), 1e-12)
    found = (places - low) * scale
    found[:, 1] = found[:, 1].max() - found[:, 1]
    return [int(value) for value in found.round().ravel()]
