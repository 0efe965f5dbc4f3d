"""Checkpoints as they lie in a folder, without a look at their tensors: which there are, and which run one fits."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypedDict, cast

from data.checked import NOTE, RESULT, DamagedFile, parse_json, read_bytes, read_text, unsealed
from pipeline.kinds import is_of
from pipeline.options import Options
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
