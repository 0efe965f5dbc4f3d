"""Stage `index`: write the vectors of a run, their table and the FAISS search over them.

The space `chunks` has the embeddings of the distinct chunks of a split. The space `contexts` has states of the main model
at places of the split. `pipeline.run.index.storage` documents the files.
"""

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.corpus import Corpus
from data.filesystem import check_guards, file_lock, replace_atomically
from data.vocabulary import count_distinct_chunks
from haed.base import TokenBatch, check_finite
from pipeline.config import ConfigError, Options
from pipeline.run.device import release_memory
from pipeline.run.index.chunk_index import check_chunks, known_count_threshold
from pipeline.run.index.context_index import AFTER, BEFORE, NAMED
from pipeline.run.index.faiss_search import choose_index, prepare_vectors
from pipeline.run.index.queries import display_chunk
from pipeline.run.index.storage import (
    SCORES,
    SEARCH,
    TABLE,
    VECTORS,
    IndexMetadata,
    IndexSummary,
    Metric,
    Space,
    choose_metric,
    finish_index,
    lock_path,
    open_vectors,
    random_pair_scores,
    space_folder,
    unfinished_folder,
    write_vectors,
)
from pipeline.run.metrics import ProgressCounter
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder, guard_results
from pipeline.run.sharding import check_split
from pipeline.run.windows import Window, cut_windows, stack_windows

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)
_WINDOWS_AT_ONCE = 16
_UNSEEN = 4096  # chunks of the validation split among which queries for tuning are looked for


@guard_results
def build_index(options: Options) -> IndexSummary:
    """Build the index of the space `index.space`.

    Raises:
        ConfigError: the model has no such space, or no chunk occurs `index.min_count` times.
        FileNotFoundError: there are no such shards, or nothing was trained.
        ValueError: the split is empty.
        BlockingIOError: another process is building it.
    """
    limits = options.index
    space: Space = "contexts" if limits.space == "contexts" else "chunks"
    if space == "chunks":
        check_chunks(options)
        if limits.space == "predictions":
            log.info("predictions are not indexed, chunks are. Query them with `haed neighbours RUN --after TEXT`")
        if limits.layer is not None or limits.scale is not None:
            log.warning("index.layer and index.scale apply to contexts only. Use `--space contexts`")
    folder = RunFolder.from_options(options)
    run, corpus = Run(folder, options), folder.open_corpus()
    check_split(corpus.split_counts(limits.split).chunks, corpus.location, "index.split", limits.split)
    place = space_folder(folder, space)
    place.parent.mkdir(exist_ok=True)  # for the lock

    def refuse(holder: str) -> None:
        raise BlockingIOError(f"{place} is being built by {holder}. Wait for it or stop it")

    with file_lock(lock_path(folder, space), refuse):
        unfinished = unfinished_folder(folder, space)
        shutil.rmtree(unfinished, ignore_errors=True)  # of one that was killed
        try:
            meta = _index_contexts(run, corpus) if space == "contexts" else _index_chunks(run, corpus)
        except BaseException:
            check_guards(unfinished)  # what is there now may be another process's
            shutil.rmtree(unfinished, ignore_errors=True)  # else a full disk would stay full
            raise
    release_memory()
    return IndexSummary(**{name: getattr(meta, name) for name in IndexSummary.__dataclass_fields__})


def describe_index(index: IndexSummary) -> str:
    """Describe a built index in text: its folder, its size and the quality of its search."""
    rest, limit = ("rarer chunks", "max_chunks") if index.space == "chunks" else ("other places", "max_contexts")
    left = f" ({index.left_out:,} {rest} left out by index.{limit})" if index.left_out else ""
    search, quality = "exact search", index.found
    if index.kind != "flat":
        search = f"{index.kind} at effort {quality.effort}"
    lines = [
        f"{index.folder}: {index.chunks:,} {index.space}{left}, {index.width} dimensions, {SCORES[index.metric]}",
        f"{search}: recall@10 {quality.recall:.4f}, one query on one core {quality.p50:.2f} ms (p99 {quality.p99:.2f})",
    ]
    if index.floor > 1:
        lines.append(f"answers occur at least {index.floor} times; `--min-count` changes this")
    return "\n".join(lines)


