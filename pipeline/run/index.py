"""The index of a run: embeddings of chunks, opened once and asked often.

`index/` holds `chunks.faiss` (inner products of normalised embeddings: cosine), the chunk table `chunks.npz` (tokens,
lengths, counts; row i is vector i) and `meta.json`. The file is one of FAISS's own, so other tools can open it.

A query of a text is a chunk. One of pictures is a colour such as `#4080c0`, which stands for a chunk of that colour, or the
values of a whole chunk in hexadecimal, which answers give too. Without queries, frequent chunks of the corpus are taken.
"""

import hashlib
import io
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.distinct import DistinctChunks, telling
from haed.options import SYSTEMS
from pipeline.config import ConfigError
from pipeline.options import Options, Phase
from pipeline.run.files import read_as
from pipeline.run.folder import RunFolder

INDEX, TABLE, META = "chunks.faiss", "chunks.npz", "meta.json"
OWN_QUERIES = 6
PIXELS = "pixels"
_HEADER = 45

Embed = Callable[[list[bytes]], np.ndarray]  # n chunks: (n, E) float32


@dataclass(kw_only=True)
class Indexed:
    """What was indexed: number of chunks, width of their embeddings, and of which checkpoint.

    `left_out` is the number of distinct chunks for which `index.max_chunks` left no room.
    """

    folder: str
    chunks: int
    width: int
    split: str
    stage: Phase
    step: int
    left_out: int = 0


@dataclass(kw_only=True)
class Meta(Indexed):
    """The fields of meta.json.

    Attributes:
        metric: of the scores.
        sha256: of the other files.
        checkpoint: digest of the checkpoint whose encoder embedded the chunks.
        least: chunks that occur less often were left out, and are not among `left_out`.
        min_count: what was asked for; None: whatever fits.
        max_chunks: of which there are no more; None: all.
        asked_stage: the phase that was asked for; None: the last one.
        chunker: kind of the chunks.
    """

    metric: str = "cosine"
    sha256: dict[str, str]
    checkpoint: str
    least: int = 1
    min_count: int | None = 1
    max_chunks: int | None = None
    asked_stage: Phase | None = None
    chunker: str


@dataclass
class Neighbour:
    """A chunk near to a query: its text for people and its exact bytes, the cosine, and how often the split has it."""

    text: str
    hex: str
    score: float
    count: int


@dataclass
class Neighbours:
    """A query, likewise, and the chunks that are nearest to it, the nearest first."""

    query: str
    hex: str
    neighbours: list[Neighbour]


class StaleIndex(ValueError):
    """An index that was made from another checkpoint."""


class Index:
    """An opened index; it knows no model, so whoever asks for chunks that it does not have embeds them.

    Attributes:
        meta: what was indexed.
        chunks: the chunks, row for row.
    """

    def __init__(self, meta: Meta, vectors: Any, chunks: DistinctChunks) -> None:
        """Of a FAISS index of the embeddings of these chunks."""
        self.meta, self.chunks, self._vectors = meta, chunks, vectors
        rows = zip(chunks.tokens, chunks.lengths, strict=True)
        self._bytes = [row.tobytes()[:length] for row, length in rows]
        self._rows = {chunk: row for row, chunk in enumerate(self._bytes)}

    @classmethod
    def open(cls, folder: RunFolder, digest: str | None = None) -> Self:
        """Reads the index of a run, checked against its meta.json and the run before it is taken apart.

        Args:
            folder: of the run.
            digest: of the checkpoint that it must be of; None: that of the run, of the phase that was asked for when it
                was made.

        Raises:
            FileNotFoundError: the run has no index yet.
            StaleIndex: it is of another checkpoint.
            ValueError: it is damaged.
        """
        import faiss

        place, again = folder.path / "index", f"run `haed index {folder.path}` again"
        if not (place / META).is_file():
            raise FileNotFoundError(f"{folder.path} has no index yet: run `haed index {folder.path}` first")
        try:
            meta = read_as(Meta, place / META)
            content = {name: (place / name).read_bytes() for name in (INDEX, TABLE)}
            wrong = [name for name in content if hashlib.sha256(content[name]).hexdigest() != meta.sha256.get(name)]
            if wrong:
                raise ValueError(wrong[0])
        except (OSError, ValueError) as error:
            raise ValueError(f"the index in {place} is damaged ({error}): {again}") from error
        present = folder.present(meta.asked_stage)
        if meta.checkpoint != (digest or present.digest):
            raise StaleIndex(
                f"the index in {place} is of another checkpoint ({meta.stage} step {meta.step}) than the run's present one "
                f"({present.path}): {again}"
            )
        _check_header(place / INDEX, content[INDEX])
        try:
            chunks = _table(content[TABLE])
        except Exception as error:  # of the zip, of headers that Python's parser reads, or of the memory they ask for
            raise ValueError(f"the index in {place} is damaged ({error}): {again}") from error
        vectors = faiss.deserialize_index(np.frombuffer(content[INDEX], np.uint8))
        shapes = [column.shape[:1] for column in (chunks.tokens, chunks.lengths, chunks.counts)]
        if any(shape != (vectors.ntotal,) for shape in shapes) or chunks.tokens.ndim != 2:
            raise ValueError(f"the index in {place} has {vectors.ntotal} vectors for a table of {shapes}: {again}")
        return cls(meta, vectors, chunks)

    def nearest(
        self, queries: Sequence[str | bytes], count: int, embed: Embed, strict: bool = True
    ) -> list[Neighbours]:
        """The chunks whose embeddings have the highest cosine with each query's, the query itself left out.

        Args:
            queries: chunks, or colours and pixels in hexadecimal; none: frequent chunks of the corpus.
            count: neighbours of each.
            embed: called with those queries that the index does not have, if there are any.
            strict: false leaves queries out that are no chunks of this run, meant for another kind of data.

        Raises:
            ValueError: a query is empty or longer than a chunk or no colour.
        """
        asked = self._asked(queries, strict)
        strange = [query for query in asked if query not in self._rows]
        embedded = dict(zip(strange, normalised(embed(strange)), strict=True)) if strange else {}
        vectors = [embedded[q] if q in embedded else self._vectors.reconstruct(self._rows[q]) for q in asked]
        scores, rows = self._vectors.search(np.stack(vectors), min(count + 1, self._vectors.ntotal))
        found = zip(asked, scores.tolist(), rows.tolist(), strict=True)
        return [self._named(query, own, near, count) for query, own, near in found]

    def _asked(self, queries: Sequence[str | bytes], strict: bool) -> list[bytes]:
        found = []
        for query in queries:
            try:
                found.append(parse(query, self.meta.chunker, self.chunks.tokens.shape[1]))
            except ValueError:
                if strict:
                    raise
        return found or telling(self.chunks, OWN_QUERIES)

    def _named(self, query: bytes, scores: list[float], rows: list[int], count: int) -> Neighbours:
        kind = self.meta.chunker
        near = [
            Neighbour(spell(self._bytes[row], kind), self._bytes[row].hex(), score, int(self.chunks.counts[row]))
            for score, row in zip(scores, rows, strict=True)
            if row != self._rows.get(query)
        ]
        return Neighbours(spell(query, kind), query.hex(), near[:count])


