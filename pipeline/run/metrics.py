"""Metrics of a phase under one set of names, for metrics.jsonl, trackers such as TensorBoard, and listeners."""

import json
import logging
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeGuard

from data.filesystem import (
    MANY,
    CorruptFileError,
    add_path_to_errors,
    is_still,
    make_folders,
    open_file,
    open_own,
    parse_json,
    write_atomically,
)
from pipeline.config import PhaseOptions
from pipeline.console import format_duration

log = logging.getLogger(__name__)
Record = dict[str, float]  # figures by name; `step` is one of them
Listener = Callable[[Record], None]
SHOWN = ("loss", "iem", "bits_per_token", "validation/bits_per_token", "validation/iem", "steps_per_second")
TERMINAL_SECONDS, QUIET_SECONDS = 0.5, 10.0
_END, _CUT = b', "crc32": "%08x"}', -22  # of a line, and where that begins
_FINISHED = re.compile(rb', "crc32": "[0-9a-f]{8}"}')
_LONGEST = 1 << 16  # bytes of a line
_BAR = 20  # columns of a terminal


@dataclass
class Position:
    """Position in a phase; `flops` are model FLOPs, see `haed.base.Objective.estimate_flops`."""

    step: int = 0
    seconds: float = 0.0
    epochs: float = 0.0
    flops: float = 0.0

    def progress(self, limits: PhaseOptions) -> float:
        """Return the share of the phase that is done, by the nearest limit; 0 without limits."""
        pairs = ((self.step, limits.steps), (self.seconds, limits.seconds), (self.epochs, limits.epochs))
        return min(1.0, max((done / limit for done, limit in pairs if limit), default=0.0))


class AppendOnlyLog:
    """An append-only file; bytes that the disk does not take are kept, and written with the next ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = open_own(path, os.O_RDWR | os.O_CREAT)
        self._file = self._opened.fileno()
        self._end, self._pending = os.lseek(self._file, 0, os.SEEK_END), b""

    def write(self, content: bytes) -> None:
        """Add bytes, which `flush` writes to the file."""
        self._pending += content

    def flush(self) -> None:
        """Write the pending bytes; raise OSError if the disk does not take them all."""
        while self._pending:  # a full disk may take a part of a line
            with add_path_to_errors(self.path):
                taken = os.pwrite(self._file, self._pending, self._end)
            self._end, self._pending = self._end + taken, self._pending[taken:]

    def sync_to_disk(self) -> None:
        """Flush the file and sync it to the disk."""
        self.flush()
        with add_path_to_errors(self.path):
            os.fsync(self._file)

    def is_there(self) -> bool:
        """Return whether the path still names this file."""
        return is_still(self.path, self._file)

    def read_all(self) -> bytes:
        """Return all bytes written so far, even if the file was removed."""
        return os.pread(self._file, self._end, 0) + self._pending

    def close(self) -> None:
        """Close the file; pending bytes are dropped."""
        self._opened.close()


@dataclass
class RunSummary:
    """Options and results of a run, which a tracker shows beside its curves.

    Attributes:
        options: every option that is set, by its dotted key.
        metrics: final metrics of the checkpoint: those of its validation, and of an evaluation such as `test/bits_per_char`.
        checkpoint: digest of the checkpoint, empty before there is one.
        evaluated: digest of the checkpoint that was evaluated, if the metrics have its results; else empty.
        samples: samples of the checkpoint, as Markdown.
        report: the report, if it is new.
    """

    options: dict[str, str | int | float | bool]
    metrics: Record = field(default_factory=dict)
    step: int = 0
    checkpoint: str = ""
    evaluated: str = ""
    samples: list[str] = field(default_factory=list)
    report: Path | None = None


class Metrics:
    """Writer of a phase's metrics to its append-only logs.

    When a phase is resumed, its logs are cut back to the checkpoint's step, so no record is doubled. Bytes that the
    disk does not take are kept, and written with the next record.

    Args:
        folder: the phase's folder.
        step: step from which the phase is resumed; later records are dropped.
        trackers: called with every record, before it is sure to be on the disk.
        listeners: called with every record afterwards, and after every step with the position.
        validated: step of the last validation before it; later validations, which are repeated, are dropped.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        trackers: Sequence[Listener] = (),
        listeners: Sequence[Listener] = (),
        validated: float = math.inf,
    ) -> None:
        make_folders(folder, within=folder.parent)
        path = folder / "metrics.jsonl"
        _cut_back(path, step, validated)
        self._lines, self._trackers, self._listeners = AppendOnlyLog(path), trackers, listeners

    def write_record(self, record: Record) -> None:
        """Write one record, which must have a `step`."""
        self._lines.write(encode_record(record))
        for write_record in self._trackers:
            write_record(record)
        try:
            self._lines.flush()
        except OSError as error:
            kept = f"metrics of step {record['step']:,} are kept in memory until they can be written"
            log.warning("%s: %s: %s", self._lines.path, kept, error.strerror or error)
        self._notify_listeners(record)

    def read_all(self) -> bytes:
        """Return the content of metrics.jsonl, even if the file was removed."""
        return self._lines.read_all()

    def report_position(self, position: Position) -> None:
        """Report the position of the phase to the listeners."""
        self._notify_listeners({"step": position.step, "seconds": position.seconds, "epoch": position.epochs})

    def _notify_listeners(self, record: Record) -> None:
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        """Sync the logs to the disk and close them.

        Raises:
            OSError: the disk does not take the last records.
        """
        try:
            self._lines.sync_to_disk()
        finally:
            self._lines.close()

    def sync_to_disk(self) -> None:
        """Sync the log to the disk before a checkpoint relies on it; a removed metrics.jsonl is written again.

        Raises:
            OSError: the disk does not take it.
        """
        if not self._lines.is_there():
            log.warning("%s was removed or replaced during training. It is written again", self._lines.path)
            content = self._lines.read_all()
            make_folders(self._lines.path.parent, within=self._lines.path.parent.parent)
            write_atomically(self._lines.path, content)
            self._lines.close()
            self._lines = AppendOnlyLog(self._lines.path)
        self._lines.sync_to_disk()


