"""Which file goes into which split: one rule for every source, said and kept in the manifest, and the same for old files."""

import json
import logging
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.corpora import NOTES
from data.corpus import Corpus
from data.options import ChunkerOptions
from data.sources.files import zstd
from data.sources.splits import LISTED, Record, hashed_split
from tests.data.conftest import shard_source
from tests.data.sources.test_audio import wav
from tests.data.sources.test_images import png

SPLITS = ("train", "valid", "test")


MAKERS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "text": (".txt", lambda number: b"text %d\n\n" % number * 50),
    "jsonl": (".jsonl", lambda number: b"".join(b'{"text": "%d %d"}\n' % (number, line) for line in range(30))),
    "wikitext": (
        ".raw",
        lambda number: b"".join(b" \n = Title %d of %d = \n \n text \n" % (line, number) for line in range(30)),
    ),
    "images": (".png", lambda number: png(np.random.default_rng(number).integers(0, 256, (4, 4, 3), np.uint8))),
    "audio": (".wav", lambda number: wav(np.random.default_rng(number).integers(-9000, 9000, 300).astype(np.int16))),
}
each_kind = pytest.mark.parametrize("kind", MAKERS)


sharded = partial(shard_source, chunker=ChunkerOptions(kind="fixed", k=4))


def put(folder: Path, kind: str, *names: str) -> Path:
    """Files of a kind, each with another content."""
    suffix, make = MAKERS[kind]
    for number, name in enumerate(names):
        path = folder / f"{name}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make(number))
    return folder


def names(corpus: Corpus, places: str) -> list[str]:
    found: list[str] = corpus.manifest["splits"]["files"].get(places, {"names": []})["names"]
    return found


def documents(corpus: Corpus) -> dict[bytes, str]:
    """Split of each document by its content."""
    return {text: split for split in SPLITS for text in corpus.iterate_originals(split)}


@each_kind
def test_a_file_that_states_no_split_beside_others_is_refused(tmp_path: Path, kind: str) -> None:
    folder = put(tmp_path / "source", kind, "train", "valid", "test", *(f"extra-{number}" for number in range(5)))
    with pytest.raises(ValueError, match=r"extra-0.*extra-2\..* … \(5 files\).*source.pattern=.*source.valid_pattern="):
        sharded(folder, tmp_path / "shards", kind)
    assert not (tmp_path / "shards").exists() or not list((tmp_path / "shards").glob("*/manifest.json"))
    suffix = MAKERS[kind][0]
    for way in ({"pattern": f"[tv]*{suffix}"}, {"valid_pattern": "^valid", "test_pattern": "^test"}):
        found = sharded(folder, tmp_path / "shards", kind, **way)
        assert names(found, "valid") == [f"valid{suffix}"] or kind in ("jsonl", "wikitext")
        assert found.manifest["splits"]["by"] == ("stated" if "pattern" in way else "patterns")


NO_DATA = {
    "hidden": [".DS_Store"],
    "checksums": ["SHA256SUMS", "md5sum.txt", "train.txt.sha256"],
    "no data by their names": ["Thumbs.db", "_metadata", "dataset_info.json", "desktop.ini"]
    + ["train.txt.bak", "train.txt~"],
    "about the data, by their names": ["CITATION.cff", "DISCLAIMER", "LICENSE", "LICENSE-MIT.txt", "Makefile", "NOTICE"]
    + ["README.md", "README_en.rst", "corpus.README", "download.sh", "metadata.json", "requirements.txt", "vocab.txt"],
}


@each_kind
def test_what_is_no_data_by_its_name_is_left_out_beside_named_files(tmp_path: Path, kind: str) -> None:
    folder = put(tmp_path / "source", kind, "train", "valid", "test")
    for name in sum(NO_DATA.values(), []):
        (folder / name).write_text(f"This is {name}.")
    said = sharded(folder, tmp_path / "shards", kind).manifest["splits"]
    left_out = {reason: listed["names"] for reason, listed in said["left_out"].items()}
    if kind in ("images", "audio"):  # which know their files by the suffix
        assert set(NO_DATA["about the data, by their names"]) == set(left_out.popitem()[1])
    else:
        assert left_out.pop("about the data, by their names") == NO_DATA["about the data, by their names"]
    assert {reason: sorted(names) for reason, names in left_out.items()} == {
        reason: names for reason, names in NO_DATA.items() if reason in left_out
    }
    assert len(left_out) == 3 and said["by"] == "stated"


