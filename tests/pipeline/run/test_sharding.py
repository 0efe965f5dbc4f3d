"""The stage `shard` from outside: standard input, Dask, and runs on corpora of every making."""

import errno
import gzip
import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import chdir, suppress
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.filesystem import FolderLostError, acquire_lock
from data.options import ChunkerOptions, SourceOptions
from data.parts import Part, write_part
from pipeline.cli import main
from pipeline.config import Options, load_options
from pipeline.run.sharding import (
    ClusterError,
    RemoteWrite,
    explain_dask_errors,
    find_versions,
    open_dask_client,
    open_shards,
    shard_source,
)
from pipeline.training.stages import pretrain, train
from tests.conftest import TINY
from tests.pipeline.conftest import CommandLine

ROOT = Path(__file__).resolve().parents[3]


def contents(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.folder.glob("*.tar")}


def command(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "pipeline", *arguments], input=given, capture_output=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["source.kind=stdin", "source.kind=text source.path=-"])
def test_standard_input(
    tiny: list[str],
    source: str,
    haed: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = [*(item for item in tiny if not item.startswith("source.")), *source.split(), "name=piped"]
    text = b"".join(b"paragraph %d\nof a text\n\n" % number for number in range(3000))
    assert "standard input was not sharded" in haed.error("train", *settings)
    done = command("shard", *settings, "source.pattern=*.txt", "--json", given=text)  # no pattern is of a stream
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout.splitlines()[-1])["folder"])
    haed.output("train", *settings)  # finds what was piped before
    corpus = Corpus.open(folder)
    splits = [b"".join(corpus.iterate_originals(split)) for split in ("train", "valid", "test")]
    assert b"".join(splits) == text and corpus.manifest["source"]["path"] == "-"
    assert not list(folder.parent.glob(".stdin*"))

    def pipe(content: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    pipe(b"")
    assert haed.json("shard", *settings)["folder"] == str(folder)  # a trained run keeps its corpus
    assert "standard input was empty, so the corpus that was piped in before is taken" in caplog.text
    pictures = ["source.kind=images", "source.path=-", "chunker.kind=fixed"]
    for content, words, refusal in (
        (b"", [], "standard input was empty. Pipe a text to it"),
        (gzip.compress(text), [], "decompress it in the pipe: `… | gzip -dc | haed …`"),
        (text, pictures, "Only texts can be piped in"),
    ):
        pipe(content)
        assert refusal in haed.error("shard", *settings, "name=another", *words)


@pytest.mark.slow
def test_dask(options: Options, tmp_path: Path) -> None:
    """Local clusters of real processes: the same bytes as without."""
    distributed = pytest.importorskip("distributed")
    options.shard.megabytes, options.shard.workers = 1, 2
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(3):
        (source / f"train-{number}.txt").write_bytes(b"some text of number %d\n" % number * 30_000)
    options.source.path = str(source)
    alone = contents(shard_source(options))
    options.launcher.dask, options.shards_dir = "local", str(tmp_path / "local")
    with socket.socket() as other:
        with suppress(OSError):  # somebody's cluster has the port of Dask's board, or else this test
            other.bind(("127.0.0.1", 8787))
            other.listen()
        assert contents(shard_source(options)) == alone
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    ) as cluster:
        options.launcher.dask, options.shards_dir = cluster.scheduler_address, str(tmp_path / "address")
        assert contents(shard_source(options)) == alone and len(alone) > 2
        options.launcher.dask, options.shards_dir = cluster.workers[0].worker_address, str(tmp_path / "worker")
        with pytest.raises(OSError, match=r"^launcher\.dask=.* is a worker of Dask. Give the address of its scheduler"):
            shard_source(options)


@pytest.mark.parametrize("path", ["texts", "texts/*.txt", "texts/{train,valid}-*.txt"])
def test_workers_of_dask_read_the_files_that_are_seen_from_here(path: str, options: Options, here: Path) -> None:
    """They have another working directory, where there may be files of the same names."""
    (here / "texts").mkdir()
    for split in ("train", "valid"):
        (here / "texts" / f"{split}-1.txt").write_text(f"some text of {split}\n" * 99)
    options.source.path, options.launcher.dask = path, "none:1"
    read = list[str]()

    def write_here(write: Callable[[Part], None], parts: tuple[Part, ...]) -> None:
        for part in parts:
            read.extend(item.path for item in part.inputs)
            write(part)

    shard_source(options, write_here)
    assert {*read} == {str(here / "texts" / f"{split}-1.txt") for split in ("train", "valid")}


