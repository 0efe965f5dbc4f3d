"""Stage `index`: write the vectors of a run, their table and the FAISS search over them.

`pipeline.run.spaces.storage` documents the files.

Index of contexts, for the stage `index`: states of the main model at positions of a whole split, in batches.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.corpus import Corpus
from data.filesystem import file_lock, replace_atomically
from haed.base import TokenBatch
from pipeline.config import ConfigError, Options
from pipeline.run.index import check_chunks, known_count_threshold
from pipeline.run.metrics import ProgressCounter
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder, guard_results
from pipeline.run.shards import check_split
from pipeline.run.spaces.contexts import AFTER, BEFORE, NAMED
from pipeline.run.spaces.faiss_search import choose_index, prepare_vectors
from pipeline.run.spaces.results import display_chunk
from pipeline.run.spaces.storage import (
    SCORES,
    SEARCH,
    TABLE,
    VECTORS,
    IndexMetadata,
    IndexSummary,
    Metric,
    RandomPairScores,
    Space,
    VectorFile,
    choose_metric,
    finish_index,
    open_vectors,
    space_folder,
    write_vectors,
)
from pipeline.run.windows import pad_chunks

_PAIRS = 4000


def write_table(run: Run, space: Space, tables: Iterable[Any]) -> None:
    """Write the table of a space from parts of one schema."""
    import pyarrow.parquet

    with replace_atomically(space_folder(run.folder, space) / TABLE) as file:
        writer = None
        try:
            for table in tables:
                writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
                writer.write_table(table)
        finally:  # otherwise the garbage collector tries to finish it, and prints an error
            if writer is not None:
                writer.close()


def build_search(run: Run, space: Space, metric: Metric, unseen: np.ndarray, known: int, **more: Any) -> IndexMetadata:
    """Build and tune the search over the written vectors, and finish the index.

    Args:
        run: run that is indexed.
        space: space that is indexed.
        metric: metric of the vectors.
        unseen: (m, E) vectors outside the index, used as queries for tuning.
        known: number of rows, from the first, that results are taken from.
        more: further fields of `IndexMetadata`.
    """
    place, limits = space_folder(run.folder, space), run.options.index
    vectors = open_vectors(place / VECTORS)
    tuned = choose_index(place, vectors, metric, unseen, limits, run.options.threads, run.options.seed)
    number, width = vectors.shape
    meta = IndexMetadata(
        folder=str(place),
        space=space,
        chunks=number,
        width=width,
        split=limits.split,
        stage=run.phase,
        step=run.step,
        kind=tuned.kind,
        metric=metric,
        found=tuned.found,
        curve=tuned.curve,
        queries=tuned.queries,
        recall=limits.recall,
        min_count=limits.min_count,
        max_chunks=limits.max_chunks,
        sha256={},
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        asked_stage=run.options.evaluate.stage,
        context=run.options.batch.context,
        chunker=run.chunker.name,
        chance=random_pair_scores(vectors, min(known, number), metric, run.options.seed),
        **more,
    )
    return finish_index(run.folder, meta, [VECTORS, TABLE] if tuned.kind == "flat" else [VECTORS, SEARCH, TABLE])


def random_pair_scores(
    vectors: np.ndarray | VectorFile, number: int, metric: Metric, seed: int
) -> RandomPairScores | None:
    """Score random pairs of the first `number` of vectors (n, E), drawn by the seed; return None for fewer than two."""
    if number < 2:
        return None
    chance = np.random.default_rng(seed)
    one = chance.integers(number, size=_PAIRS)
    other = (one + chance.integers(1, number, size=_PAIRS)) % number
    first, second = vectors[one], vectors[other]
    scores = np.linalg.norm(first - second, axis=1) if metric == "l2" else (first * second).sum(1)
    rare = np.percentile(scores, 1 if metric == "l2" else 99)
    return RandomPairScores(float(scores.mean()), float(scores.std()), float(rare))


if TYPE_CHECKING:
    from pipeline.run.opened import Run

log = logging.getLogger(__name__)
_AT_ONCE = 8192


@guard_results
def build_index(options: Options) -> IndexSummary:
    """Build the index of the space `index.space`.

    Raises:
        ConfigError: the model has no such space, or no chunk occurs `index.min_count` times.
        FileNotFoundError: there are no such shards, or nothing was trained.
        ValueError: the split is empty.
        BlockingIOError: another process is building it.
    """
    from pipeline.run.device import release_memory

    wanted = options.index.space
    space: Space = "contexts" if wanted == "contexts" else "chunks"
    if space == "chunks":
        check_chunks(options)
        if wanted == "predictions":
            log.info("predictions are asked for among chunks (haed neighbours RUN --after TEXT): chunks are indexed")
        if options.index.layer is not None or options.index.scale is not None:
            log.warning("index.layer and index.scale are of contexts, and change nothing here: --space contexts")
    from pipeline.run.opened import Run

    folder = RunFolder.from_options(options)
    run = Run(folder, options)
    split, corpus = options.index.split, folder.open_corpus()
    check_split(corpus.split_counts(split).chunks, corpus.location, "index.split", split)
    place = space_folder(folder, space)
    place.parent.mkdir(exist_ok=True)  # for the lock

    def refuse(holder: str) -> None:
        raise BlockingIOError(f"{place} is being built by {holder}; wait for it or stop it")

    with file_lock(place.with_name(f"{space}.lock"), refuse):
        if space == "contexts":
            found = index_contexts(run)
        else:
            found = _index_chunks(run)
    release_memory()
    return IndexSummary(**{name: getattr(found, name) for name in IndexSummary.__dataclass_fields__})


def _index_chunks(run: "Run") -> IndexMetadata:
    """Index the distinct chunks of a split of the run's corpus, the most frequent first."""
    from data.vocabulary import count_distinct_chunks

    limits, corpus = run.options.index, run.folder.open_corpus()
    least = limits.min_count or 1
    found = count_distinct_chunks(corpus, limits.split, most=limits.max_chunks, at_least=least)
    tokens, lengths, counts = found.tokens, found.lengths, found.counts
    if not len(counts):
        raise ConfigError(f"no chunk of the {limits.split} split occurs {least} times: lower index.min_count")
    if found.left_out:
        rest = f"{found.left_out:,} rarer or equally rare ones are left out"
        log.warning("index.max_chunks=%d: of the distinct chunks %s", limits.max_chunks, rest)
    norms, distances = np.empty((2, len(counts)), np.float32)
    log.info("embedding %s chunks of %s by %s step %s", f"{len(counts):,}", limits.split, run.phase, f"{run.step:,}")
    progress = ProgressCounter("index", len(counts), "chunks")
    metric = choose_metric(limits, "chunks")
    known = int((counts >= known_count_threshold(counts)).sum())
    mean = _mean_embedding(run, tokens, lengths, known) if metric == "centred" else None
    with write_vectors(space_folder(run.folder, "chunks"), run.options.model.encoder.width, metric) as file:
        for rows, vectors in _embed_batches(run, tokens, lengths):
            norms[rows] = np.linalg.norm(vectors, axis=1)
            if mean is not None:
                distances[rows] = np.linalg.norm(vectors - mean, axis=1)
            file.append_vectors(prepare_vectors(vectors, metric, mean))
            progress.add_done(len(vectors))

    import pyarrow

    kind = run.chunker.name
    texts = (display_chunk(row.tobytes()[:size], kind) for row, size in zip(tokens, lengths, strict=True))
    fixed = pyarrow.binary(tokens.shape[1])
    columns = {
        "text": pyarrow.array(texts, pyarrow.string()),
        "count": pyarrow.array(counts, pyarrow.int64()),
        "length": pyarrow.array(lengths.astype(np.int64)),
        "norm": pyarrow.array(norms),
        "tokens": pyarrow.FixedSizeBinaryArray.from_buffers(
            fixed, len(counts), [None, pyarrow.py_buffer(np.ascontiguousarray(tokens))]
        ),
    }
    if mean is not None:
        columns["from_mean"] = pyarrow.array(distances)
    write_table(run, "chunks", [pyarrow.table(columns)])
    others = count_distinct_chunks(corpus, "valid", most=4096) if limits.split != "valid" else None
    unseen = np.zeros((0, run.options.model.encoder.width), np.float32)
    if others is not None and len(others.counts):
        there = {row.tobytes() for row in np.column_stack([tokens, lengths])}
        new = [
            i for i, row in enumerate(np.column_stack([others.tokens, others.lengths])) if row.tobytes() not in there
        ]
        if new:
            unseen = prepare_vectors(run.embed_rows(others.tokens[new], others.lengths[new]), metric, mean)
    taken = None if mean is None else mean.tolist()
    return build_search(
        run, "chunks", metric, unseen, known, left_out=found.left_out, floor=known_count_threshold(counts), mean=taken
    )


