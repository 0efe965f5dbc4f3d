"""Files that appear whole or not at all, and locks that are freed by death.

A lock is `flock` on a file: immediate, honoured between machines by NFS version 4 and most cluster file systems, and gone
with the process that held it, however it ended. So a file that is locked while it is written and found unlocked later is a
leftover, whoever wrote it and wherever, and may be removed.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

# What a disk says that takes no more: it is full, or the share of a user; a file is too large; it may not be written to; broken.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
FLOW_RUN = "HAED_FLOW_RUN"  # of the environment: the Prefect flow run on whose behalf a process works


def hold(path: Path, waiting: Callable[[str], None] | None = None, patience: float = 0.0) -> IO[bytes]:
    """Makes a file, if need be, and locks it; closing it frees it.

    Args:
        path: of the file.
        waiting: called once, with what the holder wrote into it, if another one holds the file; then it is waited for. What
            it raises is raised here.
        patience: seconds before it is called: a holder that is just being killed gets a moment to be gone.

    Raises:
        OSError: the file cannot be made.
    """
    end = time.monotonic() + patience
    with ExitStack() as unless_locked:
        while True:
            file = unless_locked.enter_context(open(path, "a+b"))
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
    """Holds a lock file, which says who does, and is removed afterwards. See `hold`."""
    with hold(path, waiting) as file:
        try:
            with naming(path):
                file.truncate(0)
                file.write(whoami().encode())
                file.flush()
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # forks of this process have the file as well


def holder(path: Path) -> str | None:
    """Who holds a lock file now, in its own words; None: nobody, as far as it may be read."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment, in which another waits; see `hold`
    except BlockingIOError:
        with open(path, "rb") as file:
            return file.read(1000).decode(errors="replace")
    except OSError:
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
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(file, path):
                    before(path)
                    path.unlink()
        except OSError:
            continue


def _is(file: IO[bytes], path: Path) -> bool:
    try:
        found, there = os.fstat(file.fileno()), path.stat()
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (there.st_dev, there.st_ino)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the disk that arise here and name none: a full one is met in the middle of a write.

    Raises:
        OSError: the same, with the path.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with naming(path), hold(beside) as file:
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all."""
    write_atomically(path, json.dumps(value, indent=1, ensure_ascii=True).encode())


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
