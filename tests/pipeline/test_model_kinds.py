"""Every kind of model through the trainer and the stages: resumed to the bit, in bfloat16, within memory, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from haed.options import SYSTEMS
from pipeline.config import Options, load_options
from pipeline.config.messages import explain_inapplicable_option
from pipeline.run.checkpoints import Checkpoints, identity_differences, make_identity
from pipeline.run.device import Compute, setup_compute
from pipeline.run.sharding import open_shards
from pipeline.run.system import SavedActivations
from pipeline.training.stages import build_trainer, train
from pipeline.training.trainer import Trainer
from tests.conftest import TOKEN_KINDS, mostly_nightly, of_kind
from tests.pipeline.conftest import CommandLine
from tests.pipeline.training.test_stages import assert_same, interrupt

first_fast = pytest.mark.parametrize("kind", mostly_nightly(TOKEN_KINDS, TOKEN_KINDS[0]))


@pytest.fixture
def made(kind: str, tiny: list[str], sharded: Path, tmp_path: Path) -> Options:
    shutil.copytree(sharded, tmp_path / "shards")
    return load_options("quickstart", [*of_kind(kind, tiny), "name=whole"])


def trainer_of(options: Options, machine: Compute) -> Trainer:
    unused = Checkpoints(Path("unused"))
    return build_trainer(options.train, options, open_shards(options), unused, machine, lambda: False)


@first_fast
def test_an_interrupted_run_ends_in_the_same_bits(kind: str, made: Options) -> None:
    """With dropout, of which nothing is saved."""
    made.model.token.dropout, made.log_steps, made.validation.times = 0.2, 2, 0
    train(made)
    cut = replace(made, name="cut")
    interrupt(train, cut, 3)
    assert train(cut).resumed_from == 3
    assert_same(cut, made, "train")


@pytest.mark.parametrize("kind", ["hourglass", "haed"])
def test_dropout_is_of_the_step_and_the_rank(made: Options) -> None:
    """Alike in two trainers, whatever was drawn before; another on another rank."""
    made.model.token.dropout = made.model.main.dropout = made.model.decoder.dropout = 0.5

    def loss(rank: int) -> float:
        trainer = trainer_of(made, setup_compute(made))
        batch = next(trainer.prepare_batches())
        trainer.ranks.rank = rank
        torch.rand(3)
        trainer.step(batch)
        return float(trainer.progress.sums["gradient_norm"])

    assert loss(0) == loss(0) != loss(1)


@first_fast
def test_training_in_bfloat16_is_nearly_as_in_float32(kind: str, made: Options) -> None:
    found = []
    for precision in ("fp32", "bf16"):
        made.precision = precision
        trainer = trainer_of(made, setup_compute(made))
        batches = trainer.prepare_batches()
        for _ in range(3):
            trainer.step(next(batches))
        found.append([float(trainer.progress.sums[name]) for name in ("loss", "gradient_norm")])
    assert found[1] != found[0] and found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize("kind", SYSTEMS)
def test_a_step_saves_what_was_counted_before_it_and_has_the_same_losses(kind: str, made: Options) -> None:
    found = []
    for counts in (True, False):
        trainer = trainer_of(made, setup_compute(made))
        batch = next(trainer.prepare_batches())
        counted = trainer.count_memory(batch)["batch.sequences × batch.context"] if counts else 0
        with (kept := SavedActivations(trainer.objective.system)):
            trainer.step(batch)
        assert counted in (0, kept.total_bytes)
        found.append([float(trainer.progress.sums[name]) for name in ("loss", "gradient_norm")])
    assert found[0] == found[1]


@pytest.mark.slow
def test_every_stage_of_a_model_of_tokens(
    tiny: list[str], sharded: Path, tmp_path: Path, haed: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands: what it has not is refused in a line that says what it has, and leaves nothing behind."""
    monkeypatch.setattr("pipeline.training.profile._SIDE", {"cpu": 64})
    shutil.copytree(sharded, tmp_path / "shards")
    chosen, run = [*of_kind("top_down", tiny), "evaluate.baselines=false"], str(tmp_path / "runs" / "tokens")

    asked = ["--config", "quickstart", *chosen, "name=tokens"]
    three_scales = "model.multiscale.layers=1@3 1@2 1@1"
    for words, refusal in (
        (["pretrain", *asked], "no phase one and no phase two. Train it end to end with `haed train`"),
        (["finetune", *asked], "no phase one and no phase two. Train it end to end with `haed train`"),
        (["train", *asked, "train.steps=null"], "train has no limit. Set train.seconds"),
        (["train", *asked, three_scales], "2 does not divide 3"),
    ):
        assert refusal in haed.error(*words, status=2)
    assert not Path(run).exists()
    assert "train: 4 steps" in haed.output("train", *asked)
    for words, refusal in (
        (["finetune", run], "end to end"),
        (["index", run], "does not embed single chunks"),
        (["index", run, "index.min_count=2"], "index.min_count belongs to model.kind=haed"),
        (["neighbours", run, "def "], "--space contexts"),
        (["next", run, "def "], "predicts tokens, not chunks"),
        (["profile", run, "--phase", "pretrain"], "no phase one"),
    ):
        assert refusal in haed.error(*words, status=2).splitlines()[-1]
    assert "bits/char" in haed.output("evaluate", run) and "def" in haed.output("sample", run, "--prompt", "def")
    profiled = haed.output("profile", run, "--steps", "1")
    assert "scale_2" in profiled and "candidates" not in profiled and "loss" not in profiled
    assert "tokens" in haed.output("compare", run)
    assert Path(haed.output("report", run).strip()).is_file()
    said = explain_inapplicable_option("model.main.width", "top_down")
    assert said.startswith("model.main.width belongs to model.kind=haed")


def test_the_identity_of_a_run_is_of_its_own_kind(tiny: list[str]) -> None:
    """A default of another kind may change."""
    options = load_options("quickstart", of_kind("top_down", tiny))
    mine = make_identity(options, "x")
    assert set(mine["model"]) == {"kind", "token", "multiscale"}
    other = make_identity(load_options("quickstart", of_kind("retina", tiny)), "x")
    assert identity_differences(mine, other) == ("model.kind=top_down", "model.kind=retina")


def test_with_another_kind_of_part_only_the_kind_is_said_to_differ(tiny: list[str]) -> None:
    mine = make_identity(load_options("quickstart", tiny), "x")
    words = [*tiny, "model.encoder.kind=lstm", "model.encoder.layers=3", "model.encoder.token_width=9"]
    other = make_identity(load_options("quickstart", words), "y")
    expected = "model.encoder.kind=mlp, corpus=x", "model.encoder.kind=lstm, corpus=y"
    assert identity_differences(mine, other) == expected
