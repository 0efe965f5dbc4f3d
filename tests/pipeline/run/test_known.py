"""The cache of known chunks: used as long as it is right, made anew if not, and of the train split alone."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data.corpus import Corpus
from haed.chunk.model import HAED
from pipeline.config import Options, is_mixed, load_options, max_known_chunks
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.run.known import CHUNKS, KEYS, make_vocabulary, read_cache, store_known_chunks, write_cache
from pipeline.run.opened import Run, Score, open_run
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training.stages import finetune
from tests.conftest import flip_bit

TEXT = "def f(self):\n    return self.queue\n"


def score(run: Run) -> Score:
    """As if the run had just been opened."""
    assert isinstance(run.system, HAED)
    run.system.known = None
    return run.score(TEXT)


@pytest.fixture
def run(mixed: Options, caplog: pytest.LogCaptureFixture) -> Run:
    caplog.set_level(logging.INFO, "pipeline")
    return Run(RunFolder.from_options(mixed), mixed)


def test_it_is_built_at_first_use_and_used_then(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    path = run.folder.path
    assert (path / CHUNKS).is_file() and not (path / KEYS).exists()
    first = score(run)
    assert "embedding 100 known chunks" in caplog.text and first.parts is not None and first.parts.known == 100
    caplog.clear()
    made = (path / KEYS).stat().st_mtime_ns
    assert score(run) == first
    assert caplog.text == "" and (path / KEYS).stat().st_mtime_ns == made


def test_one_of_another_checkpoint_is_stale(run: Run, mixed: Options, caplog: pytest.LogCaptureFixture) -> None:
    before = score(run)
    finetune(replace(mixed, finetune=replace(mixed.finetune, steps=8)))
    caplog.clear()
    run = open_run(run.folder.path)
    found = score(run)
    assert run.step > 4 and found != before and "keys.safetensors is stale: checkpoint" in caplog.text
    shutil.rmtree(run.folder.path / "known")
    assert score(run) == found


def turned(path: Path) -> None:
    """The same bytes as a table with rows for columns."""
    content, size = path.read_bytes(), int.from_bytes(path.read_bytes()[:8], "little")
    head = json.loads(content[8 : 8 + size])
    table = next(each for each in head.values() if len(each.get("shape", ())) == 2)
    table["shape"].reverse()
    path.write_bytes(content[:8] + json.dumps(head, separators=(",", ":")).encode().ljust(size) + content[8 + size :])


@pytest.mark.parametrize("name", [CHUNKS, KEYS])
def test_a_damaged_one_is_made_anew(name: str, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    right = score(run)
    damages: list[Callable[[Path], object]] = [
        lambda path: flip_bit(path, -5),
        turned,
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"garbage, and more of it"),
        lambda path: path.write_bytes(b""),
    ]
    for damage in damages:
        damage(run.folder.path / name)
        caplog.clear()
        assert score(run) == right
        assert f"{name} is damaged" in caplog.text and "made again" in caplog.text
        caplog.clear()
        assert score(run) == right and caplog.text == ""


def test_where_nothing_can_be_written_it_is_kept_in_memory(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    right = score(run)
    shutil.rmtree(run.folder.path / "known")
    (run.folder.path / "known").write_bytes(b"no folder can be made here, whoever asks")
    assert score(run) == run.score(TEXT) == right
    assert caplog.text.count("keys.safetensors could not be written") == 1


def test_a_run_knows_its_chunks_without_its_shards(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = score(run)
    (run.folder.path / KEYS).unlink()
    monkeypatch.setattr("pipeline.run.run_directory.MANIFEST", "nowhere.json")
    assert score(run) == right
    (run.folder.path / CHUNKS).unlink()
    with pytest.raises(FileNotFoundError, match="the shards of .* are not at"):
        score(run)


def test_two_at_once(run: Run, mixed: Options, caplog: pytest.LogCaptureFixture) -> None:
    right = score(run)
    shutil.rmtree(run.folder.path / "known")
    with ThreadPoolExecutor() as threads:
        assert [*threads.map(score, [run, Run(run.folder, mixed)])] == [right, right] and "could not" not in caplog.text
    caplog.clear()
    assert score(run) == right and caplog.text == ""


def chunks_of(corpus: Corpus, split: str) -> list[bytes]:
    return [
        chunk.tobytes()
        for tokens, lengths in corpus.iterate_documents(split)
        for chunk in np.split(tokens, np.cumsum(lengths)[:-1])
    ]


def test_nothing_of_the_scored_split_is_known(mixed: Options, text: Path, tmp_path: Path) -> None:
    """What valid alone has is spelled; another valid split changes neither what is known nor the score of test."""
    mixed.evaluate.split = "valid"
    valid, run = evaluate_run(mixed), Run(RunFolder.from_options(mixed), mixed)
    corpus = run.folder.open_corpus()
    known = load_file(run.folder.path / CHUNKS)
    names = {bytes(row[:size].tolist()) for row, size in zip(known["tokens"], known["lengths"], strict=True)}
    counts, scored = Counter(chunks_of(corpus, "train")), chunks_of(corpus, "valid")
    assert len(names) == 100 and min(counts[each] for each in names) >= sorted(counts.values())[-100]
    assert set(scored) - set(counts) and valid.parts is not None
    assert valid.parts.unknown_share == pytest.approx(np.mean([each not in names for each in scored]))
    source = Path(shutil.copytree(text, tmp_path / "text"))
    next(source.glob("valid*")).write_bytes(b"zyzzyva quokka " * 5000)
    other = shard_source(replace(mixed, source=replace(mixed.source, path=str(source))))
    assert other.digest != corpus.digest and set(chunks_of(other, "valid")) == {b"zyzzyva ", b"quokka "}
    store_known_chunks(run.folder, other, 100)
    again = load_file(run.folder.path / CHUNKS)
    assert again.keys() == known.keys() and all((again[name] == known[name]).all() for name in known)


def test_who_asks_for_a_fitting_number_of_pixels_gets_none() -> None:
    """A number that is named stands; a phase without the IEM loss is no mixture."""
    options = load_options("quickstart")
    assert max_known_chunks(options) == 131_072
    phases = (options.pretrain, options.finetune, options.train)
    assert [is_mixed(options, phase) for phase in phases] == [True, True, False]
    pictures = load_options("quickstart", ["chunker.kind=pixels"])
    assert max_known_chunks(pictures) == 0 and not is_mixed(pictures, pictures.finetune)
    assert max_known_chunks(load_options("quickstart", ["chunker.kind=pixels", "model.mixture.known=9"])) == 9


def test_chunks_of_a_fixed_size_that_are_cut_short_are_not_known(tmp_path: Path) -> None:
    """The decoder ends none early, so they could not be spelled, and what is known must be whole."""
    (tmp_path / "text").mkdir()
    for split, text in {"train": "abcabcabcx", "valid": "abcy", "test": "abcz"}.items():
        (tmp_path / "text" / f"{split}.txt").write_text(text)
    where = ["source.kind=text", f"source.path={tmp_path}/text", f"shards_dir={tmp_path}/shards"]
    found = make_vocabulary(shard_source(load_options("quickstart", [*where, "chunker.kind=fixed", "chunker.k=3"])), 9)
    assert [bytes(row.tolist()) for row in found.chunks.tokens] == [b"abc"]
    assert found.counts is not None and found.counts.tolist() == [3]


def test_what_trained_a_checkpoint_says_whose_likelihood_it_is(run: Run, mixed: Options) -> None:
    """Not what config.yaml says since."""
    changed = replace(mixed, finetune=replace(mixed.finetune, iem_weight=0.0))
    assert score(Run(RunFolder.from_options(changed), changed)) == score(run)


def test_a_corpus_without_whole_chunks_has_none_to_know(tmp_path: Path) -> None:
    """Chunks of a fixed size: rests at the ends of documents are no outcomes, and here there is nothing else."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(40)))
    where = ["source.kind=jsonl", f"source.path={lines}", "source.valid_percent=20", f"shards_dir={tmp_path}"]
    corpus = shard_source(load_options("quickstart", [*where, "chunker.kind=fixed", "chunker.k=16"]))
    said = "no whole chunk of 16 tokens .* Lower chunker.k, or set model.mixture.known=0"
    with pytest.raises(ValueError, match=said):
        make_vocabulary(corpus, 100)
    empty = {"lengths": torch.from_numpy(np.empty(0, np.int64))}
    write_cache(tmp_path / "empty.safetensors", empty, {})
    assert read_cache(tmp_path / "empty.safetensors", {})["lengths"].shape == (0,)  # type: ignore[index]
