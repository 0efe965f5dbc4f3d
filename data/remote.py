"""Shards behind a URL, read through fsspec, and their cache on this machine.

Each shard is fetched whole, checked against its sha256 and kept in the cache. The manifest limits the bytes that are
read, whatever the server sends. Broken connections are retried.

The cache has a maximum size; the least recently used shards are removed first. It has a folder of its own with a marker
file, and its files are named by their sha256. So nothing else is ever removed, and a shard behind several addresses is
kept once.

Many processes share the cache without communicating. A process holds a lock on the file that it writes, and the others
wait. A file is returned open, so that it may be removed while it is read. A lock ends with its process. So files that a
killed process left unfinished are recognised, and are taken over or removed.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from data.filesystem import (
    MANY,
    CorruptFileError,
    acquire_lock,
    add_path_to_errors,
    is_still,
    open_file,
    remove_unlocked_files,
)
from data.shards import CorruptShardError, Shard
from data.sources.files import read_blocks
from data.urls import CREDENTIALS, check_url, path_of_file_url, redact_urls, show_url

log = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 8
# Of botocore, which is imported for s3:// alone: keys are missing, or the environment is wrong.
_NO_KEYS = ("NoCredentialsError", "NoAuthTokenError", "PartialCredentialsError", "ProfileNotFound")
_NO_TRUST = ("ClientConnectorCertificateError",)  # of aiohttp
_PACKAGES = {"s3": "'haed[s3]'", "gs": "gcsfs", "az": "adlfs"}
_ANY_SHARD = 1 << 32  # bytes of a shard that is fetched whatever the size of the cache
_TIMEOUTS: dict[str, Any] = {"total": None, "sock_connect": 20, "sock_read": 60}
# Bytes a second, after so many seconds: a server that drips would hold a command for ever.
_SLOWEST, _SLOW_AFTER = 1000, 60.0
_NO_ANSWERS = ("TooManyRedirects", "NonHttpUrlRedirectClientError", "InvalidUrlRedirectClientError")  # of aiohttp
# Disk errors: full, quota exceeded, file too large, read-only, broken.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_TRANSIENT = (408, 425, 429)  # HTTP statuses below 500 that are worth a retry
FOLDER = "haed-cache"
_MARK = "CACHEDIR.TAG"  # https://bford.info/cachedir: backup programs skip such a folder
_MARKED = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards that haed fetched; this folder may be deleted.\n"
_OURS = re.compile(r"[0-9a-f]{64}\.(tar|partial)")


class ShardCache:
    """A bounded folder of files that are identified by their sha256.

    Args:
        place: parent of the cache's own folder; everything else there is left alone.
        limit: maximum bytes of its files; one file may always be kept.

    Raises:
        FileExistsError: a folder of that name exists and is no cache.
        OSError: it cannot be created.
    """

    def __init__(self, place: Path, limit: int) -> None:
        self.folder, self.limit = place / FOLDER, limit
        self.make_folder()

    def make_folder(self, name: str = "") -> Path:
        """Create the folder, unless there is one that is no cache, and one in it; return that one.

        Anybody may delete it at any time.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        there = os.listdir(self.folder)
        if there and _MARK not in there:
            raise FileExistsError(
                f"{self.folder} is not a cache of haed: it has no {_MARK}. Choose another loader.cache_dir="
            )
        if not there:
            (self.folder / _MARK).write_bytes(_MARKED)
        (folder := self.folder / name).mkdir(parents=True, exist_ok=True)
        return folder

    def open_or_fill(self, sha256: str, size: int, fill: Callable[[IO[bytes]], None]) -> IO[bytes]:
        """Return the open file of that checksum. If it is missing, one of all processes and threads creates it first.

        Args:
            sha256: of the file.
            size: bytes it will have.
            fill: writes the content into an empty file, and checks it; its exceptions are raised here.
        """
        path, partial = self.folder / f"{sha256}.tar", self.folder / f"{sha256}.partial"
        while True:
            with suppress(FileNotFoundError):
                cached = open_file(path)
                _mark_used(cached)
                return cached
            try:
                written = acquire_lock(partial)
            except FileNotFoundError:
                self.make_folder()
                continue
            try:
                if path.exists():  # another process finished it after the check above
                    partial.unlink()
                    written.close()
                    continue
                with suppress(FileNotFoundError):  # the folder was emptied meanwhile, or deleted
                    (self.folder / _MARK).write_bytes(_MARKED)
                self._make_room(size)
                fill(written)
                with add_path_to_errors(self.folder):
                    written.flush()
                with suppress(FileNotFoundError):  # the folder was deleted meanwhile: the open file serves once
                    os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                written.close()
                raise
            _mark_used(written)
            fcntl.flock(written, fcntl.LOCK_UN)  # as long as it is open, it would keep the lock
            self._make_room(0, keep=path)
            return written

    def discard_file(self, sha256: str, file: IO[bytes]) -> None:
        """Remove this file, which is damaged, unless another was made in its place since."""
        path = self.folder / f"{sha256}.tar"
        if is_still(path, file.fileno()):
            path.unlink(missing_ok=True)

    def _make_room(self, wanted: int, keep: Path | None = None) -> None:
        """Remove leftovers of killed processes, then the least recently used files, until `wanted` more bytes fit."""
        remove_unlocked_files(path for path in self.folder.glob("*.partial") if _OURS.fullmatch(path.name))
        removable: list[tuple[int, int, Path]] = []
        used, entries = wanted, list[os.DirEntry[str]]()
        with suppress(FileNotFoundError):  # it was deleted meanwhile
            entries = list(os.scandir(self.folder))
        for entry in entries:
            if not _OURS.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):
                path, status = Path(entry.path), entry.stat()
                used += status.st_size
                if path.suffix == ".tar" and path != keep:
                    removable.append((status.st_atime_ns, status.st_size, path))
        for _, size, path in sorted(removable):
            if used <= self.limit:
                return
            with suppress(PermissionError):  # it belongs to another user
                path.unlink(missing_ok=True)
                used -= size


