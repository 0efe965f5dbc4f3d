"""Files of an index: what is believed of them, and what a stranger's may not do."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from data.filesystem import OpenedFile, file_lock, write_json
from pipeline.inference import query_index
from pipeline.run.files import ChecksumCache
from pipeline.run.index.build import build_index
from pipeline.run.index.chunk_index import ChunkIndex
from pipeline.run.index.storage import VECTORS, IndexFiles, VectorFile, lock_path, random_pair_scores, space_folder
from pipeline.run.run_directory import RunFolder
from tests.conftest import flip_bit
from tests.pipeline.conftest import CommandLine


@pytest.fixture
def place(run: Path) -> Path:
    return run / "index" / "chunks"


def test_sums_are_worked_out_once_and_again_when_a_file_changed(
    run: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_and_sum() -> list[str]:
        """Open the index as another process; return the names of its files that are summed up."""
        monkeypatch.setattr(ChecksumCache, "_hashed", hashed := {})
        ChunkIndex(folder)
        return [path.name for path in hashed if path.parent == place]

    folder = RunFolder(run)
    assert open_and_sum() == ["vectors.faiss", "table.parquet"]  # of a copy, nothing is known
    assert open_and_sum() == []  # `.checked` has them
    os.utime(place / "table.parquet")
    assert open_and_sum() == ["table.parquet"]
    (place / ".checked").write_text('{"vectors.faiss": true}')
    assert open_and_sum() == ["vectors.faiss", "table.parquet"]
    flip_bit(place / "vectors.faiss", 200)
    with pytest.raises(ValueError, match=r"is damaged \(vectors.faiss\). Run `haed index .*` again"):
        ChunkIndex(folder)


def test_an_approximate_index_of_somebody_else_is_not_read(
    run: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAISS's reader trusts what it reads. Answers are exact instead, and the same."""
    options = RunFolder(run).load_options(["index.kind=hnsw", "index.recall=1"])
    found = build_index(options)
    assert found.kind == "hnsw" and found.found.recall > 0.9
    mine = ChunkIndex(RunFolder(run))
    assert mine.search.kind == "hnsw"
    copied = Path(shutil.copytree(run, tmp_path / "handed"))
    import faiss

    monkeypatch.setattr(faiss, "read_index", lambda *_: pytest.fail("a stranger's file meets FAISS"))
    caplog.clear()
    for _ in range(2):
        theirs = ChunkIndex(RunFolder(copied))
        assert theirs.search.kind == "flat" and "was not built by you on this machine, so it is not read" in caplog.text
    queries = mine.vectors[:20]
    np.testing.assert_allclose(
        theirs.search.find_nearest(queries, 3)[0], mine.search.find_nearest(queries, 3)[0], atol=1e-4
    )
    checked = json.loads((copied / "index/chunks/.checked").read_text())
    assert set(checked) == {"vectors.faiss", "search.faiss", "table.parquet"}
    assert not any(is_built for _, _, is_built in checked.values())


def forged(place: Path, **changes: object) -> None:
    """A meta.json that says something else, with the sums of the files as they are."""
    meta = json.loads((place / "meta.json").read_text()) | changes
    for name in meta["sha256"]:
        meta["sha256"][name] = hashlib.sha256((place / name).read_bytes()).hexdigest()
    write_json(place / "meta.json", meta)


def refused(run: Path, haed: CommandLine) -> str:
    (line,) = haed.error("neighbours", run, "def ").splitlines()
    assert line.startswith("error: ") and "haed index" in line and "--debug" not in line
    return line


@pytest.mark.parametrize("header", ["width", "number", "letters", "short"])
def test_a_header_that_asks_for_more_than_there_is(header: str, run: Path, place: Path, haed: CommandLine) -> None:
    content = bytearray((place / "vectors.faiss").read_bytes())
    change = {"width": (4, b"\xff\xff\xff\x7f"), "number": (8, b"\xff" * 7 + b"\x7f"), "letters": (0, b"IwFl")}
    at, new = change.get(header, (0, b""))
    content[at : at + len(new)] = new
    (place / "vectors.faiss").write_bytes(content[:30] if header == "short" else content)
    forged(place)
    assert "vectors.faiss was not written by `haed index`" in refused(run, haed)
    forged(place, chunks=2**40, width=1, mean=[0.0])
    assert "vectors.faiss was not written by `haed index`" in refused(run, haed)


