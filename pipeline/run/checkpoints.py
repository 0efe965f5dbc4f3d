"""Checkpoints: written whole or not at all, verified when read, and free of code.

A checkpoint is a folder `step-00001000/` with these files:

    model.safetensors     weights
    average.safetensors   their moving average, if there is one
    training.safetensors  optimizer moments, counts and random generators
    state.json            everything that is not a tensor, the sha256 of the other files, and its own digest

A thread writes it beside its final name, syncs it and renames it, while training goes on. `latest` and `best` are
one-line files that name a checkpoint.

`choose_checkpoint` decides which checkpoint of a phase is used: the best by validation if it is whole, else the newest whole one.
Everything that reads a trained run uses it, so results are always compared with the same checkpoint. The reason for a
fallback is logged once a command, and kept in `Checkpoint.fallback`.

A checkpoint is whole if `state.json` and the file that is evaluated have the recorded checksums. Hashing large files
takes seconds, so `ChecksumCache` keeps them in `.checked` beside the checkpoints. Loading a model always hashes again.

Files of tensors are never memory-mapped: if a mapped file is truncated while it is read, the process ends with SIGBUS.
"""

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from data.filesystem import (
    NOTE,
    RESULT,
    CorruptFileError,
    add_path_to_errors,
    check_guards,
    compute_checksum,
    make_folders,
    open_file,
    parse_json,
    read_bytes,
    read_text,
    sync_folder,
    verify_checksums,
    write_atomically,
)
from data.processes import free_memory
from pipeline.config import Options, Phase, applies_to, diff_trees
from pipeline.console import cut_middle, warn_once
from pipeline.run.files import ChecksumCache, describe_mistake, type_adapter

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)
STATE = "state.json"
MODEL, AVERAGE, TRAINING = "model.safetensors", "average.safetensors", "training.safetensors"
FILES = (MODEL, AVERAGE, TRAINING)  # the only ones that are opened, whatever a state.json names
_REPLACED = ".replaced.partial"  # ends the name of a checkpoint while another of its step takes its place
# Errors of a file that is missing, no file, or on a broken disk; None is of our own.
_OF_DAMAGE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EBADMSG, None),
    getattr(errno, "EUCLEAN", errno.EIO),  # of Linux: a block with a wrong checksum
)
_LONGEST = 300  # characters of a reason that names parameters
FEWEST_STEPS = 100  # in which a phase learns anything; a longer warm-up of the learning rate must be over, too


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Amount = Annotated[float, Field(ge=0, lt=1e300)]  # not infinite, nor NaN


class Identity(TypedDict):
    """Everything that must match for a checkpoint to fit a run: options by section, and the digest of the corpus."""

    model: dict[str, Any]
    iem: dict[str, Any]
    batch: dict[str, int]
    chunker: dict[str, Any]
    corpus: str


class PhaseOne(TypedDict, total=False):
    """The digest of the phase-one checkpoint that a phase two began with, and what phase one had cost by then."""

    digest: str
    step: _Amount
    seconds: _Amount
    epoch: _Amount
    flops: _Amount


class State(TypedDict, total=False):
    """The contents of a checkpoint's state.json: everything but tensors.

    Attributes:
        sha256: digests of the other files, by name.
        digest: digest of the whole checkpoint.
        options: options of the run that wrote it.
        threads: number of CPU threads, which decides how sums are rounded.
        phase: the rest of the position in the schedule.
        loader, negatives: positions in the streams of windows and of negatives.
        sums: metrics of each rank that are not written yet.
        validated_at: position of the last validation.
        stale: number of validations since the best one.
        best: metric of the best validation, or None.
        rate_share: learning rate of the last step, as a share of its peak.
        first: of phase two, what it began with; else empty.
    """

    step: _Count
    sha256: dict[str, str]
    digest: str
    identity: Identity
    options: dict[str, Any]
    threads: int
    phase: dict[str, _Amount]
    loader: dict[str, int]
    negatives: dict[str, int] | None
    sums: list[dict[str, float]]
    validated_at: dict[str, _Amount]
    stale: _Count
    best: float | None
    rate_share: _Amount
    first: PhaseOne


