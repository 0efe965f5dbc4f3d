"""The mixture of known chunks and the decoder: sums to one, by brute force, and by its parts."""

import itertools

import torch

from haed.base import ChunkingSpec
from haed.chunk.mixture import ChunkVocabulary, VocabularyScorer
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.options import DecoderOptions, EncoderOptions, IEMOptions, MainOptions, MixtureOptions, ModelOptions
from tests.haed.chunk.test_model import windows
from tests.haed.conftest import move_parameters

K, V, T = 3, 2, 4


def mixed(known: int = 5) -> tuple[HAED, Chunks]:
    """A tiny model with every parameter moved, and all strings that a chunk can be."""
    torch.manual_seed(1)
    options = ModelOptions(
        encoder=EncoderOptions(width=6, hidden=8, token_width=3),
        main=MainOptions(width=6, layers=1, heads=1, head_width=4, ffn=8),
        decoder=DecoderOptions(width=8, token_width=3),
        mixture=MixtureOptions(known=known),
    )
    model = move_parameters(HAED(options, IEMOptions(), ChunkingSpec(K, V, False, T)))
    strings = [each for size in range(1, K + 1) for each in itertools.product(range(V), repeat=size)]
    tokens = torch.tensor([[*each, *[0] * (K - len(each))] for each in strings])
    return model, Chunks(tokens, torch.tensor([len(each) for each in strings]))


def lexicon(every: Chunks, known: int = 5) -> ChunkVocabulary:
    rows = torch.arange(len(every)).flip(0)[::2][:known]
    return ChunkVocabulary(every[rows], torch.tensor([9, 4, 3, 1, 1])[:known])


def knowing() -> tuple[HAED, Chunks]:
    """That model, which knows the chunks of `lexicon`."""
    model, every = mixed()
    model.known = model.embed_vocabulary(lexicon(every))
    return model, every


def test_the_probabilities_of_all_chunks_sum_to_one() -> None:
    """Whatever is known, at every place of a window; in brackets of parts too."""
    model, every = mixed()
    given = windows(1, T, K, V)
    for known in (lexicon(every), lexicon(every, 1)):
        model.known = model.embed_vocabulary(known, torch.bfloat16)
        for place in range(T):
            many = given[torch.zeros(len(every), dtype=torch.long)]
            many.tokens[:, place], many.lengths[:, place] = every.tokens, every.lengths
            which = torch.zeros(many.lengths.shape, dtype=torch.bool)
            which[:, place] = True
            with torch.no_grad():
                parts = model.score(many, which)
                whole = model.log_likelihood(many)[:, place]
            torch.testing.assert_close(parts.joint_log_prob, whole)
            for each in (parts.joint_log_prob, parts.decoder_log_prob, parts.known):
                assert each is not None
                torch.testing.assert_close(each.exp().sum(), torch.ones((), dtype=torch.float64))


def test_the_mixture_by_brute_force() -> None:
    """log(g · q + (1 − g) · p), with the softmax over all known chunks and their counts written out."""
    model, every = knowing()
    known, given = lexicon(every), windows(2, T, K, V)
    with torch.no_grad():
        found = model.log_likelihood(given)[given.chunk_mask]
        assert model.mixture is not None
        prediction = model.predict_vectors(given)
        embedded = model.encode(known.chunks)
        scores = model.compute_query(prediction) @ model.compute_key(embedded.vector).t() + embedded.bias
        q = (scores + model.mixture.prior * torch.tensor([9.0, 4, 3, 1, 1]).double().log()).softmax(1)
        gate = model.mixture.gate(prediction)[:, 0].sigmoid()
        spelled = model.decision_log_likelihood(given)[given.chunk_mask].sum(1).exp()
    chunks = Chunks(given.tokens, given.lengths)[given.chunk_mask]
    hit = (chunks.tokens[:, None] == known.chunks.tokens).all(2) & (chunks.lengths[:, None] == known.chunks.lengths)
    assert hit.any() and not hit.any(1).all()
    torch.testing.assert_close(found, (gate * (q * hit).sum(1) + (1 - gate) * spelled).log())


def test_blocks_and_narrow_keys_change_nothing_but_the_rounding(monkeypatch) -> None:
    monkeypatch.setattr("haed.chunk.mixture._BLOCK", {"cpu": (2, 3)})
    monkeypatch.setattr("haed.chunk.mixture._KEPT", 0)
    keys, bias, queries = torch.randn(8, 4), torch.randn(8), torch.randn(5, 4)
    chunks = Chunks(torch.arange(8)[:, None], torch.ones(8, dtype=torch.long))
    counts = torch.arange(1, 9)
    found = VocabularyScorer(ChunkVocabulary(chunks, counts), keys.bfloat16(), bias)
    assert found.keys.dtype == torch.bfloat16
    scores = queries @ keys.bfloat16().float().t() + bias + 0.5 * counts.log()
    rows = torch.tensor([7, -1, 0, 3, 2])
    torch.testing.assert_close(found.score_queries(queries, 0.5), scores)
    wanted = scores.log_softmax(1).gather(1, rows.clamp(min=0)[:, None])[:, 0].where(rows >= 0, -torch.inf)
    torch.testing.assert_close(found.log_softmax(queries, rows, 0.5), wanted)


def test_chunks_are_found_by_their_tokens_not_by_their_hashes(monkeypatch) -> None:
    """With one hash for all, what is not there is not found."""
    monkeypatch.setattr("haed.chunk.mixture.chunk_keys", lambda tokens, lengths: torch.zeros_like(lengths))
    chunks = Chunks(torch.tensor([[1, 2]]), torch.tensor([2]))
    found = ChunkVocabulary(chunks, torch.tensor([7]), torch.tensor([3]))
    asked = Chunks(torch.tensor([[1, 2], [1, 0], [2, 1]]), torch.tensor([2, 1, 2]))
    assert found.find_rows(asked).tolist() == [0, -1, -1]
    counts, documents = found.counts_of(asked)
    assert (counts.tolist(), documents.tolist()) == ([7, 0, 0], [3, 0, 0])
