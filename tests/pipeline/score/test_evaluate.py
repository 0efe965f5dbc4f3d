"""Evaluation: where the bits are spent, beside the exact likelihood of documents scored by hand."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from pipeline.options import Options
from pipeline.run.folder import RunFolder
from pipeline.run.opened import Run
from pipeline.score.evaluate import evaluate, table
from pipeline.train.stages import train


def test_partitions_of_the_bits(options: Options) -> None:
    train(options)
    options.evaluate.yardsticks = False
    found = evaluate(options)
    assert found.breakdown is not None
    run = Run(RunFolder.find(options.name, options.runs_dir))
    corpus = run.folder.corpus()
    seen = Counter[bytes]()
    for tokens, lengths in corpus.documents("train"):
        seen.update(chunk.tobytes() for chunk in np.split(tokens, np.cumsum(lengths)[:-1]))
    by_length, unseen = defaultdict[str, float](float), 0.0
    for scored in run.score_documents(corpus.documents("test")):
        new = scored.part.new
        chunks = (
            scored.part.windows.tokens[new].numpy(),
            scored.part.windows.lengths[new].tolist(),
            scored.bits.tolist(),
        )
        for row, length, bits in zip(*chunks, strict=True):
            by_length[str(length)] += bits
            unseen += bits * (seen[row[:length].astype(np.uint8).tobytes()] == 0)
    assert {part.of: part.bits for part in found.breakdown.by_length} == pytest.approx(by_length, rel=1e-4)
    assert found.breakdown.by_frequency[0].of == "0"
    assert found.breakdown.by_frequency[0].bits == pytest.approx(unseen, rel=1e-4)
    chunks = corpus.counts("test").chunks
    for parts in vars(found.breakdown).values():
        assert sum(part.bits for part in parts) == pytest.approx(found.bits, rel=1e-5)
        assert sum(part.tokens for part in parts) == found.tokens
    assert found.breakdown.by_position[0].chunks == sum(part.chunks for part in found.breakdown.by_length) == chunks


def test_pictures_in_bits_per_value(pictures: Options) -> None:
    found = evaluate(pictures)
    run = Run(RunFolder.find(pictures.name, pictures.runs_dir))
    each = [
        sum(float(scored.bits.sum()) for scored in run.score_documents([picture]))
        for picture in run.folder.corpus().documents("test")
    ]
    assert found.characters == 48 * len(each) and found.bits == pytest.approx(sum(each), rel=1e-5)
    assert found.bits_per_dim == found.bits_per_char == pytest.approx(np.mean(each) / 48, rel=1e-5)
    error = np.std(each, ddof=1) / 48 / np.sqrt(len(each))
    assert found.standard_error == pytest.approx(error, abs=1e-6)
    assert "bits/dim ± " in table(found) and f"{found.characters:,} values" in table(found)
