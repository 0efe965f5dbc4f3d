"""What holds for every system: probabilities that sum to one, causality, padding, sampling that agrees with scoring.

A new family adds a line to `CASES`. Systems of chunks sum to one over sequences of chunks; one of tokens, which knows no ends,
does over sequences of tokens, and with chunks of a fixed size here.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from haed.build import make_sampler, make_system
from haed.options import EncoderOptions, IEMOptions, MainOptions, ModelOptions
from haed.sampling import Draw
from haed.system import Cut, System, Windows
from tests.haed.chunk.test_model import decoder_options, windows

MAIN = MainOptions(layers=2, width=8, heads=2, head_width=6, ffn=16)
PARTS = {"encoder": EncoderOptions(token_width=3, hidden=8, width=8), "main": MAIN}
PADDED = replace(MAIN, width=12, positions="concatenated")
SIZES = {"width": 8, "ffn": 16, "token_width": 4}
CASES = {
    "lstm decoder": ModelOptions(**PARTS, decoder=decoder_options("lstm", **SIZES)),
    "two layers": ModelOptions(**PARTS, decoder=decoder_options("lstm", layers=2, **SIZES)),
    "transformer decoder": ModelOptions(**PARTS, decoder=decoder_options("transformer", layers=2, **SIZES)),
    "sees the chunk before": ModelOptions(**PARTS, decoder=decoder_options("previous", layers=2, **SIZES)),
    "positions in the padding": ModelOptions(**PARTS | {"main": PADDED}, decoder=decoder_options("lstm", **SIZES)),
}
every = pytest.mark.parametrize("case", CASES)


def system(case: str, k: int = 3, vocabulary: int = 3, fixed: bool = False, context: int = 6) -> System:
    torch.manual_seed(0)
    made = make_system(CASES[case], IEMOptions(), Cut(k, vocabulary, fixed, context)).double()
    with torch.no_grad():  # away from the symmetric start
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return made.eval()


@every
@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_probabilities_of_all_chunk_sequences_sum_to_one(case: str, fixed: bool) -> None:
    k, vocabulary = 2, 2
    sizes = [k] if fixed else range(1, k + 1)
    chunks = [chunk for size in sizes for chunk in itertools.product(range(vocabulary), repeat=size)]
    pairs = list(itertools.product(chunks, repeat=2))
    tokens = torch.zeros(len(pairs), 2, k, dtype=torch.long)
    for row, pair in zip(tokens, pairs, strict=True):
        for cell, chunk in zip(row, pair, strict=True):
            cell[: len(chunk)] = torch.tensor(chunk)
    lengths = torch.tensor([[len(a), len(b)] for a, b in pairs])
    scores = system(case, k, vocabulary, fixed).log_likelihood(Windows.of(tokens, lengths))
    assert float(scores.sum(1).exp().sum()) == pytest.approx(1, abs=1e-9)


@every
@torch.no_grad()
def test_nothing_later_changes_a_decision(case: str) -> None:
    """A changed token changes its own probability and those after it in its chunk, never one before; nor does the length."""
    made, given = system(case), windows(1, 6, 3, 3)
    before = made.decisions(given)
    for chunk, token in itertools.product(range(6), range(3)):
        if token >= given.lengths[0, chunk]:
            continue
        changed = given.tokens.clone()
        changed[0, chunk, token] = (changed[0, chunk, token] + 1) % 3
        after = made.decisions(replace(given, tokens=changed))
        torch.testing.assert_close(after[0, :chunk], before[0, :chunk], rtol=0, atol=1e-12)
        torch.testing.assert_close(after[0, chunk, :token], before[0, chunk, :token], rtol=0, atol=1e-12)
        assert not torch.allclose(after[0, chunk, token], before[0, chunk, token])
        assert chunk == 5 or not torch.allclose(after[0, chunk + 1 :], before[0, chunk + 1 :])


@every
@torch.no_grad()
def test_padding_and_its_content_do_not_matter(case: str) -> None:
    made, given = system(case), windows(2, 6, 3, 3)
    whole = made.log_likelihood(given)
    given.lengths[1, 4:] = 0
    cut = made.log_likelihood(given)
    torch.testing.assert_close(cut[:, :4], whole[:, :4])
    assert cut[1, 4:].tolist() == [0, 0]


@every
@torch.no_grad()
def test_greedy_samples_are_likeliest_by_scoring_afresh(case: str) -> None:
    """Each symbol of a cached sampler, the ends included, against the decisions of all windows that go on otherwise."""
    made, given = system(case), windows(1, 2, 3, 3)
    sampler = make_sampler(made, given)
    for _ in range(3):
        drawn = sampler.chunk(Draw(temperature=0))
        length = int(drawn.lengths[0])
        for place in range(min(length + 1, made.cut.k)):
            others = drawn.tokens.repeat(3, 1)
            others[:, place] = torch.arange(3)
            others[:, place + 1 :] = 0
            ends = torch.full((3, 1), place + 1)
            scores = [
                _decision(made, given, row[None], end[None], place) for row, end in zip(others, ends, strict=True)
            ]
            if place:
                scores.append(_decision(made, given, drawn.tokens, torch.tensor([[place]]), place))
            chosen = int(drawn.tokens[0, place]) if place < length else 3
            assert int(torch.stack(scores).argmax()) == chosen
        given = _grown(given, drawn.tokens, drawn.lengths[:, None])


def _decision(made: System, given: Windows, tokens: torch.Tensor, length: torch.Tensor, place: int) -> torch.Tensor:
    """Log p of what stands at a place of one more chunk."""
    return made.decisions(_grown(given, tokens, length))[0, -1, place]


def _grown(given: Windows, tokens: torch.Tensor, length: torch.Tensor) -> Windows:
    return Windows.of(torch.cat([given.tokens, tokens[None]], 1), torch.cat([given.lengths, length], 1))


@every
def test_all_parameters_are_in_one_group_each_and_all_are_trained(case: str) -> None:
    made = system(case)
    order = [id(parameter) for group in made.groups() for parameter in group.parameters]
    assert order == [id(parameter) for parameter in made.parameters()]
    made.log_likelihood(windows(2, 6, 3, 3)).sum().backward()
    unused = {name.split(".")[0] for name, x in made.named_parameters() if x.grad is None}
    assert unused <= {"head", "log_scale", "encoder"}  # what only the IEM loss knows
    assert set(made.parts) <= {name for name, _ in made.named_children()}


@every
@torch.no_grad()
def test_vectors_are_of_the_real_chunks(case: str) -> None:
    made, given = system(case), windows(2, 6, 3, 3)
    given.lengths[1, 4:] = 0
    for space in made.spaces:
        assert made.vectors(given, space).shape[0] == 10
    with pytest.raises(ValueError, match="has no space 'elsewhere'"):
        made.vectors(given, "elsewhere")
