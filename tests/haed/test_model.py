"""The model: probabilities that sum to one, causality, and likelihood step by step."""

import itertools
from typing import Literal

import pytest
import torch

from haed.model import HAED
from haed.options import DecoderOptions, EncoderOptions, IEMOptions, MainOptions, ModelOptions
from haed.sampling import Draw, Sampler


def decoder_options(decoder: str, **sizes: int) -> DecoderOptions:
    """Of an LSTM, a transformer, or one that sees the chunk before (previous)."""
    kind: Literal["lstm", "transformer"] = "lstm" if decoder == "lstm" else "transformer"
    return DecoderOptions(kind=kind, heads=2, previous=decoder == "previous", **sizes)


def small(
    decoder: str,
    k: int = 3,
    vocabulary: int = 3,
    fixed: bool = False,
    context: int = 6,
    layers: int = 1,
    iem: IEMOptions | None = None,
) -> HAED:
    torch.manual_seed(0)
    options = ModelOptions(
        encoder=EncoderOptions(token_width=3, hidden=8, width=8),
        main=MainOptions(layers=2, width=8, heads=2, head_width=6, ffn=16),
        decoder=decoder_options(decoder, width=8, ffn=16, token_width=4, layers=layers),
    )
    model = HAED(options, iem or IEMOptions(), k, vocabulary, fixed, context).double()
    with torch.no_grad():  # away from the symmetric start
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def windows(
    count: int, context: int, k: int, vocabulary: int, fixed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, k + 1, (count, context), generator=generator)
    if fixed:
        lengths[:] = k
    tokens = torch.randint(vocabulary, (count, context, k), generator=generator)
    return tokens * (torch.arange(k) < lengths[..., None]), lengths