def _mark_used(file: IO[bytes]) -> None:
    """Set the access time to now. The modification time stays: a reader recognises a checked file by it."""
    with suppress(PermissionError):  # it belongs to another user
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))


class RemoteFolder:
    """A folder behind a URL, and its cache.

    Args:
        url: of the folder.
        cache: parent of the cache's folder.
        limit: maximum bytes of the shards in the cache.

    Raises:
        ValueError: the URL is not allowed, or needs a package that is not installed.
        OSError: the cache cannot be created.
    """

    def __init__(self, url: str, cache: Path, limit: int) -> None:
        import fsspec

        self.url = check_url(url)
        self.cache = ShardCache(cache, limit)
        self._how: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if self.url.startswith(("http://", "https://")):
            import aiohttp

            # trust_env: credentials of ~/.netrc, and proxies of the environment.
            options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(**_TIMEOUTS), "trust_env": True}}
            options["get_client"] = _make_client
            options["encoded"] = self.url.isascii()  # it is passed on unchanged
            self._how = {"block_size": 0, "size": 1}  # one response, read as a stream, whatever its length
        scheme, _, rest = self.url.partition("://")
        try:
            self._is_local = scheme == "file"
            # One in each process, as fsspec remembers: it is not to be used after a fork.
            self._file_system = partial(fsspec.filesystem, scheme, **options)
            self._file_system()
            path = path_of_file_url(self.url) if self._is_local else rest
            self.path = self.url if scheme in ("http", "https") else path
        except ImportError:
            raise ValueError(f"{self.url} needs a package. Run pip install {_PACKAGES[scheme]}") from None
        except ValueError as error:
            advice = f". {CREDENTIALS}" if scheme in _PACKAGES else ""
            raise ValueError(f"{self.url} cannot be opened: {redact_urls(str(error))}{advice}") from None

    def read_manifest(self, name: str) -> bytes:
        """Fetch the manifest, every time anew.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is too large to be one.
            OSError: it cannot be fetched.
        """
        content = _retry_with_pauses(lambda: b"".join(self._read_blocks(name, MANY)), f"{self.url}/{name}")
        if len(content) > MANY:
            raise ValueError(f"{self.url}/{name} has more than {MANY:,} bytes, so it is not a manifest")
        if not content.startswith(b"{"):
            raise ValueError(f"{self.url}/{name} is not a manifest: it begins with {content[:20]!r}. Check the address")
        return content

    def open_shard(self, shard: Shard) -> IO[bytes]:
        """Return the open file of a shard from the cache. It is fetched first if needed.

        Raises:
            FileNotFoundError: it is not there.
            CorruptShardError: the fetched content is not what the manifest says.
            ValueError: it is larger than the whole cache.
            OSError: it cannot be fetched or stored.
        """
        if shard.file_bytes > max(self.cache.limit, _ANY_SHARD):
            raise ValueError(
                f"{self.url}/{shard.file} has {shard.file_bytes:,} bytes according to its manifest, more than "
                "the cache may have. Raise loader.cache_gigabytes"
            )
        return self.cache.open_or_fill(shard.sha256, shard.file_bytes, lambda file: self._fetch_shard(shard, file))

    def _fetch_shard(self, shard: Shard, file: IO[bytes]) -> None:
        where, wrong = f"{self.url}/{shard.file}", ""

        def once() -> None:
            nonlocal wrong
            file.seek(0)
            file.truncate()
            digest, size = hashlib.sha256(), 0
            for block in self._read_blocks(shard.file, shard.file_bytes):
                with add_path_to_errors(self.cache.folder):
                    file.write(block)
                digest.update(block)
                size += len(block)
            if size != shard.file_bytes:
                got = f"{size:,} of" if size < shard.file_bytes else "more than"
                raise _WrongContentError(f"got {got} {shard.file_bytes:,} bytes")
            if digest.hexdigest() != shard.sha256:
                again, wrong = digest.hexdigest() == wrong, digest.hexdigest()  # the same twice: no broken connection
                reason = "its bytes are others than in the manifest"
                raise CorruptShardError(where, None, reason) if again else _WrongContentError(reason)

        try:
            _retry_with_pauses(once, where)
        except _WrongContentError as error:
            raise CorruptShardError(where, None, str(error)) from None

    def _read_blocks(self, name: str, limit: int) -> Iterator[bytes]:
        """Yield the bytes of a file, at most one more than the limit."""
        path, began, size = f"{self.path}/{name}", time.monotonic(), 0
        with open_file(path) if self._is_local else closing(self._open_stream(path)) as file:
            for block in read_blocks(file, limit + 1):
                seconds = time.monotonic() - began
                if seconds > _SLOW_AFTER and size and size < _SLOWEST * seconds:  # and this block may not be the last
                    raise TimeoutError(f"{size:,} bytes came in {seconds:.0f} s")
                yield block
                size += len(block)

    def _open_stream(self, path: str) -> Any:
        if self.url.startswith("s3://"):
            return _S3Stream(self._file_system(), path)
        return self._file_system().open(path, "rb", **self._how)


