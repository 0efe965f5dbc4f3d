"""What the flows of training refuse before they wait for a device, and what they say at their end."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flows.flows import _summarize_training
from pipeline.config import load_options
from pipeline.run.sharding import shard_source
from pipeline.training.stages import check_run, train
from pipeline.training.trainer import TrainingResult


def test_what_would_be_refused_is_said_before_anything_is_waited_for(tiny: list[str], tmp_path: Path) -> None:
    options = load_options("quickstart", [*tiny, "train.steps=1"])
    with pytest.raises(FileNotFoundError, match="Run `haed shard`"):
        check_run("train", options)
    shard_source(options)
    check_run("train", options)
    train(options)
    check_run("train", options)
    with pytest.raises(ValueError, match="resume=never"):
        check_run("train", load_options("quickstart", [*tiny, "resume=never"]))
    (tmp_path / "other.txt").write_text("another text, of which nothing was trained. " * 200)
    other = load_options("quickstart", [*tiny, f"source.path={tmp_path / 'other.txt'}"])
    for refuse in (lambda: check_run("train", other), lambda: train(other)):  # nor is it told to shard first
        with pytest.raises(ValueError, match="was trained on another corpus: source.path="):
            refuse()
    shutil.copytree(str(options.source.path), tmp_path / "copy")
    check_run("train", load_options("quickstart", [*tiny, f"source.path={tmp_path / 'copy'}"]))  # the same contents


def test_the_last_state_of_a_training_says_that_it_was_too_short() -> None:
    remark = "pretrain has taken 9 steps, at 2.2 s each; …: pretrain.seconds=220 or more"
    enough = TrainingResult("runs/x", "pretrain", "runs/x/pretrain/checkpoints/step-00000009", 9, 20.0, 0.01, 0)
    assert _summarize_training(enough).startswith("9 steps in 20 s, 0.01 epochs; runs/x")
    said = _summarize_training(replace(enough, remark=remark))
    assert "too few to learn anything" in said and said.endswith(remark)
