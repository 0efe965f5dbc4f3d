"""Metrics of a phase under one set of names: metrics.jsonl, TensorBoard, and whoever listens, such as a line of progress."""

import json
import logging
import math
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from data.checked import MANY, DamagedFile, named, open_file, open_own, parse_json, read_bytes
from data.durable import is_still, make_folders, write_atomically
from pipeline.options import PhaseOptions
from pipeline.shown import duration

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
    """How far a phase is; `flops` are model FLOPs, see `haed.system.Objective.flops`."""

    step: int = 0
    seconds: float = 0.0
    epochs: float = 0.0
    flops: float = 0.0

    def progress(self, limits: PhaseOptions) -> float:
        """Share of the phase that is done: that of the limit which is nearest, or 0 without limits."""
        pairs = ((self.step, limits.steps), (self.seconds, limits.seconds), (self.epochs, limits.epochs))
        return min(1.0, max((done / limit for done, limit in pairs if limit), default=0.0))


class _Log:
    """A file that is only appended to. What the disk does not take is kept, and written with what comes next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = open_own(path, os.O_RDWR | os.O_CREAT)
        self._file = self._opened.fileno()
        self._end, self._pending = os.lseek(self._file, 0, os.SEEK_END), b""

    def write(self, content: bytes) -> None:
        """Adds something, which `flush` brings into the file."""
        self._pending += content

    def flush(self) -> None:
        """Raises OSError if the disk does not take it all."""
        while self._pending:  # a full disk may take a part of a line
            with named(self.path):
                taken = os.pwrite(self._file, self._pending, self._end)
            self._end, self._pending = self._end + taken, self._pending[taken:]

    def sync(self) -> None:
        """The same, to the disk itself."""
        self.flush()
        with named(self.path):
            os.fsync(self._file)

    def is_there(self) -> bool:
        """Whether its path still names the file."""
        return is_still(self.path, self._file)

    def content(self) -> bytes:
        """All that was written, also where the file was removed meanwhile."""
        return os.pread(self._file, self._end, 0) + self._pending

    def close(self) -> None:
        """Closes the file, whatever is pending."""
        self._opened.close()


class _Board:
    """TensorBoard's file of a phase. Its own writer has a thread, which a full disk ends with a traceback."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        make_folders(folder, within=folder.parent)
        self.log = _Log(folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}")
        self._records = RecordWriter(self.log)
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))  # later ones no longer count

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = {name: value for name, value in record.items() if name != "step" and isinstance(value, int | float)}
        shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(step=record["step"], summary=Summary(value=shown)))

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


class Metrics:
    """Appends metrics of a phase to its logs.

    The append-only logs are cut back to the checkpoint's step when a phase goes on, so no line is doubled. What the disk
    does not take is kept, and written with the next line.

    Args:
        folder: the phase's folder.
        step: step from which the phase goes on; later lines are dropped.
        listeners: called with every record, and after every step with where the phase is.
    """

    def __init__(self, folder: Path, step: int, listeners: Sequence[Listener] = ()) -> None:
        make_folders(folder, within=folder.parent)
        path = folder / "metrics.jsonl"
        _cut_back(path, step)
        self._lines, self._board = _Log(path), _Board(folder / "tensorboard", step)
        self._listeners = listeners

    def write(self, record: Record) -> None:
        """Adds one record; it must have a `step`."""
        self._lines.write(as_line(record))
        self._board.write(record)
        try:
            self._lines.flush()
            self._board.log.flush()
        except OSError as error:
            log.warning("metrics of step %d are kept for later: %s", record["step"], error)
        self._tell(record)

    def content(self) -> bytes:
        """What metrics.jsonl holds, also where it was removed meanwhile."""
        return self._lines.content()

    def moved(self, position: Position) -> None:
        """Tells the listeners where the phase is."""
        self._tell({"step": position.step, "seconds": position.seconds, "epoch": position.epochs})

    def _tell(self, record: Record) -> None:
        for listener in self._listeners:
            listener(record)

    def close(self) -> None:
        """Closes the logs, synced to the disk.

        Raises:
            OSError: the disk does not take the last lines.
        """
        try:
            self._sync()
        finally:
            self._lines.close()
            self._board.log.close()

    def sync(self) -> None:
        """Brings what was written to the disk, before a checkpoint says so; a file that was removed meanwhile is written again.

        Raises:
            OSError: the disk does not take it.
        """
        if not self._lines.is_there():
            log.warning("%s was removed or replaced while it was written: it is written again", self._lines.path)
            content = self._lines.content()
            make_folders(self._lines.path.parent, within=self._lines.path.parent.parent)
            write_atomically(self._lines.path, content)
            self._lines.close()
            self._lines = _Log(self._lines.path)
        self._sync()

    def _sync(self) -> None:
        self._lines.sync()
        try:
            self._board.log.flush()
        except OSError as error:
            log.warning("metrics for TensorBoard are kept for later: %s", error)


def as_line(record: Record) -> bytes:
    """A record as it stands in a file: JSON whose last entry is the CRC-32 of what is before it."""
    begin = json.dumps(record).encode()[:-1]
    return begin + _END % zlib.crc32(begin) + b"\n"


def parse(line: bytes, path: Path, number: int | None = None) -> Record:
    """The record of a line.

    Args:
        line: without its end.
        path: of the file, named in errors.
        number: of the line, likewise.

    Raises:
        DamagedFile: it is not what was written.
    """
    where = f"{path}{'' if number is None else f', line {number}'}"
    begin = line[:_CUT]
    if line[_CUT:] != _END % zlib.crc32(begin):
        raise DamagedFile(
            f"{where} is damaged or was edited: its crc32 is of another line; remove the line to go without it"
        )
    found = parse_json(begin + b"}", where)
    values = found.values() if isinstance(found, dict) else ()
    if "step" not in found or not all(value is None or isinstance(value, int | float) for value in values):
        raise DamagedFile(f"{where} is damaged: no record with a step and figures; remove the line to go without it")
    return cast(Record, found)