def _table(content: bytes) -> DistinctChunks:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        if sum(member.file_size for member in archive.zip.infolist()) > len(content):
            raise ValueError(f"{TABLE} is compressed, which ours are not")  # it could hold anything
        return DistinctChunks(*(archive[name] for name in ("tokens", "lengths", "counts")))


def _check_header(path: Path, content: bytes) -> None:
    """Raises ValueError unless a file is what `haed index` writes: FAISS's reader must not meet anything else.

    A flat index is `IxFI`, the width (int32), the number of vectors (int64), and 45 bytes of header in all; the rest are
    the vectors. Its reader would allocate whatever a header asks for.
    """
    width, vectors = struct.unpack_from("<iq", content, 4) if len(content) >= _HEADER else (0, 0)
    expected = _HEADER + 4 * width * vectors
    if content[:4] != b"IxFI" or width < 1 or vectors < 1 or len(content) != expected:
        raise ValueError(f"{path} is no flat index of inner products as `haed index` writes them: not read")


def check_chunks(options: Options) -> None:
    """Raises ConfigError for a model that embeds no chunk by itself: it has no index of chunks."""
    kind = options.model.kind
    if not SYSTEMS[kind].chunks:
        from haed.build import KINDS

        spaces = ", ".join(getattr(KINDS[kind].system, "spaces", ())) or "nothing"
        raise ConfigError(
            f"model.kind={kind} embeds no chunk by itself, so there is no index of chunks: it has vectors of {spaces} "
            "(`System.vectors`)"
        )


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, E) divided by their lengths."""
    return np.ascontiguousarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12), np.float32)


def parse(query: str | bytes, chunker: str, k: int) -> bytes:
    """The chunk that a query means.

    Raises:
        ValueError: it has not 1 to `k` bytes, or the chunks are of pixels and it is neither a colour nor a chunk of them.
    """
    raw = query.encode() if isinstance(query, str) else query
    shown = raw.decode(errors="backslashreplace")
    if chunker != PIXELS:
        if not 1 <= len(raw) <= k:
            raise ValueError(f"the query {shown!r} has {len(raw)} bytes; a chunk has 1 to {k}")
        return raw
    digits = re.sub(r"[#,\s]", "", shown)
    if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) in (6, 2 * k):
        pixels = bytes.fromhex(digits)
        return (pixels * k)[:k] if len(digits) == 6 else pixels
    raise ValueError(
        f"the query {shown!r} is no chunk of pixels: give a colour such as #4080c0, or {k} values in hexadecimal; "
        "without queries chunks of the corpus are taken"
    )


def spell(chunk: bytes, chunker: str) -> str:
    """A chunk for people: text, or the colours of its pixels."""
    if chunker != PIXELS:
        return chunk.decode(errors="backslashreplace")
    return ",".join(f"#{chunk[i : i + 3].hex()}" for i in range(0, len(chunk), 3))
