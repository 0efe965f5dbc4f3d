"""Metrics of a phase under one set of names: metrics.jsonl, TensorBoard, and whoever listens, such as a line of progress."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.options import PhaseOptions

log = logging.getLogger(__name__)
Listener = Callable[[dict[str, Any]], None]
SHOWN = ("loss", "iem", "bits_per_token", "validation/bits_per_token", "steps_per_second")
TERMINAL_SECONDS, QUIET_SECONDS = 0.5, 10.0


@dataclass
class Position:
    """How far a phase is; `flops` are model FLOPs, see `haed.flops`."""

    step: int = 0
    seconds: float = 0.0
    epochs: float = 0.0
    flops: float = 0.0

    def progress(self, limits: PhaseOptions) -> float:
        """Share of the phase that is done: that of the limit which is nearest, or 0 without limits."""
        pairs = ((self.step, limits.steps), (self.seconds, limits.seconds), (self.epochs, limits.epochs))
        return min(1.0, max((done / limit for done, limit in pairs if limit), default=0.0))


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
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _cut_back(path, step)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._end, self._pending = os.lseek(self._file, 0, os.SEEK_END), b""
        self._board: SummaryWriter | None = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._listeners = listeners

    def write(self, record: dict[str, Any]) -> None:
        """Adds one record; it must have a `step`."""
        self._pending += (json.dumps(record) + "\n").encode()
        try:
            self._flush()
        except OSError as error:
            log.warning("metrics of step %d are kept for later: %s", record["step"], error)
        try:
            for name, value in record.items():
                if self._board is not None and name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, record["step"])
        except OSError as error:
            log.warning("no more metrics for TensorBoard: %s", error)
            self._board = None
        self._tell(record)

    def moved(self, position: Position) -> None:
        """Tells the listeners where the phase is."""
        self._tell({"step": position.step, "seconds": position.seconds, "epoch": position.epochs})

    def _tell(self, record: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(record)

    def _flush(self) -> None:
        while self._pending:  # a full disk may take a part of a line
            taken = os.pwrite(self._file, self._pending, self._end)
            self._end, self._pending = self._end + taken, self._pending[taken:]

    def close(self) -> None:
        """Closes the logs, synced to the disk.

        Raises:
            OSError: the disk does not take the last lines.
        """
        try:
            self.sync()
        finally:
            os.close(self._file)
            if self._board is not None:
                self._board.close()

    def sync(self) -> None:
        """Brings what was written to the disk, before a checkpoint says so.

        Raises:
            OSError: the disk does not take it.
        """
        self._flush()
        os.fsync(self._file)
        try:
            if self._board is not None:
                self._board.flush()
        except OSError as error:
            log.warning("no more metrics for TensorBoard: %s", error)
            self._board = None


def read(path: Path) -> list[dict[str, Any]]:
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

    def records(self) -> list[dict[str, Any]]:
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
    from pipeline.files import write_atomically

    if path.is_file():
        kept = [record for record in read(path) if record.get("step", 0) <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


class Status:
    """Where a phase is: a listener that keeps the newest figures, and makes a line of them."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        self._phase, self._limits = phase, limits
        self._shown: dict[str, Any] = {"step": 0}
        self._began: tuple[float, float] | None = None

    def __call__(self, record: dict[str, Any]) -> None:
        """Takes a metrics record, or a part of one."""
        self._shown |= record
        self._began = self._began or (time.monotonic(), self.progress())

    def progress(self) -> float:
        """Share of the phase that is done, in [0, 1]."""
        shown = self._shown
        return Position(shown["step"], shown.get("seconds", 0.0), shown.get("epoch", 0.0)).progress(self._limits)

    def line(self) -> str:
        """Step, newest metrics, rate and time left."""
        shown, done = self._shown, self.progress()
        parts = [self._phase, f"step {shown['step']:,}", f"{done:.0%}"]
        parts += [f"{name} {shown[name]:.3f}" for name in SHOWN if name in shown]
        if self._began is not None and done > self._began[1]:
            left = (1 - done) * (time.monotonic() - self._began[0]) / (done - self._began[1])
            parts.append(f"{left:,.0f} s left")
        return " · ".join(parts)


class Progress(Status):
    """A line that moves on a terminal, and a quiet line every few seconds elsewhere."""

    def __init__(self, phase: str, limits: PhaseOptions) -> None:
        super().__init__(phase, limits)
        self._terminal = sys.stderr.isatty()
        self._every = TERMINAL_SECONDS if self._terminal else QUIET_SECONDS
        self._last = time.monotonic()

    def __call__(self, record: dict[str, Any]) -> None:
        """Takes a record, and shows the line if it is time."""
        super().__call__(record)
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        if self._terminal:
            print(f"\r\x1b[2K{self.line()}", end="", file=sys.stderr, flush=True)
        else:
            log.info("%s", self.line())

    def close(self) -> None:
        """Leaves the terminal's line."""
        if self._terminal:
            print(file=sys.stderr)
