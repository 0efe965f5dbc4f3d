"""The memory of a run: beside the model alone, by every way to a likelihood, cached as long as it is right."""

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from data.statistics import hash_chunks
from haed.chunk.model import HAED
from pipeline.config import Options, load_options
from pipeline.evaluation.evaluate import evaluate_run, format_evaluation
from pipeline.run.checkpoints import read_metadata
from pipeline.run.files import Evaluation, read_as
from pipeline.run.known import write_cache
from pipeline.run.opened import Run
from pipeline.run.remembered import GATE, RECALL, _number_chunks, choose_held_out, load_recall
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training.stages import train
from tests.conftest import flip_bit, mostly_nightly


def opened(options: Options, **how: object) -> Run:
    options = remembering(options, **how)
    return Run(RunFolder.from_options(options), options)


def remembering(options: Options, **how: object) -> Options:
    return replace(options, evaluate=replace(options.evaluate, **({"memory": 4096} | how)))


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "pipeline")
    monkeypatch.setattr("pipeline.run.remembered.FITTED", 2048)  # a tenth, in a tenth of the time


@pytest.mark.slow
def test_the_model_alone_stands_beside_every_figure_and_memory_0_is_that(mixed: Options) -> None:
    with_memory = evaluate_run(remembering(mixed))
    alone = evaluate_run(mixed)
    assert with_memory.memory == 4096 and alone.memory == 0 and alone.remembered is None
    found = with_memory.remembered
    assert found is not None and found.bits_without == pytest.approx(alone.bits, rel=1e-9)
    assert with_memory.bits < alone.bits  # the files of one library are alike
    names = {"known", "spelled", "copied", "repeated", "recalled"}
    for parts in (found.weights, found.shares):
        assert set(parts) == names and sum(parts.values()) == pytest.approx(1) and min(parts.values()) >= 0
    text = format_evaluation(with_memory)
    assert f"{alone.bits_per_char:.4f} bits/char by the model alone" in text and "copied" in text
    assert with_memory.alone.value == pytest.approx(alone.bits_per_char)
    held_out = evaluate_run(remembering(mixed, split="valid"))
    assert "fitted on a part of this split" in format_evaluation(held_out) and "fitted on" not in text
    alone = evaluate_run(mixed)
    kept = read_as(Evaluation, RunFolder.from_options(mixed).path / "evaluation.json")
    assert kept == alone


@pytest.mark.parametrize("stride", mostly_nightly([None, 1, 5], 5))
def test_memory_reaches_beyond_the_window_whatever_the_stride(mixed: Options, stride: int | None) -> None:
    """A second copy of a long text costs a fraction of the first."""
    text = " ".join(f"alpha{n} = beta_{n * 7 % 31}({n})\n" for n in range(60))
    run = opened(mixed, stride=stride)
    once, twice = run.score(text), run.score(text + text)
    alone = opened(mixed, memory=0, stride=stride)
    assert twice.bits - once.bits < 0.5 * (alone.score(text + text).bits - alone.score(text).bits)


def test_parts_can_be_left_out(mixed: Options) -> None:
    text = "def f(self):\n    return self.queue\n" * 3
    bits = {}
    for parts in ([], ["copied"], ["repeated"], ["recalled"], ["words"], ["copied", "repeated", "recalled", "words"]):
        score = opened(mixed, parts=parts).score(text)
        bits[len(parts), *parts] = score.bits
        assert (score.remembered is None) == (not parts)
        if score.remembered is not None:
            assert set(score.remembered.weights) == {"known", "spelled", *parts} - {"words"}
    assert len(set(bits.values())) == 6


def test_recall_and_gate_are_built_once_and_made_anew_where_they_are_damaged(
    mixed: Options, caplog: pytest.LogCaptureFixture
) -> None:
    run = opened(mixed)
    first = run.score("def f(self):\n").bits
    gate, recall = run.folder.path / GATE, run.folder.open_corpus().folder / RECALL
    assert "fitting the gate" in caplog.text and "for the recalled part" in caplog.text
    caplog.clear()
    assert opened(mixed).score("def f(self):\n").bits == first and caplog.text == ""
    for path, line in ((gate, "fitting the gate"), (recall, "for the recalled part")):
        flip_bit(path, -3)
        caplog.clear()
        assert opened(mixed).score("def f(self):\n").bits == first
        assert "damaged" in caplog.text and line in caplog.text
    shutil.copy(recall, recall.with_name("aside"))
    caplog.clear()
    opened(mixed, memory=64).score("def f(self):\n")
    assert "gate.safetensors is stale: memory 4096, now 64" in caplog.text


@pytest.mark.slow
def test_tensors_that_do_not_fit_are_made_anew(mixed: Options, caplog: pytest.LogCaptureFixture) -> None:
    """With right metadata and checksums, as of another program."""
    run = opened(mixed)
    first = run.score("def f(self):\n").bits
    gate, recall = run.folder.path / GATE, run.folder.open_corpus().folder / RECALL
    wrong: list[tuple[Path, str, Callable[[Tensor], Tensor]]] = [
        (recall, "order", lambda x: x + 10**6),
        (recall, "keys", lambda x: x[:10].contiguous()),
        (recall, "counts", torch.zeros_like),
        (gate, "bias", lambda x: x * torch.nan),
        (gate, "weight", lambda x: x[:, :2].contiguous()),
    ]
    for path, name, change in wrong:
        metadata, tensors = read_metadata(path), load_file(path)
        metadata.pop("sha256")
        write_cache(path, tensors | {name: change(tensors[name])}, metadata)
        caplog.clear()
        assert opened(mixed).score("def f(self):\n").bits == first and "made again" in caplog.text


