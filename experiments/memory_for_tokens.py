"""Memory for models of tokens, by the parts and the gate that models of chunks have, so that all may look back alike.

A token is a chunk of one token here. *Copied* is the continuous cache of Grave et al. (2017) over the states that the output
layer sees; *recalled* are n-grams of the tokens of train, orders 1 to 32, by Witten and Bell. The gate and the cache's
sharpness θ are fitted on the valid split: on the text on which those of models of chunks are. See
docs/explanation/likelihood.md.

Legend: N consecutive tokens of a document, W width of the output layer's input, B windows of L tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from haed.base import to_device
from haed.chunk.copied import Copied
from haed.chunk.memory import DocumentMemory, Memory, MemoryScores, ReadChunks, name_parts
from haed.chunk.mixture import MixtureScores
from haed.chunk.packing import Chunks, chunk_keys
from haed.chunk.recalled import ChunkRecall, Recalled
from haed.token.base import TokenModel
from pipeline.run.opened import Run
from pipeline.run.windows import DocumentWindows, cut_documents

CACHED = 4096  # tokens of a document
HELD_OUT = 100_000  # bytes of valid on which the memory of a package is fitted, about as many as those of other models
SHARPNESS = (24.0, 48.0, 96.0, 192.0)  # θ is the one of these that is best on the valid split
_PIECE = 4096  # tokens


@dataclass
class ReadTokens:
    """Consecutive tokens of a document, as a model read them.

    Attributes:
        document: number of the document.
        tokens: (N,).
        states: (N, W) input of the output layer where each is predicted.
        log_prob: (N,) log p of each, in nats.
    """

    document: int
    tokens: Tensor
    states: Tensor
    log_prob: Tensor


@contextmanager
def record_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of a layer while the context is open."""
    inputs = list[Tensor]()
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        yield inputs
    finally:
        hook.remove()


@torch.no_grad()
def read_documents(run: Run, documents: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[ReadTokens]:
    """Read documents, given as flat tokens and lengths of chunks, in the windows in which the run scores them."""
    system, context = run.system, run.options.batch.context
    assert isinstance(system, TokenModel)
    for part in cut_documents(documents, run.chunker.k, context, run.stride, at_once=32):
        with run.compute.use_precision():
            yield from _read_windows(system, part)


def _read_windows(system: TokenModel, part: DocumentWindows) -> Iterator[ReadTokens]:
    tokens = system.prepare_inputs(part.windows)
    with record_inputs(system.output) as inputs:
        log_prob = system.token_log_likelihood(to_device(tokens, system.device)).double().cpu()
    chunk = (tokens.place // (system.cut.k + 1)).clamp(max=part.new.shape[1] - 1)
    new, states = tokens.real & part.new.gather(1, chunk), inputs[0].float().cpu()
    for number in part.document.unique_consecutive().tolist():
        rows = part.document == number
        new_rows = new[rows]
        yield ReadTokens(number, *(x[rows][new_rows] for x in (tokens.targets, states, log_prob)))


def recall_tokens(documents: Iterable[np.ndarray]) -> ChunkRecall:
    """Sort the tokens (n,) of the documents of a train split, to recall what followed them.

    Raises:
        ValueError: there is no token.
    """
    border = torch.full((1,), -1)
    text = torch.cat([torch.cat([torch.from_numpy(each.astype(np.int64)), border]) for each in documents] or [border])
    kinds = text[text >= 0].unique()
    if not len(kinds):
        raise ValueError("the train split is empty, so nothing can be recalled")
    order = chunk_keys(kinds[:, None], torch.ones_like(kinds)).argsort()
    numbers = torch.zeros(int(kinds[-1]) + 1, dtype=torch.int32)
    numbers[kinds[order]] = torch.arange(1, len(kinds) + 1, dtype=torch.int32)
    return ChunkRecall.build(as_chunks(kinds[order]), numbers[text.clamp(min=0)].where(text >= 0, 0))


def as_chunks(tokens: Tensor) -> Chunks:
    """Return tokens (N,) as chunks of one token each."""
    return Chunks(tokens[:, None], torch.ones_like(tokens))


def join_pieces(text: Iterable[ReadTokens]) -> Iterator[ReadTokens]:
    """Join the pieces of a document into longer ones, since each has a price of its own."""
    waiting = list[ReadTokens]()
    for piece in chain(text, [None]):
        ready = sum(len(each.tokens) for each in waiting) >= _PIECE
        if waiting and (piece is None or ready or piece.document != waiting[0].document):
            columns = ([getattr(each, name) for each in waiting] for name in ("tokens", "states", "log_prob"))
            yield ReadTokens(waiting[0].document, *(torch.cat(column) for column in columns))
            waiting.clear()
        waiting += [] if piece is None else [piece]


def read_pieces(start_document: Callable[[], DocumentMemory], text: Iterable[ReadTokens]) -> Iterator[ReadChunks]:
    """Yield what the memories of documents say of their tokens, piece by piece."""
    memory, number = start_document(), -1
    for piece in join_pieces(text):
        if piece.document != number:
            memory, number = start_document(), piece.document
        scores = MixtureScores(piece.states, piece.log_prob[:, None])
        yield memory.read_chunks(as_chunks(piece.tokens), scores)


def fit_memory(recall: ChunkRecall, held_out: list[ReadTokens], cached: int = CACHED) -> tuple[Memory, float]:
    """Fit the gate on tokens of the valid split, with each sharpness; return the best memory and its θ."""
    fitted = []
    for sharpness in SHARPNESS:

        def start_document(sharpness: float = sharpness) -> DocumentMemory:
            return DocumentMemory([Copied(cached, sharpness), Recalled(recall)])

        read = ReadChunks.concatenate(list(read_pieces(start_document, held_out)))
        memory = Memory.fit(name_parts(False, start_document().parts), start_document, read)
        fitted.append((float(join_parts(memory, read).joint_log_prob.sum()), sharpness, memory))
    _, sharpness, memory = max(fitted, key=lambda each: each[:2])
    return memory, sharpness


def join_parts(memory: Memory, read: ReadChunks) -> MemoryScores:
    """Weigh what the parts said of tokens."""
    return MemoryScores(read.log_prob, memory.gate.weigh_parts(read.features, read.present))


def score_tokens(memory: Memory, text: Iterable[ReadTokens]) -> tuple[float, float]:
    """Return the bits of a text by the model alone, and with memory."""
    alone = remembering = 0.0
    for read in read_pieces(memory.start_document, text):
        alone -= float(read.log_prob[:, 0].sum()) / math.log(2)
        remembering -= float(join_parts(memory, read).joint_log_prob.sum()) / math.log(2)
    return alone, remembering


def remembered_metrics(alone: float, remembering: float, characters: int) -> dict[str, float]:
    """Return the metrics of the measure `remembered` from bits of the test split."""
    return {"test, bits/char": alone / characters, "test, with memory": remembering / characters}
