"""Scoring over windows, and the Python interface."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import open_run
from pipeline.inference import characters
from pipeline.options import Options
from pipeline.training import train
from pipeline.windows import windows


@pytest.mark.parametrize(("context", "stride"), [(5, 5), (5, 2), (7, 1), (50, 25)])
def test_every_chunk_is_scored_once_after_what_came_before(context: int, stride: int) -> None:
    sizes = [1, 4, 5, 6, 23]
    documents = [(np.arange(n, dtype=np.uint8) + 1, np.ones(n, np.uint8)) for n in sizes]
    seen: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    for batch in windows(documents, 3, context, stride, at_once=4):
        for row, document in enumerate(batch.document.tolist()):
            new = batch.new[row].nonzero().flatten()
            known = int(new[0])
            first = int(batch.tokens[row, 0, 0]) == 1
            assert bool(batch.starts[row, 0]) == first and (known == 0) == (first or stride == context)
            assert first or known >= context - stride
            seen[document] += batch.tokens[row, new, 0].tolist()
    assert seen == {i: list(range(1, n + 1)) for i, n in enumerate(sizes)}


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
    starts = torch.zeros(1, len(lengths), dtype=torch.bool)
    with torch.no_grad():
        nats = run.model.log_likelihood(grid, torch.from_numpy(lengths.astype(int))[None], starts)
    assert len(lengths) <= 16 and score.bits == pytest.approx(-float(nats.sum()) / math.log(2), rel=1e-5)
    assert run.sample("def ", samples=2) == run.sample("def ", samples=2)
    assert run.embed([b"def ", b"never seen"]).shape == (2, 16)
    with pytest.raises(ValueError, match="a chunk of this run has 1 to 12"):
        run.embed([b"x" * 13])


def test_invalid_bytes_count_as_characters() -> None:
    assert characters("né".encode() + b"\xff\xfe" + "\U0001f600".encode()) == 5
