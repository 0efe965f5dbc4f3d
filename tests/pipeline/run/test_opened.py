"""Scoring over windows, and the Python interface."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from haed.base import TokenBatch
from pipeline import open_run
from pipeline.config import ConfigError, Options, SampleOptions, load_options
from pipeline.run.opened import Run, count_characters, count_words
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards
from pipeline.run.windows import cut_documents, fixed_subset
from pipeline.training.stages import pretrain, train
from tests.conftest import of_kind


@pytest.mark.parametrize(("context", "stride"), [(5, 5), (5, 2), (7, 1), (50, 25)])
def test_every_chunk_is_scored_once_after_what_came_before(context: int, stride: int) -> None:
    sizes = [1, 4, 5, 6, 23]
    documents = [(np.arange(n, dtype=np.uint8) + 1, np.ones(n, np.uint8)) for n in sizes]
    seen: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for batch in cut_documents(documents, 3, context, stride, at_once=4):
        for row, document in enumerate(batch.document.tolist()):
            new = batch.new[row].nonzero().flatten()
            known = int(new[0])
            first = int(batch.windows.tokens[row, 0, 0]) == 1
            assert bool(batch.windows.starts[row, 0]) == first and (known == 0) == (first or stride == context)
            assert first or known >= context - stride
            seen[document] += batch.windows.tokens[row, new, 0].tolist()
    assert seen == {i: list(range(1, n + 1)) for i, n in enumerate(sizes)}


@pytest.mark.slow
def test_open_run_scores_samples_and_embeds(options: Options) -> None:
    options.precision = "fp32"
    train(options)
    run = open_run(Path(options.runs_dir) / options.name)
    text = "def f(x):\n    return x  # naïve\n"
    score = run.score(text)
    assert (score.tokens, score.bytes, score.characters) == (len(text.encode()), len(text.encode()), len(text))
    tokens, lengths = run.chunker.split(text.encode())
    grid = torch.zeros(1, len(lengths), 12, dtype=torch.long)
    ends = np.cumsum(lengths, dtype=int)
    for cell, end, size in zip(grid[0], ends, lengths.tolist(), strict=True):
        cell[:size] = torch.from_numpy(tokens[end - size : end].astype(int))
    with torch.no_grad():
        nats = run.system.log_likelihood(TokenBatch.from_chunks(grid, torch.from_numpy(lengths.astype(int))[None]))
    assert len(lengths) <= 16 and score.bits == pytest.approx(-float(nats.sum()) / math.log(2), rel=1e-5)
    assert run.sample("def ", samples=2) == run.sample("def ", samples=2)
    assert run.embed([b"def ", b"never seen"]).shape == (2, 16)
    with pytest.raises(ValueError, match="A chunk of this run has 1 to 12"):
        run.embed([b"x" * 13])
    wrong = [("temperature", -1), ("temperature", math.nan), ("top_k", -1), ("top_p", 0)]
    for name, value in [*wrong, ("chunks", 0), ("seed", 2**70)]:
        with pytest.raises(ConfigError, match=f"sample.{name}"):
            run.sample("def ", options=SampleOptions(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples=0: must be at least 1"):
        run.sample("def ", samples=0)
    with pytest.raises(TypeError, match="must be SampleOptions, not dict"):
        run.sample("def ", options={"chunks": 3})  # type: ignore[arg-type]
    same = SampleOptions(chunks="4", temperature="1.0", seed="7")  # type: ignore[arg-type]
    assert run.sample("def ", 2, same) == run.sample("def ", 2, SampleOptions(chunks=4, temperature=1.0, seed=7))
    assert all(run.sample("abcdefghijkl", 2, SampleOptions(chunks=1))), "a full chunk is not what is drawn"
    with pytest.raises(ConfigError, match="chunker.kind=words has chunks of any size. Use run.sample"):
        run.complete(np.zeros((1, 12), np.uint8), 3)
    wrong_places: list[dict[str, Any]] = [{"layer": -1}, {"layer": 99}, {"seen": 0}, {"seen": -1}, {"scale": 0}]
    for place in wrong_places:
        with pytest.raises(ValueError, match=r"must be at least|has no layer 99"):
            run.context("def f", **place)
    with pytest.raises(TypeError, match="layer must be a whole number"):
        run.context("def f", layer=0.5)  # type: ignore[arg-type]


def test_to_open_a_run_leaves_the_options_of_the_caller_as_they_are(options: Options) -> None:
    options.train.iem_weight = 0.0
    train(options)
    options.train.iem_weight = 0.5
    Run(RunFolder.from_options(options), options)
    assert options.train.iem_weight == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("haed", ["model.main.positions=learned"]),
        ("hourglass", ["model.token.positions=learned", "model.token.attention=plain"]),
        ("hourglass", ["model.token.attention=lsh", "model.token.window=8"]),
    ],
)
def test_a_run_reads_other_windows_than_it_was_trained_with(
    kind: str, own: list[str], options: Options, tiny: list[str]
) -> None:
    made = load_options("quickstart", [*of_kind(kind, tiny), *own, "name=windows", "train.steps=1", "precision=fp32"])
    train(made)
    run, text = open_run(Path(made.runs_dir) / "windows"), "of windows and of others, " * 8
    chunks = len(run.chunker.split(text.encode())[1])
    assert made.batch.context < chunks
    for context in 1, 5, chunks:
        other = replace(made, batch=replace(made.batch, context=context))
        read = Run(run.folder, other)
        if context > made.batch.context and "positions=learned" in own[0]:
            with pytest.raises(ValueError, match="positions of this model. Set batch.context to at most"):
                read.score(text)
        else:
            assert 0 < read.score(text).bits_per_char < 20
            assert read.system.cut.context == context and len(read.sample("of ", 1, SampleOptions(chunks=7))[0]) > 3


def test_a_stride_beyond_the_window_is_the_window_and_is_said(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = RunFolder(run).load_options()
    context = options.batch.context
    options.evaluate.stride = context
    assert Run(RunFolder(run), options).stride == context and not caplog.text
    options.evaluate.stride = context + 1
    assert Run(RunFolder(run), options).stride == context
    assert f"more than a window (batch.context={context}). Using {context}" in caplog.text


def test_memory_follows_the_text_not_the_context() -> None:
    documents = [(np.ones(n, np.uint8), np.ones(n, np.uint8)) for n in (3, 7, 2)]
    (batch,) = cut_documents(documents, 3, 60_000, 30_000, at_once=16)
    assert batch.windows.tokens.shape == (3, 7, 3)
    long = [(np.ones(n, np.uint8), np.ones(n, np.uint8)) for n in (9000, 9000, 20_000, 5)]
    assert [tuple(batch.windows.lengths.shape) for batch in cut_documents(long, 3, 60_000, 30_000, 16)] == [
        (1, 9000), (1, 9000), (1, 20_000), (1, 5),
    ]  # fmt: skip


def test_validation_is_as_long_as_its_text(options: Options) -> None:
    corpus = open_shards(options)
    found = fixed_subset(corpus, 60_000, 64, "test")
    assert found is not None and found.lengths.shape == (1, corpus.split_counts("test").chunks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: setattr(o.model.main, "ffn", 2**33), r"model\.\* \([\d,.]+ GB.* GB are free"),
        (lambda o: vars(o.batch).update(sequences=65_536, context=65_536), r"batch\.sequences × batch\.context \("),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tried(
    change: Callable[[Options], None], message: str, options: Options
) -> None:
    change(options)
    with pytest.raises(ValueError, match=f"not enough memory: at least {message}"):
        train(options)
    assert not Path(options.runs_dir).exists()


def test_a_decoder_that_was_not_trained_is_said(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    options.pretrain.decode_fraction = 0.0
    pretrain(options)
    run = open_run(options.name, options.runs_dir)
    assert "without its decoder" not in caplog.text and run.embed([b"def "]).shape[0] == 1
    for _ in range(2):
        run.score("def f")
    assert caplog.text.count("was trained without its decoder (pretrain.decode_fraction=0)") == 1


def test_invalid_bytes_count_as_characters() -> None:
    assert count_characters("né".encode() + b"\xff\xfe" + "\U0001f600".encode()) == 5


def test_words_are_what_is_between_white_space_and_the_ends_of_lines() -> None:
    for document, words in ((b"", 0), (b"a", 2), (b"a\n", 2), (b"a  \xe9b\tc\n\n\x0b d", 4 + 1 + 2), (b" \r\x0c\n", 1)):
        assert count_words(document) == words
