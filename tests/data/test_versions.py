"""The digest covers all that decides the bytes of shards: versions of others' code, and files that change while they are read."""

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data.build import shard
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.parts import Part
from tests.data.conftest import add_package, picture, shard_source

TEXT = b"".join(b"line %d of a text\n" % number for number in range(40_000))


@pytest.fixture
def texts(folder: Path) -> Path:
    """Two parts, of a file each."""
    for number in range(2):
        (folder / f"train-{number}.txt").write_bytes(b"%d" % number + TEXT)
    return folder


sharded = partial(shard_source, megabytes=1)


def rewritten(path: Path, content: bytes) -> None:
    """At equal size, with the times of before."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "changes after it was read": ("train-0.txt", lambda path: rewritten(path, path.read_bytes()[::-1])),
    "changes before it is read": ("train-1.txt", lambda path: rewritten(path, path.read_bytes()[::-1])),
    "shrinks": ("train-1.txt", lambda path: path.write_bytes(b"short")),
    "is removed": ("train-1.txt", Path.unlink),
    "is removed with all others": ("", shutil.rmtree),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_changes_while_sharding_is_named_and_nothing_is_kept(
    texts: Path, tmp_path: Path, case: str
) -> None:
    name, change = CHANGES[case]

    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        first, second = sorted(parts, key=lambda part: part.folder)
        write(first)
        change(texts / name)
        write(second)

    with pytest.raises(ValueError, match=f"^{f'{name} in ' if name else ''}{texts} changed or was removed"):
        sharded(texts, tmp_path / "shards", mapper=mapper)
    assert not [each for each in (tmp_path / "shards").iterdir() if each.is_dir()]
    if texts.exists():
        found = list(sharded(texts, tmp_path / "shards").iterate_originals("train"))
        assert found == [each.read_bytes() for each in sorted(texts.iterdir())]


def test_a_single_file_that_changes_while_sharding_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(TEXT)

    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        rewritten(path, TEXT[::-1])

    with pytest.raises(ValueError, match=f"^{path} changed or was removed"):
        sharded(path, tmp_path / "shards", mapper=mapper)


def test_files_that_are_only_touched_are_the_same(texts: Path, tmp_path: Path) -> None:
    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        for part in parts:
            write(part)
        os.utime(texts / "train-0.txt")
        os.link(texts / "train-1.txt", tmp_path / "a backup")

    assert sharded(texts, tmp_path / "shards", mapper=mapper).split_counts("train").documents == 2


def test_parts_of_an_interrupted_run_that_read_something_else_are_made_anew(texts: Path, tmp_path: Path) -> None:
    """A file changes, its part is written, a kill, and then the file is as before: so the corpus has the same digest."""
    path = texts / "train-0.txt"
    whole = path.read_bytes()

    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        rewritten(path, whole[::-1])
        for part in parts:
            write(part)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sharded(texts, tmp_path / "shards", mapper=mapper)
    rewritten(path, whole)
    assert next(iter(sharded(texts, tmp_path / "shards").iterate_originals("train"))) == whole


MODULE = """
import numpy as np
from data.chunkers import Chunker
from data.sources.source import Input, Piece, Source

class Commas(Chunker):
    def begins(self, text, starts):
        return np.frombuffer(text, np.uint8) == ord(",")

class Words(Source):
    files = []
    def inputs(self, size, align):
        yield Input("words", "", 100)
    def read(self, item):
        yield Piece("words", "train", b"one,two,three" * 9)
"""


def test_another_version_of_ones_own_source_or_chunker_is_another_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))

    def install(version: str, module: str) -> Corpus:
        for old in place.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (place / "commas_of_mine.py").write_text(module)
        points = "[haed.sources]\nmine = commas_of_mine:Words\n[haed.chunkers]\nmine = commas_of_mine:Commas\n"
        add_package(place, "commas", points, version)
        sys.modules.pop("commas_of_mine", None)
        return shard(SourceOptions(kind="mine"), ChunkerOptions(kind="mine"), ShardOptions(), tmp_path / "shards")

    first = install("1", MODULE)
    assert install("1", MODULE).folder == first.folder
    others = [install("2", MODULE), install("2", MODULE + "# edited in place\n")]
    assert len({corpus.folder for corpus in (first, *others)}) == 3
    said = first.manifest["versions"]
    assert said["haed.sources:mine"].startswith("commas 1, commas_of_mine:Words, ")
    assert said["haed.chunkers:mine"].startswith("commas 1, commas_of_mine:Commas, ")


def test_two_packages_with_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        add_package(tmp_path, name, f"[haed.sources]\nmine = {name}:Source\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'mine' is in more than one package: .*:Source, .*:Source"):
        shard(SourceOptions(kind="mine"), ChunkerOptions(), ShardOptions(), tmp_path / "shards")


@pytest.mark.parametrize("what", ["pillow", "jpeg"])
def test_another_decoder_of_pictures_is_another_corpus(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (folder / "train.jpg").write_bytes(picture("JPEG"))
    made = partial(shard_source, folder, tmp_path / "shards", "images", "pixels")
    first = made()
    assert set(first.manifest["versions"]) == {"pillow", "jpeg"}
    if what == "pillow":
        monkeypatch.setattr("PIL.__version__", "99.0")
    else:
        monkeypatch.setattr("PIL.features.version", lambda feature: "9z")
    other = made()
    assert other.folder != first.folder and other.manifest["versions"] != first.manifest["versions"]
    (folder / "train.jpg").unlink()
    np.savez(folder / "train.npz", data=np.zeros((3, 48), np.uint8))  # which nobody decodes
    assert made().manifest["versions"] == {}