@pytest.mark.parametrize(
    ("decoder", "fixed", "layers"),
    [("lstm", False, 1), ("lstm", True, 2), ("transformer", False, 2), ("previous", False, 2)],
)
def test_probabilities_of_all_chunk_sequences_sum_to_one(decoder: str, fixed: bool, layers: int) -> None:
    k, vocabulary = 2, 2
    model = small(decoder, k, vocabulary, fixed, layers=layers)
    sizes = [k] if fixed else range(1, k + 1)
    chunks = [chunk for size in sizes for chunk in itertools.product(range(vocabulary), repeat=size)]
    pairs = list(itertools.product(chunks, repeat=2))
    tokens = torch.zeros(len(pairs), 2, k, dtype=torch.long)
    for row, pair in zip(tokens, pairs, strict=True):
        for cell, chunk in zip(row, pair, strict=True):
            cell[: len(chunk)] = torch.tensor(chunk)
    lengths = torch.tensor([[len(a), len(b)] for a, b in pairs])
    with torch.no_grad():
        scores = model.log_likelihood(tokens, lengths, torch.zeros_like(lengths, dtype=torch.bool))
    assert float(scores.sum(1).exp().sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("decoder", ["lstm", "transformer", "previous"])
def test_nothing_later_changes_a_likelihood(decoder: str) -> None:
    model = small(decoder)
    tokens, lengths = windows(1, 6, 3, 3)
    starts = torch.zeros(1, 6, dtype=torch.bool)
    with torch.no_grad():
        before = model.log_likelihood(tokens, lengths, starts)
        for chunk, token in itertools.product(range(6), range(3)):
            if token >= lengths[0, chunk]:
                continue
            changed = tokens.clone()
            changed[0, chunk, token] = (changed[0, chunk, token] + 1) % 3
            after = model.log_likelihood(changed, lengths, starts)
            torch.testing.assert_close(after[0, :chunk], before[0, :chunk], rtol=0, atol=1e-12)
            assert not torch.allclose(after[0, chunk], before[0, chunk])
            assert chunk == 5 or not torch.allclose(after[0, chunk + 1 :], before[0, chunk + 1 :])


def test_the_first_chunk_of_a_document_does_not_see_the_one_before_as_input() -> None:
    model = small("lstm")
    tokens, lengths = windows(1, 2, 3, 3)
    starts = torch.tensor([[True, True]])
    with torch.no_grad():
        embedding = model.embed(tokens[0], lengths[0]).vector[None]
        prediction = model.predict(embedding, starts)
        other = model.predict(torch.randn_like(embedding), starts)
    torch.testing.assert_close(prediction, other)


def test_only_the_chunk_before_in_the_document_is_seen() -> None:
    """With the same ŷ, the previous chunk's tokens matter, unless a document begins after them."""
    model = small("previous")
    tokens, lengths = windows(1, 2, 3, 3)
    other = tokens.clone()
    other[0, 0, 0] = (other[0, 0, 0] + 1) % 3
    model.predictions = lambda *_: torch.ones(2, 8, dtype=torch.float64)  # type: ignore[method-assign]
    for begins in (False, True):
        starts = torch.tensor([[True, begins]])
        with torch.no_grad():
            one, two = (model.log_likelihood(each, lengths, starts)[0, 1] for each in (tokens, other))
        assert torch.equal(one, two) == begins


@pytest.mark.parametrize("decoder", ["lstm", "transformer", "previous"])
def test_padding_chunks_and_their_content_do_not_matter(decoder: str) -> None:
    model = small(decoder)
    tokens, lengths = windows(2, 6, 3, 3)
    starts = torch.zeros(2, 6, dtype=torch.bool)
    with torch.no_grad():
        whole = model.log_likelihood(tokens, lengths, starts)
        lengths[1, 4:] = 0
        cut = model.log_likelihood(tokens, lengths, starts)
    torch.testing.assert_close(cut[:, :4], whole[:, :4])
    assert cut[1, 4:].tolist() == [0, 0]


@pytest.mark.parametrize("decoder", ["lstm", "transformer", "previous"])
def test_greedy_sampling_with_caches_agrees_with_the_likelihood(decoder: str) -> None:
    """The likeliest symbol at each step of the cached sampler is the likeliest by scoring whole windows afresh."""
    model = small(decoder, context=6)
    tokens, lengths = windows(1, 2, 3, 3)
    with torch.no_grad():
        sampler = Sampler(model, tokens[0], lengths[0])
        for _ in range(3):
            context = model.embed(tokens[0], lengths[0]).vector
            inputs = torch.cat([model.main.start[None], context])[None]
            torch.testing.assert_close(sampler.prediction, model.main.step(inputs, None)[:, -1])
            before = (tokens[0, -1:], lengths[0, -1:])
            state = model.decoder.begin(sampler.prediction, before)
            first = model.decoder.step(state, torch.tensor([3])).softmax(-1)[0, :3]  # the end is masked
            for symbol in range(3):
                one = torch.tensor([[[symbol, 0, 0]]])
                grown = torch.cat([tokens, one], 1), torch.cat([lengths, torch.tensor([[1]])], 1)
                decided = model.decisions(*grown, torch.zeros_like(grown[1], dtype=torch.bool))[0, -1, 0]
                torch.testing.assert_close(decided, (first / first.sum())[symbol].log())
            chunk, length = sampler.chunk(Draw(temperature=0))
            tokens = torch.cat([tokens, chunk[None]], 1)
            lengths = torch.cat([lengths, length[None]], 1)


@pytest.mark.parametrize("decoder", ["lstm", "transformer", "previous"])
def test_prompts_continued_together_and_one_by_one_agree(decoder: str) -> None:
    """Chunks that end early leave the batch of the decoder, and the others do not notice."""
    model = small(decoder, context=6)
    with torch.no_grad():  # chunks of several lengths
        model.decoder.context.weight *= 10
        model.decoder.output.bias.zero_()[-1] += 1
    tokens, lengths = windows(12, 2, 3, 3)
    sampler = Sampler(model, tokens, lengths, samples=12)
    together = [sampler.chunk(Draw(temperature=0)) for _ in range(4)]
    assert any(len(set(ends.tolist())) > 1 for _, ends in together)
    for row in range(12):
        alone = Sampler(model, tokens[row], lengths[row])
        for chunk, ends in together:
            one, end = alone.chunk(Draw(temperature=0))
            assert one[0].tolist() == chunk[row].tolist() and end[0] == ends[row]


def test_sampling_goes_on_past_the_context_and_repeats_with_a_seed() -> None:
    model = small("lstm", context=4)
    written = []
    for _ in range(2):
        draw = Draw(temperature=1.0, top_k=2, top_p=0.9, generator=torch.Generator().manual_seed(3))
        sampler = Sampler(model, torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long), samples=2)
        chunks = [sampler.chunk(draw, torch.tensor([1]) if i == 0 else None) for i in range(11)]
        assert all(int(length.min()) >= 1 for _, length in chunks)
        assert chunks[0][0][:, 0].tolist() == [1, 1]
        written.append(torch.cat([tokens for tokens, _ in chunks]))
    assert torch.equal(*written)


def test_top_p_and_top_k_keep_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, -1.0]]).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(Draw(top_k=2, generator=generator)(logits).tolist()) == {1, 2}
    assert set(Draw(top_p=0.1, generator=generator)(logits).tolist()) == {1}
    assert set(Draw(temperature=0)(logits).tolist()) == {1}


def test_a_main_model_narrower_than_its_input_is_refused() -> None:
    options = ModelOptions(encoder=EncoderOptions(width=32), main=MainOptions(width=16))
    with pytest.raises(ValueError, match=r"model\.main\.width is 16"):
        HAED(options, IEMOptions(), 3, 3, False, 4)
