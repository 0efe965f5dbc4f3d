"""Hugging Face data sets, from local folders: the real library, no network."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding.build import shard
from data.sources.source import hashed_split

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


def test_rows_without_text_are_counted(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": [*TEXTS, "", None]}).save_to_disk(tmp_path / "saved")
    notes = sharded(tmp_path / "saved", tmp_path / "shards").manifest["splits"]["notes"]
    assert "rows without text were left out: 2" in notes


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS, "label": [1] * 500}).save_to_disk(tmp_path / "saved")
    for field in ("body", "label"):
        with pytest.raises(ValueError, match=f"no column '{field}' of strings .it has text, label.: set source.field="):
            sharded(tmp_path / "saved", tmp_path / "shards", field=field)


def test_configurations_are_read_once_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    head = "---\nconfigs:\n"
    for name in ("one", "two"):
        with open(folder / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": f"{name} {number} " * 300}) + "\n" for number in range(2000))
        head += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    (folder / "README.md").write_text(f"{head}---\n")
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **b: (asked.append((a, b)), load(*a, **b))[1])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = SourceOptions(kind="datasets", path=str(folder), config="two")
    corpus = shard(source, ChunkerOptions(), ShardOptions(megabytes=1), tmp_path / "shards")
    assert len(corpus.of("train")) > 3 and asked == [((str(folder), "two"), {"revision": None})]
    assert all(text.startswith(b"two ") for text in corpus.originals("valid"))
    other = shard(replace(source, config="one"), ChunkerOptions(), ShardOptions(megabytes=1), tmp_path / "shards")
    assert other.folder != corpus.folder and next(other.originals("train")).startswith(b"one ")


def test_a_saved_data_set_has_no_configuration(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="it has no source.config= and no source.revision="):
        sharded(tmp_path / "saved", tmp_path / "shards", revision="v1")
