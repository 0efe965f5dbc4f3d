"""The list of runs: a row for each run, kept until one of its files changes.

A request waits half a second for changes, once the rows are known. If a folder has thousands of runs, it gets the rows of
the last look, and the next look goes on behind it. Only rows older than `_FRESH_SECONDS` make it wait for longer.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from data.filesystem import stamp_file
from pipeline.console import format_error
from pipeline.reporting.report import (
    OWN_OPTIONS,
    EvaluationStatus,
    evaluation_status,
    find_nearest_preset,
    flat_presets,
)
from pipeline.reporting.run_state import RunState, count_parameters, damaged_state, determine_state, read_settings
from pipeline.run.files import NOTES, RunNotes, read_notes
from pipeline.run.run_directory import LATEST_FIRST, RunFolder
from pipeline.web.runs import ServedRuns

_WAIT_SECONDS, _FRESH_SECONDS, _LONG_WAIT_SECONDS = 0.5, 5.0, 20.0


@dataclass
class RunRow:
    """A row of the list of runs.

    Attributes:
        name: name of the run.
        state: its progress.
        evaluation: its evaluation, without the large parts that a row does not show.
        notes: its note, tags, and whether it is archived.
        preset: the preset with the fewest other options; empty if the configuration cannot be read.
        changed: options that differ from the preset, by dotted key.
        corpus: kind and place of the source.
        parameters: number of parameters of the checkpoint; None: unknown.
    """

    name: str
    state: RunState
    evaluation: EvaluationStatus
    notes: RunNotes = field(default_factory=RunNotes)
    preset: str = ""
    changed: dict[str, Any] = field(default_factory=dict)
    corpus: str = ""
    parameters: int | None = None

    def read_option(self, key: str) -> Any:
        """Return an option of the run; None: it has no such option."""
        return self.changed.get(key, flat_presets().get(self.preset, {}).get(key))

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        facts = state_facts(self.name, self.state) | asdict(self.notes)
        result = self.evaluation.result
        facts["headline"] = asdict(result.headline) | {"split": result.split} if result else None
        facts["alone"] = result.alone.value if result else None  # without memory, by which models are compared
        facts |= {"warnings": self.evaluation.warnings, "stale": self.evaluation.is_stale}
        return facts | {"preset": self.preset, "corpus": self.corpus, "parameters": self.parameters}


def state_facts(name: str, state: RunState) -> dict[str, Any]:
    """Return the state of a run as JSON values."""
    return {"run": name, **asdict(state), "running": state.running, "changed": state.changed.isoformat()}


def make_row(folder: RunFolder) -> RunRow:
    """Return the row of a run. For a damaged run it holds a warning, so that the others are still listed."""
    try:
        row = RunRow(folder.path.name, determine_state(folder), evaluation_status(folder))
        settings = read_settings(folder)
    except Exception as error:  # whatever a stranger's files hold
        return RunRow(folder.path.name, damaged_state(folder), EvaluationStatus(None, [format_error(error)]))
    if result := row.evaluation.result:
        row.evaluation.result = replace(result, breakdown=None, baselines=[], not_beaten=[], iem=None)
    if "model.kind" in settings:
        row.preset, changed = find_nearest_preset(settings)
        row.changed = {each.key: each.now for each in changed}
    row.corpus = " ".join(str(settings[key]) for key in ("source.kind", "source.path") if settings.get(key))
    row.parameters = count_parameters(folder)
    try:
        row.notes = read_notes(folder.path)
    except (OSError, ValueError) as error:
        row.evaluation.warnings.append(format_error(error))
    return row


def list_varying_options(rows: Sequence[RunRow]) -> list[str]:
    """Return the keys of the options that have several values among the runs that have them."""
    presets = [flat_presets()[name] for name in {row.preset for row in rows} if name]
    keys = {key for flat in presets for key in flat if len({str(each.get(key)) for each in presets}) > 1}
    keys |= {key for row in rows for key in row.changed}
    values = {key: {str(value) for row in rows if (value := row.read_option(key)) is not None} for key in keys}
    return sorted(key for key in keys if len(values[key]) > 1 and key not in OWN_OPTIONS)


def rows_to_json(rows: Sequence[RunRow]) -> list[dict[str, Any]]:
    """Return the rows as JSON values, each with the options that vary among them."""
    keys = list_varying_options(rows)
    return [row.to_json() | {"options": {key: row.read_option(key) for key in keys}} for row in rows]


def encode_json(value: Any) -> str:
    """Return a line of JSON, in which infinity and what is not a number are null: a browser would refuse them."""
    try:
        return json.dumps(value, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_replace_infinite(value)) + "\n"


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_infinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunListing:
    """A cache of the rows of runs."""

    def __init__(self, runs: ServedRuns) -> None:
        self._runs, self._lock = runs, Lock()
        self._rows: dict[Path, tuple[Any, RunRow]] = {}
        self._reading: Future[tuple[list[RunRow], list[str]]] | None = None
        self._last: tuple[list[RunRow], list[str]] | None = None
        self._looked_at = 0.0  # when the last look began
        self._json: tuple[list[RunRow], str] | None = None

    def list_rows(self) -> tuple[list[RunRow], list[str]]:
        """Return the rows, the run that changed last first, and the names of links to folders elsewhere."""
        with self._lock:
            if self._reading is None or self._reading.done():
                self._reading = Future()
                Thread(target=self._read_rows, args=(self._reading,), daemon=True, name="listing").start()
            reading, last = self._reading, self._last
            is_fresh = time.monotonic() - self._looked_at < _FRESH_SECONDS
        try:
            return reading.result(None if last is None else _WAIT_SECONDS if is_fresh else _LONG_WAIT_SECONDS)
        except TimeoutError:
            if last is None or reading.done():
                raise
            return last

    def to_json(self) -> str:
        """Return the rows as JSON, which is written again only if one has changed: pages ask for it every few seconds."""
        rows, _ = self.list_rows()
        known = self._json
        if known is None or known[0] is not rows:
            self._json = known = rows, encode_json(rows_to_json(rows))
        return known[1]

    def _read_rows(self, reading: "Future[tuple[list[RunRow], list[str]]]") -> None:
        began = time.monotonic()
        try:
            folders, elsewhere = self._runs.list_folders()
            rows = sorted(map(self.get_row, folders), key=lambda row: row.state.changed, reverse=True)
            for gone in self._rows.keys() - {folder.path for folder in folders}:
                del self._rows[gone]
            if self._last is None or elsewhere != self._last[1] or list(map(id, rows)) != list(map(id, self._last[0])):
                self._last = rows, elsewhere
            self._looked_at = began
            reading.set_result(self._last)
        except BaseException as error:
            reading.set_exception(error)

    def get_row(self, folder: RunFolder) -> RunRow:
        """Return the row of a run."""
        now = (stamp_run(folder.path), folder.lock_holder())  # before reading: a later change is noticed next time
        was, row = self._rows.get(folder.path, (None, None))
        if row is None or was != now:
            row = make_row(folder)
            self._rows[folder.path] = (now, row)
        return row


def stamp_run(run: Path) -> tuple[tuple[int, ...] | None, ...]:
    """Return device, inode, size and times of the files that a run's row depends on; None for a missing file."""
    return tuple(_stamp_or_none(path) for path in _list_row_files(os.fspath(run)))


def _list_row_files(run: str) -> Iterator[str]:
    """Yield the files that a row is made of: texts, not `Path`s, since there are tens of thousands."""
    yield from (f"{run}/{name}" for name in ("config.yaml", "evaluation.json", "corpus.json", NOTES))
    for phase in LATEST_FIRST:
        checkpoints = f"{run}/{phase}/checkpoints"
        yield from (f"{run}/{phase}/metrics.jsonl", f"{checkpoints}/best", f"{checkpoints}/latest")
        for name in sorted(_list_names(checkpoints)):
            if name.startswith("step-"):
                yield from (f"{checkpoints}/{name}/{file}" for file in sorted(_list_names(f"{checkpoints}/{name}")))


def _list_names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _stamp_or_none(path: str) -> tuple[int, ...] | None:
    try:
        return tuple(stamp_file(path))
    except OSError:
        return None
