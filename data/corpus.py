"""A sharded corpus, on this machine or behind a URL: its manifest, and its documents read back in order."""

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from data.chunkers import Chunker, make_chunker
from data.filesystem import MANY, CorruptFileError, OpenedFile, open_file, parse_json, read_bytes, verify_checksums
from data.options import CHUNKERS, LARGEST_CHUNK, SOURCES, ChunkerOptions, LoaderOptions, SourceOptions, restore_options
from data.remote import RemoteFolder
from data.shards import MISSING, CorruptShardError, Sample, Shard, read_shard
from data.sources.source import Source, make_source
from data.sources.splits import Allotted
from data.statistics import Summary
from data.urls import check_folder, check_url, is_remote

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FORMAT = 3  # of shards and manifests


@dataclass
class Counts:
    """The size of a split."""

    documents: int = 0
    chunks: int = 0
    tokens: int = 0
    source_bytes: int = 0


class Manifest(TypedDict, total=False):
    """The contents of manifest.json; see docs/reference/file-formats.md for its entries."""

    digest: str
    source: dict[str, Any]
    place: str | None
    chunker: dict[str, Any]
    chunker_version: int
    megabytes: int
    format: int
    versions: dict[str, str]
    splits: Allotted
    fitted: dict[str, Any]
    words: dict[str, Any]
    form: dict[str, int]
    statistics: dict[str, Any]
    parts: list[dict[str, Annotated[int, Field(ge=0, lt=10**6)]]]
    shards: list[dict[str, Any]]


class CorpusSlice(NamedTuple):
    """A document or a piece of one: whether the document begins here, tokens (n,), and lengths (N,) of chunks."""

    begins: bool
    tokens: np.ndarray
    lengths: np.ndarray


