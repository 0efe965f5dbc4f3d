"""Pictures: the shape of what is drawn, and labels that are names of runs."""

import io
import re

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.font_manager import findfont, get_font
from PIL import Image

from data.statistics import DocumentLengths, Statistics, Summary
from pipeline.console import warn_once
from pipeline.reporting import plots
from pipeline.reporting.charts import draw_corpus, draw_curves, list_series
from pipeline.reporting.plots import Point, draw_pictures, drawable_label, fit_axis, plot_comparison


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


def test_a_character_that_no_font_has_is_shown_by_its_code_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plots, "_drawn_characters", lambda: {*range(128), ord("測"), ord("א")})
    warn_once.cache_clear()
    assert drawable_label("測a") == "測a" and not caplog.messages
    assert drawable_label("試a") == r"\u8a66a" and drawable_label("🎉") == r"\U0001f389"
    assert drawable_label("א") == r"\u05d0"  # Matplotlib would draw a word of them from left to right
    assert len(caplog.messages) == 1 and "Noto Sans CJK" in caplog.text


def test_a_font_that_is_installed_draws_what_the_usual_one_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By each font of Matplotlib's own that has more; a glyph that is missing would be a warning, which fails here."""
    usual = set(get_font(findfont("DejaVu Sans")).get_charmap())
    (more, *_) = (chr(code) for code in get_font(findfont("STIXGeneral")).get_charmap() if code not in usual)
    plots._drawn_characters.cache_clear()
    with rc_context({"font.family": ["DejaVu Sans"]}):
        assert drawable_label(more).startswith("\\")
    plots._drawn_characters.cache_clear()
    with rc_context({"font.family": ["DejaVu Sans", "STIXGeneral"]}):
        assert drawable_label(more) == more
        assert plot_comparison({more: [Point(1, 1, 1, 2.0)]}).startswith(b"\x89PNG")
    plots._drawn_characters.cache_clear()


# Charts: their size, and that every point lies inside.


@pytest.mark.parametrize("points", [1, 2, 10_000])
def test_curves_stay_small_and_inside(points: int) -> None:
    records = [{"step": n, "seconds": 0.5 * n, "bits_per_token": 9 / (n + 1)} for n in range(points)]
    records.append({"step": points, "seconds": 0.5 * points, "validation/bits_per_token": 2.0})
    drawn = draw_curves({"train": records})
    places = [float(x) for pair in re.findall(r"points='([^']*)'", drawn) for x in re.split("[ ,]", pair)]
    places += [float(x) for x in re.findall(r"c[xy]='([^']*)'", drawn)]
    assert len(drawn) < 10_000 and drawn.count("r='3'") == (2 if points < 3 else 1)
    assert 0 <= min(places) and max(places) <= 460 and "nan" not in drawn
    assert draw_curves({}) == ""


def drawn_points(drawn: str) -> list[tuple[float, float]]:
    pairs = " ".join(re.findall(r"points='([^']*)'", drawn)).split()
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)]


def test_the_first_losses_do_not_flatten_the_curves() -> None:
    """Not even those of the second phase, which begins anew in the middle of the chart."""
    phase = [{"step": n, "seconds": float(n), "bits_per_token": 2 - n / 100} for n in range(2, 101)]
    first = {"step": 1, "seconds": 1.0, "bits_per_token": 50.0}
    drawn = draw_curves({"pretrain": [first, *phase], "finetune": [first, *phase]})
    heights = [y for _, y in drawn_points(drawn)]
    assert max(heights) - min(heights) > 120


def test_points_above_the_axis_are_left_out_instead_of_drawn_as_a_plateau() -> None:
    bits = [2 - n / 100 for n in range(100)]
    bits[50:52] = [90.0, 80.0]
    drawn = draw_curves(
        {"train": [{"step": n, "seconds": float(n), "bits_per_token": each} for n, each in enumerate(bits)]}
    )
    heights = [y for _, y in drawn_points(drawn)]
    assert drawn.count("<polyline") == 2 and len(heights) == 93 and heights.count(min(heights)) == 1


def test_series_are_over_steps_seconds_and_flops_one_phase_after_another() -> None:
    records = [{"step": n, "seconds": 2.0 * n, "flops": 3.0 * n, "iem": 1.0, "validation/iem": 2.0} for n in (1, 2)]
    series = list_series({"pretrain": records, "finetune": records})
    assert [(each["phase"], each["metric"], each["validation"]) for each in series[:2]] == [
        ("pretrain", "iem", False),
        ("pretrain", "iem", True),
    ]
    last = series[-1]
    assert (last["step"], last["seconds"], last["flops"], last["value"]) == ([3, 4], [6, 8], [9, 12], [2, 2])
    many = [{"step": n, "seconds": float(n), "iem": 1.0} for n in range(10_000)]
    assert len(list_series({"train": many})[0]["step"]) <= 600 and list_series({}) == []


def test_a_comparison_fits_the_best_run() -> None:
    def points(*bits: float) -> list[Point]:
        return [Point(10 * step, step, step, each) for step, each in enumerate(bits, 1)]

    best = points(9.0, *(2 - n / 20 for n in range(12)))
    low, high = fit_axis({"best": best, "near": points(9.0, 2.1), "far": points(8.0, 7.0)})
    assert 1.3 < low < 1.45 < 2.1 < high < 2.2
    assert fit_axis({"none": []}) == (0.0, 1.0) and fit_axis({"one": points(2.0)})[0] < 2.0


@pytest.mark.parametrize("distinct", [0, 1, 1000])
def test_a_split_of_any_size_has_charts_with_all_points_inside(distinct: int) -> None:
    ranks = [(rank, max(1, 9000 // rank)) for rank in (1, 2, 5, 10, 100) if rank <= distinct]
    documents = DocumentLengths(1, 900, {"1": 3, "512": 2} if distinct else {})
    drawn = draw_corpus(Summary([0] + [distinct] * 5, distinct, False, ranks, documents))
    places = [float(x) for pair in re.findall(r"points='([^']*)'", drawn) for x in re.split("[ ,]", pair)]
    assert places and 0 <= min(places) and max(places) <= 460 and "nan" not in drawn
    assert (f"about {distinct:,} distinct" in drawn) == (len(ranks) >= 3)


def test_a_histogram_of_three_documents_is_left_out() -> None:
    def charts(documents: dict[str, int]) -> str:
        return draw_corpus(Summary([0, 0, 9], 1, True, [(1, 9)], DocumentLengths(4, 900, documents)))

    assert charts({"4": 1, "64": 1, "512": 1}) == ""
    assert "number of documents" in charts({"4": 9, "64": 9, "512": 9})


@pytest.mark.parametrize("shortest", [1, 2, 10, 60, 200, 1100, 2100, 5000])
@pytest.mark.parametrize("doublings", [3, 5])
def test_documents_of_any_length_have_numbers_below(shortest: int, doublings: int) -> None:
    found = Statistics()
    for number in range(30):
        found.count_document(shortest << number % doublings, True)
    found.count_chunks(np.zeros(27, np.uint8), np.full(9, 3, np.uint8))
    chart = draw_corpus(found.make_summary()).rpartition("<svg")[2]
    assert "number of documents, by length" in chart
    shown = [float(each.replace(",", "")) for each in re.findall(r"text-anchor='middle'>([\d,.]+)<", chart)]
    assert len(shown) >= 2 and shown == sorted(shown) and shown[0] >= 1
