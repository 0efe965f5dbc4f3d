"""Signals: work that must be saved is asked to stop, everything else ends at once.

The first signal asks. A clearly later one insists. This module is imported first, so its imports are cheap.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

SAME_SECONDS = 3.0
END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
RESUME_ADVICE = ". Run the same command to resume"  # after what was saved


class StopSignal:
    """The request to stop that signals have made. Calling it returns whether a signal has arrived.

    One Ctrl-C or SIGTERM often arrives several times. The terminal or systemd signals every process, and the parent
    passes the signal on. A killed parent sends it once for each of its threads (PR_SET_PDEATHSIG). Signals within
    `SAME_SECONDS` of the first therefore count as one.

    Attributes:
        number: number of the first signal; None: none has arrived.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._first = 0.0

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number is not None

    def is_second_request(self, number: int) -> bool:
        """Record a signal, and return whether it insists: the process must end without a checkpoint."""
        now = time.monotonic()
        if self.number is None:
            self.number, self._first = number, now
        return now - self._first >= SAME_SECONDS

    def handle_signal(self, number: int) -> bool:
        """Record a signal in a signal handler, and return whether it insists.

        Raises:
            StopRequested: the signal came within `interruptible`.
        """
        if self.is_second_request(number):
            return True
        if _is_interruptible:
            global _is_requested
            _is_requested = True
            raise StopRequested
        return False


class TrainingInterrupted(Exception):
    """A stop of training that was requested; a checkpoint was saved first."""


class StopRequested(BaseException):
    """Raised when a signal comes within `interruptible`, where nothing needs to be saved."""


_is_interruptible = _is_requested = False
_ending = StopSignal()  # of `end_at_once`


@contextmanager
def interruptible_section() -> Iterator[None]:
    """Mark code in which nothing needs to be saved: a signal raises `StopRequested` in it at once.

    It is meant for counting a corpus or for a validation. They may take longer than anyone waits for a process to end
    (Prefect: 30 s). Python ignores what is raised while it deletes an object, so it is raised again at the end.
    """
    global _is_interruptible, _is_requested
    _is_interruptible, _is_requested = True, False
    try:
        yield
        end_interruptible()
    finally:
        _is_interruptible = False


def end_interruptible() -> None:
    """End `interruptible` early: from now on there is something to save.

    Raises:
        StopRequested: a signal came within it, and Python ignored what it raised.
    """
    global _is_interruptible
    was_interruptible, _is_interruptible = _is_interruptible, False
    if was_interruptible and _is_requested:
        raise StopRequested


@contextmanager
def signals_end_process() -> Iterator[None]:
    """Let SIGINT and SIGTERM end this process at once, as they do before Python handles them.

    It is meant for waits for other ranks before a step. They happen outside of Python, where no handler runs, and
    torchrun would wait for this rank. Only the main thread may handle signals; in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class AbandonedError(Exception):
    """Raised when nobody waits for an answer any more."""


_IS_GONE: ContextVar[Callable[[], bool] | None] = ContextVar("is_gone", default=None)


@contextmanager
def abandon_when(is_gone: Callable[[], bool]) -> Iterator[None]:
    """Let long work in this thread end with `AbandonedError` at its next `check_abandoned` once `is_gone()` is true."""
    token = _IS_GONE.set(is_gone)
    try:
        yield
    finally:
        _IS_GONE.reset(token)


def check_abandoned() -> None:
    """Raise Abandoned if nobody waits for this work any more. Long loops call it."""
    if (is_gone := _IS_GONE.get()) is not None and is_gone():
        raise AbandonedError


class Interrupt(KeyboardInterrupt):
    """Raised when a signal ends a command.

    Args:
        number: number of the signal.
        words: what became of the work; may be empty.
    """

    def __init__(self, number: int, words: str = "") -> None:
        super().__init__(number)
        self.number, self.words = number, words


def end_at_once() -> None:
    """Let SIGINT and SIGTERM raise Interrupt from now on, wherever this process is.

    Python may lose an exception that is raised while C code calls Python, as in an import. The process therefore exits
    without a message if a second signal comes `SAME_SECONDS` later or more, or if it still runs after `END_SECONDS`.
    """
    global _ending
    _ending = stop = StopSignal()

    def handler(number: int, _: object) -> None:
        was_requested = stop()
        if stop.is_second_request(number):
            os._exit(128 + number)
        if not was_requested:
            signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
            signal.setitimer(signal.ITIMER_REAL, END_SECONDS)
            raise Interrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    # Python removes its signal handlers before its exit, which is slow on a busy machine. SIGALRM would then kill it.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


@contextmanager
def postponed_signals() -> Iterator[StopSignal]:
    """Turn SIGINT and SIGTERM into a request to stop, which training honours after its step.

    Yields:
        The request. A signal that insists raises Interrupt.

    Raises:
        Interrupt: the request stopped the work, or another rank's request did. It holds the message of the work's
            exception.
    """
    stop = StopSignal()

    def handler(number: int, _: object) -> None:
        if stop.handle_signal(number):
            raise Interrupt(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if _ending.number is not None:  # and what it raised was lost
            raise Interrupt(_ending.number)
        yield stop
    except Exception as error:
        if stop.number is None and not isinstance(error, TrainingInterrupted):
            raise
        raise Interrupt(stop.number or signal.SIGTERM, f"{error}{RESUME_ADVICE}") from error
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let Linux send a signal to this process when the thread that started it ends. Other systems do nothing."""
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_running(process: int) -> bool:
    """Return whether a process of this user runs, or waits for its parent to take notice of its end."""
    with suppress(OSError):
        os.kill(process, 0)
        return True
    return False


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Do as `die_with_parent`. If the parent, given by its process id, has already ended, send the signal now."""
    die_with_parent(number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
