"""Parts, the units of work of sharding: each is written in any process, here or elsewhere, into a folder of its own.

A part exists as a whole, with a record, or not at all. After an interruption, an existing one is not written again.
Progress is measured from the files on disk. So it is the same for processes, tasks of a flow and a cluster.
"""

import contextvars
import errno
import io
import logging
import lzma
import os
import tarfile
import threading
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from data.chunkers import make_chunker
from data.corpus import Manifest
from data.filesystem import (
    MANY,
    CorruptFileError,
    FolderLostError,
    add_path_to_errors,
    read_bytes,
    read_json,
    remove_folder,
    sync_folder,
    write_atomically,
    write_json,
)
from data.options import ChunkerOptions, SourceOptions
from data.processes import allowed_workers, process_pool
from data.shards import Shard, ShardWriter
from data.sources.file_type import TextFindings, TextInspector
from data.sources.source import SPLITS, Form, Input, make_source
from data.statistics import Statistics

log = logging.getLogger(__name__)
_OF_ZIP = (zipfile.BadZipFile, zlib.error, lzma.LZMAError)  # errors of a damaged ZIP and of its decompressors
PAUSES = (1.0, 4.0, 16.0)  # seconds before a part is tried again
_FINAL = {  # system errors that a retry does not help
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
}
SECONDS = 0.5
UNFINISHED = ".partial"
RECORD = "part.json"
KILLED = "a process that wrote shards was killed, perhaps because memory ran out"


@dataclass(frozen=True)
class Part:
    """A unit of work: the shards of some inputs, written into a folder whose name is its number in the plan.

    `stamp` is a hash of the inodes, sizes and times of the inputs' files.
    """

    folder: Path
    source: SourceOptions
    chunker: ChunkerOptions
    fitted: dict[str, Any] | None
    limit: int
    inputs: tuple[Input, ...]
    stamp: str = ""

    @property
    def size(self) -> int:
        """Approximate bytes of the source that it covers."""
        return sum(item.size for item in self.inputs)

    @property
    def is_done(self) -> bool:
        """It has a record, and the files it was made from have not been written to since."""
        try:
            return PartRecord.read_record(self).stamp == self.stamp
        except FileNotFoundError:
            return False
        except CorruptFileError as error:
            log.warning("%s. The part is made again", error)
            return False


@dataclass
class PartRecord:
    """The record of a finished part, stored in part.json.

    Attributes:
        shards: its shards, by split.
        form: of its documents, if they have one.
        remarks: what was changed or left out, and how often.
        looked: oddities of its texts.
        stamp: see `Part`.
    """

    shards: dict[str, list[Shard]]
    form: Form | None
    remarks: Mapping[str, int]
    looked: TextFindings
    stamp: str

    @classmethod
    def read_record(cls, part: Part) -> Self:
        """Read the record of a part.

        Raises:
            FileNotFoundError: the part is not finished.
            CorruptFileError: its record is damaged.
        """
        try:
            return TypeAdapter(cls).validate_python(read_json(part.folder / RECORD))
        except ValidationError as error:  # of another version
            raise CorruptFileError(f"{part.folder / RECORD} cannot be read: {error.errors()[0]['msg']}") from error

    @property
    def shards_by_name(self) -> dict[str, Shard]:
        """Shards by file name."""
        return {shard.file: shard for shards in self.shards.values() for shard in shards}


@dataclass(frozen=True)
class Plan:
    """A plan of a corpus: all its parts, its folder, and the head of its manifest."""

    folder: Path
    parts: tuple[Part, ...]
    head: Manifest


Mapper = Callable[[Callable[[Part], None], tuple[Part, ...]], Any]


def write_part(part: Part) -> None:
    """Write the shards of a part and its record, unless the record exists already.

    They are written into a temporary folder that is renamed. So another writer of the same part that was thought dead
    does no harm.

    Raises:
        FolderLostError: the folder of the corpus was removed meanwhile.
        OSError: the disk is full or not writable.
        ValueError: the source cannot be read; the message names the file.
    """
    if part.is_done:
        return
    beside = part.folder.with_name(f"{part.folder.name}.{uuid.uuid4().hex[:8]}{UNFINISHED}")
    try:
        beside.mkdir()  # its parent exists as long as the corpus is being made
    except FileNotFoundError:
        raise FolderLostError(f"{part.folder.parent} was removed during sharding. Run the same command again") from None
    try:
        _write_shards(part, beside)
        remove_folder(part.folder)  # unfinished, or made from files that were written to since
        try:
            os.rename(beside, part.folder)
        except OSError:
            if not part.is_done:
                raise
        sync_folder(part.folder.parent)
    finally:
        remove_folder(beside)


def _write_shards(part: Part, folder: Path) -> None:
    source, chunker = make_source(part.source), make_chunker(part.chunker, part.fitted)
    writers: dict[str, ShardWriter] = {}
    look = TextInspector(source.looked_at, source.whole_files)
    for item in part.inputs:
        try:
            with add_path_to_errors(item.path):  # those of the shards have theirs
                for piece in source.read_pieces(item):
                    source.check_chunker(chunker.name, chunker.text)
                    if source.is_text:
                        look.inspect_piece(piece, item.path)
                    if piece.split not in writers:
                        writers[piece.split] = ShardWriter(
                            folder, piece.split, chunker, part.limit, int(part.folder.name)
                        )
                    writers[piece.split].add_piece(piece)
        except tarfile.TarError as error:
            raise ValueError(f"{item.path} cannot be read: {error}") from error
    shards = {split: writers[split].close() for split in SPLITS if split in writers}
    for split, writer in writers.items():
        packed = io.BytesIO()
        np.savez(packed, **writer.statistics.to_arrays())  # type: ignore[arg-type]
        write_atomically(folder / f"{split}-statistics.npz", packed.getvalue())
    record = PartRecord(shards, source.form, +source.remarks, look.findings, part.stamp)
    write_json(folder / RECORD, TypeAdapter(PartRecord).dump_python(record, mode="json"))


