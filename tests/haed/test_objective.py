import math

import pytest
import torch

from haed.bank import Bank
from haed.chunks import chunk_keys, distinct
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
    assert losses.iem is None and made.prepare(tokens, lengths, starts).decoded_tokens == int(lengths.sum())


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
    batches = made.prepare(tokens, lengths, starts), made.prepare(tokens, lengths, starts, extra)
    alone, more = (made(batch) for batch in batches)
    assert batches[1].candidates >= batches[0].candidates and more.decoder is None
    assert more.iem.item() >= alone.iem.item()
    more.total.backward()
    assert not any(p.requires_grad for p in made.model.decoder.parameters())
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


@pytest.mark.parametrize(
    ("decoder", "fraction", "iem"), [("lstm", 0.5, 1.0), ("transformer", 1.0, 0.0), ("lstm", 0, 1)]
)
def test_pieces_change_nothing(decoder: str, fraction: float, iem: float) -> None:
    tokens, lengths = windows(5, 6, 3, 3)
    lengths[3, 2:] = 0
    starts = torch.rand(5, 6) < 0.2
    extra = (torch.tensor([[2, 2, 2], [0, 1, 2]]), torch.tensor([3, 3]))
    found = []
    for pieces in (1, 2, 7):
        made = Objective(small(decoder), IEMOptions(), iem, fraction, pieces)
        losses = made(made.prepare(tokens, lengths, starts, extra, torch.Generator().manual_seed(0)))
        losses.total.backward()
        found.append([losses.total.detach(), *(p.grad for p in made.parameters() if p.requires_grad)])
    for other in found[1:]:
        for ours, whole in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decoder", ["lstm", "transformer"])
def test_a_batch_without_chunks_and_one_with_a_single_chunk_are_defined(decoder: str) -> None:
    tokens, lengths = torch.zeros(1, 6, 3, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    starts = torch.zeros(1, 6, dtype=torch.bool)
    for count in (0, 1):
        made = Objective(small(decoder), IEMOptions(), 1.0, 0.5)
        lengths[:, :count] = 3
        losses = made(made.prepare(tokens, lengths, starts))
        losses.total.backward()
        assert losses.iem.item() == 0 and losses.decoder.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_the_bank_adds_candidates_and_their_probability() -> None:
    made = objective(1.0, 0.0, bank=6, bank_draws=4)
    starts = torch.zeros(1, 6, dtype=torch.bool)
    tokens, lengths = windows(1, 6, 3, 3)
    first = made.prepare(tokens, lengths, starts)
    bank = made.candidates.bank
    assert sorted(bank.keys.tolist()) == first.keys.tolist()  # smaller than asked, and empty at first: nothing added
    held = set(bank.keys.tolist())
    tokens, lengths = torch.ones(1, 6, 3, dtype=torch.long), torch.full((1, 6), 3)
    second = made.prepare(tokens, lengths, starts)
    (own,) = set(second.pieces[0].inverse.tolist())
    others = [i for i in range(second.candidates) if i != own]
    assert len(others) in (3, 4) and {int(second.keys[i]) for i in others} <= held
    q = made.candidates.unigram.probability(second.keys)
    share = 4 / len(held)
    for i in others:  # 6 chunks drawn from Q, and 4 of those in the bank
        assert float(second.adjustment[i]) == pytest.approx(math.log(1 - (1 - float(q[i])) ** 6 * (1 - share)))


def test_the_bank_keeps_the_chunks_that_came_last() -> None:
    bank = Bank(4, 2)
    for numbers in ([0, 1, 2], [2, 3], [4, 5], [6, 7, 8, 9, 10]):
        rows = torch.tensor([[n, n] for n in numbers])
        bank.add(distinct(rows, torch.full((len(rows),), 2)))
        assert len(bank) <= 4 and len(bank.keys.unique()) == len(bank)
        assert len(set(bank.tokens[:, 0].tolist()) & set(numbers)) == min(4, len(numbers))
        assert torch.equal(chunk_keys(bank.tokens.long(), bank.lengths), bank.keys)
    other = Bank(4, 2)
    other.load_state_dict(bank.state_dict())
    assert torch.equal(other.draw(2, 5), bank.draw(2, 5)) and other.next == bank.next
    assert sorted(bank.draw(9, 0).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_mined_negatives_are_counted_once_and_in_full(similarity: str) -> None:
    made = Objective(small("lstm", iem=IEMOptions(similarity=similarity)), IEMOptions(mined_share=1.0), 1.0, 0.0)
    tokens, lengths = windows(2, 6, 3, 3)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    flat, sizes = tokens.flatten(0, 1), lengths.flatten()
    new = torch.tensor([2, 2, 1])  # one that is no candidate, the target itself, another candidate

    def mine(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.stack([new.expand(12, 3), flat, flat.roll(1, 0)], 1)
        ends = torch.stack([torch.full((12,), 3), sizes, sizes.roll(1)], 1)
        return rows, ends, chunk_keys(rows.flatten(0, 1), ends.flatten()).unflatten(0, (12, 3))

    batch = made.prepare(tokens, lengths, starts)
    assert not torch.isin(chunk_keys(new[None], torch.tensor([3])), batch.keys).any()
    made.miner = mine
    losses = made(batch)
    model = made.model
    every = torch.cat([batch.tokens, new[None].to(torch.uint8)])
    embedded = model.embed(every, torch.cat([batch.lengths, torch.tensor([3], dtype=torch.uint8)]))
    (piece,) = batch.pieces
    query = model.query(model.predict(embedded.vector[piece.inverse].unflatten(0, (2, 6)), starts).flatten(0, 1))
    scores = query @ model.key(embedded.vector).t() + embedded.bias
    weights = torch.cat([batch.adjustment, torch.zeros(1)]).expand(12, -1).clone()
    for row, (target, other) in enumerate(zip(piece.inverse, piece.inverse.roll(1), strict=True)):
        if target != other:
            weights[row, other] = 0  # certain to be there
    expected = torch.nn.functional.cross_entropy(scores - weights, piece.inverse)
    torch.testing.assert_close(losses.iem, expected, rtol=0, atol=1e-9)
    losses.total.backward()
