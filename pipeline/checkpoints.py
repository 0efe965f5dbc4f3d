"""Checkpoints: whole or not at all, verified when read, and free of code.

A checkpoint is a folder `step-00001000/` with `model.safetensors`, `training.safetensors` (optimizer moments, counts and
random generators) and `state.json` (everything that is not a tensor, and the sha256 of the other two). It is written
beside its final name, synced and renamed; `latest` and `best` are one-line files that name one.
"""

import hashlib
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.files import sync_folder, write_atomically

log = logging.getLogger(__name__)
MODEL, TRAINING, STATE = "model.safetensors", "training.safetensors", "state.json"


@dataclass
class Checkpoint:
    """What a checkpoint holds; `training` is empty where only the model was asked for."""

    path: Path
    model: dict[str, Tensor]
    training: dict[str, Tensor]
    state: dict[str, Any]


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written."""


class Checkpoints:
    """The checkpoints of one phase of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self, step: int, model: dict[str, Tensor], training: dict[str, Tensor], state: dict[str, Any], best: bool
    ) -> Path:
        """Writes a checkpoint, points `latest` (and `best`) to it, and removes what is neither new nor best.

        Raises:
            OSError: the disk is full or not writable; the checkpoints before are untouched.
        """
        path = self.folder / f"step-{step:08d}"
        beside = self.folder / f".{path.name}.partial"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            files = {MODEL: save(model), TRAINING: save(training)}
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            files[STATE] = json.dumps(state | {"step": step, "sha256": digests}, indent=2).encode()
            for name, content in files.items():
                write_atomically(beside / name, content)
            shutil.rmtree(path, ignore_errors=True)
            beside.rename(path)
            sync_folder(self.folder)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        write_atomically(self.folder / "latest", f"{path.name}\n".encode())
        if best:
            write_atomically(self.folder / "best", f"{path.name}\n".encode())
        self._prune()
        return path

    def _prune(self) -> None:
        kept = {self._named("best"), *self._all()[-self.keep :]}
        for path in self._all():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if (path / STATE).is_file())

    def _named(self, pointer: str) -> Path | None:
        """The checkpoint that `latest` or `best` names, if it is there."""
        try:
            path = self.folder / (self.folder / pointer).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return path if path.parent == self.folder and (path / STATE).is_file() else None

    def newest(self, training: bool = True) -> Checkpoint | None:
        """The newest checkpoint that is undamaged, or None if there are none at all.

        Raises:
            DamagedCheckpoint: there are some, and none of them is whole.
        """
        paths = self._all()
        for path in reversed(paths):
            try:
                return load(path, training)
            except DamagedCheckpoint as error:
                log.warning("%s; trying the one before", error)
        if paths:
            raise DamagedCheckpoint(f"no checkpoint in {self.folder} is whole; move them away to start afresh")
        return None

    def best(self) -> Checkpoint | None:
        """The model of the best checkpoint, else of the newest."""
        path = self._named("best")
        if path is not None:
            try:
                return load(path, training=False)
            except DamagedCheckpoint as error:
                log.warning("%s; using the newest instead", error)
        return self.newest(training=False)


def load(path: Path, training: bool = True) -> Checkpoint:
    """Reads and verifies a checkpoint.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or altered.
    """
    try:
        state = json.loads((path / STATE).read_text())
        tensors = []
        for name in (MODEL, TRAINING) if training else (MODEL,):
            with open(path / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != state["sha256"][name]:
                raise DamagedCheckpoint(f"checkpoint {path} is damaged: {name} is not what was written")
            tensors.append(load_file(path / name))
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {error}") from error
    return Checkpoint(path, tensors[0], tensors[1] if training else {}, state)
