"""Files: opened without waiting, bounded before they are parsed, verified by checksum, written whole, and locked.

A run or a corpus may come from a stranger or from a failing disk, so its files are opened only through this module. It
never opens a device, a named pipe or a folder. It never reads more bytes than a file of that kind may have. It parses
no tree that is nested deeper than any of ours. A file of a run that may be shown elsewhere is no link out of the run.

JSON files that we write carry their own checksum. It protects against accidents and edits, not against forgery. A file
is written whole or not at all.

A lock is `flock` on a file. It takes effect at once, works between machines on NFS version 4 and most cluster file
systems, and ends with the process that held it. So a file that is locked while it is written, and found unlocked later,
is a leftover. It may be removed, whoever wrote it.

A lock belongs to a file, not to its name. The holder of a lock guards its folder: before each write, the folder and the
lock file must still be the original ones. No writer recreates a guarded folder.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

FLOW_RUN = "HAED_FLOW_RUN"  # environment variable: name of the Prefect flow run of this process
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ELOOP)  # errors of a path that no longer names anything
CHECKSUM = "checksum"
NOTE, CONFIG, RESULT, MANY, PICTURE = 1 << 12, 1 << 20, 1 << 26, 1 << 28, 1 << 28  # maximum bytes of a file
DEEPEST, NODES = 50, 10_000  # maximum depth of JSON and YAML, and values of YAML with aliases expanded
_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class CorruptFileError(ValueError):
    """A file that is not what was written. The message names it."""


@contextmanager
def add_path_to_errors(path: Path | str) -> Iterator[None]:
    """Add this path to operating-system errors that name no file, such as those of a disk that fails during a read."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # of the class of this number


def open_file(path: Path | str, inside: Path | None = None) -> BufferedReader:
    """Open a file for reading, without waiting on devices or pipes. After links are resolved, it must be in `inside`.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is no regular file, or a link that leads out of `inside`.
        OSError: it cannot be opened.
    """
    _check_regular(os.stat(path), path)
    if inside is not None:
        place, home = os.path.realpath(path), os.path.realpath(inside)
        if os.path.commonpath([place, home]) != home:
            raise CorruptFileError(
                f"{path} is a link to {place}, outside {inside}. Put the file itself there, or remove the link"
            )
    return cast(BufferedReader, _open_nonblocking(path, os.O_RDONLY))


def open_own(path: Path | str, flags: int) -> IO[bytes]:
    """Open or create a file that we write.

    It does not wait, and it follows no link, so that the target of a link is not overwritten. The flags are those of
    `os.open`, such as O_RDWR | O_CREAT.

    Raises:
        CorruptFileError: the path is a link, or something other than a file.
        OSError: it cannot be opened or created.
    """
    try:
        return _open_nonblocking(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptFileError(f"{path} is a link, and its target would be overwritten. Remove the link") from error
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads
            raise CorruptFileError(f"{path} is not a file. Remove it") from error
        raise


def _open_nonblocking(path: Path | str, flags: int) -> IO[bytes]:
    mode = "a+b" if flags & os.O_APPEND else "r+b" if flags & os.O_RDWR else "wb" if flags & os.O_WRONLY else "rb"

    def opener(name: str, _: int) -> int:  # ignores Python's own flags for the mode
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            _check_regular(os.fstat(descriptor), path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener)


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    kind = "" if stat.S_ISREG(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    if status.st_dev in _kernel_devices():  # such a file calls itself regular, and a read of it may wait for ever
        kind = "made by the kernel"
    if kind:
        raise CorruptFileError(f"{path} is {kind}, not a file. Restore the file, or remove this")


@cache
def _kernel_devices() -> set[int]:
    """Return the device numbers of the file systems in which the kernel shows its own state."""
    places = [place for place in ("/proc", "/sys") if os.path.exists(place)]
    return {os.stat(place).st_dev for place in places} - {os.stat("/").st_dev}


def read_bytes(path: Path | str, most: int, inside: Path | None = None) -> bytes:
    """Return the contents of a file of at most `most` bytes. See `open_file` for `inside`.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is larger than `most`, or see `open_file`.
        OSError: it cannot be read; the message names it.
    """
    with add_path_to_errors(path), open_file(path, inside) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CorruptFileError(f"{path} has more than {most:,} bytes, the limit of such a file. Remove it")
    return content


def read_text(path: Path | str, most: int) -> str:
    """Return the contents of a file as text, with bytes that are not UTF-8 replaced. See `read_bytes`."""
    return read_bytes(path, most).decode(errors="replace")


def parse_json(content: bytes | str, where: Path | str, advice: str = "") -> Any:
    """Parse JSON. Errors name it by `where`, and end with `advice`, which says what to do.

    Raises:
        CorruptFileError: it is nested deeper than `DEEPEST`, or is no JSON.
    """
    advice = advice and f". {advice}"
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    depth = 0
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        for match in _JSON.finditer(raw):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
            if depth > DEEPEST:
                raise CorruptFileError(f"{where} is damaged: it is nested more than {DEEPEST} levels deep{advice}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is damaged: {error}{advice}") from error


def read_yaml(path: Path | str, inside: Path | None = None) -> str:
    """Return the text of a YAML file after checking that no parser can choke on it. See `read_bytes`.

    Raises:
        CorruptFileError: it is nested too deeply, has too many values, or is not UTF-8.
    """
    from yaml import YAMLError

    try:
        text = read_bytes(path, CONFIG, inside).decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path} is not valid YAML: it is not UTF-8 ({error.reason})") from error
    with suppress(YAMLError):  # its reader fails at the same place and says more
        check_tree(text, path)
    return text


def check_tree(text: str, where: Path | str, most: int = NODES) -> None:
    """Check the events of YAML one by one, before any tree is built from them. Errors name it by `where`.

    What libyaml refuses is parsed again without it. It refuses escapes of lone surrogates, such as those of JSON, and
    its newer versions some depth by themselves, which other parsers would choke on.

    Raises:
        CorruptFileError: it is nested too deeply, or has too many values.
        YAMLError: it is no YAML, but harmless up to there.
    """
    import yaml

    try:
        _check_events(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), where, most)
    except (yaml.YAMLError, UnicodeError):  # the latter of a lone surrogate itself
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), where, most)


