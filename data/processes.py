"""Worker processes that end when their parent does."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def process_pool(
    workers: int, initializer: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """A pool whose processes start from nothing, not from a copy of this one with its threads.

    Ctrl-C reaches the parent alone, which then decides; when it ends, however that came about, so do they.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _initialise, (initializer, arguments))


def _initialise(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    if initializer is not None:
        initializer(*arguments)