def _embed_batches(run: "Run", tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Embed chunks, given as tokens (n, K) and lengths (n,), in batches; yield the rows and embeddings of each."""
    for begin in range(0, len(tokens), _AT_ONCE):
        rows = slice(begin, begin + _AT_ONCE)
        yield rows, run.embed_rows(tokens[rows], lengths[rows])


def _mean_embedding(run: "Run", tokens: np.ndarray, lengths: np.ndarray, known: int) -> np.ndarray:
    """Return the mean embedding (E,) float32 of the first `known` chunks, each counted once.

    Weighted by counts, a handful of chunks would dominate the mean. All chunks of the split give the same mean
    (dev/LOG.md).
    """
    summed = sum(
        vectors.sum(0, dtype=np.float64) for _, vectors in _embed_batches(run, tokens[:known], lengths[:known])
    )
    return np.asarray(summed / known, np.float32)


def describe_index(found: IndexSummary) -> str:
    """Describe a built index in text: its folder, its size and the quality of its search."""
    what = "chunks" if found.space == "chunks" else "contexts"
    option = "index.max_chunks" if found.space == "chunks" else "index.max_contexts"
    rarer = "rarer ones" if found.space == "chunks" else "others"
    left = f" ({found.left_out:,} {rarer} left out by {option})" if found.left_out else ""
    how = "exact search" if found.kind == "flat" else f"{found.kind} at effort {found.found.effort}"
    lines = [
        f"{found.folder}: {found.chunks:,} {what}{left}, {found.width} dimensions, {SCORES[found.metric]}",
        f"{how}: recall@10 {found.found.recall:.4f}, one query on one core {found.found.p50:.2f} ms (p99 {found.found.p99:.2f})",
    ]
    if found.floor > 1:
        lines.append(f"answers occur {found.floor} times or more, unless --min-count says otherwise")
    return "\n".join(lines)


_WINDOWS_AT_ONCE = 16  # windows


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
        while made < wanted and (batch := list(islice(windows, _WINDOWS_AT_ONCE))):
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
