"""What only models of chunks have: the start of documents, the chunk before, prompts, and how symbols are drawn."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from haed.base import ChunkingSpec, TokenBatch
from haed.chunk.decoder import LSTMDecoder
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.layers.attention import Attention
from haed.options import DecoderOptions, EncoderOptions, GramsOptions, IEMOptions, MainOptions, ModelOptions
from haed.sampling import ChunkSampler, Draw
from tests.haed.conftest import move_parameters


def decoder_options(decoder: str, **sizes: Any) -> DecoderOptions:
    """Of an LSTM, a transformer, or one that sees the chunk before (previous)."""
    kind: Literal["lstm", "transformer"] = "lstm" if decoder == "lstm" else "transformer"
    return DecoderOptions(kind=kind, heads=2, previous=decoder == "previous", **sizes)


def small_options(kind: str, layers: int = 1) -> ModelOptions:
    """HAED with a decoder of that kind, or another kind of model.

    Those are `hred`, `megabyte`, `reader` (a transformer encoder with a table), `grams` (an LSTM with a table) and `mixed` (a
    mixture).
    """
    decoder = {"hred": "lstm", "megabyte": "transformer", "reader": "lstm", "grams": "lstm", "mixed": "lstm"}
    decoder = decoder.get(kind, kind)
    made = ModelOptions(
        encoder=EncoderOptions(token_width=3, hidden=8, width=8, heads=2, ffn=16),
        main=MainOptions(layers=2, width=8, heads=2, head_width=6, ffn=16),
        decoder=decoder_options(decoder, width=8, ffn=16, token_width=4, layers=layers),
    )
    if kind == "hred":
        made.encoder.kind = made.main.kind = "lstm"
        made.encoder.hidden = made.main.units = 10
    elif kind == "megabyte":
        made.encoder.kind, made.decoder.context = "linear", "each"
    elif kind == "reader":
        made.encoder.kind, made.encoder.rows = "transformer", 5
    elif kind == "grams":
        made.decoder.grams = GramsOptions(rows=7, orders=[1, 3], width=3)
    elif kind == "mixed":
        made.mixture.known = 20
    return made


def small(
    kind: str,
    k: int = 3,
    vocabulary: int = 3,
    fixed: bool = False,
    context: int = 6,
    layers: int = 1,
    iem: IEMOptions | None = None,
) -> HAED:
    torch.manual_seed(0)
    cut = ChunkingSpec(k, vocabulary, fixed, context)
    return move_parameters(HAED(small_options(kind, layers), iem or IEMOptions(), cut))


def windows(count: int, context: int, k: int, vocabulary: int, fixed: bool = False) -> TokenBatch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, k + 1, (count, context), generator=generator)
    if fixed:
        lengths[:] = k
    tokens = torch.randint(vocabulary, (count, context, k), generator=generator)
    return TokenBatch.from_chunks(tokens * (torch.arange(k) < lengths[..., None]), lengths)


def append_chunks(given: TokenBatch, chunks: Chunks) -> TokenBatch:
    """One window that goes on with each of some chunks: as many windows."""
    tokens = torch.cat([given.tokens.expand(len(chunks), -1, -1), chunks.tokens[:, None]], 1)
    lengths = torch.cat([given.lengths.expand(len(chunks), -1), chunks.lengths[:, None]], 1)
    return TokenBatch.from_chunks(tokens, lengths)


@pytest.mark.parametrize("kind", ["lstm", "previous", "hred"])
@torch.no_grad()
def test_dropout_is_for_training_and_every_one_does_something(kind: str) -> None:
    plain, given = small(kind, layers=2), windows(2, 6, 3, 3)
    options = small_options(kind, layers=2)
    options.main, options.decoder = replace(options.main, dropout=0.4), replace(options.decoder, dropout=0.4)
    model = HAED(options, IEMOptions(), plain.cut).double()
    model.load_state_dict(plain.state_dict())
    still = model.eval().log_likelihood(given)
    assert torch.equal(still, plain.log_likelihood(given))
    dropped = [each for each in model.modules() if isinstance(each, torch.nn.Dropout | Attention)]
    assert len(dropped) == {"lstm": 8, "previous": 14, "hred": 2}[kind]
    for each in dropped:
        each.train()
        assert not torch.allclose(model.log_likelihood(given), still)
        model.eval()
    model.train().encoder.eval()
    draws = torch.stack([model.encode(Chunks(given.tokens[:, 0], given.lengths[:, 0])).vector for _ in range(2)])
    assert torch.equal(draws[0], draws[1])  # candidates are never dropped


@torch.no_grad()
def test_what_is_dropped_keeps_its_mean() -> None:
    options = replace(small_options("lstm").decoder, dropout=0.4)
    torch.manual_seed(0)
    decoder = LSTMDecoder(options, 8, 3, 3).double()
    draws = torch.stack([decoder.gate_table() for _ in range(2000)])
    error = (draws.mean(0) - decoder.eval().gate_table()) / (draws.std(0) / len(draws) ** 0.5)
    assert float(error.abs().max()) < 4.5


def test_all_else_begins_as_without_a_table() -> None:
    plain, made = (small_options("lstm") for _ in range(2))
    made.encoder.rows = 500
    found = []
    for options in (plain, made):
        torch.manual_seed(0)
        found.append(HAED(options, IEMOptions(), ChunkingSpec(3, 3, False, 6)).state_dict())
    table = found[1].pop("encoder.table")
    assert table.shape == (500, 8) and float(table.std()) == pytest.approx(0.5, abs=0.03)
    assert found[0].keys() == found[1].keys() and all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
@torch.no_grad()
def test_states_are_of_each_layer_and_know_what_is_before(kind: str) -> None:
    options = small_options("lstm")
    options.main.kind, options.main.layers = kind, 2  # type: ignore[assignment]
    options.main.units = 24 if kind == "lstm" else None
    model = HAED(options, IEMOptions(), ChunkingSpec(3, 3, False, 6)).eval()
    given = windows(2, 6, 3, 3)
    given.lengths[1, 4:] = 0
    *layers, last = model.layer_states(given)
    assert [len(each) for each in layers] == [10, 10]
    torch.testing.assert_close(last, model.predict_vectors(given))
    if kind == "lstm":
        torch.testing.assert_close(layers[1][:, : options.main.width], last)  # ŷ is cut from its units
    else:
        torch.testing.assert_close(model.main.norm(layers[1]), last)
    for number, layer in enumerate(layers):
        torch.testing.assert_close(model.extract_vectors(given, "contexts", number), layer)
    given.tokens[0, 3] = (given.tokens[0, 3] + 1) % 3
    for before, now in zip([*layers, last], model.layer_states(given), strict=True):
        torch.testing.assert_close(before[:4], now[:4])  # up to the place before the chunk that is another
        assert not torch.allclose(before[4], now[4])
        torch.testing.assert_close(before[6:], now[6:])
    with pytest.raises(ValueError, match="HAED has no layer 2 of contexts"):
        model.extract_vectors(given, "contexts", 2)


def test_the_first_chunk_of_a_document_does_not_see_the_one_before_as_input() -> None:
    model = small("lstm")
    given = windows(1, 2, 3, 3)
    starts = torch.tensor([[True, True]])
    with torch.no_grad():
        embedding = model.extract_vectors(given, "chunks")[None]
        prediction = model.main(embedding, starts)
        other = model.main(torch.randn_like(embedding), starts)
    torch.testing.assert_close(prediction, other)


def test_only_the_chunk_before_in_the_document_is_seen() -> None:
    """With the same ŷ, the previous chunk's tokens matter, unless a document begins after them."""
    model = small("previous")
    given = windows(1, 2, 3, 3)
    other = given.tokens.clone()
    other[0, 0, 0] = (other[0, 0, 0] + 1) % 3
    model.predict_vectors = lambda *_: torch.ones(2, 8, dtype=torch.float64)  # type: ignore[method-assign]
    for begins in (False, True):
        starts = torch.tensor([[True, begins]])
        with torch.no_grad():
            pair = (TokenBatch(each, given.lengths, starts) for each in (given.tokens, other))
            one, two = (model.log_likelihood(each)[0, 1] for each in pair)
        assert torch.equal(one, two) == begins


