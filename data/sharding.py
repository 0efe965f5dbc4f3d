"""The work of sharding: plan, write the parts in any order and process, finish the manifest.

The plan is a function of the source alone, so any number of workers, here or elsewhere, writes the same bytes. A part is
one shard; a finished one leaves a small record beside it, and is not written again after an interruption.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.chunkers import make_chunker
from data.corpus import MANIFEST, Corpus, write_json
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.shards import Shard, write_shard
from data.sources import SPLITS, Reference, read, references, title


@dataclass(frozen=True)
class Part:
    """A unit of work: the shard `file` of `folder` from these references."""

    folder: Path
    file: str
    split: str
    kind: str
    chunker: ChunkerOptions
    references: tuple[Reference, ...]


@dataclass(frozen=True)
class Plan:
    """All parts of a corpus, its folder, and the head of its manifest."""

    folder: Path
    parts: tuple[Part, ...]
    head: dict[str, Any]


def plan(source: SourceOptions, chunker: ChunkerOptions, shard: ShardOptions, shards_dir: Path) -> Plan:
    """Lists the source, digests it and cuts it into parts of about `shard.megabytes`.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty or not of its kind.
    """
    found = references(source)
    settings = {"chunker": asdict(chunker), "megabytes": shard.megabytes, "format": 1}
    digest = _digest(found, settings | {"kind": source.kind})
    folder = shards_dir / f"{title(source)}-{digest[:12]}"
    parts = []
    for split in SPLITS:
        groups: list[list[Reference]] = [[]]
        size = 0
        for reference in found:
            if reference.split != split:
                continue
            weight = reference.size * (3072 if source.kind == "images" else 1)
            if groups[-1] and size + weight > shard.megabytes << 20:
                groups.append([])
                size = 0
            groups[-1].append(reference)
            size += weight
        for number, group in enumerate(groups):
            if group:
                file = f"{split}-{number:05d}.tar"
                parts.append(Part(folder, file, split, source.kind, chunker, tuple(group)))
    head = {"digest": digest, "source": asdict(source), **settings}
    return Plan(folder, tuple(parts), head)


def _digest(found: list[Reference], settings: dict[str, Any]) -> str:
    """Of what is read and how: names, splits and contents of all files, and the settings; not of where they lie."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    content: dict[Path, str] = {}
    for reference in found:
        if reference.file not in content:
            with open(reference.file, "rb") as file:
                content[reference.file] = hashlib.file_digest(file, "sha256").hexdigest()
        line = f"{reference.name}\0{reference.split}\0{reference.start}\0{reference.size}\0{content[reference.file]}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def write_part(part: Part) -> Shard:
    """Writes one shard, unless it is there already, and its record.

    Raises:
        OSError: the disk is full or not writable.
    """
    path = part.folder / part.file
    record = path.with_suffix(".json")
    if path.is_file() and record.is_file():
        return Shard(**json.loads(record.read_text()))
    chunker = make_chunker(part.chunker)
    documents = (document for reference in part.references for document in read(part.kind, reference))
    shard = write_shard(path, part.split, documents, chunker)
    write_json(record, asdict(shard))
    return shard


def finish(plan: Plan, shards: list[Shard]) -> Corpus:
    """Writes the manifest, which makes the corpus complete, and removes the records of the parts."""
    write_json(plan.folder / MANIFEST, plan.head | {"shards": [asdict(shard) for shard in shards]})
    for shard in shards:
        (plan.folder / shard.file).with_suffix(".json").unlink(missing_ok=True)
    return Corpus.open(plan.folder)


def shard(
    source: SourceOptions,
    chunker: ChunkerOptions,
    options: ShardOptions,
    shards_dir: Path,
    mapper: Callable[[Callable[[Part], Shard], tuple[Part, ...]], list[Shard]] | None = None,
) -> Corpus:
    """Shards a corpus, or finds it finished.

    Args:
        source: what to read.
        chunker: how to cut it.
        options: size of shards and number of processes.
        shards_dir: folder of all corpora.
        mapper: maps `write_part` over parts in some other way, for example as tasks of a flow.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty or not of its kind.
    """
    work = plan(source, chunker, options, shards_dir)
    if (work.folder / MANIFEST).is_file():
        return Corpus.open(work.folder)
    work.folder.mkdir(parents=True, exist_ok=True)
    if mapper is not None:
        return finish(work, mapper(write_part, work.parts))
    if options.workers == 1 or len(work.parts) == 1:
        return finish(work, [write_part(part) for part in work.parts])
    with ProcessPoolExecutor(min(options.workers, len(work.parts))) as pool:
        return finish(work, list(pool.map(write_part, work.parts)))


def corpus_folder(source: SourceOptions, chunker: ChunkerOptions, options: ShardOptions, shards_dir: Path) -> Path:
    """Where the corpus of these options lies, whether it is there or not."""
    return plan(source, chunker, options, shards_dir).folder
