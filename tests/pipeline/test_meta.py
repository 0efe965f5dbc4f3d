"""Steps without a GPU that would fail on one: weights and batch lie on the meta device, which waits for nothing.

Whatever is left on the CPU, and whatever asks the device for a number, raises there.
"""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from pipeline.config import Options, load_options
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import Compute, resolve_device
from pipeline.run.sharding import open_shards
from pipeline.training.stages import build_trainer, finetune, pretrain
from pipeline.training.trainer import Trainer, restore_learning
from tests.conftest import TOKEN_KINDS, of_kind

META = Compute(torch.device("meta"), None)


def on_meta(options: Options, phase: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer of which all but the optimizer's own update runs there; its fused kernel knows no such device."""
    checkpoints = Checkpoints(folder / "checkpoints")
    limits = getattr(options, phase)
    trainer = build_trainer(limits, options, open_shards(options), checkpoints, META, lambda: False)
    monkeypatch.setattr(trainer.learner.optimizer, "step", lambda: None)
    return trainer


@pytest.mark.parametrize(
    ("phase", "decoder", "pieces"),
    [
        *product(["pretrain", "finetune", "train"], ["kind=lstm", "kind=transformer", "previous=true"], [1]),
        *(
            pytest.param(phase, decoder, 2, marks=pytest.mark.slow)
            for phase, decoder in (
                ("pretrain", "kind=lstm"),
                ("finetune", "previous=true"),
                ("train", "kind=transformer"),
            )
        ),
    ],
)
def test_a_step_waits_for_no_device_and_leaves_nothing_behind(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoder: str, phase: str, pieces: int
) -> None:
    options.batch.pieces = pieces
    options.model.decoder.previous = decoder == "previous=true"
    options.model.decoder.kind = "lstm" if decoder == "kind=lstm" else "transformer"
    options.iem.correction, options.iem.head = ("inclusion", "linear") if pieces == 1 else ("none", "none")
    if pieces == 2:  # the paper's loss
        options.iem.similarity, options.iem.scale, options.iem.bias, options.iem.duplicates = "dot", "none", False, True
        options.model.mixture.known = 0
    trainer = on_meta(options, phase, tmp_path, monkeypatch)
    batches = trainer.prepare_batches()
    for _ in range(2):
        trainer.step(next(batches))
    assert all(parameter.is_meta for parameter in trainer.objective.parameters())
    assert ("gate" in trainer.state.sums) == (pieces == 1 and phase != "train")  # the preset's mixture


@pytest.mark.parametrize(
    "parts",
    [
        ["encoder.kind=lstm", "main.kind=lstm"],
        ["encoder.kind=transformer", "encoder.heads=2", "encoder.rows=7", "decoder.grams.rows=9"],
        ["encoder.kind=linear", "main.positions=learned", "decoder.kind=transformer", "decoder.context=each"],
    ],
)
@pytest.mark.parametrize("pieces", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nor_does_one_of_other_parts(
    tiny: list[str], sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[str], pieces: int
) -> None:
    shutil.copytree(sharded, tmp_path / "shards")
    model = [f"model.{part}" for part in parts]
    options = load_options("quickstart", [*tiny, *model, f"batch.pieces={pieces}", "pretrain.decode_fraction=0.5"])
    trainer = on_meta(options, "pretrain", tmp_path, monkeypatch)
    batches = trainer.prepare_batches()
    for _ in range(2):
        trainer.step(next(batches))
    assert all(parameter.is_meta for parameter in trainer.objective.parameters())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, []) for kind in TOKEN_KINDS),
        ("hourglass", ["model.hourglass.attention=[lsh,relative]"]),
        ("hourglass", ["model.token.attention=local", "model.token.positions=learned"]),
    ],
)
def test_nor_does_one_of_tokens(
    options: Options, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str]
) -> None:
    chosen = ["name=tokens", "model.token.dropout=0.1", "model.token.window=8", *words]
    trainer = on_meta(load_options("quickstart", [*of_kind(kind, tiny), *chosen]), "train", tmp_path, monkeypatch)
    trainer.step(next(trainer.prepare_batches()))
    assert all(tensor.is_meta for tensor in trainer.objective.state_dict().values())


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_resumed_optimizer_lies_where_the_weights_are(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of steps, too: a fused update on a GPU takes it from there."""
    pretrain(options)
    finetune(options)
    for phase in ("finetune", "pretrain"):
        saved = Checkpoints(Path(options.runs_dir) / options.name / phase / "checkpoints").load_newest()
        assert saved is not None
        trainer = on_meta(options, "finetune", tmp_path, monkeypatch)
        restore_learning(trainer.learner, saved)
        moments = [(key, x) for state in trainer.learner.optimizer.state.values() for key, x in state.items()]
        assert {key for key, _ in moments} == {"step", "exp_avg", "exp_avg_sq", "squares"}
        assert all(x.is_meta and x.dtype == torch.float32 for _, x in moments)


def test_a_gpu_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device` takes no other name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert resolve_device("auto") == torch.device("cuda:3") and resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cpu") == torch.device("cpu")
