"""A sharded corpus, here or behind a URL: its manifest, and its documents read back in order."""

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from data.chunkers import Chunker, make_chunker
from data.options import LARGEST_CHUNK, ChunkerOptions, LoaderOptions, SourceOptions
from data.shards import Damaged, Sample, Shard, read_shard
from data.sources import make_source
from data.storage import Remote, is_remote

MANIFEST = "manifest.json"


@dataclass
class Counts:
    """Size of a split."""

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    source_bytes: int = 0


class Corpus:
    """Shards of one source under one chunker.

    Attributes:
        location: folder or URL.
        folder: where its files lie; for a URL, its folder in the cache.
        manifest: contents of manifest.json.
        shards: its shards.
        digest: of source, chunker and settings.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], remote: Remote | None = None) -> None:
        self.location = remote.url if remote else str(folder)
        self.folder, self.manifest, self._remote = folder, manifest, remote
        where = f"{self.location}/{MANIFEST}"
        names = {field.name for field in fields(Shard)}
        try:
            self.digest: str = manifest["digest"]
            self.options = ChunkerOptions(**manifest["chunker"])
            # A kind that is not installed here is no error: documents can be read without it.
            if not (isinstance(self.options.kind, str) and _is_size(self.options.k)):
                raise TypeError("chunker")
            self.fitted: dict[str, Any] | None = manifest.get("fitted")
            shards = [{name: shard[name] for name in names} for shard in manifest["shards"]]
            self.shards = TypeAdapter(list[Shard]).validate_python(shards)
            bad = [s.file for s in self.shards if Path(s.file).name != s.file or s.file in ("", ".", "..")]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is not a manifest of this version: {error} is missing or wrong") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(
                f"{where} is not a manifest: {place}={first['input']!r}: {first['msg'].lower()}"
            ) from error
        if bad:
            raise ValueError(f"{where} names a file outside its folder: {bad[0]!r}")
        self._checked: dict[str, tuple[int, int]] = {}

    @classmethod
    def open(cls, location: str | Path, options: LoaderOptions | None = None) -> "Corpus":
        """Opens a corpus by its folder, or by a URL (http, https, s3 and what else fsspec knows).

        Args:
            location: of the folder with the manifest.
            options: where the cache for URLs is, and how large; None: the defaults.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: it is not one of ours.
        """
        options = options or LoaderOptions()
        if is_remote(location):
            remote = Remote(str(location), Path(options.cache_dir), int(options.cache_gigabytes * 1e9))
            content = remote.manifest(MANIFEST)
            place = f"{remote.url.rpartition('/')[2]}-{hashlib.sha256(content).hexdigest()[:12]}"
            folder = Path(options.cache_dir) / place
            folder.mkdir(parents=True, exist_ok=True)
            return cls(folder, _manifest(content, f"{remote.url}/{MANIFEST}"), remote)
        path = Path(location) / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{location} is not a sharded corpus: it has no {MANIFEST}; run `haed shard` first")
        return cls(Path(location), _manifest(path.read_bytes(), str(path)))

    def chunker(self) -> Chunker:
        """The chunker that cut this corpus."""
        return make_chunker(self.options, self.fitted)

    def of(self, split: str) -> list[Shard]:
        """Shards of a split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def counts(self, split: str) -> Counts:
        """Size of a split."""
        total = Counts()
        for shard in self.of(split):
            for field in fields(Counts):
                setattr(total, field.name, getattr(total, field.name) + getattr(shard, field.name))
        return total

    def raster(self, split: str) -> int | None:
        """Chunks of a document where documents are rasters, which all have the same number; else None."""
        shards = self.of(split)
        if self.options.kind != "pixels" or not shards:
            return None
        size = shards[0].chunks // max(1, shards[0].documents)
        return size if all(shard.chunks == size * shard.documents for shard in shards) else None

    def read(self, shard: Shard) -> list[Sample]:
        """The samples of a shard; its sum is checked on first use in a process.

        Raises:
            Damaged: it is missing, truncated or changed.
            OSError: it cannot be fetched.
        """
        try:
            path = self._remote.fetch(self.folder, shard) if self._remote else self.folder / shard.file
            with open(path, "rb") as file:  # mapped, so that all ranks and workers of a machine share its memory
                size = os.fstat(file.fileno()).st_size
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except FileNotFoundError as error:
            raise Damaged(Path(f"{self.location}/{shard.file}"), None, "it is missing") from error
        stamp = (len(content), path.stat().st_mtime_ns if not self._remote else 0)
        if self._checked.get(shard.file) == stamp:
            return read_shard(path, content)
        try:
            samples = read_shard(path, content, shard)
        except Damaged:
            if self._remote:
                path.unlink(missing_ok=True)  # the next use fetches it again
            raise
        self._checked[shard.file] = stamp
        return samples

    def fetch_ahead(self, shards: list[Shard]) -> None:
        """Brings shards into the cache; nothing to do for a folder. A failure is left for `read` to meet."""
        for shard in shards if self._remote else []:
            try:
                self._remote.fetch(self.folder, shard)  # type: ignore[union-attr]
            except (OSError, Damaged):
                return

    @property
    def is_remote(self) -> bool:
        """Its shards are fetched."""
        return self._remote is not None

    def pieces(self, split: str) -> Iterator[tuple[bool, np.ndarray, np.ndarray]]:
        """Documents of a split in order, a long one in several pieces: whether it begins, tokens (n,), lengths (N,)."""
        for shard in self.of(split):
            for sample in self.read(shard):
                ends = np.cumsum(sample.documents)
                offsets = np.cumsum(sample.lengths, dtype=np.int64)[ends - 1].tolist()
                begin = start = 0
                for number, (end, stop) in enumerate(zip(ends.tolist(), offsets, strict=True)):
                    yield number > 0 or not sample.continues, sample.tokens[start:stop], sample.lengths[begin:end]
                    begin, start = end, stop

    def documents(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Whole documents of a split in order: tokens (n,) and lengths (N,) of each."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for begins, tokens, lengths in self.pieces(split):
            if begins and parts:
                yield _joined(parts)
                parts = []
            parts.append((tokens, lengths))
        if parts:
            yield _joined(parts)

    def originals(self, split: str) -> Iterator[bytes]:
        """The original bytes of each document of a split."""
        chunker, original = self.chunker(), self._original()
        for tokens, lengths in self.documents(split):
            yield original(chunker.join(tokens, lengths))

    def original_blocks(self, split: str) -> Iterator[bytes]:
        """The original bytes of a split, in blocks of any size."""
        chunker, original = self.chunker(), self._original()
        for _, tokens, lengths in self.pieces(split):
            yield original(chunker.join(tokens, lengths))

    def _original(self) -> Any:
        names = {field.name for field in fields(SourceOptions)}
        return make_source(
            SourceOptions(**{name: value for name, value in self.manifest["source"].items() if name in names})
        ).original


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _is_size(k: Any) -> bool:
    return isinstance(k, int) and 1 <= k <= LARGEST_CHUNK


def _manifest(content: bytes, where: str) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(manifest, dict):
        raise ValueError(f"{where} is not a manifest")
    return manifest


@dataclass
class DistinctChunks:
    """The C distinct chunks of a split: tokens (C, K) zero beyond lengths (C,), and how often each occurs (C,)."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


def distinct_chunks(corpus: Corpus, split: str) -> DistinctChunks:
    """Distinct chunks of a split, the most frequent first, equals in the order of their bytes."""
    k = corpus.chunker().k
    rows = np.zeros((0, k + 1), np.uint8)
    counts = np.zeros(0, np.int64)
    for shard in corpus.of(split):
        samples = corpus.read(shard)
        lengths = np.concatenate([sample.lengths for sample in samples])
        grid = np.zeros((len(lengths), k + 1), np.uint8)
        grid[:, :k][np.arange(k) < lengths[:, None]] = np.concatenate([sample.tokens for sample in samples])
        grid[:, k] = lengths
        both = np.concatenate([rows, grid]).view(f"V{k + 1}").ravel()
        weights = np.concatenate([counts, np.ones(len(grid), np.int64)])
        values, inverse = np.unique(both, return_inverse=True)
        rows = values.view(np.uint8).reshape(-1, k + 1)
        counts = np.bincount(inverse.ravel(), weights, len(values)).astype(np.int64)
    order = np.lexsort((np.arange(len(counts)), -counts))
    return DistinctChunks(rows[order, :k], rows[order, k], counts[order])


def write_json(path: Path, value: Any) -> None:
    """Writes JSON beside, syncs and renames."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
