"""Metrics of a phase under one set of names: metrics.jsonl, TensorBoard, and whoever listens, such as a line of progress."""

import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.durable import naming, write_atomically
from pipeline.options import PhaseOptions
from pipeline.shown import duration

log = logging.getLogger(__name__)
Record = dict[str, float]  # figures by name; `step` is one of them
Listener = Callable[[Record], None]
SHOWN = ("loss", "iem", "bits_per_token", "validation/bits_per_token", "validation/iem", "steps_per_second")
TERMINAL_SECONDS, QUIET_SECONDS = 0.5, 10.0
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
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._end, self._pending = os.lseek(self._file, 0, os.SEEK_END), b""

    def write(self, content: bytes) -> None:
        """Adds something, which `flush` brings into the file."""
        self._pending += content

    def flush(self) -> None:
        """Raises OSError if the disk does not take it all."""
        while self._pending:  # a full disk may take a part of a line
            with naming(self._path):
                taken = os.pwrite(self._file, self._pending, self._end)
            self._end, self._pending = self._end + taken, self._pending[taken:]

    def sync(self) -> None:
        """The same, to the disk itself."""
        self.flush()
        with naming(self._path):
            os.fsync(self._file)

    def close(self) -> None:
        """Closes the file, whatever is pending."""
        os.close(self._file)


class _Board:
    """TensorBoard's file of a phase. Its own writer has a thread, which a full disk ends with a traceback."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
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
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _cut_back(path, step)
        self._lines, self._board = _Log(path), _Board(folder / "tensorboard", step)
        self._listeners = listeners

    def write(self, record: Record) -> None:
        """Adds one record; it must have a `step`."""
        self._lines.write((json.dumps(record) + "\n").encode())
        self._board.write(record)
        try:
            self._lines.flush()
            self._board.log.flush()
        except OSError as error:
            log.warning("metrics of step %d are kept for later: %s", record["step"], error)
        self._tell(record)

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
            self.sync()
        finally:
            self._lines.close()
            self._board.log.close()

    def sync(self) -> None:
        """Brings what was written to the disk, before a checkpoint says so.

        Raises:
            OSError: the disk does not take it.
        """
        self._lines.sync()
        try:
            self._board.log.flush()
        except OSError as error:
            log.warning("metrics for TensorBoard are kept for later: %s", error)


def read(path: Path) -> list[Record]:
    """The records of a metrics.jsonl; an unfinished last line is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


class Tail:
    """The records that another process adds to a metrics.jsonl, which it may cut back first."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._read = path, 0, 0
        self._before = set(path.read_bytes().splitlines()) if path.is_file() else set()

    def records(self) -> list[Record]:
        """Those that came since the last call."""
        try:
            with open(self._path, "rb") as file:
                if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                    self._inode, self._read = inode, 0
                file.seek(self._read)
                *lines, _ = file.read().split(b"\n")
        except FileNotFoundError:
            return []
        self._read += sum(len(line) + 1 for line in lines)
        return [json.loads(line) for line in lines if line not in self._before]


def _cut_back(path: Path, step: int) -> None:
    """Drops records after `step`."""
    if path.is_file():
        kept = [record for record in read(path) if record.get("step", 0) <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


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