def encode_record(record: Record) -> bytes:
    """Return a record as a line of metrics.jsonl: JSON whose last entry is the CRC-32 of everything before it."""
    begin = json.dumps(record).encode()[:-1]
    return begin + _END % zlib.crc32(begin) + b"\n"


def parse_record(line: bytes, path: Path, number: int | None = None) -> Record:
    """Return the record of a line of metrics.jsonl, without its end; errors name the file and the number of the line.

    Raises:
        CorruptFileError: the line is not as it was written.
    """
    where = f"{path}{'' if number is None else f', line {number}'}"
    begin, advice = line[:_CUT], "Delete the line to continue without it"
    if line[_CUT:] != _END % zlib.crc32(begin):
        raise CorruptFileError(f"{where} is damaged or was edited: its crc32 does not match. {advice}")
    record: Record = parse_json(begin + b"}", where)  # JSON that ends with a brace is an object
    step, values = record.get("step"), record.values()
    if not _is_number(step) or not 0 <= step < 2**63 or not all(value is None or _is_number(value) for value in values):
        raise CorruptFileError(f"{where} is damaged: it has no step or no figures. {advice}")
    return record


def _is_number(value: object) -> TypeGuard[float]:
    """Return whether a value of JSON is a number that a float can hold, if only as infinite or NaN."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a phase's metrics.jsonl, without an unfinished last line.

    Raises:
        CorruptFileError: a line, named in the message, or the file is damaged.
        OSError: the file cannot be read.
    """
    return [parse_record(line, path, number) for number, line in enumerate(_read_lines(path, MANY), 1)]


def read_newest_step(path: Path) -> int:
    """Return the highest step in a phase's metrics.jsonl, 0 without one. Damaged lines are passed over."""
    steps = [0.0]
    for line in _read_lines(path):
        with suppress(CorruptFileError):
            steps.append(parse_record(line, path)["step"])
    return int(max(steps))


def _read_lines(path: Path, most: float = math.inf) -> Iterator[bytes]:
    """Yield the finished lines of a file of at most so many bytes; none if there is no file."""
    with suppress(FileNotFoundError, NotADirectoryError), open_file(path, path.parent.parent) as file:
        if os.fstat(file.fileno()).st_size > most:
            advice = "A training can still be resumed; a higher log_steps writes less"
            raise CorruptFileError(f"{path} has more than {most:,} bytes, too many to be shown. {advice}")
        for line in iter(partial(file.readline, _LONGEST), b""):
            is_begun = line[:1] == b"{" and len(line) < _LONGEST and not _FINISHED.search(line)
            if line[-1:] == b"\n" or not is_begun:  # else it is damaged, or lacks but its end
                yield line.removesuffix(b"\n")


def _cut_back(path: Path, step: int, validated: float) -> None:
    """Drop the records after `step`, which may be damaged: they were not synced if the machine lost power.

    Also drop validations after the step `validated`, which a checkpoint does not know, so they are repeated.

    Raises:
        CorruptFileError: a record up to `step` is damaged.
    """
    kept, damaged = [], None
    for number, line in enumerate(_read_lines(path), 1):
        try:
            record = parse_record(line, path, number)
        except CorruptFileError as error:
            damaged = damaged or error
            continue
        is_known = record["step"] <= validated or not any(name.startswith("validation/") for name in record)
        if record["step"] <= step:
            if damaged is not None:
                raise damaged
            if is_known:
                kept.append(line + b"\n")
    if damaged is not None:
        log.warning("%s. This line and the lines after it are ignored", damaged)
    if path.exists():
        write_atomically(path, b"".join(kept))


