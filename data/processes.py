"""The threads and memory that a process may use, and worker processes that end when their parent does."""

import inspect
import logging
import math
import multiprocessing
import os
import pickle
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
    """Return the number of threads that this process may keep busy: the smallest of all limits set for it.

    The limits are the CPUs of the machine, the CPU affinity (`taskset`), the quota of its control groups (containers),
    and OMP_NUM_THREADS.

    Args:
        root: root of the file system with `proc` and `sys`.
    """
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cpus = os.cpu_count() or 1
    limits = [cpus, *(math.ceil(quota) for quota in _read_cpu_quotas(root))]
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    if setting.isdecimal() and int(setting):
        limits.append(int(setting))
    return max(1, min(limits))


def _read_cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups, version 1 and 2, including those of all parent groups."""
    mounted, cgroups = root / "sys/fs/cgroup", ""
    with suppress(OSError):
        cgroups = (root / "proc/self/cgroup").read_text()
    for line in cgroups.splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for place in (mounted, *((mounted / each for each in ("cpu", "cpu,cpuacct")) if controllers else ())):
            inner = place / path.strip("/")
            above = inner.parents[: len(inner.parts) - len(place.parts)]  # in a container, the outermost alone is there
            for group in (inner, *above):
                yield from _read_group_quota(group)


def _read_group_quota(group: Path) -> Iterator[float]:
    """Yield the CPU quota of one control group, if it has one."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        yield int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)


def free_memory() -> float:
    """Return the bytes of memory that are free or can be freed; else, as on macOS, of all memory; else infinity."""
    with suppress(OSError, KeyError, IndexError), open("/proc/meminfo") as file:
        values = {line.split(":")[0]: line.split()[1] for line in file}
        return 1024 * float(values["MemAvailable"])
    with suppress(OSError, ValueError):
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return float("inf")


def allowed_workers(workers: int) -> int:
    """Return the number of workers that this process may start: none in a daemon, such as a worker of a DataLoader."""
    if workers and multiprocessing.current_process().daemon:
        log.warning("a daemonic process may not start others, so it does the work of the %d workers itself", workers)
        return 0
    return workers


def process_pool(
    workers: int, initializer: Callable[..., None] | None = None, arguments: tuple[Any, ...] = ()
) -> ProcessPoolExecutor:
    """Create a pool of processes that end when this process does, however it ends.

    Ctrl-C, or SIGTERM to the process group, reaches this process alone, which may still need the workers to save.

    Workers are forked where that is safe: on Linux, if this process has no threads and has not imported torch. Else
    they are spawned, and take the time of their imports to start.
    """
    forks = sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
    context = multiprocessing.get_context("fork" if forks else "spawn")
    pool = ProcessPoolExecutor(workers, context, _initialise_worker, (initializer, arguments, _describe_logs()))
    # At exit, a process started by multiprocessing waits for its children before the pool would end them.
    Finalize(pool, _shut_down_pool, (weakref.ref(pool),), exitpriority=100)
    return pool


def _describe_logs() -> tuple[bytes, int]:
    """Return what makes log records printable in this process, pickled, and the level of this package's."""
    factory = b""
    with suppress(Exception):  # somebody's own may have no name
        factory = pickle.dumps(inspect.unwrap(logging.getLogRecordFactory()))
    return factory, log.getEffectiveLevel()


def _shut_down_pool(pool: "weakref.ref[ProcessPoolExecutor]") -> None:
    if (still := pool()) is not None:
        still.shutdown(cancel_futures=True)


def _initialise_worker(
    initializer: Callable[..., None] | None, arguments: tuple[Any, ...], logs: tuple[bytes, int]
) -> None:
    factory, level = logs
    if logging.getLogRecordFactory() is logging.LogRecord and not log.hasHandlers():  # else it was forked
        with suppress(Exception):  # it may be defined where only the parent finds it
            logging.setLogRecordFactory(pickle.loads(factory))
        logging.basicConfig(format="%(message)s")  # to standard error
        logging.getLogger("data").setLevel(level)
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
