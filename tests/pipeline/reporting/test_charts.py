"""Charts: their size, and that every point lies inside."""

import re

import pytest

from data.statistics import DocumentLengths, Summary
from pipeline.reporting.charts import draw_corpus, draw_curves


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