def test_a_cluster_of_dask_that_is_not_there_or_is_lost_is_named_by_its_option() -> None:
    """A server that says nothing is none either: one of web pages does so, such as that of Dask's board."""
    pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}), socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for there, why in (("127.0.0.1:1", ""), (address, r" \(.*(timed out after 2|in 1) s\)")):
            said = rf"^launcher\.dask={there}: no scheduler of Dask answers there{why}"
            with pytest.raises(OSError, match=said), open_dask_client(there, 1):
                pass
    with pytest.raises(ClusterError, match=r"^launcher.dask=h:1: the cluster was lost \(CancelledError\)"):
        with explain_dask_errors("h:1"):
            raise CancelledError
    with pytest.raises(ValueError, match="of the source"), explain_dask_errors("h:1"):
        raise ValueError("of the source")


def test_a_worker_of_dask_that_lacks_what_is_here_is_told(tmp_path: Path) -> None:
    part = Part(tmp_path / "corpus" / "parts" / "00000", SourceOptions(), ChunkerOptions(), None, 1, ())
    for versions, why in (({"haed": "0.0.1"}, "haed is .*, not 0.0.1"), ({"none-such": "1"}, "none-such")):
        call = pickle.dumps(RemoteWrite(versions, write_part, part))
        with (
            pytest.raises(ClusterError, match=f"a worker has other packages .*{why}"),
            explain_dask_errors("h:1", part),
        ):
            pickle.loads(call)
    assert not list(tmp_path.iterdir())
    call = pickle.dumps(RemoteWrite(find_versions(part.source), write_part, part))
    with pytest.raises(FolderLostError), explain_dask_errors("h:1", part):  # it is not here either
        pickle.loads(call)
    part.folder.parent.mkdir(parents=True)
    for error, path in (
        (FolderLostError("as a worker sees it"), part.folder.parent),
        (FileNotFoundError(errno.ENOENT, "as a worker sees it", str(tmp_path)), tmp_path),
    ):
        with pytest.raises(ClusterError, match=f"does not find {path}, "), explain_dask_errors("h:1", part):
            raise error


def test_an_existing_corpus_as_source(options: Options, tmp_path: Path) -> None:
    made = open_shards(options)
    options.source.kind, options.source.path, options.shards_dir = "shards", str(made.folder), str(tmp_path / "none")
    assert shard_source(options).digest == made.digest
    pretrain(options)
    options.chunker.k = 8
    with pytest.raises(ValueError, match="was cut with chunker.k=12, not 8. Set chunker.k=12"):
        open_shards(options)
    options.source.path = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is not a sharded corpus"):
        open_shards(options)


def test_a_run_with_a_fitted_chunker_needs_no_corpus_later(tiny: list[str], tmp_path: Path) -> None:
    options = load_options("quickstart", [*tiny, "name=fitted", "chunker.kind=entropy", "chunker.k=16"])
    corpus = shard_source(options)
    pretrain(options)
    corpus.folder.rename(tmp_path / "elsewhere")
    (tmp_path / "some.txt").write_bytes(b"def f(x):\n    return x\n")
    assert main(["evaluate", str(tmp_path / "runs" / "fitted"), "--text", str(tmp_path / "some.txt")]) == 0


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a text of its own, shards of it, and a run that stopped half-way."""
    place = tmp_path_factory.mktemp("halfway")
    (place / "texts").mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (place / "texts" / f"{split}.txt").write_bytes(f"the {split} text of it\n".encode() * 600)
    with chdir(place):
        assert main(["shard", *OWN]) == 0 and main(["pretrain", *OWN, "pretrain.steps=3"]) == 0
    return place


@pytest.fixture
def project(halfway: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, the folder to work in."""
    place = tmp_path / "project"
    shutil.copytree(halfway, place, copy_function=shutil.copy2)
    monkeypatch.chdir(place)
    return place


