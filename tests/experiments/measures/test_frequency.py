"""Ten bins of equal mass, from the rarest chunks to the most frequent, that make up the whole."""

from collections import Counter

import numpy as np
import pytest

from experiments import measures
from pipeline.run.opened import Run


def test_bins_are_equal_in_order_and_all(scaled: Run) -> None:
    scored = measures.count_chunks(scaled)
    bins = measures.divide_bins(scored)
    assert len(bins) == 10 and max(map(len, bins)) - min(map(len, bins)) <= 1
    assert sorted(at for bin in bins for at in bin) == list(range(len(scored.chunks)))
    ends = [(scored.counts[bin].min(), scored.counts[bin].max()) for bin in bins]
    assert all(before[1] <= after[0] for before, after in zip(ends, ends[1:], strict=False))
    assert sum(scored.bits[bin].sum() for bin in bins) == pytest.approx(scored.bits.sum())


def test_counts_are_those_of_training(scaled: Run) -> None:
    text = b"".join(scaled.folder.open_corpus().iterate_original_blocks("train"))
    tokens, lengths = scaled.chunker.split(text)
    ends = np.cumsum(lengths, dtype=np.int64)
    train = Counter(tokens[end - length : end].tobytes() for end, length in zip(ends, lengths.astype(int), strict=True))
    scored = measures.count_chunks(scaled)
    wrong = [chunk for chunk, count in zip(scored.chunks, scored.counts, strict=True) if train[chunk] != count]
    assert len(wrong) <= 0.01 * len(scored.chunks)  # two files are joined here


def test_rates_of_the_bins_are_those_of_the_whole(scaled: Run) -> None:
    found, scored = measures.measure_frequency(scaled), measures.count_chunks(scaled)
    sizes = [sum(len(scored.chunks[at]) for at in bin) for bin in measures.divide_bins(scored)]
    bits = sum(rate * size for (_, rate), size in zip(found.line, sizes, strict=True))
    assert bits == pytest.approx(scored.bits.sum()) and len(found.examples) == 11
    metrics = found.metrics
    assert (
        metrics["rarest less most frequent"] == metrics["bits a byte, rarest"] - metrics["bits a byte, most frequent"]
    )
