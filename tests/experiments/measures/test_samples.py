"""What is counted in samples."""

import pytest

from experiments import measures
from pipeline.run.opened import Run


def test_repeats_are_the_share_of_grams_that_were_there() -> None:
    assert measures.share_repeated("a b a b a", 1) == pytest.approx(3 / 5)
    assert measures.share_repeated("a b a b a", 2) == pytest.approx(2 / 4)
    assert measures.share_repeated("a b c", 1) == measures.share_repeated("a", 2) == measures.share_repeated("", 1) == 0


def test_prompts_are_whole_words_and_what_follows_them() -> None:
    text = b" ".join(b"w%d" % number for number in range(300)) + b"\n"
    prompts, truths = measures.spread_prompts(text)
    assert len(prompts) == len(truths) == measures.PROMPTS
    for prompt, truth in zip(prompts, truths, strict=True):
        assert len(prompt.split()) == len(truth.split()) == 64 and prompt + truth.encode() in text
    with pytest.raises(ValueError, match="has 100 words"):
        measures.spread_prompts(b"a " * 100)


def test_bleu_is_highest_where_a_sample_is_the_text() -> None:
    pytest.importorskip("sacrebleu")
    truth = "the cat sat on the mat and looked around"
    assert measures.compute_bleu([truth], [[truth, "no", "no"]]) == pytest.approx(100)
    assert measures.compute_bleu([truth], [["dogs bark", "no", "no"]]) < 5


def test_a_run_has_figures_and_examples(scaled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "PROMPTS", 2)
    monkeypatch.setattr(measures, "SAMPLE_BYTES", 24)

    def missing(*given: object) -> float:
        raise ImportError

    monkeypatch.setattr(measures, "compute_bleu", missing)
    found = measures.measure_samples(scaled)
    assert "BLEU" not in found.metrics and "haed[experiments]" in found.notes[1]
    text = float(found.notes[0].split("bits/char of n-grams ")[1].split(",")[0])
    assert found.metrics["bits/char of n-grams"] > text > 0
    assert found.metrics["seconds a sample"] > 0 and len(found.examples) == 3
