"""The files of a space, `index/SPACE/`: what they hold, and what is believed of them.

    vectors.faiss   an `IndexFlat` of FAISS: a header of 45 bytes, then (n, E) float32; read whole if it is small, see `Rows`
    search.faiss    unless the index is flat: FAISS's approximate index, which proposes rows of the former
    table.parquet   row i is of vector i; readers of Parquet (pandas, DuckDB, Polars) open it, `text` is for them alone
    meta.json       what was indexed, how well it is searched, and the sha256 of the others; written last
    .checked        which files were found to have these sums

Sums are worked out once: `.checked` has device, inode, size and times of each file, and counts only if it belongs to who
reads it. Nobody can hand over one that fits, since the inode and the time of change are given when a file is unpacked.

FAISS's readers trust what they read, so a stranger's file never meets them. `vectors.faiss` is not read by FAISS but by us,
after its header was found to fit its size; `search.faiss` is opened only if `.checked` says that this user built it here. In a
copy of a run, or somebody else's, answers are exact, slower, and the same.

No file is mapped: one that is cut while it is asked, or whose disk fails, would end the process with SIGBUS.
"""

import hashlib
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from data.checked import OpenedFile, named, open_file, read_json, stamp_file
from data.durable import make_folders, replacing, write_json
from pipeline.config import ConfigError
from pipeline.options import IndexOptions, Phase
from pipeline.run.files import read_as
from pipeline.run.folder import PHASES, RunFolder, of_stage
from pipeline.run.folder import command as command_of

log = logging.getLogger(__name__)
VECTORS, SEARCH, TABLE, META, CHECKED = "vectors.faiss", "search.faiss", "table.parquet", "meta.json", ".checked"
HEADER = 45  # bytes
SMALL = 1 << 28  # bytes of vectors that are kept in memory

Space = Literal["chunks", "contexts"]
Metric = Literal["centred", "cosine", "ip", "l2"]
SCORES: dict[Metric, str] = {"centred": "centred cosine", "cosine": "cosine", "ip": "inner product", "l2": "distance"}


class StaleIndex(ValueError):
    """An index that was made from another checkpoint, or by a version whose indexes are not read any more."""


@dataclass
class Point:
    """What a search finds and costs at one effort.

    Attributes:
        effort: vectors that a graph keeps in view (`efSearch`), or clusters that are looked at (`nprobe`); 0: exact.
        recall: share of the exact ten nearest that are among the ten found.
        p50: milliseconds that half of the queries take at most, one at a time on one core.
        p99: those of 99 %.
    """

    effort: int
    recall: float
    p50: float
    p99: float


@dataclass
class Chance:
    """Scores of two rows that have nothing to do with each other, drawn among those that answers are taken from.

    Attributes:
        mean: of such pairs.
        deviation: standard, likewise.
        rare: what one pair in a hundred reaches.
    """

    mean: float
    deviation: float
    rare: float

    def __str__(self) -> str:
        return f"at random {self.mean:.3f} ± {self.deviation:.3f}, 1 in 100 beyond {self.rare:.3f}"


@dataclass(kw_only=True)
class Indexed:
    """What was indexed, of which checkpoint, and how well it is searched.

    Attributes:
        folder: where it lies.
        space: chunks, or contexts.
        chunks: number of vectors: of distinct chunks, or of places in the text.
        width: of a vector.
        split: whose chunks or places they are.
        stage: phase of the checkpoint.
        step: of the checkpoint.
        left_out: distinct chunks, or places, for which `index.max_chunks` or `index.max_contexts` left no room.
        kind: flat, hnsw, ivf or ivfpq.
        metric: of the scores.
        floor: occurrences that an answer has at least, unless it is said otherwise.
        found: recall and milliseconds at the effort that was chosen.
    """

    folder: str
    space: Space = "chunks"
    chunks: int
    width: int
    split: str
    stage: Phase
    step: int
    left_out: int = 0
    kind: str = "flat"
    metric: Metric = "cosine"
    floor: int = 1
    found: Point


