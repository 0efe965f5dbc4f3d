"""Shards on http(s):// and s3://, through fsspec, with a local cache of bounded size.

A file is fetched whole, checked against its sha256, and then appears in the cache under its name; the files that were not
used for the longest time make room. Many processes may share a cache. Connections that break are tried again.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.shards import Damaged, Shard

log = logging.getLogger(__name__)
ATTEMPTS = 8
_LARGEST_MANIFEST = 256 << 20
_TIMEOUTS: dict[str, Any] = {"total": None, "sock_connect": 20, "sock_read": 60}


def is_remote(location: str | Path) -> bool:
    """It is a URL."""
    return "://" in str(location)


class Remote:
    """A folder behind a URL, and its place in the cache.

    Args:
        url: of the folder.
        cache: folder of the whole cache.
        limit: bytes that the shards in the cache may take.

    Raises:
        ValueError: fsspec has no such protocol, or needs another package for it.
    """

    def __init__(self, url: str, cache: Path, limit: int) -> None:
        import fsspec

        self.url, self.cache, self.limit = url.rstrip("/"), cache, limit
        options: dict[str, Any] = {}
        if url.startswith(("http://", "https://")):
            import aiohttp

            options = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(**_TIMEOUTS)}}
        try:
            self.files, self.path = fsspec.core.url_to_fs(self.url, **options)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{url} cannot be opened: {error}") from error

    def manifest(self, name: str) -> bytes:
        """The manifest, anew each time.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be had.
        """
        path = f"{self.path}/{name}"
        size = _persistently(lambda: self.files.info(path).get("size") or 0, f"{self.url}/{name}")
        if size > _LARGEST_MANIFEST:
            raise ValueError(f"{self.url}/{name} has {size:,} bytes: not a manifest")
        content: bytes = _persistently(lambda: self.files.cat_file(path), f"{self.url}/{name}")
        return content

    def fetch(self, folder: Path, shard: Shard) -> Path:
        """The file of a shard in the cache, fetched unless it is there.

        Args:
            folder: of the corpus, in the cache.
            shard: which one.

        Raises:
            FileNotFoundError: it is not there.
            Damaged: what comes is not what the manifest says.
            OSError: it cannot be had.
        """
        path = folder / shard.file
        try:
            os.utime(path)  # it was used now
            return path
        except FileNotFoundError:
            pass
        content = self._download(shard)
        beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
        beside.write_bytes(content)
        os.replace(beside, path)
        self._make_room(path)
        return path

    def _download(self, shard: Shard) -> bytes:
        where = f"{self.url}/{shard.file}"

        def once() -> bytes:
            content: bytes = self.files.cat_file(f"{self.path}/{shard.file}")
            if hashlib.sha256(content).hexdigest() != shard.sha256:
                raise OSError(f"{len(content):,} of {shard.file_bytes:,} bytes, or others than the manifest says")
            return content

        try:
            return _persistently(once, where)
        except FileNotFoundError:
            raise
        except OSError as error:
            if "the manifest says" in str(error):
                raise Damaged(Path(where), None, str(error)) from error
            raise

    def _make_room(self, newest: Path) -> None:
        found = []
        for path in self.cache.glob("*/*.tar"):
            try:
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
            except FileNotFoundError:
                continue
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used <= self.limit:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                used -= size


def _persistently(once: Callable[[], Any], where: str) -> Any:
    """Tries again with growing pauses, unless the answer was that there is nothing or no permission."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return once()
        except (FileNotFoundError, PermissionError) as error:
            raise type(error)(f"{where}: {error}") from error
        except Exception as error:  # each protocol has its own
            if attempt == ATTEMPTS:
                raise OSError(
                    f"{where} cannot be had after {ATTEMPTS} attempts: {type(error).__name__} {error}"
                ) from error
            log.info("%s: %s %s; trying again", where, type(error).__name__, error)
            time.sleep(min(0.1 * 2**attempt, 10.0))
    raise AssertionError