@dataclass
class Checkpoint:
    """A checkpoint, with its tensors if it was loaded.

    Attributes:
        state: contents of its state.json.
        fallback: why it is used although it is not the best by validation, or why that is unknown; None if nothing is
            wrong.
        model: weights by name; of a checkpoint loaded for reading, their moving average if there is one.
        training: tensors of the optimizer, counts and random generators; empty unless loaded for training.
        average: moving average of the weights, if loaded for training and there is one.
    """

    path: Path
    state: State
    fallback: str | None = None
    model: "dict[str, Tensor]" = field(default_factory=dict)
    training: "dict[str, Tensor]" = field(default_factory=dict)
    average: "dict[str, Tensor] | None" = None

    @property
    def phase(self) -> Phase:
        """The training phase."""
        return cast(Phase, self.path.parent.parent.name)

    @property
    def step(self) -> int:
        """The training step."""
        return self.state["step"]

    @property
    def digest(self) -> str:
        """Digest of the whole checkpoint."""
        return self.state["digest"]

    @property
    def identity(self) -> Identity:
        """Identity of the run that it fits."""
        return self.state["identity"]


def read_state(path: Path, keys: tuple[str, ...] = ()) -> State:
    """Read the state.json of a checkpoint, and check its digest, its types, and that it has these keys.

    Raises:
        FileNotFoundError: there is no state.json.
        CorruptFileError: it is damaged.
    """
    where = path / STATE
    state = parse_json(read_bytes(where, RESULT), where)
    verify_checksums(state, where, "digest")
    if missing := [key for key in keys if key not in state]:
        raise CorruptFileError(f"{where} is damaged or of another version. It lacks {', '.join(missing)}")
    try:
        type_adapter(State).validate_python(state, strict=True)
    except ValidationError as error:
        raise CorruptFileError(f"{where} is damaged: {describe_mistake(error)}") from error
    return cast(State, state)


def make_identity(options: Options, corpus: str) -> Identity:
    """Return the identity of a run with these options on the corpus with this digest.

    Of the model's options, only those that apply to its kind are included.
    """
    return {
        "model": {
            name: value
            for name, value in asdict(options.model).items()
            if applies_to(f"model.{name}", options.model.kind)
        },
        "iem": {name: getattr(options.iem, name) for name in ("head", "similarity", "scale", "bias")},
        "batch": {"context": options.batch.context},
        "chunker": asdict(options.chunker),
        "corpus": corpus,
    }