@pytest.mark.parametrize("kind", ["jsonl", "wikitext"])
def test_a_readme_is_no_data_of_kinds_that_are_no_prose(tmp_path: Path, kind: str) -> None:
    folder = put(tmp_path / "source", kind, "data")
    (folder / "README.md").write_text("# About\n")
    said = sharded(folder, tmp_path / "shards", kind).manifest["splits"]
    assert said["left_out"] == {"about the data, by their names": {"count": 1, "names": ["README.md"]}}


def test_files_of_documentation_are_data(tmp_path: Path) -> None:
    """Where no name states a split, where nothing else is there, and where somebody asks for just these."""
    folder = put(tmp_path / "source", "text", "one/code", "two/code")
    for name in ("one", "two"):
        (folder / name / "README.md").write_text(f"# {name}\n\nThis tells of {name}.\n")
        (folder / name / "code.md5").write_text(f"0123 {name}\n")
    assert "one/README.md" in names(sharded(folder, tmp_path / "shards"), "train, valid, test")
    readmes = sharded(folder, tmp_path / "shards", pattern="**/README.md")
    assert names(readmes, "train, valid, test") == ["one/README.md", "two/README.md"]
    sums = sharded(folder, tmp_path / "shards", pattern="**/*.md5")
    assert names(sums, "train, valid, test") == ["one/code.md5", "two/code.md5"]
    assert sharded(folder / "one" / "README.md", tmp_path / "shards").split_counts("train").documents == 1
    stated = put(tmp_path / "stated", "text", "train/a", "test/b")
    (stated / "train" / "README.md").write_text("of a project\n")
    assert "train/README.md" in names(sharded(stated, tmp_path / "shards", valid_percent=0), "train")


@pytest.mark.parametrize("suffix", ["tokens", "raw"])
@pytest.mark.parametrize("kind", ["wikitext", "text"])
def test_the_names_of_wikitext_state_splits(tmp_path: Path, kind: str, suffix: str) -> None:
    for split in SPLITS:
        (tmp_path / f"wiki.{split}.{suffix}").write_text(f" \n = {split} = \n \n words \n")
    corpus = sharded(tmp_path, tmp_path / "shards", kind)
    assert [names(corpus, split) for split in SPLITS] == [[f"wiki.{split}.{suffix}"] for split in SPLITS]


def test_names_that_nearly_state_a_split_are_said_to_state_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = put(tmp_path / "source", "text", "trainset", "validset", "testset")
    with caplog.at_level(logging.INFO):
        said = sharded(folder, tmp_path / "shards").manifest["splits"]
    nearly = "testset.txt and trainset.txt and validset.txt state no split"
    assert said["by"] == "cut" and any(note.startswith(nearly) for note in said["notes"])
    assert "state no split. Name files train.txt" in caplog.text
    other = put(tmp_path / "other", "text", "training", "stories")
    assert not any("state no split" in note for note in sharded(other, tmp_path / "shards").manifest["splits"]["notes"])


@each_kind
def test_an_empty_train_split_is_refused(tmp_path: Path, kind: str) -> None:
    folder = put(tmp_path / "source", kind, "valid", "test")
    with pytest.raises(ValueError, match="nothing is left for training, because everything goes to test and valid"):
        sharded(folder, tmp_path / "shards", kind)
    with pytest.raises(ValueError, match="nothing is left for training"):
        sharded(folder, tmp_path / "shards", kind, test_pattern=".")
    assert not list((tmp_path / "shards").glob("*/manifest.json"))


