"""Counting in bounded memory."""

import torch

from haed.iem.counts import CountMin


def test_counts_of_few_keys_are_exact() -> None:
    counts = CountMin(bits=12)
    keys = torch.tensor([-5, 17, 2**60])
    for _ in range(10):
        counts.update(keys, torch.tensor([1, 3, 6]))
    assert counts(keys).tolist() == [10, 30, 60]
    counts.update(keys[:1], torch.tensor([2**40]))  # in float32 the next one would be lost
    counts.update(keys[:1], torch.tensor([1]))
    assert counts(keys[:1]).tolist() == [2**40 + 11]
    again = CountMin(bits=12)
    again.load_state_dict(counts.state_dict())
    assert torch.equal(again(keys), counts(keys))


def test_four_keys_a_cell_of_before_are_counted_to_a_factor_of_two() -> None:
    """As 4 million chunks where there were 2²⁰ buckets: one row of those was 4.8 times too large."""
    torch.manual_seed(0)
    counts, distinct = CountMin(bits=12), 1 << 13
    keys, frequency = torch.randint(2**62, (distinct,)), 1 / torch.arange(1.0, distinct + 1)
    true = torch.zeros(distinct, dtype=torch.long)
    for _ in range(100):
        drawn, times = torch.multinomial(frequency, 1000, True).unique(return_counts=True)
        counts.update(keys[drawn], times)
        true[drawn] += times
    found = counts(keys)
    assert (found >= true).all()
    ratio = (found / true)[true > 0].log()
    one_row = torch.zeros(1 << 11, dtype=torch.long).index_add(0, keys.remainder(1 << 11), true)
    assert ratio.mean().exp() < 2 and (one_row[keys.remainder(1 << 11)] / true)[true > 0].log().mean().exp() > 4
