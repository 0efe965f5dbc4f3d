"""Fetched shards on this machine, up to a size; what was not used for the longest time makes room.

They lie in a folder of the cache's own, which its mark says, under their sha256, so that nothing else is ever removed, and
what several addresses serve is kept once. Many processes share it without talking: who makes a file holds a lock on
it, and the others wait; a file is handed out open, so that it may be removed while it is read. A lock ends with its
process, so what a killed one left unfinished is known, and taken over or removed.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from data.checked import open_file

FOLDER = "haed-cache"
_MARK = "CACHEDIR.TAG"  # https://bford.info/cachedir: programs for backups leave such a folder out
_MARKED = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards that haed fetched; this folder may be deleted.\n"
_OURS = re.compile(r"[0-9a-f]{64}\.(tar|partial)")


class Cache:
    """A bounded folder of files that are known by their sha256.

    Args:
        place: folder in which the cache has its own; everything else there is let alone.
        limit: bytes that its files may take; one file may always be there.

    Raises:
        FileExistsError: a folder of that name is there, and is not a cache's.
        OSError: it cannot be made.
    """

    def __init__(self, place: Path, limit: int) -> None:
        self.folder, self.limit = place / FOLDER, limit
        self._make()

    def _make(self) -> None:
        """Makes its folder, which anybody may delete at any time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        there = os.listdir(self.folder)
        if there and _MARK not in there:
            raise FileExistsError(
                f"{self.folder} is not a cache of haed, which it has no {_MARK} to say: choose another loader.cache_dir="
            )
        if not there:
            (self.folder / _MARK).write_bytes(_MARKED)

    def open(self, sha256: str, size: int, fill: Callable[[IO[bytes]], None]) -> IO[bytes]:
        """The file of that sum, open, made first if it is not there. Of all processes and threads one makes it.

        Args:
            sha256: of the file.
            size: bytes it will have.
            fill: writes it into an empty file, and checks it; what it raises is raised here.
        """
        path, partial = self.folder / f"{sha256}.tar", self.folder / f"{sha256}.partial"
        while True:
            with suppress(FileNotFoundError):
                found = open_file(path)
                _touch(found)
                return found
            try:
                made = _taken(partial)
            except FileNotFoundError:
                self._make()
                continue
            if made is None:
                continue
            try:
                if path.exists():  # another finished it after we had looked
                    partial.unlink()
                    made.close()
                    continue
                self._make_room(size)
                fill(made)
                made.flush()
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                made.close()
                raise
            _touch(made)
            fcntl.flock(made, fcntl.LOCK_UN)  # a map of the file would hold it on
            self._make_room(0, keep=path)
            return made

    def forget(self, sha256: str, file: IO[bytes]) -> None:
        """Removes this file, which is not what it was; not one that was made in its place since."""
        path = self.folder / f"{sha256}.tar"
        if _is(path, file):
            path.unlink(missing_ok=True)

    def _make_room(self, wanted: int, keep: Path | None = None) -> None:
        """Removes what killed processes left, then the longest unused, until so many bytes more are within the limit."""
        found: list[tuple[int, int, Path]] = []
        used = wanted
        for entry in os.scandir(self.folder):
            if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            path = Path(entry.path)
            with suppress(FileNotFoundError):
                if path.suffix == ".partial" and _abandoned(path):
                    continue
                status = path.stat()
                used += status.st_size
                if path.suffix == ".tar" and path != keep:
                    found.append((status.st_atime_ns, status.st_size, path))
        for _, size, path in sorted(found):
            if used <= self.limit:
                return
            with suppress(PermissionError):  # of another user
                path.unlink(missing_ok=True)
                used -= size


def _taken(partial: Path) -> IO[bytes] | None:
    """The file of that name, locked; None if it was finished or given up by whom we waited for."""
    file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is(partial, file):
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _abandoned(partial: Path) -> bool:
    """Whether nobody was writing this file; it is removed then."""
    try:
        with open(partial, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(partial, file):
                partial.unlink()
            return True
    except (BlockingIOError, PermissionError):
        return False


def _is(path: Path, file: IO[bytes]) -> bool:
    """Whether the open file is the one of that name now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _touch(file: IO[bytes]) -> None:
    """It was used now. Its time of change stays: by that a reader knows a file that it has checked."""
    with suppress(PermissionError):  # of another user
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
