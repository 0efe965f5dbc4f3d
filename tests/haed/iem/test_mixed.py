"""Training a mixture: what is decoded, what a step's candidates tell of q, value and gradients by brute force."""

import itertools

import pytest
import torch
from torch import Tensor

from haed.base import TokenBatch
from haed.chunk.mixture import ChunkVocabulary, inclusion_probabilities, systematic_sample, target_log_prob
from haed.chunk.packing import Chunks
from haed.iem.objective import ChunkBatch, ChunkObjective
from haed.iem.sampled_softmax import blockwise_cross_entropy
from haed.options import IEMOptions
from tests.haed.chunk.test_mixture import K, T, V, mixed
from tests.haed.chunk.test_model import windows
from tests.haed.iem.test_objective import check_same, losses_and_gradients


def objective(fraction: float = 1.0, pieces: int = 1, place: str | torch.device = "cpu") -> ChunkObjective:
    """Of the tiny mixture; the train split has most of all strings, some of them in one document alone."""
    model, every = mixed()
    counts = torch.arange(len(every)) % 4
    documents = counts.clamp(max=2).where(torch.arange(len(every)) % 5 > 0, 1)
    known = ChunkVocabulary(every[counts > 0], counts[counts > 0], documents[counts > 0])
    return ChunkObjective(model.to(place), IEMOptions(), 1.0, fraction, pieces, lexicon=known)


def given() -> TokenBatch:
    made = windows(4, T, K, V)
    made.lengths[3, 2:] = 0
    made.starts[1, 2] = True
    return made


@pytest.mark.parametrize("count", [1, 7, 30, 49, 50])
def test_shares_sum_to_the_number_and_the_rarer_are_the_likelier(count: int) -> None:
    elsewhere = torch.randint(-1, 2000, (50,), generator=torch.Generator().manual_seed(0)) ** 2 // 2000
    found = inclusion_probabilities(elsewhere, count)
    assert float(found.sum()) == pytest.approx(count) and 0 < found.min() and found.max() <= 1
    unsure = found < 1
    assert not unsure.any() or found[unsure].max() <= 1
    weighed = found * (elsewhere.clamp(min=0) + 1).double().sqrt()
    torch.testing.assert_close(weighed[unsure], weighed[unsure][:1].expand(int(unsure.sum())))
    assert not unsure.any() or (weighed[~unsure] <= weighed[unsure][:1] + 1e-9).all()  # these would be above 1


def test_chunks_are_drawn_as_often_as_their_shares_say() -> None:
    """And what they stand for by their weights is, in the mean, the sum of all."""
    generator, times = torch.Generator().manual_seed(0), 4000
    share = inclusion_probabilities(torch.tensor([0, 0, 1, 3, 8, 15, 50, 99, 400, 10**6]), 5)
    chosen = torch.stack([systematic_sample(share, generator) for _ in range(times)]).double()
    assert set(chosen.sum(1).tolist()) == {5.0}
    deviation = (share * (1 - share) / times).sqrt()
    assert ((chosen.mean(0) - share).abs() <= 5 * deviation + 1e-12).all() and (share == 1).any()
    values = torch.arange(10).double()
    sums = (chosen * values / share).sum(1)
    assert abs(float(sums.mean() - values.sum())) < 5 * float(sums.std()) / times**0.5


def test_log_q_is_unbiased_in_its_normaliser_and_exact_with_all_candidates() -> None:
    """Over all sets of other candidates, each there with its own probability, in float64."""
    torch.manual_seed(0)
    count, target = 5, 2
    scores, pi = torch.randn(count).double(), torch.rand(count).double()
    total = torch.zeros((), dtype=torch.float64)
    for there in itertools.product((0, 1), repeat=count):
        chance = float(torch.where(torch.tensor(there) > 0, pi, 1 - pi).prod())
        present = torch.tensor([i for i in range(count) if there[i] or i == target])
        bias = (scores - pi.log())[present]
        nothing, column = bias.new_zeros(1, 1), (present == target).nonzero()[0]
        found = blockwise_cross_entropy(nothing, bias.new_zeros(len(bias), 1), bias, column)
        log_q = target_log_prob(found.target_score, found.normaliser, pi.log()[target][None])
        total += chance * (scores[target] - log_q[0]).exp()
        if all(there):  # and certainly so
            sure = blockwise_cross_entropy(nothing, bias.new_zeros(len(bias), 1), scores, column)
            log_q = target_log_prob(sure.target_score, sure.normaliser, torch.zeros(1))
            torch.testing.assert_close(log_q, scores.log_softmax(0)[target][None])
    torch.testing.assert_close(total, scores.exp().sum())


def name_chunks(chunks: Chunks) -> list[tuple[int, ...]]:
    return [tuple(row[:n].tolist()) for row, n in zip(chunks.tokens, chunks.lengths, strict=True)]


