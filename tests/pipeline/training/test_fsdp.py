"""A model sharded over two processes (gloo): it trains as a whole one, and its checkpoints are whole."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from data.chunkers import make_chunker
from pipeline.config import ConfigError, Options, load_options
from pipeline.run.system import estimate_memory
from pipeline.signals import TrainingInterrupted
from pipeline.training import stages
from tests.pipeline.training.test_stages import assert_same, stripped, weights

BLOCKS = ["model.decoder.kind=transformer", "model.main.layers=2", "model.main.dropout=0.1", "optimizer.ema=0.9"]


@pytest.fixture
def whole(tiny: list[str], sharded: Path, tmp_path: Path) -> Options:
    shutil.copytree(sharded, tmp_path / "shards")
    return load_options("quickstart", [*tiny, *BLOCKS, "precision=fp32", "launcher.processes=2", "name=whole"])


@pytest.mark.nightly
def test_a_sharded_model_trains_as_a_whole_one(whole: Options) -> None:
    """In both phases, with validations of the averaged weights. Rounding differs, and Adam makes some of it visible."""
    sharded = replace(whole, name="sharded", launcher=replace(whole.launcher, shard=True))
    for phase in ("pretrain", "finetune"):
        for options in (whole, sharded):
            stages.run_phase(phase, options)
        one, other = stripped(whole, phase), stripped(sharded, phase)
        assert len(one) == len(other) > 3 and any("validation/bits_per_token" in record for record in one)
        for here, there in zip(one, other, strict=True):
            assert here == pytest.approx(there, rel=1e-4)
        here, there = weights(whole, phase), weights(sharded, phase)
        assert {name: x.shape for name, x in here.items()} == {name: x.shape for name, x in there.items()}
        assert all((here[name] - x).abs().max() < 2e-3 for name, x in there.items())


@pytest.mark.nightly
def test_a_sharded_model_resumes_to_the_bit_and_on_in_one_process(whole: Options) -> None:
    once = replace(whole, launcher=replace(whole.launcher, shard=True))
    once.pretrain.steps, once.checkpoint.every_steps = 20, 2
    stages.pretrain(once)
    again = replace(once, name="again")
    folder = Path(again.runs_dir) / "again" / "pretrain" / "checkpoints"
    with pytest.raises(TrainingInterrupted, match="^saved step [0-9]+ of pretrain$"):
        stages.pretrain(again, lambda: any(folder.glob("step-*")))
    assert 2 <= stages.pretrain(again).resumed_from < 20
    assert_same(again, once, "pretrain")
    alone = replace(again, launcher=replace(whole.launcher, processes=1))
    alone.pretrain = replace(alone.pretrain, steps=22)
    assert stages.pretrain(alone).resumed_from == 20


def test_weights_that_begin_to_be_trained_cannot_be_sharded(whole: Options) -> None:
    whole.launcher.shard, whole.finetune.trains = True, "decoder_first"
    said = "launcher.shard=true: .* Use finetune.trains=everything or launcher.shard=false"
    with pytest.raises(ConfigError, match=said):
        stages.finetune(whole)


def test_each_device_needs_memory_for_its_share(whole: Options) -> None:
    chunker = make_chunker(whole.chunker)
    alone, *shared = (estimate_memory(whole, chunker, whole.pretrain, shards)["model.*"] for shards in (1, 2, 1 << 40))
    assert alone - shared[0] == pytest.approx((alone - shared[1]) / 2, rel=0.01) and 0 < shared[1] < shared[0]


def test_sharding_in_one_process_is_said(whole: Options, caplog: pytest.LogCaptureFixture) -> None:
    whole.launcher.shard, whole.launcher.processes, whole.pretrain.steps = True, 1, 1
    stages.pretrain(whole)
    assert "launcher.shard=true has no effect in one process" in caplog.text and "torchrun" not in caplog.text