@dataclass(kw_only=True)
class Meta(Indexed):
    """The fields of meta.json.

    Attributes:
        sha256: of the other files.
        checkpoint: digest of the checkpoint whose vectors they are.
        fallback: why it was used though it is not the best; None: nothing was wrong.
        min_count: chunks that occur less often were left out, and are not among `left_out`; None: all were in.
        max_chunks: of which there are no more; None: all.
        asked_stage: the phase that was asked for; None: the last one.
        context: chunks of a window, of contexts: questions to them are seen in windows as long.
        chunker: kind of the chunks.
        layer: of the main model, whose state contexts are; None: what comes out of it.
        scale: likewise of a model of several scales, in tokens.
        recall: that was asked for.
        queries: on which efforts were compared: rows of the index, and vectors that it does not have.
        curve: what was found at each effort, up to the one that was chosen.
        mean: what is taken off embeddings, where the metric is `centred`.
        chance: scores of any two, to hold those of answers against; None: too few.
    """

    sha256: dict[str, str]
    checkpoint: str
    fallback: str | None = None
    min_count: int | None = None
    max_chunks: int | None = None
    asked_stage: Phase | None = None
    context: int
    chunker: str
    layer: int | None = None
    scale: int | None = None
    recall: float = 0.99
    queries: dict[str, int] = field(default_factory=dict)
    curve: list[Point] = field(default_factory=list)
    mean: list[float] | None = None
    chance: Chance | None = None

    @property
    def against(self) -> str:
        """The end of what is told of an answer: the scores of chance, if they are known."""
        return "" if self.chance is None else f"; {self.chance}"


def metric_of(limits: IndexOptions, space: Space) -> Metric:
    """The metric that is asked for, or the one that a space has by itself.

    Raises:
        ConfigError: the space has no such metric.
    """
    if limits.metric == "auto":
        return "centred" if space == "chunks" else "cosine"
    if limits.metric == "centred" and space != "chunks":
        raise ConfigError(f"index.metric=centred is of chunks, not of {space}: set cosine, ip or l2, or leave it out")
    return limits.metric


def place_of(folder: RunFolder, space: Space) -> Path:
    """Where the files of a space are."""
    return folder.path / "index" / space


def command(folder: RunFolder, space: Space, stage: Phase | None = None) -> str:
    """The command that builds it, of the checkpoint of a phase."""
    return command_of("index", folder, *(() if space == "chunks" else ("--space", space)), *of_stage(stage))


def _stage_of(folder: RunFolder, digest: str | None, meta: Meta) -> Phase | None:
    """The phase that is asked for by the digest of its checkpoint, or that was when the index was made."""
    if digest is None:
        return meta.asked_stage
    for phase in PHASES:
        with suppress(OSError, ValueError):
            if folder.present(phase).digest == digest:
                return None if phase == folder.trained_phase() else phase
    return None


