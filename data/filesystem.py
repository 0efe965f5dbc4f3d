"""Atomic writes, file locks, guarded folders and worker processes.

A file is written whole or not at all.

A lock is `flock` on a file. It takes effect at once, works between machines on NFS version 4 and most cluster file
systems, and ends with the process that held it. So a file that is locked while it is written, and found unlocked later,
is a leftover. It may be removed, whoever wrote it.

A lock belongs to a file, not to its name. The holder of a lock guards its folder: before each write, the folder and the
lock file must still be the original ones. No writer recreates a guarded folder.

The module also says how many threads a process may use, and starts worker processes that end when their parent does.
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

from data.checked import CorruptFileError, add_path_to_errors, encode_checked_json, open_file, open_own

FLOW_RUN = "HAED_FLOW_RUN"  # environment variable: name of the Prefect flow run of this process
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)  # errors of a path that no longer names anything


class FolderLostError(OSError):
    """An error: a folder in which this process writes, or its lock file, was removed, moved or replaced."""


@dataclass(eq=False)
class Guard:
    """A folder that must stay the same folder, and its lock file.

    Both are held open, so that no other gets their inode number.

    Attributes:
        folder: its absolute path; links in it are followed at each check.
        descriptor: of the folder.
        lock: path of the lock file and the open file, if there is one.
    """

    folder: Path
    descriptor: int
    lock: tuple[Path, IO[bytes]] | None = None

    def check_unchanged(self) -> None:
        """Raise FolderLostError if the path of the folder, or of its lock file, names another one or nothing."""
        if not is_still(self.folder, self.descriptor):
            now = "is another folder now" if self.folder.exists() else "was removed or moved"
            raise FolderLostError(f"{self.folder} {now}: nothing is written there any more")
        if self.lock is not None and not is_still(self.lock[0], self.lock[1].fileno()):
            raise FolderLostError(
                f"the lock file {self.lock[0]} was removed or replaced, so another process may write there: nothing is "
                "written there any more"
            )

    def moved_to(self) -> Path | None:
        """Return the new path of a folder that was moved with its lock file.

        It is None if the folder was not moved so, or if the system does not tell.
        """
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
    """Return if a path names the open file.

    Errors that do not show it is gone, such as a broken connection, count as true.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        return error.errno not in _GONE


@contextmanager
def guard_folder(folder: Path, lock: tuple[Path, IO[bytes]] | None = None) -> Iterator[Guard]:
    """Make every write of this process below a folder fail as soon as the folder or its lock file is replaced.

    Args:
        folder: the folder to be written into.
        lock: path of its lock file, and the locked file.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    absolute, descriptor = Path(os.path.abspath(folder)), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    guard = Guard(absolute, descriptor, None if lock is None else (Path(os.path.abspath(lock[0])), lock[1]))
    _guards.append(guard)
    try:
        guard.check_unchanged()
        yield guard
    finally:
        _guards.remove(guard)
        os.close(guard.descriptor)


def check_guards(path: Path) -> None:
    """Raise FolderLostError if a guarded folder around `path` is no longer the original one."""
    absolute = Path(os.path.abspath(path))
    for guard in tuple(_guards):
        if absolute.is_relative_to(guard.folder):
            guard.check_unchanged()


def make_folders(path: Path, within: Path) -> None:
    """Create a folder and its missing parents, up to a folder that must exist.

    Args:
        path: of the folder.
        within: existing parent. It is never created, so a removed folder does not come back in part.

    Raises:
        FileNotFoundError: `within` does not exist.
        FolderLostError: it is guarded, and is another folder now.
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


