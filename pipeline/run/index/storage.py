"""The files of an index, `index/SPACE/`, and how far they are trusted.

    vectors.faiss   FAISS's `IndexFlat`: a header of 45 bytes, then (n, E) float32; read whole if small, see `VectorFile`
    search.faiss    unless the index is flat: FAISS's approximate index, which proposes rows of vectors.faiss
    table.parquet   row i is of vector i; Parquet readers (pandas, DuckDB, Polars) open it, and alone use `text`
    meta.json       summary of the index, its search quality, and the sha256 of the other files; written last
    .checked        checksums of the files, so that they are computed once; see `pipeline.run.files.ChecksumCache`

FAISS's readers trust their input, so they never read a stranger's file. `vectors.faiss` is read by our own code, after
its header was compared with its size. `search.faiss` is opened only if `.checked` says that this user built it here. In
a copied or foreign run, results are exact, slower, and the same.

No file is memory-mapped: if a mapped file were truncated, or its disk failed, the process would end with SIGBUS.
"""

import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from data.filesystem import (
    OpenedFile,
    add_path_to_errors,
    make_folders,
    open_file,
    read_lock_holder,
    replace_atomically,
)
from pipeline.config import ConfigError, IndexOptions, Phase
from pipeline.run.files import ChecksumCache, read_as
from pipeline.run.run_directory import LATEST_FIRST, RunFolder, stage_overrides
from pipeline.suggestions import format_command

VECTORS, SEARCH, TABLE, META = "vectors.faiss", "search.faiss", "table.parquet", "meta.json"
HEADER = 45  # bytes
SMALL = 1 << 28  # bytes of vectors that are kept in memory

Space = Literal["chunks", "contexts"]
Metric = Literal["centred", "cosine", "ip", "l2"]
SCORES: dict[Metric, str] = {"centred": "centred cosine", "cosine": "cosine", "ip": "inner product", "l2": "distance"}


class StaleIndexError(ValueError):
    """An index of another checkpoint."""


@dataclass
class SearchPoint:
    """Recall and latency of a search at one effort.

    Attributes:
        effort: candidates that a graph keeps (`efSearch`), or clusters that are searched (`nprobe`); 0 is exact.
        recall: share of the exact ten nearest that are among the ten found.
        p50, p99: median and 99th percentile of the milliseconds of a query, one at a time on one core.
    """

    effort: int
    recall: float
    p50: float
    p99: float


@dataclass
class RandomPairScores:
    """Scores of random pairs of rows, drawn among the rows that results are taken from.

    `rare` is the score that one pair in a hundred reaches: as similar or as near.
    """

    mean: float
    deviation: float
    rare: float

    def __str__(self) -> str:
        side = "below" if self.rare < self.mean else "beyond"  # a distance, or a similarity
        return f"random pairs have {self.mean:.3f} ± {self.deviation:.3f}, 1 in 100 {side} {self.rare:.3f}"


@dataclass(kw_only=True)
class IndexSummary:
    """Summary of an index: its content, its checkpoint, and its search quality.

    Attributes:
        chunks: number of vectors: of distinct chunks, or of places in the text.
        stage, step: phase and step of the checkpoint.
        left_out: distinct chunks, or places, beyond `index.max_chunks` or `index.max_contexts`.
        kind: flat, hnsw, ivf or ivfpq.
        floor: default minimum count of a result.
        found: recall and milliseconds at the chosen effort.
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
    found: SearchPoint


@dataclass(kw_only=True)
class IndexMetadata(IndexSummary):
    """The fields of meta.json.

    Attributes:
        sha256: checksums of the other files.
        checkpoint: digest of the checkpoint whose vectors they are.
        fallback: why it was used although it is not the best; None if nothing was wrong.
        asked_stage: the requested phase; None is the last one.
        context: for contexts, chunks of a window: queries are seen in windows of the same length.
        chunker: kind of the chunks.
        layer: for contexts, the layer of the main model; None is its output.
        scale: for contexts of a model of several scales, the scale in tokens; None is its output.
        queries: number of queries used for tuning: rows of the index, and vectors that it does not have.
        curve: results at each effort, up to the chosen one.
        mean: the mean that is subtracted from embeddings, if the metric is `centred`.
        rows: rows of the encoder's table, of which a hash gives each chunk one; 0 without a table.
        chance: scores of random pairs, for comparison with those of results; None if there are too few.
        options: the options of the section `index`, as requested. Chunks below its `min_count` are not among `left_out`.
    """

    sha256: dict[str, str]
    checkpoint: str
    fallback: str | None = None
    asked_stage: Phase | None = None
    context: int
    chunker: str
    layer: int | None = None
    scale: int | None = None
    queries: dict[str, int] = field(default_factory=dict)
    curve: list[SearchPoint] = field(default_factory=list)
    mean: list[float] | None = None
    rows: int = 0
    chance: RandomPairScores | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self, chance: RandomPairScores | None) -> str:
        """Return the end of a results' description: scores of random pairs, if given, and a phase that was requested."""
        notes = [str(chance)] if chance is not None else []
        if self.asked_stage is not None:
            notes.append(f"the index is of {self.stage} step {self.step:,}, as requested for it")
        return "".join(f"; {note}" for note in notes)


