"""Which candidates a row has and what its scores are corrected by, against enumeration and against what is true.

Counting in bounded memory.
"""

import itertools
import math
from collections import Counter

import pytest
import torch

from haed.base import TokenBatch
from haed.chunk.packing import chunk_keys, select_distinct
from haed.distributed import Ranks
from haed.iem.candidates import Candidates, CandidateSet, CountMin, StepChunks, log_inclusion
from haed.iem.sampled_softmax import blockwise_cross_entropy
from haed.options import IEMOptions
from tests.conftest import mostly_nightly

PLACES = 16


def of_numbers(rows: torch.Tensor) -> TokenBatch:
    """Windows (B, T) of chunks of one token each; -1 where none is."""
    rows = torch.nn.functional.pad(rows, (0, PLACES - rows.shape[1]), value=-1)
    return TokenBatch.from_chunks(rows.clamp(min=0)[..., None], (rows >= 0).long())


def made(**options: object) -> Candidates:
    return Candidates(IEMOptions(**options), Ranks())


def find_candidates(candidates: Candidates, own: TokenBatch, others: TokenBatch) -> CandidateSet:
    step = StepChunks.from_windows(own, others, torch.device("cpu"))
    return candidates.find_candidates(step, select_distinct(step.chunks, step.keys, int(step.keys.count_values())))


def scored(scores: torch.Tensor, rows: torch.Tensor, others: torch.Tensor, candidates: Candidates) -> torch.Tensor:
    """Mean loss of rows (B, T) with scores (B·T, V), beside other windows (n, T')."""
    found = find_candidates(candidates, of_numbers(rows), of_numbers(others))
    names = found.chunks.tokens[:, 0].long()
    every = torch.eye(scores.shape[1], dtype=scores.dtype)[names]
    changes, bias = (
        found.window_adjustment.score_adjustments if found.window_adjustment else None,
        -found.adjustment.to(scores.dtype),
    )
    return blockwise_cross_entropy(scores, every, bias, found.chunks.inverse, changes=changes).loss


def test_a_mixture_needs_two_windows_in_a_step(caplog: pytest.LogCaptureFixture) -> None:
    """Of one window nothing follows for other chunks: every target would have the probability 1."""
    alone, nothing = of_numbers(torch.tensor([[0, 1, 2]])), of_numbers(torch.full((1, 3), -1))
    with pytest.raises(ValueError, match=r"with one window per step, a mixture .* Raise batch.sequences or"):
        find_candidates(Candidates(IEMOptions(), Ranks(), for_mixture=True), alone, nothing)
    find_candidates(made(), alone, nothing)
    assert "with one window per step, only the chunks before are candidates" in caplog.text


def test_rows_choose_among_other_windows_what_is_before_them_and_their_target() -> None:
    own, others = torch.tensor([[0, 1, 0, 2], [3, 1, 4, -1]]), torch.tensor([[4, 5]])
    found = find_candidates(made(), of_numbers(own), of_numbers(others))
    names, log_pi = found.chunks.tokens[:, 0].tolist(), found.adjustment
    target = found.chunks.inverse
    assert [names[i] for i in target] == [0, 1, 0, 2, 3, 1, 4]
    columns, added = found.window_adjustment.score_adjustments(slice(0, 7), target)
    total = torch.zeros(7, 6, dtype=torch.float64).scatter_add_(1, columns, added.double())
    elsewhere = [{1, 3, 4, 5}] * 4 + [{0, 1, 2, 4, 5}] * 3
    before = [set(), {0}, {0, 1}, {0, 1}, set(), {3}, {3, 1}]
    for row, (other, past) in enumerate(zip(elsewhere, before, strict=True)):
        for column, name in enumerate(names):
            there = name in other | past or target[row] == column
            wanted = (0 if name in past else -log_pi[column]) if there else -math.inf
            assert float(total[row, column] - log_pi[column]) == pytest.approx(float(wanted), abs=1e-6)
    wanted = torch.tensor([{0: 1, 1: 2, 2: 1, 3: 1, 4: 2, 5: 1}[name] for name in names], dtype=torch.float64)
    torch.testing.assert_close(log_pi, log_inclusion(wanted / 3, 2).float())


