"""Bags of the next tokens: their bits against those of frequencies, and what is shown of them."""

from pathlib import Path

import pytest

from experiments import measures
from pipeline.config import load_options
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import TINY, of_kind


def test_examples_are_of_the_text_and_bits_of_frequencies(text: Path, sharded: Path, tmp_path: Path) -> None:
    where = ["source.kind=text", f"source.path={text}", f"runs_dir={tmp_path}", f"shards_dir={sharded}", "name=bags"]
    bag = ["model.multiscale.layers=1@4", "model.multiscale.upsampling=repeat", "train.steps=60"]
    options = load_options("top-down", [*of_kind("top_down", [*TINY, *where]), *bag, "optimizer.learning_rate=0.02"])
    train(options)
    run = Run(RunFolder.from_options(options), options)
    found = measures.measure_bags(run)
    assert measures.finest_scale(run) == 4 and 0.5 < found.metrics["share of a unigram model's bits"] < 1.1
    valid = b"".join(run.folder.open_corpus().iterate_original_blocks("valid")).decode()
    assert len(found.examples) == 1 + measures.BAG_EXAMPLES
    for before, after, likeliest in found.examples[1:]:
        assert before + after in valid and len(after) == 4
        shares = [float(each.split()[-1]) for each in likeliest.split(" · ")]
        assert shares == sorted(shares, reverse=True) and sum(shares) <= 1.05


def test_a_model_without_training_is_no_better_than_chance(scaled: Run) -> None:
    assert measures.measure_bags(scaled).metrics["share of a unigram model's bits"] == pytest.approx(1.6, abs=0.5)
