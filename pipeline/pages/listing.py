"""The listing of runs, whose rows are cached until one of their files changes."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from data.checked import stamp_file
from pipeline.pages.details import EvaluationStatus
from pipeline.run.run_directory import PHASES, RunFolder

_MOST = 1 << 14  # maximum number of rows, one or two kB each

Stamps = tuple[tuple[str, tuple[int, ...] | None], ...]


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
            row["evaluated"] = _shorten_evaluation(row["evaluated"])
        with self._lock:
            self.made += was != now
            self._rows[folder.path] = (now, row)
            while len(self._rows) > _MOST:
                self._rows.popitem(last=False)
        return row


def _shorten_evaluation(evaluated: EvaluationStatus) -> EvaluationStatus:
    """Return an evaluation without the large parts that a row does not show."""
    if evaluated.found is None:
        return evaluated
    brief = replace(evaluated.found, breakdown=None, baselines=[], not_beaten=[], iem=None)
    return replace(evaluated, found=brief)


def stamp_run(run: Path) -> Stamps:
    """Return device, inode, size and times of the files that a run's row depends on; None for a missing file."""
    paths = [run / "config.yaml", run / "evaluation.json", run / "corpus.json"]
    for phase in PHASES:
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
