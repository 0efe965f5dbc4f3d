"""Hashed n-grams against a dictionary of strings, and their gradient against that of a dense table."""

import pytest
import torch

from haed.chunk.decoder import symbol_histories
from haed.chunk.packing import Chunks, pack_decisions
from haed.layers.ngram_embedding import Grams
from haed.options import GramsOptions

END = 7  # the vocabulary


def made(rows: int = 1 << 20, orders: tuple[int, ...] = (1, 3)) -> Grams:
    torch.manual_seed(0)
    found = Grams(GramsOptions(rows=rows, orders=list(orders), width=4), layer=5, symbols=END + 1).double()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


def test_equal_n_grams_have_one_row_and_others_others() -> None:
    grams = made()
    last = torch.randint(END + 1, (500, 3), generator=torch.Generator().manual_seed(0))
    each, seen = grams.look_up(last).row_indices, dict[tuple[int, ...], int]()
    for symbols, rows in zip(last.tolist(), each.tolist(), strict=True):
        for place, order in enumerate((1, 3)):
            assert seen.setdefault(tuple(symbols[-order:]), rows[place]) == rows[place]
            assert rows[place] // grams.rows == place
    assert len(set(seen.values())) == len(seen) > 300
    assert int(made(rows=2).look_up(last).row_indices.max()) == 3


def test_values_and_gradients_are_those_of_the_whole_table() -> None:
    """Of two lookups in one step as well; only rows that were looked up have a gradient."""
    grams = made(rows=20)
    generator = torch.Generator().manual_seed(1)
    lookup = [grams.look_up(torch.randint(END, (2, n, 3), generator=generator)) for n in (4, 1)]
    found = [grams(each) for each in lookup]
    sum(layer.square().sum() + logits.sin().sum() for layer, logits in found).backward()
    sparse, grams.table.grad = grams.table.grad, None
    total = 0
    for each, (layer, logits) in zip(lookup, found, strict=True):
        summed = grams.table[each.row_indices].sum(-2)
        torch.testing.assert_close(layer, summed @ grams.layer.t())
        torch.testing.assert_close(logits, summed @ grams.logits.t())
        total = total + (summed @ grams.layer.t()).square().sum() + (summed @ grams.logits.t()).sin().sum()
    total.backward()
    assert sparse is not None and sparse.is_sparse and grams.table.grad is not None
    torch.testing.assert_close(sparse.to_dense(), grams.table.grad)
    rows = torch.cat([each.rows for each in lookup]).unique()
    assert sparse.coalesce().indices()[0].tolist() == rows.tolist()
    assert lookup[0].rows.tolist() == sorted(set(lookup[0].row_indices.flatten().tolist()))


def test_nothing_looked_up_is_nothing() -> None:
    grams = made()
    layer, logits = grams(grams.look_up(torch.empty(0, 3, dtype=torch.long)))
    assert layer.shape == (0, 5) and logits.shape == (0, END + 1)
    (layer.sum() + logits.sum()).backward()
    assert grams.table.grad is not None and grams.table.grad.coalesce().values().shape == (0, 4)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("fixed", [False, True])
def test_histories_are_what_was_written_last(size: int, fixed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 1, 4, 2, 4])
    tokens = torch.randint(END, (5, 4), generator=generator) * (torch.arange(4) < lengths[:, None])
    ends = torch.tensor([4, 0, 1, 3, 2])
    before = torch.randint(END, (5, 4), generator=generator) * (torch.arange(4) < ends[:, None])
    packed = pack_decisions(Chunks(tokens, lengths), END, fixed, Chunks(before, ends))
    found, row = symbol_histories(packed, size, END), 0
    for place, count in enumerate(packed.sizes):
        for chunk in packed.order[:count].tolist():
            written = [END] * size + before[chunk, : ends[chunk]].tolist() + tokens[chunk, :place].tolist()
            assert found[row].tolist() == written[-size:]
            row += 1
    assert row == len(found)
