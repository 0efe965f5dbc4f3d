"""The work of sharding: plan, write the parts in any order and process, finish the manifest.

The plan is a function of the source alone, so any number of workers, here or elsewhere, writes the same bytes. A part is
written into a folder of its own, with a record at the end; a part that has its record is not written again after an
interruption. When all have one, the shards move to their places and the manifest makes the corpus complete.
"""

import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.chunkers import chunker_class, make_chunker
from data.corpus import MANIFEST, Corpus, write_json
from data.files import blocks
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.processes import process_pool
from data.shards import Shard, ShardWriter
from data.sources import SPLITS, Input, Source, make_source, title
from data.statistics import Statistics

FORMAT = 2
_FIT_BYTES, _FIT_INPUTS = 32 << 20, 64
_SLACK = 1 << 20  # a range ends where a document does, a little later than planned


@dataclass(frozen=True)
class Part:
    """A unit of work: the shards of these inputs, written into `folder`."""

    folder: Path
    source: SourceOptions
    chunker: ChunkerOptions
    fitted: dict[str, Any] | None
    limit: int
    inputs: tuple[Input, ...]


@dataclass(frozen=True)
class Plan:
    """All parts of a corpus, its folder, and the head of its manifest."""

    folder: Path
    parts: tuple[Part, ...]
    head: dict[str, Any]


Mapper = Callable[[Callable[[Part], None], tuple[Part, ...]], Any]


def corpus_folder(
    source: SourceOptions, chunker: ChunkerOptions, options: ShardOptions, shards_dir: Path, piped: bool = False
) -> Path:
    """Where the corpus of these options lies, whether it is there or not.

    The contents of the source are hashed, which is remembered beside the corpora as long as its files stay the same. For
    standard input it is the corpus that was made from it last.

    Args:
        source: what is read.
        chunker: how it is cut.
        options: size of shards; the workers also hash.
        shards_dir: folder of all corpora.
        piped: the source is a copy of standard input.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty.
    """
    notes = shards_dir / ".sources.json"
    known = json.loads(notes.read_text()) if notes.is_file() else {}
    given = asdict(replace(source, path=None, pattern=""))  # the files themselves count, not how they were found
    settings = {"source": given, "chunker": asdict(chunker), "megabytes": options.megabytes, "format": FORMAT}
    nameless = _digest(settings, [])
    if is_piped(source) and not piped:
        if nameless not in known:
            raise FileNotFoundError(
                "nothing was sharded from standard input with these options: pipe it to `haed shard`"
            )
        return shards_dir / known[nameless]
    made = make_source(source)
    stamp = _digest(settings, made.fingerprint())
    if stamp not in known:
        folder = f"{title(source)}-{_digest(settings, made.digest(options.workers))[:12]}"
        shards_dir.mkdir(parents=True, exist_ok=True)
        known = dict(list(known.items())[-1000:]) | {stamp: folder} | ({nameless: folder} if piped else {})
        write_json(notes, known)
    return shards_dir / known[stamp]


def _digest(settings: dict[str, Any], content: Any) -> str:
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()


def is_piped(source: SourceOptions) -> bool:
    """It is read from standard input."""
    return source.kind == "stdin" or source.path == "-"


def plan(
    source: SourceOptions, chunker: ChunkerOptions, options: ShardOptions, shards_dir: Path, piped: bool = False
) -> Plan:
    """Lists the source, digests it and cuts it into parts of about `megabytes`; no parts if the corpus is complete.

    Args: as of `corpus_folder`.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty or not of its kind.
    """
    folder, limit = corpus_folder(source, chunker, options, shards_dir, piped), options.megabytes << 20
    if (folder / MANIFEST).is_file():
        return Plan(folder, (), {})
    made, kind = make_source(source), chunker_class(chunker.kind)
    inputs = list(made.inputs(limit, chunker.k if kind.fixed else 1))
    if not inputs:
        raise ValueError(f"source.path={source.path} has no document of source.kind={source.kind}")
    groups: list[list[Input]] = [[]]
    size = 0
    for item in inputs:
        if groups[-1] and size + item.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.size
    fitted = kind.fit(chunker, _sample(made, inputs))
    parts = tuple(
        Part(folder / "parts" / f"{number:05d}", source, chunker, fitted, limit + _SLACK, tuple(group))
        for number, group in enumerate(groups)
    )
    head = {
        "digest": folder.name.rpartition("-")[2],
        "source": asdict(source) | ({"path": "-"} if piped else {}),
        "chunker": asdict(chunker),
        "megabytes": options.megabytes,
        "format": FORMAT,
    }
    return Plan(folder, parts, head if fitted is None else head | {"fitted": fitted})


def _sample(source: Source, inputs: list[Input]) -> Iterator[bytes]:
    """Training documents from inputs spread over the source, some megabytes."""
    chosen = [inputs[i] for i in np.unique(np.linspace(0, len(inputs) - 1, _FIT_INPUTS).astype(int))]
    for item in chosen:
        left = _FIT_BYTES // len(chosen)
        for piece in source.read(item):
            if piece.split == "train":
                yield piece.data[:left]
                left -= len(piece.data)
            if left <= 0:
                break


