"""Training: exact resumption, phase two from phase one, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.loader import Loader
from pipeline.checkpoints import Checkpoints, DamagedCheckpoint
from pipeline.config import load
from pipeline.metrics import read
from pipeline.options import Options
from pipeline.runs import RunFolder
from pipeline.trainer import Interrupted, NotFinite
from pipeline.training import finetune, pretrain, train


def weights(options: Options, phase: str) -> dict[str, torch.Tensor]:
    return load_file(newest(options, phase) / "model.safetensors")


def newest(options: Options, phase: str) -> Path:
    folder = Path(options.runs_dir) / options.name / phase / "checkpoints"
    return folder / (folder / "latest").read_text().strip()


def stripped(options: Options, phase: str) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    path = Path(options.runs_dir) / options.name / phase / "metrics.jsonl"
    timed = ("seconds", "steps_per_second", "chunks_per_second")
    return [{k: v for k, v in record.items() if k not in timed} for record in read(path)]


MINING = ["iem.bank=200", "iem.bank_draws=20", "iem.mined=3", "iem.mined_refresh=5", "iem.similarity=cosine"]


@pytest.mark.parametrize(
    ("decoder", "more"), [("lstm", []), ("transformer", ["batch.pieces=2"]), ("lstm", [*MINING, "iem.counts=corpus"])]
)
def test_an_interrupted_run_ends_in_the_same_bits(
    tiny: list[str], decoder: str, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.sharding import shard

    batch = Loader.batch  # some windows as of a damaged shard: they are counted over all of a run
    monkeypatch.setattr(Loader, "batch", lambda self, position: replace(batch(self, position), skipped=1))
    chosen = [
        *tiny,
        "log_steps=4",
        f"model.decoder.kind={decoder}",
        "pretrain.steps=18",
        "finetune.steps=10",
        "iem.extra_batches=2",
        *more,
    ]
    whole, cut = load("quickstart", [*chosen, "name=whole"]), load("quickstart", [*chosen, "name=cut"])
    shard(whole)
    for stage in (pretrain, finetune):
        stage(whole)
        for stop_at in (2, 4):
            calls = iter(range(stop_at))
            with pytest.raises(Interrupted, match="saved"):
                stage(cut, lambda calls=calls: next(calls, None) is None)
        stage(cut)
        phase = stage.__name__
        ours, theirs = weights(cut, phase), weights(whole, phase)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert stripped(cut, phase) == stripped(whole, phase) != []
        assert any(line.get("skipped_windows") == 8 for line in stripped(whole, phase))


def test_more_steps_extend_a_finished_run(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    assert pretrain(options).steps == 6
    options.pretrain.steps, options.optimizer.learning_rate = 9, 0.002
    with caplog.at_level("INFO"):
        again = pretrain(options)
    assert (again.resumed_from, again.steps) == (6, 9)
    for line in ("pretrain.steps=9, was 6", "optimizer.learning_rate=0.002, was 0.004"):
        assert f"changed since then: {line}" in caplog.text
    assert pretrain(options).resumed_from == 9


def test_finetune_takes_over_phase_one_of_another_run(options: Options) -> None:
    pretrain(options)
    other = replace(options, name="other")
    other.finetune = replace(options.finetune, start_from="tiny", steps=1, rate_from=1e-9, rate_to=0.0)
    finetune(other)
    before, after = weights(options, "pretrain"), weights(other, "finetune")
    assert all(torch.allclose(before[name], after[name], atol=1e-4) for name in before)


def test_phase_two_lowers_the_exact_bits(options: Options) -> None:
    options.pretrain.steps, options.finetune.steps, options.optimizer.learning_rate = 20, 60, 0.01
    pretrain(options)
    finetune(options)
    bits = [r["validation/bits_per_token"] for r in stripped(options, "finetune") if "validation/bits_per_token" in r]
    assert bits[-1] < bits[0] < 9


def test_phase_one_as_in_the_paper_trains_no_decoder(options: Options) -> None:
    options.pretrain.decode_fraction, options.iem.correction, options.iem.extra_batches = 0.0, "none", 3
    from pipeline.sharding import open_shards
    from pipeline.training import build_model

    fresh = build_model(options, open_shards(options)).state_dict()
    pretrain(options)
    trained = weights(options, "pretrain")
    same = {name for name in fresh if torch.equal(fresh[name], trained[name])}
    assert {name for name in fresh if name.startswith("decoder.")} <= same
    assert not any(name.startswith("main.blocks") for name in same)


def test_limits_in_seconds_and_epochs(options: Options) -> None:
    options.train.steps, options.train.seconds = None, 0.2
    assert 0.2 <= train(options).seconds < 5
    options.name, options.train.seconds, options.train.epochs = "epochs", None, 0.5
    assert 0.5 <= train(options).epochs < 0.6


def test_resume_never_and_required(options: Options) -> None:
    options.resume = "required"
    with pytest.raises(ValueError, match="has no checkpoint"):
        train(options)
    assert not (Path(options.runs_dir) / options.name).exists()
    options.resume = "auto"
    train(options)
    options.resume = "never"
    with pytest.raises(ValueError, match="has a checkpoint"):
        train(options)


def test_a_checkpoint_of_another_model_is_refused(options: Options) -> None:
    train(options)
    options.model.main.layers = 2
    with pytest.raises(ValueError, match=r"model\.main\.layers=1, this run has model\.main\.layers=2"):
        train(options)


def test_phase_two_without_phase_one(options: Options) -> None:
    with pytest.raises(FileNotFoundError, match="no phase one to start from"):
        finetune(options)


def test_without_shards(options: Options) -> None:
    options.chunker.k = 9
    with pytest.raises(FileNotFoundError, match="run `haed shard`"):
        train(options)
    assert not (Path(options.runs_dir) / options.name).exists()


def test_a_damaged_newest_checkpoint_falls_back(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    options.checkpoint.every_steps = 2
    train(options)
    path = newest(options, "train") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    checkpoints = Checkpoints(path.parent.parent)
    found = checkpoints.newest()
    assert found is not None and found.state["step"] == 2 and "trying the one before" in caplog.text
    for other in path.parent.parent.glob("step-*/model.safetensors"):
        other.write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="is whole"):
        checkpoints.newest()


def test_old_checkpoints_go_and_the_best_stays(options: Options) -> None:
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 12, 1, 1
    train(options)
    folder = newest(options, "train").parent
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000011", "step-00000012"]
    assert (folder / "best").read_text().strip() == "step-00000012"


def test_two_processes_cannot_train_one_run(options: Options) -> None:
    train(options)
    with RunFolder.find(Path(options.runs_dir) / options.name).lock():
        options.train.steps = 8
        with pytest.raises(BlockingIOError, match="in use by process"):
            train(options)


def test_a_loss_that_is_not_finite_stops_the_run(options: Options) -> None:
    options.optimizer.learning_rate, options.optimizer.main_learning_rate = 1e30, 1e30
    with pytest.raises(
        NotFinite, match=r"not finite at step 2: .*loss.*decoder \(learning rate 8.6e\+29\).* lower optimizer"
    ):
        train(options)


@pytest.mark.parametrize(("log_every", "wrong"), [(100, "gradient_norm"), (1, "gradient_norm")])
def test_no_checkpoint_is_written_of_what_is_not_finite(
    options: Options, monkeypatch: pytest.MonkeyPatch, log_every: int, wrong: str
) -> None:
    from pipeline import trainer

    monkeypatch.setattr(trainer, "EARLY_RECORDS", ())
    options.log_steps = log_every
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 6, 1, 0
    update = trainer.Trainer.update

    def spoiled(self: trainer.Trainer) -> torch.Tensor:
        if self.position.step == 3:
            self.optimizer.param_groups[0]["params"][0].grad[:] = torch.nan
        return update(self)

    monkeypatch.setattr(trainer.Trainer, "update", spoiled)
    with pytest.raises(NotFinite, match=rf"at step 4: .*{wrong}"):
        train(options)
    assert newest(options, "train").name == "step-00000003"
    monkeypatch.setattr(trainer.Trainer, "update", update)
    assert train(options).resumed_from == 3


def test_configuration_and_environment_are_written(options: Options) -> None:
    train(options)
    run = RunFolder.find(options.name, options.runs_dir)
    assert run.options() == options
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__ and environment["seed"] == 0
