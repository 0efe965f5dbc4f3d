"""Files of a source: listed in a fixed order and opened through their compression, with bounds on everything.

Nothing is ever unpacked to disk. Compressed input is a stream, so memory does not depend on its size. One that grows
out of all proportion is refused (a decompression bomb).
"""

import bz2
import glob
import gzip
import io
import lzma
import os
import re
import sys
import tarfile
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any

import numpy as np

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 1 << 20
_PIECE = 1 << 14  # what is left of it is copied for each of many streams in a file
_TAR_BLOCK = 1 << 14  # `tarfile` copies the rest of its buffer at each read
_HEADERS = 3 * _TAR_BLOCK  # bytes that may be read from the end of a member to the next one: its long name, attributes
LARGEST_DOCUMENT = 64 << 20  # bytes of a document that must fit into memory: a line of JSON, a picture
FREE = 64 << 20  # bytes that any compressed file may hold, whatever its ratio
WINDOW = 27  # log2 of the maximum window of a decompressor; xz -9 needs 65 MB
_SINGLE = (".gz", ".xz", ".bz2", ".zst")
SUFFIXES = (*_SINGLE, ".tgz", ".txz")
_SUMS = r"(?:(?:md5|sha-?(?:1|224|256|384|512))(?:sums?)?|b2sums?|crc(?:32)?)"
# Names of files that are never data. Files that describe the data (`_ABOUT`) can be texts themselves.
_ASIDE = {
    "checksums": re.compile(
        rf".*\.{_SUMS}(?:\.txt)?|{_SUMS}(?:\.txt)?|checksums?(?:\.txt)?|.*\.\w+\.(?:asc|sig)", re.IGNORECASE
    ),
    "no data by their names": re.compile(
        r".*~|#.*#|.*\.(?:sw[op]|bak|orig)|thumbs\.db|desktop\.ini|_success|_metadata|_common_metadata|dataset_infos?\.json|croissant\.json",
        re.IGNORECASE,
    ),
}
_ABOUT = re.compile(
    r"(?:read[-_ ]?me|licen[cs]es?|copying|copyright|notice|authors|contributors|contributing|change-?log|citation|credits"
    r"|code[-_]of[-_]conduct|data(?:set)?[-_]?card)(?![a-z]).*",
    re.IGNORECASE,
)
_BESIDE = re.compile(  # names of files to leave out if they state no split and others do
    r"(?:disclaimer|history|version|todo|install|terms|info|about|notes?|manifest|metadata|stat(?:e|s|istics)|vocab(?:ulary)?"
    r"|requirements|makefile|index\.html?|urls?|sources?)(?![a-z]).*|.*[._-](?:read[-_]?me|licen[cs]e)(?:\.[a-z]+)?"
    r"|.*\.(?:py|sh|ipynb|bat|ps1|toml|cfg|ini|ya?ml|log)",
    re.IGNORECASE,
)
_MOST_NAMES = 100_000  # maximum number of names that braces may expand to
_RANGE = re.compile(r"\{(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?(\d+))?\}")
ANY = "**/*"  # the default pattern
NOTES = ".sources.json"  # a file in a folder of corpora
# Files in the folder of a run, and of a comparison.
MADE = [{"config.yaml", "corpus.json"}, {"config.yaml", "lock"}, {"comparison.html", "comparison.png"}]
_CORPUS = re.compile(r".*-[0-9a-f]{12}")  # the folder of a corpus, with a manifest
LINKS = "links to folders or out of the folder (source.follow_links=true follows them)"
UNREADABLE = (EOFError, lzma.LZMAError, zlib.error, zstd.ZstdError)


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source: its path relative to the source, which names its contents, its path on disk, and its size."""

    name: str
    path: str
    size: int


LeftOut = defaultdict[str, list[str]]  # names of files that are not read, by the reason


def list_files(
    path: str | None, pattern: str, kind: str, follow_links: bool = False, left_out: LeftOut | None = None
) -> list[File]:
    """List the files of a file, folder or glob in order of their names, but those hidden, empty, or no data by name.

    Args:
        path: a file, a folder, or a glob; with braces, as in a shell, several of these. A glob is a folder and a pattern
            of files, or of folders if it matches no file.
        pattern: a glob relative to the folder, optionally with braces, which files of a glob must match, too.
        kind: of the source, for errors.
        follow_links: follow links that lead out of the folder, and links to folders; else they are left out.
        left_out: receives the names of files that are left out.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: no path, no such pattern, or nothing in it.
    """
    if not path:
        raise ValueError(f"source.kind={kind} needs source.path=, a file, folder or glob, such as source.path=my-texts")
    if not pattern or pattern.startswith("/") or ".." in pattern.split("/"):
        raise ValueError(f"source.pattern={pattern!r}: expected a glob relative to source.path, such as **/*.txt")
    left_out = LeftOut(list) if left_out is None else left_out
    paths = [path] if os.path.lexists(path) else expand_braces(path, "source.path")
    patterns = [each.split("/") for each in dict.fromkeys((pattern, *expand_braces(pattern, "source.pattern")))]
    base = Path(os.path.dirname(path.partition("{")[0]))  # names of files are relative to it
    if glob.has_magic(str(base)):
        base = _split_glob(base)[0]
    missing = [each for each in paths if not (glob.has_magic(each) or os.path.exists(each))]
    if missing and len(paths) > 1:
        raise FileNotFoundError(
            f"source.path={path}: {len(missing):,} of the {len(paths):,} files or folders do not exist: "
            f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
    paths_by_name = dict[str, str]()
    is_chosen = pattern != ANY
    for each in paths:
        root, glob_parts = Path(each), None
        if glob.has_magic(each) and not root.exists():
            root, one = _split_glob(root)
            glob_parts, is_chosen = one.split("/"), True
        before = f"{os.path.relpath(root, base)}/" if len(paths) > 1 and root != base else ""
        if root.is_file():
            if any(_matches_glob((root.name,), one) for one in patterns):
                paths_by_name[before[:-1] or root.name] = str(root)
        elif root.is_dir():
            inside, aside = dict[str, str](), LeftOut(list)
            if glob_parts is None:
                names_and_paths = _walk_files(str(root), patterns, follow_links, left_out)
            else:
                names_and_paths = _walk_glob(str(root), glob_parts, patterns, follow_links, left_out)
            for name, place in sorted(names_and_paths):
                reason = next((why for why, names in _ASIDE.items() if names.fullmatch(name.rpartition("/")[2])), None)
                if reason:
                    aside[reason].append(name)
                else:
                    inside[name] = place
            if not inside and is_chosen:  # the pattern asks for just these
                inside, aside = {name: str(root / name) for names in aside.values() for name in names}, LeftOut(list)
            for reason, names in aside.items():
                left_out[reason] += names
            paths_by_name |= {before + name: place for name, place in inside.items()}
        elif root.exists():
            raise ValueError(f"source.path={path} is neither a file nor a folder. Pipe it in with source.path=-")
        else:
            raise FileNotFoundError(f"source.path={each}: no such file or folder")
    files = []
    for name, each in sorted(paths_by_name.items()) if len(paths) > 1 else paths_by_name.items():
        if size := os.stat(each).st_size:
            files.append(File(name, each, size))
        else:
            left_out["empty"].append(name)
    if not files:
        raise ValueError(f"source.path={path} has no data: {_explain_no_files(paths_by_name, pattern, left_out)}")
    return files


def _explain_no_files(paths_by_name: Iterable[str], pattern: str, left_out: LeftOut) -> str:
    names = list(paths_by_name)
    more = [f"{len(names):,} {reason}" for reason, names in left_out.items() if reason != "empty"]
    explanation = "no file there" + (f" matches source.pattern={pattern}" if pattern != ANY else "")
    if len(names) == 1:
        explanation = f"{names[0]} is empty (0 bytes)"
    elif names:
        listed = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        explanation = f"all {len(names):,} files are empty (0 bytes): {listed}"
    return explanation + (f"; left out: {'; '.join(more)}" if more else "")


def is_about(name: str) -> bool:
    """Return if a file describes the others, by its name, such as README.md or LICENSE. It may be no data."""
    return _ABOUT.fullmatch(name.rpartition("/")[2]) is not None


def is_beside(name: str) -> bool:
    """Return if a file that states no split is no data where others state one, by its name, such as download.sh."""
    return _BESIDE.fullmatch(name.rpartition("/")[2]) is not None


def expand_braces(text: str, option: str) -> list[str]:
    """Expand the braces of a text as a shell does: `{000..002}` and `{a,b}`.

    A text without braces is returned as it is.

    Args:
        text: a path or a pattern.
        option: option that gave it, for the message.

    Raises:
        ValueError: it expands to too many names.
    """
    if "{" not in text:
        return [text]
    from braceexpand import braceexpand

    if _count_names(text) > _MOST_NAMES:
        raise ValueError(
            f"{option}={text[:200]}: its braces expand to more than {_MOST_NAMES:,} names. Give fewer, or use a glob"
        )
    try:
        return list(dict.fromkeys(braceexpand(text, escape=False)))
    except ValueError:  # they are not balanced
        return [text]


def _count_names(text: str) -> int:
    """Count the names that braces expand to, or more if they are nested, without expanding them."""
    count, inside = 1, list[int]()  # alternatives of each open pair
    for each in text:
        if each == "{":
            inside.append(1)
        elif inside and each == ",":
            inside[-1] += 1
        elif inside and each == "}":
            count = min(count * inside.pop(), 1 << 62)
    for first, last, step in _RANGE.findall(text):
        if max(map(len, (first, last, step))) > 18:
            return 1 << 62
        ends = [int(each) if each.lstrip("-").isdigit() else ord(each) for each in (first, last)]
        count = min(count * (abs(ends[1] - ends[0]) // max(1, int(step or 1)) + 1), 1 << 62)
    return count


def _split_glob(path: Path) -> tuple[Path, str]:
    """Split a glob into a folder and a pattern relative to it."""
    first = next(number for number, part in enumerate(path.parts) if glob.has_magic(part))
    return Path(*path.parts[:first]), "/".join(path.parts[first:])


def _walk_files(root: str, patterns: list[list[str]], follow: bool, left_out: LeftOut) -> Iterator[tuple[str, str]]:
    """Yield name and path of the regular files that match a pattern. No folder is visited twice."""
    home, seen = os.path.realpath(root), {os.path.realpath(root)}

    def unreadable(error: OSError) -> None:
        left_out["not readable"].append(os.path.relpath(error.filename, root))

    for folder, folders, names in os.walk(root, onerror=unreadable, followlinks=follow):
        base = os.path.relpath(folder, root)
        parts = () if base == "." else tuple(base.split(os.sep))
        is_corpus = bool(parts) and "manifest.json" in names and _CORPUS.fullmatch(parts[-1])
        if parts and (NOTES in names or is_corpus or any(each.issubset(names) for each in MADE)):
            left_out["made by haed"].append(f"{base}/")  # shards_dir or a run, in the folder of the source
            folders.clear()
            continue
        kept = []
        for each in sorted(folders):
            place, name = os.path.join(folder, each), "/".join((*parts, each, ""))
            if _is_hidden(each):
                left_out["hidden"].append(name)
            elif os.path.islink(place) and not follow:
                left_out[LINKS].append(name)
            elif (real := os.path.realpath(place)) not in seen:  # else a loop or a repetition
                seen.add(real)
                kept.append(each)
        folders[:] = kept
        for each in names:
            place, name = os.path.join(folder, each), "/".join((*parts, each))
            if not any(_matches_glob((*parts, each), pattern) for pattern in patterns):
                continue
            if _is_hidden(each):
                left_out["hidden"].append(name)
            elif os.path.islink(place) and not os.path.exists(place):
                left_out["links to nowhere"].append(name)
            elif os.path.islink(place) and not follow and os.path.commonpath((os.path.realpath(place), home)) != home:
                left_out[LINKS].append(name)
            elif not os.path.isfile(place):
                left_out["no regular files"].append(name)
            else:
                yield name, place


def _walk_glob(
    root: str, glob_parts: list[str], patterns: list[list[str]], follow: bool, left_out: LeftOut
) -> Iterator[tuple[str, str]]:
    """Yield the files of a glob that match a pattern; if the glob matches no file, those in the folders it matches."""
    walked, depth = LeftOut(list), 0
    names_and_paths = list(_walk_files(root, [glob_parts], follow, walked))
    if not names_and_paths:
        walked, depth = LeftOut(list), len(glob_parts)
        names_and_paths = list(_walk_files(root, [[*glob_parts, *ANY.split("/")]], follow, walked))
    for reason, names in walked.items():
        left_out[reason] += names
    for name, path in names_and_paths:
        parts = tuple(name.split("/"))  # a pattern matches all of them, or those below a folder that the glob matches
        if any(_matches_glob(parts[first:], pattern) for pattern in patterns for first in {0, depth}):
            yield name, path


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _matches_glob(parts: tuple[str, ...], pattern: list[str]) -> bool:
    """Return if a path matches a glob, in which ** matches any number of folders."""
    if not pattern or (pattern[0] != "**" and not parts):
        return not pattern and not parts
    if pattern[0] == "**":
        return _matches_glob(parts, pattern[1:]) or (bool(parts) and _matches_glob(parts[1:], pattern))
    return fnmatchcase(parts[0], pattern[0]) and _matches_glob(parts[1:], pattern[1:])


def is_compressed(path: str) -> bool:
    """Return if a file is compressed, by its suffix."""
    return path.lower().endswith(SUFFIXES)


def is_tar(path: str) -> bool:
    """Return if a file is a tar, compressed or not, by its suffix."""
    return path.lower().endswith((".tar", ".tgz", ".txz", *(f".tar{suffix}" for suffix in _SINGLE)))


def open_stream(path: str, expansion: int) -> IO[bytes]:
    """Open a file for reading from start to end, decompressed as its suffix says.

    `expansion` is the maximum ratio of decompressed to compressed size, beyond 64 MB.
    """
    file = open(path, "rb")  # noqa: SIM115 - the stream owns it
    return open_decompressed(file, path, FREE + expansion * os.fstat(file.fileno()).st_size)


def open_decompressed(file: IO[bytes], path: str, limit: int) -> IO[bytes]:
    """Return a stream of the contents of a file or a member of a tar, decompressed as the suffix of `path` says.

    If it is compressed, it may give at most `limit` bytes. The file is closed with the stream.
    """
    name = path.lower()
    stream: Any
    if name.endswith((".gz", ".tgz")):
        stream = gzip.GzipFile(fileobj=file)
    elif name.endswith((".xz", ".txz")):
        stream = _DecompressedStream(file, lambda: lzma.LZMADecompressor(memlimit=1 << WINDOW), 4)
    elif name.endswith(".bz2"):
        stream = _DecompressedStream(file, bz2.BZ2Decompressor)
    elif name.endswith(".zst"):
        bound: dict[int, int] = {int(zstd.DecompressionParameter.window_log_max): WINDOW}
        stream = _DecompressedStream(file, lambda: zstd.ZstdDecompressor(options=bound))
    else:
        return file
    return io.BufferedReader(_BoundedStream(stream, file, path, limit), BLOCK)


def bound_stream(stream: Any, file: IO[bytes], path: str, expansion: int, claimed: int = 0) -> IO[bytes]:
    """Return a decompressed stream that fails as soon as it is out of proportion to its file; see `open_stream`.

    Only `read` and `close` of the stream are used. `claimed` is the size of the contents according to the file; the real
    size is checked by reading.

    Raises:
        ValueError: it claims to have too much, or, while it is read, gives too much.
    """
    bounded = _BoundedStream(stream, file, path, FREE + expansion * os.fstat(file.fileno()).st_size)
    bounded.check_size(claimed)
    return io.BufferedReader(bounded, BLOCK)


class _BoundedStream(io.RawIOBase):
    """A stream that fails beyond a number of bytes, and names its file in errors."""

    def __init__(self, stream: Any, file: IO[bytes], path: str, limit: int) -> None:
        self.stream, self.file, self.path, self.limit, self.passed = stream, file, path, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self.stream.read(len(buffer))
        except (*UNREADABLE, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the contents
            raise ValueError(f"{self.path} cannot be read: {error}") from error
        self.passed += len(content)
        self.check_size(self.passed)
        buffer[: len(content)] = content
        return len(content)

    def check_size(self, size: int) -> None:
        if size > self.limit:
            raise ValueError(
                f"{self.path} expands to more than {self.limit:,} bytes, which may be a decompression bomb. "
                "If this is intended, raise source.expansion"
            )

    def close(self) -> None:
        self.stream.close()
        self.file.close()
        super().close()


class _DecompressedStream(io.RawIOBase):
    """A stream of concatenated xz, bzip2 or zstd streams with a bound on memory, which `lzma.open` and others lack.

    Zeros may follow a stream in multiples of `padding` bytes (xz: 4); 0: only another stream may.
    """

    def __init__(self, file: IO[bytes], make: Callable[[], Any], padding: int = 0) -> None:
        self.file, self.make, self.inflater, self.padding = file, make, make(), padding
        self.rest = b""

    def read(self, size: int = -1) -> bytes:
        while True:
            if self.inflater.eof:
                self.rest = self._skip_padding(self.inflater.unused_data)
                if not self.rest:
                    return b""
                self.inflater = self.make()
            elif self.inflater.needs_input and not self.rest:
                self.rest = self.file.read(_PIECE)
                if not self.rest:
                    raise EOFError("compressed file ended before its end-of-stream marker")
            content: bytes = self.inflater.decompress(self.rest, size)
            self.rest = b""
            if content:
                return content

    def _skip_padding(self, rest: bytes) -> bytes:
        """Return the bytes after a stream and its padding; nothing at the end of the file."""
        zeros = 0
        while rest := rest or self.file.read(_PIECE):
            stream = rest.lstrip(b"\0") if self.padding else rest
            zeros += len(rest) - len(stream)
            rest = stream
            if stream:
                break
        if zeros and zeros % self.padding:
            raise EOFError(f"{zeros:,} zeros after a stream are not padding, which is a multiple of four")
        return rest


def read_blocks(stream: IO[bytes], size: int | None = None) -> Iterator[bytes]:
    """Yield the next `size` bytes of a stream (None: all) in blocks of at most a megabyte."""
    left = sys.maxsize if size is None else size
    while left > 0 and (block := stream.read(min(BLOCK, left))):
        left -= len(block)
        yield block


class _TarStream:
    """The bytes of a tar. It remembers the last ones, and how many more may be read.

    `tarfile` reads headers that describe another whole, however large they are, and before Python 3.11.10 in a time
    that grows with the square.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.tail, self.left = stream, b"", float(_HEADERS)

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.tail = (self.tail + content)[-tarfile.BLOCKSIZE :]
        self.left -= len(content)
        if self.left < 0:
            raise tarfile.ReadError(f"headers without a member have more than {_HEADERS:,} bytes")
        return content