def test_an_empty_train_split_is_refused_where_documents_decide(tmp_path: Path) -> None:
    held_out = next(str(n) for n in range(999) if hashed_split(str(n).encode(), 5) == "test")
    (tmp_path / "all.jsonl").write_text(json.dumps({"text": held_out}))
    with pytest.raises(ValueError, match="every document fell to valid or test, so nothing is left for training"):
        sharded(tmp_path / "all.jsonl", tmp_path / "shards", "jsonl")
    assert not list((tmp_path / "shards").glob("*/manifest.json"))


@each_kind
@pytest.mark.parametrize("other", ["valid", "test"])
def test_train_and_one_other(tmp_path: Path, kind: str, other: str) -> None:
    """That one is test, and valid is taken out of train, whatever the source."""
    folder = put(tmp_path / "source", kind, other, *(f"train/{number}" for number in range(60)))
    corpus = sharded(folder, tmp_path / "shards", kind)
    assert all(corpus.split_counts(split).documents for split in SPLITS)
    assert names(corpus, "test") == [f"{other}{MAKERS[kind][0]}"]
    (note,) = corpus.manifest["splits"]["notes"]
    renamed = "valid is used as test, and " if other == "valid" else ""
    assert note == f"only train and {other} are stated: {renamed}valid is taken out of train"
    literal, empty = sharded(folder, tmp_path / "shards", kind, valid_percent=0), {"valid", "test"} - {other}
    assert literal.split_counts(other).documents and not literal.split_counts(*empty).documents
    assert literal.manifest["splits"]["notes"] == [f"{each} is empty" for each in empty]


def test_train_and_test_of_a_file_each(tmp_path: Path) -> None:
    """Then valid is the end of the one file of train."""
    folder = put(tmp_path / "source", "text", "train", "test")
    corpus = sharded(folder, tmp_path / "shards")
    assert [corpus.split_counts(split).documents for split in SPLITS] == [1, 1, 1]
    both = b"".join(corpus.iterate_originals("train")) + b"".join(corpus.iterate_originals("valid"))
    assert both == (folder / "train.txt").read_bytes() and names(corpus, "test") == ["test.txt"]


@pytest.mark.parametrize("suffix", [".tar", ".tar.xz"])
@pytest.mark.parametrize("kind", ["images", "audio"])
def test_members_of_a_tar_state_splits(tmp_path: Path, kind: str, suffix: str) -> None:
    folder = put(tmp_path / "all", kind, *(f"{split}/{number}" for split in SPLITS for number in range(4)))
    (folder / "train" / ".hidden.png").write_bytes(b"no picture")
    (folder / "readme.md").write_text("about")
    place = tmp_path / f"packed{suffix}"
    with tarfile.open(place, "w:xz" if suffix.endswith("xz") else "w") as tar:
        tar.add(folder, "all")
    plain = sharded(folder, tmp_path / "shards", kind)
    corpus = sharded(place, tmp_path / "shards", kind)
    assert documents(corpus) == documents(plain) and corpus.manifest["splits"]["by"] == "stated"
    assert names(corpus, "test")[0].startswith(f"packed{suffix}/all/test/")
    assert any(note.startswith("members of tars were left out") for note in corpus.manifest["splits"]["notes"])
    put(folder, kind, "more")
    with tarfile.open(place, "w") as tar:
        tar.add(folder, "all")
    place = place.rename(tmp_path / "packed.tar")
    with pytest.raises(ValueError, match=r"these do not: packed.tar/all/more"):
        sharded(place, tmp_path / "shards", kind)


@pytest.mark.parametrize("kind", ["text", "images", "audio"])
def test_old_files_stay_where_they_are(tmp_path: Path, kind: str) -> None:
    """When more come, when they are renamed, and whatever else they are beside."""
    folder = put(tmp_path / "source", kind, *(f"{number}" for number in range(60)))
    before = documents(sharded(folder, tmp_path / "shards", kind, cut=False, valid_percent=20))
    for path in sorted(folder.iterdir())[::3]:
        path.rename(path.with_name(f"renamed-{path.name}"))
    put(folder, kind, *(f"more/{number}" for number in range(150)))
    after = documents(sharded(folder, tmp_path / "shards", kind, valid_percent=20))
    assert set(before.values()) == set(SPLITS) and all(after[text] == split for text, split in before.items())
    assert len(after) == 150


