"""Hugging Face data sets, from local folders: the real library, no network."""

from pathlib import Path

import pytest

from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding import shard
from data.sources import hashed_split

datasets = pytest.importorskip("datasets")
TEXTS = [f"text {number} é\r\n" * (number % 5 + 1) for number in range(500)]


def sharded(path: Path, into: Path, **options: object) -> Corpus:
    source = SourceOptions(kind="datasets", path=str(path), **options)  # type: ignore[arg-type]
    return shard(source, ChunkerOptions(), ShardOptions(workers=2, megabytes=1), into)


def test_splits_of_the_data_set(tmp_path: Path) -> None:
    made = {name: datasets.Dataset.from_dict({"body": TEXTS[a:b]}) for name, a, b in
            (("train", 0, 400), ("validation", 400, 450), ("test", 450, 500))}  # fmt: skip
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    corpus = sharded(tmp_path / "saved", tmp_path / "shards", field="body")
    assert [text.decode() for s in ("train", "valid", "test") for text in corpus.originals(s)] == TEXTS
    assert sharded(tmp_path / "saved", tmp_path / "shards", field="body").folder == corpus.folder


def test_one_split_is_shared_out_by_hash(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    corpus = sharded(tmp_path / "saved", tmp_path / "shards")
    for split in ("train", "valid", "test"):
        wanted = [text.encode() for text in TEXTS if hashed_split(text.encode(), 5) == split]
        assert list(corpus.originals(split)) == wanted and wanted


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS, "label": [1] * 500}).save_to_disk(tmp_path / "saved")
    for field in ("body", "label"):
        with pytest.raises(ValueError, match=f"no column '{field}' of strings .it has text, label.: set source.field="):
            sharded(tmp_path / "saved", tmp_path / "shards", field=field)
