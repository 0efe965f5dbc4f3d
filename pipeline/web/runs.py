"""The runs that pages show, the rows of their listing, and the files that are served of each."""

import csv
import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from data.filesystem import stamp_file
from pipeline.reporting.report import EvaluationStatus
from pipeline.reporting.run_state import phase_metrics
from pipeline.run.run_directory import LATEST_FIRST, RunFolder

_MOST = 1 << 14  # maximum number of rows, one or two kB each

Stamps = tuple[tuple[str, tuple[int, ...] | None], ...]


class NotFoundError(LookupError):
    """Raised when no run, or no file of a run, has the requested name."""


class ServedRuns:
    """The runs that pages show: those of a folder, or a single one.

    Args:
        place: folder of the runs, or of the single run.
        single: whether `place` is a single run.
    """

    def __init__(self, place: Path, single: bool = False) -> None:
        self.place, self.single = place.resolve(), single

    def list_folders(self) -> tuple[list[RunFolder], list[str]]:
        """Return the runs, sorted by name, and the names of links to folders elsewhere, which are not shown."""
        if self.single:
            return [RunFolder(self.place)], []
        folders, elsewhere = [], []
        for path in sorted(self.place.glob("*/config.yaml")):
            folder = path.parent
            if folder.name.startswith("."):
                continue
            if folder.resolve().parent == self.place:
                folders.append(RunFolder(folder))
            else:
                elsewhere.append(folder.name)
        return folders, elsewhere

    def find_folder(self, name: str) -> RunFolder:
        """Return the run of that name. The name is only compared, never used as a path.

        Raises:
            NotFoundError: no run has that name.
        """
        for folder in self.list_folders()[0]:
            if folder.path.name == name:
                return folder
        raise NotFoundError(f"there is no run {name!r} in {self.place}")


class RunListing:
    """A cache of the rows of runs, which keeps those used last.

    Args:
        make: computes the row of a run.

    Attributes:
        made: number of rows that were computed.
    """

    def __init__(self, make: Callable[[RunFolder], dict[str, Any]]) -> None:
        self._make, self._lock, self.made = make, Lock(), 0
        self._rows: OrderedDict[Path, tuple[Any, dict[str, Any]]] = OrderedDict()

    def get_row(self, folder: RunFolder) -> dict[str, Any]:
        """Return the row of a run."""
        now = (
            stamp_run(folder.path),
            folder.lock_holder(),
        )  # before reading: a change during it is noticed next time
        with self._lock:
            was, row = self._rows.pop(folder.path, (None, {}))
        if was != now:
            row = self._make(folder)
            row["evaluation"] = _shorten_evaluation(row["evaluation"])
        with self._lock:
            self.made += was != now
            self._rows[folder.path] = (now, row)
            while len(self._rows) > _MOST:
                self._rows.popitem(last=False)
        return row


def _shorten_evaluation(status: EvaluationStatus) -> EvaluationStatus:
    """Return an evaluation without the large parts that a row does not show."""
    if status.result is None:
        return status
    brief = replace(status.result, breakdown=None, baselines=[], not_beaten=[], iem=None)
    return replace(status, result=brief)


def stamp_run(run: Path) -> Stamps:
    """Return device, inode, size and times of the files that a run's row depends on; None for a missing file."""
    paths = [run / "config.yaml", run / "evaluation.json", run / "corpus.json"]
    for phase in LATEST_FIRST:
        paths += [run / phase / "metrics.jsonl", *_checkpoint_files(run / phase / "checkpoints")]
    return tuple((str(path), _stamp_or_none(path)) for path in paths)


def _checkpoint_files(folder: Path) -> Iterator[Path]:
    """Yield the files of the checkpoints in a folder, and the files that point to one."""
    yield from (folder / "best", folder / "latest")
    for name in sorted(_list_names(folder)):
        if name.startswith("step-"):
            yield from (folder / name / file for file in sorted(_list_names(folder / name)))


def _list_names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stamp_or_none(path: Path) -> tuple[int, ...] | None:
    try:
        return tuple(stamp_file(path))
    except OSError:
        return None


# Files of a run that are served, with descriptions. Files in `analysis/` are served as well.
FILES = {
    "report.html": "the report",
    "evaluation.json": "bits of the evaluated split",
    "samples.json": "samples of the report",
    "samples.png": "pictures, completed",
    "neighbours.png": "neighbours, drawn",
    "config.yaml": "complete configuration",
    "environment.json": "versions, commit, machine",
    **{f"{phase}/metrics.jsonl": f"metrics of {phase}" for phase in reversed(LATEST_FIRST)},
}


@dataclass
class ServedFile:
    """A file of a run that is served.

    Attributes:
        name: its name in the address.
        about: a short description.
        bytes: its size.
        path: its path on disk.
    """

    name: str
    about: str
    bytes: int
    path: Path


def list_served_files(folder: RunFolder) -> list[ServedFile]:
    """Return the files that are served of a run: `FILES` and those in `analysis/`.

    Links are left out, also those to other places within the run.
    """
    names = dict(FILES)
    for path in sorted((folder.path / "analysis").glob("*")):
        if not path.name.startswith("."):
            names[f"analysis/{path.name}"] = "an analysis"
    files, inside = [], folder.path.resolve()
    for name, about in names.items():
        path = (folder.path / name).resolve()
        if path.is_file() and path == inside / name:
            files.append(ServedFile(name, about, path.stat().st_size, path))
    return files


def metrics_csv(folder: RunFolder, phase: str) -> str:
    """Return the metrics of a phase as CSV with a column for each metric; only a line end without metrics."""
    records = phase_metrics(folder).get(phase, [])
    written = io.StringIO()
    table = csv.DictWriter(written, dict.fromkeys(name for record in records for name in record))
    table.writeheader()
    table.writerows(records)
    return written.getvalue()
