"""The parts of the likelihood that remember, for a trained run: what they recall, and the gate that weighs them.

The recalled chunks of a corpus lie beside its shards, in `recall.safetensors`. The gate is fitted on chunks of the valid
split and lies in the folder `known/` of the run. Both are caches: one that is damaged, or of another corpus, checkpoint or
setting, is made again, which is logged. Nothing else of any other split than train is in them.
"""

import logging
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from data.corpus import Corpus
from haed.base import check_finite
from haed.chunk.copied import Copied
from haed.chunk.memory import DocumentMemory, Memory, MemoryGate, Part, ReadChunks, name_parts
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, Distinct, chunk_keys, find_distinct
from haed.chunk.recalled import ChunkRecall, Recalled
from haed.chunk.repeated import Repeated
from haed.chunk.spelling import DocumentWords, Speller
from pipeline.config import EvaluateOptions
from pipeline.console import format_error
from pipeline.run.checkpoints import Checkpoint
from pipeline.run.known import read_cache, write_cache
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import cut_documents, pad_chunks, read_windows

log = logging.getLogger(__name__)
GATE, RECALL = "known/gate.safetensors", "recall.safetensors"
FITTED, FITTED_PER_DOCUMENT = 20_480, 4096  # chunks of the valid split on which the gate is fitted
RECALLED = 1 << 25  # chunks of the train split at most: 8 bytes each
_GATE_FORMAT = "gate of features in deviations, scales of spelling by place and context, of documents in random order"
_RECALL_FORMAT = "contexts sorted beyond 32 chunks"
_SORTED = 1 << 20  # chunks whose distinct ones are found at a time


def load_memory(
    folder: RunFolder, system: HAED, evaluation: EvaluateOptions, checkpoint: Checkpoint, precision: str, stride: int
) -> Memory | None:
    """Return the memory of a run by its checkpoint, cached or fitted.

    None, with a warning, if the corpus is not there, or its valid split is empty, so that no gate can be fitted.

    Args:
        folder: the run.
        system: the checkpoint's system, in evaluation mode, with its known chunks.
        evaluation: `memory` chunks of a document are remembered, by the parts `parts`.
        checkpoint: the checkpoint.
        precision: precision in which the system computes.
        stride: chunks that each window newly scores.
    """
    try:
        corpus = folder.open_corpus()
        if not corpus.split_counts("valid").chunks:
            raise ValueError("the valid split is empty, so the gate of the parts cannot be fitted")
        makers = [_PARTS[name](corpus, evaluation) for name in dict.fromkeys(evaluation.parts) if name in _PARTS]
    except (OSError, ValueError) as error:
        log.warning("scoring without memory: %s", format_error(error))
        return None
    cut = system.cut

    def start_document() -> DocumentMemory:
        words = DocumentWords(cut.k, cut.vocabulary, cut.fixed) if "words" in evaluation.parts else None
        return DocumentMemory([make() for make in makers], words)

    names = name_parts(system.known is not None, start_document().parts)
    key = {
        "checkpoint": checkpoint.digest,
        "corpus": corpus.digest,
        "precision": precision,
        "parts": " ".join([*names, *(["words"] if "words" in evaluation.parts else [])]),
        "features": " ".join(str(part.features) for part in start_document().parts),
        "memory": str(evaluation.memory),
        "windows": f"{cut.context} {stride}",
        "holds": _GATE_FORMAT,
    }
    kept = read_cache(folder.path / GATE, key)
    if kept is not None and (memory := _restore_memory(kept, names, start_document)) is not None:
        return memory
    held_out = choose_held_out(corpus)
    count = sum(len(lengths) for _, lengths in held_out)
    log.info("fitting the gate of %s on %s chunks of the valid split", ", ".join(names), f"{count:,}")
    memory = Memory.fit(names, start_document, read_documents(system, start_document, held_out, stride))
    kept = {each.name: getattr(memory.gate, each.name) for each in fields(memory.gate)}
    kept |= {} if memory.speller is None else {"log_scale": memory.speller.log_scale}
    write_cache(folder.path / GATE, kept, key, folder)
    return memory


def _restore_memory(
    kept: dict[str, Tensor], names: tuple[str, ...], start_document: Callable[[], DocumentMemory]
) -> Memory | None:
    """Return the memory of a gate's tensors; None, with a warning, if they are of no such gate."""
    scale = kept.pop("log_scale", None)
    features = len(kept.get("mean", ()))
    shapes = {"weight": (features, len(names)), "bias": (len(names),), "mean": (features,), "deviation": (features,)}
    fits = {name: tuple(tensor.shape) for name, tensor in kept.items()} == shapes
    if not fits or not all(bool(tensor.isfinite().all()) for tensor in kept.values()):
        log.warning("%s is damaged. It is made again", GATE)
        return None
    return Memory(names, start_document, MemoryGate(**kept), None if scale is None else Speller(scale))


# A further part is a file beside haed/chunk/copied.py and a line here, and its name in `EvaluateOptions.parts`.
_PARTS: dict[str, Callable[[Corpus, EvaluateOptions], Callable[[], Part]]] = {
    "copied": lambda corpus, evaluation: partial(Copied, evaluation.memory),
    "repeated": lambda corpus, evaluation: partial(Repeated, corpus.build_chunker().k),
    "recalled": lambda corpus, evaluation: partial(Recalled, load_recall(corpus)),
}


