"""Nearest passages by each scale of a model, and the agreement of topics."""

from pathlib import Path

import pytest
import torch

from experiments import measures
from pipeline.run.opened import Run, open_run
from pipeline.run.windows import fixed_subset


def test_a_passage_is_nearest_to_itself_and_not_by_where_all_lie() -> None:
    found = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) + 100
    assert measures.nearest_passages(found[:5], found)[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert measures.nearest_passages(found[:5], found).shape == (5, measures.NEAREST)


def test_topics_agree_by_rare_words() -> None:
    found = measures.topic_agreement(["the cat sat"], ["the CAT sat", "the cat ran", "the dog ran", "the fox"])[0]
    assert float(found[0]) == pytest.approx(1) and found[0] > found[1] > found[2] == found[3] == 0


def test_vectors_are_of_each_window_by_itself(scaled: Run) -> None:
    windows = fixed_subset(scaled.folder.open_corpus(), scaled.options.batch.context, 20)
    assert windows is not None
    found = measures.passage_vectors(scaled, windows)
    longest = int(windows.lengths[:16].sum(1).argmax())
    alone = measures.passage_vectors(scaled, windows[longest : longest + 1])
    for scale in (2, 1):
        assert found[scale].shape == (len(windows), scaled.options.model.token.width)
        torch.testing.assert_close(found[scale][longest], alone[scale][0], rtol=1e-3, atol=1e-4)


def test_a_run_has_figures_by_scale(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "CANDIDATES", 16)
    found = measures.measure_passages(scaled)
    assert {f"distance of topics at {scale}x, of random" for scale in (1, 2)} == set(found.metrics)
    assert all(0 < value < 2 for value in found.metrics.values()) and len(found.examples) == 1 + 2 * 2


def test_a_model_of_chunks_has_no_scales(run: Path) -> None:
    with pytest.raises(ValueError, match="model.kind=haed has no scales"):
        measures.measure_passages(open_run(run))