def _check_events(events: Iterable[Any], where: Path | str, most: int) -> None:
    import yaml

    sizes: dict[str | None, int] = {}  # number of values by anchor
    above: list[tuple[str | None, int]] = []  # of each open list or mapping, its anchor and the values before it
    count = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, most)  # a value that contains itself is endless
        elif isinstance(event, yaml.NodeEvent):
            count += 1
            if isinstance(event, yaml.CollectionStartEvent):
                above.append((event.anchor, count))
            elif event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            if anchor:
                sizes[anchor] = count - before + 1
        if len(above) > DEEPEST:
            raise CorruptFileError(f"{where} is nested more than {DEEPEST} levels deep")
        if count > most:
            raise CorruptFileError(f"{where} has more than {most:,} values")


def stamp_file(path: Path | str) -> list[int]:
    """Return numbers that change when a file does.

    They are device, inode, size, and change times of its content and its entry in ns.

    Raises:
        OSError: it is not there, or its status cannot be read.
    """
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def compute_checksum(value: Any, key: str = CHECKSUM) -> str:
    """Return the sha256 of a mapping without its entry `key`, encoded as JSON with sorted keys."""
    rest = {name: each for name, each in value.items() if name != key}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def encode_checked_json(value: Any) -> bytes:
    """Encode a mapping, or a list of mappings, as JSON with checksums added."""
    value = json.loads(json.dumps(value))  # as it will be read: number keys become text, tuples lists
    mappings = value if isinstance(value, list) else [value]
    for each in mappings:
        each[CHECKSUM] = compute_checksum(each)
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # Bytes that are not UTF-8, such as those of a file name, get JSON's own escape.
    return text.encode(errors="backslashreplace")


def verify_checksums(
    value: Any, where: Path | str, key: str = CHECKSUM, advice: str = "", several: bool = False
) -> Any:
    """Verify the checksums of what `encode_checked_json` encoded, and return it without them.

    Args:
        value: a mapping, or a list of mappings.
        where: name of it for errors.
        key: of the checksum.
        advice: what to do, appended to the error.
        several: a list is allowed.

    Raises:
        CorruptFileError: a checksum is missing or wrong.
    """
    if several and isinstance(value, list):
        return [verify_checksums(each, where, key, advice) for each in value]
    if not isinstance(value, dict) or key not in value:
        raise CorruptFileError(f"{where} is damaged or of another version: it has no {key}{advice and f'. {advice}'}")
    if value[key] != compute_checksum(value, key):
        raise CorruptFileError(f"{where} is damaged or was edited: its {key} does not match{advice and f'. {advice}'}")
    return {name: each for name, each in value.items() if name != key}


def read_json(
    path: Path | str, most: int = RESULT, inside: Path | None = None, advice: str = "", several: bool = False
) -> Any:
    """Read and verify a JSON file that we wrote. See `read_bytes`, `parse_json` and `verify_checksums` for the errors."""
    content = parse_json(read_bytes(path, most, inside), path, advice)
    return verify_checksums(content, path, advice=advice, several=several)


