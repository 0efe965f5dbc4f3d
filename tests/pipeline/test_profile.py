import logging

import pytest
import torch

from pipeline import training
from pipeline.cli import main
from pipeline.options import Options
from pipeline.profile import PARTS, profile, table


def test_a_profile_names_all_parts_and_writes_nothing(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    options.iem.extra_batches = 1
    training.pretrain(options)
    found = profile(options, "pretrain", 2)
    assert tuple(found.milliseconds) == PARTS and all(spent > 0 for spent in found.milliseconds.values())
    assert 0 < found.utilisation < 1 and "model GFLOP a step" in table(found)
    assert profile(options, "finetune", 1).milliseconds["loss"] == 0
    run = f"{options.runs_dir}/{options.name}"
    assert main(["profile", run, "--phase", "train", "--steps", "1"]) == 0 and "optimizer" in capsys.readouterr().out
    assert not (training.RunFolder.find(run).path / "train").exists()


def test_staged_steps_learn_as_ordinary_ones_do(options: Options) -> None:
    """The profile measures the same work: weights after two steps agree."""
    from pathlib import Path

    from pipeline.checkpoints import Checkpoints
    from pipeline.device import compute
    from pipeline.profile import _Clock, _staged
    from pipeline.sharding import open_shards

    options.precision = "fp32"
    machine, found = compute(options), []
    for staged in (False, True):
        trainer = training.build_trainer(
            options.pretrain, options, open_shards(options), Checkpoints(Path("unused")), machine, lambda: False
        )
        batches, clock = trainer.batches(), _Clock(machine.device)
        for _ in range(2):
            if staged:
                _staged(trainer, next(batches), machine, clock)
            else:
                trainer.step(next(batches))
        found.append(dict(trainer.objective.model.named_parameters()))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_compilation_that_fails_is_said_and_training_goes_on(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    options.compile = True
    with caplog.at_level(logging.WARNING):
        assert training.pretrain(options).steps == options.pretrain.steps
    assert "torch.compile failed (no compiler here)" in caplog.text
