"""The FAISS index of chunk embeddings, and questions to it.

`index/` holds `chunks.faiss` (inner products of normalised embeddings: cosine), the chunk table `chunks.npz` (tokens,
lengths, counts; row i is vector i) and `meta.json`. The file is one of FAISS's own, so other tools can open it.
"""

import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.files import write_atomically
from pipeline.options import Options
from pipeline.runs import RunFolder

if TYPE_CHECKING:
    from pipeline.inference import Run

INDEX, TABLE, META = "chunks.faiss", "chunks.npz", "meta.json"
_HEADER = 45


@dataclass
class Indexed:
    """What was indexed: number of chunks, width of their embeddings, and of which checkpoint."""

    folder: str
    chunks: int
    width: int
    split: str
    stage: str
    step: int


def index(options: Options) -> Indexed:
    """Embeds all distinct chunks of a split of the run's corpus and writes the index.

    Raises:
        FileNotFoundError: no such run or shards, or nothing was trained.
    """
    import faiss

    from data.corpus import distinct_chunks
    from pipeline.device import release_memory
    from pipeline.inference import Run

    folder = RunFolder.find(Path(options.runs_dir) / options.name)
    run, limits = Run(folder, options), options.index
    found = distinct_chunks(folder.corpus(), limits.split)
    kept = found.counts >= limits.min_count
    tokens, lengths, counts = found.tokens[kept], found.lengths[kept], found.counts[kept]
    if not len(counts):
        raise ValueError(f"no chunk of the {limits.split} split occurs {limits.min_count} times: lower index.min_count")
    blocks = np.array_split(np.arange(len(counts)), -(-len(counts) // 8192))
    vectors = np.concatenate([_normalised(run.embed_rows(tokens[rows], lengths[rows])) for rows in blocks])
    built = faiss.IndexFlatIP(vectors.shape[1])
    built.add(vectors)
    width = vectors.shape[1]
    del vectors
    buffer = io.BytesIO()
    np.savez(buffer, tokens=tokens, lengths=lengths, counts=counts)
    files = {INDEX: faiss.serialize_index(built).tobytes(), TABLE: buffer.getvalue()}
    result = Indexed(str(folder.path / "index"), len(counts), width, limits.split, run.phase, run.step)
    (folder.path / "index").mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomically(folder.path / "index" / name, content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    folder.write_json(
        f"index/{META}",
        asdict(result)
        | {"metric": "cosine", "sha256": digests, "checkpoint": run.digest, "min_count": limits.min_count},
    )
    del files, built, buffer
    release_memory()
    return result


def neighbours(
    folder: RunFolder, queries: Sequence[str | bytes], count: int = 8, run: "Run | None" = None
) -> list[dict[str, Any]]:
    """The chunks whose embeddings have the highest cosine with each query's, the query itself left out.

    A query is one chunk of at most K bytes. One that the corpus has is looked up without the model; the encoder embeds
    any other.

    Returns:
        `[{"query", "neighbours": [{"text", "hex", "score", "count"}]}]`; `hex` are the exact bytes.

    Raises:
        FileNotFoundError: the run has no index yet.
        ValueError: a query is empty or longer than a chunk, or the index is damaged.
    """
    built, table = _open(folder)
    known = {
        row.tobytes()[:length]: i for i, (row, length) in enumerate(zip(table["tokens"], table["lengths"], strict=True))
    }
    raw = [query.encode() if isinstance(query, str) else query for query in queries]
    k = table["tokens"].shape[1]
    for query in raw:
        if not 1 <= len(query) <= k:
            raise ValueError(
                f"the query {query.decode(errors='replace')!r} has {len(query)} bytes; a chunk has 1 to {k}"
            )
    strange = [query for query in raw if query not in known]
    if strange:
        from pipeline.inference import Run

        run = run or Run(folder)
        embedded = dict(zip(strange, _normalised(run.embed(strange)), strict=True))
    vectors = np.stack([built.reconstruct(known[q]) if q in known else embedded[q] for q in raw])
    scores, rows = built.search(vectors, min(count + 1, built.ntotal))
    return [
        {"query": query.decode(errors="backslashreplace"), "neighbours": _named(table, known.get(query), s, r)[:count]}
        for query, s, r in zip(raw, scores, rows, strict=True)
    ]


def _named(
    table: dict[str, np.ndarray], itself: int | None, scores: np.ndarray, rows: np.ndarray
) -> list[dict[str, Any]]:
    """Rows of the chunk table, with their scores, but for the query's own."""
    found = []
    for score, row in zip(scores.tolist(), rows.tolist(), strict=True):
        if row != itself:
            chunk = table["tokens"][row].tobytes()[: table["lengths"][row]]
            text = chunk.decode(errors="backslashreplace")
            found.append({"text": text, "hex": chunk.hex(), "score": score, "count": int(table["counts"][row])})
    return found


def _open(folder: RunFolder) -> tuple[Any, dict[str, np.ndarray]]:
    """The index and its chunk table, checked against their own meta.json before they are read."""
    import faiss

    place = folder.path / "index"
    if not (place / META).is_file():
        raise FileNotFoundError(f"{folder.path} has no index yet: run `haed index {folder.path}` first")
    try:
        digests = json.loads((place / META).read_text())["sha256"]
        content = {name: (place / name).read_bytes() for name in (INDEX, TABLE)}
        wrong = [name for name in content if hashlib.sha256(content[name]).hexdigest() != digests[name]]
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the index in {place} is damaged ({error}): run `haed index {folder.path}` again") from error
    if wrong:
        raise ValueError(f"the index in {place} is damaged ({wrong[0]}): run `haed index {folder.path}` again")
    _check_header(place / INDEX, content[INDEX])
    try:
        with np.load(io.BytesIO(content[TABLE]), allow_pickle=False) as archive:
            table = {name: archive[name] for name in ("tokens", "lengths", "counts")}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile, MemoryError) as error:
        raise ValueError(f"the index in {place} is damaged ({error}): run `haed index {folder.path}` again") from error
    built = faiss.deserialize_index(np.frombuffer(content[INDEX], np.uint8))
    shapes = {name: column.shape[:1] for name, column in table.items()}
    if any(shape != (built.ntotal,) for shape in shapes.values()) or table["tokens"].ndim != 2:
        raise ValueError(f"the index in {place} has {built.ntotal} vectors for a table of {shapes}: index it again")
    return built, table


def _check_header(path: Path, content: bytes) -> None:
    """Raises ValueError unless a file is what `index` writes: FAISS's reader must not meet anything else.

    A flat index is `IxFI`, the width (int32), the number of vectors (int64), and 45 bytes of header in all; the rest are
    the vectors. Its reader would allocate whatever a header asks for.
    """
    width, vectors = struct.unpack_from("<iq", content, 4) if len(content) >= _HEADER else (0, 0)
    expected = _HEADER + 4 * width * vectors
    if content[:4] != b"IxFI" or width < 1 or vectors < 1 or len(content) != expected:
        raise ValueError(f"{path} is no flat index of inner products as `haed index` writes them: not read")


def _normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, E) divided by their lengths."""
    return np.ascontiguousarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12), np.float32)


def table(found: list[dict[str, Any]]) -> str:
    """Neighbours as text, with white space made visible."""
    lines = []
    for item in found:
        lines.append(f"{visible(item['query'])}")
        lines += [f"  {n['score']:6.3f}  {n['count']:>9,}  {visible(n['text'])}" for n in item["neighbours"]]
    return "\n".join(lines)


def visible(text: str) -> str:
    """A chunk with its white space and control characters made visible."""
    return printable(text).replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")


def printable(text: str) -> str:
    """Text with control characters as escapes, all but white space; some databases and pages take no others."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", text)
