"""A phase that has a checkpoint: extended, finished, validated again; what is kept of it, and what is said."""

import html
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Options
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.reporting.report import write_report
from pipeline.run import checkpoints
from pipeline.run.run_directory import RunFolder
from pipeline.training import stages
from pipeline.training.stages import finetune, format_outcome, pretrain, train
from pipeline.training.trainer import Validation
from tests.pipeline.training.test_stages import interrupt, newest, stripped


def test_more_steps_extend_a_finished_run(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    assert pretrain(options).steps == 6
    options.pretrain.steps, options.optimizer.learning_rate = 9, 0.001
    with caplog.at_level("INFO"):
        again = pretrain(options)
    assert (again.resumed_from, again.steps) == (6, 9)
    for line in (
        "changed since the checkpoint: pretrain.steps=9 (before: 6)",
        "changed since the checkpoint: optimizer.learning_rate=0.001 (before: 0.002)",
        "67 % of the phase is done (before: 100 %). The learning rate continues at 58.8 % of its peak (before: 45.0 %)",
    ):
        assert line in caplog.text
    assert pretrain(options).resumed_from == 9


def test_a_phase_that_lower_limits_end_keeps_what_trained_it(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    interrupt(pretrain, options, 3)
    given = replace(options, pretrain=replace(options.pretrain, steps=2))
    given.optimizer = replace(options.optimizer, learning_rate=0.5)
    with caplog.at_level("INFO"):
        assert "nothing was trained" in format_outcome(pretrain(given))
    kept = RunFolder.from_options(options).load_options()
    assert kept.pretrain.steps == 2 and kept.optimizer == options.optimizer
    assert "optimizer.learning_rate=0.5 has no effect, it was trained with" in caplog.text
    assert "The learning rate continues" not in caplog.text and "pretrain.steps=2 has no effect" not in caplog.text


def test_a_finished_phase_keeps_what_trained_it(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    """Of the command that comes too late, only what is for later is written into config.yaml, and nothing into a checkpoint."""
    pretrain(options)
    finetune(options)
    before = [(newest(options, phase) / "state.json").read_text() for phase in ("pretrain", "finetune")]
    given = replace(options, seed=7, pretrain=replace(options.pretrain, steps=3, iem_weight=0.5))
    given.validation = replace(options.validation, times=5)
    given.finetune = replace(options.finetune, steps=50)
    given.sample = replace(options.sample, temperature=0.5)
    path = RunFolder.from_options(options).path / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 5"))  # nor is what somebody wrote there
    with caplog.at_level("INFO"):
        assert "its limits were reached before, nothing was trained" in format_outcome(pretrain(given))
    kept = RunFolder.from_options(options).load_options()
    assert (kept.seed, kept.pretrain, kept.finetune) == (options.seed, options.pretrain, options.finetune)
    assert kept.sample.temperature == 0.5 and kept.validation == options.validation
    for line in (
        "pretrain is finished: seed=7 has no effect, it was trained with 0",
        "pretrain is finished: pretrain.iem_weight=0.5 has no effect, it was trained with 1.0",
        "config.yaml keeps finetune.steps=4 until `haed finetune` trains with 50",
    ):
        assert line in caplog.text
    given.finetune.steps = 4
    finetune(given)
    assert RunFolder.from_options(options).load_options().pretrain == options.pretrain
    assert before == [(newest(options, phase) / "state.json").read_text() for phase in ("pretrain", "finetune")]


def test_a_lower_limit_that_ended_phase_one_outlives_phase_two(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    options.validation.times = 0  # a validation at the end would be saved, with the limits
    interrupt(pretrain, options, 3)
    ended = pretrain(replace(options, pretrain=replace(options.pretrain, steps=1))).steps
    assert ended > 1
    run = RunFolder.from_options(options)
    with caplog.at_level("INFO"):
        finetune(run.load_options())
        assert run.load_options().pretrain.steps == 1 and "config.yaml keeps" not in caplog.text
        assert pretrain(run.load_options()).steps == ended
        finetune(run.load_options(["pretrain.steps=50"]))
    assert run.load_options().pretrain.steps == 1
    assert "config.yaml keeps pretrain.steps=1 until `haed pretrain` trains with 50" in caplog.text
    options.finetune.steps = 6
    (run.path / "config.yaml").write_text("nothing: [")  # nobody needs it, and it is written anew
    assert finetune(options).steps == 6 and run.load_options().pretrain.steps == 6


def test_the_last_steps_of_a_phase_have_a_record(options: Options) -> None:
    options.log_steps, options.train.steps, options.validation.times = 50, 7, 0
    train(options)
    found = stripped(options, "train")
    assert found[-1]["step"] == 7 and found[-1]["loss"] > 0
    options.train.steps = 9
    train(options)
    assert [record["step"] for record in stripped(options, "train")[len(found) :]] == [9]


def validations(options: Options, phase: str) -> dict[int, float]:
    """Bits by step."""
    found = stripped(options, phase)
    return {int(r["step"]): r["validation/bits_per_token"] for r in found if "validation/bits_per_token" in r}


@pytest.mark.slow
def test_what_is_extended_is_validated_again_and_the_best_moves(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    options.optimizer.learning_rate, options.evaluate.baselines = 0.01, False
    train(options)
    assert evaluate_run(options).step == 4 and list(validations(options, "train")) == [2, 4]
    for steps, at in ((20, [2, 4, 10, 20]), (21, [2, 4, 10, 20, 21])):  # a step more, and it is validated at the end
        options.train.steps = steps
        train(options)
        found = validations(options, "train")
        assert list(found) == at
    best = min(found, key=lambda step: found[step])
    assert best > 4 and (newest(options, "train").parent / "best").read_text() == f"step-{best:08d}\n"
    assert "train step 4). The run's present checkpoint is " in html.unescape(write_report(options).read_text())
    assert evaluate_run(options).step == best and "The likelihood belongs to" not in write_report(options).read_text()

    options.train.steps, options.validation.times, options.validation.windows = 22, 0, 2
    with caplog.at_level("INFO"):
        train(options)
    assert f"validation is off, so step-{best:08d} stays the best checkpoint" in caplog.text
    assert "validation.windows changed, so earlier validations are not compared" in caplog.text


@pytest.mark.parametrize("elsewhere", [False, True])
def test_phase_two_starts_from_the_checkpoint_of_phase_one_that_validated_best(
    elsewhere: bool, options: Options, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([5.0, 6.0, 7.0, *[1.0] * 9])
    monkeypatch.setattr(Validation, "score", lambda self, *_: {self.metric_name: next(scores)})
    options.pretrain.patience, options.validation.times, options.finetune.steps = 2, 6, 1
    options.optimizer.learning_rate = options.optimizer.main_learning_rate = 1e-3
    assert pretrain(options).steps == 3
    first = RunFolder.from_options(options).phase_folder("pretrain") / "checkpoints" / "step-00000001"
    if elsewhere:
        options = replace(options, name="other", finetune=replace(options.finetune, start_from="tiny"))
    started: list[Any] = []
    monkeypatch.setattr(stages, "restore_learning", lambda training_state, checkpoint: started.append(checkpoint))
    with caplog.at_level("INFO"):
        finetune(options)
    assert started[0].path == first and started[0].training  # moments of the optimizer, too
    said = "the best checkpoint of phase one by validation, which ended at step-00000003"
    assert f"finetune starts from {first}: {said}" in caplog.text


def test_phase_two_starts_from_the_newest_checkpoint_where_none_was_validated(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    options.validation.times, options.checkpoint.every_steps = 0, 2
    pretrain(options)
    with caplog.at_level("INFO"):
        finetune(options)
    assert "step-00000006: the newest checkpoint of phase one" in caplog.text


@pytest.mark.parametrize(
    ("limit", "expected"), [("steps", "pretrain.steps=100 or more"), ("epochs", "pretrain.epochs=")]
)
def test_a_phase_of_too_few_steps_to_learn_anything_says_so(
    limit: str, expected: str, options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    if limit == "epochs":
        options.pretrain.steps, options.pretrain.epochs = None, 0.01
    trained = pretrain(options)
    assert 0 < trained.steps < 100
    words = f"pretrain has taken {trained.steps} steps"
    assert trained.remark.startswith(words) and expected in trained.remark
    assert [each.getMessage() for each in caplog.records].count(trained.remark) == 1
    assert "too few to learn anything" in format_outcome(trained)
    assert words in write_report(options).read_text()
    caplog.clear()
    assert pretrain(options).remark == trained.remark and trained.remark not in caplog.text  # it is finished


@pytest.mark.parametrize(("share", "few"), [(0.5, False), (0.0, True)])
def test_a_short_phase_two_has_learned_what_phase_one_did(share: float, few: bool, options: Options) -> None:
    options.pretrain.decode_fraction, options.optimizer.warmup_steps = share, 1
    pretrain(options)
    trained = finetune(options)
    assert 1 < trained.steps < 100 and bool(trained.remark) is few
    assert ("too few to learn anything" in format_outcome(trained)) is few


def test_what_a_phase_lacks_is_told_in_seconds_of_its_own_steps(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.pretrain.steps, options.pretrain.seconds = None, 0.05
    trained = pretrain(options)
    wanted = float(trained.remark.split("pretrain.seconds=")[1].split()[0])
    assert wanted == pytest.approx(100 * trained.seconds / trained.steps, abs=1)
    monkeypatch.setattr(checkpoints, "FEWEST_STEPS", fewest := trained.steps + 2)
    options.pretrain.steps, options.pretrain.seconds, options.optimizer.warmup_steps = fewest, None, 1
    assert pretrain(options).remark == ""
    options.optimizer.warmup_steps, options.pretrain.steps = 200, fewest + 1
    assert "the warm-up of the learning rate takes 200. Use pretrain.steps=200" in pretrain(options).remark


@pytest.mark.slow
def test_phase_two_says_what_of_phase_one_it_does_not_know(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    pretrain(options)
    finetune(options)
    options.finetune.steps = 6
    for path in (Path(options.runs_dir) / options.name / "pretrain").rglob("*"):
        os.utime(path)  # as a copy of the run may have it
    finetune(options)
    assert "trained further" not in caplog.text
    options.pretrain.steps, options.finetune.steps = 8, 8
    pretrain(options)
    finetune(options)
    assert "phase one has another checkpoint now, " in caplog.text
    assert "step-00000008. finetune continues" in caplog.text