def read_statistics(part: Part, split: str) -> Statistics:
    """Read the statistics of a split of a finished part, whose file has checksums of its own.

    Raises:
        CorruptFileError: they are not what was written.
    """
    path = part.folder / f"{split}-statistics.npz"
    # The file has 8 bytes for each document, and checksums of its own.
    content = io.BytesIO(read_bytes(path, max(MANY, path.stat().st_size)))
    try:
        with np.load(content, allow_pickle=False) as arrays:
            return Statistics.from_arrays(dict(arrays))
    except (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, *_OF_ZIP) as error:
        raise CorruptFileError(f"{path} is damaged. Remove {part.folder} and run the same command again") from error


def write_persistently(part: Part) -> None:
    """Write a part, and retry after pauses if that may help. See `write_part`."""
    for pause in PAUSES:
        try:
            return write_part(part)
        except OSError as error:
            if not is_passing(error):
                raise
            log.warning("part %s: %s. Trying again in %.0f s", part.folder.name, error, pause)
            time.sleep(pause)
    write_part(part)


def is_passing(error: object) -> bool:
    """Return if a retry may help: after a broken connection, for example, not after a full disk or a missing file."""
    return isinstance(error, OSError) and not isinstance(error, FolderLostError) and error.errno not in _FINAL


def write_parts(parts: tuple[Part, ...], workers: int, reporting: AbstractContextManager[None]) -> None:
    """Write parts in this process and `workers` − 1 others.

    This process starts while the others are starting, and takes parts that they have not begun.
    """
    if len(parts) <= 1 or not allowed_workers(workers - 1):
        with reporting:
            for part in parts:
                write_persistently(part)
        return
    with process_pool(min(workers, len(parts)) - 1) as pool:
        futures = [pool.submit(write_persistently, part) for part in parts]
        try:
            with reporting:  # it starts a thread, so only after the processes
                for future, part in reversed(list(zip(futures, parts, strict=True))):
                    if future.cancel():
                        write_persistently(part)
                for future in futures:
                    if not future.cancelled():
                        future.result()
        except BrokenProcessPool as error:
            raise ChildProcessError(f"{KILLED}. Run the same command to resume") from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True)
class ShardingProgress:
    """The progress of a sharding.

    Attributes:
        done: number of finished parts.
        parts: number of all parts.
        share: fraction of the work that is done, in [0, 1].
        written: bytes of shards.
        rate: bytes of shards per second since this process began.
        left: estimated seconds left, or None.
    """

    done: int
    parts: int
    share: float
    written: int
    rate: float
    left: float | None

    def format_line(self, title: str) -> str:
        """Return the progress as a line for people: share done, time left, the title of what is sharded, and how far."""
        words = [f"{self.share:.0%}"]
        words += [f"{self.left:,.0f} s left"] if self.left is not None and self.done < self.parts else []
        words += [title, f"part {self.done:,} of {self.parts:,}", f"{self.written / 1e6:,.0f} MB"]
        words += [f"{self.rate / 1e6:,.1f} MB/s"] if self.rate else []
        return " · ".join(words)


Listener = Callable[[ShardingProgress], None]
_NEARLY = 0.9  # share of a part that is done at most before it ends


class ProgressMonitor:
    """A monitor of the folder of the parts.

    Args:
        folder: contains finished parts under their names, and unfinished ones with a suffix.
        sizes: bytes of the source that each part covers.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder, self._sizes = folder, sizes
        self._finished: dict[str, int] = {}
        self._began, self._first = time.monotonic(), (0, 0.0)
        progress = self.measure_progress()
        self._first = progress.written, progress.share

    def measure_progress(self) -> ShardingProgress:
        """Measure the progress."""
        unfinished: dict[str, int] = {}
        with suppress(FileNotFoundError):  # it was removed meanwhile, which the next part to be written says
            for path in self._folder.iterdir():
                name = path.name.partition(".")[0]
                if path.name.endswith(UNFINISHED):
                    unfinished[name] = max(_count_shard_bytes(path), unfinished.get(name, 0))
                elif name in self._sizes and name not in self._finished:
                    self._finished[name] = _count_shard_bytes(path)
        live = {name: size for name, size in unfinished.items() if name in self._sizes and name not in self._finished}
        work = float(sum(self._sizes[name] for name in self._finished))
        work += sum(min(_NEARLY * self._sizes[name], size) for name, size in live.items())  # nearly their source's size
        written, share = sum(self._finished.values()) + sum(live.values()), work / max(1, sum(self._sizes.values()))
        seconds = max(1e-6, time.monotonic() - self._began)
        gained = share - self._first[1]
        is_known = all(size < _NEARLY * self._sizes[name] for name, size in live.items())  # compressed ones write more
        left = (1 - share) * seconds / gained if gained > 0 and is_known else None
        rate = max(0, written - self._first[0]) / seconds
        return ShardingProgress(len(self._finished), len(self._sizes), share, written, rate, left)

    @contextmanager
    def report_to(self, listener: Listener | None) -> Iterator[None]:
        """Run a thread that calls the listener twice a second, and once more at the end."""
        if listener is None:
            yield
            return
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(SECONDS):
                listener(self.measure_progress())

        thread = threading.Thread(target=contextvars.copy_context().run, args=(tell,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        listener(self.measure_progress())


def _count_shard_bytes(folder: Path) -> int:
    """Return the bytes of the shards in a folder, which may disappear meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".tar")
    except OSError:
        return 0
