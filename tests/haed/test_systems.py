"""What holds for every system: probabilities that sum to one, causality, padding, sampling that agrees with scoring.

A new family adds a line to `CASES`. Systems of chunks sum to one over sequences of chunks; one of tokens, which knows no ends,
does over sequences of tokens, and with chunks of a fixed size here.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from haed.base import ChunkingSpec, Likelihood, SequenceModel, TokenBatch
from haed.chunk.packing import Chunks
from haed.options import (
    DECODERS,
    ENCODERS,
    MAINS,
    SYSTEMS,
    DecoderOptions,
    EncoderOptions,
    GramsOptions,
    HourglassOptions,
    IEMOptions,
    MainOptions,
    ModelOptions,
    MultiscaleOptions,
    RetinaOptions,
    SpaceByteOptions,
    TokenOptions,
)
from haed.registry import KINDS, make_sampler, make_system
from haed.sampling import Draw
from haed.token.base import TokenModel
from tests.haed.chunk.test_model import append_chunks, decoder_options, windows
from tests.haed.conftest import move_parameters

MAIN = MainOptions(layers=2, width=8, heads=2, head_width=6, ffn=16)
ENCODER = EncoderOptions(token_width=3, hidden=8, width=8)
READ = EncoderOptions(token_width=3, hidden=10, width=8, heads=2, ffn=16)
SIZES = {"width": 8, "ffn": 16, "token_width": 4}
TOKEN = TokenOptions(width=8, heads=2, head_width=6, ffn=16)
GRAMS = GramsOptions(rows=32, orders=[2, 3], width=4)
SPACEBYTE = SpaceByteOptions(before=1, layers=2, after=1, width=12, heads=3, ffn=20, letters="0-0")


def of_chunks_with(
    decoder: DecoderOptions, encoder: EncoderOptions = ENCODER, main: MainOptions = MAIN
) -> ModelOptions:
    return ModelOptions(encoder=encoder, main=main, decoder=decoder)


def hourglass(hierarchy: str, token: TokenOptions = TOKEN, **chosen: object) -> ModelOptions:
    return ModelOptions(kind="hourglass", token=token, hourglass=HourglassOptions(hierarchy=hierarchy, **chosen))


def multiscale(kind: str, layers: str, token: TokenOptions = TOKEN, **chosen: object) -> ModelOptions:
    return ModelOptions(kind=kind, token=token, multiscale=MultiscaleOptions(layers=layers, **chosen))


def retina(windows: str, token: TokenOptions = TOKEN, **chosen: object) -> ModelOptions:
    return ModelOptions(kind="retina", token=token, retina=RetinaOptions(layers=2, windows=windows, **chosen))


def spacebyte(window: int, **chosen: object) -> ModelOptions:
    return ModelOptions(kind="spacebyte", token=replace(TOKEN, window=window), spacebyte=replace(SPACEBYTE, **chosen))


LSTM = decoder_options("lstm", **SIZES)
RELATIVE, LEARNED = replace(TOKEN, attention="relative"), replace(TOKEN, positions="learned")
THREE_HEADS = replace(LEARNED, attention="plain", heads=3)
CASES = {
    "lstm decoder": of_chunks_with(LSTM),
    "two layers, dropout": of_chunks_with(decoder_options("lstm", layers=2, dropout=0.3, **SIZES)),
    "transformer decoder": of_chunks_with(decoder_options("transformer", layers=2, **SIZES)),
    "sees the chunk before, dropout": of_chunks_with(
        decoder_options("previous", layers=2, dropout=0.3, **SIZES), main=replace(MAIN, dropout=0.3)
    ),
    "positions in the padding": of_chunks_with(LSTM, main=replace(MAIN, width=12, positions="concatenated")),
    "hred": of_chunks_with(
        LSTM, replace(READ, kind="lstm", output="none", layers=1), replace(MAIN, kind="lstm", units=10, dropout=0.3)
    ),
    "hred with transformer": of_chunks_with(LSTM, replace(READ, kind="lstm")),
    "megabyte": of_chunks_with(
        replace(decoder_options("transformer", layers=2, **SIZES), context="each"),
        replace(READ, kind="linear"),
        replace(MAIN, positions="learned"),
    ),
    "lstm decoder, n-grams": of_chunks_with(replace(LSTM, layers=2, grams=replace(GRAMS, orders=[1, 2, 5]))),
    "transformer decoder, n-grams": of_chunks_with(decoder_options("transformer", grams=GRAMS, **SIZES)),
    "transformer encoder": of_chunks_with(LSTM, replace(READ, kind="transformer")),
}
CASES |= {
    "flat, n-grams": hourglass("1@1 1@2 1@1", replace(TOKEN, grams=GRAMS)),
    "flat": hourglass("2@1"),
    "flat, learned positions": hourglass("2@1", LEARNED),
    "flat, sinusoids": hourglass("1@1", replace(TOKEN, positions="sinusoidal")),
    "flat, relative": hourglass("2@1", RELATIVE),
    "hourglass, nested, relative": hourglass("1@1 0@2 1@4 1@2 1@1", RELATIVE),
    "hourglass, linear": hourglass("0@1 1@2 1@1", shortening="linear", lengthening="linear"),
    "hourglass, attention from linear": hourglass(
        "1@1 1@3 0@1", shortening="attention_linear", lengthening="attention"
    ),
    "hourglass, lsh, local, dropout": hourglass(
        "1@1 1@2 1@1", replace(TOKEN, window=3, dropout=0.3), attention=["lsh", "local"]
    ),
    "hourglass, annotated": hourglass(
        "1@1 1@2 1@4 1@2 1@1",
        replace(TOKEN, attention="plain", positions="sinusoidal", activation="relu"),
        shortening="average",
        lengthening="repeat",
    ),
    "top-down": multiscale("top_down", "2@2 1@1"),
    "top-down, three scales, convolutions": multiscale("top_down", "1@4 1@2 1@1", LEARNED, pooling="convolution"),
    "top-down, threes, maxima, lsh": multiscale("top_down", "1@3 1@1", replace(TOKEN, attention="lsh"), pooling="max"),
    "top-down, bags": multiscale("top_down", "1@4 1@2", upsampling="repeat"),
    "bottom-up": multiscale("bottom_up", "2@2 1@1"),
    "bottom-up, three scales, convolutions": multiscale(
        "bottom_up", "1@4 1@2 1@1", THREE_HEADS, pooling="convolution", heads="1@4 2@2"
    ),
    "bottom-up, threes, maxima": multiscale(
        "bottom_up", "1@3 1@1", replace(TOKEN, attention="local", window=2), pooling="max"
    ),
    "bottom-up, relative": multiscale("bottom_up", "1@2 1@1", RELATIVE),
    "retina": retina("2:8@2 0:3@1"),
    "retina, three scales, convolutions": retina("7:16@4 3:9@2 0:4@1", THREE_HEADS, pooling="convolution"),
    "retina, overlapping windows, maxima": retina("1:18@3 0:2@1", pooling="max", heads="1@3 1@1"),
    "retina, relative": retina("2:9@3 0:4@1", RELATIVE),
    "spacebyte": spacebyte(3),
    "spacebyte, nothing before": spacebyte(18, before=0, width=8, letters="1-1"),
}
SHIFTED = ("flat", "hourglass, nested, relative", "hourglass, attention from linear", "spacebyte", "retina")
SHIFTED += ("top-down, three scales, convolutions", "top-down, bags", "bottom-up, three scales, convolutions")
CASES |= {f"{name}, shifted": replace(CASES[name], token=replace(CASES[name].token, shift=True)) for name in SHIFTED}
TOKENS = [case for case, options in CASES.items() if options.kind != "haed"]
OF_CHUNKS = [case for case in CASES if case not in TOKENS]
every = pytest.mark.parametrize("case", CASES)
tokens = pytest.mark.parametrize("case", TOKENS)
SAMPLED = ["flat, learned positions", "hourglass, nested, relative", "top-down", "bottom-up", "retina", "spacebyte"]
sampled = pytest.mark.parametrize("case", SAMPLED)  # by the one sampler of all; memories are tested apart


def test_every_family_and_kind_of_part_has_a_case_and_every_family_is_sampled_and_built() -> None:
    assert {options.kind for options in CASES.values()} == set(SYSTEMS) == set(KINDS)
    assert {CASES[case].kind for case in [*OF_CHUNKS, *SAMPLED]} == set(SYSTEMS)
    assert {CASES[case].kind for case in SHIFTED} == {CASES[case].kind for case in TOKENS}
    for part, kinds in (("encoder", ENCODERS), ("main", MAINS), ("decoder", DECODERS)):
        assert {getattr(CASES[case], part).kind for case in OF_CHUNKS} == set(kinds)
    assert {section for family in SYSTEMS.values() for section in family.sections} <= set(vars(ModelOptions()))


def system(case: str, k: int = 3, vocabulary: int = 3, fixed: bool = False, context: int = 6) -> SequenceModel:
    torch.manual_seed(0)
    return move_parameters(make_system(CASES[case], IEMOptions(), ChunkingSpec(k, vocabulary, fixed, context)))


@every
def test_near_values_begin_alike_and_nothing_else_changes(case: str) -> None:
    made = make_system(CASES[case], IEMOptions(), ChunkingSpec(3, 70, True, 6))
    before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    made.smooth_values()
    changed = {name: each.detach() for name, each in made.named_parameters() if not torch.equal(each, before[name])}
    layers = {name.split(".")[-2] for name in changed}
    assert "output" in layers and len(layers & {"tokens", "embedding"}) == 1 and len(layers) == 2
    for name, rows in changed.items():
        assert torch.equal(rows[70:], before[name][70:])
        for column, distance in ((0, 16), (1, 64)):
            for value in (0, 33, 69):
                weights = [math.exp(-(((value - other) / distance) ** 2)) for other in range(70)]
                total = sum(w * float(x) for w, x in zip(weights, before[name][:70, column], strict=True))
                assert float(rows[value, column]) == pytest.approx(total / math.hypot(*weights), rel=1e-4, abs=1e-6)


# Systems of tokens are distributions over sequences of tokens, however they are cut.
@pytest.mark.parametrize(("fixed", "case"), [*((True, case) for case in CASES), *((False, case) for case in OF_CHUNKS)])
@torch.no_grad()
def test_probabilities_of_all_chunk_sequences_sum_to_one(fixed: bool, case: str) -> None:
    k, vocabulary = 2, 2
    sizes = [k] if fixed else range(1, k + 1)
    chunks = [chunk for size in sizes for chunk in itertools.product(range(vocabulary), repeat=size)]
    pairs = list(itertools.product(chunks, repeat=2))
    tokens = torch.zeros(len(pairs), 2, k, dtype=torch.long)
    for row, pair in zip(tokens, pairs, strict=True):
        for cell, chunk in zip(row, pair, strict=True):
            cell[: len(chunk)] = torch.tensor(chunk)
    lengths = torch.tensor([[len(a), len(b)] for a, b in pairs])
    scores = system(case, k, vocabulary, fixed).log_likelihood(TokenBatch.from_chunks(tokens, lengths))
    assert float(scores.sum(1).exp().sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if "bags" not in case])
@torch.no_grad()
def test_nothing_later_changes_a_decision(case: str) -> None:
    """A changed token changes its own probability and those after it in its chunk, never one before; nor does the length."""
    made, given = system(case), windows(1, 6, 3, 3)
    places = (torch.arange(3) < given.lengths[0, :, None]).nonzero().tolist()
    tokens = given.tokens.repeat(len(places) + 1, 1, 1)
    for row, (chunk, token) in enumerate(places):
        tokens[row, chunk, token] = (tokens[row, chunk, token] + 1) % 3
    many = TokenBatch.from_chunks(tokens, given.lengths.expand(len(tokens), -1))
    *changed, before = made.decision_log_likelihood(many)
    for (chunk, token), after in zip(places, changed, strict=True):
        torch.testing.assert_close(after[:chunk], before[:chunk], rtol=0, atol=1e-12)
        torch.testing.assert_close(after[chunk, :token], before[chunk, :token], rtol=0, atol=1e-12)
        assert not torch.allclose(after[chunk, token], before[chunk, token])
        assert chunk == 5 or not torch.allclose(after[chunk + 1 :], before[chunk + 1 :])


@every
@torch.no_grad()
def test_padding_and_its_content_do_not_matter(case: str) -> None:
    made, given = system(case), windows(2, 6, 3, 3)
    whole = made.log_likelihood(given)
    given.lengths[1, 4:] = 0
    cut = made.log_likelihood(given)
    torch.testing.assert_close(cut[:, :4], whole[:, :4])
    assert cut[1, 4:].tolist() == [0, 0]


@pytest.mark.parametrize("case", [*OF_CHUNKS, *SAMPLED])
@torch.no_grad()
def test_greedy_samples_are_likeliest_by_scoring_afresh(case: str) -> None:
    """Each symbol of a cached sampler, the ends included, against the decisions of all windows that go on otherwise.

    Tokens are sampled until the window is full.
    """
    fixed = case in TOKENS
    made, given = system(case, fixed=fixed), windows(1, 2, 3, 3)
    sampler = make_sampler(made, given)
    for _ in range(3):
        drawn = sampler.draw_chunk(Draw(temperature=0))
        length = int(drawn.lengths[0])
        assert length == 3 or not fixed
        for place in range(min(length + 1, made.cut.k)):
            others = drawn.tokens.repeat(3, 1)
            others[:, place] = torch.arange(3)
            others[:, place + 1 :] = 0
            ways = Chunks(others, torch.full((3,), place + 1))
            if place and not fixed:  # it may end here
                ways = Chunks.concatenate([ways, Chunks(drawn.tokens, torch.tensor([place]))])
            scores = made.decision_log_likelihood(append_chunks(given, ways))[:, -1, place]
            assert int(scores.argmax()) == (int(drawn.tokens[0, place]) if place < length else 3)
        given = append_chunks(given, drawn)


@pytest.mark.parametrize("case", [case for case in TOKENS if "bags" not in case])
@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 23])
def test_every_symbol_changes_what_follows_and_nothing_before(case: str, length: int) -> None:
    """Perturbed at every position of a sequence that no factor divides, starts of documents among its symbols."""
    made = system(case, k=4, vocabulary=5)
    assert isinstance(made, TokenModel)
    symbols = torch.randint(6, (1, length), generator=torch.Generator().manual_seed(0)).repeat(length + 1, 1)
    for row in range(length):
        symbols[row, row] = (symbols[row, row] + 1) % 6
    found = made(symbols)
    same = (found[:-1] - found[-1]).abs().amax(-1) < 1e-12  # (perturbed, position)
    assert same.tril(-1).sum() == length * (length - 1) // 2 and not same.diagonal().any()
    torch.testing.assert_close(made(symbols[:, : length // 2 + 1]), found[:, : length // 2 + 1], rtol=0, atol=1e-12)


@every
def test_in_bfloat16_it_is_nearly_the_same(case: str) -> None:
    made, given = system(case).float(), windows(2, 6, 3, 3)
    exact = float(made.total_log_likelihood(made.prepare_inputs(given)).detach())
    with torch.autocast("cpu", torch.bfloat16):
        total = made.total_log_likelihood(made.prepare_inputs(given))
    total.backward()
    assert total.dtype == torch.float32 and float(total.detach()) == pytest.approx(exact, rel=0.05)
    assert all(bool(x.grad.to_dense().isfinite().all()) for x in made.parameters() if x.grad is not None)


@tokens
@torch.no_grad()
def test_the_memory_of_a_sampler_is_that_of_a_whole_pass(case: str) -> None:
    """The logits after every token, of prompts of every length, fed at once and one by one."""
    made = system(case, k=4, vocabulary=5)
    assert isinstance(made, TokenModel)
    symbols = torch.randint(6, (2, 23), generator=torch.Generator().manual_seed(0))
    whole = made(symbols)
    for first in (1, 4, 7):
        memory = made.create_memory(2)
        parts = [made(symbols[:, :first], memory), *(made(each, memory) for each in symbols[:, first:].split(1, 1))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)
    memory = made.create_memory(2)
    parts = [made(each, memory) for each in symbols.split([1, 5, 2, 9, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


@sampled
@torch.no_grad()
def test_a_full_window_goes_on_from_its_newest_half(case: str) -> None:
    made, given = system(case, k=3, context=4), windows(2, 2, 3, 3)
    given.lengths[:] = torch.tensor([3, 2])
    sampler = make_sampler(made, given, 2)
    draw = Draw(generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        drawn = sampler.draw_chunk(draw)
        assert drawn.tokens.shape == (2, 3) and sampler.symbols.shape[1] <= sampler.window == 6
        torch.testing.assert_close(sampler.logits, made(sampler.symbols)[:, -1])
    given.lengths[0, 1] = 1
    with pytest.raises(ValueError, match="prompts have 4 to 5 tokens"):
        make_sampler(made, given, 2)


@pytest.mark.parametrize("case", ["flat", "flat, learned positions", "flat, relative", "spacebyte"])
@torch.no_grad()
def test_a_window_may_be_one_token_and_a_batch_nothing(case: str) -> None:
    made = system(case, k=1, context=1)
    sampler = make_sampler(made, windows(1, 0, 1, 3), 2)
    for _ in range(3):
        sampler.draw_chunk(Draw(temperature=0))
        torch.testing.assert_close(sampler.logits, made(torch.full((2, 1), 3))[:, -1])
    assert made.decision_log_likelihood(windows(2, 1, 1, 3)[:0]).shape == (0, 1, 2)


@every
def test_what_a_step_minimises_is_the_likelihood(case: str) -> None:
    """Laid out on the CPU, summed: also with documents that begin in a window, and with an empty window."""
    made, given = system(case), windows(3, 6, 3, 3)
    given.lengths[1, 4:], given.lengths[2] = 0, 0
    given.starts[0, 3] = True
    torch.testing.assert_close(made.total_log_likelihood(made.prepare_inputs(given)), made.log_likelihood(given).sum())


@tokens
@torch.no_grad()
def test_at_a_start_the_token_before_is_not_fed(case: str) -> None:
    made, given = system(case), windows(1, 6, 3, 3)
    fed = made.prepare_inputs(given).symbols[0].tolist()
    given.starts[0, 3] = True
    symbols, place = made.prepare_inputs(given).symbols[0].tolist(), int(given.lengths[0, :3].sum())
    assert symbols == [*fed[:place], 3, *fed[place + 1 :]] and symbols[0] == 3


@pytest.mark.parametrize(
    "case", [case for case in TOKENS if any(what in case for what in ("nested", "lsh", "three", "space"))]
)
@torch.no_grad()
def test_flops_are_those_of_a_counter(case: str) -> None:
    made, given = Likelihood(system(case)), windows(3, 6, 3, 3)
    given.lengths[1, 4:], given.lengths[2] = 0, 0
    with FlopCounterMode(display=False) as counter:
        made.system.log_likelihood(given)
    batch, fewer = made.prepare_batch(given), made.prepare_batch(given[1:2])
    assert made.estimate_flops(batch) == made.estimate_flops(batch) == 3 * counter.get_total_flops() > 0
    assert made.estimate_flops(fewer) < made.estimate_flops(batch)
    unseen = Likelihood(made.system)
    unseen(batch)  # as a step counts it
    assert unseen.estimate_flops(batch) == made.estimate_flops(batch)


@every
def test_all_parameters_are_in_one_group_each_and_all_are_trained(case: str) -> None:
    made = system(case)
    order = [id(parameter) for group in made.parameter_groups() for parameter in group.parameters]
    assert order == [id(parameter) for parameter in made.parameters()]
    made.log_likelihood(windows(2, 6, 3, 3)).sum().backward()
    unused = {name for name, x in made.named_parameters() if x.grad is None}
    of_iem_alone = {"head.weight", "log_scale", "encoder.bias.weight", "encoder.bias.bias"}
    assert unused <= of_iem_alone
    assert set(made.submodules) <= {name for name, _ in made.named_children()}


@every
@torch.no_grad()
def test_vectors_are_of_the_real_chunks(case: str) -> None:
    made, given = system(case), windows(2, 6, 3, 3)
    given.lengths[1, 4:] = 0
    for space in made.vector_spaces:
        assert made.extract_vectors(given, space).shape[0] == 10
    with pytest.raises(ValueError, match="has no space 'elsewhere'"):
        made.extract_vectors(given, "elsewhere")
