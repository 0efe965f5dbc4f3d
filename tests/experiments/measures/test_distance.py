"""What a shuffled context costs: against every chunk scored by itself, and nothing where nothing is shuffled."""

from pathlib import Path

import pytest
import torch

from experiments import measures
from haed.base import TokenBatch
from pipeline.run.opened import Run, open_run
from pipeline.run.windows import fixed_subset


def some(run: Run, count: int = 3) -> TokenBatch:
    found = fixed_subset(run.folder.open_corpus(), run.options.batch.context, count)
    assert found is not None
    return found


@torch.no_grad()
def test_it_is_what_scoring_each_chunk_finds(scaled: Run) -> None:
    windows = some(scaled)
    other = measures.shuffle_first_half(windows)
    found = measures.added_bits(scaled, windows, other)
    half = windows.lengths.shape[1] // 2
    for row in range(len(windows)):
        for place in range(found.shape[1]):
            bits = []
            for each in (windows, other):
                upto = [
                    TokenBatch.from_chunks(each.tokens[row : row + 1, :end], each.lengths[row : row + 1, :end])
                    for end in (half + place, half + place + 1)
                ]
                for kept, start in zip(upto, (half + place, half + place + 1), strict=True):
                    kept.starts[:] = each.starts[row : row + 1, :start]
                before, through = (float(scaled.system.log_likelihood(kept).sum()) for kept in upto)
                bits.append((before - through) / torch.log(torch.tensor(2.0)).item())
            assert float(found[row, place]) == pytest.approx(bits[1] - bits[0], abs=1e-3)


def test_nothing_is_lost_where_nothing_is_shuffled(scaled: Run) -> None:
    windows = some(scaled)
    assert measures.added_bits(scaled, windows, windows).abs().max() == 0


def test_only_the_first_half_is_shuffled_and_nothing_is_lost(scaled: Run) -> None:
    windows = some(scaled)
    other = measures.shuffle_first_half(windows)
    half = windows.lengths.shape[1] // 2
    assert not torch.equal(windows.tokens[:, :half], other.tokens[:, :half])
    assert torch.equal(windows.tokens[:, half:], other.tokens[:, half:])
    for before, after in zip(windows.tokens[:, :half], other.tokens[:, :half], strict=True):
        assert sorted(before.tolist()) == sorted(after.tolist())
    again = measures.shuffle_first_half(windows)
    assert torch.equal(again.tokens, other.tokens) and torch.equal(again.lengths, other.lengths)


@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_a_line_of_means_has_every_distance_once(length: int) -> None:
    line = measures.average_doubling(torch.arange(1.0, length + 1))
    assert line[0] == (1, 1) and all(at == pytest.approx(mean) for at, mean in line)  # a distance's mean is its middle
    assert line[-1][0] <= length


def test_a_model_of_chunks_has_figures_and_a_line(run: Path) -> None:
    found = measures.measure_distance(open_run(run))
    assert set(found.metrics) <= {"bits more, 1 to 4 chunks away", "bits more, beyond 32 chunks", "far of near"}
    assert [at for at, _ in found.line] == [1, 2, 3.5, 6.5]