@dataclass
class Files:
    """The files of a space, found to be whole and of the checkpoint that is wanted.

    Attributes:
        place: their folder.
        meta: of meta.json.
        own: this user built them here.
        vectors: (n, E) float32.
        again: how they are made again.
    """

    place: Path
    meta: Meta
    own: bool
    vectors: "np.ndarray | Rows"
    again: str

    @classmethod
    def open(cls, folder: RunFolder, space: Space, digest: str | None = None) -> "Files":
        """Finds and checks them; what is wrong with them is said together with the command that makes them again.

        Args:
            folder: of the run.
            space: which.
            digest: of the checkpoint that they must be of; None: that of the run, of the phase that was asked for when they
                were made.

        Raises:
            FileNotFoundError: this space was not built yet.
            StaleIndex: it is of another checkpoint.
            ValueError: it is damaged.
        """
        place, again = place_of(folder, space), f"run `{command(folder, space)}` again"
        if not os.path.lexists(place / META):
            others = [path.parent.name for path in sorted(folder.path.glob(f"index/*/{META}"))]
            there = f" (it has {', '.join(others)})" if others else ""
            of = "" if space == "chunks" else f" of {space}"
            raise FileNotFoundError(f"{folder.path} has no index{of} yet{there}: run `{command(folder, space)}` first")
        try:
            meta = read_as(Meta, place / META)
        except (OSError, ValueError) as error:
            raise ValueError(f"the index in {place} is damaged ({error}): {again}") from error
        present = folder.present(meta.asked_stage)
        if meta.checkpoint != (digest or present.digest):
            why = f", since {present.fallback}" if present.fallback else ""
            wanted = f"the run's present one ({present.path}{why})"
            again = f"run `{command(folder, space, _stage_of(folder, digest, meta))}` again"
            if meta.checkpoint == present.digest:  # another phase was asked for
                wanted = "what is asked for"
            raise StaleIndex(
                f"the index in {place} is of another checkpoint ({meta.stage} step {meta.step}) than {wanted}: {again}"
            )
        try:  # at last, as it may note what it found: what is refused changes nothing
            _check_mean(meta)
            vectors = open_vectors(place / VECTORS, meta)
            own = _is_whole(place, meta)
        except (OSError, ValueError) as error:
            raise ValueError(f"the index in {place} is damaged ({error}): {again}") from error
        return cls(place, meta, own, vectors, again)

    def columns(self, **wanted: str) -> dict[str, np.ndarray]:
        """Columns of the table, of a fixed width only, so that what they take is known before they are read.

        Args:
            wanted: the Parquet type of each, such as INT64; FIXED_LEN_BYTE_ARRAY is given as (n, bytes) uint8.

        Raises:
            ValueError: the table is damaged.
        """
        import pyarrow
        import pyarrow.parquet

        path, rows = self.place / TABLE, len(self.vectors)
        try:
            with named(path), open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
                there = {file.schema.column(i).name: file.schema.column(i) for i in range(len(file.schema))}
                if file.metadata.num_rows != rows:
                    raise ValueError(f"{TABLE} has {file.metadata.num_rows} rows for {rows} vectors")
                for name, kind in wanted.items():
                    if name not in there or there[name].physical_type != kind or there[name].length > WIDEST:
                        raise ValueError(f"{TABLE} has no column {name} of {kind}")
                table = file.read(list(wanted))
            found = {name: _array(table[name], there[name].length) for name in wanted}
            if any(len(column) != rows for column in found.values()):
                raise ValueError(f"{TABLE} has other rows than it says")
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise ValueError(f"the index in {self.place} is damaged ({error}): {self.again}") from error
        return found


WIDEST = 512  # bytes of a column of the table


def _array(column: Any, width: int) -> np.ndarray:
    """A column of Arrow without missing values as (n,) numbers, or (n, width) uint8; the table's own memory."""
    if column.null_count:
        raise ValueError("values are missing")
    whole = column.combine_chunks()  # its `to_numpy` would import pandas
    kind = np.uint8 if width > 0 else column.type.to_pandas_dtype()
    step = max(width, 1)
    flat = np.frombuffer(whole.buffers()[1], kind)[whole.offset * step : (whole.offset + len(whole)) * step]
    return flat.reshape(-1, width) if width > 0 else flat


class Rows:
    """Vectors (n, E) float32 of a file that stays open; rows are read when they are asked for.

    Args:
        file: that holds them, after `HEADER` bytes.
        shape: n and E.
    """

    def __init__(self, file: OpenedFile, shape: tuple[int, int]) -> None:
        self.shape, self._file = shape, file

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | int | np.ndarray) -> np.ndarray:
        """Some rows as an array takes them, but slices without steps alone."""
        number, width = self.shape
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(number)
            return self._read(begin, max(0, end - begin))
        wanted, places = np.unique(np.asarray(rows) % number, return_inverse=True)
        found = np.concatenate([np.zeros((0, width), np.float32), *(self._read(int(row), 1) for row in wanted)])
        return found[places.reshape(np.shape(rows))]

    def _read(self, begin: int, count: int) -> np.ndarray:
        width = self.shape[1]
        content = self._file.read(HEADER + 4 * width * begin, 4 * width * count)
        return np.frombuffer(content, "<f4").reshape(count, width)


