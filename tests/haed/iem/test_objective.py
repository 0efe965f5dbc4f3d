from dataclasses import replace

import pytest
import torch
from torch import Tensor

from haed.base import ChunkingSpec, TokenBatch
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.iem.objective import ChunkObjective
from haed.options import IEMOptions
from tests.haed.chunk.test_model import small, small_options, windows

EXTRA = TokenBatch.from_chunks(
    torch.tensor([[[2, 2, 2], [0, 1, 2], *[[0, 0, 0]] * 4]]), torch.tensor([[3, 3, 0, 0, 0, 0]])
)


def objective(iem_weight: float, fraction: float, **iem: object) -> ChunkObjective:
    return ChunkObjective(small("lstm"), IEMOptions(block=3, **iem), iem_weight, fraction)


def losses_and_gradients(made: ChunkObjective, given: TokenBatch, extra: TokenBatch | None = None) -> list[Tensor]:
    """Of a step with the same draws each time."""
    batch = made.prepare_batch(given, extra, torch.Generator().manual_seed(0))
    torch.manual_seed(1)  # for dropout
    losses = made(batch)
    made.zero_grad()
    losses.total.backward()
    values = [losses.total, losses.nats, *losses.figures.values()]
    found = [torch.as_tensor(value).detach() for value in values if value is not None]
    return [*found, *(p.grad for p in made.parameters() if p.requires_grad)]


def check_same(found: list[list[Tensor]]) -> None:
    for other in found[1:]:
        for ours, whole in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)


def test_all_chunks_decoded_is_the_exact_likelihood() -> None:
    made = objective(0, 1.0)
    given = windows(2, 6, 3, 3)
    given.lengths[1, 3:] = 0
    losses = made(made.prepare_batch(given))
    exact = -made.system.log_likelihood(given).sum().detach()
    torch.testing.assert_close(losses.total.double(), exact / given.chunk_mask.sum(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses.nats.double(), exact, rtol=1e-6, atol=1e-6)
    assert "iem" not in losses.figures and losses.tokens == int(given.lengths.sum())


@pytest.mark.nightly
def test_a_random_share_is_unbiased() -> None:
    made = objective(0, 0.25)
    given = windows(2, 6, 3, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        shares = [made(made.prepare_batch(given, None, generator)).total for _ in range(400)]
        exact = -made.system.log_likelihood(given).mean()
    deviation = torch.stack(shares).std() / 400**0.5
    assert abs(float(torch.stack(shares).mean() - exact)) < 4 * float(deviation)


def test_negatives_are_candidates_and_nothing_else() -> None:
    made = objective(1.0, 0.0, correction="none")
    given = windows(1, 6, 3, 3)
    batches = made.prepare_batch(given), made.prepare_batch(given, EXTRA)
    alone, more = (made(batch) for batch in batches)
    assert len(batches[1].candidates.chunks) >= len(batches[0].candidates.chunks) and more.nats is None
    assert more.figures["iem"].item() >= alone.figures["iem"].item()
    more.total.backward()
    assert not any(p.requires_grad for p in made.system.decoder.parameters())
    assert all(p.grad is not None for p in made.system.main.parameters())


def test_iem_is_the_softmax_over_distinct_candidates() -> None:
    made = objective(1.0, 0.0, correction="none")
    given, model = windows(2, 6, 3, 3), made.system
    tokens, lengths = given.tokens, given.lengths
    losses = made(made.prepare_batch(given))
    flat = [tuple(t[:n].tolist()) for t, n in zip(tokens.flatten(0, 1), lengths.flatten(), strict=True)]
    names = sorted(set(flat))
    grid = torch.zeros(len(names), 3, dtype=torch.long)
    for row, name in zip(grid, names, strict=True):
        row[: len(name)] = torch.tensor(name)
    candidates = model.encode(Chunks(grid, torch.tensor([len(name) for name in names])))
    every = model.encode(Chunks(tokens.flatten(0, 1), lengths.flatten())).vector.unflatten(0, (2, 6))
    query = model.compute_query(model.main(every, given.starts)).flatten(0, 1)
    scores = query @ candidates.vector.t() + candidates.bias.float()
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([names.index(name) for name in flat]))
    torch.testing.assert_close(losses.figures["iem"], expected, rtol=1e-7, atol=1e-7)


def test_duplicates_are_candidates_of_their_own_as_in_the_paper() -> None:
    made = objective(1.0, 0.0, correction="none", duplicates=True)
    given = windows(2, 6, 3, 3)
    given.tokens[0, 1:4], given.lengths[0, 1:4] = given.tokens[0, :1], given.lengths[0, :1]
    found = made(made.prepare_batch(given, EXTRA))
    model = made.system
    tokens, lengths = (
        torch.cat([x.flatten(0, 1), y.flatten(0, 1)])
        for x, y in ((given.tokens, EXTRA.tokens[:, :2]), (given.lengths, EXTRA.lengths[:, :2]))
    )
    candidates = model.encode(Chunks(tokens, lengths))
    scores = model.compute_query(model.predict_vectors(given)) @ candidates.vector.t() + candidates.bias
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(12))
    torch.testing.assert_close(found.figures["iem"], expected, rtol=0, atol=1e-7)
    ours, theirs = (torch.autograd.grad(loss, list(model.main.parameters())) for loss in (found.total, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-7)


def test_counts_are_put_back_and_what_is_gone_is_left_out() -> None:
    made, again = objective(1.0, 0.0), objective(1.0, 0.0)
    made.prepare_batch(windows(2, 6, 3, 3))
    state = made.extra_state()
    again.load_extra_state(state | {"candidates/steps": torch.tensor(1), "candidates/bank/keys": torch.zeros(3)})
    found = again.extra_state()
    assert int(state["candidates/counts"].sum()) > 0 and state.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="both 0"):
        objective(0, 0)