def choose_metric(limits: IndexOptions, space: Space) -> Metric:
    """Return the requested metric, or the default metric of a space.

    Raises:
        ConfigError: the space does not support this metric.
    """
    if limits.metric == "auto":
        return "centred" if space == "chunks" else "cosine"
    if limits.metric == "centred" and space != "chunks":
        advice = "Set cosine, ip or l2, or leave it out"
        raise ConfigError(f"index.metric=centred applies to chunks, not to {space}. {advice}")
    return limits.metric


def space_folder(folder: RunFolder, space: Space) -> Path:
    """Return the folder of a space's files."""
    return folder.path / "index" / space


def unfinished_folder(folder: RunFolder, space: Space) -> Path:
    """Return the folder in which an index is built. The one before stays until it is finished."""
    return space_folder(folder, space).with_name(f".{space}.partial")


def lock_path(folder: RunFolder, space: Space) -> Path:
    """Return the lock file of who builds the index of a space."""
    return space_folder(folder, space).with_name(f"{space}.lock")


def has_index(folder: RunFolder, space: Space) -> bool:
    """Return whether a run has an index of a space, of whatever checkpoint."""
    return os.path.lexists(space_folder(folder, space) / META)


def check_index_exists(folder: RunFolder, space: Space) -> None:
    """Raise FileNotFoundError with the command to run if a run has no index of a space."""
    if not has_index(folder, space):
        others = [path.parent.name for path in sorted(folder.path.glob(f"index/*/{META}"))]
        there = f" (it has {', '.join(others)})" if others else ""
        suffix = "" if space == "chunks" else f" of {space}"
        raise FileNotFoundError(f"{folder.path} has no index{suffix}{there}. Run {index_command(folder, space)} first")


def index_command(folder: RunFolder, space: Space, stage: Phase | None = None) -> str:
    """Return the command that builds the index of a space, for the checkpoint of a phase."""
    which = () if space == "chunks" else ("--space", space)
    return format_command("index", folder.path, *which, *stage_overrides(stage))


def _find_stage(folder: RunFolder, digest: str | None, meta: IndexMetadata) -> Phase | None:
    """Return the phase whose checkpoint has this digest; without a digest, the phase requested for the index."""
    if digest is None:
        return meta.asked_stage
    for phase in LATEST_FIRST:
        with suppress(OSError, ValueError):
            if folder.select_checkpoint(phase).digest == digest:
                return None if phase == folder.trained_phase() else phase
    return None


