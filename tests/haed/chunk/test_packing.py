import torch
from hypothesis import given
from hypothesis import strategies as st

from haed.chunk.packing import Chunks, chunk_keys, find_distinct, pack_decisions

CHUNKS = st.lists(st.binary(min_size=1, max_size=4), max_size=20)


def grid(chunks: list[bytes], k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(len(chunks), k, dtype=torch.uint8)
    for row, chunk in zip(tokens, chunks, strict=True):
        row[: len(chunk)] = torch.tensor(list(chunk))
    return tokens, torch.tensor([len(chunk) for chunk in chunks])


@given(CHUNKS)
def test_distinct_agrees_with_a_set(chunks: list[bytes]) -> None:
    found = find_distinct(*grid(chunks))
    rows = [bytes(row[:n].tolist()) for row, n in zip(found.tokens, found.lengths, strict=True)]
    assert sorted(rows) == sorted(set(chunks))
    assert [rows[i] for i in found.inverse] == chunks
    assert [int(n) for n in found.counts] == [chunks.count(row) for row in rows]


@given(CHUNKS, st.booleans())
def test_pack_lists_every_decision_once_and_in_order(chunks: list[bytes], fixed: bool) -> None:
    end = 256
    packed = pack_decisions(Chunks(*grid(chunks)), vocabulary=end, fixed=fixed)
    assert packed.sizes == sorted(packed.sizes, reverse=True)
    seen: dict[int, list[tuple[int, int]]] = {int(i): [] for i in packed.order}
    for chunk, symbol, target in zip(packed.chunk, packed.inputs, packed.targets, strict=True):
        seen[int(packed.order[chunk])].append((int(symbol), int(target)))
    for number, chunk in enumerate(chunks):
        targets = list(chunk) + ([] if fixed or len(chunk) == 4 else [end])
        assert seen[number] == list(zip([end, *chunk], targets, strict=False))


def test_keys_are_those_that_checkpoints_count_by() -> None:
    tokens = torch.tensor([[1, 2, 3], [255, 0, 0], [0, 0, 0]])
    found = chunk_keys(tokens, torch.tensor([3, 1, 2])).tolist()
    assert found == [928917392748565128, 7012138101393098567, 9170973037490218334]


def test_different_chunks_have_different_keys() -> None:
    """Two million of them, as alike as can be: by the bound two of them meet in one of two million such sets."""
    tokens = torch.cartesian_prod(*[torch.arange(128)] * 3)
    assert len(chunk_keys(tokens, torch.full((len(tokens),), 3)).unique()) == len(tokens)
