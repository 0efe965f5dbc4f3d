"""Files that are cut while they are in use: an error that names them, where a mapped file would be the end by SIGBUS."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.filesystem import CorruptFileError
from data.loader import Loader
from data.options import LoaderOptions
from data.shards import CorruptShardError
from pipeline.config import Options, dump_options
from pipeline.run.checkpoints import list_checkpoints
from pipeline.run.index import faiss_search, storage
from pipeline.run.index.chunk_index import ChunkIndex
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards
from tests.conftest import mostly_nightly

ROOT = Path(__file__).resolve().parents[1]


MAPS = """
import sys
from pathlib import Path
from pipeline import open_run
from pipeline.cli import main

run = open_run(sys.argv[1])
run.score("def "), run.sample("def", 1), run.neighbours("def ")
corpus = run.folder.open_corpus()
originals = corpus.iterate_originals("train")
next(originals)


def mapped():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if any(place in line for place in sys.argv[1:])]


assert not mapped(), mapped()
from pipeline.training import trainer

step, seen = trainer.Trainer.step, []
trainer.Trainer.step = lambda self, batch: (step(self, batch), seen.extend([0, *mapped()]))
assert main(["finetune", sys.argv[1], "finetune.steps=6"]) == 0
assert seen == [0, 0], seen
assert not {"torch._dynamo", "sympy", "pandas"} & sys.modules.keys()  # a second of every start
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="of Linux")
def test_no_file_of_a_run_or_a_corpus_is_mapped_and_no_compiler_is_imported(run: Path, whole: Path) -> None:
    """Neither while it is asked, nor in a step of a training."""
    command = [sys.executable, "-c", MAPS, str(run), str(whole / "shards")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", mostly_nightly([0, 1], 1))
def test_a_training_whose_shard_is_cut_saves_and_names_it(options: Options, tmp_path: Path, workers: int) -> None:
    options.train.steps, options.validation.times, options.loader.workers = 10**7, 0, workers
    options.checkpoint.every_steps = None
    (config := tmp_path / "cut.yaml").write_text(dump_options(options))
    command = [sys.executable, "-m", "pipeline", "train", "--config", str(config)]
    run = RunFolder.from_options(options)
    metrics = run.phase_folder("train") / "metrics.jsonl"
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and (not metrics.exists() or metrics.read_bytes().count(b"\n") < 3):
            time.sleep(0.01)
        for path in Path(open_shards(options).location).glob("train-*.tar"):
            os.truncate(path, 1024)
        _, said = process.communicate()
    assert process.returncode == 1 and "Traceback" not in said, said
    last = said.splitlines()[-1]
    assert last.startswith("error: shard ") and "train-00000.tar" in last and "was truncated" in last
    (checkpoint,) = list_checkpoints(run.phase_folder("train") / "checkpoints")
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"saved step {step:,}".replace(",", "") in said.replace(",", "") and step >= 3


def test_windows_of_a_shard_that_is_cut_are_left_out_where_that_is_asked_for(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = Corpus.open(open_shards(options).location)
    asked = {"context": 16, "sequences": 2, "seed": 0}
    (shard,) = corpus.shards_of("train")
    loader = Loader(corpus, "train", **asked, options=LoaderOptions(damaged="skip", workers=0))
    strict = Loader(corpus, "train", **asked, options=LoaderOptions(workers=0))
    batches, whole = iter(loader), iter(strict)
    first = next(batches)
    assert first.skipped == 0 and (first.tokens == next(whole).tokens).all()
    os.truncate(corpus.folder / shard.file, 1024)
    assert next(batches).skipped == 2 and next(batches).skipped == 2
    assert caplog.text.count("windows are skipped") == 1 and shard.file in caplog.text
    with pytest.raises(CorruptShardError, match=f"{shard.file} is damaged: .* was truncated while it was open"):
        next(whole)


def test_rows_that_are_read_one_by_one_are_those_that_are_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ChunkIndex(RunFolder(run))
    monkeypatch.setattr(storage, "SMALL", 0)
    monkeypatch.setattr(faiss_search, "PART", 50)
    read = ChunkIndex(RunFolder(run))
    assert isinstance(kept.vectors, np.ndarray) and isinstance(read.vectors, storage.VectorFile)
    every, number = kept.vectors, len(kept)
    rows = np.array([[5, -1, 5], [number - 1, 0, 7]])
    assert (read.vectors[rows] == every[rows]).all() and (read.vectors[3] == every[3]).all()
    assert (read.vectors[:] == every).all() and read.vectors[4:4].shape == (0, every.shape[1])
    for among in (number, 120):
        found, wanted = (each.search.find_nearest(every[:9], 8, among) for each in (read, kept))
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
    place = run / "index" / "chunks" / "vectors.faiss"
    os.truncate(place, place.stat().st_size // 2)
    with pytest.raises(CorruptFileError, match="vectors.faiss was truncated while it was open"):
        read.search.find_nearest(every[:1], 8)


def asked(address: str) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(address) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.nightly
def test_a_server_outlives_an_index_that_is_cut_and_takes_it_once_it_is_whole(run: Path) -> None:
    command = [sys.executable, "-m", "pipeline", "explore", str(run), "threads=1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0].rstrip("/")
            question = f"{address}/runs/run/neighbours?query=def%20&format=json"
            for file in ("vectors.faiss", "table.parquet"):
                assert asked(question)[0] == 200
                content = (place := run / "index" / "chunks" / file).read_bytes()
                os.truncate(place, len(content) // 2)
                for _ in range(2):
                    status, found = asked(question)
                    assert status == 400 and file in found["error"] and "haed index" in found["error"]
                assert asked(f"{address}/runs/run/next?prompt=def&format=json")[0] == 200
                place.write_bytes(content)
        finally:
            process.terminate()
