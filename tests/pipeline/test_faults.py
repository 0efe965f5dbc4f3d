"""What happens to training when the disk is full, read-only or failing, and when a step fails."""

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from haed.chunk.encoder import Encoder
from haed.iem.candidates import Candidates, CountMin, StepChunks
from haed.iem.objective import ChunkObjective
from pipeline.config import Options, dump_options, load_options
from pipeline.run import checkpoints
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.metrics import Metrics
from pipeline.training import trainer
from pipeline.training.stages import pretrain, train
from pipeline.training.trainer import Validation
from tests.conftest import TINY, mostly_nightly
from tests.pipeline.test_failures import limited, small_disk
from tests.pipeline.training.test_stages import assert_same, newest

PLACES = {"tensors": (safetensors.torch, "save_file"), "syncing": (os, "fsync"), "renaming": (os, "replace")}
PLACES |= {"folders": (checkpoints, "sync_folder"), "metrics": (os, "pwrite")}
QUICK = [("tensors", errno.ENOSPC), ("metrics", errno.ENOSPC)]  # one of each kind of file


@pytest.fixture
def often(options: Options, monkeypatch: pytest.MonkeyPatch) -> Options:
    return eight_steps(options, monkeypatch)


def eight_steps(options: Options, monkeypatch: pytest.MonkeyPatch) -> Options:
    """Eight steps, saved at each, with metrics at every other."""
    monkeypatch.setattr(trainer, "EARLY_RECORDS", ())
    options.log_steps = 2
    options.train.steps, options.checkpoint.every_steps, options.validation.times = 8, 1, 0
    return options


