"""Vectors by scale: causal, those of a whole pass, and pooled as they are by hand."""

import pytest
import torch

from haed.base import TokenBatch
from tests.haed.chunk.test_model import windows
from tests.haed.test_systems import TOKENS, every, system

SCALED = [case for case in TOKENS if not case.startswith("spacebyte")]  # a family without scales is named here


@pytest.mark.parametrize("case", SCALED)
@torch.no_grad()
def test_a_scale_knows_whole_groups_of_what_is_before_and_nothing_else(case: str) -> None:
    made, given = system(case), windows(1, 6, 3, 3, fixed=True)  # the chunk t begins at position 3·t
    scales = sorted(made.scale_outputs())
    assert scales and all(found.shape[2] == 8 for found in made.collect_scale_outputs(given).values())
    tokens = given.tokens.repeat(19, 1, 1)
    for changed, window in enumerate(tokens[:-1]):
        window.view(-1)[changed] = (window.view(-1)[changed] + 1) % 3
    many, read = TokenBatch.from_chunks(tokens, given.lengths.expand(19, -1)), 3 * torch.arange(6)
    for scale in scales:
        *found, before = made.extract_vectors(many, "contexts", scale=scale).unflatten(0, (19, 6))
        complete = read // scale * scale  # tokens in complete groups
        for changed, other in enumerate(found):
            same = (other - before).abs().amax(1) < 1e-12  # LSH sums in another order
            assert same[complete <= changed].all(), f"scale {scale} knows the token {changed} too early"
            if case in ("flat", "top-down", "bottom-up", "retina"):  # whose windows lose sight of what is far
                knows = (complete > changed) & (complete <= changed + (scale if case == "retina" else 18))
                assert not same[knows].any(), f"scale {scale} never knows the token {changed}"
        for length in range(1, 6):  # a text that ends is read as one that goes on
            begin = TokenBatch.from_chunks(given.tokens[:, :length], given.lengths[:, :length])
            cut = made.extract_vectors(begin, "contexts", scale=scale)
            torch.testing.assert_close(cut, before[:length])


@pytest.mark.parametrize("case", SCALED)
@torch.no_grad()
def test_scales_are_what_a_whole_pass_makes(case: str) -> None:
    made, given, marked = system(case), windows(2, 6, 3, 3), dict[str, list[torch.Tensor]]()
    given.lengths[1, 4:] = 0
    plain = made.log_likelihood(given)

    def note(part: str, tensor: torch.Tensor) -> torch.Tensor:
        marked.setdefault(part, []).append(tensor)
        return tensor

    made.mark = note
    found = made.collect_scale_outputs(given)
    for scale, vectors in found.items():
        passes = marked.get(f"scale_{scale}", [])
        own = [each for each in passes if each.shape == vectors.shape and torch.equal(each, vectors)]
        lengthened = made.kind == "top_down" and scale > 1  # marked after that
        assert own or lengthened or (made.kind == "retina" and scale > 1), scale
        assert made.extract_vectors(given, "contexts", scale=scale).shape == (10, 8)
    torch.testing.assert_close(made.log_likelihood(given), plain)  # nothing stays hooked


@torch.no_grad()
def test_coarse_scales_of_retina_and_top_down_are_pooled_by_hand() -> None:
    given = windows(2, 6, 3, 3, fixed=True)
    retina = system("retina")
    symbols = retina.prepare_inputs(given).symbols
    x = retina.dropout(retina.positions(retina.embedding(symbols), 0))
    for layer in retina.scale_1[:-1]:
        x = layer(x)
    seen = retina.scale_1[-1].norm(x)
    pairs = torch.stack([(seen[:, max(0, 2 * j - 1)] + seen[:, 2 * j]) / 2 for j in range(symbols.shape[1] // 2)], 1)
    torch.testing.assert_close(retina.collect_scale_outputs(given)[2][:, : pairs.shape[1]], pairs)

    down = system("top-down")
    level, x = down.scale_2, down.positions(down.embedding(down.prepare_inputs(given).symbols), 0)
    pairs = torch.stack([(x[:, max(0, 2 * j - 1)] + x[:, 2 * j]) / 2 for j in range(x.shape[1] // 2)], 1)
    by_hand = level.norm(level.layers(pairs))
    torch.testing.assert_close(down.collect_scale_outputs(given)[2][:, : pairs.shape[1]], by_hand)


@every
def test_scales_that_are_not_there(case: str) -> None:
    made, given = system(case), windows(1, 2, 3, 3)
    with pytest.raises(ValueError, match=r"has no scale 17 of contexts. Its scales are: (\d|none)"):
        made.extract_vectors(given, "contexts", scale=17)
    if case not in SCALED:
        assert not made.collect_scale_outputs(given) and not made.scale_outputs()
