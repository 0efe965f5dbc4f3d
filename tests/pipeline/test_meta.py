"""Steps without a GPU that would fail on one: weights and batch lie on the meta device, which waits for nothing.

Whatever is left on the CPU, and whatever asks the device for a number, raises there.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from pipeline.config import PHASES, Options, load_options
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
    monkeypatch.setattr(trainer.training_state.optimizer, "step", lambda: None)
    return trainer


LSTM, TRANSFORMER = ["model.decoder.kind=lstm"], ["model.decoder.kind=transformer"]
PREVIOUS = [*TRANSFORMER, "model.decoder.previous=true"]
PAPERS_LOSS = [
    f"iem.{word}"
    for word in ("correction=none", "head=none", "scale=none", "bias=false", "duplicates=true", "similarity=dot")
]
IN_PIECES = ["batch.pieces=2", "model.mixture.known=0", *PAPERS_LOSS]
PARTS = [
    ["encoder.kind=lstm", "main.kind=lstm"],
    ["encoder.kind=transformer", "encoder.heads=2", "encoder.rows=7", "decoder.grams.rows=9"],
    ["encoder.kind=linear", "main.positions=learned", "decoder.kind=transformer", "decoder.context=each"],
]
OTHERS = [["pretrain.decode_fraction=0.5", *(f"model.{part}" for part in parts)] for parts in PARTS]
QUICK = [*zip(PHASES, [PREVIOUS, LSTM, TRANSFORMER], strict=True), ("pretrain", OTHERS[0])]
NIGHTLY = [each for each in product(PHASES, [LSTM, TRANSFORMER, PREVIOUS]) if each not in QUICK]
NIGHTLY += [*product(["pretrain"], OTHERS[1:])]
NIGHTLY += [(phase, [*words, *IN_PIECES]) for phase, words in zip(PHASES, [LSTM, PREVIOUS, TRANSFORMER], strict=True)]
NIGHTLY += [("pretrain", [*words, "batch.pieces=2"]) for words in OTHERS]


@pytest.mark.parametrize(
    ("phase", "words"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY)]
)
def test_a_step_waits_for_no_device_and_leaves_nothing_behind(
    options: Options, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, words: list[str]
) -> None:
    trainer = on_meta(load_options("quickstart", [*tiny, *words]), phase, tmp_path, monkeypatch)
    batches = trainer.prepare_batches()
    for _ in range(2):
        trainer.step(next(batches))
    assert all(parameter.is_meta for parameter in trainer.objective.parameters())
    has_mixture = "model.mixture.known=0" not in words and phase != "train"
    assert ("gate" in trainer.progress.sums) == has_mixture


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
        restore_learning(trainer.training_state, saved)
        moments = [(key, x) for state in trainer.training_state.optimizer.state.values() for key, x in state.items()]
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
