"""Shards: WebDataset tars of plain arrays, written whole or not at all, the same bytes for the same documents.

A sample holds consecutive documents of one split, about a megabyte together:

    000000.tokens.npy     (n,) uint8, all tokens
    000000.lengths.npy    (N,) uint8, tokens of each chunk
    000000.documents.npy  (D,) int64, chunks of each document
    000000.names.json     names of the documents
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.chunkers import Chunker
from data.sources import Document

SAMPLE_BYTES = 1 << 20


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
    """

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    names: list[str]


def write_shard(path: Path, split: str, documents: Iterable[Document], chunker: Chunker) -> Shard:
    """Cuts documents and writes them as one tar.

    Raises:
        OSError: the disk is full or not writable; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shard = Shard(path.name, split, 0, 0, 0, 0, 0, 0, "")
    try:
        with open(beside, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for group in _groups(documents):
                    _write_sample(tar, shard, group, chunker)
            file.flush()
            os.fsync(file.fileno())
        with open(beside, "rb") as file:
            shard.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        shard.file_bytes = beside.stat().st_size
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return shard


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Consecutive documents, until they hold about a megabyte."""
    group: list[Document] = []
    size = 0
    for document in documents:
        if not document.data:
            continue
        if group and size + len(document.data) > SAMPLE_BYTES:
            yield group
            group, size = [], 0
        group.append(document)
        size += len(document.data)
    if group:
        yield group


def _write_sample(tar: tarfile.TarFile, shard: Shard, group: list[Document], chunker: Chunker) -> None:
    cut = [chunker.split(document.data) for document in group]
    tokens = np.concatenate([tokens for tokens, _ in cut])
    lengths = np.concatenate([lengths for _, lengths in cut])
    arrays = {
        "tokens": tokens,
        "lengths": lengths,
        "documents": np.array([len(lengths) for _, lengths in cut], np.int64),
    }
    key = f"{shard.samples:06d}"
    for name, array in arrays.items():
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
        _add(tar, f"{key}.{name}.npy", buffer.getbuffer())
    names = json.dumps([document.name for document in group], ensure_ascii=True)
    _add(tar, f"{key}.names.json", memoryview(names.encode()))
    shard.samples += 1
    shard.documents += len(group)
    shard.chunks += len(lengths)
    shard.tokens += len(tokens)
    shard.source_bytes += sum(len(document.data) for document in group)


def _add(tar: tarfile.TarFile, name: str, content: memoryview) -> None:
    """A member whose header depends on its name and size only."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), 0, 0o644
    tar.addfile(member, io.BytesIO(content))


def read_shard(path: Path) -> ShardArrays:
    """Reads a shard.

    Raises:
        ValueError: it is damaged, with the file and, where known, the member.
    """
    parts: dict[str, list[np.ndarray]] = {"tokens": [], "lengths": [], "documents": []}
    names: list[str] = []
    try:
        with open(path, "rb") as file:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for member in tar:
                    file_in_tar = tar.extractfile(member)
                    if file_in_tar is None:
                        raise ValueError(f"shard {path}: {member.name} is not a file")
                    content, part = io.BytesIO(file_in_tar.read()), member.name.split(".", 2)[1]
                    if part == "names":
                        names += json.load(content)
                    else:
                        parts[part].append(np.lib.format.read_array(content, allow_pickle=False))
    except (tarfile.TarError, KeyError, IndexError, EOFError, json.JSONDecodeError) as error:
        raise ValueError(f"shard {path} is damaged: {type(error).__name__} {error}") from error
    arrays = {name: np.concatenate(part) if part else np.zeros(0, np.uint8) for name, part in parts.items()}
    if arrays["lengths"].sum(dtype=np.int64) != len(arrays["tokens"]):
        raise ValueError(f"shard {path} is damaged: its chunks do not add up to its tokens")
    return ShardArrays(arrays["tokens"], arrays["lengths"], arrays["documents"].astype(np.int64), names)
