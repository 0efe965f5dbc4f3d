"""The state and metrics of runs, read from their folders only. No model is opened, and nothing is written."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, cast

import yaml

from data.filesystem import CorruptFileError, add_path_to_errors, open_file, read_yaml
from pipeline.config import PHASES, Phase, PhaseOptions, flatten_tree
from pipeline.run.checkpoints import read_position, read_shapes, read_state, resolve_pointer
from pipeline.run.metrics import Position, Record, parse_record, read_metrics
from pipeline.run.run_directory import LATEST_FIRST, RunFolder

_TAIL = 1 << 16  # bytes at the end of a metrics file that are searched
_BLOCK = 1 << 20
_KEPT = 64  # files of metrics that are kept in memory


@dataclass
class RunState:
    """The progress of a run.

    Attributes:
        word: training, pretrain done, finished, stopped, in use, not trained, or damaged.
        phase: the phase that is or was last trained; None: none yet.
        step: its step. If no process trains it: the step of its latest checkpoint, from which it resumes.
        share: share of the phase that is done, from 0 to 1.
        left: estimated seconds of training left in the phase; None: unknown.
        training: bits per token of the last steps; None: there are none.
        validation: bits per token of the last validation; None: there is none.
        holder: description of the process that holds the run; None: no process does.
        changed: when its metrics, or else its configuration, were last written.
        metrics: newest value of every metric of the phase.
    """

    word: str
    phase: str | None = None
    step: int = 0
    share: float = 0.0
    left: float | None = None
    training: float | None = None
    validation: float | None = None
    holder: str | None = None
    changed: datetime = field(kw_only=True)
    metrics: Record = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Return whether a process holds the run."""
        return self.holder is not None


_ALMOST = 0.9  # share of a phase whose metrics count without a checkpoint, which was deleted then


def determine_state(folder: RunFolder) -> RunState:
    """Return the progress of a run."""
    written = [
        (status.st_mtime, phase)
        for phase in LATEST_FIRST
        if (status := status_of(folder.phase_folder(phase) / "metrics.jsonl"))
    ]
    holder = folder.lock_holder()
    if not written:
        when = _time_of_change(folder.path / "config.yaml")
        return RunState("in use" if holder else "not trained", holder=holder, changed=when)
    seconds, phase = max(written) if holder else written[0]  # a copied run has no meaningful times
    saved = _finite_numbers(read_position(folder.phase_folder(phase) / "checkpoints"))
    # A training in progress is at the step of its metrics. A stopped one resumes from its checkpoint, though it went further.
    most = math.inf if holder else saved.get("step", 0)
    last = _newest_metrics(folder.phase_folder(phase) / "metrics.jsonl", most)
    if saved and (not holder or saved["step"] > last.get("step", 0)):
        last |= saved
    share = _share_done(folder, phase, last)
    done = f"{phase} done" if phase == "pretrain" else "finished"
    return RunState(
        word="training" if holder else done if share >= 1 else "stopped",
        phase=phase,
        step=int(last.get("step", 0)),
        share=share,
        left=(1 / share - 1) * last.get("seconds", 0.0) if 0 < share < 1 else None,
        training=last.get("bits_per_token"),
        validation=last.get("validation/bits_per_token"),
        holder=holder,
        changed=datetime.fromtimestamp(seconds),
        metrics=last,
    )


def damaged_state(folder: RunFolder) -> RunState:
    """Return the state of a run whose files cannot be read, at the step of its last checkpoint."""
    saved = {phase: read_position(folder.phase_folder(phase) / "checkpoints") for phase in LATEST_FIRST}
    phase = next((phase for phase, position in saved.items() if position), None)
    step = int(_finite_numbers(saved[phase]).get("step", 0)) if phase else 0
    return RunState("damaged", phase, step, changed=_time_of_change(folder.path))


def _time_of_change(path: Path) -> datetime:
    status = status_of(path)
    return datetime.fromtimestamp(status.st_mtime if status else 0)


def _share_done(folder: RunFolder, phase: Phase, last: Record) -> float:
    """Return the share of a phase that is done; 1 if it ended early because it no longer improved."""
    options = read_settings(folder)
    settings = {name: options.get(f"{phase}.{name}") for name in _LIMITS}
    limits = PhaseOptions(**_finite_numbers(settings))  # type: ignore[arg-type]
    if limits.patience and (path := resolve_pointer(folder.phase_folder(phase) / "checkpoints", "latest")):
        with suppress(OSError, ValueError, TypeError):
            if read_state(path).get("stale", 0) >= limits.patience:
                return 1.0
    return Position(int(last.get("step", 0)), last.get("seconds", 0.0), last.get("epoch", 0.0)).progress(limits)


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file; None: it does not exist or cannot be accessed."""
    with suppress(OSError):
        return path.stat()
    return None


def _newest_metrics(path: Path, most: float) -> Record:
    """Return the newest value of each metric in the last lines of a metrics.jsonl, up to a step, and of its validations."""
    with add_path_to_errors(path), open_file(path, path.parent.parent) as file:
        begin = max(0, os.fstat(file.fileno()).st_size - _TAIL)
        file.seek(begin)
        first, *lines = file.read(2 * _TAIL).split(b"\n")[:-1] or [b""]  # the last one may be incomplete
        newest: Record = {}
        for line in lines if begin else [first, *lines]:
            record = _finite_numbers(parse_record(line, path)) if line else {}
            newest |= record if record.get("step", 0) <= most else {}
        if begin and not any(name.startswith("validation/") for name in newest):
            validation = _find_validation(file, begin + len(first), most)
            newest |= {name: value for name, value in validation.items() if name.startswith("validation/")}
    return newest


def _find_validation(file: IO[bytes], end: int, most: float) -> Record:
    """Return the last record of a validation, up to a step, that ends at a place in a metrics.jsonl; empty without one."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        first, *lines = file.read(end - begin).split(b"\n")
        for line in reversed(lines if begin else [first, *lines]):
            if b'"validation/' in line:
                with suppress(CorruptFileError):
                    record = _finite_numbers(parse_record(line, Path("metrics.jsonl")))
                    if record["step"] <= most:
                        return record
        end = min(begin + len(first), end - 1) if begin else 0
    return {}


