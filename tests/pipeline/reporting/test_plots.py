"""Pictures: the shape of what is drawn, and labels that are names of runs."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from data.statistics import DocumentLengths, Summary
from pipeline.reporting.charts import draw_corpus, draw_curves
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


# Charts: their size, and that every point lies inside.


@pytest.mark.parametrize("points", [1, 2, 10_000])
def test_curves_stay_small_and_inside(points: int) -> None:
    records = [{"step": n, "seconds": 0.5 * n, "bits_per_token": 9 / (n + 1)} for n in range(points)]
    records.append({"step": points, "seconds": 0.5 * points, "validation/bits_per_token": 2.0})
    drawn = draw_curves({"train": records})
    places = [float(x) for pair in re.findall(r"points='([^']*)'", drawn) for x in re.split("[ ,]", pair)]
    assert len(drawn) < 10_000 and places and 0 <= min(places) and max(places) <= 460 and "nan" not in drawn
    assert draw_curves({}) == ""


@pytest.mark.parametrize("distinct", [0, 1, 1000])
def test_a_split_of_any_size_has_charts_with_all_points_inside(distinct: int) -> None:
    ranks = [(rank, max(1, 9000 // rank)) for rank in (1, 2, 5, 10, 100) if rank <= distinct]
    documents = DocumentLengths(1, 900, {"1": 3, "512": 2} if distinct else {})
    drawn = draw_corpus(Summary([0] + [distinct] * 5, distinct, False, ranks, documents))
    places = [float(x) for pair in re.findall(r"points='([^']*)'", drawn) for x in re.split("[ ,]", pair)]
    assert places and 0 <= min(places) and max(places) <= 460 and "nan" not in drawn
    assert (f"about {distinct:,} distinct" in drawn) == bool(ranks)
