"""Files that appear whole or not at all, and locks that are freed by death.

A lock is `flock` on a file: immediate, honoured between machines by NFS version 4 and most cluster file systems, and gone
with the process that held it, however it ended. So a file that is locked while it is written and found unlocked later is a
leftover, whoever wrote it and wherever, and may be removed.

A lock is of a file, not of its name. Who holds one guards its folder: before each write, folder and lock file must still be
the ones that were there at first. No writer makes a guarded folder anew.

How many threads a process may use, and worker processes that end when their parent does.
"""

import errno
import fcntl
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO, Any

from data.checked import DamagedFile, named, open_file, open_own, sealed_json

FLOW_RUN = "HAED_FLOW_RUN"  # of the environment: the Prefect flow run on whose behalf a process works
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)  # what a path that names nothing any more answers


class FolderLost(OSError):
    """A folder in which this process writes was removed, moved or replaced, or its lock file was."""


@dataclass(eq=False)
class Guard:
    """A folder that must stay the one that it was, and the lock file in it; both are held open, so no other gets their number.

    Attributes:
        folder: its absolute path; links in it are followed at each check.
        descriptor: of the folder.
        lock: the lock file and its path, if there is one.
    """

    folder: Path
    descriptor: int
    lock: tuple[Path, IO[bytes]] | None = None

    def check(self) -> None:
        """Raises FolderLost if the path of the folder, or of its lock file, names another one or nothing."""
        if not is_still(self.folder, self.descriptor):
            now = "is another folder now" if self.folder.exists() else "was removed or moved"
            raise FolderLost(f"{self.folder} {now}: nothing is written there any more")
        if self.lock is not None and not is_still(self.lock[0], self.lock[1].fileno()):
            raise FolderLost(
                f"the lock file {self.lock[0]} was removed or replaced, so another process may write there: nothing is "
                "written there any more"
            )

    def moved_to(self) -> Path | None:
        """Where the folder lies now, with its lock file in it; None: nowhere, or the system does not say."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:
            return None
        if place == self.folder or not is_still(place, self.descriptor):
            return None
        if self.lock is not None and not is_still(place / self.lock[0].name, self.lock[1].fileno()):
            return None
        return place


_guards: list[Guard] = []  # of this process


def is_still(path: Path, descriptor: int) -> bool:
    """Whether a path names the open file; an error that says nothing of that, such as a broken connection, does not deny it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return error.errno not in _GONE


@contextmanager
def guarded(folder: Path, lock: tuple[Path, IO[bytes]] | None = None) -> Iterator[Guard]:
    """Has every write of this process below a folder fail once the folder, or its lock file, is another.

    Args:
        folder: that is written into.
        lock: path of its lock file, and the file as it was locked.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    absolute, descriptor = Path(os.path.abspath(folder)), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    guard = Guard(absolute, descriptor, None if lock is None else (Path(os.path.abspath(lock[0])), lock[1]))
    _guards.append(guard)
    try:
        guard.check()
        yield guard
    finally:
        _guards.remove(guard)
        os.close(guard.descriptor)


def check_guards(path: Path) -> None:
    """Raises FolderLost if a guarded folder around `path` is not the one that it was."""
    absolute = Path(os.path.abspath(path))
    for guard in tuple(_guards):
        if absolute.is_relative_to(guard.folder):
            guard.check()


def make_folders(path: Path, within: Path) -> None:
    """Makes a folder and those above it, up to a folder that must be there.

    Args:
        path: of the folder.
        within: around it; it is never made, so what was removed does not come back in part.

    Raises:
        FileNotFoundError: `within` is not there.
        FolderLost: it is guarded, and another now.
    """
    check_guards(path)
    inner = path.relative_to(within)
    descriptor = os.open(within, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in (*reversed(inner.parents[:-1]), inner):
            with suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def hold(path: Path, waiting: Callable[[str], None] | None = None, patience: float = 0.0) -> IO[bytes]:
    """Makes a file, if need be, and locks it; closing it frees it.

    Args:
        path: of the file.
        waiting: called once, with what the holder wrote into it, if another one holds the file; then it is waited for. What
            it raises is raised here.
        patience: seconds before it is called: a holder that is just being killed gets a moment to be gone.

    Raises:
        DamagedFile: something else than a file is there.
        OSError: the file cannot be made.
    """
    end = time.monotonic() + patience
    with ExitStack() as unless_locked:
        while True:
            file = unless_locked.enter_context(open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is not None:
                    file.seek(0)
                    holder = file.read(1000)  # nothing: it has only just locked it, or looks whether it may be removed
                    if not holder or time.monotonic() < end:
                        unless_locked.close()
                        time.sleep(0.02)
                        continue
                    waiting(holder.decode(errors="replace"))
                    waiting = None
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is(file, path):
                unless_locked.pop_all()
                file.seek(0)
                return file
            unless_locked.close()  # the one before removed it


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds a lock file, which says who does, and is removed afterwards. Its folder is guarded. See `hold`."""
    with hold(path, waiting) as file:
        try:
            with named(path):
                file.truncate(0)
                file.write(whoami().encode())
                file.flush()
            with guarded(path.parent, (path, file)):
                yield
        finally:
            if is_still(path, file.fileno()):  # else it is another process's
                path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # forks of this process have the file as well


def holder(path: Path) -> str | None:
    """Who holds a lock file now, in its own words; None: nobody, as far as it may be read."""
    try:
        with open_file(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment, in which another waits; see `hold`
            except BlockingIOError:
                return file.read(1000).decode(errors="replace")
    except (OSError, DamagedFile):
        pass
    return None


def whoami() -> str:
    """This process, for people."""
    flow_run = f", flow run '{name}'" if (name := os.environ.get(FLOW_RUN)) else ""
    return f"process {os.getpid()} on {socket.gethostname()}{flow_run}"


def sweep(paths: Iterable[Path], before: Callable[[Path], None] = lambda path: None) -> None:
    """Removes those files that nobody holds: their writers are dead. Nothing is said about what cannot be removed.

    Args:
        paths: the files.
        before: called with one that is going to be removed, while it is held.
    """
    for path in paths:
        try:
            with open_file(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(file, path):
                    before(path)
                    path.unlink()
        except (OSError, DamagedFile):
            continue


def _is(file: IO[bytes], path: Path) -> bool:
    try:
        found, there = os.fstat(file.fileno()), path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside, syncs and renames, so that a reader, or a machine that lost power, finds the old file or the new.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was.
    """
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """The same for what is written piece by piece: an empty file beside, which takes the place of `path` at the end.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was, as it is when anything else is raised meanwhile.
        FolderLost: a guarded folder around it is another now.
    """
    check_guards(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with named(path), hold(beside) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            check_guards(path)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON with its checksum, whole or not at all; `data.checked.read_json` reads it."""
    write_atomically(path, sealed_json(value))


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Removes a folder and all in it, as far as that can be done."""
    shutil.rmtree(folder, ignore_errors=True)


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