class Corpus:
    """The shards of one source under one chunker.

    Attributes:
        location: folder or URL.
        folder: folder of its files; for a URL, its folder in the cache.
        manifest: contents of manifest.json.
        shards: its shards.
        parts: number of shards of each split that each part of the source gave.
        digest: of source, chunker and settings.
        statistics: of each split.
        chunker_version: version of the chunker that split it.
        form: properties that all documents share: height, width and channels of pictures, rate and channels of sound;
            empty for text.
    """

    def __init__(self, folder: Path, manifest: Manifest, remote: RemoteFolder | None = None) -> None:
        self.location = remote.url if remote else str(folder)
        self.folder, self.manifest, self._remote = folder, manifest, remote
        where = f"{self.location}/{MANIFEST}"
        names = {field.name for field in fields(Shard)}
        try:
            if manifest["format"] != FORMAT:
                raise ValueError(f"{where} has format {manifest['format']!r}, not {FORMAT}. Run `haed shard` again.")
            TypeAdapter(Manifest).validate_python(manifest, strict=True)
            self.digest: str = manifest["digest"]
            self.options = restore_options(manifest["chunker"], ChunkerOptions, CHUNKERS)
            # A chunker that is not installed is no error: its documents can be read without it.
            unknown = manifest["chunker"].keys() - vars(self.options).keys()
            kind, k = self.options.kind, self.options.k
            is_valid = isinstance(kind, str) and isinstance(k, int) and 1 <= k <= LARGEST_CHUNK
            if not is_valid or (unknown and kind in CHUNKERS):
                raise TypeError("chunker")
            self.fitted: dict[str, Any] | None = manifest.get("fitted")
            self.chunker_version, self.form = manifest["chunker_version"], manifest.get("form", {})
            self.statistics = TypeAdapter(dict[str, Summary]).validate_python(manifest.get("statistics", {}))
            self.parts = manifest["parts"]
            shards = [{name: shard[name] for name in names} for shard in manifest["shards"]]
            self.shards = TypeAdapter(list[Shard]).validate_python(shards)
            bad = [s.file for s in self.shards if Path(s.file).name != s.file or s.file in ("", ".", "..")]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{where} is not a manifest of this version: {error} is missing or wrong") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(
                f"{where} is not a manifest: {place}={repr(first['input'])[:100]}: {first['msg'].lower()}"
            ) from error
        if bad:
            raise ValueError(f"{where} names a file outside its folder: {bad[0]!r}")
        self._checked: dict[str, tuple[int, int]] = {}

    @classmethod
    def open(cls, location: str | Path, options: LoaderOptions | None = None) -> "Corpus":
        """Open a corpus by its folder, or by a URL (see `data.urls`), which is logged first.

        Args:
            location: of the folder with the manifest.
            options: folder and size of the cache for URLs; None: the defaults.

        Raises:
            FileNotFoundError: there is no manifest.
            ValueError: the manifest is not one of ours, or the URL is not allowed.
        """
        options = options or LoaderOptions()
        remote = None
        if is_remote(location):
            url = check_url(str(location))
            where = f"{url}/{MANIFEST}"
            check_folder(options.cache_dir, "loader.cache_dir")
            log.info("reading shards from %s", url)
            remote = RemoteFolder(url, Path(options.cache_dir), int(options.cache_gigabytes * 1e9))
            content = remote.read_manifest(MANIFEST)
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2])[-100:]
            folder = remote.cache.make_folder(f"{name}-{hashlib.sha256(content).hexdigest()[:12]}")
        else:
            folder, where = Path(location), str(Path(location) / MANIFEST)
            try:
                content = read_bytes(where, MANY)
            except (FileNotFoundError, NotADirectoryError):
                raise FileNotFoundError(
                    f"{location} is not a sharded corpus: it has no {MANIFEST}. Run `haed shard` first"
                ) from None
        return cls(folder, verify_checksums(parse_json(content, where), where), remote)

    def build_chunker(self) -> Chunker:
        """Create the chunker that split this corpus."""
        return make_chunker(self.options, self.fitted, self.chunker_version)

    def shards_of(self, split: str) -> list[Shard]:
        """Return the shards of a split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def split_counts(self, split: str) -> Counts:
        """Return the size of a split."""
        shards = self.shards_of(split)
        return Counts(**{each.name: sum(getattr(shard, each.name) for shard in shards) for each in fields(Counts)})

    def chunks_per_raster(self, split: str) -> int | None:
        """Return the number of chunks of each document if all documents are rasters of one size; else None."""
        shards = self.shards_of(split)
        if self.options.kind != "pixels" or not shards:
            return None
        size = shards[0].chunks // max(1, shards[0].documents)
        return size if all(shard.chunks == size * shard.documents for shard in shards) else None

    def read(self, shard: Shard) -> list[Sample]:
        """Return the samples of a shard, in memory. Its checksum is verified on first use in a process.

        Raises:
            CorruptShardError: it is missing, truncated or changed.
            OSError: it cannot be fetched or read.
        """
        return self.open_shard(shard)[0]

    def open_shard(self, shard: Shard) -> tuple[list[Sample], OpenedFile]:
        """Return the samples of a shard and its file, where the tokens of each begin at `Sample.at`. See `read`."""
        where = f"{self.location}/{shard.file}"
        for last in (self._remote is None, True):
            with self._open_shard_file(shard, where) as file:  # another process may remove it from the cache meanwhile
                opened, status = OpenedFile(where, file), os.fstat(file.fileno())
                stamp = (status.st_size, status.st_mtime_ns)
                known = self._checked.get(shard.file) == stamp
                try:
                    samples = read_shard(where, _read_content(opened, status.st_size, shard), None if known else shard)
                except CorruptShardError as error:
                    if last:
                        raise
                    log.warning("%s: the cached copy is damaged (%s). It is fetched again", where, error.reason)
                    self._remote.cache.discard_file(shard.sha256, file)  # type: ignore[union-attr]
                    continue
            self._checked[shard.file] = stamp
            return samples, opened
        raise AssertionError

    def _open_shard_file(self, shard: Shard, where: str) -> IO[bytes]:
        try:
            return self._remote.open_shard(shard) if self._remote else open_file(self.folder / shard.file)
        except FileNotFoundError as error:
            raise CorruptShardError(where, None, MISSING) from error
        except CorruptFileError as error:
            raise CorruptShardError(where, None, str(error)) from error

    def fetch_ahead(self, shards: list[Shard]) -> None:
        """Fetch shards into the cache; do nothing for a folder. An error ends it, and is raised by `read` later."""
        with suppress(OSError, CorruptShardError):
            for shard in shards if self._remote else []:
                self._remote.open_shard(shard).close()  # type: ignore[union-attr]

    @property
    def is_remote(self) -> bool:
        """Its shards are fetched from a URL."""
        return self._remote is not None

    def webdataset(self, split: str) -> Any:
        """Return the samples of a split as a `webdataset.DataPipeline`, to which further stages may be appended.

        A sample has `tokens.npy` (n,) uint8, `lengths.npy` (N,) uint8, `documents.npy` (D,) int64 and `sample.json` (`names` of
        the D documents; `continues`: the first is the rest of the document before). Shards are shared out among ranks and
        loader workers, checked as by `read`, and come from the cache where they lie behind a URL.
        """
        import webdataset

        files = [shard.file for shard in self.shards_of(split)]
        if not files:
            raise ValueError(f"the {split} split of {self.location} is empty, so it has no samples")
        stages = (webdataset.split_by_node, webdataset.split_by_worker, self._read_for_webdataset)
        return webdataset.DataPipeline(webdataset.SimpleShardList(files), *stages)

    def _read_for_webdataset(self, entries: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        shards = {shard.file: shard for shard in self.shards}
        for entry in entries:
            for number, sample in enumerate(self.read(shards[entry["url"]])):
                yield {
                    "__key__": f"{Path(entry['url']).stem}-{number:06d}",
                    "__url__": f"{self.location}/{entry['url']}",
                    "tokens.npy": sample.tokens,
                    "lengths.npy": sample.lengths,
                    "documents.npy": sample.documents,
                    "sample.json": {"names": sample.names, "continues": sample.continues},
                }

    def iterate_slices(self, split: str) -> Iterator[CorpusSlice]:
        """Yield the documents of a split in order, long ones in several pieces."""
        for shard in self.shards_of(split):
            for sample in self.read(shard):
                ends = np.cumsum(sample.documents)
                offsets = np.cumsum(sample.lengths, dtype=np.int64)[ends - 1].tolist()
                begin = start = 0
                for number, (end, stop) in enumerate(zip(ends.tolist(), offsets, strict=True)):
                    begins = number > 0 or not sample.continues
                    yield CorpusSlice(begins, sample.tokens[start:stop], sample.lengths[begin:end])
                    begin, start = end, stop

    def iterate_documents(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield whole documents of a split in order: tokens (n,) and lengths (N,) of each."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        for begins, tokens, lengths in self.iterate_slices(split):
            if begins and parts:
                yield _joined(parts)
                parts = []
            parts.append((tokens, lengths))
        if parts:
            yield _joined(parts)

    def iterate_originals(self, split: str) -> Iterator[bytes]:
        """Yield the original bytes of each document of a split."""
        chunker, source = self.build_chunker(), self._make_source()
        for tokens, lengths in self.iterate_documents(split):
            yield source.restore_original(chunker.join(tokens, lengths))

    def iterate_original_blocks(self, split: str) -> Iterator[bytes]:
        """Yield the original bytes of a split, in blocks of any size."""
        chunker, source, rest = self.build_chunker(), self._make_source(), b""
        for _, tokens, lengths in self.iterate_slices(split):
            data = rest + chunker.join(tokens, lengths)
            whole = len(data) - len(data) % source.value_bytes  # a slice may end within a value
            rest = data[whole:]
            yield source.restore_original(data[:whole])

    def restore_original(self, tokens: bytes) -> bytes:
        """Return the original bytes of tokens that follow a whole value; a last value that is not whole is left out."""
        source = self._make_source()
        return source.restore_original(tokens[: len(tokens) - len(tokens) % source.value_bytes])

    def _make_source(self) -> Source:
        return make_source(restore_options(self.manifest["source"], SourceOptions, SOURCES))


def _read_content(opened: OpenedFile, size: int, shard: Shard) -> memoryview:
    """Return the contents of a shard's file, which must be no longer than its manifest entry says, for reading only."""
    if size > shard.file_bytes:
        raise CorruptShardError(opened.path, shard.file_bytes, f"it has {size:,} bytes, not {shard.file_bytes:,}")
    try:
        return memoryview(opened.read_range(0, size)).toreadonly()
    except CorruptFileError as error:
        raise CorruptShardError(opened.path, None, str(error)) from error


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
