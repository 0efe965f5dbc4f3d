import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.cli import main
from pipeline.options import Options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import compute
from pipeline.run.shards import open_shards
from pipeline.train import stages
from pipeline.train.profile import Clock, profile, table

PARTS = ["data", "candidates", "encoder", "main", "decoder", "loss", "optimizer"]


def test_a_profile_names_all_parts_and_writes_nothing(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    options.iem.extra_batches = 1
    stages.pretrain(options)
    found = profile(options, "pretrain", 2)
    assert list(found.milliseconds) == PARTS and all(spent > 0 for spent in found.milliseconds.values())
    assert 0 < found.utilisation < 1 and "model GFLOP a step" in table(found)
    assert profile(options, "finetune", 1).milliseconds["loss"] == 0
    run = f"{options.runs_dir}/{options.name}"
    assert main(["profile", run, "--phase", "train", "--steps", "1"]) == 0 and "optimizer" in capsys.readouterr().out
    assert not (stages.RunFolder.find(run).path / "train").exists()


def test_the_clock_changes_nothing_and_misses_nothing(options: Options) -> None:
    """Weights after steps with it are those of steps without it, and its parts add up to what the steps take."""
    options.precision = "fp32"
    found = []
    for timed in (False, True):
        machine = compute(options)
        checkpoints = Checkpoints(Path("unused"))
        trainer = stages.build_trainer(
            options.pretrain, options, open_shards(options), checkpoints, machine, lambda: False
        )
        clock, batches = Clock(machine.device), trainer.batches()
        began = clock.since
        if timed:
            trainer.at, trainer.objective.mark = clock.at, clock.mark
        for _ in range(2):
            trainer.step(next(batches))
        if timed:
            assert sum(clock.seconds.values()) == pytest.approx(clock.since - began)
        found.append(dict(trainer.objective.system.named_parameters()))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_backward_pass_is_counted_where_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part's forward and backward pass by a clock that only these advance."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, forth: float, back: float) -> torch.Tensor:
            now[0] += forth
            ctx.back = back
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            now[0] += ctx.back
            return grad, None, None

    clock = Clock(torch.device("cpu"))
    x = clock.mark("encoder", Slow.apply(torch.ones((), requires_grad=True), 1.0, 10.0))
    y = clock.mark("main", Slow.apply(x, 2.0, 20.0))
    loss = clock.mark("loss", Slow.apply(y, 3.0, 30.0))
    exact = clock.mark("decoder", Slow.apply(y, 4.0, 40.0))
    (loss + exact).backward()
    clock.at("backward")
    assert clock.seconds == {"encoder": 11.0, "main": 22.0, "loss": 33.0, "decoder": 44.0}


def test_compilation_that_fails_is_said_and_training_goes_on(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> object:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    options.compile = True
    with caplog.at_level(logging.WARNING):
        assert stages.pretrain(options).steps == options.pretrain.steps
    assert "torch.compile failed (no compiler here)" in caplog.text
