import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from haed.base import ChunkingSpec
from haed.registry import KINDS
from pipeline.cli import main
from pipeline.config import Options, load_options, training_phases
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards
from pipeline.run.system import SavedActivations
from pipeline.training import stages
from pipeline.training.profile import PartTimer, format_profile, profile_phase
from tests.conftest import TOKEN_KINDS, of_kind
from tests.pipeline.conftest import CommandLine

PARTS = ["data", "candidates", "encoder", "main", "decoder", "loss", "optimizer"]


@pytest.mark.slow
def test_a_profile_names_all_parts_and_writes_nothing(options: Options, haed: CommandLine) -> None:
    options.iem.extra_batches = 1
    stages.pretrain(options)
    found = profile_phase(options, "pretrain", 2)
    assert list(found.milliseconds) == PARTS and all(spent > 0 for spent in found.milliseconds.values())
    assert 0 < found.utilisation < 1 and "model GFLOP per step" in format_profile(found)
    options.finetune.iem_weight = 0
    assert profile_phase(options, "finetune", 1).milliseconds["loss"] == 0
    run = f"{options.runs_dir}/{options.name}"
    assert "optimizer" in haed.output("profile", run, "--phase", "train", "--steps", "1")
    assert not (stages.RunFolder.find(run).path / "train").exists()


@pytest.mark.parametrize("kind", TOKEN_KINDS)
def test_a_profile_of_a_model_of_tokens_is_by_level(
    kind: str, options: Options, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.training.profile._SIDE", {"cpu": 64})
    made = load_options("quickstart", [*of_kind(kind, tiny), "name=tokens"])
    RunFolder.create(made).write_corpus_record(open_shards(made))
    found = profile_phase(made, "train", 1)
    system = KINDS[kind].system(made.model, made.iem, ChunkingSpec(12, 256, False, 16))
    levels, cost = list(system.submodules), getattr(system, "linear_cost", None)
    if kind == "retina":  # whose layers have all scales
        levels.insert(2, "scale_4")
    assert list(found.milliseconds) == ["data", "batch", *levels, "loss", "optimizer"] and len(levels) > 2
    assert all(found.milliseconds[level] > 0 and found.kept[level] > 0 for level in levels)
    assert found.linear_cost == cost and (cost is None) == (kind != "hourglass")
    assert cost is None or f"{cost:.2f} layers of the finest scale" in format_profile(found)
    assert f"{sum(found.kept.values()) / 1e6:,.1f} MB kept for the backward pass" in format_profile(found)


@pytest.mark.nightly  # the compiler's start
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler meets PyTorch's own
def test_what_is_compiled_together_is_one_part(
    options: Options, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.training.profile._SIDE", {"cpu": 64})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    words = [*of_kind("hourglass", tiny), "name=tokens", "compile=true", "chunker.kind=fixed"]
    assert main(["shard", "--config", "quickstart", *words]) == 0
    made = load_options("quickstart", words)
    RunFolder.create(made).write_corpus_record(open_shards(made))
    found = profile_phase(made, "train", 1)
    assert list(found.milliseconds) == ["data", "batch", "system", "loss", "optimizer"]
    assert found.milliseconds["system"] > 0 and found.kept["system"] > 0 and found.flops > 0


def test_what_is_kept_is_counted_once_and_parameters_are_not() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)

    system, x = Two(), torch.randn(4, 8)
    with (kept := SavedActivations(system)):  # type: ignore[arg-type]
        hidden = kept.mark_part("first", system.first(x).relu())
        kept.mark_part("second", system.second(hidden).sum() + hidden[:, :2].square().sum())
    assert kept.bytes == {"first": 4 * 4 * (8 + 16), "second": 0}


@pytest.mark.parametrize("kind", ["haed", *TOKEN_KINDS])
def test_the_clock_changes_nothing_and_misses_nothing(kind: str, options: Options, tiny: list[str]) -> None:
    """Weights after steps with it are those of steps without it, and its parts add up to what the steps take."""
    options = load_options("quickstart", [*of_kind(kind, tiny), "name=other"])
    phase = getattr(options, training_phases(kind)[0])
    options.precision = "fp32"
    found = []
    for timed in (False, True):
        machine = setup_compute(options)
        checkpoints = Checkpoints(Path("unused"))
        trainer = stages.build_trainer(phase, options, open_shards(options), checkpoints, machine, lambda: False)
        clock, batches = PartTimer(machine.device), trainer.prepare_batches()
        began, system = clock.since, trainer.objective.system
        with SavedActivations(system) if timed else nullcontext():
            if timed:
                trainer.end_part, system.mark = clock.end_part, clock.mark_part
            for _ in range(2):
                trainer.step(next(batches))
        if timed:
            assert set(system.submodules) <= set(clock.seconds)
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

    clock = PartTimer(torch.device("cpu"))
    x = clock.mark_part("encoder", Slow.apply(torch.ones((), requires_grad=True), 1.0, 10.0))
    y = clock.mark_part("main", Slow.apply(x, 2.0, 20.0))
    loss = clock.mark_part("loss", Slow.apply(y, 3.0, 30.0))
    exact = clock.mark_part("decoder", Slow.apply(y, 4.0, 40.0))
    (loss + exact).backward()
    clock.end_part("backward")
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
