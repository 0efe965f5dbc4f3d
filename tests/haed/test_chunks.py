import torch
from hypothesis import given
from hypothesis import strategies as st

from haed.chunks import distinct, pack

CHUNKS = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=20)


def grid(chunks: list[bytes], k: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(len(chunks), k, dtype=torch.uint8)
    for row, chunk in zip(tokens, chunks, strict=True):
        row[: len(chunk)] = torch.tensor(list(chunk))
    return tokens, torch.tensor([len(chunk) for chunk in chunks])


@given(CHUNKS)
def test_distinct_agrees_with_a_set(chunks: list[bytes]) -> None:
    found = distinct(*grid(chunks))
    rows = [bytes(row[:n].tolist()) for row, n in zip(found.tokens, found.lengths, strict=True)]
    assert sorted(rows) == sorted(set(chunks))
    assert [rows[i] for i in found.inverse] == chunks
    assert [int(n) for n in found.counts] == [chunks.count(row) for row in rows]


@given(CHUNKS, st.booleans())
def test_pack_lists_every_decision_once_and_in_order(chunks: list[bytes], fixed: bool) -> None:
    end = 256
    packed = pack(*grid(chunks), vocabulary=end, fixed=fixed)
    assert packed.sizes == sorted(packed.sizes, reverse=True)
    seen: dict[int, list[tuple[int, int]]] = {int(i): [] for i in packed.order}
    for chunk, symbol, target in zip(packed.chunk, packed.inputs, packed.targets, strict=True):
        seen[int(packed.order[chunk])].append((int(symbol), int(target)))
    for number, chunk in enumerate(chunks):
        targets = list(chunk) + ([] if fixed or len(chunk) == 4 else [end])
        assert seen[number] == list(zip([end, *chunk], targets, strict=False))


def test_nothing_packs_to_nothing() -> None:
    packed = pack(torch.zeros(0, 4, dtype=torch.uint8), torch.zeros(0, dtype=torch.long), 256)
    assert packed.sizes == [] and len(packed.inputs) == 0
