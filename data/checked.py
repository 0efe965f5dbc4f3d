"""Files that are read back: opened without waiting, bounded before they are parsed, and verified by checksum.

A run or a corpus may come from a stranger or from a failing disk, so its files are opened only through this module. It
never opens a device, a named pipe or a folder. It never reads more bytes than a file of that kind may have. It parses
no tree that is nested deeper than any of ours. A file of a run that may be shown elsewhere is no link out of the run.

JSON files that we write carry their own checksum. It protects against accidents and edits, not against forgery.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

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
        raise type(error)(error.errno, error.strerror, str(path)) from error


def open_file(path: Path | str, inside: Path | None = None) -> BufferedReader:
    """Open a file for reading, without waiting on devices or pipes.

    Args:
        path: of the file.
        inside: folder that must contain the file after links are resolved; None: any folder.

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
                f"{path} is a link to {place}, out of {inside}: put the file itself there, or remove the link"
            )
    return cast(BufferedReader, _open_nonblocking(path, os.O_RDONLY))


def open_own(path: Path | str, flags: int) -> IO[bytes]:
    """Open or create a file that we write.

    It does not wait, and it follows no link, so that the target of a link is not overwritten.

    Args:
        path: of the file.
        flags: of `os.open`, such as O_RDWR | O_CREAT.

    Raises:
        CorruptFileError: the path is a link, or something other than a file.
        OSError: it cannot be opened or created.
    """
    try:
        return _open_nonblocking(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptFileError(f"{path} is a link, and what it names would be overwritten: remove it") from error
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads
            raise CorruptFileError(f"{path} is no file: remove it") from error
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
        raise CorruptFileError(f"{path} is {kind}, not a file: put the file back, or remove it")


@cache
def _kernel_devices() -> set[int]:
    """Return the device numbers of the file systems in which the kernel shows its own state."""
    devices = set()
    for place in ("/proc", "/sys"):
        with suppress(OSError):
            devices.add(os.stat(place).st_dev)
    return devices - {os.stat("/").st_dev}


def read_bytes(path: Path | str, most: int, inside: Path | None = None) -> bytes:
    """Return the contents of a file.

    Args:
        path: of the file.
        most: maximum size in bytes.
        inside: see `open_file`.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is larger than `most`, or see `open_file`.
        OSError: it cannot be read; the message names it.
    """
    with add_path_to_errors(path), open_file(path, inside) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CorruptFileError(f"{path} has more than {most:,} bytes, the most that such a file may have: remove it")
    return content


def read_text(path: Path | str, most: int, inside: Path | None = None) -> str:
    """Return the contents of a file as text.

    Bytes that are not UTF-8 are replaced. See `read_bytes` for the arguments.
    """
    return read_bytes(path, most, inside).decode(errors="replace")


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """Parse JSON whose tree is nested no deeper than `DEEPEST`.

    Args:
        content: the JSON.
        where: name of it for errors.

    Raises:
        CorruptFileError: it is nested deeper, or is no JSON.
    """
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    depth = 0
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        for match in _JSON.finditer(raw):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
            if depth > DEEPEST:
                raise CorruptFileError(f"{where} is damaged: it is nested more than {DEEPEST} levels deep")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{where} is damaged: {error}") from error


def check_yaml(content: bytes, where: Path | str) -> str:
    """Return YAML as text after checking that no parser can choke on it.

    Args:
        content: the YAML.
        where: name of it for errors.

    Raises:
        CorruptFileError: it is nested too deeply, has too many values, or is not UTF-8.
    """
    from yaml import YAMLError

    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{where}: not readable as YAML: it is not UTF-8 ({error.reason})") from error
    with suppress(YAMLError):  # its reader fails at the same place and says more
        check_tree(text, where)
    return text


def check_tree(text: str, where: Path | str, fast: bool = True) -> None:
    """Check the events of YAML one by one, before any tree is built from them.

    Args:
        text: the YAML.
        where: name of it for errors.
        fast: use libyaml, which rejects escapes of lone surrogates, such as those of JSON.

    Raises:
        CorruptFileError: it is nested too deeply, or has too many values.
        YAMLError: it is no YAML, but harmless up to there.
    """
    import yaml

    sizes: dict[str | None, int] = {}  # number of values by anchor
    above: list[
        tuple[str | None, int]
    ] = []  # for each open list or mapping, its anchor and the number of values before it
    count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, NODES)  # a value that contains itself is endless
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
        if count > NODES:
            raise CorruptFileError(f"{where} has more than {NODES:,} values")


