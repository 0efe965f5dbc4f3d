"""The IEM loss against the naive formula in float64, and its correction against an exact softmax."""

import math

import pytest
import torch
import torch.nn.functional as F

from haed.iem import UnigramCounts, blockwise_cross_entropy, correction, log_inclusion


@pytest.mark.parametrize("block", [1, 3, 64])
def test_blockwise_is_the_naive_softmax(block: int) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (11, 4), (11,))]
    target = torch.randint(11, (7,))
    loss, accuracy = blockwise_cross_entropy(*parts, target, block)
    scores = parts[0] @ parts[1].t() + parts[2]
    naive = F.cross_entropy(scores, target)
    torch.testing.assert_close(loss, naive, rtol=0, atol=1e-12)
    assert float(accuracy) == float((scores.argmax(1) == target).double().mean())
    for ours, theirs in zip(torch.autograd.grad(2 * loss, parts), torch.autograd.grad(2 * naive, parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (6, 3), (6,))]
    target = torch.randint(6, (5,))
    assert torch.autograd.gradcheck(lambda *x: blockwise_cross_entropy(*x, target, 2)[0], parts)


def test_scores_of_any_size_stay_finite() -> None:
    loss, _ = blockwise_cross_entropy(
        torch.full((2, 1), 1e4), torch.tensor([[1e4], [-1e4]]), torch.zeros(2), torch.tensor([0, 0])
    )
    assert float(loss) == 0


def test_a_single_candidate_costs_nothing() -> None:
    query = torch.randn(3, 2, requires_grad=True)
    loss, accuracy = blockwise_cross_entropy(query, torch.randn(1, 2), torch.zeros(1), torch.zeros(3, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0 and float(accuracy) == 1 and float(query.grad.abs().max()) < 1e-6


def test_inclusion_probability() -> None:
    for q, n in ((0.5, 1), (1e-9, 1000), (0.01, 500), (1.0, 3)):
        expected = math.log1p(-((1 - q) ** n)) if q < 1 else 0.0
        assert float(log_inclusion(torch.tensor([q], dtype=torch.float64), n)) == pytest.approx(
            expected, rel=1e-6, abs=1e-9
        )
    assert float(correction("none", torch.tensor([0.3]), 5)) == 0
    assert float(correction("log_q", torch.tensor([0.25]), 8)) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="inclusion"):
        correction("other", torch.tensor([0.3]), 5)


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
        adjusted = bias[candidates] - correction(kind, q[candidates], draws).float()
        zeros = torch.zeros(draws, 1), torch.zeros(len(candidates), 1)
        loss, _ = blockwise_cross_entropy(*zeros, adjusted, inverse)
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 1500)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    entropy = -(q * q.log()).sum()
    cross = -(q * bias.detach().double().log_softmax(0)).sum()
    assert (float(cross - entropy) < 0.05) == calibrated
