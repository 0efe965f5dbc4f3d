"""Files that are read back: opened without waiting, bounded before they are parsed, and checked against their checksum.

A run or a corpus may come from a stranger, or from a disk that fails. So a file of one is opened here and nowhere else: never
a device, a named pipe or a folder, never more bytes than its kind may have, and no tree deeper than any of ours. What can be
read from elsewhere, such as a file of text of a run, is no link that leads out of the run.

What we write in JSON carries a checksum of itself. It protects against accidents and edits, not against forgery.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

CHECKSUM = "checksum"
NOTE, CONFIG, RESULT, MANY, PICTURE = 1 << 12, 1 << 20, 1 << 26, 1 << 28, 1 << 28  # bytes of a file, at most
DEEPEST, NODES = 50, 10_000  # of trees in JSON and YAML; of YAML, where aliases are counted as often as they are used
_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class DamagedFile(ValueError):
    """A file is not what was written; the message names it."""


@contextmanager
def named(path: Path | str) -> Iterator[None]:
    """Has errors of the system name this file: those of a disk that fails while it is read do not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def open_file(path: Path | str, inside: Path | None = None) -> BufferedReader:
    """Opens a file for reading, at once, whatever lies there.

    Args:
        path: of the file.
        inside: folder that the file itself must lie in, wherever links lead; None: anywhere.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is no regular file, or a link that leads out of `inside`.
        OSError: it cannot be opened.
    """
    _check_regular(os.stat(path), path)
    if inside is not None:
        place, home = os.path.realpath(path), os.path.realpath(inside)
        if os.path.commonpath([place, home]) != home:
            raise DamagedFile(
                f"{path} is a link to {place}, out of {inside}: put the file itself there, or remove the link"
            )
    return cast(BufferedReader, _opened(path, os.O_RDONLY))