class OpenedFile:
    """A file kept open for reads at any position, also by several threads.

    It is not memory-mapped. If a mapped file is truncated or its disk fails, SIGBUS ends the process without a message.
    The descriptor of `file` is duplicated and kept until this object is collected. Errors name it by `path`.
    """

    def __init__(self, path: Path | str, file: IO[bytes]) -> None:
        self.path, self._descriptor = path, os.dup(file.fileno())

    def read_range(self, begin: int, size: int) -> bytearray:
        """Return `size` bytes from the offset `begin` on.

        Raises:
            CorruptFileError: the file ends before.
            OSError: it cannot be read; the message names it.
        """
        content = bytearray(size)
        view, filled = memoryview(content), 0
        with add_path_to_errors(self.path):
            while filled < size:
                taken = os.preadv(self._descriptor, [view[filled:]], begin + filled)
                if not taken:
                    raise CorruptFileError(
                        f"{self.path} was truncated while it was open: it ends at byte {begin + filled:,}"
                    )
                filled += taken
        return content

    def __del__(self) -> None:
        os.close(self._descriptor)


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
            now = "was replaced by another folder" if self.folder.exists() else "was removed or moved"
            raise FolderLostError(f"{self.folder} {now}, so nothing more is written there")
        if self.lock is not None and not is_still(self.lock[0], self.lock[1].fileno()):
            raise FolderLostError(
                f"the lock file {self.lock[0]} was removed or replaced, so another process may write there. "
                "Nothing more is written"
            )

    def moved_to(self) -> Path | None:
        """Return the new path of a folder that was moved with its lock file; None: it was not, or that is unknown."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
        except OSError:
            return None
        is_moved = place != self.folder and is_still(place, self.descriptor)
        has_lock = self.lock is None or is_still(place / self.lock[0].name, self.lock[1].fileno())
        return place if is_moved and has_lock else None


_guards: list[Guard] = []  # of this process


def is_still(path: Path, descriptor: int) -> bool:
    """Return if a path names the open file. An error that does not show it is gone, as of a network, counts as true."""
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
    """Create a folder and its missing parents below `within`, so that a removed folder does not come back in part.

    Raises:
        FileNotFoundError: `within` does not exist.
        NotADirectoryError: a file is where a folder should be.
        FolderLostError: it is guarded, and is another folder now.
    """
    check_guards(path)
    inner = path.relative_to(within)
    descriptor = os.open(within, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in (*reversed(inner.parents[:-1]), inner):
            try:
                os.mkdir(part, dir_fd=descriptor)
            except FileExistsError:
                if not (within / part).is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(within / part)) from None
            except OSError as error:
                error.filename = str(within / part)
                raise
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
            if is_still(path, file.fileno()):
                unless_locked.pop_all()
                file.seek(0)
                return file
            unless_locked.close()  # the previous holder removed it


@contextmanager
def hold_lock_file(
    path: Path, waiting: Callable[[str], None] | None = None, patience: float = 0.0
) -> Iterator[IO[bytes]]:
    """Hold a lock file that names its holder, and remove it afterwards. See `acquire_lock`."""
    with acquire_lock(path, waiting, patience) as file:
        try:
            write_lock_holder(path, file)
            yield file
        finally:
            if is_still(path, file.fileno()):  # else it belongs to another process
                path.unlink(missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_UN)  # forks of this process hold the file open too


@contextmanager
def file_lock(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold a lock file, and guard its folder. See `hold_lock_file`."""
    with hold_lock_file(path, waiting) as file, guard_folder(path.parent, (path, file)):
        yield


def write_lock_holder(path: Path, file: IO[bytes]) -> None:
    """Write this process's description of itself into a lock file that it holds."""
    with add_path_to_errors(path):
        file.truncate(0)
        flow_run = f", flow run '{name}'" if (name := os.environ.get(FLOW_RUN)) else ""
        description = f"process {os.getpid()} on {socket.gethostname()}{flow_run}"
        os.write(file.fileno(), description.encode())  # what a buffer keeps fails again, unnamed, at its end


def read_lock_holder(path: Path) -> str | None:
    """Return the holder's description of itself in a lock file; None if nobody holds it, or it cannot be read."""
    with suppress(OSError, CorruptFileError), open_file(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others wait for this moment; see `acquire_lock`
        except BlockingIOError:
            return file.read(1000).decode(errors="replace")
    return None


def remove_unlocked_files(paths: Iterable[Path], before: Callable[[Path], None] = lambda path: None) -> None:
    """Remove those files that nobody holds: their writers are dead. Files that cannot be removed are skipped silently.

    `before` is called with each file just before it is removed, while it is locked.
    """
    for path in paths:
        with suppress(OSError, CorruptFileError), open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still(path, file.fileno()):
                before(path)
                path.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path`, sync it and rename it: even after a power cut, there is the old or the new.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged.
        FolderLostError: a guarded folder around it is another now.
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
    try:
        locked = acquire_lock(beside)
    except OSError as error:
        error.filename = str(path)  # which a person knows
        raise
    with add_path_to_errors(path), locked as file:
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
    """Write JSON with its checksum, whole or not at all. `read_json` reads it."""
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