def test_a_split_that_a_hash_made_too_large_is_said(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number}"}) for number in range(100)]
    large = next(f"{n} " * 2000 for n in range(999) if hashed_split((f"{n} " * 2000).encode(), 5) == "valid")
    (tmp_path / "all.jsonl").write_text("\n".join([*lines, json.dumps({"text": large})]))
    (note,) = sharded(tmp_path / "all.jsonl", tmp_path / "shards", "jsonl").manifest["splits"]["notes"]
    assert note.startswith("valid has 9") and "% of the bytes instead of 5 %" in note


def test_another_way_of_splitting_is_said_and_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = put(tmp_path / "source", "text", *(f"{number}" for number in range(5)))
    few = sharded(folder, tmp_path / "shards")
    assert few.manifest["splits"]["by"] == "cut" and few.manifest["splits"]["notes"] == []
    put(folder, "text", *(f"{number}" for number in range(80)))
    caplog.clear()
    many = sharded(folder, tmp_path / "shards")
    (note,) = many.manifest["splits"]["notes"]
    assert many.manifest["splits"]["by"] == "hashed"
    assert note.startswith(f"{few.folder} was split in another way (cut, now")
    assert note in caplog.text and "source.cut=true" in note
    put(folder, "text", *(f"{number}" for number in range(81)))
    assert sharded(folder, tmp_path / "shards").manifest["splits"]["notes"] == []
    kept = sharded(folder, tmp_path / "shards", cut=True)
    assert kept.manifest["splits"]["by"] == "cut"
    old = documents(few)
    assert {text: split for text, split in documents(kept).items() if text in old} == old


def test_repeated_files_are_read_once(tmp_path: Path) -> None:
    """Hard links, links, copies, and one that is compressed; what is held out stays held out."""
    folder = put(tmp_path / "source", "text", *(f"{number:02}" for number in range(60)))
    os.link(folder / "00.txt", folder / "hard.txt")
    (folder / "link.txt").symlink_to("01.txt")
    (folder / "zcopy.txt").write_bytes((folder / "02.txt").read_bytes())
    (folder / "zcopy.txt.zst").write_bytes(zstd.compress((folder / "03.txt").read_bytes()))
    corpus = sharded(folder, tmp_path / "shards")
    assert sum(corpus.split_counts(split).documents for split in SPLITS) == 60
    assert corpus.manifest["splits"]["left_out"]["repeated"]["names"] == [
        "hard.txt (the same as 00.txt)",
        "link.txt (the same as 01.txt)",
        "zcopy.txt (the same as 02.txt)",
        "zcopy.txt.zst (the same as 03.txt)",
    ]
    stated = put(tmp_path / "stated", "text", "test/a", "train/b", "train/c", "valid/d")
    (stated / "train" / "a.txt").write_bytes((stated / "test" / "a.txt").read_bytes())
    found = sharded(stated, tmp_path / "shards")
    assert names(found, "train") == ["train/b.txt", "train/c.txt"] and names(found, "test") == ["test/a.txt"]
    (stated / "train" / "a.txt").unlink()
    (stated / "train" / "a.txt.zst").write_bytes(zstd.compress((stated / "test" / "a.txt").read_bytes()))
    found = sharded(stated, tmp_path / "shards")
    assert found.manifest["splits"]["left_out"]["repeated"]["names"] == ["train/a.txt.zst (the same as test/a.txt)"]


def test_documents_of_held_out_splits_that_are_in_train_are_counted(folder: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"text {number} " * 2000}) for number in range(40)]  # of several parts
    for split, of_it in {"train": lines[:30], "valid": lines[25:35], "test": lines[35:]}.items():
        (folder / f"{split}.jsonl").write_text("\n".join(of_it))
    for workers in (1, 2):
        corpus = sharded(folder, tmp_path / f"shards{workers}", kind="jsonl", workers=workers)
        shared = [note for note in corpus.manifest["splits"]["notes"] if "the same text" in note]
        assert len(shared) == 1 and "5 of the 10 documents of valid" in shared[0]


