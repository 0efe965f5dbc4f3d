"""Hugging Face data sets, from local folders: the real library, no network."""

import gc
import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from data.options import SourceOptions
from data.sources.huggingface import DatasetsSource
from data.sources.source import hashed_split
from tests.data.conftest import brief, shard_source
from tests.data.test_filesystem import LAUGHS

datasets: Any = None  # loaded for the first test: it takes a second
TEXTS = [f"text {number} é\r\n" * (number % 5 + 1) for number in range(500)]


sharded = partial(shard_source, kind="datasets", workers=2, megabytes=1)


@pytest.fixture(scope="module", autouse=True)
def load_library() -> None:
    global datasets
    datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_splits_of_the_data_set(tmp_path: Path) -> None:
    texts = {"train": TEXTS[:400], "validation": TEXTS[400:450], "test": TEXTS[450:]}
    made = {name: datasets.Dataset.from_dict({"body": each}) for name, each in texts.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    corpus = sharded(tmp_path / "saved", tmp_path / "shards", field="body")
    assert [text.decode() for s in ("train", "valid", "test") for text in corpus.iterate_originals(s)] == TEXTS
    assert sharded(tmp_path / "saved", tmp_path / "shards", field="body").folder == corpus.folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set of `TEXTS`."""
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="of Linux")
def test_the_library_maps_its_files(saved: Path) -> None:
    """When it does not any more, docs/reference/security.md need not except it."""
    source = DatasetsSource(SourceOptions(kind="datasets", path=str(saved)))
    assert next(iter(source.read(next(iter(source.inputs(1 << 20, 1)))))).data
    assert f"{saved}/" in Path("/proc/self/maps").read_text()


def test_one_split_is_shared_out_by_hash(saved: Path, tmp_path: Path) -> None:
    corpus = sharded(saved, tmp_path / "shards")
    for split in ("train", "valid", "test"):
        wanted = [text.encode() for text in TEXTS if hashed_split(text.encode(), 5) == split]
        assert list(corpus.iterate_originals(split)) == wanted and wanted


COLUMNS = [
    ("int64", pa.array([1, 2])),
    ("float64", pa.array([1.5, None])),
    ("bool", pa.array([True, False])),
    ("List.*string", pa.array([["a"], []])),
    ("List.*role.*string.*content", pa.array([[{"role": "user", "content": "x"}], []])),
    ("null", pa.nulls(2)),
    ("binary", pa.array([b"a", b"b"])),
    ("large_binary", pa.array([b"a", b"b"], pa.large_binary())),
    ("'text': .*string.*int64", pa.array([{"text": "a", "n": 1}, None])),
]


@pytest.mark.parametrize(("type_", "column"), COLUMNS, ids=[name for name, _ in COLUMNS])
def test_a_column_of_no_strings_is_named_with_its_type(tmp_path: Path, type_: str, column: pa.Array) -> None:
    said = f"column 'text' holds .*{type_}.*, not strings. "
    for number, (more, advice) in enumerate((({"body": ["a", "b"]}, "Set source.field=body"), ({}, "No column holds"))):
        rows = datasets.Dataset(pa.table({"text": column, **more}))
        rows.save_to_disk(tmp_path / str(number))
        with pytest.raises(ValueError, match=f"split 'all': {said}{advice}"):
            sharded(tmp_path / str(number), tmp_path / "shards")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"], "title": ["b"], "label": [1]})
    labels = datasets.ClassLabel(names=["no", "yes"])
    rows.cast_column("label", labels).save_to_disk(tmp_path / "saved")
    there = "Its columns are 'text': Value.*string.*, 'title': Value.*string.*, 'label': ClassLabel.*'yes'.*"
    with pytest.raises(ValueError, match=f"has no column 'body'. {there}. Set source.field=text, or 'title'"):
        sharded(tmp_path / "saved", tmp_path / "shards", field="body")
    with pytest.raises(ValueError, match="column 'label' holds ClassLabel.*, not strings. Set source.field=text"):
        sharded(tmp_path / "saved", tmp_path / "shards", field="label")


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_every_type_of_strings_is_read(folder: Path, tmp_path: Path, kind: str, is_saved: bool) -> None:
    texts = [*TEXTS, None, ""]
    array = pa.array(texts).dictionary_encode() if kind == "dictionary" else pa.array(texts, getattr(pa, kind)())
    parquet.write_table(pa.table({"text": array}), folder / "train.parquet")
    if is_saved:
        datasets.load_dataset(str(folder))["train"].save_to_disk(tmp_path / "saved")
    corpus = sharded(tmp_path / "saved" if is_saved else folder, tmp_path / "shards")
    found = [text.decode() for split in ("train", "valid", "test") for text in corpus.iterate_originals(split)]
    assert sorted(found) == sorted(TEXTS)
    assert "rows without text were left out: 2" in corpus.manifest["splits"]["notes"]


def test_a_type_that_datasets_do_not_know_names_the_source(folder: Path, tmp_path: Path) -> None:
    array = pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string()))
    parquet.write_table(pa.table({"text": array}), folder / "train.parquet")
    with pytest.raises(ValueError, match=f"source.path={folder} cannot be read as a data set: .*map<string"):
        sharded(folder, tmp_path / "shards")


def test_configurations_are_read_once_in_a_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "---\nconfigs:\n"
    for name in ("one", "two"):
        with open(folder / f"{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": f"{name} {number} " * 300}) + "\n" for number in range(2000))
        head += f"- config_name: {name}\n  data_files: {name}.jsonl\n"
    (folder / "README.md").write_text(f"{head}---\n")
    load, asked = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **b: (asked.append((a, b)), load(*a, **b))[1])
    corpus = sharded(folder, tmp_path / "shards", workers=1, config="two")
    assert len(corpus.shards_of("train")) > 3 and [a for a, _ in asked] == [(str(folder), "two")]
    assert all(text.startswith(b"two ") for text in corpus.iterate_originals("valid"))
    other = sharded(folder, tmp_path / "shards", workers=1, config="one")
    assert other.folder != corpus.folder and next(other.iterate_originals("train")).startswith(b"one ")


def test_a_saved_data_set_has_no_configuration(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source.config= and source.revision= do not apply"):
        sharded(saved, tmp_path / "shards", revision="v1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text\nné à\n".encode("latin-1"), "cannot be read as a data set: 'utf-8' codec.*iconv -f"),
        ("a.csv", "text\nwords\n".encode("utf-16"), "cannot be read as a data set: 'utf-8' codec.*iconv -f"),
        ("a.parquet", None, "has no rows, or a split without rows, which datasets cannot load"),
        ("a.bin", b"words", "has no data set files .*.parquet, "),
        ("a.csv", b"text;id\nwords;1\n", "Set 'source.field=text;id'"),
    ],
    ids=brief,
)
def test_files_that_are_no_data_set_are_an_error_in_words(
    name: str, content: bytes | None, message: str, folder: Path, tmp_path: Path
) -> None:
    if content is None:
        parquet.write_table(pa.table({"text": pa.array([], pa.string())}), folder / name)
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{folder}.*{message}"):
        sharded(folder, tmp_path / "shards")


def test_rows_that_change_behind_an_unchanged_state_are_another_corpus(tmp_path: Path) -> None:
    """The library's own fingerprint is of what was called, not of what came out."""
    saved, text = tmp_path / "saved", tmp_path / "read.txt"
    folders = []
    for version in ("one", "two"):
        text.write_text(version)
        rows = datasets.Dataset.from_dict({"number": list(range(100))})
        rows = rows.map(
            lambda row, path: {"text": f"{path.read_text()} {row['number']}"},
            fn_kwargs={"path": text},
            load_from_cache_file=False,
        )
        rows.save_to_disk(saved)
        corpus = sharded(saved, tmp_path / "shards")
        assert next(iter(corpus.iterate_originals("train"))).startswith(version.encode())
        folders.append(corpus.folder)
    assert folders[0] != folders[1]


def test_a_file_that_is_replaced_by_one_of_the_same_time_is_read_again(folder: Path, tmp_path: Path) -> None:
    (folder / ".git").mkdir()
    for version in ("one", "two"):
        (folder / ".git" / "index").write_text(version)
        (folder / "a.parquet").unlink(missing_ok=True)
        parquet.write_table(pa.table({"text": [f"{version} {number}" for number in range(100)]}), folder / "a.parquet")
        os.utime(folder / "a.parquet", (1_700_000_000, 1_700_000_000))
        corpus = sharded(folder, tmp_path / "shards")
        assert next(iter(corpus.iterate_originals("train"))).startswith(version.encode())
    (folder / ".git" / "index").write_text("three")  # no data
    sharded(folder, tmp_path / "shards")
    assert len(list((tmp_path / "cache").glob("haed-*"))) == 2


@pytest.mark.parametrize(("suffix", "between"), [("csv", ","), ("tsv", "\t")])
def test_words_that_stand_for_nothing_elsewhere_are_texts(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str, between: str
) -> None:
    texts = ["NA", "null", "None", "nan", "n/a", "NULL", *(f"text {number}" for number in range(200))]
    lines = [between.join(("text", "number")), *(f"{text}{between}{number}" for number, text in enumerate(texts))]
    (folder / f"a.{suffix}").write_text("\n".join([*lines, f"{between}NA", ""]))
    corpus = sharded(folder, tmp_path / "shards", valid_percent=0)
    assert [text.decode() for text in corpus.iterate_originals("train")] == texts
    assert "rows without text were left out: 1" in corpus.manifest["splits"]["notes"]
    with pytest.raises(ValueError, match=r"no column 'body'. Its columns are 'text'.*'number'"):
        sharded(folder, tmp_path / "shards", field="body")
    many = [f"NA{between}{number}" for number in range(12_000)]  # more than are looked at for the types of columns
    (folder / f"a.{suffix}").write_text("\n".join([*lines, *many, f"x{between}NA", ""]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the library leaves open what it fails to read
        corpus = sharded(folder, tmp_path / "shards", valid_percent=0)
        gc.collect()
    assert list(corpus.iterate_originals("train"))[-1] == b"x" and "NA, null and nan are taken for" in caplog.text


def test_a_file_and_a_folder_of_other_files_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("one\r\ntwo\n")
    with pytest.raises(ValueError, match=r"has no data set files \(.*Use source.kind=text for others"):
        sharded(folder, tmp_path / "shards")
    parquet.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    (folder / "b.txt").write_text("more of these")
    with pytest.raises(ValueError, match="takes it for text, as most of its files are none of"):
        sharded(folder, tmp_path / "shards")
    with pytest.raises(ValueError, match="is a file, but source.kind=datasets reads a folder"):
        sharded(folder / "a.txt", tmp_path / "shards")


def test_splits_are_selected_by_their_names(tmp_path: Path) -> None:
    texts = {name: [f"{name} {number}" for number in range(50)] for name in ("train", "test", "unsupervised")}
    made = {name: datasets.Dataset.from_dict({"text": each}) for name, each in texts.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="these do not: unsupervised.*source.pattern="):
        sharded(tmp_path / "saved", tmp_path / "shards")
    corpus = sharded(tmp_path / "saved", tmp_path / "shards", pattern="{train,test}")
    assert sum(len(list(corpus.iterate_originals(split))) for split in ("train", "valid", "test")) == 100
    assert corpus.manifest["splits"]["left_out"]["of other names than source.pattern"]["names"] == ["unsupervised"]
    with pytest.raises(ValueError, match="no split matches source.pattern=x. Its splits are train, test, unsupervised"):
        sharded(tmp_path / "saved", tmp_path / "shards", pattern="x")


def test_a_folder_with_the_name_of_a_loader_is_a_folder(here: Path) -> None:
    for name in ("json", "other"):
        Path(name).mkdir()
        Path(name, "a.jsonl").write_text("".join(f'{{"text": "{name} {number}"}}\n' for number in range(6)))
    corpus = sharded(Path("json"), here / "shards", valid_percent=0)
    assert list(corpus.iterate_originals("train")) == [f"json {number}".encode() for number in range(6)]


@pytest.mark.parametrize(("name", "message"), [("set[1]", "takes .* for patterns. Rename the folder"), ("a\nb", "a.b")])
def test_a_folder_whose_name_datasets_cannot_read_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=f"(?s){message}"):
        sharded(tmp_path / name, tmp_path / "shards")


def test_offsets_that_lead_out_of_an_arrow_file_are_an_error(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["one", "two", "three"] * 100}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = file.read_bytes()
    ends = np.cumsum([0, *[3, 3, 5] * 100]).astype("<i4").tobytes()
    assert content.count(ends) == 1
    for wrong in (np.arange(301, dtype="<i4") + 0x7F000000, np.arange(301, dtype="<i4") - 7):
        file.write_bytes(content.replace(ends, wrong.astype("<i4").tobytes()))
        with pytest.raises(ValueError, match="a text after row 0 is damaged|cannot be read as a data set"):
            sharded(tmp_path / "saved", tmp_path / "shards", workers=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", f"{LAUGHS}\nconfigs: *a11", "README.md has more than 1,000,000 values"),
        ("README.md", f"configs: {'[' * 60}{']' * 60}", "README.md is nested more than 50 levels deep"),
        ("README.md", "configs: [1, 2]", "cannot be read as a data set"),
        ("README.md", "license: 'foo\n\n---x'\nconfigs:\n- data_files: /etc/x.csv", "outside of its folder"),
        ("README.md", "a: [", "README.md is not valid YAML"),
        ("dataset_dict.json", '{"splits": ["../other"]}', "names a split by a path"),
        ("dataset_dict.json", '{"splits": ["n/m"]}', "names a split by a path"),
        ("dataset_infos.json", "[1, 2]", "dataset_infos.json is damaged: it is no object"),
        ("dataset_dict.json", "7", "dataset_dict.json is damaged: it is no object"),
        ("state.json", "[" * 100_000, "state.json is damaged: it is nested"),
        ("state.json", '{"_data_files": [{"filename": "../../etc/x.arrow"}]}', "outside of its folder"),
        ("dataset_dict.json", '{"splits": 5}', "cannot be read as a data set"),
    ],
    ids=brief,
)
def test_what_describes_a_data_set_is_checked_before_it_is_obeyed(
    name: str, content: str, message: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    (folder / name).write_text(f"---\n{content}\n---\n" if name == "README.md" else content)
    with pytest.raises(ValueError, match=message) as raised:
        sharded(folder, tmp_path / "shards")
    assert len(str(raised.value)) < 2000
