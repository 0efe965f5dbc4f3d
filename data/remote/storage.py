"""Shards behind URLs, through fsspec, each fetched whole, checked against its sha256 and kept in a cache (`data.remote.cache`).

What is read is bounded by what the manifest says, whatever the other side sends. Connections that break are tried again.
"""

import errno
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, TypeVar

from data.locations import CREDENTIALS, check_url, file_of, redact
from data.remote.cache import Cache
from data.shards import Damaged, Shard

log = logging.getLogger(__name__)
T = TypeVar("T")
ATTEMPTS = 8
_BLOCK = 1 << 20
_LARGEST_MANIFEST = 256 << 20
_ANY_SHARD = 1 << 32  # bytes; one of this size is fetched into a cache of any
_TIMEOUTS: dict[str, Any] = {"total": None, "sock_connect": 20, "sock_read": 60}
# What a disk says that takes no more: it is full, or the share of a user; a file is too large; it may not be written to; broken.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_TRANSIENT = (408, 425, 429)  # answers of HTTP below 500 that another attempt may mend


class Remote:
    """A folder behind a URL, and the cache for it.

    Args:
        url: of the folder.
        cache: folder of the whole cache.
        limit: bytes that the shards in the cache may take.

    Raises:
        ValueError: the URL is not one that is opened, or needs another package.
        OSError: the cache cannot be made.
    """

    def __init__(self, url: str, cache: Path, limit: int) -> None:
        import fsspec

        self.url = check_url(url)
        self.cache = Cache(cache, limit)
        self._how: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if self.url.startswith(("http://", "https://")):
            import aiohttp

            # trust_env: credentials of ~/.netrc, and proxies of the environment.
            options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(**_TIMEOUTS), "trust_env": True}}
            options["encoded"] = self.url.isascii()  # it is passed as it was given
            self._how = {"block_size": 0, "size": 1}  # one answer, read as a stream, whatever its length
        try:
            scheme, _, rest = self.url.partition("://")
            self.files = fsspec.filesystem(scheme, **options)
            self.path = self.url if scheme in ("http", "https") else file_of(self.url) if scheme == "file" else rest
        except (ImportError, ValueError) as error:
            raise ValueError(f"{self.url} cannot be opened: {redact(str(error))}") from None

    def manifest(self, name: str) -> bytes:
        """The manifest, anew each time.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is too large to be one.
            OSError: it cannot be had.
        """
        content = _persistently(lambda: b"".join(self._blocks(name, _LARGEST_MANIFEST)), f"{self.url}/{name}")
        if len(content) > _LARGEST_MANIFEST:
            raise ValueError(f"{self.url}/{name} has more than {_LARGEST_MANIFEST:,} bytes: not a manifest")
        return content

    def open(self, shard: Shard) -> IO[bytes]:
        """The file of a shard, open, from the cache, into which it is fetched unless it is there.

        Raises:
            FileNotFoundError: it is not there.
            Damaged: what comes is not what the manifest says.
            ValueError: it is larger than the whole cache.
            OSError: it cannot be had, or not be kept.
        """
        if shard.file_bytes > max(self.cache.limit, _ANY_SHARD):
            raise ValueError(
                f"{self.url}/{shard.file} has {shard.file_bytes:,} bytes, its manifest says, more than the cache may: "
                "raise loader.cache_gigabytes if that is so"
            )
        return self.cache.open(shard.sha256, shard.file_bytes, lambda file: self._fetch(shard, file))

    def forget(self, shard: Shard, file: IO[bytes]) -> None:
        """Takes the copy of a shard out of the cache."""
        self.cache.forget(shard.sha256, file)

    def _fetch(self, shard: Shard, file: IO[bytes]) -> None:
        where = f"{self.url}/{shard.file}"

        def once() -> str | None:
            file.seek(0)
            file.truncate()
            found, size = hashlib.sha256(), 0
            for block in self._blocks(shard.file, shard.file_bytes):
                file.write(block)
                found.update(block)
                size += len(block)
            if found.hexdigest() != shard.sha256:
                raise _Other(f"{size:,} of {shard.file_bytes:,} bytes, or others than the manifest says")
            return None

        try:
            _persistently(once, where)
        except _Other as error:
            raise Damaged(where, None, str(error)) from None

    def _blocks(self, name: str, limit: int) -> Iterator[bytes]:
        """The bytes of a file, one more than the limit at most."""
        left = limit + 1
        with closing(self.files.open(f"{self.path}/{name}", "rb", **self._how)) as file:
            while left and (block := file.read(min(_BLOCK, left))):
                left -= len(block)
                yield block


class _Other(OSError):
    """What came is not what the manifest says."""


def _persistently(once: Callable[[], T], where: str) -> T:
    """Tries again with growing pauses, unless the answer was that there is nothing or no permission."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return once()
        except FileNotFoundError:
            raise FileNotFoundError(f"{where} is not there") from None
        except Exception as error:  # each protocol has its own
            status = getattr(error, "status", None)
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise
            if isinstance(error, PermissionError) or status in (401, 403, 407):
                raise PermissionError(f"{where} may not be read: {_said(error)}. {CREDENTIALS}") from None
            if attempt == ATTEMPTS and isinstance(error, _Other):
                raise
            refused = isinstance(status, int) and 400 <= status < 500 and status not in _TRANSIENT
            if attempt == ATTEMPTS or refused:
                # Not `from error`: its own message has not been redacted.
                raise OSError(f"{where} cannot be had (attempts: {attempt}): {_said(error)}") from None
            log.info("%s: %s; trying again", where, _said(error))
            time.sleep(min(0.1 * 2**attempt, 10.0))
    raise AssertionError


def _said(error: Exception) -> str:
    return redact(f"{type(error).__name__} {error}")