def open_own(path: Path | str, flags: int) -> IO[bytes]:
    """Opens, or makes, a file that we write: at once, and never one that a link names, which would be overwritten.

    Args:
        path: of the file.
        flags: of `os.open`, such as O_RDWR | O_CREAT.

    Raises:
        DamagedFile: there is a link, or something else than a file.
        OSError: it cannot be opened or made.
    """
    try:
        return _opened(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedFile(f"{path} is a link, and what it names would be overwritten: remove it") from error
        if error.errno == errno.ENXIO:  # a named pipe that nobody reads
            raise DamagedFile(f"{path} is no file: remove it") from error
        raise


def _opened(path: Path | str, flags: int) -> IO[bytes]:
    mode = "a+b" if flags & os.O_APPEND else "r+b" if flags & os.O_RDWR else "wb" if flags & os.O_WRONLY else "rb"

    def opener(name: str, _: int) -> int:  # whatever flags Python has for the mode
        descriptor = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            _check_regular(os.fstat(descriptor), path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return open(path, mode, opener=opener)


def _check_regular(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise DamagedFile(f"{path} is {kind}, not a file: put the file back, or remove it")


def read_bytes(path: Path | str, most: int, inside: Path | None = None) -> bytes:
    """The contents of a file.

    Args:
        path: of the file.
        most: bytes that it may have.
        inside: see `open_file`.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is larger, or see `open_file`.
        OSError: it cannot be read; the message names it.
    """
    with named(path), open_file(path, inside) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedFile(f"{path} has more than {most:,} bytes, the most that such a file may have: remove it")
    return content


def read_text(path: Path | str, most: int, inside: Path | None = None) -> str:
    """The same as text, in which what is no UTF-8 is replaced."""
    return read_bytes(path, most, inside).decode(errors="replace")


def parse_json(content: bytes | str, where: Path | str) -> Any:
    """What JSON says, if its tree is no deeper than `DEEPEST`.

    Args:
        content: in JSON.
        where: named in errors.

    Raises:
        DamagedFile: it is deeper, or no JSON.
    """
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    depth = 0
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        for match in _JSON.finditer(raw):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match[0], 0)
            if depth > DEEPEST:
                raise DamagedFile(f"{where} is damaged: it is nested more than {DEEPEST} levels deep")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{where} is damaged: {error}") from error


def check_yaml(content: bytes, where: Path | str) -> str:
    """The text of YAML, if no parser can choke on it.

    Args:
        content: in YAML.
        where: named in errors.

    Raises:
        DamagedFile: it is nested too deeply, or has too many values, or is no UTF-8.
    """
    from yaml import YAMLError

    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{where}: not readable as YAML: it is not UTF-8 ({error.reason})") from error
    with suppress(YAMLError):  # its reader, which gets no further either, says more
        check_tree(text, where)
    return text


def check_tree(text: str, where: Path | str, fast: bool = True) -> None:
    """Looks at the events of YAML one by one, before any tree is made of them.

    Args:
        text: in YAML.
        where: named in errors.
        fast: by libyaml, which takes no escapes of half a character, such as those of JSON.

    Raises:
        DamagedFile: it is nested too deeply, or has too many values.
        YAMLError: it is no YAML, but harmless up to there.
    """
    import yaml

    sizes: dict[str | None, int] = {}  # of what anchors name
    above: list[
        tuple[str | None, int]
    ] = []  # the anchor of each list or mapping that is open, and the values before it
    count = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader) if fast else yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            count += sizes.get(event.anchor, NODES)  # what holds itself has no end
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
            raise DamagedFile(f"{where} is nested more than {DEEPEST} levels deep")
        if count > NODES:
            raise DamagedFile(f"{where} has more than {NODES:,} values")


def read_yaml(path: Path | str, inside: Path | None = None) -> str:
    """The text of a file of YAML that any parser may be given; see `read_bytes` and `check_yaml` for what is raised."""
    return check_yaml(read_bytes(path, CONFIG, inside), path)


def stamp_file(path: Path | str) -> list[int]:
    """Return what changes when a file does: device, inode, size, and times of change of its content and its entry, in ns.

    Raises:
        OSError: it is not there, or may not be looked at.
    """
    status = os.stat(path)
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def checksum(value: Any, key: str = CHECKSUM) -> str:
    """Of a mapping, but for its entry `key`: the sha256 of it in JSON with sorted keys."""
    rest = {name: each for name, each in value.items() if name != key}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(value: Any) -> Any:
    """A mapping with its checksum, or a list of such: what a file of JSON is to hold."""
    value = json.loads(json.dumps(value))  # as it will be read: names of numbers become text, tuples lists
    if isinstance(value, list):
        return [sealed(each) for each in value]
    return value | {CHECKSUM: checksum(value)}


def sealed_json(value: Any) -> bytes:
    """The same in JSON."""
    text = json.dumps(sealed(value), indent=2, ensure_ascii=False) + "\n"
    return text.encode(
        errors="backslashreplace"
    )  # of what is no UTF-8, such as a name of a file, that is JSON's own escape


def unsealed(value: Any, where: Path | str, key: str = CHECKSUM, advice: str = "", several: bool = False) -> Any:
    """What was sealed, without its checksums.

    Args:
        value: a mapping, or a list of such.
        where: named in errors.
        key: of the checksum.
        advice: what to do, the end of the error.
        several: it may be a list.

    Raises:
        DamagedFile: a checksum is missing or wrong.
    """
    if several and isinstance(value, list):
        return [unsealed(each, where, key, advice) for each in value]
    if not isinstance(value, dict) or key not in value:
        raise DamagedFile(f"{where} is damaged, or of another version: it has no {key}{advice and f'; {advice}'}")
    if value[key] != checksum(value, key):
        raise DamagedFile(f"{where} is damaged or was edited: its {key} is of other contents{advice and f'; {advice}'}")
    return {name: each for name, each in value.items() if name != key}


def read_json(
    path: Path | str, most: int = RESULT, inside: Path | None = None, advice: str = "", several: bool = False
) -> Any:
    """What a file of JSON holds that we wrote; see `read_bytes`, `parse_json` and `unsealed` for what is raised."""
    return unsealed(parse_json(read_bytes(path, most, inside), path), path, advice=advice, several=several)


def free_memory() -> float:
    """Bytes of this machine's memory that are free, or can be freed; infinite where the system does not say."""
    try:
        with open("/proc/meminfo") as file:
            found = {line.split(":")[0]: line.split()[1] for line in file}
        return 1024 * float(found["MemAvailable"])
    except (OSError, KeyError, IndexError):
        return float("inf")


class OpenedFile:
    """A file that stays open, of which pieces are read where they stand. Several threads may.

    It is not mapped: a mapped file that is cut, or whose disk fails, ends the process with SIGBUS and without a word.

    Args:
        path: named in errors.
        file: of which this keeps a descriptor of its own, until it is collected.
    """

    def __init__(self, path: Path | str, file: IO[bytes]) -> None:
        self.path, self._descriptor = path, os.dup(file.fileno())

    def read(self, begin: int, size: int) -> bytearray:
        """So many bytes from a place on.

        Raises:
            DamagedFile: it ends before.
            OSError: it cannot be read; the message names it.
        """
        found = bytearray(size)
        view, done = memoryview(found), 0
        with named(self.path):
            while done < size:
                taken = os.preadv(self._descriptor, [view[done:]], begin + done)
                if not taken:
                    raise DamagedFile(f"{self.path} ends at byte {begin + done:,}: it was cut since it was opened")
                done += taken
        return found

    def __del__(self) -> None:
        os.close(self._descriptor)
