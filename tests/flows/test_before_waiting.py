"""A training that would be refused says so before it waits for a device."""

from pathlib import Path

import pytest

from pipeline.config import load_options
from pipeline.run.sharding import shard_source
from pipeline.training.stages import check_run, train


def test_what_would_be_refused_is_said_before_anything_is_waited_for(tiny: list[str], tmp_path: Path) -> None:
    options = load_options("quickstart", [*tiny, "train.steps=1"])
    with pytest.raises(FileNotFoundError, match="Run `haed shard`"):
        check_run("train", options)
    shard_source(options)
    check_run("train", options)
    train(options)
    check_run("train", options)
    with pytest.raises(ValueError, match=r"model\.main\.layers"):
        check_run("train", load_options("quickstart", [*tiny, "model.main.layers=2"]))
    with pytest.raises(ValueError, match="resume=never"):
        check_run("train", load_options("quickstart", [*tiny, "resume=never"]))
    (tmp_path / "other.txt").write_text("another text, of which nothing was trained. " * 200)
    other = load_options("quickstart", [*tiny, f"source.path={tmp_path / 'other.txt'}"])
    with pytest.raises(ValueError, match="was trained on another corpus: source.kind=text"):
        check_run("train", other)
    with pytest.raises(ValueError, match="was trained on another corpus: source.kind=text"):
        train(other)  # nor is it told to shard first what it could not go on with
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(str(options.source.path)).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    check_run("train", load_options("quickstart", [*tiny, f"source.path={copy}"]))  # the same contents elsewhere
