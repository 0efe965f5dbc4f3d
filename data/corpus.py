"""A sharded corpus: its manifest, and its documents read back in order."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data.chunkers import Chunker, make_chunker
from data.options import ChunkerOptions
from data.shards import Shard, ShardArrays, read_shard

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
        folder: where they lie.
        manifest: contents of manifest.json.
        shards: its shards.
        digest: of source, chunker and settings.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        names = {field.name for field in fields(Shard)}
        try:
            self.digest: str = manifest["digest"]
            self.options = ChunkerOptions(**manifest["chunker"])
            self.shards = [Shard(**{name: shard[name] for name in names}) for shard in manifest["shards"]]
            bad = [s.file for s in self.shards if Path(s.file).name != s.file or s.file in ("", ".", "..")]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder / MANIFEST} is not a manifest: {error} is missing or wrong") from error
        if bad:
            raise ValueError(f"{folder / MANIFEST} names a file outside its folder: {bad[0]!r}")

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """Opens a corpus by its folder.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: it is not one of ours.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is not a sharded corpus: it has no {MANIFEST}; run `haed shard` first")
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(manifest, dict):
            raise ValueError(f"{path} is not a manifest")
        return cls(folder, manifest)

    def chunker(self) -> Chunker:
        """The chunker that cut this corpus."""
        return make_chunker(self.options)

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

    def read(self, shard: Shard) -> ShardArrays:
        """The arrays of a shard; its sum is checked on first use in a process.

        Raises:
            ValueError: it is damaged.
        """
        path = self.folder / shard.file
        if not path.is_file():
            raise FileNotFoundError(f"shard {path} is missing: delete {self.folder} and run `haed shard` again")
        _verify(path, shard.sha256, path.stat().st_mtime_ns)
        return read_shard(path)

    def documents(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Documents of a split in order: tokens (n,) and lengths (N,) of each."""
        for shard in self.of(split):
            arrays = self.read(shard)
            chunk_ends = np.concatenate([[0], np.cumsum(arrays.lengths, dtype=np.int64)])
            end = 0
            for size in arrays.documents.tolist():
                begin, end = end, end + size
                yield arrays.tokens[chunk_ends[begin] : chunk_ends[end]], arrays.lengths[begin:end]

    def originals(self, split: str) -> Iterator[bytes]:
        """The original bytes of each document of a split."""
        chunker = self.chunker()
        for tokens, lengths in self.documents(split):
            yield chunker.join(tokens, lengths)


@lru_cache(maxsize=4096)
def _verify(path: Path, sha256: str, _: int) -> None:
    """Checks the sum of a file; that it was right is remembered for this process and version of the file."""
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise ValueError(
                f"shard {path} is damaged: its sha256 is not that of {MANIFEST}; delete it and shard again"
            )


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
        arrays = corpus.read(shard)
        grid = np.zeros((len(arrays.lengths), k + 1), np.uint8)
        grid[:, :k][np.arange(k) < arrays.lengths[:, None]] = arrays.tokens
        grid[:, k] = arrays.lengths
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