def test_a_file_that_only_begins_like_another_is_not_the_same(tmp_path: Path) -> None:
    """Parts hold ranges of it."""
    lines = b"".join(b"line %d of a long text\n\n" % number for number in range(60_000))
    for split, end in (("train", b"one"), ("valid", b"two"), ("test", b"three")):
        (tmp_path / "source" / split).mkdir(parents=True)
        (tmp_path / "source" / split / "a.txt").write_bytes(lines + end)
    corpus = sharded(tmp_path / "source", tmp_path / "shards", megabytes=1, workers=2)
    assert not any("the same text" in note for note in corpus.manifest["splits"]["notes"])


def test_texts_that_decompress_to_nothing_are_left_out(tmp_path: Path) -> None:
    folder = put(tmp_path / "source", "text", "a", "b", "c")
    (folder / "d.txt.zst").write_bytes(zstd.compress(b""))
    corpus = sharded(folder, tmp_path / "shards")
    assert corpus.manifest["splits"]["left_out"]["empty"]["names"] == ["d.txt.zst"]
    with pytest.raises(ValueError, match="has no text: nothing is inside d.txt.zst"):
        sharded(folder / "d.txt.zst", tmp_path / "shards")


def test_every_sharding_says_which_file_went_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = put(tmp_path / "source", "text", "valid", "test", *(f"train-{number}" for number in range(5)))
    put(folder, "text", ".hidden", "__MACOSX/train")
    (folder / "train-empty.txt").touch()
    (folder / "train-0.txt.md5").write_text("0123  train-0.txt")
    for _ in range(2):  # also where it finds them finished
        caplog.clear()
        manifest = sharded(folder, tmp_path / "shards").manifest["splits"]
        assert [record.getMessage() for record in caplog.records if record.name == "data.build"] == [
            "splits: as stated by the paths",
            "  test: test.txt",
            "  train: train-0.txt, train-1.txt, train-2.txt, … (5 files)",
            "  valid: valid.txt",
            "  left out, hidden: __MACOSX/, .hidden.txt",
            "  left out, checksums: train-0.txt.md5",
            "  left out, empty: train-empty.txt",
        ]
    assert manifest["files"]["train"] == {"count": 5, "names": [f"train-{number}.txt" for number in range(5)]}


def test_a_readme_among_texts_is_pointed_at(tmp_path: Path) -> None:
    folder = put(tmp_path / "source", "text", "input")
    (folder / "README.md").write_text("# About\n\nThis is about the corpus.\n")
    (note,) = sharded(folder, tmp_path / "shards").manifest["splits"]["notes"]
    assert note == "README.md: read as texts of the corpus. Use source.pattern= to leave them out"
    alone = sharded(folder, tmp_path / "shards", pattern="*.txt")
    assert alone.manifest["splits"]["notes"] == [] and alone.split_counts("train").documents == 1


def test_shards_in_the_folder_of_the_source_are_not_read(tmp_path: Path) -> None:
    folder = put(tmp_path, "text", "train-0", "train-1")
    first = sharded(folder, tmp_path / "shards")
    again = sharded(folder, tmp_path / "shards", valid_percent=1)
    assert again.split_counts("train").documents == first.split_counts("train").documents == 2
    assert again.manifest["splits"]["left_out"] == {"made by haed": {"count": 1, "names": ["shards/"]}}
    (tmp_path / "shards" / NOTES).unlink()  # as may be done
    again = sharded(folder, tmp_path / "shards", valid_percent=2)
    assert again.split_counts("train").documents == 2


def test_the_record_is_bounded_and_counts_what_it_does_not_name() -> None:
    record = Record(files={("train",): [str(number) for number in range(LISTED + 5)]})
    listed = record.to_manifest()["files"]["train"]
    assert listed["count"] == LISTED + 5 and len(listed["names"]) == LISTED