def test_candidates_and_corrections_agree_with_sets_in_many_random_steps() -> None:
    """Also of empty windows, of copies of one window, and of windows of one chunk again and again."""
    generator = torch.Generator().manual_seed(0)
    candidates, counted, passed = made(smoothing=0.5), Counter[int](), 0
    for step in range(300):
        counts = [int(torch.randint(low, 5, (), generator=generator)) for low in (1, 0)]
        own, others = (torch.randint(-1, 2 + step % 9, (count, 7), generator=generator) for count in counts)
        own = own[:1].expand_as(own) if step % 5 == 1 else own[:, :1].expand_as(own) if step % 5 == 2 else own
        found = find_candidates(candidates, of_numbers(own), of_numbers(others))
        rows = [[x for x in row if x >= 0] for row in [*own.tolist(), *others.tolist()]]
        holders = Counter(x for row in rows for x in set(row))
        counted.update(holders)
        filled = sum(bool(row) for row in rows)
        passed += filled
        names = found.chunks.tokens[:, 0].tolist()
        assert sorted(names) == sorted(holders)
        assert dict(zip(names, found.chunks.counts.tolist(), strict=True)) == Counter(x for row in rows for x in row)
        targets = [x for row in rows[: len(own)] for x in row]
        assert [names[i] for i in found.chunks.inverse] == targets
        presence = torch.tensor([(counted[x] + 0.5) / (passed + 0.5) for x in names], dtype=torch.float64)
        log_pi = log_inclusion(presence.clamp(max=1), filled - 1).float()
        torch.testing.assert_close(found.adjustment, log_pi, rtol=0, atol=0)
        is_first = [x not in row[:place] for row in rows[: len(own)] for place, x in enumerate(row)]
        columns = found.chunks.inverse
        assert torch.equal(found.correction, log_pi[columns] * torch.tensor(is_first, dtype=torch.float32))
        place = (of_numbers(own).lengths > 0).flatten().nonzero().squeeze(1)
        assert torch.equal(found.window_adjustment.place, place) and torch.equal(
            found.window_adjustment.columns.flatten()[place], columns
        )
        assert torch.equal(found.window_adjustment.before.flatten()[place], found.correction)
        alone = [first and holders[x] == 1 for first, x in zip(is_first, targets, strict=True)]
        assert found.window_adjustment.ahead.flatten()[place].isneginf().tolist() == alone


def test_a_step_that_is_not_trained_on_is_not_counted() -> None:
    candidates, windows = made(), of_numbers(torch.tensor([[0, 1, 1], [1, 2, -1]]))
    find_candidates(candidates, windows, windows)
    before = {name: tensor.clone() for name, tensor in candidates.state_dict().items()}
    find_candidates(candidates, of_numbers(torch.tensor([[1, 5, 7]])), windows)
    candidates.undo_step()
    after = candidates.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())


def test_the_loss_is_least_where_the_scores_are_the_logarithms_of_the_probabilities() -> None:
    """Over all windows and all sets of other chunks, with presences that are independent: no gradient is left, exactly."""
    torch.manual_seed(0)
    classes = 3
    start, follows, pi = torch.rand(classes).softmax(0), torch.randn(classes, classes).softmax(1), torch.rand(classes)
    candidates = made()
    keys = chunk_keys(torch.arange(classes)[:, None], torch.ones(classes))
    candidates.windows = 1e15
    candidates.counts.update(keys, (pi.double() * 1e15).long())  # as if so many windows had been seen
    total = torch.zeros(classes, classes, dtype=torch.float64)
    scores = (follows.log() + torch.randn(classes, 1)).double().requires_grad_()  # any constant of a row
    for there in itertools.product((0, 1), repeat=classes):
        # The other window has a chunk more, which is never a target.
        others = torch.tensor([[i if here else -1 for i, here in enumerate(there)] + [classes]])
        chance = float(torch.where(torch.tensor(there) > 0, pi, 1 - pi).prod())
        for window in itertools.product(range(classes), repeat=3):
            x = torch.tensor([window])
            p = chance * float(start[x[0, 0]] * follows[x[0, 0], x[0, 1]] * follows[x[0, 1], x[0, 2]])
            rows = torch.cat([torch.zeros(1, classes, dtype=torch.float64), scores[x[0, :2]]])
            never = torch.full((3, 1), -1e4, dtype=torch.float64)
            (gradient,) = torch.autograd.grad(scored(torch.cat([rows, never], 1), x, others, candidates), scores)
            total += p * gradient
    assert float(total.abs().max()) < 1e-6


