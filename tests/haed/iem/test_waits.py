"""Where a step of a chunk model runs, and how often it waits for its device."""

import pytest
import torch

from haed.base import TokenBatch
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.packing import find_distinct
from haed.iem.objective import ChunkObjective
from haed.options import IEMOptions
from tests.haed.chunk.test_model import small, windows
from tests.haed.stand_in import StandInDevice

B, T, K, V = 4, 6, 3, 3


def read_windows() -> TokenBatch:
    given = windows(B, T, K, V)
    given.lengths[3, 2:] = 0
    given.starts[1, 2] = True
    return given


# What a step has, and how often it waits: for the number of distinct chunks and of decisions; and for the lengths of
# the chunks, if the encoder reads them token by token.
CASES = {
    "phase one": ("lstm", 1.0, 0.0, {}, 1),
    "phase one of the paper": ("lstm", 1.0, 0.0, {"correction": "none", "duplicates": True}, 1),
    "both losses": ("transformer", 1.0, 0.5, {}, 1),
    "phase two": ("previous", 0.0, 1.0, {}, 1),
    "n-grams": ("grams", 1.0, 0.5, {}, 1),
    "a mixture": ("mixed", 1.0, 0.5, {}, 1),
    "patches": ("megabyte", 1.0, 0.5, {}, 1),
    "HRED": ("hred", 1.0, 0.5, {}, 2),
    "a transformer encoder with a table": ("reader", 1.0, 0.5, {}, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_step_runs_on_one_device_and_waits_for_it_once(case: str, pieces: int) -> None:
    kind, weight, fraction, options, waits = CASES[case]
    iem = IEMOptions(**options)
    every = find_distinct(*(x.flatten(0, 1) for x in (windows(9, T, K, V).tokens, windows(9, T, K, V).lengths)))
    known = ChunkVocabulary(every, torch.arange(len(every)) + 1, torch.arange(len(every)) % 3 + 1)
    made = ChunkObjective(small(kind, iem=iem), iem, weight, fraction, pieces, lexicon=known)
    there = list(made.parameters())
    if made.candidates is not None and made.candidates.counts is not None:
        there.append(made.candidates.counts.table)
    if made.lexicon is not None:
        lexicon = made.lexicon
        there += [lexicon.chunks.tokens, lexicon.chunks.lengths, lexicon._hashes, lexicon._order]
        there += [lexicon.counts, lexicon.documents]
    negatives = read_windows() if weight else None
    with PretendDevice(there) as device:
        batch = made.prepare_batch(read_windows(), negatives, torch.Generator().manual_seed(0))
        prepared = list(device.waits)
        losses = made(batch, True)
        losses.total.backward()
    expected = waits if waits == 1 else waits + pieces - 1
    assert device.waits == prepared and len(prepared) == expected
