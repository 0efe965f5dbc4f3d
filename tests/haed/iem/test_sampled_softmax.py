"""The IEM loss against the naive formula in float64."""

import pytest
import torch
import torch.nn.functional as F

from haed.iem.sampled_softmax import blockwise_cross_entropy


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


@pytest.mark.parametrize("block", [2, None])
def test_rows_with_changes_of_their_own(block: int | None) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 3), (6, 3), (6,))]
    target = torch.tensor([0, 5, 2, 2, 1])
    columns = torch.tensor([[1, 1], [0, 3], [0, 0], [4, 3], [1, 5]])  # a column named twice, and the target's own
    added = torch.tensor([[-torch.inf, 0], [0.5, -torch.inf], [0, 0], [-torch.inf, -torch.inf], [2.0, 1.0]])
    found = blockwise_cross_entropy(
        *parts, target, block, lambda rows, wanted: (columns[rows], added[rows]), diagnose=True
    )
    scores = (parts[0] @ parts[1].t() + parts[2]).scatter_add(1, columns, added.double())
    naive = F.cross_entropy(scores, target)
    torch.testing.assert_close(found.loss, naive, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(loss, parts, retain_graph=True) for loss in (found.loss, naive)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    entropy = torch.distributions.Categorical(logits=scores.nan_to_num(neginf=-1e300)).entropy()
    torch.testing.assert_close(found.effective, entropy.exp().mean(), rtol=1e-9, atol=0)