@pytest.mark.parametrize("repeats", mostly_nightly([0.5, 0.9], 0.9))
def test_context_is_learned_from_sampled_candidates(repeats: float) -> None:
    """Windows repeat their first chunk, which is rare; half of the other chunks are one of 8 frequent ones, half of 240."""
    generator = torch.Generator().manual_seed(0)
    frequent, rare, places, steps, rate = 8, 240, 16, 400, 0.2
    q = torch.cat([torch.full((frequent,), 0.5 / frequent), torch.full((rare,), 0.5 / rare)])
    learned = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of being rare, and of being the first chunk
    optimizer = torch.optim.Adam([learned], lr=rate)
    candidates, later = made(), []
    is_rare = (torch.arange(len(q)) >= frequent).double()
    for step in range(steps):
        x = torch.multinomial(q, 4 * places, True, generator=generator).view(4, places)
        x[:, 0] = torch.randint(frequent, len(q), (4,), generator=generator)
        again = torch.rand(4, places, generator=generator) < repeats
        x = torch.where(again, x[:, :1], x)
        is_first = torch.nn.functional.one_hot(x[:, :1].expand_as(x), len(q))
        scores = learned[0] * is_rare + learned[1] * is_first
        scores[:, 0] = 0  # the first chunk itself is not learned
        loss = scored(scores.flatten(0, 1), x, torch.empty(0, 1, dtype=torch.long), candidates)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        later += [learned.detach().clone()] if step > steps // 2 else []
    bonus = torch.stack(later).mean(0)
    weight = (bonus[0] * is_rare).exp()
    first = float(weight[-1] * bonus[1].exp())
    others = float(weight[:-1].sum())
    assert first / (first + others) == pytest.approx(repeats + (1 - repeats) / 2 / rare, abs=0.02)
    assert float(weight[frequent:-1].sum()) / others == pytest.approx(0.5, abs=0.04)


def test_inclusion_probability() -> None:
    for p, n in ((0.5, 1), (1e-9, 1000), (0.01, 500), (1.0, 3)):
        expected = math.log1p(-((1 - p) ** n)) if p < 1 else 0.0
        found = log_inclusion(torch.tensor([p], dtype=torch.float64), n)
        assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_counts_of_few_keys_are_exact() -> None:
    counts = CountMin(1 << 12)
    keys = torch.tensor([-5, 17, 2**60])
    for _ in range(10):
        counts.update(keys, torch.tensor([1, 3, 6]))
    assert counts(keys).tolist() == [10, 30, 60]
    counts.update(keys[:1], torch.tensor([2**40]))  # in float32 the next one would be lost
    counts.update(keys[:1], torch.tensor([1]))
    assert counts(keys[:1]).tolist() == [2**40 + 11]


def test_four_keys_a_cell_of_before_are_counted_to_a_factor_of_two() -> None:
    """As 4 million chunks where there were 2²⁰ buckets: one row of those was 4.8 times too large."""
    torch.manual_seed(0)
    counts, distinct = CountMin(1 << 12), 1 << 13
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


@pytest.mark.parametrize("keys", [0, 5, 3000])
def test_counts_are_restored_from_the_table_or_its_occupied_cells(keys: int) -> None:
    counter, other = CountMin(1 << 10), CountMin(1 << 10)
    counter.update(torch.arange(keys) * 7919**3, torch.arange(1, keys + 1))
    other.update(torch.arange(9), torch.ones(9, dtype=torch.long))
    state = {name: tensor.clone() for name, tensor in counter.state_dict().items()}
    assert ("table" in state) == (keys == 3000)
    other.load_state_dict(state)
    assert torch.equal(other.table, counter.table)
    with pytest.raises(ValueError, match=r"in 1,024 cells, not in 2,048\. Set iem\.cells=1024"):
        CountMin(1025).load_state_dict(state)