class _S3Stream:
    """A file of S3 as one response. `S3FileSystem.open` fetches a range as a whole, however long that takes."""

    def __init__(self, files: Any, path: str) -> None:
        files.retries = 1  # those of this module are enough
        files.config_kwargs.setdefault("retries", {"max_attempts": 0})
        bucket, key, _ = files.split_path(path)
        self.files, self.body = files, files.call_s3("get_object", Bucket=bucket, Key=key)["Body"]

    def read(self, size: int) -> bytes:
        from fsspec.asyn import sync

        return bytes(sync(self.files.loop, self.body.read, size))

    def close(self) -> None:
        self.files.loop.call_soon_threadsafe(self.body.close)


async def _make_client(**settings: Any) -> Any:
    """Return a session of aiohttp, made in each process: its traces cannot be sent to another one."""
    import aiohttp

    return aiohttp.ClientSession(trace_configs=[_log_redirects()], **settings)


@cache
def _log_redirects() -> Any:
    """Return a trace of aiohttp that logs each server to which another one redirects, once, before it is asked."""
    import aiohttp

    known = set[tuple[str, str]]()

    async def log_address(session: Any, context: Any, redirect: Any) -> None:
        address = urljoin(str(redirect.url), redirect.response.headers.get("Location", ""))
        places = urlsplit(str(redirect.url)).netloc, urlsplit(address).netloc
        if places[0] != places[1] and places not in known:
            known.add(places)
            log.info("%s redirects to %s", show_url(str(redirect.url)), show_url(address))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(log_address)
    return trace


