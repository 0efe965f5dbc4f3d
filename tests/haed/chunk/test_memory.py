"""The likelihood of all parts: sums to one over all strings for every subset, streams, samples, and is fitted."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from haed.base import TokenBatch
from haed.chunk.copied import SHARPNESS, Copied
from haed.chunk.memory import DocumentMemory, Memory, MemoryGate, Part, name_parts
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, chunk_keys
from haed.chunk.recalled import ChunkRecall, Recalled
from haed.chunk.repeated import ORDERS, Repeated
from haed.chunk.spelling import DocumentWords, Speller
from haed.sampling import ChunkSampler, Draw, find_likeliest_chunks
from tests.conftest import mostly_nightly
from tests.haed.chunk.test_mixture import K, T, V, knowing, mixed
from tests.haed.chunk.test_model import append_chunks, windows
from tests.haed.test_sampling import DRAWN, fits, frequencies

ALL = ("copied", "repeated", "recalled", "words")
SUBSETS = [names for size in range(len(ALL) + 1) for names in itertools.combinations(ALL, size)]


def recall_some(every: Chunks) -> ChunkRecall:
    """The recall of two documents of some of the strings, one of them unknown to the vocabulary."""
    rows = torch.tensor([0, 3, 6, 9, 12])
    rows = rows[chunk_keys(every.tokens[rows], every.lengths[rows]).argsort()]
    return ChunkRecall.build(every[rows], torch.tensor([1, 2, 3, 1, 2, 4, 5, 1, 0, 2, 1, 2, 3, 0], dtype=torch.int32))


def remembering(names: tuple[str, ...], known: bool = True) -> tuple[HAED, Chunks]:
    """A tiny model with some parts and a gate of random weights."""
    model, every = knowing() if known else mixed()
    recall = recall_some(every)
    makers: dict[str, Callable[[], Part]] = {
        "copied": lambda: Copied(6),
        "repeated": lambda: Repeated(K, 5),
        "recalled": lambda: Recalled(recall),
    }

    def start() -> DocumentMemory:
        words = DocumentWords(K, V, False) if "words" in names else None
        return DocumentMemory([makers[name]() for name in names if name in makers], words)

    parts = start().parts
    features = 6 + known + sum(part.features for part in parts)
    generator = torch.Generator().manual_seed(4)
    all_names = name_parts(known, parts)
    weight = torch.randn(features, len(all_names), generator=generator, dtype=torch.float64)
    zeros = torch.zeros(features, dtype=torch.float64)
    gate = MemoryGate(0.5 * weight, torch.randn(len(all_names), generator=generator).double(), zeros, zeros + 1)
    scale = torch.randn(K + 1, DocumentWords.contexts, generator=generator, dtype=torch.float64)
    model.memory = Memory(all_names, start, gate, Speller(scale) if "words" in names else None)
    return model, every


def document(length: int) -> TokenBatch:
    return windows(1, length, K, V)


@torch.no_grad()
def score_document(model: HAED, given: TokenBatch) -> Tensor:
    """Log P of every chunk of a document in one window."""
    assert model.memory is not None
    chunks, scores = Chunks(given.tokens, given.lengths)[given.chunk_mask], model.score(given, given.chunk_mask)
    return model.memory.score_chunks(model.memory.start_document(), chunks, scores).joint_log_prob


def log_probs_of_all(model: HAED, given: TokenBatch, every: Chunks) -> Tensor:
    """Log P of every string after a document, each scored by itself in one window."""
    return torch.stack([score_document(model, whole)[-1] for whole in append_chunks(given, every).split(1)])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("names", mostly_nightly(SUBSETS, *SUBSETS[::3], SUBSETS[-1]))
def test_the_probabilities_of_all_chunks_sum_to_one_for_every_subset_of_parts(
    names: tuple[str, ...], known: bool
) -> None:
    model, every = remembering(names, known)
    for length in (0, 1, 3):  # an empty memory is at the start of a document
        total = log_probs_of_all(model, document(length), every).exp().sum()
        torch.testing.assert_close(total, torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("names", SUBSETS)
def test_one_chunk_at_a_time_scores_like_all_at_once(names: tuple[str, ...]) -> None:
    model, _ = remembering(names)
    assert model.memory is not None
    given = document(T)
    chunks = Chunks(given.tokens, given.lengths)[given.chunk_mask]
    with torch.no_grad():
        memory, single = model.memory.start_document(), []
        for place in range(T):
            which = torch.zeros_like(given.chunk_mask)
            which[0, place] = True
            part = model.score(given, which)
            one = chunks[torch.tensor([place])]
            single.append(model.memory.score_chunks(memory, one, part).joint_log_prob)
    torch.testing.assert_close(torch.cat(single), score_document(model, given))


def test_copied_chunks_are_weighted_by_the_similarity_of_states_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    values = torch.randint(0, 5, (40,), generator=generator)
    chunks = Chunks(values[:, None], torch.ones(40, dtype=torch.long))
    for most in (1, 7, 100):
        found = Copied(most).score(states, chunks)
        streamed = Copied(most)
        pieces = [streamed.score(states[a : a + 9], chunks[torch.arange(a, min(a + 9, 40))]) for a in range(0, 40, 9)]
        unit = F.normalize(states, dim=1)
        for place in range(40):
            before = range(max(0, place - most), place)
            weights = [float((SHARPNESS * unit[place] @ unit[i]).exp()) for i in before]
            same = [weight for weight, i in zip(weights, before, strict=True) if values[i] == values[place]]
            expected = sum(same) / sum(weights) if weights else 0.0
            assert float(found.log_prob[place].exp()) == pytest.approx(expected, abs=1e-12)
            assert bool(found.present[place]) == (place > 0)
        torch.testing.assert_close(torch.cat([each.log_prob for each in pieces]), found.log_prob)
        torch.testing.assert_close(torch.cat([each.features for each in pieces]), found.features)


def test_repeated_chunks_are_counted_by_order_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(5)
    values = [0, 1, 2, 0, 1, 2, *torch.randint(0, 3, (60,), generator=generator).tolist()]
    chunks = Chunks(torch.tensor(values)[:, None], torch.ones(len(values), dtype=torch.long))
    states = torch.zeros(len(values), 1)
    for most in (3, 10, 100):
        found = Repeated(1, most).score(states, chunks)
        part, streamed = Repeated(1, most), []
        for place in range(len(values)):
            first = max(0, place - most)
            sequence = [-1, *values]  # with the beginning of the document
            probability = values[first:place].count(values[place]) / max(1, place - first)
            for order in ORDERS:
                context = sequence[max(0, place + 1 - order) : place + 1]
                after = [
                    values[i]
                    for i in range(first, place)
                    if i + 1 >= order and sequence[i + 1 - order : i + 1] == context
                ]
                if after and len(context) == order:
                    types = len(set(after))
                    probability = (after.count(values[place]) + types * probability) / (len(after) + types)
            assert float(found.log_prob[place].exp()) == pytest.approx(probability)
            assert bool(found.present[place]) == (place > 0)
            prediction = part.predict_next(states[0])
            assert prediction.features.equal(found.features[place])
            if prediction.present:
                listed, each = prediction.list_outcomes()
                assert float(each.sum()) == pytest.approx(1)
                assert float(each[listed.tokens[:, 0] == values[place]].sum()) == pytest.approx(probability)
            streamed.append(part.score(states[:1], chunks[torch.tensor([place])]).log_prob)
        assert torch.cat(streamed).equal(found.log_prob)


def test_the_repeated_part_forgets_all_of_a_chunk() -> None:
    part = Repeated(1, 4)
    part.remember_chunks(torch.zeros(0), Chunks(torch.arange(200)[:, None], torch.ones(200, dtype=torch.long)))
    assert len(part._counts._following) <= 4 * (len(ORDERS) + 1) and len(part._counted) == 4


def test_each_part_draws_its_outcomes_with_the_probabilities_that_it_lists() -> None:
    model, every = remembering(ALL)
    assert model.memory is not None
    given, memory = document(T), model.memory.start_document()
    memory.remember_chunks(torch.randn(T, 4).double(), Chunks(given.tokens[0].long(), given.lengths[0].long()))
    generator = torch.Generator().manual_seed(0)
    for part in memory.parts:
        prediction = part.predict_next(torch.randn(4, generator=generator).double())
        chunks, probability = prediction.list_outcomes()
        wanted = torch.zeros(len(every), dtype=torch.float64)
        wanted.index_add_(0, ChunkVocabulary(every).find_rows(chunks), probability)
        drawn = [prediction.draw_outcome(generator) for _ in range(DRAWN // 5)]
        assert fits(frequencies(Chunks.concatenate(drawn), every), wanted, len(drawn)), part.name


def test_a_copy_of_a_memory_goes_on_by_itself() -> None:
    model, every = remembering(ALL)
    assert model.memory is not None
    states = torch.randn(len(every), 4, generator=torch.Generator().manual_seed(0)).double()
    for number, part in enumerate(model.memory.start_document().parts):
        memory, alone = (model.memory.start_document() for _ in range(2))
        for each in (memory, alone):
            each.remember_chunks(states[:3], every[torch.arange(3)])
        memory.fork().remember_chunks(states[3:], every[torch.arange(3, len(every))])
        predicted = [each.parts[number].predict_next(states[0]).list_outcomes() for each in (memory, alone)]
        assert predicted[0][1].equal(predicted[1][1]), part.name


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("opened", mostly_nightly([[], [1], [1, 0]], [1]))
def test_chunks_are_drawn_and_listed_as_the_likelihood_says(opened: list[int], known: bool) -> None:
    model, every = remembering(ALL, known)
    given, beginning = document(2), torch.tensor(opened, dtype=torch.long)
    log_prob = log_probs_of_all(model, given, every)
    begins = (every.tokens[:, : len(opened)] == beginning).all(1) & (every.lengths >= len(opened))
    wanted = log_prob.exp() * begins / log_prob[begins].exp().sum()
    with torch.no_grad():
        sampler = ChunkSampler(model, given)
        found = find_likeliest_chunks(
            model, sampler.prediction, sampler.last, beginning, len(every), sampler.documents[0]
        )
    ranked = wanted.sort(descending=True).values[: int(begins.sum())]
    torch.testing.assert_close(found.probability, ranked)
    assert all(((share >= 0) & (share <= 1)).all() for share in found.parts.values())
    assert sum(found.gate.values()) < 1 and set(found.gate) == {*(["known"] if known else []), *ALL} - {"words"}
    drawing = ChunkSampler(model, given, DRAWN // (50 if opened else 10))
    drawn = drawing.draw_chunk(Draw(generator=torch.Generator().manual_seed(1)), beginning)
    assert fits(frequencies(drawn, every), wanted, len(drawn))
    for name, number in drawing.parts.items():
        assert abs(float(number.mean()) - found.gate[name]) < 0.08


@pytest.mark.parametrize("length", range(1, 5))
def test_a_chunk_that_the_words_of_the_document_make_likely_is_listed(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the decoder alone would spell others."""
    model, every = remembering(("words",), known=False)
    assert model.memory is not None
    model.memory.speller = Speller(torch.full((K + 1, DocumentWords.contexts), -6.0, dtype=torch.float64))
    monkeypatch.setattr("haed.sampling._BEAM", 4)
    given = document(length)
    wanted = log_probs_of_all(model, given, every).exp().sort(descending=True).values
    sampler = ChunkSampler(model, given)
    nothing = torch.zeros(0, dtype=torch.long)
    found = find_likeliest_chunks(model, sampler.prediction, sampler.last, nothing, 2, sampler.documents[0])
    torch.testing.assert_close(found.probability, wanted[:2], rtol=1e-4, atol=0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("names", SUBSETS[1:])
def test_every_subset_of_parts_can_be_sampled(names: tuple[str, ...], known: bool) -> None:
    model, _ = remembering(names, known)
    sampler = ChunkSampler(model, document(2))
    drawn = [sampler.draw_chunk(Draw(0.8, generator=torch.Generator().manual_seed(0))) for _ in range(3)]
    assert all((each.lengths > 0).all() for each in drawn)


def test_a_long_prompt_is_remembered_whole_and_sampling_goes_on_past_the_window() -> None:
    model, _ = remembering(ALL)
    sampler = ChunkSampler(model, document(3 * T), 2)
    parts = [part for memory in sampler.documents for part in memory.parts if isinstance(part, Copied)]
    assert [len(part.chunks) for part in parts] == [6, 6]
    generator = torch.Generator().manual_seed(0)
    for _ in range(2 * T):
        drawn = sampler.draw_chunk(Draw(0.8, generator=generator))
        assert (drawn.lengths > 0).all()
    first, second = (memory.parts[0] for memory in sampler.documents)
    assert isinstance(first, Copied) and isinstance(second, Copied)
    assert not first.chunks.tokens.equal(second.chunks.tokens)


def test_the_fitted_gate_gives_held_out_chunks_the_parts_that_predict_them() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    good = (features[:, 1] > 0).long()
    log_prob = torch.full((2000, 2), -6.0, dtype=torch.float64)
    log_prob[torch.arange(2000), good] = -0.1
    present = torch.ones(2000, 2, dtype=torch.bool)
    present[:100, 1] = False
    gate = MemoryGate.fit(features, present, log_prob)
    weights = gate.weigh_parts(features, present).exp()
    assert (weights[:100, 1] == 0).all()
    clear = (features[:, 1].abs() > 0.5) & present[:, 1]
    assert (weights.argmax(1) == good)[clear].all()
    again = MemoryGate.fit(features, present, log_prob)
    assert again.weight.equal(gate.weight)
    far = torch.tensor([[1e9, 0.0, 0.0]], dtype=torch.float64)
    assert gate.weigh_parts(far, present[-1:]).isfinite().all()
