"""Shards: WebDataset tars of plain arrays, written whole or not at all, the same bytes for the same documents.

A sample holds consecutive documents of one split, about a megabyte together; a longer document goes on in the next sample:

    000000.tokens.npy     (n,) uint8, all tokens
    000000.lengths.npy    (N,) uint8, tokens of each chunk
    000000.documents.npy  (D,) int64, chunks of each document
    000000.sample.json    {"names": [...], "continues": the first is the rest of the document before,
                           "crc32": of the content of each of the three arrays}

The sha256 in the manifest says whether a shard is whole; the sums inside say where it is not.
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
from typing import Any

import numpy as np

from data.chunkers import Chunker
from data.sources import Piece
from data.statistics import Statistics

SAMPLE_BYTES = 1 << 20
_ARRAYS = {"tokens": np.uint8, "lengths": np.uint8, "documents": np.int64}


@dataclass
class Shard:
    """A finished tar; an entry of `shards` in manifest.json. Counts are of samples, chunks, tokens and bytes."""

    file: str
    split: str
    samples: int
    documents: int
    chunks: int
    tokens: int
    source_bytes: int
    file_bytes: int
    sha256: str


@dataclass
class ShardArrays:
    """Contents of a shard: D documents of N chunks of n tokens.

    Attributes:
        tokens: (n,) uint8.
        lengths: (N,) uint8, tokens of each chunk.
        documents: (D,) int64, chunks of each document.
        names: of the documents.
        continues: the first document began in an earlier shard.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    names: list[str]
    continues: bool


