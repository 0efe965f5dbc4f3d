"""Metrics of a phase under one set of names: metrics.jsonl, TensorBoard, and a line of progress."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
SHOWN = ("loss", "iem", "iem_accuracy", "bits_per_token", "validation/bits_per_token")
QUIET_SECONDS = 10.0


class Metrics:
    """Appends metrics of a phase to its logs.

    The append-only logs are cut back to the checkpoint's step when a phase goes on, so no line is doubled. What the disk
    does not take is kept, and written with the next line.

    Args:
        folder: the phase's folder.
        step: step from which the phase goes on; later lines are dropped.
        listener: called with every record, for a live view elsewhere.
    """

    def __init__(self, folder: Path, step: int, listener: Callable[[dict[str, Any]], None] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _cut_back(path, step)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._end, self._pending = os.lseek(self._file, 0, os.SEEK_END), b""
        self._board: SummaryWriter | None = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._listener = listener

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
        if self._listener is not None:
            self._listener(record)

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


def _cut_back(path: Path, step: int) -> None:
    """Drops records after `step`."""
    from pipeline.files import write_atomically

    if path.is_file():
        kept = [record for record in read(path) if record.get("step", 0) <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


class Progress:
    """A line that moves on a terminal, and a quiet line every few seconds elsewhere."""

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._shown: dict[str, float] = {}
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._began: tuple[float, float] | None = None

    def update(self, step: int, progress: float, record: dict[str, Any] | None, every: float = QUIET_SECONDS) -> None:
        """Shows where the phase is: `progress` in [0, 1] of its limit, and the newest metrics if there are new ones."""
        now = time.monotonic()
        self._began = self._began or (now, progress)
        if record is not None:
            self._shown |= {name: record[name] for name in (*SHOWN, "steps_per_second") if name in record}
        if now - self._last < (0.5 if self._terminal else every):
            return
        self._last = now
        gained = progress - self._began[1]
        left = (1 - progress) * (now - self._began[0]) / gained if gained > 0 else float("inf")
        values = "  ".join(f"{name} {value:.3f}" for name, value in self._shown.items())
        remaining = f"{left:.0f} s left" if left < 1e6 else "time left unknown"
        line = f"{self._phase}  step {step}  {progress:.0%}  {values}  {remaining}"
        if self._terminal:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            log.info("%s", line)

    def close(self) -> None:
        """Leaves the terminal's line."""
        if self._terminal:
            print(file=sys.stderr)