def _finite_numbers(record: Any) -> Record:
    """Return the finite numbers of a record, whoever wrote it."""
    pairs = record.items() if isinstance(record, dict) else ()
    return {name: value for name, value in pairs if type(value) in (int, float) and math.isfinite(value)}


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the options in a run's config.yaml by dotted key, unchecked because a check would take long.

    Raises:
        ValueError: config.yaml is damaged.
        OSError: config.yaml cannot be read.
    """
    status = status_of(folder.path / "config.yaml")
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns) if status else None
    return _read_settings(folder.path / "config.yaml", stamp)


_LIMITS = ("steps", "seconds", "epochs", "patience")


@lru_cache(512)
def _read_settings(path: Path, stamp: tuple[int, ...] | None) -> dict[str, Any]:
    try:
        tree = yaml.load(read_yaml(path, path.parent), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        pairs = flatten_tree(tree) if isinstance(tree, dict) else ()
        return {str(key): _as_option(value) for key, value in pairs}
    except (RecursionError, yaml.YAMLError) as error:
        raise CorruptFileError(f"{path} is not valid YAML: {error}") from error


def _as_option(value: Any) -> Any:
    """Return a value that JSON can hold; others, such as a date or infinity, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_as_option(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


_records: dict[Path, tuple[tuple[int, int], list[Record]]] = {}  # the newest of each file: they are large


def _read_records(path: Path, changed: int, size: int) -> list[Record]:
    known = _records.pop(path, None)
    if known is None or known[0] != (changed, size):
        records = (_finite_numbers(record) for record in read_metrics(path))
        known = (changed, size), [record for record in records if "step" in record]
    _records[path] = known
    for oldest in list(_records)[:-_KEPT]:
        _records.pop(oldest, None)
    return known[1]


def count_parameters(folder: RunFolder) -> int | None:
    """Count the parameters of the present checkpoint; return None if it cannot be read."""
    with suppress(OSError, ValueError):
        shapes = read_shapes(folder.select_checkpoint().path / "model.safetensors")
        return sum(math.prod(shape) for shape in shapes.values())
    return None


def read_history(folder: RunFolder) -> dict[str, Path] | None:
    """Return the folders of the phases behind the model of a run; None if its configuration cannot be read."""
    with suppress(OSError, ValueError):
        return folder.phase_history(folder.load_options())
    return None


def phase_metrics(
    folder: RunFolder,
    history: Mapping[str, Path] | None = None,
    attempt: Callable[[Callable[[], list[Record]]], list[Record] | None] = lambda read: read(),
) -> dict[str, list[Record]]:
    """Return the metrics of each phase that has any, in the order of training.

    If the run is not being trained, they end at the newest checkpoint, since training would resume there.

    Args:
        folder: folder of the run.
        history: folders of the phases behind the model, see `RunFolder.phase_history`; None: those of this run.
        attempt: called with a function that reads the metrics of a phase; returns None if they cannot be read.
    """
    folders = history or {phase: folder.phase_folder(phase) for phase in LATEST_FIRST}
    metrics, is_held = dict[str, list[Record]](), folder.lock_holder() is not None
    for phase in sorted(folders, key=lambda name: PHASES.index(name.split()[0])):
        path = folders[phase] / "metrics.jsonl"
        if not (status := status_of(path)):
            continue
        if records := attempt(partial(_read_records, path, status.st_ctime_ns, status.st_size)):
            saved = {} if is_held else read_position(folders[phase] / "checkpoints")
            metrics[phase] = [each for each in records if each.get("step", 0.0) <= saved.get("step", math.inf)]
    metrics = {phase: records for phase, records in metrics.items() if records}
    if metrics and not is_held and not read_position(folders[phase := [*metrics][-1]] / "checkpoints"):
        begun, last = RunFolder(folders[phase].parent), metrics[phase][-1]
        with suppress(OSError, ValueError):  # of a configuration that cannot be read, which is said elsewhere
            if _share_done(begun, cast(Phase, phase.split()[0]), last) < _ALMOST:
                del metrics[phase]  # it was killed before its first checkpoint, so there is no such model
    return metrics