def acquire_lock(path: Path, waiting: Callable[[str], None] | None = None, patience: float = 0.0) -> IO[bytes]:
    """Create a file if needed, and lock it. Closing it frees the lock.

    Args:
        path: of the file.
        waiting: called once with the text that the holder wrote into the file, if another process holds it. Then this
            one waits. An exception of `waiting` is raised here.
        patience: seconds before `waiting` is called, so that a holder that is just being killed has time to end.

    Raises:
        CorruptFileError: the path is something other than a file.
        OSError: the file cannot be created.
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
                    holder = file.read(1000)  # empty if it was only just locked, or is locked to be removed
                    if not holder or time.monotonic() < end:
                        unless_locked.close()
                        time.sleep(0.02)
                        continue
                    waiting(holder.decode(errors="replace"))
                    waiting = None
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_same_file(file, path):
                unless_locked.pop_all()
                file.seek(0)
                return file
            unless_locked.close()  # the previous holder removed it


@contextmanager
def file_lock(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock file that names its holder, and guard its folder. The file is removed afterwards. See `acquire_lock`."""
    with acquire_lock(path, waiting) as file:
        try:
            with add_path_to_errors(path):
                file.truncate(0)
                file.write(process_description().encode())
                file.flush()
            with guard_folder(path.parent, (path, file)):
                yield
        finally:
            if is_still(path, file.fileno()):  # else it belongs to another process
                path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # forks of this process hold the file open too


def read_lock_holder(path: Path) -> str | None:
    """Return the holder's description of itself in a lock file; None if nobody holds it, or it cannot be read."""
    try:
        with open_file(path) as file:
            try:
                fcntl.flock(
                    file, fcntl.LOCK_SH | fcntl.LOCK_NB
                )  # another process waits for this moment; see `acquire_lock`
            except BlockingIOError:
                return file.read(1000).decode(errors="replace")
    except (OSError, CorruptFileError):
        pass
    return None


def process_description() -> str:
    """Return a description of this process for people."""
    flow_run = f", flow run '{name}'" if (name := os.environ.get(FLOW_RUN)) else ""
    return f"process {os.getpid()} on {socket.gethostname()}{flow_run}"


def remove_unlocked_files(paths: Iterable[Path], before: Callable[[Path], None] = lambda path: None) -> None:
    """Remove those files that nobody holds: their writers are dead. Files that cannot be removed are skipped silently.

    Args:
        paths: the files.
        before: called with each file just before it is removed, while it is locked.
    """
    for path in paths:
        try:
            with open_file(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(file, path):
                    before(path)
                    path.unlink()
        except (OSError, CorruptFileError):
            continue


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        found, there = os.fstat(file.fileno()), path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path`, sync it and rename it.

    Even after a power cut, a reader finds the old file or the new.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged.
    """
    with replace_atomically(path) as file:
        file.write(content)


@contextmanager
def replace_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open an empty file for piecewise writing, which replaces `path` at the end. See `write_atomically`.

    Raises:
        OSError: the disk is full or not writable. After this or any other exception, `path` is unchanged.
        FolderLostError: a guarded folder around it is another now.
    """
    check_guards(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with add_path_to_errors(path), acquire_lock(beside) as file:
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
    """Write JSON with its checksum, whole or not at all. `data.checked.read_json` reads it."""
    write_atomically(path, encode_checked_json(value))


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Remove a folder and all its contents, as far as possible."""
    shutil.rmtree(folder, ignore_errors=True)


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
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    if asked.isdecimal() and int(asked):
        limits.append(int(asked))
    return max(1, min(limits))


def _read_cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas of this process's control groups, version 1 and 2, including those of all parent groups."""
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


def allowed_workers(workers: int) -> int:
    """Return the number of workers that this process may start.

    A multiprocessing daemon, such as a DataLoader worker, may start none.
    """
    if workers and multiprocessing.current_process().daemon:
        log.warning("a daemonic process may start no others: it does the work of the %d workers itself", workers)
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
    pool = ProcessPoolExecutor(workers, context, _initialise_worker, (initializer, arguments))
    # At exit, a process started by multiprocessing waits for its children before the pool would end them.
    Finalize(pool, _shut_down_pool, (weakref.ref(pool),), exitpriority=100)
    return pool


def _shut_down_pool(pool: "weakref.ref[ProcessPoolExecutor]") -> None:
    if (still := pool()) is not None:
        still.shutdown(cancel_futures=True)


def _initialise_worker(initializer: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
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
