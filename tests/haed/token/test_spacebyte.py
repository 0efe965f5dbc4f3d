"""SpaceByte against its definition, position by position, and where it takes words to begin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from haed.base import ChunkingSpec
from haed.options import IEMOptions, ModelOptions, SpaceByteOptions, TokenOptions
from haed.registry import make_system
from haed.token.spacebyte import SpaceByte
from tests.haed.conftest import move_parameters
from tests.haed.token import reference
from tests.haed.token.reference import Array, Weights

TOKEN = TokenOptions(width=8, heads=2, head_width=6, ffn=12, window=3)


def made(vocabulary: int = 5, letters: str = "0-1 3-3", width: int = 12, shift: bool = False) -> SpaceByte:
    torch.manual_seed(0)
    chosen = SpaceByteOptions(before=1, layers=2, after=1, width=width, heads=3, ffn=10, letters=letters)
    options = ModelOptions(kind="spacebyte", token=replace(TOKEN, shift=shift), spacebyte=chosen)
    system = make_system(options, IEMOptions(), ChunkingSpec(4, vocabulary, True, 8))
    assert isinstance(system, SpaceByte)
    return move_parameters(system)


def slow(w: Weights, fed: list[int], letters: set[int], start: int, shift: bool) -> Array:
    xs = reference.layers(w, "before", 1, [w["embedding.weight"][symbol] for symbol in fed], 2, 3, shift)
    places = [
        t
        for t, symbol in enumerate(fed)
        if symbol == start or (symbol not in letters and t > 0 and fed[t - 1] in letters)
    ]
    words = reference.layers(w, "words", 2, [np.concatenate([np.zeros(4), xs[t]]) for t in places], 3, None, shift)
    for t, word in zip(places, words, strict=True):
        xs[t] = xs[t] + word[4:]
    return reference.logits(w, reference.layers(w, "after", 1, xs, 2, 3, shift))


@pytest.mark.parametrize("shift", [False, True])
@torch.no_grad()
def test_spacebyte_is_its_definition(shift: bool) -> None:
    system = made(shift=shift)
    w = {name: x.numpy() for name, x in system.state_dict().items()}
    rows = torch.tensor([[5, 0, 1, 2, 4, 3, 2, 2, 5, 5, 1, 4, 0, 0, 3], [5, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]])
    for row, found in zip(rows, system(rows), strict=True):
        np.testing.assert_allclose(found.numpy(), slow(w, row.tolist(), {0, 1, 3}, 5, shift), rtol=0, atol=1e-9)


def test_words_begin_after_the_first_byte_between_them() -> None:
    system = made(256, SpaceByteOptions().letters)
    text = "Ünï (a), b2\n\n  c".encode()
    fed = torch.tensor([[256, *text]])
    route = system.route_symbols(fed)
    places = route.places[0, : route.counts[0]].tolist()
    marked = [256 if symbol == 256 else bytes([symbol]) for symbol in fed[0, places].tolist()]
    assert marked == [256, b"\xc3", b" ", b")", b"\n"]  # the start; the first byte of ï, as n was a letter; …
    assert places == [0, 4, 6, 9, 14] and (route.places[0, route.counts[0] :] == fed.shape[1]).all()


@torch.no_grad()
def test_rows_that_reach_words_at_different_steps_go_on_by_themselves() -> None:
    system = made()
    fed = torch.randint(6, (4, 20), generator=torch.Generator().manual_seed(2))
    fed[:, 0], fed[0, 1:] = 5, 2
    memory = system.create_memory(4)
    parts = [system(part, memory) for part in fed.split([3, *[1] * 11, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), system(fed), rtol=0, atol=1e-9)
    seen = [row[0].seen for row in memory.body.words]
    assert seen == system.route_symbols(fed).counts and len(set(seen)) > 1 and seen[0] == 1


@pytest.mark.parametrize("letters", ["1", "3-2", "1-5", "a-b", "1-2,3-3"])
def test_letters_that_cannot_be_are_told_in_a_line(letters: str) -> None:
    with pytest.raises(ValueError, match=r"^model\.spacebyte\.letters=[^\n]*from 0 to 4, such as 1-1 5-9$"):
        made(letters=letters)


def test_larger_layers_are_not_narrower() -> None:
    with pytest.raises(ValueError, match="model.spacebyte.width=6 must be at least model.token.width=8"):
        made(width=6)