def write_part(part: Part) -> None:
    """Writes the shards of a part and its record, unless the record is there already.

    Raises:
        OSError: the disk is full or not writable.
        ValueError: the source cannot be read; the message names the file.
    """
    record = part.folder / "part.json"
    if record.is_file():
        return
    shutil.rmtree(part.folder, ignore_errors=True)
    part.folder.mkdir(parents=True)
    source, chunker = make_source(part.source), make_chunker(part.chunker, part.fitted)
    writers: dict[str, ShardWriter] = {}
    for item in part.inputs:
        try:
            for piece in source.read(item):
                if piece.split not in writers:
                    writers[piece.split] = ShardWriter(part.folder, piece.split, chunker, part.limit)
                writers[piece.split].add(piece)
        except tarfile.TarError as error:
            raise ValueError(f"{item.path} cannot be read: {error}") from error
    shards = {split: writer.close() for split, writer in writers.items()}
    for split, writer in writers.items():
        arrays: dict[str, Any] = dict(writer.statistics.arrays())
        np.savez(part.folder / f"{split}-statistics.npz", **arrays)
    write_json(record, {split: [asdict(shard) for shard in shards[split]] for split in SPLITS if split in shards})


def finish(work: Plan) -> Corpus:
    """Moves the shards of all parts to their places and writes the manifest, which makes the corpus complete."""
    shards: list[Shard] = []
    statistics: dict[str, Any] = {}
    records = [json.loads((part.folder / "part.json").read_text()) for part in work.parts]
    for split in SPLITS:
        total, number = Statistics(), 0
        for part, record in zip(work.parts, records, strict=True):
            for entry in record.get(split, []):
                shard = Shard(**entry)
                place = work.folder / f"{split}-{number:05d}.tar"
                if (part.folder / shard.file).is_file():  # else an interrupted `finish` has moved it
                    os.replace(part.folder / shard.file, place)
                shards.append(replace(shard, file=place.name))
                number += 1
            if split in record:
                with np.load(part.folder / f"{split}-statistics.npz", allow_pickle=False) as arrays:
                    total.add(Statistics.of_arrays(dict(arrays)))
        statistics[split] = total.summary()
    _check_rasters(work, shards)
    write_json(work.folder / MANIFEST, work.head | {"statistics": statistics, "shards": [asdict(s) for s in shards]})
    shutil.rmtree(work.folder / "parts", ignore_errors=True)
    return Corpus.open(work.folder)


def _check_rasters(work: Plan, shards: list[Shard]) -> None:
    sizes = {shard.tokens / shard.documents for shard in shards if shard.documents}
    if work.head["source"]["kind"] == "images" and len(sizes) > 1:
        raise ValueError(
            f"pictures differ in size ({min(sizes):,.0f} to {max(sizes):,.0f} values): set source.image_size="
        )


def shard(
    source: SourceOptions,
    chunker: ChunkerOptions,
    options: ShardOptions,
    shards_dir: Path,
    mapper: Mapper | None = None,
) -> Corpus:
    """Shards a corpus, or finds it finished.

    Args:
        source: what to read.
        chunker: how to cut it.
        options: size of shards and number of processes.
        shards_dir: folder of all corpora.
        mapper: maps `write_part` over parts in some other way, for example as tasks of a flow or on a cluster.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty or not of its kind.
    """
    with _spooled(source, shards_dir) as readable:
        work = plan(readable, chunker, options, shards_dir, piped=readable is not source)
        if (work.folder / MANIFEST).is_file():
            return Corpus.open(work.folder)
        work.folder.mkdir(parents=True, exist_ok=True)
        if mapper is not None:
            mapper(write_part, work.parts)
        else:
            _write_parts(work.parts, options.workers)
        return finish(work)


def _write_parts(parts: tuple[Part, ...], workers: int) -> None:
    """Writes parts in this process and `workers` − 1 others: it begins while they start, and takes what they have not."""
    if workers == 1 or len(parts) == 1:
        for part in parts:
            write_part(part)
        return
    with process_pool(min(workers, len(parts)) - 1) as pool:
        futures = [pool.submit(write_part, part) for part in parts]
        try:
            for future, part in reversed(list(zip(futures, parts, strict=True))):
                if future.cancel():
                    write_part(part)
            for future in futures:
                if not future.cancelled():
                    future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _spooled(source: SourceOptions, shards_dir: Path) -> Iterator[SourceOptions]:
    """Standard input is copied into a file first: it can be read only once, and its size decides where it is cut."""
    if not is_piped(source):
        yield source
        return
    if source.kind == "stdin" and source.path not in (None, "-"):
        raise ValueError(f"source.kind=stdin reads standard input, not source.path={source.path}: use source.kind=text")
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError(f"source.kind={source.kind} reads standard input: pipe a text into the command")
    shards_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shards_dir, prefix=".stdin-") as folder:
        spool = Path(folder) / "stdin"
        with open(spool, "wb") as file:
            for block in blocks(sys.stdin.buffer):
                file.write(block)
        if not spool.stat().st_size:
            raise ValueError("standard input was empty")
        yield replace(source, path=str(spool))
