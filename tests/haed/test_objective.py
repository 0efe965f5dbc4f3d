import pytest
import torch

from haed.objective import Objective
from haed.options import IEMOptions
from tests.haed.test_model import small, windows


def objective(iem_weight: float, fraction: float, **iem: object) -> Objective:
    return Objective(small("lstm"), IEMOptions(block=3, **iem), iem_weight, fraction)


def test_all_chunks_decoded_is_the_exact_likelihood() -> None:
    made = objective(0, 1.0)
    tokens, lengths = windows(2, 6, 3, 3)
    lengths[1, 3:] = 0
    starts = torch.zeros(2, 6, dtype=torch.bool)
    losses = made(made.prepare(tokens, lengths, starts))
    exact = -made.model.log_likelihood(tokens, lengths, starts).sum() / (lengths > 0).sum()
    torch.testing.assert_close(losses.total.double(), exact.detach(), rtol=1e-6, atol=1e-6)
    assert losses.iem is None and losses.decoded_tokens == int(lengths.sum())


def test_a_random_share_is_unbiased() -> None:
    made = objective(0, 0.25)
    tokens, lengths = windows(2, 6, 3, 3)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        shares = [made(made.prepare(tokens, lengths, starts, None, generator)).decoder for _ in range(400)]
        exact = -made.model.log_likelihood(tokens, lengths, starts).mean()
    deviation = torch.stack(shares).std() / 400**0.5
    assert abs(float(torch.stack(shares).mean() - exact)) < 4 * float(deviation)


def test_negatives_are_candidates_and_nothing_else() -> None:
    made = objective(1.0, 0.0, correction="none")
    tokens, lengths = windows(1, 6, 3, 3)
    starts = torch.zeros(1, 6, dtype=torch.bool)
    extra = (torch.tensor([[2, 2, 2], [0, 1, 2]]), torch.tensor([3, 3]))
    alone = made(made.prepare(tokens, lengths, starts))
    more = made(made.prepare(tokens, lengths, starts, extra))
    assert more.candidates >= alone.candidates and more.decoder is None
    assert more.iem.item() >= alone.iem.item()
    more.total.backward()
    assert all(p.grad is None for p in made.model.decoder.parameters())
    assert all(p.grad is not None for p in made.model.main.parameters())


def test_iem_is_the_softmax_over_distinct_candidates() -> None:
    made = objective(1.0, 0.0, correction="none")
    tokens, lengths = windows(2, 6, 3, 3)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    model = made.model
    losses = made(made.prepare(tokens, lengths, starts))
    flat = [tuple(t[:n].tolist()) for t, n in zip(tokens.flatten(0, 1), lengths.flatten(), strict=True)]
    names = sorted(set(flat))
    grid = torch.zeros(len(names), 3, dtype=torch.long)
    for row, name in zip(grid, names, strict=True):
        row[: len(name)] = torch.tensor(name)
    candidates = model.embed(grid, torch.tensor([len(name) for name in names]))
    every = model.embed(tokens.flatten(0, 1), lengths.flatten()).vector.unflatten(0, (2, 6))
    query = model.query(model.predict(every, starts)).flatten(0, 1)
    scores = query @ candidates.vector.t() + candidates.bias.float()
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([names.index(name) for name in flat]))
    torch.testing.assert_close(losses.iem, expected, rtol=1e-7, atol=1e-7)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="both 0"):
        objective(0, 0)
