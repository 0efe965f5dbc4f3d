"""Shards that went missing are made anew, two shardings at once share the work, and what a kill left is cleaned."""

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from data import parts
from data.build import find_damaged_shards
from data.corpus import Corpus
from data.filesystem import file_lock, write_json
from data.options import ShardOptions
from data.parts import write_part
from data.sources.source import Input, Piece
from data.sources.text import TextSource
from tests.data.conftest import shard_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three parts, and two small files in the first and the last."""
    place = tmp_path / "texts"
    place.mkdir()
    for number in range(3):
        (place / f"train-{number}.txt").write_bytes(b"some text of number %d\n" % number * 30_000)
    for split in ("valid", "test"):
        (place / f"{split}.txt").write_text(f"some text for {split}\n" * 10)
    return place


sharded = partial(shard_source, megabytes=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_damaged_corpus_of_somebody_else_is_named_with_what_to_do(source: Path, tmp_path: Path) -> None:
    corpus = sharded(source, tmp_path / "shards")
    (corpus.folder / "train-00001.tar").unlink()
    for folder in (corpus.folder, tmp_path / "shards"):
        folder.chmod(0o555)
    # Root may write anywhere, unless it gives these rights up.
    plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"] if os.geteuid() == 0 else []
    if plain and not shutil.which("setpriv"):
        pytest.skip("this is root, and there is no setpriv")
    command = [*plain, sys.executable, "-m", "pipeline", "shard", "source.kind=text", f"source.path={source}"]
    command += [f"shards_dir={tmp_path / 'shards'}", "shard.megabytes=1"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for folder in (tmp_path / "shards", corpus.folder):
        folder.chmod(0o755)
    assert f"{corpus.folder} has missing or damaged files, and this user may not write" in told.stderr


def test_only_what_is_missing_or_damaged_is_made_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = sharded(source, tmp_path / "shards")
    whole = contents(corpus.folder)
    (corpus.folder / "train-00001.tar").unlink()
    os.truncate(corpus.folder / "valid-00000.tar", 1000)
    assert find_damaged_shards(corpus, ShardOptions()) == ["train-00001.tar", "valid-00000.tar"]
    written: list[Path] = []
    write = parts._write_shards
    monkeypatch.setattr(parts, "_write_shards", lambda part, to: (written.append(part.folder), write(part, to)))
    sharded(source, tmp_path / "shards")
    assert contents(corpus.folder) == whole and len(written) == 2
    written.clear()
    sharded(source, tmp_path / "shards")
    assert not written


def test_a_finished_corpus_is_found_where_nothing_can_be_written(source: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    folder = sharded(source, shards).folder
    for name in (".sources.json.lock", f".{folder.name}.lock"):
        (shards / name).mkdir()  # which holds for root as well
    assert sharded(source, shards).folder == folder


def test_other_bytes_of_the_same_size_are_found_when_asked_for(source: Path, tmp_path: Path) -> None:
    corpus = sharded(source, tmp_path / "shards")
    path = corpus.folder / "train-00002.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + b"x" + whole[5001:])
    with pytest.raises(ValueError, match="is damaged .*`haed shard shard.verify=true`"):
        list(corpus.iterate_originals("train"))
    sharded(source, tmp_path / "shards")
    assert path.read_bytes() != whole
    sharded(source, tmp_path / "shards", verify=True)
    assert path.read_bytes() == whole


def test_without_its_source_a_corpus_is_used_and_not_mended(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = sharded(source, tmp_path / "shards")
    shutil.rmtree(source)
    assert sharded(source, tmp_path / "shards").digest == corpus.digest
    assert "no such file or folder. The shards made from it are complete" in caplog.text
    (corpus.folder / "train-00001.tar").unlink()
    said = r"damaged files that cannot be made again \(train-00001\.tar.*no such file or folder"
    with pytest.raises(FileNotFoundError, match=said):
        sharded(source, tmp_path / "shards")
    source.mkdir()
    (source / "train.txt").write_bytes(b"another text\n" * 1000)
    other = sharded(source, tmp_path / "shards")
    assert other.digest != corpus.digest
    assert "has missing or damaged files: train-00001.tar. They cannot be made again, because the source" in caplog.text


def test_shards_that_come_out_otherwise_are_refused(source: Path, tmp_path: Path) -> None:
    corpus = sharded(source, tmp_path / "shards")
    manifest = json.loads((corpus.folder / "manifest.json").read_text())
    manifest["shards"][1]["sha256"] = "0" * 64
    write_json(corpus.folder / "manifest.json", manifest)
    (corpus.folder / "train-00001.tar").unlink()
    with pytest.raises(ValueError, match="train-00001.tar differs from manifest.json"):
        sharded(source, tmp_path / "shards")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (None, "{", "is damaged: .*. Delete manifest.json and run `haed shard` again"),
        ("format", 99, "has format 99, not 3. Run `haed shard` again"),
        ("format", "new", "has format 'new'"),
        ("digest", "0" * 12, "belongs to another corpus: 000000000000"),
        ("chunker", {"kind": "words", "k": 8}, "belongs to another corpus: .*k=8.*. Delete manifest.json"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_another_format_or_corpus_is_refused(
    source: Path, tmp_path: Path, key: str | None, value: object, said: str
) -> None:
    corpus = sharded(source, tmp_path / "shards")
    whole, path = contents(corpus.folder), corpus.folder / "manifest.json"
    path.write_text("{") if key is None else write_json(path, json.loads(path.read_text()) | {key: value})
    with pytest.raises(ValueError, match=said):
        sharded(source, tmp_path / "shards")
    if key == "format":
        with pytest.raises(ValueError, match=said):
            Corpus.open(corpus.folder)
    path.unlink()  # as the message advises
    assert contents(sharded(source, tmp_path / "shards").folder) == whole


CHILD = """
import logging, sys
from pathlib import Path
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.build import shard
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    source = SourceOptions(kind=sys.argv[1], path=sys.argv[2])
    shard(source, ChunkerOptions(), ShardOptions(workers=2, megabytes=1), Path(sys.argv[3]))
