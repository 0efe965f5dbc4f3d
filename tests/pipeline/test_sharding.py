"""The stage `shard` from outside: standard input, Dask, and runs on corpora of every making."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from pipeline.cli import main
from pipeline.config import load
from pipeline.options import Options
from pipeline.sharding import open_shards, shard
from pipeline.training import pretrain, train

ROOT = Path(__file__).resolve().parents[2]


def contents(corpus: Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in corpus.folder.glob("*.tar")}


def command(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], input=given, capture_output=True, cwd=ROOT, timeout=120
    )


@pytest.mark.parametrize("source", [["source.kind=stdin"], ["source.kind=text", "source.path=-"]])
def test_standard_input(tiny: list[str], source: list[str]) -> None:
    settings = [*(item for item in tiny if not item.startswith("source.")), *source, "name=piped"]
    text = b"".join(b"paragraph %d\nof a text\n\n" % number for number in range(3000))
    early = command("train", *settings)
    assert early.returncode == 1 and b"nothing was sharded from standard input" in early.stderr
    done = command("shard", *settings, "--json", given=text)
    assert done.returncode == 0, done.stderr
    folder = json.loads(done.stdout.splitlines()[-1])["folder"]
    assert b"".join(command("cat", folder, "--split", s).stdout for s in ("train", "valid", "test")) == text
    assert command("train", *settings).returncode == 0  # finds what was piped before
    assert not list(Path(folder).parent.glob(".stdin*"))
    assert json.loads((Path(folder) / "manifest.json").read_text())["source"]["path"] == "-"
    empty = command("shard", *settings)
    assert empty.returncode == 1 and b"standard input was empty" in empty.stderr


def test_dask(options: Options, tmp_path: Path) -> None:
    """Local clusters of real processes: the same bytes as without."""
    distributed = pytest.importorskip("distributed")
    options.shard.megabytes, options.shard.workers = 1, 2
    source = tmp_path / "texts"
    source.mkdir()
    for number in range(3):
        (source / f"train-{number}.txt").write_bytes(b"some text of number %d\n" % number * 30_000)
    options.source.path = str(source)
    alone = contents(shard(options))
    options.launcher.dask, options.shards_dir = "local", str(tmp_path / "local")
    assert contents(shard(options)) == alone
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
    ) as cluster:
        options.launcher.dask, options.shards_dir = cluster.scheduler_address, str(tmp_path / "address")
        assert contents(shard(options)) == alone and len(alone) > 2


def test_an_existing_corpus_as_source(options: Options, tmp_path: Path) -> None:
    made = open_shards(options)
    options.source.kind, options.source.path, options.shards_dir = "shards", str(made.folder), str(tmp_path / "none")
    assert shard(options).digest == made.digest
    pretrain(options)
    options.chunker.k = 8
    with pytest.raises(ValueError, match="was cut with chunker.k=12, not 8: set it so"):
        open_shards(options)
    options.source.path = str(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="is not a sharded corpus"):
        open_shards(options)


def test_a_run_with_a_fitted_chunker_needs_no_corpus_later(tiny: list[str], tmp_path: Path) -> None:
    options = load("quickstart", [*tiny, "name=fitted", "chunker.kind=entropy", "chunker.k=16"])
    corpus = shard(options)
    pretrain(options)
    corpus.folder.rename(tmp_path / "elsewhere")
    (tmp_path / "some.txt").write_bytes(b"def f(x):\n    return x\n")
    assert main(["evaluate", str(tmp_path / "runs" / "fitted"), "--text", str(tmp_path / "some.txt")]) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_training_with_loader_workers_and_a_damaged_shard(options: Options, workers: int) -> None:
    corpus = open_shards(options)
    options.loader.workers, options.train.steps = workers, 8
    options.name = f"whole-{workers}"
    whole = train(options)
    shard_ = corpus.of("train")[0]
    path = corpus.folder / shard_.file
    content = path.read_bytes()
    path.write_bytes(content[:-2000])
    options.name = f"stop-{workers}"
    with pytest.raises(ValueError, match=r"train-00000.tar is damaged at byte [\d,]+"):
        train(options)
    path.write_bytes(content)
    assert whole.steps == 8
    if workers:  # the same weights as without
        options.loader.workers, options.name = 0, "alone"
        alone = Path(train(options).checkpoint) / "model.safetensors"
        assert (Path(whole.checkpoint) / "model.safetensors").read_bytes() == alone.read_bytes()


def test_ctrl_c_ends_sharding_at_once_and_it_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    words = np.random.default_rng(0).choice(np.frombuffer(b"abcdef  \n", np.uint8), 4_000_000).tobytes()
    for number in range(16):
        (source / f"train-{number}.txt").write_bytes(words)
    arguments = ["source.kind=text", f"source.path={source}", f"shards_dir={tmp_path / 'shards'}", "shard.megabytes=4"]
    child = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "shard", *arguments], cwd=ROOT, stderr=subprocess.PIPE, env=os.environ
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("shards/*/parts/*/part.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(2)
    _, said = child.communicate(timeout=5)
    assert child.returncode == 130 and b"goes on from there" in said
    assert list(tmp_path.glob("shards/*/parts/*/part.json"))
    assert command("shard", *arguments).returncode == 0