def _index_chunks(run: Run, corpus: Corpus) -> IndexMetadata:
    import pyarrow

    limits, width = run.options.index, run.options.model.encoder.width
    least = limits.min_count or 1
    distinct = count_distinct_chunks(corpus, limits.split, most=limits.max_chunks, at_least=least)
    tokens, lengths, counts = distinct.tokens, distinct.lengths, distinct.counts
    if not len(counts):
        raise ConfigError(f"no chunk of the {limits.split} split occurs {least} times. Lower index.min_count")
    if distinct.left_out:
        rest = f"{distinct.left_out:,} of the rarest distinct chunks are left out"
        log.warning("index.max_chunks=%d: %s", limits.max_chunks, rest)
    norms, distances = np.empty((2, len(counts)), np.float32)
    log.info("embedding %s chunks of %s by %s step %s", f"{len(counts):,}", limits.split, run.phase, f"{run.step:,}")
    progress = ProgressCounter("index", len(counts), "chunks")
    metric, floor = choose_metric(limits, "chunks"), known_count_threshold(counts)
    known = int((counts >= floor).sum())
    mean = _mean_embedding(run, tokens[:known], lengths[:known]) if metric == "centred" else None
    with write_vectors(unfinished_folder(run.folder, "chunks"), width, metric) as file:
        for rows, vectors in run.embed_batches(tokens, lengths):
            norms[rows] = np.linalg.norm(vectors, axis=1)
            if mean is not None:
                distances[rows] = np.linalg.norm(vectors - mean, axis=1)
            file.append_vectors(prepare_vectors(vectors, metric, mean))
            progress.add_done(len(vectors))
    texts = (display_chunk(row.tobytes()[:size], run.chunker.name) for row, size in zip(tokens, lengths, strict=True))
    columns = {
        "text": pyarrow.array(texts, pyarrow.string()),
        "count": pyarrow.array(counts, pyarrow.int64()),
        "length": pyarrow.array(lengths.astype(np.int64)),
        "norm": pyarrow.array(norms),
        "tokens": _fixed_size_column(tokens),
    }
    if mean is not None:
        columns["from_mean"] = pyarrow.array(distances)
    _write_table(run, "chunks", [pyarrow.table(columns)])
    unseen = np.zeros((0, width), np.float32)
    others = distinct if limits.split == "valid" else count_distinct_chunks(corpus, "valid", most=_UNSEEN)
    indexed = {row.tobytes() for row in np.column_stack([tokens, lengths])}
    candidates = enumerate(np.column_stack([others.tokens, others.lengths]))
    if new := [number for number, row in candidates if row.tobytes() not in indexed]:
        unseen = prepare_vectors(run.embed_rows(others.tokens[new], others.lengths[new]), metric, mean)
    values = None if mean is None else mean.tolist()
    return _build_search(run, "chunks", metric, unseen, known, left_out=distinct.left_out, floor=floor, mean=values)