def test_a_corpus_that_cannot_be_read_is_said_each_time(mixed: Options, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise PermissionError("no access")

    for _ in range(2):
        broken = opened(mixed)
        broken.folder.open_corpus = fail  # type: ignore[method-assign, assignment]
        caplog.clear()
        assert broken.score("import os\n").remembered is None
        assert "scoring without memory: no access" in caplog.text


def test_parts_named_twice_are_one(mixed: Options) -> None:
    score = opened(mixed, parts=["copied", "copied"]).score("import os\nimport os\n")
    assert score.remembered is not None and sum(score.remembered.weights.values()) == pytest.approx(1)


def test_the_rest_of_a_document_of_chunks_of_a_fixed_size_is_not_recalled() -> None:
    documents = [(np.arange(10, dtype=np.uint8), np.array([4, 4, 2], np.uint8))] * 2
    chunks, ids = _number_chunks(iter(documents), 4, True, 100)
    assert chunks.lengths.tolist() == [4, 4] and (ids == 0).nonzero().flatten().tolist() == [2, 5]
    chunks, ids = _number_chunks(iter(documents), 4, False, 4)
    assert len(chunks) == 3 and (ids == 0).nonzero().flatten().tolist() == [3, 5]


def test_what_is_recalled_is_the_train_split_alone(mixed: Options) -> None:
    corpus = RunFolder.from_options(mixed).open_corpus()
    recall = load_recall(corpus)
    keys = {int(key) for tokens, lengths in corpus.iterate_documents("train") for key in hash_chunks(tokens, lengths)}
    chunks = recall.chunks
    flat = torch.cat([row[:n] for row, n in zip(chunks.tokens, chunks.lengths.tolist(), strict=True)]).numpy()
    assert {int(key) for key in hash_chunks(flat.astype(np.uint8), chunks.lengths.numpy())} == keys
    assert int(recall.counts.sum()) == corpus.split_counts("train").chunks


def test_without_shards_nothing_is_remembered_which_is_said(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    train(options)
    alone = opened(options, memory=0).score("import os\n").bits
    assert opened(options).score("import os\n").bits != alone
    shutil.rmtree(options.shards_dir)
    assert opened(options).score("import os\n").bits == alone
    assert "scoring without memory" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "fitted"),
    [
        ({"train": "a b c a b c\n" * 9, "valid": "a", "test": "b"}, True),
        ({"train": "a", "valid": "a b a b", "test": "a b c"}, True),
        ({"train": "a b c a b c\n" * 9, "test": "a b c"}, False),
    ],
    ids=["documents of one chunk", "a train split of one chunk", "no valid split"],
)
def test_the_smallest_corpora(
    texts: dict[str, str], fitted: bool, tmp_path: Path, tiny: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    more = [f"source.path={folder}", "name=small", "evaluate.baselines=false", "validation.times=0"]
    options = load_options("quickstart", [*tiny, *more, *([] if fitted else ["source.valid_percent=0"])])
    shard_source(options)
    train(options)
    result = evaluate_run(remembering(options))
    assert np.isfinite(result.bits) and (result.remembered is not None) == fitted == (result.memory > 0)
    assert bool(result.memory_parts) == fitted
    assert fitted or "the valid split is empty" in caplog.text
    run = opened(options)
    assert run.score("").bits == 0 and isinstance(run.system, HAED)
    assert run.next("", 2).chunks and run.sample("", 1)


@pytest.mark.parametrize(
    ("sizes", "documents"),
    [
        ([100_000] * 50, 5),
        ([100_000] * 2, 2),
        ([1000] * 200, 21),
        ([400] * 250, 52),
        ([300] * 10, 10),
        ([], 0),
        ([7, 0, 5], 3),
    ],
)
def test_the_gate_is_fitted_on_random_documents_of_the_whole_split(
    sizes: list[int], documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.run.remembered.FITTED", 20_480)

    class Split:
        def split_counts(self, split: str) -> SimpleNamespace:
            return SimpleNamespace(documents=len(sizes), chunks=sum(sizes))

        def iterate_documents(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for number, size in enumerate(sizes):
                yield np.full(2 * size, number, np.uint8), np.full(size, 2, np.uint8)

    corpus: Any = Split()
    found = choose_held_out(corpus)
    assert len(found) == documents and sum(len(lengths) for _, lengths in found) == min(20_480, sum(sizes))
    assert all(len(tokens) == 2 * len(lengths) for tokens, lengths in found)
    numbers = [int(tokens[0]) for tokens, _ in found if len(tokens)]
    if 20 < documents < len(sizes):
        assert numbers != sorted(numbers) and min(numbers) < len(sizes) / 4 and max(numbers) > 3 * len(sizes) / 4