def by_hand(made: ChunkObjective, batch: ChunkBatch, windows: TokenBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """IEM loss of each row, and of the mixture g, q without a gradient, and p of the decoder, from the formulas: (M,) each."""
    model, lexicon = made.system, made.lexicon
    assert model.mixture is not None and lexicon is not None and batch.candidates.adjustment is not None
    real = windows.chunk_mask
    names = name_chunks(Chunks(windows.tokens, windows.lengths)[real])
    of_window = real.nonzero()[:, 0].tolist()
    distinct = Chunks.concatenate([inputs.chunks for inputs in batch.encoded])
    columns = {name: column for column, name in enumerate(name_chunks(distinct))}
    embedded = model.encode(distinct)
    prediction = model.predict_vectors(windows)
    counts, documents = lexicon.counts_of(distinct)
    scores = model.compute_query(prediction) @ model.compute_key(embedded.vector).t() + embedded.bias
    scores = scores + model.mixture.prior * counts.clamp(min=1).double().log()
    losses, q = [], []
    for row, name in enumerate(names):
        elsewhere = {other for other, window in zip(names, of_window, strict=True) if window != of_window[row]}
        before = {names[i] for i in range(row) if of_window[i] == of_window[row]}
        pi = {
            each: torch.ones(()) if each in before else batch.candidates.adjustment[columns[each]].exp()
            for each in elsewhere | before | {name}
        }
        weighed = {each: scores[row, columns[each]].exp() / pi[each] for each in pi}
        losses.append(-(weighed[name] / torch.stack(list(weighed.values())).sum()).log())
        own = scores[row, columns[name]].exp()
        others = [weighed[each] for each in weighed if each != name]
        here = own / (own + torch.stack(others).sum()) if int(documents[columns[name]]) > 1 else 0 * own
        q.append(here.detach())
    gate = model.mixture.gate(prediction)[:, 0].sigmoid()
    return torch.stack(losses), gate, torch.stack(q), model.decision_log_likelihood(windows)[real].sum(1).exp()


def gradients(made: ChunkObjective, loss: Tensor, part: str = "") -> dict[str, Tensor]:
    names = [name for name, _ in made.system.named_parameters() if name.startswith(part)]
    found = torch.autograd.grad(loss, [made.system.get_parameter(name) for name in names], retain_graph=True)
    return dict(zip(names, found, strict=True))


def test_value_and_gradients_of_a_step_by_brute_force() -> None:
    made = objective()
    batch = made.prepare_batch(given())
    losses = made(batch)
    iem, gate, q, p = by_hand(made, batch, given())
    mixed = gate * q + (1 - gate) * p
    assert 0 < int((q == 0).sum()) < len(q)  # some chunks are in no other document, or not known at all
    wanted = {"iem": iem.mean(), "nats": -mixed.log().sum(), "gate": gate.mean()}
    found = losses.figures | {"nats": losses.nats}
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)
    ours, theirs = gradients(made, losses.total), gradients(made, iem.mean() - mixed.log().mean())
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7, msg=name)
    share = ((1 - gate) * p / mixed).detach()  # the decoder's responsibility
    for name, value in gradients(made, -(share * p.log()).mean(), "decoder.").items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7, msg=name)
    for part in ("head.", "log_scale", "mixture.prior", "encoder.bias"):  # of q, which the IEM loss alone trains
        for name, value in gradients(made, iem.mean(), part).items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_a_share_of_the_chunks_stands_for_all() -> None:
    """In the mean over what is drawn; so many windows were counted before that these change no correction."""
    made, generator = objective(), torch.Generator().manual_seed(0)
    assert made.candidates is not None and made.candidates.counts is not None
    made.candidates.windows = 1e15
    made.candidates.counts.table.fill_(3 * 10**14)

    def exact(fraction: float) -> Tensor:
        made.decode_fraction = fraction
        with torch.no_grad():
            losses = made(made.prepare_batch(given(), None, generator))
        assert losses.nats is not None
        return torch.stack([losses.nats, torch.as_tensor(losses.figures["gate"])])

    some = torch.stack([exact(0.3) for _ in range(100)])
    deviation = some.std(0) / 100**0.5
    assert ((some.mean(0) - exact(1.0)).abs() < 4 * deviation).all() and (deviation > 0).all()


def test_pieces_change_nothing() -> None:
    check_same([losses_and_gradients(objective(0.5, pieces), given()) for pieces in (1, 2, 3)])


@pytest.mark.parametrize(("fraction", "trained"), [(0.5, {"gate", "prior"}), (0.0, {"prior"})])
def test_what_a_phase_trains_of_the_mixture(fraction: float, trained: set[str]) -> None:
    """Without a decoded share the score learns beside the counts all the same, so that phase two can go on from it."""
    made = objective(fraction)
    made(made.prepare_batch(given())).total.backward()
    assert made.system.mixture is not None
    named = list(made.system.mixture.named_parameters())
    assert {name.split(".")[0] for name, x in named if x.requires_grad} == trained
    assert all((x.grad is not None) == x.requires_grad for _, x in made.system.named_parameters())


def test_a_batch_without_chunks_is_defined() -> None:
    """As a rank may have one: every parameter still takes part, for the others wait for its gradient."""
    made, empty = objective(0.5), given()
    empty.lengths[:] = 0
    losses = made(made.prepare_batch(empty))
    losses.total.backward()
    assert float(losses.total.detach()) == 0 and losses.tokens == 0
    assert all(x.grad is not None and not x.grad.any() for x in made.system.parameters())


def test_a_score_that_is_no_likelihood_is_refused() -> None:
    model, every = mixed()
    message = r"iem\.correction=none: the score is not a likelihood.*Set iem\.correction=inclusion"
    with pytest.raises(ValueError, match=message):
        ChunkObjective(model, IEMOptions(correction="none"), 1.0, 0.5, lexicon=ChunkVocabulary(every))
