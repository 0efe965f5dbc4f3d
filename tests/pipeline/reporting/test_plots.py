"""Pictures: the shape of what is drawn, and labels that are names of runs."""

import io

import numpy as np
from PIL import Image

from pipeline.reporting.plots import Point, draw_pictures, drawable_label, plot_comparison


def test_pictures_keep_their_shape() -> None:
    left, right = (220, 30, 30), (30, 30, 220)
    row = np.array([left] * 4 + [right] * 4, np.uint8)
    drawn = draw_pictures(np.broadcast_to(row, (2, 3, 2, 8, 3)), ["given", "completed", "original"])
    found = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int)
    reds, blues = (np.abs(found - colour).sum(2) < 9 for colour in (left, right))
    assert found.shape[1] > 3 * found.shape[0] and reds.any()
    for line in np.flatnonzero(reds.any(1)):  # on each line of pixels red, then blue, three times
        colours = (reds[line] * 1 + blues[line] * 2)[(reds | blues)[line]]
        assert np.flatnonzero(np.diff(colours)).size == 5 and colours[0] == 1


def test_names_of_runs_are_no_formulas_and_stay_in_the_legend() -> None:
    assert drawable_label("a$^$b") == r"a\$^\$b" and drawable_label("_under") == " _under"
    assert plot_comparison({"a$^$b": [Point(1, 1, 1, 2.0)], "_under": [Point(1, 1, 1, 3.0)]}).startswith(b"\x89PNG")
