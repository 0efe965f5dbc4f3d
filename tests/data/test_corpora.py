"""Which corpus is meant: found by the contents of a source when sharding, and without it ever after."""

import json
import os
import shutil
from pathlib import Path

import pytest

from data.corpora import NOTES, Corpora, iterate_manifests
from data.filesystem import write_json
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from tests.data.conftest import shard_source as sharded


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "texts" / f"{split}.txt").write_bytes(f"the {split} text\n".encode() * 100)
    return tmp_path / "texts"


def asked(path: Path | str, shards: Path, **options: object) -> Corpora:
    return Corpora(SourceOptions(kind="text", path=str(path)), ChunkerOptions(**options), ShardOptions(), shards)


@pytest.mark.parametrize("notes", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "b": ["../../etc", ""]}', None])
def test_damaged_notes_break_nothing(
    texts: Path, tmp_path: Path, notes: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = sharded(texts, tmp_path / "shards")
    path = tmp_path / "shards" / NOTES
    path.unlink() if notes is None else path.write_bytes(notes)
    shutil.move(texts, tmp_path / "gone")
    assert asked(texts, tmp_path / "shards").find_last_corpus() == corpus.folder  # by the manifests
    assert asked(texts, tmp_path / "shards", k=8).find_last_corpus() is None
    shutil.move(tmp_path / "gone", texts)
    assert sharded(texts, tmp_path / "shards").folder == corpus.folder
    assert len(json.loads(path.read_text())) >= 3
    assert (f"{path} is ignored" in caplog.text) == (notes is not None)


@pytest.mark.parametrize("note", ["texts-/../../evil", "../evil-0123456789ab", [], {}, None, 5])
def test_notes_of_a_stranger_lead_nowhere(texts: Path, tmp_path: Path, note: object) -> None:
    """Though their checksum is right, which anybody can make."""
    corpus = sharded(texts, tmp_path / "shards")
    path, before = tmp_path / "shards" / NOTES, {*tmp_path.iterdir()}
    notes = json.loads(path.read_text())
    notes.pop("digest", None)
    write_json(path, {key: [note, *entry[1:]] if isinstance(note, str) else note for key, entry in notes.items()})
    (tmp_path / "shards" / "texts-").mkdir()
    assert sharded(texts, tmp_path / "shards").folder == corpus.folder
    assert {*tmp_path.iterdir()} == before


def test_notes_that_cannot_be_written_break_nothing(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "shards" / NOTES).mkdir(parents=True)
    corpus = sharded(texts, tmp_path / "shards")
    assert sharded(texts, tmp_path / "shards").folder == corpus.folder
    assert asked(texts, tmp_path / "shards").find_last_corpus() == corpus.folder


def test_the_same_size_and_time_are_not_the_same_contents(texts: Path, tmp_path: Path) -> None:
    first = sharded(texts, tmp_path / "shards")
    path = texts / "train.txt"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"text", b"TEXT"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert asked(texts, tmp_path / "shards").has_changed()
    second = sharded(texts, tmp_path / "shards")
    assert second.digest != first.digest and b"TEXT" in b"".join(second.iterate_originals("train"))


def test_the_corpus_made_last_is_found_wherever_it_and_its_source_went(
    texts: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sharded("texts", Path("shards"))
    (texts / "train.txt").write_bytes(b"another text\n" * 100)
    second = sharded("texts", Path("shards"))
    assert asked(texts, here / "shards").find_last_corpus() == here / second.folder
    (texts / "train.txt").write_bytes(b"the train text\n" * 100)
    assert sharded("texts", Path("shards")).folder == first.folder == asked("texts", Path("shards")).find_last_corpus()
    assert not asked("texts", Path("shards")).has_changed()
    shutil.rmtree(texts)
    assert not asked("texts", Path("shards")).has_changed()  # nothing to compare with
    project = here / "elsewhere" / "project"
    project.mkdir(parents=True)
    shutil.move(here / "shards", project / "shards")
    monkeypatch.chdir(project)
    assert asked("texts", Path("shards")).find_last_corpus() == first.folder
    assert asked("other", Path("shards")).find_last_corpus() is None


def test_a_source_is_unchanged_however_its_path_is_written(texts: Path, here: Path) -> None:
    """Dask, for one, is given absolute paths."""
    corpus = sharded(texts, here / "shards")
    for path in ("texts", "./texts/", f"{texts}/../texts"):
        found = asked(path, Path("shards"))
        assert found.find_last_corpus() == Path("shards") / corpus.folder.name and not found.has_changed()
    (texts / "train.txt").rename(texts / "train-2.txt")
    assert asked("texts", Path("shards")).has_changed()


def test_a_copy_of_a_source_has_the_same_digest(texts: Path, tmp_path: Path) -> None:
    """Other places and times, the same contents."""
    corpus = sharded(texts, tmp_path / "shards")
    shutil.copytree(texts, tmp_path / "copy", copy_function=shutil.copyfile)
    assert asked(tmp_path / "copy", tmp_path / "shards").folder.name == f"copy-{corpus.digest}"


def test_a_relative_path_in_another_folder_is_another_source(
    texts: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projects may share a folder of corpora."""
    other = here / "project"
    shutil.copytree(texts, other / "texts")
    (other / "texts" / "train.txt").write_bytes(b"of another project\n" * 100)
    corpus = sharded(Path("texts"), here / "shards")
    for notes in (True, False):
        if not notes:
            (here / "shards" / NOTES).unlink()
        monkeypatch.chdir(here)
        assert asked("texts", here / "shards").find_last_corpus() == corpus.folder
        monkeypatch.chdir(other)
        assert asked("texts", here / "shards").find_last_corpus() is None
    moved = here / "moved"
    moved.mkdir()
    for name in ("shards", "texts"):
        shutil.move(here / name, moved / name)
    monkeypatch.chdir(moved)
    assert asked("texts", moved / "shards").find_last_corpus() == moved / "shards" / corpus.folder.name


def test_only_a_corpus_of_the_same_place_was_split_in_another_way(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "texts").mkdir(parents=True)
    (tmp_path / "a" / "texts" / "one.txt").write_bytes(b"a text to cut\n" * 500)
    stated = shutil.copytree(texts, tmp_path / "b" / "texts")
    for name in "ab":
        monkeypatch.chdir(tmp_path / name)
        corpus = sharded(Path("texts"), tmp_path / "shards")
        assert not any("was split in another way" in note for note in corpus.manifest["splits"]["notes"])
    for name in ("valid.txt", "test.txt"):
        (stated / name).unlink()
    (stated / "train.txt").rename(stated / "one.txt")
    corpus = sharded(Path("texts"), tmp_path / "shards")
    assert any("was split in another way (stated, now cut)" in note for note in corpus.manifest["splits"]["notes"])


def test_a_corpus_that_is_removed_while_others_are_listed_is_passed_over(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = sharded(texts, tmp_path / "shards")
    gone = tmp_path / "shards" / "gone" / "manifest.json"
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [gone, *listed(path, pattern)])
    assert [folder for folder, _ in iterate_manifests(tmp_path / "shards")] == [corpus.folder]


def test_a_folder_in_the_place_of_a_shard_is_named(texts: Path, tmp_path: Path) -> None:
    corpus = sharded(texts, tmp_path / "shards")
    shard = corpus.folder / "valid-00000.tar"
    shard.unlink()
    shard.mkdir()
    with pytest.raises(ValueError, match="valid-00000.tar is a folder, where a shard belongs. Remove it"):
        sharded(texts, tmp_path / "shards")


def test_it_is_said_that_a_large_source_is_read_once(
    texts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.sources.source._MANY_FILES", 2)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert asked(texts, tmp_path / "shards").folder.name.startswith("texts-")
    assert caplog.messages == ["reading the source once, to notice changes later: 3 files, 0.0 GB"]
