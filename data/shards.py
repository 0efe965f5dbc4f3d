"""Shards: WebDataset tars of plain arrays, written whole or not at all, with the same bytes for the same documents.

A sample holds consecutive documents of one split, about a megabyte together. A longer document continues in the next
sample:

    KEY.tokens.npy     (n,) uint8, all tokens
    KEY.lengths.npy    (N,) uint8, tokens of each chunk
    KEY.documents.npy  (D,) int64, chunks of each document
    KEY.sample.json    {"names": [...], "continues": the first is the rest of the document before,
                        "crc32": of the content of each of the three arrays}

KEY is SPLIT-PART-SAMPLE, such as train-00003-000012, and unique in the corpus. PART is the number of the part that
wrote the shard. SAMPLE is the number of the sample among those of the split in that part.

The sha256 in the manifest tells if a shard is whole. The checksums inside tell where it is damaged.
"""

import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from data.chunkers import Chunker
from data.filesystem import add_path_to_errors, parse_json
from data.sources.files import read_npy_header
from data.sources.source import SPLITS, Piece
from data.statistics import Statistics
from data.urls import is_remote

SAMPLE_BYTES = 1 << 20
_ARRAYS = {"tokens": np.uint8, "lengths": np.uint8, "documents": np.int64}


@dataclass
class Shard:
    """A finished tar, with what it holds; an entry of `shards` in manifest.json."""

    file: str
    split: Annotated[str, Field(pattern=f"^({'|'.join(SPLITS)})$")]
    samples: Annotated[int, Field(ge=0, strict=True)]
    documents: Annotated[int, Field(ge=0, strict=True)]
    chunks: Annotated[int, Field(ge=0, strict=True)]
    tokens: Annotated[int, Field(ge=0, strict=True)]
    source_bytes: Annotated[int, Field(ge=0, strict=True)]
    file_bytes: Annotated[int, Field(ge=0, strict=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass
class Sample:
    """The content of a sample: D documents of N chunks of n tokens.

    Attributes:
        tokens: (n,) uint8.
        lengths: (N,) uint8, tokens of each chunk.
        documents: (D,) int64, chunks of each document.
        names: of the documents.
        continues: the first document is the rest of the one before.
        at: byte offset in its shard where its tokens begin.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    names: list[str]
    continues: bool = False
    at: int = 0


MISSING = "missing"  # the reason of a `CorruptShardError` without a file


class CorruptShardError(ValueError):
    """An error: a shard is not what was written. The message names it, the first damaged byte, and what to do.

    Attributes:
        path: of the shard, or its URL.
        offset: of the first byte that shows the damage; None if the whole file is missing.
        reason: what is wrong with it.
    """

    def __init__(self, path: Path | str, offset: int | None, reason: str) -> None:
        where = "" if offset is None else f" at byte {offset:,}"
        advice = "Make it again with `haed shard shard.verify=true` and its options, or copy it again"
        if is_remote(path):  # a damaged copy in the cache was fetched again before this error
            advice = "The server's file does not match its manifest. Whoever serves it must repair it"
        super().__init__(f"shard {path} is {reason if reason == MISSING else f'damaged{where}: {reason}'}. {advice}")
        self.path, self.offset, self.reason = path, offset, reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts for pickling, as worker processes send it."""
        return CorruptShardError, (self.path, self.offset, self.reason)


class ShardFile:
    """A tar that is being written.

    Args:
        path: of the file; `close` completes it.
        split: the split it belongs to.
        part: number of the part of the corpus that it belongs to.
        first: number of its first sample in that part.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(self, path: Path, split: str, part: int = 0, first: int = 0) -> None:
        self._path, self._part, self._first = path, part, first
        self.shard = Shard(path.name, split, 0, 0, 0, 0, 0, 0, "")
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - until `close`
        self._sum = hashlib.sha256()

    def write_sample(self, sample: Sample, source_bytes: int) -> None:
        """Add a sample, and the number of source bytes that it stands for."""
        key, sums = f"{self.shard.split}-{self._part:05d}-{self._first + self.shard.samples:06d}", {}
        parts: list[bytes | memoryview] = []
        for name, kind in _ARRAYS.items():
            content = np.ascontiguousarray(getattr(sample, name), kind)
            sums[name] = zlib.crc32(content.data)
            parts += _tar_member(f"{key}.{name}.npy", _npy_header(name, len(content)), content.view(np.uint8).data)
        note = {"names": sample.names, "continues": sample.continues, "crc32": sums}
        parts += _tar_member(f"{key}.sample.json", json.dumps(note, ensure_ascii=True).encode(), memoryview(b""))
        self._write_parts(parts)
        shard = self.shard
        shard.samples += 1
        shard.documents += len(sample.names) - sample.continues
        shard.chunks += len(sample.lengths)
        shard.tokens += len(sample.tokens)
        shard.source_bytes += source_bytes

    def _write_parts(self, parts: list[bytes | memoryview]) -> None:
        for part in parts:
            left = memoryview(part)
            with add_path_to_errors(self._path):
                while left:
                    left = left[self._file.write(left) :]
            self._sum.update(part)
            self.shard.file_bytes += len(part)

    def close(self) -> Shard:
        """Complete the tar, sync it to disk, and return its entry for the manifest."""
        self._write_parts([bytes(2 * tarfile.BLOCKSIZE)])
        with add_path_to_errors(self._path):
            os.fsync(self._file.fileno())
            self._file.close()
        self.shard.sha256 = self._sum.hexdigest()
        return self.shard


def _tar_member(name: str, head: bytes, body: memoryview) -> list[bytes | memoryview]:
    """Return the blocks of a tar member, whose header depends only on its name and size."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(head) + len(body), 0, 0o644
    return [member.tobuf(tarfile.USTAR_FORMAT) + head, body, bytes(-member.size % tarfile.BLOCKSIZE)]


def _npy_header(name: str, size: int) -> bytes:
    head = io.BytesIO()
    entry = {"descr": np.dtype(_ARRAYS[name]).str, "fortran_order": False, "shape": (size,)}
    np.lib.format.write_array_header_1_0(head, entry)
    return head.getvalue()


@dataclass
class _Buffer:
    """The documents of the next sample, with their bytes."""

    parts: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0
    continues: bool = False


class ShardWriter:
    """A writer of one split of a part. It splits pieces into chunks, and writes tars of about `limit` source bytes.

    Files are named SPLIT-NUMBER.tar from 0 on.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(self, folder: Path, split: str, chunker: Chunker, limit: int, part: int = 0) -> None:
        self.folder, self.split, self.chunker, self.limit, self.part = folder, split, chunker, limit, part
        self.shards: list[Shard] = []
        self.statistics = Statistics()
        self._buffer = _Buffer()
        self._file: ShardFile | None = None
        self._hash: Any = None  # of the present document; none of one that an earlier part began

    def add_piece(self, piece: Piece) -> None:
        """Add the next piece."""
        if not piece.data:
            return
        if not piece.continues:
            self._end_document()
            self._hash = hashlib.blake2b(digest_size=8)
        if self._hash is not None:
            self._hash.update(piece.data)
        buffer = self._buffer
        if buffer.size and buffer.size + len(piece.data) > SAMPLE_BYTES:
            self._flush_sample(piece.continues)
            buffer = self._buffer
        if not piece.continues or not buffer.names:
            buffer.starts.append(buffer.size)
            buffer.names.append(piece.name)
            buffer.continues |= piece.continues  # only at the very start: an earlier part began the document
        buffer.parts.append(piece.data)
        buffer.size += len(piece.data)

    def close(self) -> list[Shard]:
        """Write the rest, and return all shards."""
        self._end_document()
        self._flush_sample(False)
        self._finish_file()
        return self.shards

    def _end_document(self) -> None:
        if self._hash is not None:
            self.statistics.add_hash(self._hash.digest())
            self._hash = None

    def _flush_sample(self, continued: bool) -> None:
        """Write the sample. If its document continues, the last chunk is held back until the next bytes are known."""
        buffer, self._buffer = self._buffer, _Buffer()
        if not buffer.size:
            return
        tokens, lengths, counts = self._split_documents(b"".join(buffer.parts), buffer.starts)
        size = buffer.size
        if continued and len(lengths) == 1:
            self._buffer = buffer
            return
        if continued:
            end = len(tokens) - int(lengths[-1])
            held = self.chunker.join(tokens[end:], lengths[-1:])
            tokens, lengths, size = tokens[:end], lengths[:-1], size - len(held)
            counts[-1] -= 1
            begins = counts[-1] == 0 and (len(counts) > 1 or not buffer.continues)  # the whole document is held back
            self._buffer = _Buffer([held], [0], [buffer.names[-1]], len(held), not begins)
            if counts[-1] == 0:
                counts = counts[:-1]
                buffer.names.pop()
        ends = np.cumsum(lengths, dtype=np.int64)[np.cumsum(counts) - 1]
        for number, tokens_of in enumerate(np.diff(ends, prepend=0).tolist()):
            self.statistics.count_document(tokens_of, number > 0 or not buffer.continues)
        self.statistics.count_chunks(tokens, lengths)
        if self._file is not None and self._file.shard.source_bytes + size > self.limit:
            self._finish_file()
        if self._file is None:
            path = self.folder / f"{self.split}-{len(self.shards):05d}.tar"
            self._file = ShardFile(path, self.split, self.part, sum(shard.samples for shard in self.shards))
        self._file.write_sample(Sample(tokens, lengths, counts, buffer.names, buffer.continues), size)

    def _finish_file(self) -> None:
        if self._file is not None:
            self.shards.append(self._file.close())
            self._file = None

    def _split_documents(self, text: bytes, starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens (n,), lengths (N,) and the number of chunks (D,) of each document."""
        if type(self.chunker).join is Chunker.join:  # tokens are bytes, so starts of documents are starts of chunks
            tokens, lengths = self.chunker.split(text, np.array(starts, np.int64))
            if type(self.chunker).split is not Chunker.split or self.chunker.vocabulary < Chunker.vocabulary:
                self.chunker.check_split(text, tokens, lengths)
            ends = np.cumsum(lengths, dtype=np.int64)
            return tokens, lengths, np.diff(np.searchsorted(ends, starts, "right"), append=len(lengths))
        ends_of = [*starts[1:], len(text)]
        cut = []
        for begin, end in zip(starts, ends_of, strict=True):
            cut.append(self.chunker.split(text[begin:end]))
            self.chunker.check_split(text[begin:end], *cut[-1])
        counts = np.array([len(lengths) for _, lengths in cut])
        return np.concatenate([each for each, _ in cut]), np.concatenate([each for _, each in cut]), counts


def read_shard(path: Path | str, content: bytes | memoryview, shard: Shard | None = None) -> list[Sample]:
    """Return the samples of a shard; their arrays are views of its content. Errors name it by `path`.

    If its entry in the manifest is given, checksum and counts are verified.

    Raises:
        CorruptShardError: it is not what was written.
    """
    is_damaged = shard is not None and hashlib.sha256(content).hexdigest() != shard.sha256
    parsed = list(_read_samples(path, content, checked=is_damaged))  # which raises the first place that shows why
    if shard is not None and is_damaged:
        if len(content) != shard.file_bytes:
            raise CorruptShardError(
                path, min(len(content), shard.file_bytes), f"it has {len(content):,} bytes, not {shard.file_bytes:,}"
            )
        raise CorruptShardError(path, 0, "its sha256 does not match the manifest (a header or a name was changed)")
    sizes = sum(len(sample.tokens) for sample in parsed), sum(len(sample.lengths) for sample in parsed)
    if shard is not None and sizes != (shard.tokens, shard.chunks):
        raise CorruptShardError(path, None, "the number of chunks differs from the manifest")
    return parsed


def _read_samples(path: Path | str, content: bytes | memoryview, checked: bool) -> Iterator[Sample]:
    """Yield the samples of a shard. With `checked`, their own checksums are verified, to find the damaged place."""
    parts: dict[str, Any] = {}
    end = at = 0
    try:
        while any(header := bytes(content[end : end + tarfile.BLOCKSIZE])):
            member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            if member.type != tarfile.REGTYPE:
                raise tarfile.ReadError(f"a member is of type {member.type!r}, no regular file")
            name, offset = member.name.split(".", 2)[1], end
            begin = end + tarfile.BLOCKSIZE
            body = memoryview(content)[begin : begin + member.size]
            if len(body) != member.size:
                raise CorruptShardError(path, len(content), f"it ends inside {member.name}")
            if name != "sample":
                parts[name] = _parse_npy(body, _ARRAYS[name])
                at = begin + len(body) - parts[name].nbytes if name == "tokens" else at
            else:
                yield _make_sample(path, offset, parts, parse_json(bytes(body), member.name), at, checked)
                parts = {}
            end = min(begin + member.size + -member.size % tarfile.BLOCKSIZE, len(content))  # it may end in the padding
    except (tarfile.TarError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CorruptShardError):
            raise
        raise CorruptShardError(path, end, f"{type(error).__name__} {error}") from error
    if parts or len(content) < end + 2 * tarfile.BLOCKSIZE or any(content[end : end + 2 * tarfile.BLOCKSIZE]):
        raise CorruptShardError(path, end, "the tar neither continues nor ends here")


def _make_sample(
    path: Path | str, offset: int, parts: dict[str, Any], note: dict[str, Any], at: int, checked: bool
) -> Sample:
    sample = Sample(**parts, names=note["names"], continues=note["continues"], at=at)
    for name in _ARRAYS if checked else ():
        if zlib.crc32(parts[name].data) != note["crc32"][name]:
            raise CorruptShardError(path, offset, f"the {name} of the sample that ends here were changed")
    counts = sample.lengths.sum(dtype=np.int64), sample.documents.sum(), len(sample.names)
    wanted = len(sample.tokens), len(sample.lengths), len(sample.documents)
    if counts != wanted or (len(sample.documents) and sample.documents.min() < 1):
        raise CorruptShardError(path, offset, "the number of its chunks is wrong")
    return sample


def _parse_npy(body: memoryview, dtype: Any) -> np.ndarray:
    """Return the array of a .npy, without a copy: its header makes it neither larger than it is nor one of objects."""
    file = io.BytesIO(bytes(body[:1024]))
    shape, dtype_there = read_npy_header(file)
    array = np.frombuffer(body, dtype, offset=file.tell())
    if dtype_there != dtype or shape != array.shape:
        raise ValueError(f"its header says {dtype_there} {shape}, but it holds {array.size} of {np.dtype(dtype)}")
    return array