class Damaged(ValueError):
    """A shard is not what was written; the message names it and the byte where that shows first.

    Attributes:
        path: of the shard.
        offset: see above; None if the whole file is missing.
    """

    def __init__(self, path: Path, offset: int | None, reason: str) -> None:
        where = "" if offset is None else f" at byte {offset:,}"
        super().__init__(f"shard {path} is damaged{where}: {reason}; delete it and shard or fetch it again")
        self.path, self.offset, self.reason = path, offset, reason

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes send it."""
        return Damaged, (self.path, self.offset, self.reason)


@dataclass
class _Buffer:
    """The next sample: documents with their bytes."""

    parts: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0
    continues: bool = False


class ShardWriter:
    """Cuts the pieces of one split and writes them as tars of about `limit` source bytes into a folder.

    Files are named SPLIT-NUMBER.tar from 0 on.

    Raises:
        OSError: the disk is full or not writable.
    """

    def __init__(self, folder: Path, split: str, chunker: Chunker, limit: int) -> None:
        self.folder, self.split, self.chunker, self.limit = folder, split, chunker, limit
        self.shards: list[Shard] = []
        self.statistics = Statistics()
        self._buffer = _Buffer()
        self._file: io.BufferedWriter | None = None

    def add(self, piece: Piece) -> None:
        """Takes the next piece."""
        if not piece.data:
            return
        buffer = self._buffer
        if buffer.size and buffer.size + len(piece.data) > SAMPLE_BYTES:
            self._flush(piece.continues)
            buffer = self._buffer
        if not piece.continues or not buffer.names:
            buffer.starts.append(buffer.size)
            buffer.names.append(piece.name)
            buffer.continues |= piece.continues  # only at the very start: an earlier part began the document
        buffer.parts.append(piece.data)
        buffer.size += len(piece.data)

    def close(self) -> list[Shard]:
        """Writes what is left; returns all shards."""
        self._flush(False)
        self._finish()
        return self.shards

    def _flush(self, continued: bool) -> None:
        """Writes the sample; of a document that goes on, the last chunk waits for what follows it."""
        buffer, self._buffer = self._buffer, _Buffer()
        if not buffer.size:
            return
        tokens, lengths, counts = self._split(b"".join(buffer.parts), buffer.starts)
        size = buffer.size
        if continued and len(lengths) == 1:
            self._buffer = buffer
            return
        if continued:
            end = len(tokens) - int(lengths[-1])
            held = self.chunker.join(tokens[end:], lengths[-1:])
            tokens, lengths, size = tokens[:end], lengths[:-1], size - len(held)
            counts[-1] -= 1
            begins = counts[-1] == 0 and (len(counts) > 1 or not buffer.continues)  # all of that document is held
            self._buffer = _Buffer([held], [0], [buffer.names[-1]], len(held), not begins)
            if counts[-1] == 0:
                counts = counts[:-1]
                buffer.names.pop()
        ends = np.cumsum(lengths, dtype=np.int64)[np.cumsum(counts) - 1]
        for number, tokens_of in enumerate(np.diff(ends, prepend=0).tolist()):
            self.statistics.document(tokens_of, number > 0 or not buffer.continues)
        self.statistics.chunks(tokens, lengths)
        self._write(tokens, lengths, counts, buffer, size)

    def _split(self, text: bytes, starts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens (n,), lengths (N,) and the number of chunks (D,) of each document."""
        if type(self.chunker).join is Chunker.join:  # tokens are bytes, so starts of documents are starts of chunks
            tokens, lengths = self.chunker.split(text, np.array(starts, np.int64))
            ends = np.cumsum(lengths, dtype=np.int64)
            return tokens, lengths, np.diff(np.searchsorted(ends, starts, "right"), append=len(lengths))
        ends_of = [*starts[1:], len(text)]
        cut = [self.chunker.split(text[a:b]) for a, b in zip(starts, ends_of, strict=True)]
        counts = np.array([len(lengths) for _, lengths in cut])
        return np.concatenate([each for each, _ in cut]), np.concatenate([each for _, each in cut]), counts

    def _write(
        self, tokens: np.ndarray, lengths: np.ndarray, documents: np.ndarray, buffer: _Buffer, size: int
    ) -> None:
        if self._file is not None and self.shards[-1].source_bytes + size > self.limit:
            self._finish()
        if self._file is None:
            name = f"{self.split}-{len(self.shards):05d}.tar"
            self.shards.append(Shard(name, self.split, 0, 0, 0, 0, 0, 0, ""))
            self._file = open(self.folder / name, "wb")  # noqa: SIM115 - closed in _finish
            self._sum = hashlib.sha256()
        shard, key = self.shards[-1], f"{self.shards[-1].samples:06d}"
        sums = {}
        for name, array in (("tokens", tokens), ("lengths", lengths), ("documents", documents)):
            content = np.ascontiguousarray(array, _ARRAYS[name])
            sums[name] = zlib.crc32(content.data)
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(content))
            self._member(f"{key}.{name}.npy", head.getvalue(), content.view(np.uint8).data)
        note = {"names": buffer.names, "continues": buffer.continues, "crc32": sums}
        self._member(f"{key}.sample.json", json.dumps(note, ensure_ascii=True).encode(), memoryview(b""))
        shard.samples += 1
        shard.documents += len(buffer.names) - buffer.continues
        shard.chunks += len(lengths)
        shard.tokens += len(tokens)
        shard.source_bytes += size

    def _member(self, name: str, head: bytes, body: memoryview) -> None:
        """A member whose header depends on its name and size only."""
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = len(head) + len(body), 0, 0o644
        padding = -member.size % tarfile.BLOCKSIZE
        self._put(member.tobuf(tarfile.USTAR_FORMAT) + head, body, bytes(padding))

    def _put(self, *parts: bytes | memoryview) -> None:
        assert self._file is not None
        for part in parts:
            self._file.write(part)
            self._sum.update(part)
            self.shards[-1].file_bytes += len(part)

    def _finish(self) -> None:
        if self._file is None:
            return
        self._put(bytes(2 * tarfile.BLOCKSIZE))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        self.shards[-1].sha256 = self._sum.hexdigest()