"""


def child(tmp_path: Path, kind: str, path: str) -> "subprocess.Popen[bytes]":
    (tmp_path / "child.py").write_text(CHILD)
    return subprocess.Popen(
        [sys.executable, str(tmp_path / "child.py"), kind, path, str(tmp_path / "shards")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_second_of_two_shardings_waits_and_finds_it_finished(source: Path, tmp_path: Path) -> None:
    whole = sharded(source, tmp_path / "alone")
    (tmp_path / "shards").mkdir()
    lock = tmp_path / "shards" / f".{whole.folder.name}.lock"
    with file_lock(lock):  # so that both meet it
        children = [child(tmp_path, "text", str(source)) for _ in range(2)]
        said = [each.stderr.readline().decode() for each in children if each.stderr]
        assert all(f"is being sharded by process {os.getpid()} on " in line for line in said)
    for each in children:
        _, left = each.communicate()
        assert each.returncode == 0, left
    assert contents(tmp_path / "shards" / whole.folder.name) == contents(whole.folder)
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {whole.folder.name, ".sources.json"}


def test_a_part_that_two_write_is_whole(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a cluster may go on writing after the process that asked for it was killed."""
    write = parts._write_shards
    met: list[Path] = []

    def meet(part: parts.Part, folder: Path) -> None:
        write(part, folder)
        if not met:
            met.append(folder)
            write_part(part)  # somebody else, in the meantime

    monkeypatch.setattr(parts, "_write_shards", meet)
    corpus = sharded(source, tmp_path / "shards")
    assert met and not find_damaged_shards(corpus, ShardOptions(verify=True))
    assert not (corpus.folder / "parts").exists()


def test_what_a_kill_leaves_is_cleaned_by_the_next(source: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    killed, living = (child(tmp_path, "stdin", "-") for _ in range(2))
    for each in (killed, living):
        assert each.stdin is not None
        each.stdin.write(b"a text\n" * 300_000)
        each.stdin.flush()
    while sum(path.stat().st_size > 0 for path in shards.glob(".stdin-*/stdin")) < 2:
        assert killed.poll() is None and living.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    corpus = sharded(source, shards)
    for name in (corpus.folder.name, "abandoned-0123456789ab"):
        (shards / f".{name}.lock").write_text("process 1 on nowhere")
    (shards / "abandoned-0123456789ab/parts/00000.1234.partial").mkdir(parents=True)
    (shards / "abandoned-0123456789ab/parts/00001").mkdir()
    (corpus.folder / ".manifest.json.1.partial").write_text("half")
    (corpus.folder / "train-00001.tar").unlink()
    sharded(source, shards)
    assert len(list(shards.glob(".stdin-*"))) == 1 and not list(shards.rglob("*.partial"))
    assert (shards / "abandoned-0123456789ab/parts/00001").is_dir()  # whoever goes on finds it
    _, said = living.communicate()  # its copy was left alone
    assert living.returncode == 0, said
    assert not list(shards.glob(".stdin-*")) and not list(shards.glob(".*.lock"))


def test_statistics_and_folders_are_on_the_disk_before_a_part_is_called_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(a: Path, b: Path) -> None:
        for path in (*a.iterdir(), a):
            beside = path.with_name(f".{path.name}")
            assert any(each.startswith((str(path), str(beside))) for each in synced), path
        rename(a, b)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", renamed)
    corpus = sharded(source, tmp_path / "shards")
    assert str(corpus.folder / "parts") in synced and str(corpus.folder) in synced
    assert any("train-statistics.npz" in path for path in synced)


def test_the_largest_part_is_begun_first(source: Path, tmp_path: Path) -> None:
    """A large compressed file is one part, whatever its size: others are written beside it, none waits for it."""
    noise = np.random.default_rng(0).integers(97, 123, 900_000).astype(np.uint8).tobytes()
    (source / "train-2.txt.gz").write_bytes(gzip.compress(noise))
    begun: list[tuple[str, ...]] = []

    def mapped(write: Callable[[parts.Part], None], given: tuple[parts.Part, ...]) -> None:
        begun.extend(tuple(item.name for item in part.inputs) for part in given)
        for part in given:
            write(part)

    sharded(source, tmp_path / "shards", mapper=mapped)
    assert len(begun) > 2 and begun[0] == ("train-2.txt.gz",)


class Flaky(TextSource):
    """Fails twice."""

    failures: list[OSError] = []

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        if self.failures:
            raise self.failures.pop()
        return super().read(item)


def test_a_part_is_tried_again_after_errors_that_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.txt").write_bytes(b"some text\n" * 100)
    monkeypatch.setattr(parts, "make_source", Flaky)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    Flaky.failures = [OSError(errno.EIO, "input/output error"), ConnectionResetError(errno.ECONNRESET, "reset")]
    assert sharded(tmp_path / "train.txt", tmp_path / "one").split_counts("train").documents == 1
    assert pauses == [1.0, 4.0]
    for final in (OSError(errno.ENOSPC, "no space"), FileNotFoundError(errno.ENOENT, "gone")):
        Flaky.failures = [final]
        with pytest.raises(OSError, match=str(final.strerror)):
            sharded(tmp_path / "train.txt", tmp_path / "two")
        assert len(pauses) == 2 and not list((tmp_path / "two").rglob("*.partial"))