@pytest.mark.parametrize("decoder", ["lstm", "transformer", "previous"])
def test_prompts_continued_together_and_one_by_one_agree(decoder: str) -> None:
    """Chunks that end early leave the batch of the decoder, and the others do not notice."""
    model = small(decoder, context=6)
    with torch.no_grad():  # chunks of several lengths
        model.decoder.context.weight *= 10
        model.decoder.output.bias.zero_()[-1] += 1
    given = windows(12, 2, 3, 3)
    sampler = ChunkSampler(model, given, samples=12)
    together = [sampler.draw_chunk(Draw(temperature=0)) for _ in range(4)]
    assert any(len(set(drawn.lengths.tolist())) > 1 for drawn in together)
    for row in range(12):
        alone = ChunkSampler(model, given[row : row + 1])
        for drawn in together:
            one = alone.draw_chunk(Draw(temperature=0))
            assert one.tokens[0].tolist() == drawn.tokens[row].tolist() and one.lengths[0] == drawn.lengths[row]


def test_a_decoder_that_sees_the_chunk_before_takes_the_bytes_of_a_prompt() -> None:
    """They come from a chunker as uint8, which an embedding does not take for numbers of rows."""
    model = small("previous")
    given = windows(1, 2, 3, 3)
    prompts = (given, replace(given, tokens=given.tokens.byte()))
    one, two = (ChunkSampler(model, each).draw_chunk(Draw(temperature=0)) for each in prompts)
    assert torch.equal(one.tokens, two.tokens)