def read_yaml(path: Path | str, inside: Path | None = None) -> str:
    """Return the text of a YAML file that any parser can take. See `read_bytes` and `check_yaml` for the errors."""
    return check_yaml(read_bytes(path, CONFIG, inside), path)


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


def add_checksums(value: Any) -> Any:
    """Return a mapping, or a list of mappings, with checksums added, as a JSON file stores it."""
    value = json.loads(json.dumps(value))  # as it will be read: number keys become text, tuples lists
    if isinstance(value, list):
        return [add_checksums(each) for each in value]
    return value | {CHECKSUM: compute_checksum(value)}


def encode_checked_json(value: Any) -> bytes:
    """Encode a mapping, or a list of mappings, as JSON with checksums added."""
    text = json.dumps(add_checksums(value), indent=2, ensure_ascii=False) + "\n"
    return text.encode(
        errors="backslashreplace"
    )  # bytes that are not UTF-8, such as those of a file name, get JSON's own escape


def verify_checksums(
    value: Any, where: Path | str, key: str = CHECKSUM, advice: str = "", several: bool = False
) -> Any:
    """Verify the checksums of a value made by `add_checksums`, and return it without them.

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
        raise CorruptFileError(f"{where} is damaged, or of another version: it has no {key}{advice and f'; {advice}'}")
    if value[key] != compute_checksum(value, key):
        raise CorruptFileError(
            f"{where} is damaged or was edited: its {key} is of other contents{advice and f'; {advice}'}"
        )
    return {name: each for name, each in value.items() if name != key}


def read_json(
    path: Path | str, most: int = RESULT, inside: Path | None = None, advice: str = "", several: bool = False
) -> Any:
    """Read and verify a JSON file that we wrote. See `read_bytes`, `parse_json` and `verify_checksums` for the errors."""
    return verify_checksums(parse_json(read_bytes(path, most, inside), path), path, advice=advice, several=several)


def free_memory() -> float:
    """Return the bytes of this machine's memory that are free or can be freed; infinity if the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            found = {line.split(":")[0]: line.split()[1] for line in file}
        return 1024 * float(found["MemAvailable"])
    except (OSError, KeyError, IndexError):
        return float("inf")


class OpenedFile:
    """A file kept open for reads at any position, also by several threads.

    It is not memory-mapped. If a mapped file is truncated or its disk fails, SIGBUS ends the process without a message.

    Args:
        path: name of the file for errors.
        file: the open file; its descriptor is duplicated and kept until this object is collected.
    """

    def __init__(self, path: Path | str, file: IO[bytes]) -> None:
        self.path, self._descriptor = path, os.dup(file.fileno())

    def read_range(self, begin: int, size: int) -> bytearray:
        """Return `size` bytes from the offset `begin` on.

        Raises:
            CorruptFileError: the file ends before.
            OSError: it cannot be read; the message names it.
        """
        found = bytearray(size)
        view, done = memoryview(found), 0
        with add_path_to_errors(self.path):
            while done < size:
                taken = os.preadv(self._descriptor, [view[done:]], begin + done)
                if not taken:
                    raise CorruptFileError(f"{self.path} ends at byte {begin + done:,}: it was cut since it was opened")
                done += taken
        return found

    def __del__(self) -> None:
        os.close(self._descriptor)