def identity_differences(was: Identity, now: Identity) -> tuple[str, str] | None:
    """Return the first three options in which two identities differ, as text before and now; None if they are equal."""
    differences = list(diff_trees(was, now))
    # With another kind, the rest of its section follows from it.
    others = tuple(each.key.removesuffix("kind") for each in differences if each.key.endswith(".kind"))
    differences = [each for each in differences if each.key.endswith(".kind") or not each.key.startswith(others)][:3]
    if not differences:
        return None
    return ", ".join(each.given_before for each in differences), ", ".join(each.given_now for each in differences)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, whole or not, oldest first.

    Raises:
        PermissionError: the folder may not be read.
    """
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith("step-"))
    except (FileNotFoundError, NotADirectoryError):
        return []


def resolve_pointer(folder: Path, pointer: str) -> Path | None:
    """Return the checkpoint that `latest` or `best` names, even if it is missing; None if the pointer names none.

    Raises:
        PermissionError: the pointer may not be read.
    """
    try:
        name = read_text(folder / pointer, NOTE).strip()
    except (FileNotFoundError, NotADirectoryError, CorruptFileError):
        return None
    return folder / name if name.startswith("step-") and Path(name).name == name else None


def read_newest_state(folder: Path) -> State:
    """Return the state.json of the newest readable checkpoint in a folder; empty if there is none."""
    for path in reversed(list_checkpoints(folder)):
        with suppress(OSError, ValueError):
            return read_state(path)
    return {}


def read_phase_one_cost(folder: Path) -> dict[str, float]:
    """Return what phase one had cost when the phase two in a folder began, as `read_position`; empty if unknown."""
    first: dict[str, Any] = dict(read_newest_state(folder).get("first", {}))
    first.pop("digest", None)
    return first


def read_position(folder: Path) -> dict[str, float]:
    """Return step, seconds, epoch and FLOPs of the newest readable checkpoint in a folder; empty if there is none.

    Keys are those of metrics. An interrupted training may have saved more steps than its last line of metrics shows.
    """
    state = read_newest_state(folder)
    with suppress(TypeError, KeyError):
        where = state["phase"]
        return {"step": state["step"], "seconds": where["seconds"], "epoch": where["epochs"], "flops": where["flops"]}
    return {}


def explain_too_few_steps(folder: Path) -> str:
    """Explain that a phase has taken too few steps to learn anything, and suggest larger limits.

    The result is empty if there were enough steps, or no checkpoint in the folder can be read. Phase two begins with
    what phase one has learned, if that decoded anything, so only its warm-up counts.
    """
    state, phase = read_newest_state(folder), folder.parent.name
    with suppress(TypeError, KeyError):
        step, where, options = state["step"], state["phase"], state["options"]
        warmup = options["optimizer"]["warmup_steps"]
        is_continued = phase == "finetune" and options["pretrain"]["decode_fraction"] > 0
        least = warmup if is_continued else max(FEWEST_STEPS, warmup)
        if not 0 < step < least:
            return ""
        each = where["seconds"] / step
        wanted = {"steps": least, "seconds": math.ceil(least * each), "epochs": where["epochs"] * least / step}
        limits = {name: options[phase][name] for name in wanted}
        short = [f"{phase}.{name}={value:.6g}" for name, value in wanted.items() if (limits[name] or math.inf) < value]
        advice = f"Use {' '.join(short)} or more" if short else "Run the same command to resume"
        is_warmup = least == warmup
        why = "the warm-up of the learning rate takes" if is_warmup else "a model learns almost nothing in fewer than"
        return f"{phase} has taken {step:,} steps, at {each:.2g} s each; {why} {least:,}. {advice}"
    return ""


def has_checkpoint(folder: Path) -> bool:
    """Return whether a checkpoint was ever written to a folder, even if it is now damaged or missing."""
    return bool(list_checkpoints(folder)) or resolve_pointer(folder, "latest") is not None


class CorruptCheckpointError(ValueError):
    """A checkpoint whose files are missing, truncated or altered."""


def choose_checkpoint(folder: Path) -> Checkpoint:
    """Choose the checkpoint of a phase, in its folder of checkpoints, that is evaluated, sampled from, indexed and shown.

    Raises:
        CorruptCheckpointError: checkpoints exist or existed, and none of them is whole.
        FileNotFoundError: there never was a checkpoint.
        PermissionError: a checkpoint may not be read.
    """
    best, reasons = _read_best_pointer(folder)
    newest_first = [path for path in reversed(list_checkpoints(folder)) if path != best]
    for path in [*([best] if best else []), *newest_first]:
        try:
            state = read_verified_state(path)
        except CorruptCheckpointError as error:
            is_gone = not os.path.lexists(path)
            if _read_best_pointer(folder)[0] != best or (is_gone and path != best):
                return choose_checkpoint(folder)  # a training has just replaced it
            reasons.append(f"{path} is missing, but {folder / 'best'} names it" if is_gone else str(error))
            continue
        if best is None and not reasons and state.get("best") is not None:
            reasons.append(f"{folder / 'best'} is missing, although the phase was validated")
        if not reasons:
            return Checkpoint(path, state)
        why = f"{'; '.join(reasons)}; using the newest checkpoint instead, {path.name}"
        advice = f"Write the name of another checkpoint to {folder / 'best'} to choose it"
        return Checkpoint(path, state, warn_once(f"{why}. {advice}"))
    check_pointers(folder)
    if not reasons:
        raise FileNotFoundError(f"{folder} has no checkpoint")
    raise CorruptCheckpointError(
        f"all checkpoints in {folder} are damaged. Move this folder away to start from the beginning ({reasons[0]})"
    )


def check_pointers(folder: Path) -> None:
    """Raise CorruptCheckpointError if there is no checkpoint although `latest` or `best` names one."""
    for pointer in ("latest", "best") if not list_checkpoints(folder) else ():
        if (named := resolve_pointer(folder, pointer)) is not None:
            raise CorruptCheckpointError(
                f"{named} is missing, but {folder / pointer} names it. Restore it, or delete {pointer} to start from the beginning"
            )


def _read_best_pointer(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that `best` names, and a list of problems with that file."""
    best, path = resolve_pointer(folder, "best"), folder / "best"
    if best is None and os.path.lexists(path):
        return None, [f"{path} is damaged: it does not name a checkpoint"]
    return best, []