def test_sampling_goes_on_past_the_context_and_repeats_with_a_seed() -> None:
    model = small("lstm", context=4)
    written = []
    for _ in range(2):
        draw = Draw(temperature=1.0, top_k=2, top_p=0.9, generator=torch.Generator().manual_seed(3))
        nothing = TokenBatch.from_chunks(torch.zeros(1, 0, 3, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long))
        sampler = ChunkSampler(model, nothing, samples=2)
        chunks = [sampler.draw_chunk(draw, torch.tensor([1]) if i == 0 else None) for i in range(11)]
        assert all(int(drawn.lengths.min()) >= 1 for drawn in chunks)
        assert chunks[0].tokens[:, 0].tolist() == [1, 1]
        written.append(torch.cat([drawn.tokens for drawn in chunks]))
    assert torch.equal(*written)


def test_the_scale_learns_by_shares_of_itself_and_stays_positive() -> None:
    for options, begins in ((IEMOptions(similarity="cosine"), 1 / 0.07), (IEMOptions(), 8**-0.5)):
        model = HAED(small_options("lstm"), options, ChunkingSpec(3, 3, False, 6))
        optimizer = torch.optim.Adam([model.log_scale], lr=4e-3)

        def steps(count: int, model: HAED = model, optimizer: torch.optim.Adam = optimizer) -> float:
            for _ in range(count):
                optimizer.zero_grad()
                model.bounded_scale(model.log_scale).backward()
                optimizer.step()
            return float(model.bounded_scale(model.log_scale.detach()))

        assert steps(0) == pytest.approx(begins, rel=1e-5)
        assert 0.6 < steps(100) / begins < 0.8  # where the scale itself would have gone from 14.29 to 13.89
        for far, bound in ((-50.0, 1e-3), (50.0, 1e3)):
            assert float(model.bounded_scale(torch.tensor(far))) == pytest.approx(bound, rel=0.01)


def test_the_papers_score_is_the_plain_product() -> None:
    model = small("lstm", iem=IEMOptions(scale="none", bias=False, head="none"))
    given = windows(2, 6, 3, 3)
    with torch.no_grad():
        found = model.encode(Chunks(given.tokens.flatten(0, 1), given.lengths.flatten()))
        prediction = model.predict_vectors(given)
        assert torch.equal(model.compute_query(prediction), prediction)
        assert torch.equal(model.compute_key(found.vector), found.vector)
    names = [name for name, _ in model.named_parameters()]
    assert not found.bias.any() and not {"log_scale", "encoder.bias.weight", "head.weight"} & set(names)
