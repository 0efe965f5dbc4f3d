"""Worker processes that end when their parent does."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from typing import Any

log = logging.getLogger(__name__)


def allowed(workers: int) -> int:
    """So many workers as this process may have: a daemon of multiprocessing (a DataLoader's worker) may have none."""
    if workers and multiprocessing.current_process().daemon:
        log.warning("a daemonic process may start no others: it does the work of the %d workers itself", workers)
        return 0
    return workers


def process_pool(
    workers: int, initializer: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """A pool of processes; when this one ends, however that came about, so do they.

    Ctrl-C, or SIGTERM to the process group, reaches this one alone, which may still need them to save.

    They are forks where that is safe: a process that has threads, or torch with its own, is not copied, and workers start
    from nothing, which takes the time of its imports.
    """
    forks = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if forks else "spawn")
    pool = ProcessPoolExecutor(workers, context, _initialise, (initializer, arguments))
    # A process that multiprocessing has started waits at its exit for its children before the pool would tell them to end.
    Finalize(pool, _end, (weakref.ref(pool),), exitpriority=100)
    return pool


def _end(pool: "weakref.ref[ProcessPoolExecutor]") -> None:
    if (still := pool()) is not None:
        still.shutdown(cancel_futures=True)


def _initialise(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)
