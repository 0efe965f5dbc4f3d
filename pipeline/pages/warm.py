"""Opened runs that are kept, so that the first question to one alone waits for its model.

One thread opens and asks them all: PyTorch takes the cores it is given by itself, and whoever serves goes on serving. A run is
opened again when what it was opened from has changed: the present checkpoint, the configuration, the corpus, the index.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.pages.examples import Examples
from pipeline.run.folder import CORPUS, RunFolder

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.run.opened import Run

T = TypeVar("T")
KEPT, MOST_WAITING = 3, 16


class Busy(RuntimeError):
    """So many questions wait that another would not be answered soon."""


@dataclass
class Opened:
    """A run that is kept.

    Attributes:
        run: opened.
        stamp: of what it was opened from.
    """

    run: "Run"
    stamp: Any

    @cached_property
    def examples(self) -> Examples:
        """Where the chunks stand that its index has, read at first use."""
        try:
            return Examples.of_split(self.run.folder.corpus(), self.run.probe.index.meta.split)
        except (OSError, ValueError) as error:  # its shards are gone, or others
            return Examples(f"none, since {error}", [], [], [])


@dataclass
class Answer(Generic[T]):
    """What a run answered.

    Attributes:
        value: the answer.
        run: its name.
        phase: of the checkpoint that answered.
        step: likewise.
        checkpoint: its digest.
        seconds: that the question took, without those in which the run was opened.
        opening: seconds in which it was; 0: it was open.
        remarks: warnings of the log on the question.
    """

    value: T
    run: str
    phase: str
    step: int
    checkpoint: str
    seconds: float
    opening: float
    remarks: list[str]


class _Said(logging.Handler):
    """What a thread logs that people ought to know."""

    def __init__(self, thread: int) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.addFilter(lambda record: record.thread == thread)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Warm:
    """Runs, opened when they are asked, of which the last few are kept.

    Args:
        keep: so many.
        overrides: options to change in each, such as its device; see `RunFolder.options`.

    Attributes:
        opened: how often one was opened.
    """

    def __init__(self, keep: int = KEPT, overrides: tuple[str, ...] = ()) -> None:
        self.opened = 0
        self._keep, self._overrides = keep, overrides
        self._kept: OrderedDict[Path, Opened] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "warm")
        self._waiting = 0
        self._said = _Said(self._thread.submit(threading.get_ident).result())
        for room in ("pipeline", "data", "haed"):
            logging.getLogger(room).addHandler(self._said)

    async def ask(self, folder: RunFolder, question: Callable[[Opened], T]) -> Answer[T]:
        """Asks a run.

        Args:
            folder: of the run.
            question: called with it, in the thread of all questions.

        Raises:
            Busy: too many others wait.
            FileNotFoundError: nothing was trained in the run.
            ValueError: a file of it is damaged or was changed; and what the question raises.
        """
        if self._waiting >= MOST_WAITING:
            raise Busy(f"{self._waiting} questions wait already: ask again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, folder, question)
        finally:
            self._waiting -= 1

    def prepare(self, folder: RunFolder) -> None:
        """Opens a run that will be asked soon, unless others wait; whatever goes wrong, the question will meet again."""
        if not self._waiting:
            self._thread.submit(self._ask, folder, _read)

    def _ask(self, folder: RunFolder, question: Callable[[Opened], T]) -> Answer[T]:
        began = time.perf_counter()
        before = self.opened
        found = self._open(folder)
        begun, run = time.perf_counter(), found.run
        self._said.lines.clear()
        value = question(found)
        opening = begun - began if self.opened > before else 0.0
        seconds = time.perf_counter() - begun
        return Answer(
            value, folder.path.name, run.phase, run.step, run.digest, seconds, opening, list(self._said.lines)
        )

    def _open(self, folder: RunFolder) -> Opened:
        kept = self._kept.pop(folder.path, None)  # let go before another is opened, unless it is still right
        stage = kept.run.options.evaluate.stage if kept else folder.options().evaluate.stage
        stamp = (folder.digest(stage), *_stamps(folder.path))
        if kept is None or kept.stamp != stamp:
            from pipeline.run.device import release_memory
            from pipeline.run.opened import Run

            kept = None
            while len(self._kept) >= self._keep:
                self._kept.popitem(last=False)
            release_memory()
            self.opened += 1
            kept = Opened(Run(folder, folder.options(self._overrides, "neighbours")), stamp)
        self._kept[folder.path] = kept
        return kept


def _read(opened: Opened) -> None:
    """What the first questions would wait for, too."""
    opened.run.likelihood  # noqa: B018
    with suppress(ValueError, OSError):
        opened.run.probe.index  # noqa: B018
        opened.examples  # noqa: B018


def _stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Size and time of the files beside checkpoints that an opened run has read."""
    paths = [folder / "config.yaml", folder / CORPUS, *sorted(folder.glob("index/**/[!.]*"))]
    found = [(path, path.stat()) for path in paths if path.is_file()]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in found]
