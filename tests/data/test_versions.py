"""The digest covers all that decides the bytes of shards: versions of others' code, and files that change while they are read."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.build import shard
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.parts import Part
from tests.data.conftest import shard_source

TEXT = b"".join(b"line %d of a text\n" % number for number in range(40_000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts, of a file each."""
    place = tmp_path / "source"
    place.mkdir()
    for number in range(2):
        (place / f"train-{number}.txt").write_bytes(b"%d" % number + TEXT)
    return place


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
    folder: Path, tmp_path: Path, case: str
) -> None:
    name, change = CHANGES[case]

    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        first, second = sorted(parts, key=lambda part: part.folder)
        write(first)
        change(folder / name)
        write(second)

    with pytest.raises(ValueError, match=f"^{f'{name} in ' if name else ''}{folder} changed or was removed"):
        sharded(folder, tmp_path / "shards", mapper=mapper)
    assert not [each for each in (tmp_path / "shards").iterdir() if each.is_dir()]
    if folder.exists():
        assert b"".join(sharded(folder, tmp_path / "shards").iterate_originals("train")) == b"".join(
            each.read_bytes() for each in sorted(folder.iterdir())
        )


def test_files_that_are_only_touched_are_the_same(folder: Path, tmp_path: Path) -> None:
    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        for part in parts:
            write(part)
        os.utime(folder / "train-0.txt")
        os.link(folder / "train-1.txt", tmp_path / "a backup")

    assert sharded(folder, tmp_path / "shards", mapper=mapper).split_counts("train").documents == 2


def test_parts_of_an_interrupted_run_that_read_something_else_are_made_anew(folder: Path, tmp_path: Path) -> None:
    """A file changes, its part is written, a kill, and then the file is as before: so the corpus has the same digest."""
    path = folder / "train-0.txt"
    whole = path.read_bytes()

    def mapper(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        rewritten(path, whole[::-1])
        for part in parts:
            write(part)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sharded(folder, tmp_path / "shards", mapper=mapper)
    rewritten(path, whole)
    assert next(iter(sharded(folder, tmp_path / "shards").iterate_originals("train"))) == whole


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
        info = place / f"commas-{version}.dist-info"
        info.mkdir()
        (place / "commas_of_mine.py").write_text(module)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: commas\nVersion: {version}\n")
        points = "[haed.sources]\nmine = commas_of_mine:Words\n[haed.chunkers]\nmine = commas_of_mine:Commas\n"
        (info / "entry_points.txt").write_text(points)
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
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[haed.sources]\nmine = {name}:Source\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="'mine' is in more than one package: .*:Source, .*:Source"):
        shard(SourceOptions(kind="mine"), ChunkerOptions(), ShardOptions(), tmp_path / "shards")


@pytest.mark.parametrize("what", ["pillow", "jpeg"])
def test_another_decoder_of_pictures_is_another_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    place = tmp_path / "pictures"
    place.mkdir()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(place / "train.jpg")
    made = partial(shard_source, place, tmp_path / "shards", "images", "pixels")
    first = made()
    assert set(first.manifest["versions"]) == {"pillow", "jpeg"}
    if what == "pillow":
        monkeypatch.setattr("PIL.__version__", "99.0")
    else:
        monkeypatch.setattr("PIL.features.version", lambda feature: "9z")
    other = made()
    assert other.folder != first.folder and other.manifest["versions"] != first.manifest["versions"]
    (place / "train.jpg").unlink()
    np.savez(place / "train.npz", data=np.zeros((3, 48), np.uint8))  # which nobody decodes
    assert json.loads((made().folder / "manifest.json").read_text())["versions"] == {}
