"""A cache of opened runs, so that only the first question to a run waits for its model.

One thread opens all runs and answers all questions: PyTorch uses the cores it is given by itself, and the server stays
responsive. A run is reopened when its present checkpoint, configuration, corpus or index has changed.

A question whose client has gone is dropped before it reaches the thread, or stopped at its next `check_abandoned`.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from data.filesystem import stamp_file
from pipeline.console import warn_once
from pipeline.run.run_directory import CORPUS, RunFolder
from pipeline.signals import AbandonedError, abandon_when, check_abandoned
from pipeline.web.corpus_examples import ExampleFinder

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.config import Options
    from pipeline.run.opened import Run

T = TypeVar("T")
KEPT, MOST_WAITING = 3, 16
_STOPPING = "the server is stopping. Start it again and repeat the question"


class ServerBusyError(RuntimeError):
    """Raised when too many questions wait, or when the server shuts down."""


@dataclass
class LoadedRun:
    """An opened run in the cache.

    Attributes:
        run: the run.
        stamp: identifies the files that it was opened from.
        warnings: warnings that were logged when it was opened.
    """

    run: "Run"
    stamp: Any
    warnings: list[str]

    @cached_property
    def corpus_examples(self) -> ExampleFinder:
        """Return the examples of the chunks in its index, read at first use."""
        try:
            return ExampleFinder.from_split(self.run.folder.open_corpus(), self.run.probe.index.meta.split)
        except (OSError, ValueError) as error:  # its shards are missing or were replaced
            return ExampleFinder(f"none, since {error}", [], [], [])


@dataclass
class QueryResult(Generic[T]):
    """The answer of a run.

    Attributes:
        value: the answer.
        run: name of the run.
        phase: phase of the checkpoint that answered.
        step: step of that checkpoint.
        checkpoint: digest of that checkpoint.
        seconds: duration of the question, without opening the run.
        opening: seconds that opening the run took; 0: it was open.
        warnings: warnings that were logged when the run was opened, and during the question.
    """

    value: T
    run: str
    phase: str
    step: int
    checkpoint: str
    seconds: float
    opening: float
    warnings: list[str]


class _WarningCollector(logging.Handler):
    def __init__(self, thread: int) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.addFilter(lambda record: record.thread == thread)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class ModelCache:
    """A cache of runs, which are opened when they are first asked. The last few are kept.

    Args:
        keep: maximum number of open runs.
        overrides: options to change in each run, such as its device; see `RunFolder.load_options`.

    Attributes:
        opened: number of times a run was opened.
        begun: number of questions that reached a model.
        waiting: number of questions that wait or are being answered.
    """

    def __init__(self, keep: int = KEPT, overrides: tuple[str, ...] = ()) -> None:
        self.opened = self.begun = self.waiting = 0
        self._keep, self._overrides = keep, overrides
        self._kept: OrderedDict[Path, LoadedRun] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "warm")
        self._pending: dict[threading.Event, asyncio.Future[Any] | Future[Any]] = {}
        self._closed = False
        self._warnings = _WarningCollector(self._thread.submit(threading.get_ident).result())
        for room in ("pipeline", "data", "haed"):
            logging.getLogger(room).addHandler(self._warnings)

    async def ask_run(self, folder: RunFolder, question: Callable[[LoadedRun], T]) -> QueryResult[T]:
        """Ask a run a question. If this task is cancelled, the question is dropped or stopped.

        Args:
            folder: folder of the run.
            question: called with the opened run, in the thread of all questions.

        Raises:
            ServerBusyError: too many questions wait, or the server shuts down.
            FileNotFoundError: nothing was trained in the run.
            ValueError: a file of the run is damaged or was changed. The question may raise further exceptions.
        """
        self._check_room()
        self.waiting += 1
        future, gone = self._submit(folder, question)
        answer = self._pending[gone] = asyncio.wrap_future(future)
        try:
            return await answer
        except (AbandonedError, asyncio.CancelledError):
            if self._closed:
                raise ServerBusyError(_STOPPING) from None
            raise
        finally:
            gone.set()
            del self._pending[gone]
            self.waiting -= 1

    def _check_room(self) -> None:
        if self._closed:
            raise ServerBusyError(_STOPPING)
        if self.waiting >= MOST_WAITING:
            raise ServerBusyError(f"{self.waiting} questions are waiting. Try again in a moment")

    def _submit(
        self, folder: RunFolder, question: Callable[[LoadedRun], T]
    ) -> "tuple[Future[QueryResult[T]], threading.Event]":
        """Queue a question. Return its future answer, and an event that stops it once nobody waits for it."""
        gone = threading.Event()

        def work() -> QueryResult[T]:
            with abandon_when(gone.is_set):
                return self._answer_question(folder, question)

        return self._thread.submit(work), gone

    def drop_questions(self) -> None:
        """Drop all questions for shutdown: refuse new ones, drop those that wait, stop the one being answered."""
        self._closed = True
        for gone, answer in list(self._pending.items()):
            gone.set()
            answer.cancel()

    def close(self, seconds: float) -> bool:
        """Drop all questions as `drop_questions` does, and return whether the thread becomes idle within `seconds`.

        If it does, the process can exit normally.
        """
        self.drop_questions()
        resting = self._thread.submit(lambda: None)
        with suppress(TimeoutError):
            resting.result(seconds)
        return resting.done()

    def prepare_run(self, folder: RunFolder) -> None:
        """Open a run that will soon be asked, unless questions wait. Errors are left to the question to report."""
        if not (self.waiting or self._closed):
            self.start_work(folder, _load_lazy_parts)

    def start_work(self, folder: RunFolder, work: Callable[[LoadedRun], T]) -> "Future[QueryResult[T]]":
        """Start work with a run that goes on if the client leaves; shutdown drops it.

        Raises:
            ServerBusyError: too many questions wait, or the server shuts down.
        """
        self._check_room()
        future, gone = self._submit(folder, work)
        self._pending[gone] = future
        future.add_done_callback(lambda _: self._pending.pop(gone, None))
        return future

    def present_digest(self, folder: RunFolder) -> str:
        """Return the digest of the checkpoint of a run that answers its questions."""
        return folder.select_checkpoint(self._load_options(folder).evaluate.stage).digest

    def _load_options(self, folder: RunFolder) -> "Options":
        return folder.load_options(self._overrides, "neighbours")

    def _answer_question(self, folder: RunFolder, question: Callable[[LoadedRun], T]) -> QueryResult[T]:
        began = time.perf_counter()
        before = self.opened
        loaded = self._load_run(folder)
        begun, run = time.perf_counter(), loaded.run
        check_abandoned()  # opening may have taken long; the run stays open
        self._warnings.lines.clear()
        self.begun += question is not _load_lazy_parts
        value = question(loaded)
        warnings = list(dict.fromkeys([*loaded.warnings, *self._warnings.lines]))
        opening = begun - began if self.opened > before else 0.0
        seconds = time.perf_counter() - begun
        return QueryResult(value, folder.path.name, run.phase, run.step, run.digest, seconds, opening, warnings)

    def _load_run(self, folder: RunFolder) -> LoadedRun:
        for path in [path for path in self._kept if not path.is_dir()]:  # deleted or renamed
            del self._kept[path]
        kept = self._kept.pop(folder.path, None)  # released before another is opened, unless still valid
        stage = kept.run.options.evaluate.stage if kept else self._load_options(folder).evaluate.stage
        stamp = (folder.select_checkpoint(stage).digest, *_stamp_files(folder.path))
        if kept is None or kept.stamp != stamp:
            from pipeline.run.device import release_memory
            from pipeline.run.opened import Run

            kept = None
            while len(self._kept) >= self._keep:
                self._kept.popitem(last=False)
            release_memory()
            self.opened += 1
            self._warnings.lines.clear()
            warn_once.cache_clear()  # what was said of another run, or of this one before
            kept = LoadedRun(Run(folder, self._load_options(folder)), stamp, list(self._warnings.lines))
        self._kept[folder.path] = kept
        return kept


def _load_lazy_parts(opened: LoadedRun) -> None:
    opened.run.likelihood  # noqa: B018
    with suppress(ValueError, OSError):
        opened.run.probe.index  # noqa: B018
        opened.corpus_examples  # noqa: B018


def _stamp_files(folder: Path) -> list[Any]:
    """Return stamps of the files of an opened run besides checkpoints, which also change when a file is replaced."""
    paths = [folder / "config.yaml", folder / CORPUS, *sorted(folder.glob("index/**/[!.]*"))]
    return [(path, *stamp_file(path)) for path in paths if path.is_file()]