def _mean_embedding(run: Run, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the mean embedding (E,) float32 of chunks, each counted once.

    Weighted by counts, a handful of chunks would dominate the mean. All chunks of the split give the same mean
    (dev/LOG.md).
    """
    summed = sum(vectors.sum(0, dtype=np.float64) for _, vectors in run.embed_batches(tokens, lengths))
    return np.asarray(summed / len(tokens), np.float32)


def _index_contexts(run: Run, corpus: Corpus) -> IndexMetadata:
    """Index places of a split: states of the main model, with the text around each.

    Windows overlap by half, as in an evaluation. So every position after the first half window of a document has at
    least half a window before it. If there are more positions than `index.max_contexts`, windows are sampled by the
    seed.
    """
    limits = run.options.index
    metric, total = choose_metric(limits, "contexts"), corpus.split_counts(limits.split).chunks
    wanted = min(total, limits.max_contexts or total)
    if wanted < total:
        places = f"{total:,} places of {limits.split}"
        drawing = f"about this many are drawn in windows, with seed {run.options.seed}"
        log.warning("index.max_contexts=%d: of %s %s", wanted, places, drawing)
    if limits.scale is not None and limits.scale not in (scales := run.system.scale_outputs()):
        there = f"Set one of {', '.join(map(str, sorted(scales)))}, or leave it out" if scales else "Leave it out"
        raise ConfigError(f"index.scale={limits.scale}: this model has no such scale. {there}")
    width = run.context(b"a", limits.layer, limits.scale).shape[0]
    with write_vectors(unfinished_folder(run.folder, "contexts"), width, metric) as file:

        def tables() -> "Iterator[pyarrow.Table]":
            chance = np.random.default_rng(run.options.seed)
            windows = iterate_named_windows(corpus, limits.split, run.options.batch.context)
            drawn: Iterator[tuple[bytes, Window]] = (each for each in windows if chance.random() < wanted / total)
            # If few places are wanted, maybe none is drawn. Then it is the first.
            first = next(drawn, None) or next(iterate_named_windows(corpus, limits.split, run.options.batch.context))
            drawn = chain([first], drawn)
            while file.rows < wanted and (batch := list(islice(drawn, _WINDOWS_AT_ONCE))):
                vectors = _compute_states(run, [window for _, window in batch])[: wanted - file.rows]
                file.append_vectors(prepare_vectors(vectors, metric))
                yield _build_context_table(batch, run.chunker.name, len(vectors))

        _write_table(run, "contexts", tables())
    more = {"left_out": total - file.rows, "layer": limits.layer, "scale": limits.scale}
    return _build_search(run, "contexts", metric, np.zeros((0, width), np.float32), file.rows, **more)


def iterate_named_windows(corpus: Corpus, split: str, context: int) -> Iterator[tuple[bytes, Window]]:
    """Yield the windows of a split, which overlap by half, with the names of their documents."""
    names = (
        name.encode("utf-8", "surrogateescape")[-NAMED:]
        for shard in corpus.shards_of(split)
        for sample in corpus.read(shard)
        for name in sample.names[int(sample.continues) :]
    )
    number, name = -1, b""
    for window in cut_windows(corpus.iterate_documents(split), context):
        while number < window.document:
            number, name = number + 1, next(names)
        yield name, window


@torch.no_grad()
def _compute_states(run: Run, windows: Sequence[Window]) -> np.ndarray:
    """Return the states (M, E) before the new chunks of windows.

    Every window begins as a document does, since a query is a text of which no more is known.
    """
    limits, batch = run.options.index, stack_windows(windows, run.chunker.k)
    with run.compute.use_precision():
        whole = TokenBatch.from_chunks(batch.tokens, batch.lengths)
        states = run.system.extract_vectors(whole, "contexts", limits.layer, limits.scale)
    is_new = np.concatenate([np.arange(each.begin, each.end) >= each.new for each in windows])
    return check_finite(states.float().cpu(), "vectors").numpy()[is_new]


def _build_context_table(batch: Sequence[tuple[bytes, Window]], chunker: str, rows: int) -> "pyarrow.Table":
    """Return the table of positions and surrounding text of the first `rows` new chunks of named windows."""
    import pyarrow

    places = [(name, window, chunk) for name, window in batch for chunk in range(window.new, window.end)][:rows]
    offsets = [int(window.ends[chunk]) for _, window, chunk in places]
    begins = [max(0, offset - BEFORE) for offset in offsets]
    texts, names = np.zeros((rows, BEFORE + AFTER), np.uint8), np.zeros((rows, NAMED), np.uint8)
    shown, lengths = [], []
    for row, (name, window, _) in enumerate(places):
        piece = window.tokens[begins[row] : offsets[row] + AFTER]
        texts[row, : len(piece)], names[row, : len(name)] = piece, np.frombuffer(name, np.uint8)
        shown.append(display_chunk(piece.tobytes(), chunker))
        lengths.append(len(piece))
    numbers = {
        "document": [window.document for _, window, _ in places],
        "chunk": [chunk for _, _, chunk in places],
        "offset": offsets,
        "before": [offset - begin for offset, begin in zip(offsets, begins, strict=True)],
        "length": lengths,
        "named": [len(name) for name, _, _ in places],
    }
    columns = {name: pyarrow.array(values, pyarrow.int64()) for name, values in numbers.items()}
    columns |= {"passage": _fixed_size_column(texts), "name": _fixed_size_column(names)}
    return pyarrow.table({"text": pyarrow.array(shown, pyarrow.string())} | columns)


def _fixed_size_column(values: np.ndarray) -> "pyarrow.Array":
    """Return rows of bytes (n, width) as a column of Arrow."""
    import pyarrow

    buffer = pyarrow.py_buffer(np.ascontiguousarray(values))
    return pyarrow.FixedSizeBinaryArray.from_buffers(pyarrow.binary(values.shape[1]), len(values), [None, buffer])


def _write_table(run: Run, space: Space, tables: "Iterable[pyarrow.Table]") -> None:
    import pyarrow.parquet

    rest = iter(tables)
    with replace_atomically(unfinished_folder(run.folder, space) / TABLE) as file:
        first = next(rest)
        with pyarrow.parquet.ParquetWriter(file, first.schema, compression="zstd") as writer:
            for table in chain([first], rest):
                writer.write_table(table)


def _build_search(run: Run, space: Space, metric: Metric, unseen: np.ndarray, known: int, **more: Any) -> IndexMetadata:
    """Build and tune the search over the written vectors, and finish the index.

    `unseen` (m, E) are vectors outside the index, used as queries for tuning. Results are taken from the first `known`
    rows. `more` are further fields of `IndexMetadata`.
    """
    place, limits = unfinished_folder(run.folder, space), run.options.index
    vectors = open_vectors(place / VECTORS)
    tuned = choose_index(place, vectors, metric, unseen, limits, run.options.threads, run.options.seed)
    number, width = vectors.shape
    meta = IndexMetadata(
        folder=str(space_folder(run.folder, space)),
        space=space,
        chunks=number,
        width=width,
        split=limits.split,
        stage=run.phase,
        step=run.step,
        metric=metric,
        sha256={},
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        asked_stage=run.options.evaluate.stage,
        context=run.options.batch.context,
        rows=run.options.model.encoder.rows,
        chunker=run.chunker.name,
        chance=random_pair_scores(vectors, min(known, number), metric, run.options.seed),
        options=asdict(limits),
        **vars(tuned),
        **more,
    )
    return finish_index(run.folder, meta, [VECTORS, TABLE] if tuned.kind == "flat" else [VECTORS, SEARCH, TABLE])