def read_verified_state(path: Path, names: Iterable[str] | None = None, fresh: bool = False) -> State:
    """Return the state.json of a checkpoint after verifying it and some of its files.

    Args:
        path: folder of the checkpoint.
        names: files to verify; None verifies the one that is evaluated: the moving average if there is one, else the
            weights.
        fresh: hash the files again, even if their checksums are cached.

    Raises:
        CorruptCheckpointError: a file is missing, truncated or altered.
        PermissionError: a file may not be read.
    """
    with _explain_damage(path):
        state = read_state(path, ("step", "identity", "options", "sha256", "digest"))
        sums = state["sha256"]
        cache = ChecksumCache(path.parent)
        for name in names or [AVERAGE if AVERAGE in sums else MODEL]:
            if name in FILES and name in sums:
                read_metadata(path / name)  # a file that goes on behind its tensors is not hashed, which takes long
                if cache.compute_sha256(f"{path.name}/{name}", fresh) != sums[name]:
                    raise CorruptFileError(f"the checksum of {name} does not match")
        return state


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    """Turn every error of a file of a checkpoint into a CorruptCheckpointError, which says once that it is damaged.

    An OSError that may pass, such as of too many open files or of a server of files, is no damage.
    """
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_DAMAGE:
            raise
        why = str(error) if isinstance(error, CorruptFileError) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            why = f"{os.fsdecode(error.filename)} is missing"
        why = why.replace(f"{path}/", "")
        problem = f"{':' if 'is damaged' in why else ' is damaged:'} {why}"
        raise CorruptCheckpointError(f"checkpoint {path}{problem}") from error


def load_weights(system: "nn.Module", checkpoint: Checkpoint) -> None:
    """Load a checkpoint's weights into a model.

    Raises:
        ValueError: they are of another model.
    """
    from haed import distributed

    try:
        distributed.load_weights(system, checkpoint.model)
    except RuntimeError as error:
        reason = cut_middle(str(error).splitlines()[1].strip() if "\n" in str(error) else str(error), _LONGEST)
        raise ValueError(
            f"{checkpoint.path} does not fit the model of config.yaml, or the code of the model was changed: {reason}"
        ) from error


def _had_best_validation(state: State) -> bool:
    """Return whether the validation at a checkpoint was the best so far."""
    return state["best"] is not None and not state["stale"] and state["validated_at"]["step"] == state["step"]


