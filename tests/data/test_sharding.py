import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from data.corpus import Corpus, distinct_chunks
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding import plan, shard, write_part
from tests.conftest import SHARED


def sharded(path: Path, into: Path, workers: int = 1, kind: str = "text", **options: object) -> Corpus:
    source = SourceOptions(kind=kind, path=str(path), **options)
    return shard(source, ChunkerOptions(), ShardOptions(workers=workers, megabytes=1), into)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three megabytes of text in files named by split."""
    generator = np.random.default_rng(0)
    place = tmp_path / "source"
    place.mkdir()
    for number in range(5):
        words = generator.integers(97, 123, 700_000).astype(np.uint8)
        words[generator.random(700_000) < 0.2] = ord(" ")
        (place / f"train-{number}.txt").write_bytes(words.tobytes())
    (place / "valid.txt").write_bytes(b"some text\n" * 100)
    (place / "test.txt").write_bytes("né\r\n\x00".encode() * 100)
    return place


def contents(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def test_round_trip_manifest_and_any_number_of_workers(folder: Path, tmp_path: Path) -> None:
    one, two = sharded(folder, tmp_path / "one"), sharded(folder, tmp_path / "two", workers=2)
    assert contents(one) == contents(two)
    for split in ("train", "valid", "test"):
        files = sorted(folder.glob(f"{split}*"))
        assert b"".join(one.originals(split)) == b"".join(path.read_bytes() for path in files)
        assert one.counts(split).documents == len(files)
    assert len(one.of("train")) > 2
    for entry in json.loads((one.folder / "manifest.json").read_text())["shards"]:
        content = (one.folder / entry["file"]).read_bytes()
        assert len(content) == entry["file_bytes"] and hashlib.sha256(content).hexdigest() == entry["sha256"]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # webdataset leaves the file to the collector
def test_webdataset_reads_the_shards(folder: Path, tmp_path: Path) -> None:
    corpus = sharded(folder, tmp_path)
    shard_file = str(corpus.folder / corpus.of("valid")[0].file)
    (sample,) = list(wds.WebDataset(shard_file, shardshuffle=False).decode())
    assert bytes(sample["tokens.npy"]) == (folder / "valid.txt").read_bytes()
    assert sample["lengths.npy"].sum() == len(sample["tokens.npy"]) and sample["names.json"] == ["valid.txt"]


def test_an_interrupted_run_redoes_only_what_is_missing(folder: Path, tmp_path: Path) -> None:
    whole = contents(sharded(folder, tmp_path / "whole"))
    source = SourceOptions(kind="text", path=str(folder))
    work = plan(source, ChunkerOptions(), ShardOptions(megabytes=1), tmp_path / "cut")
    work.folder.mkdir(parents=True)
    write_part(work.parts[0])
    before = (work.folder / work.parts[0].file).stat().st_mtime_ns
    corpus = sharded(folder, tmp_path / "cut")
    assert contents(corpus) == whole
    assert (work.folder / work.parts[0].file).stat().st_mtime_ns == before


def test_another_source_or_setting_is_another_folder(folder: Path, tmp_path: Path) -> None:
    first = sharded(folder, tmp_path).folder
    other = shard(SourceOptions(kind="text", path=str(folder)), ChunkerOptions(k=8), ShardOptions(), tmp_path).folder
    (folder / "valid.txt").write_bytes(b"changed")
    assert len({first, other, sharded(folder, tmp_path).folder}) == 3


def test_a_damaged_shard_is_named(folder: Path, tmp_path: Path) -> None:
    corpus = sharded(folder, tmp_path)
    path = corpus.folder / corpus.of("test")[0].file
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="test-00000.tar is damaged"):
        list(corpus.originals("test"))


def test_a_manifest_cannot_name_files_elsewhere(folder: Path, tmp_path: Path) -> None:
    corpus = sharded(folder, tmp_path)
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    manifest["shards"][0]["file"] = "../../etc/passwd"
    (corpus.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="outside its folder"):
        Corpus.open(corpus.folder)


def test_empty_and_missing_sources(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "nothing.txt").touch()
    with pytest.raises(ValueError, match="has no data"):
        sharded(tmp_path / "empty", tmp_path / "shards")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        sharded(tmp_path / "nowhere", tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


def test_a_single_text_is_cut_in_three_between_paragraphs(tmp_path: Path) -> None:
    text = b"".join(b"paragraph %d\nsecond line\n\n" % number for number in range(1000))
    (tmp_path / "book.txt").write_bytes(text)
    corpus = sharded(tmp_path / "book.txt", tmp_path / "shards")
    parts = [b"".join(corpus.originals(split)) for split in ("train", "valid", "test")]
    assert b"".join(parts) == text and all(part.endswith(b"\n\n") for part in parts)
    assert [round(len(part) / len(text), 2) for part in parts] == [0.9, 0.05, 0.05]


def test_distinct_chunks_are_counted(folder: Path, tmp_path: Path) -> None:
    found = distinct_chunks(sharded(folder, tmp_path), "valid")
    rows = [row.tobytes()[:n] for row, n in zip(found.tokens, found.lengths, strict=True)]
    assert dict(zip(rows, found.counts.tolist(), strict=True)) == {b"some ": 100, b"text\n": 100}


def test_wikitext_documents_begin_at_titles(tmp_path: Path) -> None:
    source = SHARED / "wikitext-2"
    if not source.is_dir():
        pytest.skip("WikiText-2 is not in ../shared/data")
    corpus = sharded(source, tmp_path, kind="wikitext")
    assert [corpus.counts(split).documents for split in ("train", "valid", "test")] == [600, 60, 60]
    for split in ("train", "valid", "test"):
        assert b"".join(corpus.originals(split)) == (source / f"{split}.txt").read_bytes()


def test_images_are_rasters(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (300, 3072), dtype=np.uint8)
    (tmp_path / "source").mkdir()
    np.savez(tmp_path / "source" / "train_data_batch_1.npz", data=images, labels=np.ones(300))
    np.savez(tmp_path / "source" / "val_data.npz", data=images[:3])
    source = SourceOptions(kind="images", path=str(tmp_path / "source"))
    corpus = shard(source, ChunkerOptions(kind="pixels"), ShardOptions(), tmp_path / "shards")
    found = b"".join(corpus.originals("train")) + b"".join(corpus.originals("valid"))
    pixels = np.frombuffer(found, np.uint8).reshape(300, 1024, 3)
    assert np.array_equal(pixels.transpose(0, 2, 1).reshape(300, 3072), images)
    assert corpus.counts("test").documents == 3


def test_an_image_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", data=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="not an ImageNet32 batch file"):
        sharded(tmp_path / "train.npz", tmp_path / "shards", kind="images")


def test_tar_members_have_no_owner_or_time(folder: Path, tmp_path: Path) -> None:
    corpus = sharded(folder, tmp_path)
    with tarfile.open(corpus.folder / corpus.of("test")[0].file) as tar:
        assert {(member.mtime, member.uid, member.uname) for member in tar} == {(0, 0, "")}