def open_vectors(path: Path, meta: Meta | None = None) -> np.ndarray | Rows:
    """The vectors (n, E) of a file that has the header which `haed index` writes, and as many bytes as that says.

    They are read at once if they take no more than `SMALL` bytes: exact search, which looks at all, is then quicker.

    Args:
        path: of the file.
        meta: what else says how many there are, and of which metric; None: it was just written.

    Raises:
        ValueError: it is something else.
    """
    with open_file(path) as file:
        opened, size = OpenedFile(path, file), os.fstat(file.fileno()).st_size
    header = bytes(opened.read(0, min(size, HEADER)))
    width, number = struct.unpack_from("<iq", header, 4) if len(header) == HEADER else (0, 0)
    metric: Metric = "l2" if header[:4] == b"IxF2" else "ip"
    told = meta is None or ((meta.chunks, meta.width) == (number, width) and (meta.metric == "l2") == (metric == "l2"))
    fits = min(number, width) > 0 and size == HEADER + 4 * width * number
    if not (told and fits and header == flat_header(number, width, metric)):
        raise ValueError(f"{path.name} is not what `haed index` writes")
    rows = Rows(opened, (number, width))
    return rows[:] if size <= SMALL else rows


def _check_mean(meta: Meta) -> None:
    """Raises ValueError unless there is a mean if, and only if, the metric has a use for it."""
    mean = np.array(meta.mean or (), np.float32)
    if len(mean) != (meta.width if meta.metric == "centred" else 0) or not np.isfinite(mean).all():
        raise ValueError(f"{META} has no mean that goes with metric {meta.metric} and width {meta.width}")


def flat_header(number: int, width: int, metric: Metric) -> bytes:
    """The beginning of a file of FAISS's `IndexFlatIP` or `IndexFlatL2` with so many vectors.

    Four letters, width (int32), number (int64), two numbers that mean nothing (int64), whether it is trained (1 byte), metric
    (int32), and how many values follow (int64).
    """
    code, name = (1, b"IxF2") if metric == "l2" else (0, b"IxFI")
    return name + struct.pack("<iqqqBiQ", width, number, 1 << 20, 1 << 20, 1, code, number * width)


def _states(place: Path, meta: Meta) -> dict[str, list[int]]:
    return {name: stamp_file(place / name) for name in (META, *meta.sha256)}


def _is_whole(place: Path, meta: Meta) -> bool:
    """Whether this user built the files here; raises ValueError where a sum is wrong, which is looked at once."""
    if not set(meta.sha256) <= {VECTORS, SEARCH, TABLE} or not {VECTORS, TABLE} <= set(meta.sha256):
        raise ValueError(f"{META} does not name its files")
    states = _states(place, meta)
    with suppress(OSError, ValueError, KeyError, TypeError):
        checked = place / CHECKED
        content = read_json(checked)
        if checked.lstat().st_uid == os.getuid() and content["files"] == states:
            return bool(content["own"])
    for name, expected in meta.sha256.items():
        with named(place / name), open_file(place / name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise ValueError(name)
    _note(place, states, False)
    return False


def _note(place: Path, states: dict[str, list[int]], own: bool) -> None:
    with suppress(OSError):  # where one may only read, sums are worked out every time
        write_json(place / CHECKED, {"own": own, "files": states})


def finish(folder: RunFolder, meta: Meta, names: list[str]) -> Meta:
    """Writes meta.json, with the sums of the files that were written before, and notes that they are ours."""
    place = place_of(folder, meta.space)
    for name in names:
        with open_file(place / name) as file:
            meta.sha256[name] = hashlib.file_digest(file, "sha256").hexdigest()
    folder.write_json(f"index/{meta.space}/{META}", asdict(meta))
    _note(place, _states(place, meta), True)
    if SEARCH not in names:
        (place / SEARCH).unlink(missing_ok=True)
    return meta


@contextmanager
def growing(place: Path, width: int, metric: Metric) -> Iterator["Growing"]:
    """`vectors.faiss`, written batch by batch; it takes its place at the end, in a folder that is made where it lacks."""
    make_folders(place, within=place.parent.parent)  # the run's folder
    with replacing(place / VECTORS) as file:
        file.write(bytes(HEADER))
        made = Growing(file, width)
        yield made
        file.flush()
        with open(file.name, "r+b") as begin:  # the other one appends, wherever it stands
            begin.write(flat_header(made.rows, width, metric))


class Growing:
    """A file of vectors of a width that is being written, with so many `rows` yet."""

    def __init__(self, file: IO[bytes], width: int) -> None:
        self._file, self._width, self.rows = file, width, 0

    def add(self, vectors: np.ndarray) -> None:
        """Appends vectors (n, E)."""
        assert vectors.shape[1] == self._width
        self._file.write(np.ascontiguousarray(vectors, "<f4").data)
        self.rows += len(vectors)
