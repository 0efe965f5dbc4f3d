"""Index of contexts, for the stage `index`: states of the main model at positions of a whole split, in batches."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from data.corpus import Corpus
from haed.system import TokenBatch
from pipeline.config import ConfigError
from pipeline.probe.index import build_search, write_table
from pipeline.run.opened import Run
from pipeline.run.spaces.answers import display_chunk
from pipeline.run.spaces.contexts import AFTER, BEFORE, NAMED
from pipeline.run.spaces.stored import IndexMetadata, choose_metric, space_folder, write_vectors
from pipeline.run.spaces.vectors import prepare_vectors
from pipeline.run.windows import pad_chunks

log = logging.getLogger(__name__)
_AT_ONCE = 16  # windows


@dataclass
class Window:
    """Window of chunks in a document. Only its chunks from `new` on are indexed.

    Attributes:
        document: number of the document in the split.
        name: name of the document.
        tokens: (n,) tokens of the whole document.
        ends: (N + 1,) first byte of each chunk of the document, and its end.
        begin: first chunk of the window.
        new: first chunk that is indexed.
        end: chunk after the last of the window.
    """

    document: int
    name: bytes
    tokens: np.ndarray
    ends: np.ndarray
    begin: int
    new: int
    end: int


def index_contexts(run: Run) -> IndexMetadata:
    """Write the index of contexts of a run.

    Windows overlap by half, as in an evaluation. So every position after the first half window of a document has at
    least half a window before it. If there are more positions than `index.max_contexts`, windows are sampled by the
    seed.
    """
    corpus, limits = run.folder.open_corpus(), run.options.index
    metric = choose_metric(limits, "contexts")
    total = corpus.split_counts(limits.split).chunks
    wanted = min(total, limits.max_contexts or total)
    if wanted < total:
        log.warning(
            "index.max_contexts=%d: of %s places of %s about so many are drawn, in windows, by the seed %d",
            wanted,
            f"{total:,}",
            limits.split,
            run.options.seed,
        )
    made = 0

    def tables() -> Iterator[Any]:
        nonlocal made
        chance = np.random.default_rng(run.options.seed)
        share = wanted / total
        windows = (
            each for each in cut_windows(corpus, limits.split, run.options.batch.context) if chance.random() < share
        )
        while made < wanted and (batch := list(islice(windows, _AT_ONCE))):
            vectors = _compute_states(run, batch)[: wanted - made]
            file.append_vectors(prepare_vectors(vectors, metric))
            yield _build_table(batch, run.chunker.name, len(vectors))
            made += len(vectors)

    if limits.scale is not None and limits.scale not in (scales := run.system.scale_outputs()):
        there = f"set one of {', '.join(map(str, sorted(scales)))}, or leave it out" if scales else "leave it out"
        raise ConfigError(f"index.scale={limits.scale}: this model has no such scale; {there}")
    width = run.context(b"a", limits.layer, limits.scale).shape[0]
    with write_vectors(space_folder(run.folder, "contexts"), width, metric) as file:
        write_table(run, "contexts", tables())
    if not made:
        raise ConfigError(f"index.max_contexts={limits.max_contexts}: none of {total:,} places was drawn, raise it")
    unseen = np.zeros((0, width), np.float32)
    return build_search(
        run, "contexts", metric, unseen, made, left_out=total - made, layer=limits.layer, scale=limits.scale
    )


def cut_windows(corpus: Corpus, split: str, context: int) -> Iterator[Window]:
    """Yield the windows of a split. Neighbouring windows overlap by half."""
    stride = max(1, context // 2)
    for number, ((tokens, lengths), name) in enumerate(
        zip(corpus.iterate_documents(split), _document_names(corpus, split), strict=True)
    ):
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        for begin in range(0, max(1, len(lengths) - (context - stride)), stride):
            end = min(begin + context, len(lengths))
            yield Window(number, name, tokens, ends, begin, begin + (context - stride) * (begin > 0), end)


def _document_names(corpus: Corpus, split: str) -> Iterator[bytes]:
    for shard in corpus.shards_of(split):
        for sample in corpus.read(shard):
            yield from (
                name.encode("utf-8", "surrogateescape")[-NAMED:] for name in sample.names[int(sample.continues) :]
            )


def to_token_batch(batch: list[Window], k: int) -> TokenBatch:
    """Return windows as the input of a model."""
    longest = max(each.end - each.begin for each in batch)
    tokens, lengths = (
        torch.zeros(len(batch), longest, k, dtype=torch.long),
        torch.zeros(len(batch), longest, dtype=torch.long),
    )
    for row, each in enumerate(batch):
        size = each.end - each.begin
        sizes = np.diff(each.ends[each.begin : each.end + 1])
        flat = each.tokens[each.ends[each.begin] : each.ends[each.end]]
        tokens[row, :size] = torch.from_numpy(pad_chunks(flat, sizes, k).astype(np.int64))
        lengths[row, :size] = torch.from_numpy(sizes)
    return TokenBatch.from_chunks(tokens, lengths)


@torch.no_grad()
def _compute_states(run: Run, batch: list[Window]) -> np.ndarray:
    """Return the states (M, E) before the indexed chunks of the windows."""
    limits = run.options.index
    with run.compute.use_precision():
        found = run.system.extract_vectors(to_token_batch(batch, run.chunker.k), "contexts", limits.layer, limits.scale)
    count = np.concatenate([np.arange(each.begin, each.end) >= each.new for each in batch])
    return found.float().cpu().numpy()[count]


def _build_table(batch: list[Window], kind: str, rows: int) -> Any:
    """Return the table of positions and surrounding text of the first `rows` indexed chunks."""
    import pyarrow

    places = [(each, chunk) for each in batch for chunk in range(each.new, each.end)][:rows]
    offsets = np.array([each.ends[chunk] for each, chunk in places], np.int64)
    texts, names, before = np.zeros((rows, BEFORE + AFTER), np.uint8), np.zeros((rows, NAMED), np.uint8), []
    lengths, named, shown = [], [], []
    for row, ((each, _), offset) in enumerate(zip(places, offsets.tolist(), strict=True)):
        begin = max(0, offset - BEFORE)
        piece = each.tokens[begin : offset + AFTER]
        texts[row, : len(piece)] = piece
        names[row, : len(each.name)] = np.frombuffer(each.name, np.uint8)
        before.append(offset - begin)
        lengths.append(len(piece))
        named.append(len(each.name))
        shown.append(display_chunk(piece.tobytes(), kind))

    def fixed(values: np.ndarray) -> Any:
        return pyarrow.FixedSizeBinaryArray.from_buffers(
            pyarrow.binary(values.shape[1]), len(values), [None, pyarrow.py_buffer(values)]
        )

    columns = {
        "text": pyarrow.array(shown, pyarrow.string()),
        "document": pyarrow.array([each.document for each, _ in places], pyarrow.int64()),
        "chunk": pyarrow.array([chunk for _, chunk in places], pyarrow.int64()),
        "offset": pyarrow.array(offsets),
        "passage": fixed(texts),
        "before": pyarrow.array(before, pyarrow.int64()),
        "length": pyarrow.array(lengths, pyarrow.int64()),
        "name": fixed(names),
        "named": pyarrow.array(named, pyarrow.int64()),
    }
    return pyarrow.table(columns)
