"""How many threads a process may use, and worker processes that end when their parent does."""

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def available_threads(root: Path = Path("/")) -> int:
    """The number of threads that this process may keep busy: the least of all limits that are set for it.

    They are the CPUs of the machine, those of its affinity (`taskset`), the quota of its control groups (containers), and
    OMP_NUM_THREADS.

    Args:
        root: of the file system with `proc` and `sys`.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    limits = [cpus, *(math.ceil(quota) for quota in _quotas(root))]
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    if asked.isdecimal() and int(asked):
        limits.append(int(asked))
    return max(1, min(limits))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that control groups of this process leave it, of version 1 and 2: its own, and all that these are in."""
    mounted, own = root / "sys/fs/cgroup", ""
    with suppress(OSError):
        own = (root / "proc/self/cgroup").read_text()
    for line in own.splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for place in (mounted, *((mounted / each for each in ("cpu", "cpu,cpuacct")) if controllers else ())):
            inner = place / path.strip("/")
            for group in (
                inner,
                *inner.parents[: len(inner.parts) - len(place.parts)],
            ):  # of a container, the outermost alone
                yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    """That of one control group, if it has one."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)


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
