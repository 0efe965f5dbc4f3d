"""The known chunks of a mixture and their embeddings, cached in the folder `known/` of a run.

`chunks.safetensors` has the most frequent chunks of the train split and their counts. It is also kept beside the
shards, where all runs find it. `keys.safetensors` has the embeddings in bfloat16 and the bias that the IEM score needs,
and the digest of the checkpoint. Both are caches: a file that is damaged, or of another corpus or checkpoint, is made
again, which is logged. They contain nothing of any other split.
"""

import hashlib
import logging
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from data.corpus import Corpus
from data.filesystem import make_folders, write_atomically
from data.vocabulary import count_distinct_chunks, count_documents_with
from haed.chunk.mixture import ChunkVocabulary, VocabularyScorer
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.run.checkpoints import Checkpoint, read_metadata, read_tensors
from pipeline.run.metrics import ProgressCounter
from pipeline.run.run_directory import RunFolder

log = logging.getLogger(__name__)
CHUNKS, KEYS = "known/chunks.safetensors", "known/keys.safetensors"


def make_vocabulary(corpus: Corpus, most: int) -> ChunkVocabulary:
    """Return the known chunks: the most frequent ones of the train split, at most this many, with their counts.

    Raises:
        ValueError: there are none, since all of these are the rests of documents that are cut into a fixed size.
    """
    return _as_vocabulary(_find_known_chunks(corpus, most))


def store_known_chunks(folder: RunFolder, corpus: Corpus, most: int) -> None:
    """Store the known chunks in the folder of a run, so that the run can be moved without its shards."""
    write_cache(folder.path / CHUNKS, _find_known_chunks(corpus, most), _cache_key(corpus.digest, most), folder)


def embed_known_chunks(
    folder: RunFolder, system: HAED, most: int, checkpoint: Checkpoint, precision: str
) -> VocabularyScorer:
    """Return at most `most` known chunks with their embeddings by a checkpoint's system, cached or computed.

    Raises:
        FileNotFoundError: neither the run's cache nor its shards exist.
    """
    metadata = _cache_key(checkpoint.identity["corpus"], most)
    chunks = read_cache(folder.path / CHUNKS, metadata)
    if chunks is None:
        chunks = _find_known_chunks(folder.open_corpus(), most)
        write_cache(folder.path / CHUNKS, chunks, metadata, folder)
    vocabulary = _as_vocabulary(chunks)
    metadata = {"checkpoint": checkpoint.digest, "chunks": str(len(vocabulary)), "precision": precision}
    kept = read_cache(folder.path / KEYS, metadata)
    if kept is None:
        log.info("embedding %s known chunks", f"{len(vocabulary):,}")
        scorer = system.embed_vocabulary(vocabulary, torch.bfloat16)
        kept = {"keys": scorer.keys.to(torch.bfloat16).cpu(), "bias": scorer.bias.cpu()}
        write_cache(folder.path / KEYS, kept, metadata, folder)
    return VocabularyScorer(vocabulary, kept["keys"].to(system.device), kept["bias"].to(system.device))


def _cache_key(corpus: str, most: int) -> dict[str, str]:
    return {"corpus": corpus, "most": str(most), "holds": "counts documents lengths tokens, whole"}


def _find_known_chunks(corpus: Corpus, most: int) -> dict[str, Tensor]:
    path, metadata = corpus.folder / f"known-{most}.safetensors", _cache_key(corpus.digest, most)
    columns_by_name = read_cache(path, metadata)
    if columns_by_name is None:
        log.info("finding the known chunks: at most the %s most frequent of the train split", f"{most:,}")
        counter = ProgressCounter("known chunks", 2 * len(corpus.shards_of("train")), "shards read")
        every = count_distinct_chunks(corpus, "train", most=most, on_shard=counter.add_done)
        if every.left_out:
            log.info("known chunks: the decoder spells %s rarer ones (model.mixture.known)", f"{every.left_out:,}")
        columns = {name: getattr(every, name) for name in ("tokens", "lengths", "counts")}
        columns["documents"] = count_documents_with(corpus, "train", every, counter.add_done)
        # The decoder of chunks of a fixed size ends none early, so the rest at the end of a document is no outcome.
        whole = every.lengths == corpus.build_chunker().k if corpus.build_chunker().fixed else slice(None)
        columns_by_name = {name: torch.from_numpy(column[whole]).contiguous() for name, column in columns.items()}
        if not len(columns_by_name["lengths"]):
            raise ValueError(
                f"no whole chunk of {corpus.build_chunker().k} tokens is among the {most:,} most frequent chunks of the train "
                "split, so none can be known. Lower chunker.k, or set model.mixture.known=0"
            )
        write_cache(path, columns_by_name, metadata)
    return columns_by_name


def _as_vocabulary(columns: dict[str, Tensor]) -> ChunkVocabulary:
    chunks = Chunks(columns["tokens"].long(), columns["lengths"].long())
    return ChunkVocabulary(chunks, columns["counts"], columns["documents"])


def read_cache(path: Path, wanted: dict[str, str]) -> dict[str, Tensor] | None:
    """Return the tensors of a cache, if it is whole and its metadata match; else None."""
    try:
        metadata, tensors = read_metadata(path), read_tensors(path)
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        log.warning("%s. It is made again", error)
        return None
    others = [f"{name} {metadata.get(name)}, now {now}" for name, now in wanted.items() if metadata.get(name) != now]
    if others:
        log.info("%s is stale: %s", path, "; ".join(others))
        return None
    if metadata.get("sha256") != _hash_tensors(tensors):
        log.warning("%s is damaged (its sha256 does not match). It is made again", path)
        return None
    return tensors


def write_cache(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], run: RunFolder | None = None) -> None:
    """Write a cache, in a run unless its folder was removed; warn if that fails, since the result is used anyway."""
    try:
        if run is not None:
            make_folders(path.parent, within=run.path)
        write_atomically(path, save(tensors, metadata | {"sha256": _hash_tensors(tensors)}))
    except OSError as error:
        log.warning("%s could not be written: %s. It is made again each time", path, error.strerror or error)


def _hash_tensors(tensors: dict[str, Tensor]) -> str:
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        hasher.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)} ".encode())
        if tensors[name].numel():  # an empty array of NumPy has a stride of 0, which `view` refuses
            hasher.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
