"""Checkpoints: whole or not at all, verified when read, and free of code.

A checkpoint is a folder `step-00001000/` with `model.safetensors`, `training.safetensors` (optimizer moments, counts and
random generators), with a moving average of the weights `average.safetensors`, and `state.json` (everything that is not a
tensor, the sha256 of the other files, and of itself). It is written beside its final name, synced and renamed, by a thread
while training goes on; `latest` and `best` are one-line files that name one.

Checkpoints as they lie in a folder, without a look at their tensors: which there are, and which run one fits.

Which checkpoint of a phase is used: the best by validation if it is whole, else the newest whole one.

`choose` decides for all that read a trained run, so that what was made of a checkpoint is compared with the one that is
asked. What it falls back from is logged once a command, and stands in `Saved.fallback` for whoever keeps a result.

A checkpoint is whole if `state.json` and the file that is evaluated have the sums that were written. Sums of large files take
seconds. So `.checked` beside the checkpoints keeps them with device, inode, size and times of each file; it counts only if it
belongs to who reads it and these are the same. Whoever opens a model works its sum out again. It is written with a checkpoint,
so a copy of a run has none that counts, and its sums are worked out once in each process.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Self, TypedDict, cast

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.checked import (
    NOTE,
    RESULT,
    DamagedFile,
    checksum,
    named,
    open_file,
    parse_json,
    read_bytes,
    read_text,
    stamp_file,
    unsealed,
)
from data.durable import check_guards, make_folders, sync_folder, write_atomically
from pipeline.kinds import is_of
from pipeline.options import Options
from pipeline.run.tensors import read_metadata, read_tensors
from pipeline.trees import differences

STATE = "state.json"
FEWEST_STEPS = 100  # in which a phase learns anything; a longer warm-up of the learning rate must be over, too


class Identity(TypedDict):
    """What must be the same for a checkpoint to fit a run: options by section, and the digest of the corpus."""

    model: dict[str, Any]
    iem: dict[str, str]
    batch: dict[str, int]
    chunker: dict[str, Any]
    corpus: str


class State(TypedDict, total=False):
    """state.json of a checkpoint: all but tensors.

    Attributes:
        step: of training.
        sha256: digests of the other files, by name.
        digest: of all that is in the checkpoint.
        identity: what must be the same for it to fit a run.
        options: of the run that wrote it.
        threads: with which its sums were rounded.
        phase: the rest of the position in the schedule.
        loader: position in the data.
        negatives: position in the negatives' stream, or None.
        sums: unwritten metrics of each rank.
        validated_at: position of the last validation.
        stale: validations since the best one.
        best: its figure, or None.
    """

    step: int
    sha256: dict[str, str]
    digest: str
    identity: Identity
    options: dict[str, Any]
    threads: int
    phase: dict[str, float]
    loader: dict[str, int]
    negatives: dict[str, int] | None
    sums: list[dict[str, float]]
    validated_at: dict[str, Any]
    stale: int
    best: float | None


@dataclass
class Saved:
    """What a checkpoint's state.json says of it.

    Attributes:
        path: of the checkpoint.
        step: of training.
        digest: of all it holds.
        identity: of the run it fits.
        fallback: why it is used though it is not the best by validation, or that cannot be told; None: nothing is wrong.
    """

    path: Path
    step: int
    digest: str
    identity: Identity
    fallback: str | None = None

    @classmethod
    def of(cls, path: Path, state: State) -> Self:
        """Of the contents of a state.json."""
        return cls(path, state["step"], state["digest"], state["identity"])

    @property
    def phase(self) -> str:
        """That it is of."""
        return self.path.parent.parent.name


def read_state(path: Path, keys: tuple[str, ...] = ()) -> State:
    """state.json of the checkpoint in a folder, which must have these keys, and be what its digest says.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is damaged.
    """
    where = path / STATE
    found = parse_json(read_bytes(where, RESULT), where)
    unsealed(found, where, "digest")
    if missing := [key for key in keys if key not in found]:
        raise DamagedFile(f"{where} is damaged, or of another version: it lacks {', '.join(missing)}")
    return cast(State, found)


def identity(options: Options, corpus: str) -> Identity:
    """That of a run with these options on the corpus with this digest; of the model, what its kind has."""
    return {
        "model": {
            name: value for name, value in asdict(options.model).items() if is_of(f"model.{name}", options.model.kind)
        },
        "iem": {name: getattr(options.iem, name) for name in ("head", "similarity", "scale", "bias")},
        "batch": {"context": options.batch.context},
        "chunker": asdict(options.chunker),
        "corpus": corpus,
    }


def unlike(was: Identity, now: Identity, most: int = 3) -> tuple[str, str] | None:
    """The first options in which two identities differ, as they were and as they are."""
    found = list(differences(was, now))[:most]
    if found and found[0].key == "model.kind":
        found = found[:1]  # the rest follows from it
    if not found:
        return None
    return ", ".join(f"{each.key}={each.was}" for each in found), ", ".join(f"{each.key}={each.now}" for each in found)


def saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or not, oldest first.

    Raises:
        PermissionError: it may not be read.
    """
    try:
        with permitted(folder):
            return sorted(folder / name for name in os.listdir(folder) if name.startswith("step-"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def pointed(folder: Path, pointer: str) -> Path | None:
    """The checkpoint that `latest` or `best` names, whether it is there or not.

    Raises:
        PermissionError: it may not be read.
    """
    try:
        with permitted(folder):
            name = read_text(folder / pointer, NOTE).strip()
    except (FileNotFoundError, NotADirectoryError, DamagedFile):
        return None
    return folder / name if name.startswith("step-") and Path(name).name == name else None


def _newest_state(folder: Path) -> State:
    """state.json of the newest checkpoint in a folder; empty where none can be read."""
    for path in reversed(saved(folder)):
        with suppress(OSError, ValueError):
            return read_state(path)
    return {}


def trained_with(folder: Path) -> dict[str, Any] | None:
    """The options of the newest checkpoint in a folder; None where none can be read."""
    return _newest_state(folder).get("options")


def reached(folder: Path) -> dict[str, float]:
    """Step, seconds, epoch and FLOPs of the newest checkpoint in a folder, as metrics name them; empty where none can be read.

    A training that was stopped has saved more steps than its last line of metrics tells of.
    """
    found = _newest_state(folder)
    with suppress(TypeError, KeyError):
        where = found["phase"]
        return {
            "step": found["step"],
            "seconds": where["seconds"],
            "epoch": where["epochs"],
            "flops": where["flops"],
        }
    return {}


def too_few_steps(folder: Path) -> str:
    """What to say of a phase that has taken too few steps to learn anything, and which limits would do.

    Args:
        folder: of its checkpoints.

    Returns:
        A sentence; nothing where there were enough, or no checkpoint can be read.
    """
    found, phase = _newest_state(folder), folder.parent.name
    with suppress(TypeError, KeyError):
        step, where, options = found["step"], found["phase"], found["options"]
        least = max(FEWEST_STEPS, options["optimizer"]["warmup_steps"])
        if not 0 < step < least:
            return ""
        each = where["seconds"] / step
        wanted = {"steps": least, "seconds": math.ceil(least * each), "epochs": where["epochs"] * least / step}
        limits = {name: options[phase][name] for name in wanted}
        short = [f"{phase}.{name}={value:.6g}" for name, value in wanted.items() if (limits[name] or math.inf) < value]
        advice = f"{' '.join(short)} or more" if short else "the same command goes on"
        why = f"in fewer than {least} a model learns next to nothing"
        return f"{phase} has taken {step} steps, at {each:.2g} s each; {why}: {advice}"
    return ""


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever written there; one that is damaged or gone counts."""
    return bool(saved(folder)) or pointed(folder, "latest") is not None


@contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Says of a file below `path` that may not be read whose it is."""
    try:
        yield
    except PermissionError as error:
        owner = "somebody else"
        for each in (*path.parents[::-1], path):  # the last one that may be looked at
            with suppress(OSError, KeyError):
                owner = each.owner()
        raise PermissionError(
            f"{error.filename}: permission denied; it belongs to {owner}: ask them for the right to read it"
        ) from error


MODEL, AVERAGE, TRAINING = "model.safetensors", "average.safetensors", "training.safetensors"
FILES = (MODEL, AVERAGE, TRAINING)  # the only ones that are opened, whatever a state.json names
CHECKED = ".checked"
_TRIES = 20  # a training replaces checkpoints meanwhile
_MOST = 1 << 14  # sums that are kept

Stamp = list[int]  # see `data.checked.stamp_file`


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written."""


_sums: dict[Path, tuple[Stamp, str]] = {}  # sha256 of files as this process found them
_said: set[str] = set()
_guard = Lock()


def choose(folder: Path) -> Saved:
    """The checkpoint of a phase that is evaluated, sampled from, indexed and shown.

    Args:
        folder: of the phase's checkpoints.

    Raises:
        DamagedCheckpoint: there are some, or there were, and none of them is whole.
        FileNotFoundError: there never was one.
        PermissionError: one may not be read.
    """
    for _ in range(_TRIES):
        best, reasons = _named(folder)
        newest_first = [path for path in reversed(saved(folder)) if path != best]
        for path in [*([best] if best else []), *newest_first]:
            try:
                state = whole_state(path)
            except DamagedCheckpoint as error:
                is_gone = not os.path.lexists(path)
                if _named(folder)[0] != best or (is_gone and path != best):
                    break  # a training has just replaced it
                reasons.append(f"{path} is gone, which {folder / 'best'} names" if is_gone else str(error))
                continue
            if best is None and not reasons and state.get("best") is not None:
                reasons.append(f"{folder / 'best'} is missing, though there were validations")
            found = Saved.of(path, state)
            return replace(found, fallback=_say(path, reasons)) if reasons else found
        else:
            break
    else:
        raise DamagedCheckpoint(f"the checkpoints in {folder} are replaced faster than they are read: try again")
    refuse_lost(folder)
    if not reasons:
        raise FileNotFoundError(f"{folder} has no checkpoint yet")
    raise DamagedCheckpoint(f"no checkpoint in {folder} is whole; move them away to start afresh ({reasons[0]})")


def refuse_lost(folder: Path) -> None:
    """Raises DamagedCheckpoint if there is no checkpoint, and a file still names one."""
    for pointer in ("latest", "best") if not saved(folder) else ():
        if (named := pointed(folder, pointer)) is not None:
            raise DamagedCheckpoint(
                f"{named} is gone, which {folder / pointer} names: bring it back, or remove {pointer} to start afresh"
            )


def _named(folder: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint that `best` names, and what is wrong with that file."""
    best, path = pointed(folder, "best"), folder / "best"
    if best is None and os.path.lexists(path):
        return None, [f"{path} is damaged: it names no checkpoint"]
    return best, []


def _say(used: Path, reasons: list[str]) -> str:
    """One sentence on why another checkpoint is used than the best, which is logged once a command."""
    return warn_once(
        f"{'; '.join(reasons)}; using the newest instead, {used.name} (the name of another in {used.parent / 'best'} "
        "chooses that)"
    )


def warn_once(said: str) -> str:
    """Logs a sentence as a warning, once a command, and returns it."""
    with _guard:
        is_new = said not in _said
        if len(_said) >= _MOST:
            _said.clear()
        _said.add(said)
    if is_new:
        log.warning("%s", said)
    return said


def forget_what_was_said() -> None:
    """Has each fall-back be logged again: another command begins."""
    with _guard:
        _said.clear()


def whole_state(path: Path, names: Iterable[str] | None = None, fresh: bool = False) -> State:
    """state.json of a checkpoint, if it and some files are what was written.

    Args:
        path: of the checkpoint.
        names: of the files; None: the one that is evaluated, the moving average of the weights if there is one.
        fresh: work out sums again, whatever was noted of them.

    Raises:
        DamagedCheckpoint: something is missing, truncated or altered.
        PermissionError: it may not be read.
    """
    try:
        with permitted(path):
            return _whole_state(path, names, fresh)
    except (DamagedCheckpoint, PermissionError):
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"checkpoint {path} is damaged: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _whole_state(path: Path, names: Iterable[str] | None, fresh: bool) -> State:
    state: Any = read_state(path, ("step", "identity", "options", "sha256", "digest"))
    sums: Mapping[str, str] = state["sha256"]
    for name in names or [AVERAGE if AVERAGE in sums else MODEL]:
        if name in FILES and name in sums and _sum(path / name, fresh) != sums[name]:
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {name} is not what was written")
    for key, kind in (("step", int), ("identity", dict), ("options", dict)):
        if not isinstance(state[key], kind):
            raise DamagedCheckpoint(f"checkpoint {path} is damaged: {STATE} has a {key} of another kind")
    return cast(State, state)


def _sum(path: Path, fresh: bool) -> str:
    """The sha256 of a file: noted, or worked out, and then noted."""
    stamp = stamp_file(path)
    if not fresh:
        for known in (_sums.get(path), _noted(path.parent.parent).get(f"{path.parent.name}/{path.name}")):
            if known is not None and known[0] == stamp:
                return known[1]
    read_metadata(path)  # what is no such file, or goes on behind its tensors, is not summed: a terabyte takes an hour
    summed = hashlib.sha256()
    with named(path), open_file(path) as file:
        while block := file.read(1 << 20):
            summed.update(block)
    found = summed.hexdigest()
    noted = _noted(path.parent.parent).get(f"{path.parent.name}/{path.name}")
    if noted != (stamp, found):  # it was copied, or the disk forgot: all readers are to know
        note_sums(path.parent, {path.name: found})
    with _guard:
        while len(_sums) >= _MOST:
            _sums.pop(next(iter(_sums)))
        _sums[path] = (stamp, found)
    return found


def _noted(folder: Path) -> dict[str, tuple[Stamp, str]]:
    """What `.checked` says of the checkpoints in a folder, by CHECKPOINT/FILE; nothing if another user wrote it."""
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        path = folder / CHECKED
        content = parse_json(read_bytes(path, RESULT), path)
        if path.stat().st_uid == os.getuid():
            return {str(name): (list(stamp), str(found)) for name, (stamp, found) in content.items()}
    return {}


def note_sums(checkpoint: Path, sums: Mapping[str, str]) -> None:
    """Notes the sums of a checkpoint's files, so that others need not work them out; where one may only read, nothing."""
    folder = checkpoint.parent
    with suppress(OSError):
        there = {path.name for path in saved(folder)}
        kept = {name: entry for name, entry in _noted(folder).items() if name.partition("/")[0] in there}
        new = {f"{checkpoint.name}/{name}": (stamp_file(checkpoint / name), found) for name, found in sums.items()}
        write_atomically(folder / CHECKED, json.dumps(kept | new).encode())


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
