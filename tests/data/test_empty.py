"""Sources without a document: what is empty is said, not that all of it was held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.conftest import shard_source, tar_of
from tests.data.sources.test_audio import wav

NULLS = b'{"text": null}\n{"text": ""}\n'
CASES = {
    "an empty recording": ("audio", "a.wav", wav(np.zeros(0, np.int16)), r"\(empty recordings .*: 1\)"),
    "an empty tar of sound": ("audio", "a.tar", tar_of(), ""),
    "an empty tar of pictures": ("images", "a.tar", tar_of(), ""),
    "an empty tar": ("webdataset", "a.tar", tar_of(), ""),
    "empty members": ("webdataset", "a.tar", tar_of(("1.txt", b"")), "samples without text were left out: 1"),
    "no pictures": ("images", "a.tar", tar_of(("1.txt", b"a")), "members of tars were left out: .*not pictures: 1"),
    "nulls": ("jsonl", "a.jsonl", NULLS, "lines of empty text were left out: 2; source.field=text"),
    "blank lines": ("jsonl", "a.jsonl", b"\n\n\n", "source.field=text"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_empty_is_said(tmp_path: Path, case: str) -> None:
    kind, name, content, why = CASES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"none was found in {name}.*{why}") as error:
        shard_source(tmp_path / name, tmp_path / "shards", kind, "fixed")
    assert "fell to" not in str(error.value) and len(str(error.value)) < 500


def test_a_train_split_without_a_document_is_said(tmp_path: Path) -> None:
    for split, text in {"train": None, "valid": "a", "test": "b"}.items():
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": text}))
    with pytest.raises(ValueError, match="has no document for training: none was found in train.jsonl"):
        shard_source(tmp_path, tmp_path / "shards", "jsonl")
    (tmp_path / "train.jsonl").write_bytes(b"")
    with pytest.raises(ValueError, match=r"everything goes to test and valid .train.jsonl: 0 bytes."):
        shard_source(tmp_path, tmp_path / "shards", "jsonl")


def test_rows_without_text_are_said(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"body": datasets.Value("string")})
    nulls = "has no document: none was found in all .rows without text were left out: 3; source.field=body"
    for name, rows, said in (("nulls", [None] * 3, nulls), ("none", [], "has no rows, or a split without rows")):
        datasets.Dataset.from_dict({"body": rows}, features=features).save_to_disk(tmp_path / name)
        with pytest.raises(ValueError, match=said):
            shard_source(tmp_path / name, tmp_path / "shards", "datasets", field="body")
