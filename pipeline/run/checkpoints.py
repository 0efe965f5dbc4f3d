"""Checkpoints: whole or not at all, verified when read, and free of code.

A checkpoint is a folder `step-00001000/` with `model.safetensors`, `training.safetensors` (optimizer moments, counts and
random generators), with a moving average of the weights `average.safetensors`, and `state.json` (everything that is not a
tensor, the sha256 of the other files, and of itself). It is written beside its final name, synced and renamed, by a thread
while training goes on; `latest` and `best` are one-line files that name one.
"""

import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.checked import checksum
from data.durable import check_guards, make_folders, sync_folder, write_atomically
from pipeline.run.choice import (
    AVERAGE,
    FILES,
    MODEL,
    TRAINING,
    DamagedCheckpoint,
    choose,
    note_sums,
    refuse_lost,
    whole_state,
)
from pipeline.run.saved import STATE, Saved, State, permitted, pointed, saved
from pipeline.run.tensors import read_tensors

log = logging.getLogger(__name__)
__all__ = ["AVERAGE", "MODEL", "TRAINING", "Checkpoint", "Checkpoints", "DamagedCheckpoint", "load"]


@dataclass
class Checkpoint:
    """What a checkpoint holds; `training` is empty where only the model was asked for; see `Saved` for `fallback`."""

    path: Path
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    state: State
    average: dict[str, Tensor] | None = None
    fallback: str | None = None

    @property
    def saved(self) -> Saved:
        """What its state says of it."""
        return replace(Saved.of(self.path, self.state), fallback=self.fallback)


class Checkpoints:
    """The checkpoints of one phase of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], state: State, best: bool) -> None:
        """Copies a checkpoint's tensors and has them written; returns before they are, see `wait`.

        Args:
            step: of training.
            tensors: for each file its tensors by name, on any device; they may change as soon as this returns.
            state: what else there is; JSON.
            best: `best` is to name it as well as `latest`.

        Raises:
            OSError: the one before could not be written.
        """
        self.wait()
        copies = {file: {name: _copy(tensor) for name, tensor in of.items()} for file, of in tensors.items()}
        self._pending = self._writer.submit(self._write, step, copies, state, best)

    def wait(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            FolderLost: the run's folder was removed, moved or replaced.
            OSError: it could not be written: the disk is full, or read-only; the checkpoints before it are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def refuse(self, error: OSError) -> None:
        """Has the next `wait` say what kept a checkpoint from being begun."""
        self._pending = Future()
        self._pending.set_exception(error)

    def close(self) -> None:
        """Waits for the checkpoint that is being written, whether that succeeds or not; nothing is saved afterwards."""
        self._writer.shutdown()

    def _write(self, step: int, tensors: dict[str, dict[str, Tensor]], state: State, best: bool) -> None:
        """Writes a checkpoint, points `latest` (and `best`) to it, and removes what is neither new nor best.

        Raises:
            FolderLost: the run's folder is another now.
            OSError: see `wait`.
        """
        path = self.folder / f"step-{step:08d}"
        beside = self.folder / f".{path.name}.partial"
        check_guards(self.folder)
        try:
            make_folders(self.folder, within=self.folder.parent.parent)  # the run's folder
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            digests = {name: _write_tensors(beside / name, of) for name, of in tensors.items()}
            state = state | {"step": step, "sha256": digests}
            content = json.dumps(state | {"digest": checksum(state, "digest")}, indent=2)
            write_atomically(beside / STATE, content.encode())
            check_guards(self.folder)
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)
            sync_folder(self.folder)
            note_sums(path, digests)
            if best:
                self.point("best", path)
            self.point("latest", path)
        except (OSError, SafetensorError) as error:
            check_guards(self.folder)  # what is there now may be another process's
            last = self.latest()
            for unfinished in (beside, path if path != last else beside):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
                + (f"the last good one is {last.name}" if last else "there is none yet")
            ) from error
        self._prune()

    def point(self, pointer: str, path: Path) -> None:
        """Has `latest` or `best` name a checkpoint."""
        if pointed(self.folder, pointer) != path:
            write_atomically(self.folder / pointer, f"{path.name}\n".encode())

    def _prune(self) -> None:
        check_guards(self.folder)
        for path in self.folder.glob(".*.partial"):  # of a process that was killed
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        kept = {pointed(self.folder, "best"), *saved(self.folder)[-self.keep :]}
        for path in saved(self.folder):
            if path not in kept:
                beside = path.with_name(f".{path.name}.partial")  # never half of one under its name
                with suppress(OSError):
                    path.rename(beside)
                shutil.rmtree(beside, ignore_errors=True)

    def latest(self) -> Path | None:
        """Folder of the checkpoint that was written last, or None."""
        path = pointed(self.folder, "latest")
        return path if path is not None and path.is_dir() else None

    def newest(self, training: bool = True) -> Checkpoint | None:
        """The newest checkpoint that is undamaged, or None if there never was one.

        Raises:
            DamagedCheckpoint: there are some, or there were, and none of them is whole.
            OSError: one may not be read, or see `wait`.
        """
        self.wait()
        tried: set[Path] = set()
        while new := [path for path in saved(self.folder) if path not in tried]:  # training may replace them meanwhile
            tried.add(new[-1])
            try:
                return load(new[-1], training)
            except DamagedCheckpoint as error:
                if new[-1].exists():
                    log.warning("%s; trying the one before", error)
        if tried:
            raise DamagedCheckpoint(f"no checkpoint in {self.folder} is whole; move them away to start afresh")
        refuse_lost(self.folder)
        return None

    def best(self, training: bool = False) -> Checkpoint | None:
        """The checkpoint that `choose` names, its model alone unless it is to be trained on; None if there never was one.

        Raises:
            DamagedCheckpoint: there are some, or there were, and none of them is whole.
        """
        self.wait()
        while True:
            try:
                chosen = choose(self.folder)
            except FileNotFoundError:
                return None
            try:
                return replace(load(chosen.path, training), fallback=chosen.fallback)
            except DamagedCheckpoint:  # it has changed since its sum was noted, or is replaced; `choose` knows by now
                if choose(self.folder).path == chosen.path:
                    raise


def load(path: Path, training: bool = True) -> Checkpoint:
    """Reads and verifies a checkpoint; without `training` its model is the moving average of the weights if there is one.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or altered.
        PermissionError: it may not be read.
    """
    state = whole_state(path, FILES if training else None, fresh=True)
    evaluated = AVERAGE if AVERAGE in state["sha256"] else MODEL
    try:
        with permitted(path):
            wanted = [name for name in FILES if name in state["sha256"]] if training else [evaluated]
            tensors = {name: read_tensors(path / name) for name in wanted}
            if training:
                return Checkpoint(path, tensors[MODEL], tensors[TRAINING], state, tensors.get(AVERAGE))
            return Checkpoint(path, tensors[evaluated], {}, state)
    except PermissionError:
        raise
    except (OSError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {type(error).__name__}: {error}") from error


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Writes a file of tensors to the disk and returns its sha256."""
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors writes for the owner alone
    save_file(tensors, path)
    path.chmod(mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
