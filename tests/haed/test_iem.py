"""The IEM loss against the naive formula in float64, and its correction against an exact softmax."""

import math

import pytest
import torch
import torch.nn.functional as F

from haed.iem import UnigramCounts, blockwise_cross_entropy, correction, log_inclusion, log_likelihood


@pytest.mark.parametrize("block", [1, 3, 64])
def test_blockwise_is_the_naive_softmax(block: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (11, 4), (11,))]
    target = torch.randint(11, (7,))
    found = blockwise_cross_entropy(*parts, target, block, diagnose=True)
    loss, accuracy = found.loss, found.accuracy
    scores = parts[0] @ parts[1].t() + parts[2]
    naive = F.cross_entropy(scores, target)
    torch.testing.assert_close(loss, naive, rtol=0, atol=1e-12)
    assert float(accuracy) == float((scores.argmax(1) == target).double().mean())
    place = (scores.argsort(1, descending=True) == target[:, None]).nonzero()[:, 1] + 1
    assert float(found.rank) == float(place.double().mean())
    p = scores.softmax(1)
    torch.testing.assert_close(found.effective, (-(p * p.log()).sum(1)).exp().mean(), rtol=1e-12, atol=0)
    for ours, theirs in zip(torch.autograd.grad(2 * loss, parts), torch.autograd.grad(2 * naive, parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [2, None])
def test_mined_negatives_count_in_their_row_and_replace_their_column(block: int | None) -> None:
    torch.manual_seed(0)
    shapes = ((5, 3), (6, 3), (6,), (5, 2))
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    target = torch.tensor([0, 5, 2, 2, 1])
    replaced = torch.tensor([[-1, 3], [0, -1], [-1, -1], [0, 1], [-1, 0]])
    own = parts[3].masked_fill(torch.tensor([[1, 0]] + [[0, 0]] * 4, dtype=torch.bool), -torch.inf)
    found = blockwise_cross_entropy(*parts[:3], target, block, (own, replaced), diagnose=True)
    scores = parts[0] @ parts[1].t() + parts[2]
    hidden = torch.zeros(5, 6, dtype=torch.bool)
    for row, column in ((0, 3), (1, 0), (3, 0), (3, 1), (4, 0)):
        hidden[row, column] = True
    every = torch.cat([scores.masked_fill(hidden, -torch.inf), own], 1)
    naive = F.cross_entropy(every, target)
    torch.testing.assert_close(found.loss, naive, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(loss, parts, retain_graph=True) for loss in (found.loss, naive)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    entropy = torch.distributions.Categorical(logits=every.nan_to_num(neginf=-1e300)).entropy()
    torch.testing.assert_close(found.effective, entropy.exp().mean(), rtol=1e-9, atol=0)


def test_log_likelihood_over_a_closed_set() -> None:
    torch.manual_seed(0)
    queries, candidates, bias = torch.randn(7, 4), torch.randn(11, 4), torch.randn(11)
    target = torch.randint(11, (7,))
    expected = (queries @ candidates.t() + bias).log_softmax(1).gather(1, target[:, None]).squeeze(1)
    torch.testing.assert_close(log_likelihood(queries, candidates, bias, target), expected)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (6, 3), (6,))]
    target = torch.randint(6, (5,))
    assert torch.autograd.gradcheck(lambda *x: blockwise_cross_entropy(*x, target, 2).loss, parts)


def test_scores_of_any_size_stay_finite() -> None:
    found = blockwise_cross_entropy(
        torch.full((2, 1), 1e4), torch.tensor([[1e4], [-1e4]]), torch.zeros(2), torch.tensor([0, 0]), diagnose=True
    )
    assert float(found.loss) == 0 and float(found.effective) == 1


def test_a_single_candidate_costs_nothing() -> None:
    query = torch.randn(3, 2, requires_grad=True)
    found = blockwise_cross_entropy(query, torch.randn(1, 2), torch.zeros(1), torch.zeros(3, dtype=torch.long))
    found.loss.backward()
    assert found.loss.item() == 0 and float(found.accuracy) == 1 and float(query.grad.abs().max()) < 1e-6


def one(q: float) -> torch.Tensor:
    return torch.tensor([q], dtype=torch.float64)


def test_inclusion_probability() -> None:
    for q, n in ((0.5, 1), (1e-9, 1000), (0.01, 500), (1.0, 3)):
        expected = math.log1p(-((1 - q) ** n)) if q < 1 else 0.0
        assert float(log_inclusion([(one(q), n)])) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for kind, wanted in (("none", 0), ("log_q", math.log(8 * 0.25 + 0.1)), ("inclusion", math.log(1 - 0.75**8 * 0.9))):
        assert float(correction(kind, [(one(0.25), 8), (one(0.1), 1)])) == pytest.approx(wanted)
        assert float(correction(kind, [(one(0.25), 8), (one(1.0), 1)])) == 0  # always there
        assert float(correction(kind, [(one(1.0), 0), (one(0.1), 1)])) == (0 if kind == "none" else math.log(0.1))
    with pytest.raises(ValueError, match="inclusion"):
        correction("other", [(one(0.3), 5)])


def test_counts_estimate_the_unigram_distribution() -> None:
    counts = UnigramCounts(buckets=1 << 12)
    keys = torch.tensor([-5, 17, 2**60])
    for _ in range(10):
        counts.update(keys, torch.tensor([1, 3, 6]))
    torch.testing.assert_close(counts.probability(keys), torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64))


@pytest.mark.parametrize(("kind", "calibrated"), [("inclusion", True), ("none", False)])
def test_the_correction_makes_sampled_training_calibrated(kind: str, calibrated: bool) -> None:
    """Learns a unigram distribution from sampled candidates; only the corrected loss ends near its entropy."""
    generator = torch.Generator().manual_seed(0)
    classes, draws = 300, 64
    q = 1 / (torch.arange(classes, dtype=torch.float64) + 2)
    q /= q.sum()
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.Adam([bias], lr=0.05)
    for step in range(1500):
        drawn = torch.multinomial(q, draws, replacement=True, generator=generator)
        candidates, inverse = drawn.unique(return_inverse=True)
        adjusted = bias[candidates] - correction(kind, [(q[candidates], draws)]).float()
        zeros = torch.zeros(draws, 1), torch.zeros(len(candidates), 1)
        loss = blockwise_cross_entropy(*zeros, adjusted, inverse).loss
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 1500)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    entropy = -(q * q.log()).sum()
    cross = -(q * bias.detach().double().log_softmax(0)).sum()
    assert (float(cross - entropy) < 0.05) == calibrated