@pytest.mark.parametrize("mean", [None, [], [0.5], [float("nan")] * 16])
def test_a_mean_that_is_none(mean: list[float] | None, run: Path, place: Path, haed: CommandLine) -> None:
    forged(place, mean=mean)
    assert "meta.json has no mean for metric centred and width 16" in refused(run, haed)


def test_a_table_that_is_none(run: Path, place: Path, haed: CommandLine) -> None:
    rows = json.loads((place / "meta.json").read_text())["chunks"]
    good = parquet.read_table(place / "table.parquet")
    tokens = good["tokens"].to_pylist()
    lists = pyarrow.array([[0] * 1000, *[[]] * (rows - 1)], pyarrow.list_(pyarrow.int64()))
    nested = pyarrow.StructArray.from_arrays([pyarrow.array([0] * rows)], ["count"])
    for table, message in (
        (good.slice(1), "rows for"),
        (good.set_column(1, "count", lists), "has no column count of INT64"),
        (good.drop_columns("count").append_column("x", nested), "has no column count"),
        (good.drop_columns("norm"), "has no column norm of FLOAT"),
        (good.set_column(2, "length", pyarrow.array([9 << 40] * rows)), "lengths or counts"),
        (good.set_column(4, "tokens", pyarrow.array(tokens, pyarrow.binary())), "has no column tokens of FIXED"),
        (good.set_column(1, "count", pyarrow.array([None] * rows, pyarrow.int64())), "values are missing"),
        (good.set_column(4, "tokens", pyarrow.array([bytes(9999)] * rows, pyarrow.binary(9999))), "no column tokens"),
    ):
        parquet.write_table(table, place / "table.parquet")
        forged(place)
        assert message in refused(run, haed)
    for content in (b"", b"PAR1", b"text,count\n", b"PAR1" + bytes(100) + b"PAR1"):
        (place / "table.parquet").write_bytes(content)
        forged(place)
        assert "is damaged" in refused(run, haed)
    forged(place, sha256={})
    assert "does not name its files" in refused(run, haed)


@pytest.mark.parametrize("moment", ["build.choose_index", "storage.asdict"])
def test_an_index_stays_until_another_is_finished_and_a_half_one_takes_no_space(
    moment: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(run)
    before = ChunkIndex(folder).meta

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(f"pipeline.run.index.{moment}", stop)
        with pytest.raises(KeyboardInterrupt):
            build_index(folder.load_options(["index.metric=l2"]))
    assert ChunkIndex(folder).meta == before and not (run / "index" / ".chunks.partial").exists()
    build_index(folder.load_options(["index.metric=l2"]))
    assert ChunkIndex(folder).meta.metric == "l2"


def test_few_places_and_few_vectors_make_an_index(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(run)
    assert build_index(folder.load_options(["index.space=contexts", "index.max_contexts=1"])).chunks == 1
    assert build_index(folder.load_options(["index.kind=ivfpq", "index.max_chunks=9"])).kind == "flat"
    assert "index.kind=ivfpq needs 16 vectors" in caplog.text


def test_chance_is_that_of_the_chunks_that_are_searched(run: Path) -> None:
    index = ChunkIndex(RunFolder(run))
    about = [
        query_index(RunFolder(run).load_options(), queries=["def "], min_count=least).summary for least in (1, 2, 20)
    ]
    assert len({each.partition("random pairs")[2] for each in about}) == 3
    few = random_pair_scores(index.vectors, index.count_known(20), index.meta.metric, 0)
    assert str(few) in about[2]


def test_a_file_of_vectors_has_an_end(run: Path) -> None:
    with (path := run / "index" / "chunks" / VECTORS).open("rb") as file:
        vectors = VectorFile(OpenedFile(path, file), (5, 16))
    assert np.array(vectors).shape == (5, 16)
    with pytest.raises(IndexError, match="there are 5"):
        vectors[5]


def test_an_index_that_is_being_built_is_not_called_damaged(run: Path) -> None:
    """Its files are replaced one by one."""
    folder = RunFolder(run)
    vectors = space_folder(folder, "chunks") / VECTORS
    whole = vectors.read_bytes()
    vectors.write_bytes(whole[:-1])
    with file_lock(lock_path(folder, "chunks")), pytest.raises(BlockingIOError, match="is being built by .*Ask again"):
        IndexFiles(folder, "chunks")
    with pytest.raises(ValueError, match="is damaged"):
        IndexFiles(folder, "chunks")
    vectors.write_bytes(whole)
    assert IndexFiles(folder, "chunks").vectors is not None