OWN = [*TINY, "name=own", "source.kind=text", "source.path=texts"]


@pytest.mark.slow
def test_only_shard_looks_at_the_source(project: Path, haed: CommandLine) -> None:
    (project / "texts").rename(project / "unmounted")
    for stage in ("pretrain", "finetune"):  # goes on, and begins
        assert main([stage, *OWN]) == 0
    assert main(["train", *OWN, "name=new"]) == 0
    assert main(["evaluate", "own", "evaluate.baselines=false"]) == 0
    assert main(["shard", *OWN]) == 0
    assert "source.path=texts: no such file or folder" in haed.error("shard", *OWN, "chunker.k=8")


def test_a_run_keeps_its_corpus_when_its_source_changes(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = json.loads((project / "runs/own/corpus.json").read_text())
    (project / "texts/train.txt").write_bytes(b"another text altogether\n" * 600)
    assert main(["train", *OWN, "name=early"]) == 0  # the shards there are, and what is known of their source
    assert "texts was changed or copied" in caplog.text
    assert main(["pretrain", *OWN]) == 0
    assert "runs/own keeps its corpus" in caplog.text
    assert main(["shard", *OWN]) == 0
    caplog.clear()
    assert main(["pretrain", *OWN, "pretrain.steps=8"]) == 0 and "Use another name=" in caplog.text
    assert main(["train", *OWN, "name=late"]) == 0
    own, early, late = (
        json.loads((project / f"runs/{name}/corpus.json").read_text())["digest"] for name in ("own", "early", "late")
    )
    assert own == early == before["digest"] != late


def test_a_project_that_was_moved_finds_its_shards(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = project.rename(project.with_name("moved"))
    monkeypatch.chdir(moved.parent)
    assert main(["index", "moved/runs/own"]) == 0
    assert main(["shard", "moved/runs/own"]) == 0  # whose source.path is relative to another folder
    monkeypatch.chdir(moved)
    assert main(["pretrain", *OWN]) == 0 and main(["index", "own"]) == 0
    (moved / "shards").rename(moved / "lost")
    with pytest.raises(FileNotFoundError, match="Put them back, or make them again"):
        main(["index", "own", "--debug"])


@pytest.mark.slow
def test_loader_workers_change_no_weight_and_name_a_damaged_shard(options: Options) -> None:
    def train_with(workers: int) -> bytes:
        options.loader.workers, options.name = workers, f"workers-{workers}"
        return (Path(train(options).checkpoint) / "model.safetensors").read_bytes()

    options.train.steps = 8
    assert train_with(2) == train_with(0)
    corpus = open_shards(options)
    path = corpus.folder / corpus.shards_of("train")[0].file
    os.truncate(path, path.stat().st_size - 2000)
    options.train.steps = 16
    with pytest.raises(ValueError, match=r"train-00000.tar is damaged at byte [\d,]+"):
        train_with(2)


@pytest.mark.slow
def test_ctrl_c_ends_sharding_at_once_and_it_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    words = np.random.default_rng(0).choice(np.frombuffer(b"abcdef  \n", np.uint8), 2_000_000).tobytes()
    for number in range(8):
        (source / f"train-{number}.txt").write_bytes(b"%d " % number + words)
    arguments = ["source.kind=text", f"source.path={source}", f"shards_dir={tmp_path / 'shards'}", "shard.megabytes=2"]
    child = subprocess.Popen(
        ["nice", "-n19", sys.executable, "-m", "pipeline", "shard", *arguments],  # so that this test is quicker
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    while not list(tmp_path.glob("shards/*/parts/?????/part.json")) and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(2)
    _, said = child.communicate()
    assert child.returncode == 130 and b"Run the same command to resume" in said
    assert list(tmp_path.glob("shards/*/parts/?????/part.json"))
    assert command("shard", *arguments).returncode == 0


def test_what_a_kill_left_in_a_run_is_cleaned_by_the_next(options: Options) -> None:
    run = Path(options.runs_dir) / options.name
    pretrain(options)
    left, living = run / "index/chunks/.vectors.faiss.1.partial", run / ".report.html.2.partial"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    with acquire_lock(living):  # as its writer does
        options.pretrain.steps = 8
        pretrain(options)
        assert living.exists() and not left.exists()