def load_recall(corpus: Corpus) -> ChunkRecall:
    """Return the chunk sequence of a corpus's train split, cached beside its shards or sorted anew."""
    key = {"corpus": corpus.digest, "most": str(RECALLED), "holds": _RECALL_FORMAT}
    kept = read_cache(corpus.folder / RECALL, key)
    if kept is not None:
        try:
            return ChunkRecall(Chunks(kept.pop("tokens").long(), kept.pop("lengths").long()), **kept)
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            log.warning("%s is damaged (%s). It is made again", corpus.folder / RECALL, error)
    total = corpus.split_counts("train").chunks
    read = min(total, RECALLED)
    sizes = f"{8e-6 * read:.0f} MB, {133e-6 * read:.0f} MB meanwhile"
    log.info("sorting %s chunks of the train split for the recalled part: %s", f"{read:,}", sizes)
    if read < total:
        log.warning("only the first %s of %s chunks of the train split are recalled", f"{read:,}", f"{total:,}")
    chunker = corpus.build_chunker()
    recall = ChunkRecall.build(*_number_chunks(corpus.iterate_documents("train"), chunker.k, chunker.fixed, read))
    tensors = {each.name: getattr(recall, each.name) for each in fields(ChunkRecall) if each.name != "chunks"}
    tensors |= {"tokens": recall.chunks.tokens.byte(), "lengths": recall.chunks.lengths.byte()}
    write_cache(corpus.folder / RECALL, tensors, key)
    return recall


def _number_chunks(
    documents: Iterable[tuple[np.ndarray, np.ndarray]], k: int, fixed: bool, most: int
) -> tuple[Chunks, Tensor]:
    """Return the distinct chunks of documents in the order of their keys, and the ids for `ChunkRecall.build`.

    Of more than `most` chunks the first are taken. Only about `_SORTED` chunks have their tokens in memory at a time. Of
    chunks of a fixed size the shorter rest of a document is no outcome, and is left out.
    """
    keys, sizes, waiting, queued, left = list[Tensor](), list[int](), list[Chunks](), 0, most
    distinct = find_distinct(torch.zeros(0, k, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8))

    def merge_waiting() -> Distinct:
        every = Chunks.concatenate([distinct, *waiting])
        return find_distinct(every.tokens, every.lengths)

    for tokens, lengths in documents:
        if fixed and len(lengths) and lengths[-1] < k:
            lengths = lengths[:-1]
        lengths = lengths[:left]
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        for first in range(0, len(lengths), _SORTED):
            some = lengths[first : first + _SORTED]
            rows = pad_chunks(tokens[ends[first] : ends[first + len(some)]], some, k)
            chunks = Chunks(torch.from_numpy(rows), torch.from_numpy(some.astype(np.uint8)))
            keys.append(chunk_keys(chunks.tokens, chunks.lengths))
            waiting.append(chunks)
            queued += len(some)
            if queued >= _SORTED:
                distinct, queued = merge_waiting(), 0
                waiting.clear()
        sizes.append(len(lengths))
        left -= len(lengths)
        if not left:
            break
    distinct = merge_waiting()
    every = torch.cat([torch.zeros(0, dtype=torch.long), *keys])
    ids = torch.zeros(len(every) + len(sizes), dtype=torch.int32)
    border = torch.tensor(sizes, dtype=torch.long).cumsum(0) + torch.arange(len(sizes))
    real = torch.ones(len(ids), dtype=torch.bool)
    real[border] = False
    ids[real] = (torch.searchsorted(distinct.keys, every) + 1).int()
    return Chunks(distinct.tokens.long(), distinct.lengths.long()), ids


def choose_held_out(corpus: Corpus) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return beginnings of documents of the valid split, in a fixed random order, at most `FITTED` chunks in all.

    Each gives at most `FITTED_PER_DOCUMENT` chunks, or equal shares if there are few documents.
    """
    documents = corpus.split_counts("valid").documents
    most = max(FITTED_PER_DOCUMENT, -(-FITTED // max(1, documents)))
    order = torch.randperm(documents, generator=torch.Generator().manual_seed(0))
    chosen: list[tuple[int, np.ndarray, np.ndarray]] = []  # by their places in the order
    size = 0
    for place, (tokens, lengths) in zip(order.argsort().tolist(), corpus.iterate_documents("valid"), strict=False):
        if size >= FITTED and place > chosen[-1][0]:
            continue
        some = lengths[:most]
        insort(chosen, (place, tokens[: int(some.astype(np.int64).sum())].copy(), some.copy()), key=itemgetter(0))
        size += len(some)
        while size - len(chosen[-1][2]) >= FITTED:
            size -= len(chosen.pop()[2])
    if chosen and size > FITTED:
        place, tokens, lengths = chosen.pop()
        lengths = lengths[: len(lengths) - (size - FITTED)]
        chosen.append((place, tokens[: int(lengths.astype(np.int64).sum())], lengths))
    return [(tokens, lengths) for _, tokens, lengths in chosen]


def read_documents(
    system: HAED,
    start_document: Callable[[], DocumentMemory],
    documents: list[tuple[np.ndarray, np.ndarray]],
    stride: int,
) -> ReadChunks:
    """Return what memories say of all chunks of documents."""
    read = []
    memory, number = start_document(), 0
    for part in cut_documents(documents, system.cut.k, system.cut.context, stride, at_once=32):
        mixture_scores = system.score(part.windows, part.new)
        check_finite(mixture_scores.joint_log_prob, "scores")
        for document, chunks, scores in read_windows(part, mixture_scores):
            if document != number:
                memory, number = start_document(), document
            read.append(memory.read_chunks(chunks, scores))
    return ReadChunks.concatenate(read)
