"""Which checkpoint of a phase is used: the best by validation if it is whole, else the newest whole one.

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
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, cast

from data.checked import RESULT, named, open_file, parse_json, read_bytes, stamp_file
from data.durable import write_atomically
from pipeline.run.saved import STATE, Saved, State, permitted, pointed, read_state, saved
from pipeline.run.tensors import read_metadata

log = logging.getLogger(__name__)
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
