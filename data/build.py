"""Sharding: plan the parts, write them in any order and process, and finish the manifest.

The plan is a function of the source alone, so any number of workers, here or elsewhere, writes the same bytes. A part
is written into a folder of its own, with a record at the end. After an interruption, a part with a record is not
written again. When all parts have one, the shards move to their places, and the manifest makes the corpus complete.

Missing or damaged shards are rebuilt by their parts, which the same source gives again.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from data.chunkers import Chunker, make_chunker
from data.corpora import Corpora, iterate_manifests, save_stdin, sweep_spools
from data.corpus import FORMAT, MANIFEST, Corpus, Manifest
from data.filesystem import (
    CorruptFileError,
    add_path_to_errors,
    file_lock,
    guard_folder,
    open_file,
    remove_folder,
    remove_unlocked_files,
    sync_folder,
    write_json,
)
from data.options import CHUNKERS, ChunkerOptions, ShardOptions, SourceOptions
from data.parts import (
    UNFINISHED,
    Listener,
    Mapper,
    Part,
    PartRecord,
    Plan,
    ProgressMonitor,
    read_statistics,
    write_part,
    write_parts,
)
from data.shards import Shard
from data.sources.file_type import describe_findings
from data.sources.source import Input, Source, make_source, stamp_source_file
from data.sources.splits import SPLITS, Allotted, describe_splits, some_of
from data.statistics import Statistics
from data.urls import check_folder

log = logging.getLogger(__name__)
_UNEVEN, _LARGE = 3, 10  # a held-out split is reported above this multiple of its share and this % of bytes
_FIT_BYTES, _FIT_INPUTS = 32 << 20, 64
_MEASURED, _MEASURED_INPUTS = 1 << 20, 16
_EARLIER = 100  # maximum manifests to search for one of the same path
_SLACK = 1 << 20  # a range ends where a document does, a little later than planned


def make_plan(corpora: Corpora) -> Plan:
    """List the source and divide it into parts of about `megabytes`.

    Raises:
        FileNotFoundError: the source is not there.
        TypeError: a source of another package yields no `Input`.
        ValueError: it is empty or not of its kind.
    """
    folder, source, chunker = corpora.folder, corpora.source, corpora.chunker
    limit = corpora.options.megabytes << 20
    source_reader = make_source(source)
    kind: type[Chunker] = CHUNKERS.load_class(chunker.kind)
    inputs = list(source_reader.inputs(limit, chunker.k if kind.fixed else 1))
    for item in inputs:
        if not isinstance(item, Input) or not isinstance(item.splits, tuple) or not set(item.splits) <= {*SPLITS}:
            raise TypeError(
                f"source.kind={source.kind}: inputs yielded {item!r:.200}, expected an Input with some of {SPLITS}"
            )
    if not inputs:
        raise ValueError(
            _explain_empty_splits(source, source_reader.record.to_manifest(), source_reader.remarks, list(SPLITS))
        )
    if not source_reader.record.files:  # a source that did not ask for `places`
        for item in inputs:
            source_reader.record.files.setdefault(item.splits, []).append(item.name)
    groups: list[list[Input]] = [[]]
    size = 0
    for item in inputs:
        if groups[-1] and size + item.size > limit:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.size
    fitted = kind.fit(chunker, _sample_documents(source_reader, inputs))
    sample = _sample_documents(source_reader, inputs, _MEASURED, _MEASURED_INPUTS)
    measured = kind.measure_sample(chunker, sample) if kind.text else None
    stamps = ["" if corpora.piped else _stamp_inputs(group) for group in groups]
    parts = tuple(
        Part(folder / "parts" / f"{number:05d}", source, chunker, fitted, limit + _SLACK, tuple(group), stamp)
        for number, (group, stamp) in enumerate(zip(groups, stamps, strict=True))
    )
    if chunker.kind == "pixels" and chunker.k % 3:
        source_reader.record.notes.append(
            f"chunker.k={chunker.k} is no multiple of 3, the values of a pixel. Chunks begin within pixels, so they are shown "
            f"in colours that the picture does not have. Use chunker.k={chunker.k - chunker.k % 3 or 3}"
        )
    if (made := make_chunker(chunker, fitted)).k != chunker.k:
        source_reader.record.notes.append(
            f"chunker.k={chunker.k} has no effect: chunks of chunker.kind={chunker.kind} have at most {made.k} tokens"
        )
    head: Manifest = {
        "digest": folder.name.rpartition("-")[2],
        "source": asdict(source) | ({"path": "-"} if corpora.piped else {}),
        "place": corpora.place,
        "chunker": asdict(chunker),
        "chunker_version": kind.version,
        "megabytes": corpora.options.megabytes,
        "format": FORMAT,
        "versions": corpora.versions,
        "splits": source_reader.record.to_manifest(),
    }
    _note_change(head, corpora.shards_dir)
    if fitted is not None:
        head["fitted"] = fitted
    if measured is not None:
        head["words"] = measured
    return Plan(folder, parts, head)


def _stamp_inputs(inputs: list[Input]) -> str:
    """Return a hash of the files of inputs, so that a part of an interrupted run made from others is not reused."""
    stamps = [stamp_source_file(path, "-") for path in sorted({item.path for item in inputs}) if os.path.exists(path)]
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()


def _note_change(head: Manifest, shards_dir: Path) -> None:
    """Add a note if the last corpus of the same path was split differently, so that documents have changed splits."""
    by = head["splits"]["by"]
    for folder, earlier in islice(iterate_manifests(shards_dir), _EARLIER) if head["place"] is not None else ():
        with suppress(KeyError, TypeError, AttributeError):  # it cannot be compared
            before = earlier["splits"]["by"]
            if (earlier["source"]["kind"], earlier["place"]) != (head["source"]["kind"], head["place"]):
                continue
            if before != by:
                head["splits"]["notes"].append(
                    f"{folder} was split in another way ({before}, now {by}), so documents moved between splits. "
                    "Do not compare runs on the two" + (". Use source.cut=true to cut again" if before == "cut" else "")
                )
            return


def check_chunker(source: SourceOptions, chunker: ChunkerOptions) -> None:
    """Check at once that the chunker suits the source.

    Raises:
        ValueError: it is for text or for pictures, and the source gives none; the message names what to set.
    """
    make_source(source).check_chunker(chunker.kind, CHUNKERS.load_class(chunker.kind).text)


def _sample_documents(
    source: Source, inputs: list[Input], size: int = _FIT_BYTES, most: int = _FIT_INPUTS
) -> Iterator[bytes]:
    """Yield training documents from inputs spread over the source, up to `size` bytes and `most` inputs."""
    inputs = [item for item in inputs if "train" in item.splits] or inputs
    chosen = [inputs[i] for i in np.unique(np.linspace(0, len(inputs) - 1, most).astype(int))]
    for item in chosen:
        left = size // len(chosen)
        for piece in source.read_pieces(item):
            if piece.split == "train":
                yield piece.data[:left]
                left -= len(piece.data)
            if left <= 0:
                break


def finish_corpus(plan: Plan) -> Corpus:
    """Move the shards of all parts to their places, and write the manifest, which makes the corpus complete."""
    records = [PartRecord.read_record(part) for part in plan.parts]
    totals = {split: Statistics() for split in SPLITS}
    for split, total in totals.items():
        for part, each in zip(plan.parts, records, strict=True):
            if split in each.shards:
                total.merge_statistics(read_statistics(part, split))
    head = _complete_head(plan, records, totals)
    parts = [{split: len(shards) for split, shards in each.shards.items()} for each in records]
    part_shards = [each.shards_by_name for each in records]
    shards: list[Shard] = []
    for name, (number, name_in_part) in locate_shards(parts).items():
        if (plan.parts[number].folder / name_in_part).is_file():  # else an interrupted `finish_corpus` moved it
            _move_shard(plan.parts[number].folder / name_in_part, plan.folder / name)
        shards.append(replace(part_shards[number][name_in_part], file=name))
    statistics = {split: asdict(total.make_summary()) for split, total in totals.items()}
    sync_folder(plan.folder)
    head |= {"statistics": statistics, "parts": parts, "shards": [asdict(each) for each in shards]}
    write_json(plan.folder / MANIFEST, head)
    remove_folder(plan.folder / "parts")
    return Corpus.open(plan.folder)


def _complete_head(plan: Plan, records: list[PartRecord], totals: Mapping[str, Statistics]) -> Manifest:
    """Return the head of the manifest with the findings of the parts, unless nothing is left for training."""
    source = make_source(plan.parts[0].source)
    forms = [each.form for each in records if each.form]
    for form in forms:
        source.compare_forms(forms[0], form)
    empty = [split for split in SPLITS if not any(each.shards.get(split) for each in records)]
    remarks = sum((Counter(each.remarks) for each in records), Counter())
    if "train" in empty:
        raise ValueError(_explain_empty_splits(source.options, plan.head["splits"], remarks, empty))
    notes = [f"{remark}: {count:,}" for remark, count in sorted(remarks.items())]
    notes += describe_findings([each.looked for each in records])
    notes += [f"{split} is empty" for split in empty]
    if plan.head["splits"]["by"] == "hashed":
        notes += _describe_uneven_splits(records, source.options.valid_percent)
    notes += _describe_shared_documents(totals)
    for note in notes:
        log.info("  %s", note)
    head = plan.head.copy()
    head["splits"] = {**head["splits"], "notes": head["splits"]["notes"] + notes}
    if forms:
        head["form"] = forms[0][1]
    return head


def _explain_empty_splits(
    options: SourceOptions, splits: Allotted, remarks: Mapping[str, int], empty: list[str]
) -> str:
    """Return why no document is left for training: there is none at all, none in its files, or all were held out."""
    where = f"source.path={options.path}"
    train = {places: files for places, files in splits["files"].items() if "train" in places.split(", ")}
    if any(split not in empty for places in train for split in places.split(", ")):
        patterns = "source.valid_pattern= and source.test_pattern="
        if splits["by"] == "patterns":
            return (
                f"{where}: {patterns} match every document, so nothing is left for training. Change the patterns "
                "so that some documents match neither"
            )
        advice = f"Add documents, or assign them with {patterns}"
        if splits["by"] == "offsets":
            advice = "Raise source.offsets=" if options.offsets else "Lower source.valid_percent="
        return f"{where}: every document fell to valid or test, so nothing is left for training. {advice}"
    names = [name for files in train.values() for name in files["names"]]
    inputs = some_of(names, sum(files["count"] for files in train.values())) or "it: the source listed no inputs"
    why = [f"{remark}: {number:,}" for remark, number in sorted(remarks.items())]
    if options.kind in ("jsonl", "datasets", "webdataset"):
        why.append(f"source.field={options.field}")
    return (
        f"{where} has no document{'' if len(empty) == len(SPLITS) else ' for training'}: none was found in "
        f"{inputs}{' (' + '; '.join(why) + ')' if why else ''}"
    )


def _describe_uneven_splits(records: list[PartRecord], percent: int) -> list[str]:
    """Return notes on splits that got far more than their share of bytes from the hash, as documents differ in size."""
    shards = [shard for each in records for those in each.shards.values() for shard in those]
    total = sum(shard.source_bytes for shard in shards)
    shares = {split: sum(x.source_bytes for x in shards if x.split == split) / total for split in ("valid", "test")}
    return [
        f"{split} has {100 * share:.0f} % of the bytes instead of {percent} %, because the documents "
        "are few or differ in size. Use other file names or patterns, or source.cut=true for text"
        for split, share in shares.items()
        if 100 * share > max(_UNEVEN * percent, _LARGE)
    ]


def _describe_shared_documents(totals: Mapping[str, Statistics]) -> list[str]:
    """Return notes on documents that were held out and are in training, too, so that a model has read them."""
    train, notes = totals["train"], []
    for split in ("valid", "test"):
        if shared := np.isin(totals[split].hashes, train.hashes).sum():
            notes.append(
                f"{split} and train have the same text or data: {shared:,} of the {len(totals[split].hashes):,} documents of "
                f"{split}. They are kept; a score of {split} counts what the model was trained on"
            )
    return notes


def _log_splits(head: Manifest) -> None:
    for line in describe_splits(head["splits"]) if "splits" in head else ():
        log.info("%s", line)
    if advice := (head.get("words") or {}).get("advice"):
        log.info("%s", advice)


def shard(
    source: SourceOptions,
    chunker: ChunkerOptions,
    options: ShardOptions,
    shards_dir: Path,
    mapper: Mapper | None = None,
    listener: Listener | None = None,
) -> Corpus:
    """Shard a corpus, or find it finished. Missing or damaged shards are rebuilt.

    Only one process at a time makes a corpus. Others wait and then find it finished.

    Args:
        source: what to read.
        chunker: how to split it into chunks.
        options: size of shards and number of processes.
        shards_dir: folder of all corpora.
        mapper: maps `write_part` over parts in another way, for example as tasks of a flow or on a cluster.
        listener: called with the progress twice a second.

    Raises:
        FileNotFoundError: the source is not there, and no whole corpus of it exists.
        FolderLostError: the folder of the corpus, or its lock file, was removed or replaced meanwhile.
        PermissionError: the corpus is to be made or mended, and its folder may not be written to.
        ValueError: the source is empty or not of its kind.
    """
    check_folder(shards_dir, "shards_dir")
    if source.path and os.path.realpath(source.path) == os.path.realpath(shards_dir):
        raise ValueError(
            f"shards_dir={shards_dir} is the folder of the source itself. Choose another, such as shards_dir=shards"
        )
    check_chunker(source, chunker)
    sweep_spools(shards_dir)
    with save_stdin(source, shards_dir) as readable:
        corpora = Corpora(readable, chunker, options, shards_dir, readable is not source)
        try:
            folder = corpora.folder
        except FileNotFoundError as error:
            return _open_without_source(corpora, error)
        remove_unlocked_files(folder.glob(f".*{UNFINISHED}"))
        _warn_of_lost_shards(corpora)
        corpus = None if options.verify else _open_if_whole(folder, corpora)
        parts = folder / "parts"
        # Parts beside a whole corpus were left by a process that was killed at its very end.
        if corpus is None or (parts.is_dir() and os.access(folder, os.W_OK)):
            shards_dir.mkdir(parents=True, exist_ok=True)
            if not all(os.access(each, os.W_OK) for each in (shards_dir, folder) if each.exists()):
                state = "has missing or damaged files" if folder.exists() else "would have to be made"
                raise PermissionError(
                    f"{folder} {state}, and this user may not write there. Name a folder of yours with shards_dir="
                )
            waiting = partial(log.info, "%s is being sharded by %s. Waiting for it", folder)
            with file_lock(shards_dir / f".{folder.name}.lock", waiting):
                corpus = _open_if_whole(folder, corpora) or _build_corpus(corpora, mapper, listener)
                remove_folder(parts)
        corpora.remember_corpus(folder)
        return corpus


def _open_if_whole(folder: Path, corpora: Corpora) -> Corpus | None:
    if not os.path.lexists(folder / MANIFEST):
        return None
    corpus = open_built_corpus(folder, corpora.chunker)
    if find_damaged_shards(corpus, corpora.options):
        return None
    _log_splits(corpus.manifest)
    return corpus


def open_built_corpus(folder: Path, chunker: ChunkerOptions) -> Corpus:
    """Open a corpus that was found by its source and chunker.

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: the manifest is not one of ours, or belongs to another corpus.
    """
    try:
        corpus = Corpus.open(folder)
        if (corpus.options, corpus.digest) != (chunker, folder.name.rpartition("-")[2]):
            raise ValueError(f"{folder}/{MANIFEST} belongs to another corpus: {corpus.digest}, cut by {corpus.options}")
        return corpus
    except ValueError as error:
        raise ValueError(f"{error}. Delete {MANIFEST} and run `haed shard` again") from error


def _build_corpus(corpora: Corpora, mapper: Mapper | None, listener: Listener | None) -> Corpus:
    """Write missing parts of a corpus, finish it, rebuild damaged shards, and return it. The caller has its lock."""
    options, work = corpora.options, make_plan(corpora)
    _log_splits(work.head)
    place = work.folder / "parts"
    place.mkdir(parents=True, exist_ok=True)

    def write(parts: tuple[Part, ...]) -> None:
        largest_first = tuple(sorted(parts, key=lambda part: -part.size))  # else a large one may come last
        reporting = ProgressMonitor(place, {part.folder.name: part.size for part in parts}).report_to(listener)
        todo = tuple(part for part in largest_first if not part.is_done)
        error: Exception | None = None
        try:
            if mapper is None or not todo:
                write_parts(todo, options.workers, reporting)
            else:
                with reporting:
                    mapper(write_part, todo)
        except (FileNotFoundError, ValueError) as caught:  # perhaps since the source is being changed
            error = caught
        if changed := corpora.find_changed_file():
            remove_folder(place)
            with suppress(OSError):
                work.folder.rmdir()  # unless it has shards, which were being rebuilt
            raise ValueError(
                f"{changed} changed or was removed during sharding, so nothing is kept. Run `haed shard` again"
            ) from error
        if error:
            raise error

    with guard_folder(work.folder):
        for leftover in place.glob(f"*{UNFINISHED}"):
            remove_folder(leftover)
        if not os.path.lexists(work.folder / MANIFEST):
            write(work.parts)
            corpus = finish_corpus(work)
        else:
            corpus = open_built_corpus(work.folder, corpora.chunker)
        if names := find_damaged_shards(corpus, options):
            place.mkdir(exist_ok=True)
            log.warning("missing or damaged files in %s: %s. They are made again", work.folder, format_names(names))
            rebuild_shards(work, corpus, names, write)
    return corpus


def _open_without_source(corpora: Corpora, error: FileNotFoundError) -> Corpus:
    """Return the last corpus made with these options, if it is whole."""
    folder = corpora.find_last_corpus()
    if folder is None:
        raise error
    corpus = open_built_corpus(folder, corpora.chunker)
    if names := find_damaged_shards(corpus, corpora.options):
        raise FileNotFoundError(
            f"{folder} has missing or damaged files that cannot be made again ({format_names(names)}): {error}"
        )
    log.warning("%s. The shards made from it are complete: %s", error, folder)
    return corpus


def _warn_of_lost_shards(corpora: Corpora) -> None:
    """Warn of a damaged corpus that cannot be repaired since its source has changed."""
    folder = corpora.find_last_corpus()
    if folder is not None and folder != corpora.folder:
        try:
            names = find_damaged_shards(Corpus.open(folder), corpora.options)
        except ValueError as error:
            log.warning("%s", error)
            return
        if names:
            log.warning(
                "%s was made with these options, but has missing or damaged files: %s. They cannot be made "
                "again, because the source or this version changed",
                folder,
                format_names(names),
            )


def find_damaged_shards(corpus: Corpus, options: ShardOptions) -> list[str]:
    """Return the files of shards that are missing or differ from the manifest in size or, with `verify`, in sha256."""

    def is_whole(shard: Shard) -> bool:
        path = corpus.folder / shard.file
        try:
            if path.stat().st_size != shard.file_bytes:
                return False
            if options.verify:
                with add_path_to_errors(path), open_file(path) as file:
                    return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
        except (FileNotFoundError, CorruptFileError):
            return False
        return True

    with ThreadPoolExecutor(options.workers) as pool:
        return [s.file for s, whole in zip(corpus.shards, pool.map(is_whole, corpus.shards), strict=True) if not whole]


def rebuild_shards(plan: Plan, corpus: Corpus, names: list[str], write: Callable[[tuple[Part, ...]], None]) -> None:
    """Rebuild shards of these file names from the parts of the source that they come from, which `write` writes.

    Raises:
        ValueError: the rebuilt shards differ from the manifest.
    """
    places = locate_shards(corpus.parts) if len(corpus.parts) == len(plan.parts) else {}
    parts = tuple(plan.parts[at] for at in sorted({places[name][0] for name in names if name in places}))
    for part in parts:
        remove_folder(part.folder)  # an interrupted attempt may have moved some of it
    write(parts)
    wanted = {shard.file: shard.sha256 for shard in corpus.shards}
    for name in names:
        at, name_there = places.get(name, (0, ""))
        new_shard = PartRecord.read_record(plan.parts[at]).shards_by_name.get(name_there) if name_there else None
        if new_shard is None or new_shard.sha256 != wanted[name]:
            raise ValueError(
                f"{corpus.folder}/{name} differs from {MANIFEST}, although its source is the same. Another version "
                f"may have made it. Delete {MANIFEST} and run `haed shard` again to make all shards again"
            )
    for name in names:
        at, name_there = places[name]
        _move_shard(plan.parts[at].folder / name_there, plan.folder / name)
    sync_folder(plan.folder)
    remove_folder(plan.folder / "parts")


def _move_shard(file: Path, path: Path) -> None:
    try:
        os.replace(file, path)
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, where a shard belongs. Remove it") from None


def locate_shards(parts: list[dict[str, int]]) -> dict[str, tuple[int, str]]:
    """Map shards to the number of their part and their names there, given the number of shards of each split in parts."""
    places: dict[str, tuple[int, str]] = {}
    for split in SPLITS:
        owners = [(at, number_there) for at, counts in enumerate(parts) for number_there in range(counts.get(split, 0))]
        for number, (at, number_there) in enumerate(owners):
            places[_shard_name(split, number)] = at, _shard_name(split, number_there)
    return places


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.tar"


def format_names(names: list[str]) -> str:
    """Return the first of some names, for people."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
