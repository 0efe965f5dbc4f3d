"""Fixtures: a small real text, and a model small enough to train in seconds."""

import random
import sysconfig
from pathlib import Path

import pytest

from pipeline.options import Options

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"

TINY = [
    "model.encoder.token_width=4",
    "model.encoder.hidden=16",
    "model.encoder.width=16",
    "model.main.layers=1",
    "model.main.width=16",
    "model.main.heads=2",
    "model.main.head_width=8",
    "model.main.ffn=32",
    "model.decoder.width=16",
    "model.decoder.token_width=8",
    "model.decoder.ffn=32",
    "model.decoder.heads=2",
    "batch.context=16",
    "batch.sequences=2",
    "optimizer.warmup_steps=2",
    "validation.windows=4",
    "validation.times=2",
    "pretrain.seconds=null",
    "pretrain.steps=6",
    "finetune.seconds=null",
    "finetune.steps=4",
    "train.seconds=null",
    "train.steps=4",
    "threads=1",
    "sample.chunks=4",
]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some files of the standard library, named by split."""
    folder = tmp_path_factory.mktemp("text")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for split, name in (("train", "textwrap.py"), ("train2", "bisect.py"), ("valid", "heapq.py"), ("test", "queue.py")):
        (folder / f"{split.rstrip('2')}-{name}").write_bytes((stdlib / name).read_bytes())
    return folder


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[str]:
    """Overrides that make any preset tiny, reading `text` and writing under tmp_path."""
    return [
        *TINY,
        "source.kind=text",
        f"source.path={text}",
        f"runs_dir={tmp_path / 'runs'}",
        f"shards_dir={tmp_path / 'shards'}",
    ]


@pytest.fixture
def options(tiny: list[str]) -> Options:
    """The configuration of `tiny`, sharded."""
    from pipeline.config import load
    from pipeline.sharding import shard

    made = load("quickstart", [*tiny, "name=tiny"])
    shard(made)
    return made


@pytest.fixture
def chance() -> random.Random:
    return random.Random(0)


@pytest.fixture
def pictures(tiny: list[str], tmp_path: Path) -> Options:
    """A model of 4×4 pictures, a row a chunk, each row lighter than the one above."""
    import numpy as np

    from pipeline.config import load
    from pipeline.sharding import shard
    from pipeline.training import train

    raster = np.empty((60, 3, 4, 4), np.uint8)
    raster[:] = np.array([0, 60, 120, 180])[:, None]
    for split in ("train", "val"):
        np.savez(tmp_path / f"{split}_data.npz", data=raster.reshape(60, -1), labels=np.zeros(60, np.int64))
    chosen = ["source.kind=images", f"source.path={tmp_path}", "source.pattern=*.npz", "chunker.kind=pixels"]
    made = load(
        "quickstart", [*tiny, *chosen, "chunker.k=12", "name=pictures", "train.steps=120", "validation.times=0"]
    )
    made.optimizer.learning_rate = made.optimizer.main_learning_rate = 0.02
    shard(made)
    train(made)
    return made
