"""A model of several scales, trained for a few steps, to be measured."""

from pathlib import Path

import pytest

from pipeline.config import load_options
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import TINY, of_kind


@pytest.fixture(scope="session")
def scaled(text: Path, sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Top-down, scales of 2 bytes and 1, trained on `text`."""
    runs = tmp_path_factory.mktemp("scaled")
    where = ["source.kind=text", f"source.path={text}", f"runs_dir={runs}", f"shards_dir={sharded}", "name=scaled"]
    options = load_options("top-down", [*of_kind("top_down", [*TINY, *where]), "precision=fp32"])
    train(options)
    return Run(RunFolder.from_options(options), options)