@pytest.mark.parametrize(
    ("kind", "fraction", "iem"),
    [
        ("lstm", 0.5, 1.0),
        ("transformer", 1.0, 0.0),
        ("lstm", 0, 1),
        ("hred", 0.5, 1.0),
        ("megabyte", 0.5, 1.0),
        ("reader", 0.5, 1.0),
    ],
)
def test_pieces_change_nothing(kind: str, fraction: float, iem: float) -> None:
    given = windows(5, 6, 3, 3)
    given.lengths[3, 2:] = 0
    given.starts |= torch.rand(5, 6) < 0.2
    made = [ChunkObjective(small(kind), IEMOptions(), iem, fraction, pieces) for pieces in (1, 2, 7)]
    check_same([losses_and_gradients(each, given, EXTRA) for each in made])


@pytest.mark.parametrize("kind", ["lstm", "previous", "hred"])
def test_pieces_are_computed_again_with_the_same_dropout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is that of the pieces as they were computed first, not of others by chance."""
    options, given = small_options(kind, layers=2), windows(5, 6, 3, 3)
    options.main, options.decoder = replace(options.main, dropout=0.4), replace(options.decoder, dropout=0.4)
    torch.manual_seed(0)
    made = ChunkObjective(HAED(options, IEMOptions(), ChunkingSpec(3, 3, False, 6)).double(), IEMOptions(), 1.0, 0.5, 2)
    again = losses_and_gradients(made, given)
    monkeypatch.setattr(made, "recompute", lambda function, *arguments, **_: function(*arguments))
    once = losses_and_gradients(made, given)
    assert all(torch.equal(one, other) for one, other in zip(again, once, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "transformer", "hred", "megabyte", "reader"])
def test_a_batch_without_chunks_and_one_with_a_single_chunk_are_defined(kind: str) -> None:
    given = TokenBatch.from_chunks(torch.zeros(1, 6, 3, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long))
    for count in (0, 1):
        made = ChunkObjective(small(kind), IEMOptions(), 1.0, 0.5)
        given.lengths[:, :count] = 3
        losses = made(made.prepare_batch(given))
        losses.total.backward()
        assert losses.figures["iem"].item() == 0 and losses.nats.isfinite()
        assert all(p.grad is not None and p.grad.to_dense().isfinite().all() for p in made.parameters())


def test_a_further_term_is_0_on_a_rank_without_chunks() -> None:
    made, given = objective(1.0, 0.5), windows(2, 6, 3, 3)
    made.terms = {"norm": (0.5, lambda inputs: inputs.queries.square().mean())}
    assert made(made.prepare_batch(given)).figures["iem_norm"] > 0
    given.lengths[:] = 0
    losses = made(made.prepare_batch(given))
    losses.total.backward()
    assert losses.figures["iem_norm"] == 0 and losses.total.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
