"""Signals: what has something to save is asked to stop, and everything else ends at once.

Of those that ask, the first counts, and one that comes clearly later insists. Importing this is cheap: it comes first.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SAME_SECONDS = 3.0
END_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_WATCH = "haed-parent"  # name of a thread


class Request:
    """What has been asked by signals so far; called, whether anything was.

    One Ctrl-C or SIGTERM often arrives several times: from the terminal or systemd, which signal every process, and from the
    parent that passes it on; and once for each thread of a parent that was killed (PR_SET_PDEATHSIG). Those within
    `SAME_SECONDS` of the first are therefore one.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self._first = 0.0

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self.number is not None

    def insists(self, number: int) -> bool:
        """Takes a signal; true if it does not want to wait for the checkpoint that the first one asked for."""
        now = time.monotonic()
        if self.number is None:
            self.number, self._first = number, now
        return now - self._first >= SAME_SECONDS

    def takes(self, number: int) -> bool:
        """The same, of a handler of signals.

        Raises:
            StopRequested: it came within `interruptible`.
        """
        if self.insists(number):
            return True
        if _is_interruptible:
            raise StopRequested
        return False


class StopRequested(BaseException):
    """A signal came within `interruptible`, where nothing has to be saved."""


_is_interruptible = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Says that there is nothing to save within: a signal that asks to stop raises `StopRequested` there at once.

    Counting a corpus, or a validation, may take longer than anybody waits for an end (Prefect: 30 s).
    """
    global _is_interruptible
    _is_interruptible = True
    try:
        yield
    finally:
        _is_interruptible = False


def keep_whole() -> None:
    """Ends `interruptible` early: from now on there is something to save."""
    global _is_interruptible
    _is_interruptible = False


class Interrupt(KeyboardInterrupt):
    """A signal ends a command; the words, if there are any, say what became of its work."""

    def __init__(self, number: int, words: str = "") -> None:
        super().__init__(number)
        self.number, self.words = number, words


def end_at_once() -> None:
    """From now on SIGINT and SIGTERM raise Interrupt, wherever this process is.

    What is raised while C code calls Python, in an import say, may be lost. Whoever is still there `SAME_SECONDS` later, or gets
    a signal then, ends without any further word.
    """
    stop = Request()

    def handler(number: int, _: object) -> None:
        asked = stop()
        if stop.insists(number):
            os._exit(128 + number)
        if not asked:
            signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
            signal.setitimer(signal.ITIMER_REAL, END_SECONDS)
            raise Interrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    # Python takes its handlers away before it takes itself down, which is slow on a busy machine: SIGALRM would end it.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)


@contextmanager
def postponed() -> Iterator[Request]:
    """Turns SIGINT and SIGTERM into a request to stop, which training honours after its step; one that insists ends it.

    Raises:
        Interrupt: the work was stopped so, with what it said then.
    """
    stop = Request()

    def handler(number: int, _: object) -> None:
        if stop.takes(number):
            raise Interrupt(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    except Exception as error:
        if stop.number is None:
            raise
        raise Interrupt(stop.number, f"{error}; the same command goes on from there") from error
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has Linux send a signal to this process when the thread that started it ends; elsewhere nothing happens."""
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_at_death = int(signal.SIGKILL)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has this process get a signal when its parent ends: from Linux, elsewhere within a second from a thread.

    Args:
        parent: the process that started this one. If it has ended before, the signal comes now.
        number: of the signal; a later call changes it.
    """
    global _at_death
    _at_death = number
    die_with_parent(number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
    elif sys.platform != "linux" and not any(each.name == _WATCH for each in threading.enumerate()):
        threading.Thread(target=_watch_parent, args=(parent,), name=_WATCH, daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), _at_death)