def read_shard(path: Path, content: bytes, shard: Shard | None = None) -> ShardArrays:
    """Takes a shard apart.

    Args:
        path: named in errors.
        content: of the file.
        shard: its entry in the manifest; with it, sums and counts are checked.

    Raises:
        Damaged: it is not what was written.
    """
    if shard is not None and hashlib.sha256(content).hexdigest() != shard.sha256:
        _locate(path, content, shard)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
    names: list[str] = []
    continues = False
    for sample in _samples(path, content):
        note, documents = sample["sample"], sample["documents"]
        joins = note["continues"] and bool(names)
        if joins:
            parts["documents"][-1][-1] += documents[0]
        continues |= note["continues"] and not names
        names += note["names"][joins:]
        parts["tokens"].append(sample["tokens"])
        parts["lengths"].append(sample["lengths"])
        if len(documents) > joins:
            parts["documents"].append(documents[joins:])
    arrays = {name: np.concatenate(part) if part else np.zeros(0, _ARRAYS[name]) for name, part in parts.items()}
    found = ShardArrays(arrays["tokens"], arrays["lengths"], arrays["documents"], names, continues)
    if shard is not None and (len(found.tokens), len(found.lengths)) != (shard.tokens, shard.chunks):
        raise Damaged(path, None, "it does not hold the number of chunks that the manifest says")
    return found


def _samples(path: Path, content: bytes) -> Iterator[dict[str, Any]]:
    """The samples of a shard, each checked: arrays without a copy, but for `documents`.

    Raises:
        Damaged: at the offset of the first member that is not what was written.
    """
    sample: dict[str, Any] = {}
    end = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            while (member := tar.next()) is not None:
                part = member.name.split(".", 2)[1]
                body = memoryview(content)[member.offset_data : member.offset_data + member.size]
                if len(body) != member.size:
                    raise Damaged(path, len(content), f"it ends inside of {member.name}")
                sample[part] = json.loads(bytes(body)) if part == "sample" else _array(body, _ARRAYS[part])
                if part == "sample":
                    _check(path, member.offset, sample)
                    yield sample
                    sample = {}
                end = member.offset_data + member.size
    except (tarfile.TarError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(path, end + -end % tarfile.BLOCKSIZE, f"{type(error).__name__} {error}") from error
    end += -end % tarfile.BLOCKSIZE
    if sample or len(content) < end + 2 * tarfile.BLOCKSIZE or any(content[end : end + 2 * tarfile.BLOCKSIZE]):
        raise Damaged(path, min(end, len(content)), "a tar ought to go on or to end here")


def _array(body: memoryview, dtype: Any) -> np.ndarray:
    """The array of a .npy without a copy; its header cannot make it larger than it is, nor an array of objects."""
    file = io.BytesIO(bytes(body[:1024]))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a .npy of version 1.0")
    shape, _, found = np.lib.format.read_array_header_1_0(file)
    array = np.frombuffer(body, dtype, offset=file.tell())
    if found != dtype or shape != array.shape:
        raise ValueError(f"its header says {found} {shape}, it holds {array.size} of {np.dtype(dtype)}")
    return array.copy() if dtype is np.int64 else array


def _check(path: Path, offset: int, sample: dict[str, Any]) -> None:
    """Sums and counts of a sample."""
    if set(sample) != {*_ARRAYS, "sample"}:
        raise Damaged(path, offset, f"a sample of {', '.join(sample)}")
    for name in _ARRAYS:
        if zlib.crc32(sample[name].data) != sample["sample"]["crc32"][name]:
            raise Damaged(path, offset, f"the {name} of the sample that ends here were changed")
    lengths, documents = sample["lengths"], sample["documents"]
    counts = lengths.sum(dtype=np.int64) == len(sample["tokens"]) and documents.sum() == len(lengths)
    if not counts or len(documents) != len(sample["sample"]["names"]) or (len(documents) and documents.min() < 1):
        raise Damaged(path, offset, "its chunks do not add up")


def _locate(path: Path, content: bytes, shard: Shard) -> None:
    """Raises Damaged for a shard whose sha256 is wrong, with the first place that shows why."""
    for _ in _samples(path, content):
        pass
    if len(content) != shard.file_bytes:
        raise Damaged(
            path, min(len(content), shard.file_bytes), f"it has {len(content):,} bytes, not {shard.file_bytes:,}"
        )
    raise Damaged(path, 0, "its sha256 is not that of the manifest, in a header or a name")