def format_validation(step: float, record: Record) -> str:
    """Return a line about the validation in a record; empty if there is none."""
    metrics = {name.removeprefix("validation/"): value for name, value in record.items() if "validation/" in name}
    words = [f"{name.replace('_per_', '/').replace('_', ' ')} {value:.4f}" for name, value in metrics.items()]
    return f"step {step:,}: validation {', '.join(words)}" if words else ""


class RemainingTime:
    """Estimate of the remaining time, from the time taken since the first call."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def __call__(self, completed: float) -> list[str]:
        """Return the share done in percent, and the remaining time once it can be estimated."""
        now = time.monotonic()
        self._began = self._began or (now, completed)
        began, before = self._began
        shown = [f"{completed:.0%}"]
        if before < completed < 1:
            shown.append(f"{format_duration((1 - completed) * (now - began) / (completed - before))} left")
        return shown


class PhaseStatus:
    """Listener that keeps the newest metrics of a phase and formats them as a status line."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        self._phase, self._limits, self._pace = phase, limits, RemainingTime()
        self._shown: Record = {"step": 0}

    def __call__(self, record: Record) -> None:
        """Take a metrics record, or a part of one."""
        self._shown |= record
        self._pace(self.progress())

    def progress(self) -> float:
        """Return the share of the phase that is done, in [0, 1]."""
        shown = self._shown
        return Position(int(shown["step"]), shown.get("seconds", 0.0), shown.get("epoch", 0.0)).progress(self._limits)

    def line(self) -> str:
        """Return share done and time left, then step, newest metrics and rate."""
        return " · ".join([*self._pace(self.progress()), self.format_metrics()])

    def format_metrics(self) -> str:
        """Return phase, step, newest metrics and rate, without share and time."""
        shown = self._shown
        metrics = [f"{name} {shown[name]:.3f}" for name in SHOWN if name in shown]
        return " · ".join([self._phase, f"step {shown['step']:,}", *metrics])


class StatusLine:
    """Line that shows progress: in place on a terminal, as a log line every few seconds elsewhere.

    Args:
        begin: time of the last line, at first; -∞ shows the first line at once.

    Attributes:
        is_shown: a line is on the terminal.
    """

    def __init__(self, begin: float = -math.inf) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._last, self.is_shown = begin, False

    def show(self, make_line: Callable[[], str], share: float, now: bool = False) -> None:
        """Show the line, with a bar of the share that is done on a terminal, if it is time or `now` is set.

        A bar that is shown always ends whole.
        """
        time_now, now = time.monotonic(), now or (share == 1 and self.is_shown)
        if not now and time_now - self._last < (TERMINAL_SECONDS if self._terminal else QUIET_SECONDS):
            return
        self._last = time_now
        if not self._terminal:
            log.info("%s", make_line())
            return
        self.is_shown, columns = True, 80
        with suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.stderr.fileno()).columns
        line = f"{'━' * round(_BAR * share):╌<{_BAR}} {make_line()}"[: columns - 1]  # one that wraps would stay
        with suppress(OSError):  # a terminal that is gone ends no training
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal's line."""
        if self.is_shown:
            with suppress(OSError):
                print(file=sys.stderr)


class ProgressCounter:
    """Counter that shows how many of `total` things are done, and the remaining time, as a status line."""

    def __init__(self, title: str, total: int, unit: str) -> None:
        self._title, self._total, self._unit, self._pace = title, total, unit, RemainingTime()
        self._done, self._status = 0, StatusLine(time.monotonic())

    def add_done(self, number: int = 1) -> None:
        """Count this many more as done, and show the line if it is time; leave it after the last one.

        The remaining time is estimated from the first call on. What is prepared before it happens once.
        """
        self._done += number
        share = min(1.0, self._done / max(1, self._total))
        line = [*self._pace(share), self._title, f"{self._done:,} of {self._total:,} {self._unit}"]
        self._status.show(lambda: " · ".join(line), share)
        if share == 1:
            self._status.close()


class Progress(PhaseStatus):
    """Listener that shows the status line of a phase."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        super().__init__(phase, limits)
        self._status = StatusLine()
        self.close = self._status.close

    def __call__(self, record: Record) -> None:
        """Take a record, and show the line if it is time."""
        super().__call__(record)
        self._status.show(self.line, self.progress())
