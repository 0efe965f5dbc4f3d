"""Files as sources read them: listed in a fixed order, opened through their compression, with bounds on everything.

Nothing is ever unpacked to disk. Compressed input is a stream, so memory does not depend on its size; one that grows out
of all proportion is refused (a decompression bomb).
"""

import bz2
import glob
import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20
LARGEST_DOCUMENT = 64 << 20  # of documents that have to be in memory whole: a line of JSON, a picture
FREE = 64 << 20  # bytes that any compressed file may hold, whatever its ratio
WINDOW = 27  # 2^27 bytes are the most a decompressor's window may have; xz -9 needs 65 MB
SUFFIXES = (".gz", ".tgz", ".xz", ".txz", ".bz2", ".zst")
UNREADABLE = (EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source: its path relative to the source (the name of what it holds), where it lies, its size."""

    name: str
    path: str
    size: int


def list_files(path: str | None, pattern: str, kind: str) -> list[File]:
    """Non-empty files of a file, folder or glob in the order of their names; hidden ones are left out.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no path, or nothing in it.
    """
    if not path:
        raise ValueError(f"source.kind={kind} needs source.path=, a file, folder or glob")
    root = Path(path)
    if root.is_file():
        found = [(root.name, root)]
    elif root.is_dir():
        found = [(each.relative_to(root).as_posix(), each) for each in root.glob(pattern)]
    elif glob.has_magic(path):
        root = Path(*[part for part in _before_magic(root.parts)])
        found = [(os.path.relpath(each, root), Path(each)) for each in glob.glob(path, recursive=True)]
    else:
        raise FileNotFoundError(f"source.path={path}: no such file or folder")
    files = [
        File(name, str(each), each.stat().st_size)
        for name, each in found
        if each.is_file() and not any(part.startswith(".") for part in Path(name).parts)
    ]
    files = sorted((file for file in files if file.size), key=lambda file: file.name)
    if not files:
        where = f"no non-empty file there matches {pattern!r}" if root.is_dir() else "it is empty"
        raise ValueError(f"source.path={path} has no data: {where}")
    return files


def _before_magic(parts: tuple[str, ...]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def is_compressed(path: str) -> bool:
    """By its suffix."""
    return path.lower().endswith(SUFFIXES)


def is_tar(path: str) -> bool:
    """By its suffix, compressed or not."""
    name = path.lower()
    return name.endswith((".tar", ".tgz", ".txz")) or name.rpartition(".")[0].endswith(".tar")


def open_stream(path: str, expansion: int) -> IO[bytes]:
    """Opens a file for reading from its start to its end, through its compression.

    Args:
        path: of the file; the suffix tells the compression.
        expansion: how many times its own size a compressed file may hold, beyond 64 MB.
    """
    file = open(path, "rb")  # noqa: SIM115 - the stream owns it
    name = path.lower()
    stream: Any
    if name.endswith((".gz", ".tgz")):
        stream = gzip.GzipFile(fileobj=file)
    elif name.endswith((".xz", ".txz")):
        stream = _Inflated(file, lambda: lzma.LZMADecompressor(memlimit=1 << WINDOW))
    elif name.endswith(".bz2"):
        stream = _Inflated(file, bz2.BZ2Decompressor)
    elif name.endswith(".zst"):
        bound: dict[int, int] = {int(zstd.DecompressionParameter.window_log_max): WINDOW}
        stream = _Inflated(file, lambda: zstd.ZstdDecompressor(options=bound))
    else:
        return file
    limit = FREE + expansion * os.fstat(file.fileno()).st_size
    return io.BufferedReader(_Bounded(stream, file, path, limit), BLOCK)


class _Bounded(io.RawIOBase):
    """A stream that refuses to go on beyond a number of bytes, and names its file if it cannot."""

    def __init__(self, stream: Any, file: IO[bytes], path: str, limit: int) -> None:
        self.stream, self.file, self.path, self.limit, self.passed = stream, file, path, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self.stream.read(len(buffer))
        except (*UNREADABLE, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk, not of the contents
            raise ValueError(f"{self.path} cannot be read: {error}") from error
        self.passed += len(content)
        if self.passed > self.limit:
            raise ValueError(
                f"{self.path} holds more than {self.limit:,} bytes, out of proportion to its size: a decompression bomb? "
                "If it is meant, raise source.expansion"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.stream.close()
        self.file.close()
        super().close()


class _Inflated(io.RawIOBase):
    """Streams of xz, bzip2 or zstd, one after the other, with a bound on memory, which `lzma.open` and others lack."""

    def __init__(self, file: IO[bytes], make: Callable[[], Any]) -> None:
        self.file, self.make, self.inflater = file, make, make()
        self.rest = b""

    def read(self, size: int = -1) -> bytes:
        while True:
            if self.inflater.eof:
                self.rest = (self.inflater.unused_data or self.file.read(BLOCK)).lstrip(b"\0")  # padding of xz
                if not self.rest:
                    return b""
                self.inflater = self.make()
            elif self.inflater.needs_input and not self.rest:
                self.rest = self.file.read(BLOCK)
                if not self.rest:
                    raise EOFError("compressed file ended before its end-of-stream marker")
            found: bytes = self.inflater.decompress(self.rest, size)
            self.rest = b""
            if found:
                return found


def blocks(stream: IO[bytes], size: int | None = None) -> Iterator[bytes]:
    """The next `size` bytes of a stream (None: all) in blocks of at most a megabyte."""
    left = size
    while left is None or left > 0:
        block = stream.read(BLOCK if left is None else min(BLOCK, left))
        if not block:
            return
        left = None if left is None else left - len(block)
        yield block


def members(path: str, expansion: int) -> Iterator[tuple[str, IO[bytes], int]]:
    """Regular files of a tar, compressed or not: name, content and size of each, valid until the next is asked for."""
    with (
        open_stream(path, expansion) as stream,
        tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK) as tar,
    ):
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name, content, member.size
            setattr(tar, "members", [])  # noqa: B010 - else headers pile up


def read_whole(content: IO[bytes], size: int, name: str) -> bytes:
    """A document that has to be in memory whole.

    Raises:
        ValueError: it is larger than 64 MB.
    """
    if size > LARGEST_DOCUMENT:
        raise ValueError(f"{name} has {size:,} bytes, more than the {LARGEST_DOCUMENT:,} that one document may have")
    return content.read(LARGEST_DOCUMENT + 1)