@pytest.fixture(scope="module")
def whole(sharded: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    """The same steps, undisturbed."""
    where = [f"runs_dir={tmp_path_factory.mktemp('whole')}", f"shards_dir={sharded}"]
    options = load_options("quickstart", [*TINY, "source.kind=text", f"source.path={text}", *where, "name=whole"])
    with pytest.MonkeyPatch.context() as patch:
        train(eight_steps(options, patch))
    return options


def break_disk(monkeypatch: pytest.MonkeyPatch, place: str, number: int, broken: Callable[[int], bool]) -> None:
    """Once training has begun, calls of a function for which `broken(how many before)` is true fail."""
    module, name = PLACES[place]
    function, calls = getattr(module, name), itertools.count()
    fit = trainer.Trainer.fit

    def call(*arguments: Any, **named: Any) -> Any:
        if broken(next(calls)):
            raise OSError(number, os.strerror(number))
        return function(*arguments, **named)

    def fit_then(self: trainer.Trainer, *arguments: Any) -> Any:
        monkeypatch.setattr(module, name, call)
        return fit(self, *arguments)

    monkeypatch.setattr(trainer.Trainer, "fit", fit_then)


@pytest.mark.parametrize(
    ("place", "number"),
    [
        pytest.param(*each, marks=[] if each in QUICK else pytest.mark.nightly)
        for each in [*((place, errno.ENOSPC) for place in PLACES), ("tensors", errno.EROFS), ("metrics", errno.EIO)]
    ],
)
def test_a_disk_that_fails(
    often: Options,
    whole: Options,
    place: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):  # for a while: training goes on, and says so
        break_disk(patch, place, number, lambda call: 1 <= call < 3)
        train(often)
    assert os.strerror(number) in caplog.text
    assert_same(often, whole, "train")
    lasting = replace(often, name="lasting")
    with monkeypatch.context() as patch:  # for good: the end cannot be saved, what was saved stands
        break_disk(patch, place, number, lambda call: call >= 2)
        with pytest.raises(OSError, match=os.strerror(number)):
            train(lasting)
    found = Checkpoints(Path(lasting.runs_dir) / "lasting" / "train" / "checkpoints").load_newest()
    assert found is None or found.state["step"] < 8
    assert not list(Path(lasting.runs_dir).glob("**/.step-*"))
    train(lasting)
    assert_same(lasting, whole, "train")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_disk_that_fails_for_the_last_checkpoint_alone(
    stopped: bool, often: Options, whole: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is well again when the metrics are closed."""
    often.checkpoint.every_steps = 99
    steps, sync = itertools.count(1), Metrics.sync_to_disk

    def once(metrics: Metrics) -> None:
        monkeypatch.setattr(Metrics, "sync_to_disk", sync)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Metrics, "sync_to_disk", once)
    said = f"step {3 if stopped else 8} has no checkpoint, because its files could not be written"
    with pytest.raises(OSError, match=said):
        train(often, (lambda: next(steps) == 3) if stopped else (lambda: False))
    assert Checkpoints(Path(often.runs_dir) / often.name / "train" / "checkpoints").load_newest() is None
    train(often)
    assert_same(often, whole, "train")


@pytest.mark.parametrize(
    ("scores", "lost", "best"), [([10.0, 8.0, 9.0, 9.5], 4, (6, 9.0, 1)), ([10.0, 11.0, 8.0, 12.0], 6, (2, 10.0, 2))]
)
def test_a_best_checkpoint_that_is_lost_is_no_longer_the_best(
    scores: list[float], lost: int, best: tuple[int, float, int], often: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation counts as if it had not been made."""
    often.validation.times, often.checkpoint.every_steps = 4, 1
    left, write = iter(scores), Checkpoints._write_checkpoint

    def broken(self: Checkpoints, step: int, tensors: Any, state: Any, best: bool) -> None:
        if step == lost:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, step, tensors, state, best)

    monkeypatch.setattr(Checkpoints, "_write_checkpoint", broken)
    monkeypatch.setattr(Validation, "score", lambda self, *_: {self.metric_name: next(left)})
    train(often)
    folder = Path(often.runs_dir) / often.name / "train" / "checkpoints"
    found = Checkpoints(folder).load_newest()
    assert found is not None
    assert (int((folder / "best").read_text().strip()[5:]), found.state["best"], found.state["stale"]) == best


def fail_after(patch: pytest.MonkeyPatch, step: int, owner: type, name: str, error: Exception) -> None:
    """Once a step is done, a method fails when it has done its work."""
    method, is_stop_due, done = getattr(owner, name), trainer.Trainer._is_stop_due, [0]

    def count(self: trainer.Trainer) -> bool:
        done[0] = self.position.step
        return is_stop_due(self)

    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if done[0] == step:
            raise error
        return result

    patch.setattr(trainer.Trainer, "_is_stop_due", count)
    patch.setattr(owner, name, call)


BROKEN = {
    "reading": (StepChunks, "from_windows", MemoryError()),
    "counting": (Candidates, "_log_inclusion", MemoryError()),
    "counts": (CountMin, "__call__", MemoryError()),
    "inputs": (Encoder, "prepare_inputs", ValueError("of a user's own encoder")),
    "forward": (ChunkObjective, "forward", ValueError("of a user's own decoder")),
    "backward": (torch.Tensor, "backward", RuntimeError("CUDA out of memory")),
    "clipping": (trainer.Trainer, "_record_diagnosis", MemoryError()),
    "validation": (Validation, "score", MemoryError()),
}


@pytest.mark.parametrize("place", mostly_nightly(BROKEN, "counts", "forward"))
def test_a_step_that_fails_is_as_if_it_had_not_begun(
    place: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before it are saved, and a resumed phase has the same bits."""
    monkeypatch.setattr(trainer, "EARLY_RECORDS", (4, 5))
    options.log_steps, options.pretrain.steps, options.checkpoint.every_steps = 2, 6, 99
    options.validation.times, options.optimizer.ema, options.pretrain.decode_fraction = 2, 0.5, 0.5
    undisturbed, step = replace(options, name="undisturbed"), 3 if place == "validation" else 4
    pretrain(undisturbed)
    with monkeypatch.context() as patch, pytest.raises(type(BROKEN[place][2])):
        fail_after(patch, step, *BROKEN[place])
        pretrain(options)
    assert newest(options, "pretrain").name == f"step-{step:08}"
    pretrain(options)
    assert_same(options, undisturbed, "pretrain")


def command(options: Options, folder: Path) -> list[str]:
    (config := folder / f"{options.name}.yaml").write_text(dump_options(options))
    return ["train", "--config", str(config)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "no")], ids=["killed", "failed"])
def test_a_step_that_is_saved_again_is_never_without_a_checkpoint(
    error: BaseException, whole: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stop within the step of a validation. Whatever is not caught leaves what a kill leaves."""
    kept = shutil.copytree(Path(whole.runs_dir) / "whole/train/checkpoints", tmp_path / "checkpoints")
    one, rename = Checkpoints(kept).load_newest(), Path.rename
    assert one is not None
    for path in checkpoints.list_checkpoints(kept)[:-1]:
        shutil.rmtree(path)

    def break_off(path: Path, target: Path) -> Path:
        if path.name == f".{one.path.name}.partial":
            raise error
        return rename(path, target)

    again = Checkpoints(kept)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", break_off)
        again.save(one.step, {"model.safetensors": one.model, "training.safetensors": one.training}, one.state, False)
        with pytest.raises(type(error)):
            again.wait_until_written()
    found = Checkpoints(kept).load_newest()
    assert found is not None and found.digest == one.digest and found.step == one.step
    assert [path.name for path in kept.glob("step-*")] == [one.path.name]
    again.save(one.step, {"model.safetensors": one.model, "training.safetensors": one.training}, one.state, False)
    again.wait_until_written()
    assert not list(kept.glob(".*.partial")) and Checkpoints(kept).load_newest() is not None


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(often: Options, tmp_path: Path) -> None:
    train(often)
    size = (newest(often, "train") / "training.safetensors").stat().st_size
    often.train.steps = 12
    done = limited(command(often, tmp_path), tmp_path, FSIZE=size // 2)
    assert done.returncode == 1 and "error: the checkpoint of step 12 could not be written" in done.stderr
    assert "the last good one is step-00000008. Raise the limit of file sizes" in done.stderr
    assert "Traceback" not in done.stderr
    assert train(often).steps == 12 and newest(often, "train").name == "step-00000012"


@pytest.mark.slow
def test_a_small_file_system(often: Options, tmp_path: Path) -> None:
    with small_disk(disk := tmp_path / "disk", "2m"):
        often.runs_dir = str(disk)
        train(often)
        filler = disk / "filler"
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        often.train.steps = 12
        done = limited(command(often, tmp_path), tmp_path)
        assert done.returncode == 1 and done.stderr.startswith(f"error: {disk}/tiny/lock: no space left on the disk. ")
        last = newest(often, "train")
        assert last.name == "step-00000008" and Checkpoints(last.parent).load_newest()
        filler.unlink()
        assert train(often).steps == 12 and newest(often, "train").name == "step-00000012"
