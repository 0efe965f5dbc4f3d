"""A model of several scales, trained for a few steps, to be measured."""

from pathlib import Path

import pytest

from pipeline.config import load_options
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import TINY, of_kind


def train_tokens(preset: str, text: Path, sharded: Path, runs: Path, *words: str) -> Run:
    """A run of a tiny model of tokens, trained on `text`."""
    kind = load_options(preset).model.kind
    where = ["source.kind=text", f"source.path={text}", f"runs_dir={runs}", f"shards_dir={sharded}", "name=tokens"]
    options = load_options(preset, [*of_kind(kind, [*TINY, *where]), *words])
    train(options)
    return Run(RunFolder.from_options(options), options)


@pytest.fixture(scope="session")
def scaled(text: Path, sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Top-down, scales of 2 bytes and 1."""
    return train_tokens("top-down", text, sharded, tmp_path_factory.mktemp("scaled"), "precision=fp32")