class _WrongContentError(OSError):
    """An error: the fetched content is not what the manifest says."""


def _retry_with_pauses(once: Callable[[], T], where: str) -> T:
    """Call a function, and retry it with growing pauses, up to `ATTEMPTS` times, unless that would mend nothing."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return once()
        except Exception as error:  # each protocol has its own errors
            final = _make_final_error(error, where, attempt)
            if final is error:
                raise
            if final is not None:  # not `from error`: its own message has not been redacted
                raise final from None
            pause, left = min(0.1 * 2**attempt, 10.0), ATTEMPTS - attempt
            log.info("%s: %s. Trying again in %.1f s (attempts left: %d)", where, _describe_error(error), pause, left)
            time.sleep(pause)
    raise AssertionError


def _make_final_error(error: Exception, where: str, attempt: int) -> Exception | None:
    """Return what to raise in place of an error if there is to be no further attempt, else None.

    There is none after the last one, nor after an error that it would not mend. Those are a missing file, denied access,
    an error of the disk (raised as it is), a wrong environment, and a final answer of the server (most 3xx and 4xx). S3
    answers 400, without a reason, to credentials that are out of date or of another region.
    """
    status, description = _http_status(error), _describe_error(error)
    kind, scheme = type(error).__name__, where.partition(":")[0]
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{where} does not exist{'. Check the bucket and the path' * (scheme in _PACKAGES)}")
    if isinstance(error, CorruptFileError | CorruptShardError):  # the former of file://, a pipe or a device
        return error
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS and status is None:
        return error
    denied = status in (401, 403, 407) or status == 400 and scheme == "s3"
    denied = denied or isinstance(error, OSError) and str(error).startswith("Forbidden")  # of gcsfs
    if denied or isinstance(error, PermissionError) or kind in _NO_KEYS:
        return PermissionError(f"{where} cannot be read: {description}. {CREDENTIALS}")
    if scheme == "s3" and (isinstance(error, ValueError) or kind == "ParamValidationError"):
        advice = "Check the bucket, and AWS_ENDPOINT_URL, which has the address of a server"
        return ValueError(f"{where} cannot be read: {description}. {advice}")
    if attempt == ATTEMPTS and isinstance(error, _WrongContentError):
        return error
    refused = status is not None and 300 <= status < 500 and status not in _TRANSIENT
    if attempt == ATTEMPTS or refused or kind in _NO_ANSWERS + _NO_TRUST:
        advice = ". Set SSL_CERT_FILE to the certificate of its authority" if kind in _NO_TRUST else ""
        return OSError(f"{where} cannot be fetched (attempts: {attempt}): {description}{advice}")
    return None


def _http_status(error: Exception) -> int | None:
    """Return the HTTP status behind an error: of aiohttp, Azure, gcsfs, or botocore, which s3fs translates."""
    answer = getattr(error.__cause__, "response", None)
    behind = answer.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(answer, dict) else None
    if behind is None:  # one after the other: aiohttp warns of its `code`
        codes = (getattr(error, name, None) for name in ("status", "status_code", "code"))
        behind = next((status for status in codes if isinstance(status, int)), None)
    return behind


def _describe_error(error: Exception) -> str:
    kind = "" if isinstance(error, _WrongContentError) else f"{type(error).__name__} "
    text = " ".join(str(error).split())  # some have several lines
    return redact_urls(f"{kind}{text or 'no answer in time' * ('Timeout' in kind)}".rstrip())