class Checkpoints:
    """The checkpoints of one phase of a run, in `folder`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: "dict[str, dict[str, Tensor]]", state: State, best: bool) -> None:
        """Start writing a checkpoint in a thread; see `wait_until_written`.

        The tensors of each file are on the CPU and may not change any more. With `best`, that pointer gets the checkpoint
        too.

        Raises:
            OSError: the previous checkpoint could not be written.
        """
        self.wait_until_written()
        self._pending = self._writer.submit(self._write_checkpoint, step, tensors, state, best)

    def wait_until_written(self) -> None:
        """Wait until the pending checkpoint is written.

        Raises:
            FolderLostError: the run's folder was removed, moved or replaced.
            OSError: the checkpoint could not be written: the disk is full or read-only; earlier checkpoints are
                untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def fail_next_wait(self, error: OSError) -> None:
        """Make the next `wait_until_written` raise this error, because a checkpoint could not be started."""
        self._pending = Future()
        self._pending.set_exception(error)

    def close(self) -> None:
        """Wait for the pending checkpoint, whether it succeeds or not; nothing can be saved afterwards."""
        self._writer.shutdown()

    def _write_checkpoint(self, step: int, tensors: "dict[str, dict[str, Tensor]]", state: State, best: bool) -> None:
        """Write a checkpoint, point `latest` (and `best`) to it, and remove those that are neither new nor best."""
        path = self.folder / f"step-{step:08d}"
        beside = self.folder / f".{path.name}.partial"
        unfinished = [beside, path]
        check_guards(self.folder)
        try:
            make_folders(self.folder, within=self.folder.parent.parent)  # the run's folder
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            digests = {name: _write_tensors(beside / name, weights) for name, weights in tensors.items()}
            state = state | {"step": step, "sha256": digests}
            content = json.dumps(state | {"digest": compute_checksum(state, "digest")}, indent=2)
            write_atomically(beside / STATE, content.encode())
            check_guards(self.folder)
            replaced = self.folder / f".{path.name}{_REPLACED}"
            shutil.rmtree(replaced, ignore_errors=True)
            with suppress(FileNotFoundError):  # the same step was saved before
                path.rename(replaced)
            beside.rename(path)
            sync_folder(self.folder)
            unfinished.remove(path)  # it is whole, even if no pointer will name it
            shutil.rmtree(replaced, ignore_errors=True)
            ChecksumCache(self.folder).note_sums({f"{path.name}/{name}": sum for name, sum in digests.items()})
            if best:
                self.set_pointer("best", path)
            self.set_pointer("latest", path)
        except (OSError, SafetensorError) as error:
            check_guards(self.folder)  # what is there now may be another process's
            self._restore_replaced()
            last = self.latest_path()
            for each in (each for each in unfinished if each != last):
                shutil.rmtree(each, ignore_errors=True)
            raise OSError(
                f"the checkpoint of step {step:,} could not be written to {self.folder}: {error}; "
                + (f"the last good one is {last.name}" if last else "there is no earlier one")
                + advise_on_disk(error)
            ) from error
        self._remove_old(path)

    def _restore_replaced(self) -> None:
        """Give a checkpoint its name back if the one to replace it is not there: its writer failed or was killed."""
        for replaced in self.folder.glob(f".*{_REPLACED}"):
            path = self.folder / replaced.name[1:].removesuffix(_REPLACED)
            if not path.exists():
                with suppress(OSError):  # another rank has just done it
                    replaced.rename(path)

    def find_best(self, newest: Checkpoint) -> Path | None:
        """Return the checkpoint that `best` should name when a training resumes from `newest`; None if that is lost.

        A kill or a full disk between a checkpoint and its pointers leaves both at earlier ones, or absent. Else `best`
        stays, as it may be a user's choice, unless it is missing or later than `newest`: another checkpoint will have its
        name. Then it is the latest one that had the best validation.
        """
        chosen, latest = resolve_pointer(self.folder, "best"), resolve_pointer(self.folder, "latest")
        if chosen is not None and chosen <= newest.path and chosen.is_dir():
            is_behind = latest is not None and latest.is_dir() and latest < newest.path
            return newest.path if is_behind and _had_best_validation(newest.state) else chosen
        for path in reversed(list_checkpoints(self.folder)):
            with suppress(OSError, ValueError):
                state = newest.state if path == newest.path else read_state(path)
                if path <= newest.path and _had_best_validation(state) and state["best"] == newest.state["best"]:
                    return path
        return None

    def restore_pointers(self, newest: Checkpoint, best: Path | None) -> None:
        """Point `latest` to the checkpoint that a training resumes from, and `best` to that of `find_best`."""
        if best is not None:
            self.set_pointer("best", best)
        else:
            (self.folder / "best").unlink(missing_ok=True)
        self.set_pointer("latest", newest.path)

    def set_pointer(self, pointer: str, path: Path) -> None:
        """Point `latest` or `best` to a checkpoint."""
        if resolve_pointer(self.folder, pointer) != path:
            write_atomically(self.folder / pointer, f"{path.name}\n".encode())

    def _remove_old(self, newest: Path) -> None:
        """Remove what is neither best nor among the newest up to the one just written.

        Later ones are damaged, since training resumes from the newest whole one.
        """
        check_guards(self.folder)
        for path in self.folder.glob(".*.partial"):  # of a process that was killed
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        past = [path for path in list_checkpoints(self.folder) if path <= newest]
        kept = {resolve_pointer(self.folder, "best"), *past[-self.keep :]}
        for path in list_checkpoints(self.folder):
            if path not in kept:
                beside = path.with_name(f".{path.name}.partial")  # never half of one under its name
                with suppress(OSError):
                    path.rename(beside)
                shutil.rmtree(beside, ignore_errors=True)

    def latest_path(self) -> Path | None:
        """Return the folder of the checkpoint that was written last, or None."""
        path = resolve_pointer(self.folder, "latest")
        return path if path is not None and path.is_dir() else None

    def load_newest(self) -> Checkpoint | None:
        """Load the newest whole checkpoint to go on from; None if there never was one.

        Raises:
            CorruptCheckpointError: checkpoints exist or existed, and none of them is whole.
            OSError: a checkpoint may not be read, or the pending one could not be written (see `wait_until_written`).
        """
        self.wait_until_written()
        self._restore_replaced()
        tried: set[Path] = set()
        # A training may replace them meanwhile.
        while new := [path for path in list_checkpoints(self.folder) if path not in tried]:
            tried.add(new[-1])
            try:
                return load_checkpoint(new[-1], training=True)
            except CorruptCheckpointError as error:
                if new[-1].exists():
                    warn_once(f"{error}. The checkpoint before it is tried")
        if tried:
            raise CorruptCheckpointError(
                f"all checkpoints in {self.folder} are damaged. Move this folder away to start from the beginning"
            )
        check_pointers(self.folder)
        return None


