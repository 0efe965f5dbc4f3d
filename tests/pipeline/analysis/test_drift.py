"""Drift is none of turning, mirroring and scaling, and finds what moved."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from pipeline.analysis import plots
from pipeline.analysis.geometry import align_procrustes, measure_drift

LABELS = [str(number) for number in range(80)]


@pytest.fixture
def source() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(80, 6))


def test_what_is_turned_mirrored_scaled_and_shifted_has_not_moved(source: np.ndarray) -> None:
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))[0]
    turn[0] *= -1
    found = measure_drift(source, 3 * (source - source.mean(0)) @ turn, LABELS, "a", "b")
    assert found.distance == pytest.approx(0, abs=1e-9) and found.cosine == pytest.approx(1)
    assert found.unaligned is not None and found.unaligned < 0.9
    same = measure_drift(source, 2 * source, LABELS, "a", "b", count=5)
    assert same.overlap == 1 and same.unaligned == pytest.approx(1) and same.neighbours == 5


def test_what_moved_is_named(source: np.ndarray) -> None:
    target = source.copy()
    target[[3, 40]] *= -1
    found = measure_drift(source, target, LABELS, "a", "b", frequent=30)
    assert found.most[0].chunk == "3" and found.most[0].cosine < 0 < found.most[1].cosine
    assert "40" not in {each.chunk for each in found.most + found.least} and 0 < found.distance < 0.3


def test_unrelated_clouds_have_the_neighbours_of_chance() -> None:
    a, b = np.random.default_rng(2).normal(size=(2, 400, 50))
    found = measure_drift(a, b, [str(number) for number in range(400)], "a", "b")
    assert found.chance == pytest.approx(10 / 399) and found.overlap < 3 * found.chance
    assert 0.5 < found.distance == pytest.approx(found.distance_chance, abs=0.05)
    assert 0.2 < found.cosine == pytest.approx(found.cosine_chance, abs=0.05)
    same = measure_drift(a, a, [str(number) for number in range(400)], "a", "b")
    assert same.distance < 1e-9 < 0.5 < same.distance_chance and same.cosine > 0.999 > 0.9 > same.cosine_chance


def test_cosines_before_and_after_the_alignment_are_both_centred(source: np.ndarray) -> None:
    target = np.random.default_rng(1).normal(size=(80, 6))
    apart = measure_drift(source, target, LABELS, "a", "b")
    near = measure_drift(source + 9, target + 9, LABELS, "a", "b")
    assert near.unaligned == pytest.approx(apart.unaligned) and near.cosine == pytest.approx(apart.cosine)


def test_equal_embeddings_have_no_drift(source: np.ndarray) -> None:
    equal = np.full((80, 6), 0.1, np.float32)
    for first, second in ((equal, equal), (equal, source), (source, equal)):
        with pytest.raises(ValueError, match="all embeddings of a checkpoint are equal"):
            measure_drift(first, second, LABELS, "a", "b")


def test_each_bar_of_drift_has_its_value(source: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(plots, "encode_png", figures.append)
    plots.plot_drift(measure_drift(source, source, LABELS, "a", "b"))
    assert {text.get_text() for axes in figures[0].axes for text in axes.texts} == {"1.000"}


def test_widths_may_differ(source: np.ndarray) -> None:
    moved, onto, distance = align_procrustes(source[:, :4], np.pad(source[:, :4], ((0, 0), (0, 3))))
    assert moved.shape == onto.shape == (80, 7) and distance == pytest.approx(0, abs=1e-9)
    assert measure_drift(source[:, :4], source, LABELS, "a", "b").unaligned is None