def iterate_members(
    path: str, expansion: int, remarks: Counter[str] | None = None
) -> Iterator[tuple[str, IO[bytes], int]]:
    """Yield the regular files of a tar, compressed or not. The content of each is valid until the next is requested.

    Args:
        path: of the tar.
        expansion: maximum ratio of contents to compressed size.
        remarks: counts links, which are left out: their targets have already been passed.

    Raises:
        ValueError: it is damaged, does not end as a tar does, goes on behind its end, or has a sparse member.
        tarfile.TarError: a member's content is truncated, raised when it is read.
    """
    remarks = Counter() if remarks is None else remarks
    try:
        with open_stream(path, expansion) as stream:
            whole: Any = _TarStream(stream)
            with tarfile.open(fileobj=whole, mode="r|", bufsize=_TAR_BLOCK) as tar:
                for member in tar:
                    whole.left = _HEADERS + tar.offset - member.offset_data  # not the size, which a header may claim
                    if member.issparse():  # a kilobyte may expand to any number of zeros
                        raise ValueError(
                            f"{path}: {member.name} is sparse. Make the tar again without the option sparse"
                        )
                    is_link = member.issym() or member.islnk()
                    remarks["links in tars were left out, although they may stand for files"] += is_link
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is not None:
                        yield member.name, content, member.size
                    setattr(tar, "members", [])  # noqa: B010 - else headers pile up
                rest: Any = tar.fileobj
                whole.left = float("inf")
                while block := rest.read(BLOCK):  # `tarfile` stops silently at a damaged header and between two tars
                    if any(block):
                        raise ValueError(
                            f"{path} is damaged or holds more than one tar: it continues after the end of the first"
                        )
            if any(whole.tail):
                raise ValueError(f"{path} was truncated: the tar has no end")
    except tarfile.TarError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return the shape and type of the array in a .npy; raise ValueError if it is no such, or in Fortran order."""
    try:
        version = np.lib.format.read_magic(file)
        reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = reader(file)
    except (OSError, zipfile.BadZipFile):
        raise
    except Exception as error:  # Python's parser reads the header, and may raise many kinds of errors
        raise ValueError(f"its header is invalid: {error or type(error).__name__}") from error
    if fortran:
        raise ValueError("its array has Fortran order")
    return shape, dtype


def read_whole(content: IO[bytes], size: int, name: str, limit: int = 0) -> bytes:
    """Read a document that has to fit into memory as a whole, decompressed.

    Args:
        content: the document.
        size: its bytes.
        name: of it; the suffix tells the compression if `limit` is given.
        limit: maximum decompressed bytes; 0: it is not decompressed.

    Raises:
        ValueError: it is larger than 64 MB, or out of proportion.
    """
    if size <= LARGEST_DOCUMENT:
        if limit and name.lower().endswith(_SINGLE):
            content = open_decompressed(content, name, limit)
        whole = content.read(LARGEST_DOCUMENT + 1)
        size = len(whole)
    if size > LARGEST_DOCUMENT:
        raise ValueError(f"{name} has {size:,} bytes, but a document may have at most {LARGEST_DOCUMENT:,}")
    return whole