def read(path: Path) -> list[Record]:
    """The records of a metrics.jsonl, which lies in the folder of a phase; an unfinished last line is left out.

    Raises:
        DamagedFile: a line, which is named, or the file is damaged.
        OSError: it cannot be read.
    """
    return [parse(line, path, number) for number, line in enumerate(_lines(path), 1)]


def _lines(path: Path) -> list[bytes]:
    """The lines of a file that are finished; none where there is no file."""
    try:
        *lines, last = read_bytes(path, MANY, path.parent.parent).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    is_begun = last[:1] in (b"", b"{") and len(last) < _LONGEST and not _FINISHED.search(last)
    return lines if is_begun else [*lines, last]  # which is damaged, or lacks but its end


class Tail:
    """The records that another process adds to a metrics.jsonl, which it may cut back first."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._read = path, 0, 0
        self._before = set(_lines(path))

    def records(self) -> list[Record]:
        """Those that came since the last call."""
        try:
            with open_file(self._path, self._path.parent.parent) as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode, self._read = inode, 0
                file.seek(self._read)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        self._read += sum(len(line) + 1 for line in lines)
        return [parse(line, self._path) for line in lines if line not in self._before]


def _cut_back(path: Path, step: int) -> None:
    """Drops records after `step`, which may be damaged: they were not synced when the machine lost its power.

    Raises:
        DamagedFile: one before that is damaged.
    """
    kept, damaged = [], None
    for number, line in enumerate(_lines(path), 1):
        try:
            record = parse(line, path, number)
        except DamagedFile as error:
            damaged = damaged or error
            continue
        if record["step"] <= step:
            if damaged is not None:
                raise damaged
            kept.append(line + b"\n")
    if damaged is not None:
        log.warning("%s; it is left out, with what comes after it", damaged)
    if path.exists():
        write_atomically(path, b"".join(kept))


def validated(step: float, record: Record) -> str:
    """A line on the validation in a record, else nothing."""
    found = {name.removeprefix("validation/"): value for name, value in record.items() if "validation/" in name}
    words = [f"{name.replace('_per_', '/').replace('_', ' ')} {value:.4f}" for name, value in found.items()]
    return f"step {step:,}: validation {', '.join(words)}" if words else ""


class Pace:
    """How long the rest takes, by how long what was done since the first call took."""

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None

    def __call__(self, done: float) -> list[str]:
        """The share that is done, in percent, and then the time that is left, once that can be told."""
        now = time.monotonic()
        self._began = self._began or (now, done)
        began, before = self._began
        known = before < done < 1
        return [f"{done:.0%}", *([f"{duration((1 - done) * (now - began) / (done - before))} left"] if known else [])]


class Status:
    """Where a phase is: a listener that keeps the newest figures, and makes a line of them."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        self._phase, self._limits, self._pace = phase, limits, Pace()
        self._shown: Record = {"step": 0}

    def __call__(self, record: Record) -> None:
        """Takes a metrics record, or a part of one."""
        self._shown |= record
        self._pace(self.progress())

    def progress(self) -> float:
        """Share of the phase that is done, in [0, 1]."""
        shown = self._shown
        return Position(int(shown["step"]), shown.get("seconds", 0.0), shown.get("epoch", 0.0)).progress(self._limits)

    def line(self) -> str:
        """Share done and time left, then step, newest metrics and rate."""
        return " · ".join([*self._pace(self.progress()), self.figures()])

    def figures(self) -> str:
        """The same without time."""
        shown = self._shown
        metrics = [f"{name} {shown[name]:.3f}" for name in SHOWN if name in shown]
        return " · ".join([self._phase, f"step {shown['step']:,}", *metrics])


class Counter:
    """Logs now and then how many of several things are done, and how long the rest takes.

    Args:
        what: is being done.
        total: number of things.
        unit: what they are called.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit, self._pace = what, total, unit, Pace()
        self._done, self._last = 0, time.monotonic()
        self._pace(0.0)

    def add(self, number: int = 1) -> None:
        """So many more are done."""
        self._done += number
        words, now = self._pace(min(1.0, self._done / max(1, self._total))), time.monotonic()
        if now - self._last >= QUIET_SECONDS:
            self._last = now
            done = f"{self._done:,} of {self._total:,} {self._unit}"
            log.info("%s", " · ".join([*words, self._what, done]))


class Progress(Status):
    """A line that moves on a terminal, and a quiet line every few seconds elsewhere."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        super().__init__(phase, limits)
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._every = TERMINAL_SECONDS if self._terminal else QUIET_SECONDS
        self._last = -math.inf  # the first metrics are shown at once

    def __call__(self, record: Record) -> None:
        """Takes a record, and shows the line if it is time."""
        super().__call__(record)
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        if self._terminal:
            bar, columns = "━" * round(_BAR * self.progress()), 80
            with suppress(OSError, ValueError):
                columns = os.get_terminal_size(sys.stderr.fileno()).columns
            line = f"{bar:╌<{_BAR}} {self.line()}"[: columns - 1]  # one that wraps would stay
            with suppress(OSError):  # a terminal that is gone ends no training
                print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            log.info("%s", self.line())

    def close(self) -> None:
        """Leaves the terminal's line."""
        if self._terminal:
            with suppress(OSError):
                print(file=sys.stderr)
