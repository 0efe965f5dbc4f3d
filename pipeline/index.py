"""The FAISS index of chunk embeddings; `pipeline.neighbours` asks it.

`index/` holds `chunks.faiss` (inner products of normalised embeddings: cosine), the chunk table `chunks.npz` (tokens,
lengths, counts; row i is vector i) and `meta.json`. The file is one of FAISS's own, so other tools can open it.
"""

import hashlib
import io
import json
import struct
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.files import write_atomically
from pipeline.options import Options
from pipeline.runs import RunFolder

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
    vectors = np.concatenate([normalised(run.embed_rows(tokens[rows], lengths[rows])) for rows in blocks])
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
    meta = {"metric": "cosine", "sha256": digests, "checkpoint": run.digest, "min_count": limits.min_count}
    folder.write_json(f"index/{META}", asdict(result) | meta | {"chunker": run.chunker.name})
    del files, built, buffer
    release_memory()
    return result


def open_index(folder: RunFolder) -> tuple[Any, dict[str, np.ndarray], str]:
    """The index, its chunk table and the kind of chunker, checked against their own meta.json before they are read.

    Raises:
        FileNotFoundError: the run has no index yet.
        ValueError: it is damaged.
    """
    import faiss

    place = folder.path / "index"
    if not (place / META).is_file():
        raise FileNotFoundError(f"{folder.path} has no index yet: run `haed index {folder.path}` first")
    try:
        meta = json.loads((place / META).read_text())
        digests, chunker = meta["sha256"], str(meta["chunker"])
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
    return built, table, chunker


def _check_header(path: Path, content: bytes) -> None:
    """Raises ValueError unless a file is what `index` writes: FAISS's reader must not meet anything else.

    A flat index is `IxFI`, the width (int32), the number of vectors (int64), and 45 bytes of header in all; the rest are
    the vectors. Its reader would allocate whatever a header asks for.
    """
    width, vectors = struct.unpack_from("<iq", content, 4) if len(content) >= _HEADER else (0, 0)
    expected = _HEADER + 4 * width * vectors
    if content[:4] != b"IxFI" or width < 1 or vectors < 1 or len(content) != expected:
        raise ValueError(f"{path} is no flat index of inner products as `haed index` writes them: not read")


def normalised(vectors: np.ndarray) -> np.ndarray:
    """Vectors (n, E) divided by their lengths."""
    return np.ascontiguousarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12), np.float32)