def load_chosen(folder: Path, training: bool = False) -> Checkpoint:
    """Load the checkpoint that `choose_checkpoint` returns, only its model unless `training` is set; raises as that does."""
    while True:
        chosen = choose_checkpoint(folder)
        try:
            return replace(load_checkpoint(chosen.path, training), fallback=chosen.fallback)
        except CorruptCheckpointError:
            # It has changed since its sum was noted, or is replaced; `choose_checkpoint` knows by now.
            if choose_checkpoint(folder).path == chosen.path:
                raise


def load_checkpoint(path: Path, training: bool = True) -> Checkpoint:
    """Read and verify a checkpoint.

    Without `training`, its model is the moving average of the weights if there is one.

    Raises:
        CorruptCheckpointError: a file is missing, truncated or altered.
        PermissionError: a file may not be read.
    """
    state = read_verified_state(path, FILES if training else None, fresh=True)
    with _explain_damage(path):
        if not training:
            evaluated = AVERAGE if AVERAGE in state["sha256"] else MODEL
            return Checkpoint(path, state, None, read_tensors(path / evaluated))
        tensors = {name: read_tensors(path / name) for name in FILES if name in state["sha256"]}
        return Checkpoint(path, state, None, tensors[MODEL], tensors[TRAINING], tensors.get(AVERAGE))


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Read the tensors of a file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is no file of tensors.
        MemoryError: it does not fit into the free memory.
        OSError: it cannot be read.
    """
    with add_path_to_errors(path), open_file(path) as file:
        size, free = os.fstat(file.fileno()).st_size, free_memory()
        if size > free:
            raise MemoryError(f"{path} has {size / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB of memory are free")
    with _open_tensors(path, "pt") as tensors:
        content: dict[str, Tensor] = tensors.get_tensors()
        return content


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file of tensors; raises as `read_tensors` does."""
    with _open_tensors(path) as tensors:
        return tensors.metadata() or {}


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Read the shapes of the tensors of a file, by name; raises as `read_tensors` does."""
    with _open_tensors(path) as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - it is no dict


@contextmanager
def _open_tensors(path: Path, framework: str = "np") -> Iterator[Any]:
    """Open a file of tensors; one that is longer or shorter than its header says is damaged.

    So the size of the file bounds that of its tensors.
    """
    open_file(path).close()  # it is a file, and not one that is waited for
    try:
        with safe_open(path, framework, backend="pread") as tensors:
            yield tensors
    except (SafetensorError, RuntimeError) as error:  # of PyTorch: a type of half a byte
        raise CorruptFileError(f"{path} is damaged: {error}") from error


def advise_on_disk(error: Exception) -> str:
    """Return a sentence on what to do about a run's disk, after a message on a failed write; empty: nothing is known."""
    advice = {
        errno.ENOSPC: "Free some space there",
        errno.EDQUOT: "Free some of your space there",
        errno.EFBIG: "Raise the limit of file sizes (ulimit -f)",
        errno.EROFS: "Make its disk writable",
    }.get(getattr(error, "errno", None) or 0)
    return f". {advice}" if advice else ""


def _write_tensors(path: Path, tensors: "dict[str, Tensor]") -> str:
    """Write a file of tensors, sync it to the disk, and return its sha256.

    Raises:
        OSError: it could not be written.
    """
    path.touch()
    mode = path.stat().st_mode  # as the umask has it; safetensors writes for the owner alone
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # it has the number of the system's error in its text alone
        if not (number := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    path.chmod(mode)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