@contextmanager
def explain_damage(place: Path, again: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of an index's files into a ValueError that says `again`, but for a file that may not be read.

    Args:
        place: folder of the index.
        again: the command that builds it again, as a sentence.
        kinds: further classes of errors.
    """
    expected: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except PermissionError:
        raise
    except expected as error:
        raise ValueError(f"the index in {place} is damaged ({error}). {again}") from error


class IndexFiles:
    """The files of an index, found and verified; errors include the command that builds them again.

    Args:
        digest: digest of the checkpoint that they must be of; None is the run's checkpoint, of the phase requested
            when they were made.

    Attributes:
        vectors: (n, E) float32.
        again: advice how to build them again.

    Raises:
        FileNotFoundError: this index was not built yet.
        StaleIndexError: it is of another checkpoint.
        BlockingIOError: it is being built.
        ValueError: it is damaged.
    """

    def __init__(self, folder: RunFolder, space: Space, digest: str | None = None) -> None:
        try:
            self._open(folder, space, digest)
        except StaleIndexError:
            raise
        except ValueError:  # its files are replaced one by one: they may be of two indexes
            if holder := read_lock_holder(lock_path(folder, space)):
                place = space_folder(folder, space)
                raise BlockingIOError(f"the index in {place} is being built by {holder}. Ask again later") from None
            self._open(folder, space, digest)  # it was finished meanwhile, or is damaged

    def _open(self, folder: RunFolder, space: Space, digest: str | None) -> None:
        place, again = space_folder(folder, space), f"Run {index_command(folder, space)} again"
        check_index_exists(folder, space)
        with explain_damage(place, again):
            meta = read_as(IndexMetadata, place / META)
        present = folder.select_checkpoint(meta.asked_stage)
        if meta.checkpoint != (digest or present.digest):
            why = f", since {present.fallback}" if present.fallback else ""
            wanted = f"the run's present checkpoint ({present.path}{why})"
            again = f"Run {index_command(folder, space, _find_stage(folder, digest, meta))} again"
            if meta.checkpoint == present.digest:  # another phase was asked for
                wanted = "the requested one"
            raise StaleIndexError(
                f"the index in {place} belongs to another checkpoint ({meta.stage} step {meta.step:,}) than {wanted}. {again}"
            )
        with explain_damage(place, again):  # at last, as it may note what it found: what is refused changes nothing
            _check_mean(meta)
            vectors = open_vectors(place / VECTORS, meta)
            _check_sums(place, meta)
        self.place, self.meta, self.vectors, self.again = place, meta, vectors, again

    def read_columns(self, **wanted: str) -> dict[str, np.ndarray]:
        """Read columns of the table; only those of a fixed width, so that their memory is known before they are read.

        Args:
            wanted: the Parquet type of each, such as INT64; FIXED_LEN_BYTE_ARRAY is returned as (n, bytes) uint8.

        Raises:
            ValueError: the table is damaged.
        """
        import pyarrow
        import pyarrow.parquet

        path, rows = self.place / TABLE, len(self.vectors)
        with explain_damage(self.place, self.again, pyarrow.ArrowException, MemoryError):
            with add_path_to_errors(path), open_file(path) as opened, pyarrow.parquet.ParquetFile(opened) as file:
                there = {file.schema.column(i).path: file.schema.column(i) for i in range(len(file.schema))}
                groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
                if not file.metadata.num_rows == sum(group.num_rows for group in groups) == rows:
                    raise ValueError(f"{TABLE} has {file.metadata.num_rows} rows for {rows} vectors")
                for name, kind in wanted.items():
                    column = there.get(name)
                    is_flat = column is not None and column.max_repetition_level == 0
                    if column is None or not is_flat or column.physical_type != kind or column.length > WIDEST:
                        raise ValueError(f"{TABLE} has no column {name} of {kind}")
                _check_values(groups, set(wanted))
                table = file.read(list(wanted))
            columns = {name: _as_array(table[name], there[name].length) for name in wanted}
            if any(len(column) != rows for column in columns.values()):
                raise ValueError(f"{TABLE} has the wrong number of rows")
        return columns


def _check_values(groups: list[Any], names: set[str]) -> None:
    """Raise ValueError if columns of row groups of a Parquet file have more or fewer values than rows."""
    for group in groups:
        for number in range(group.num_columns):
            column = group.column(number)
            if column.path_in_schema in names and column.num_values != group.num_rows:
                raise ValueError(f"{TABLE} has {column.num_values} values for {group.num_rows} rows")


_PAIRS = 4000  # random pairs that are scored
WIDEST = 512  # bytes of a column of the table


def _as_array(column: Any, width: int) -> np.ndarray:
    """Return a column of Arrow without nulls as (n,) numbers, or (n, width) uint8, without a copy."""
    if column.null_count:
        raise ValueError("values are missing")
    whole = column.combine_chunks()  # its `to_numpy` would import pandas
    kind = np.uint8 if width > 0 else column.type.to_pandas_dtype()
    step = max(width, 1)
    flat = np.frombuffer(whole.buffers()[1], kind)[whole.offset * step : (whole.offset + len(whole)) * step]
    return flat.reshape(-1, width) if width > 0 else flat


class VectorFile:
    """Vectors (n, E) float32 in a file that stays open; rows are read on access.

    Args:
        file: the file, whose vectors begin after `HEADER` bytes.
        shape: n and E.
    """

    def __init__(self, file: OpenedFile, shape: tuple[int, int]) -> None:
        self.shape, self._file = shape, file

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | int | np.ndarray) -> np.ndarray:
        """Return rows, indexed as an array is; slices have no step. Raises IndexError for rows that it lacks."""
        number, width = self.shape
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(number)
            return self._read_rows(begin, max(0, end - begin))
        indices = np.asarray(rows)
        if ((indices < -number) | (indices >= number)).any():
            raise IndexError(f"rows {rows}: there are {number}")
        wanted, places = np.unique(indices % number, return_inverse=True)
        vectors = np.concatenate([np.zeros((0, width), np.float32), *(self._read_rows(int(row), 1) for row in wanted)])
        return vectors[places.reshape(np.shape(rows))]

    def _read_rows(self, begin: int, count: int) -> np.ndarray:
        width = self.shape[1]
        content = self._file.read_range(HEADER + 4 * width * begin, 4 * width * count)
        return np.frombuffer(content, "<f4").reshape(count, width)


def open_vectors(path: Path, meta: IndexMetadata | None = None) -> np.ndarray | VectorFile:
    """Open the vectors (n, E) of a file, after comparing its header and size with those that `haed index` writes.

    They are read at once if they take at most `SMALL` bytes: exact search, which reads all, is then faster.

    Args:
        path: path of the file.
        meta: meta.json, whose number, width and metric must agree; None if the file was just written.

    Raises:
        ValueError: the file is not what `haed index` writes.
    """
    with open_file(path) as file:
        opened, size = OpenedFile(path, file), os.fstat(file.fileno()).st_size
    header = bytes(opened.read_range(0, min(size, HEADER)))
    width, number = struct.unpack_from("<iq", header, 4) if len(header) == HEADER else (0, 0)
    metric: Metric = "l2" if header[:4] == b"IxF2" else "ip"
    shape = (number, width, metric == "l2")
    agrees = meta is None or (meta.chunks, meta.width, meta.metric == "l2") == shape
    fits = min(number, width) > 0 and size == HEADER + 4 * width * number
    if not (agrees and fits and header == flat_header(number, width, metric)):
        raise ValueError(f"{path.name} was not written by `haed index`")
    rows = VectorFile(opened, (number, width))
    return rows[:] if size <= SMALL else rows


def _check_mean(meta: IndexMetadata) -> None:
    """Raise ValueError unless a mean is stored if, and only if, the metric uses one."""
    mean = np.array(meta.mean or (), np.float32)
    if len(mean) != (meta.width if meta.metric == "centred" else 0) or not np.isfinite(mean).all():
        raise ValueError(f"{META} has no mean for metric {meta.metric} and width {meta.width}")


def _check_sums(place: Path, meta: IndexMetadata) -> None:
    """Raise ValueError if a file does not have the checksum in meta.json."""
    if not {VECTORS, TABLE} <= set(meta.sha256) <= {VECTORS, SEARCH, TABLE}:
        raise ValueError(f"{META} does not name its files")
    cache = ChecksumCache(place)
    for name, expected in meta.sha256.items():
        if cache.compute_sha256(name) != expected:
            raise ValueError(name)


def flat_header(number: int, width: int, metric: Metric) -> bytes:
    """Return the header of a FAISS `IndexFlatIP` or `IndexFlatL2` file with this many vectors.

    It has a four-letter name, width (int32), number (int64) and two unused numbers (int64). Then follow whether the
    index is trained (1 byte), the metric (int32), and the number of values (int64).
    """
    code, name = (1, b"IxF2") if metric == "l2" else (0, b"IxFI")
    return name + struct.pack("<iqqqBiQ", width, number, 1 << 20, 1 << 20, 1, code, number * width)


def finish_index(folder: RunFolder, meta: IndexMetadata, names: list[str]) -> IndexMetadata:
    """Write meta.json with the checksums of the finished files, move all to their place, and note that this user built them."""
    place, unfinished = space_folder(folder, meta.space), unfinished_folder(folder, meta.space)
    cache = ChecksumCache(unfinished)
    meta.sha256 = {name: cache.compute_sha256(name, fresh=True) for name in names}
    folder.write_json(f"index/{unfinished.name}/{META}", asdict(meta))  # here, as a full disk may have no room for it
    make_folders(place, within=folder.path)
    for name in (*names, META):
        os.replace(unfinished / name, place / name)
    shutil.rmtree(unfinished)
    ChecksumCache(place).note_sums(meta.sha256, is_built=True)
    if SEARCH not in names:
        (place / SEARCH).unlink(missing_ok=True)
    return meta


@contextmanager
def write_vectors(place: Path, width: int, metric: Metric) -> Iterator["VectorWriter"]:
    """Write `vectors.faiss` batch by batch. Its folder is created if needed."""
    make_folders(place, within=place.parent.parent)  # the run's folder
    with replace_atomically(place / VECTORS) as file:
        file.write(bytes(HEADER))
        writer = VectorWriter(file, width)
        yield writer
        file.flush()
        with open(file.name, "r+b") as begin:  # the other one appends, wherever it stands
            begin.write(flat_header(writer.rows, width, metric))


class VectorWriter:
    """Writer of a file of vectors of a fixed width; `rows` counts those written so far."""

    def __init__(self, file: IO[bytes], width: int) -> None:
        self._file, self._width, self.rows = file, width, 0

    def append_vectors(self, vectors: np.ndarray) -> None:
        """Append vectors (n, E)."""
        assert vectors.shape[1] == self._width
        self._file.write(np.ascontiguousarray(vectors, "<f4").data)
        self.rows += len(vectors)


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


def list_changed_options(folder: RunFolder, options: IndexOptions) -> dict[str, Any]:
    """Return the options of an index that is there, by name, which differ from these; empty if it cannot be read."""
    space: Space = "contexts" if options.space == "contexts" else "chunks"
    try:
        before = read_as(IndexMetadata, space_folder(folder, space) / META).options
    except (OSError, ValueError):
        return {}
    now = asdict(options) | {"space": before.get("space")}
    return {name: value for name, value in before.items() if now.get(name, value) != value}
