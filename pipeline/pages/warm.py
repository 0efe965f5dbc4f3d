"""Opened runs that are kept, so that the first question to one alone waits for its model.

One thread opens and asks them all: PyTorch takes the cores it is given by itself, and whoever serves goes on serving. A run is
opened again when what it was opened from has changed: the present checkpoint, the configuration, the corpus, the index.

A question whose asker is gone is dropped before it reaches the thread, or stopped where its work looks (`check_asker`).
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.pages.examples import Examples
from pipeline.run.folder import CORPUS, RunFolder
from pipeline.stopping import Abandoned, asked_by, check_asker

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.run.opened import Run

T = TypeVar("T")
KEPT, MOST_WAITING = 3, 16
_LOOKS, _LOOK_SECONDS = 40, 0.05  # for a place, longer than it takes to see that an asker is gone


class _Thread:
    """One thread that does one piece of work after another, and keeps no process from ending."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="warm", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int | None:
        return self._thread.ident

    def submit(self, work: Callable[[], T]) -> "tuple[Future[T], threading.Event]":
        """Has work done in turn, unless nobody wants it any more by then.

        Args:
            work: to be done.

        Returns:
            The result, and an event to set once nobody wants it.
        """
        future: Future[T] = Future()
        gone = threading.Event()

        def run() -> None:
            if gone.is_set():
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                with asked_by(gone.is_set):
                    future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future, gone

    def _run(self) -> None:
        while True:
            self._work.get()()


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
        begun: questions that reached a model.
        waiting: questions that are asked now, the one that is answered included.
    """

    def __init__(self, keep: int = KEPT, overrides: tuple[str, ...] = ()) -> None:
        self.opened = self.begun = self.waiting = 0
        self._keep, self._overrides = keep, overrides
        self._kept: OrderedDict[Path, Opened] = OrderedDict()
        self._thread = _Thread()
        self._asked: dict[threading.Event, asyncio.Future[Any] | None] = {}
        self._closed = False
        self._said = _Said(self._thread.number or 0)
        for room in ("pipeline", "data", "haed"):
            logging.getLogger(room).addHandler(self._said)

    async def ask(self, folder: RunFolder, question: Callable[[Opened], T]) -> Answer[T]:
        """Asks a run. Cancelled, the question is dropped, or stopped if it is being answered.

        Args:
            folder: of the run.
            question: called with it, in the thread of all questions.

        Raises:
            Busy: too many others wait, or the server ends.
            FileNotFoundError: nothing was trained in the run.
            ValueError: a file of it is damaged or was changed; and what the question raises.
        """
        await self._place()
        self.waiting += 1
        future, gone = self._thread.submit(lambda: self._ask(folder, question))
        answer = self._asked[gone] = asyncio.wrap_future(future)
        try:
            return await answer
        except (Abandoned, asyncio.CancelledError):
            if self._closed:
                raise Busy("the server ends: start it again, and ask then") from None
            raise
        finally:
            gone.set()
            del self._asked[gone]
            self.waiting -= 1

    async def _place(self) -> None:
        """Waits a moment for a place among the questions: those whose askers have just left make room.

        Raises:
            Busy: there is none, or the server ends.
        """
        for _ in range(_LOOKS):
            if self._closed or self.waiting < MOST_WAITING:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if self._closed:
            raise Busy("the server ends: start it again, and ask then")
        if self.waiting >= MOST_WAITING:
            raise Busy(f"{self.waiting} questions wait already: ask again in a moment")

    def drop(self) -> None:
        """Takes no more questions, drops those that wait, and asks the one that is answered to stop: the server ends."""
        self._closed = True
        for gone, answer in list(self._asked.items()):
            gone.set()
            if answer is not None and not answer.get_loop().is_closed():
                answer.cancel()

    def close(self, seconds: float) -> bool:
        """The same; whether the thread then rests within so many seconds, so that this process can end in good order."""
        self.drop()
        resting, _ = self._thread.submit(lambda: None)
        with suppress(TimeoutError):
            resting.result(seconds)
        return resting.done()

    def prepare(self, folder: RunFolder) -> None:
        """Opens a run that will be asked soon, unless others wait; whatever goes wrong, the question will meet again."""
        if not (self.waiting or self._closed):
            future, gone = self._thread.submit(lambda: self._ask(folder, _read))
            self._asked[gone] = None
            future.add_done_callback(lambda _: self._asked.pop(gone, None))

    def _ask(self, folder: RunFolder, question: Callable[[Opened], T]) -> Answer[T]:
        began = time.perf_counter()
        before = self.opened
        found = self._open(folder)
        begun, run = time.perf_counter(), found.run
        check_asker()  # opening a run may have taken long; the next question finds it open
        self._said.lines.clear()
        self.begun += question is not _read
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
