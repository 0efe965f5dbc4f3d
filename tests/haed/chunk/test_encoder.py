"""Encoders against independent ones, chunk by chunk in float64, and what options are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from haed.base import ChunkingSpec
from haed.chunk.encoder import Encoder, LSTMEncoder, MLPEncoder, TransformerEncoder
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.options import ENCODERS, EncoderOptions, IEMOptions
from tests.haed.chunk.test_model import small_options, windows

K, VOCABULARY = 5, 7
OPTIONS = EncoderOptions(token_width=3, hidden=8, width=6, heads=2, ffn=10, layers=2, output="none")
GIVEN = windows(1, 40, K, VOCABULARY)
CHUNKS = Chunks(GIVEN.tokens[0], GIVEN.lengths[0])


def made(kind: str, **changes: object) -> Encoder:
    torch.manual_seed(0)
    encoder = ENCODERS.load_class(kind)(replace(OPTIONS, kind=kind, **changes), K, VOCABULARY).double()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return encoder


def encoded(encoder: Encoder, chunks: Chunks) -> torch.Tensor:
    return encoder(encoder.prepare_inputs(chunks)).vector


def each() -> list[torch.Tensor]:
    """The tokens of every chunk."""
    return [row[:length] for row, length in zip(CHUNKS.tokens, CHUNKS.lengths, strict=True)]


def test_the_lstm_is_the_last_output_of_torchs() -> None:
    encoder = made("lstm")
    assert isinstance(encoder, LSTMEncoder)
    theirs = torch.nn.LSTM(3, 8, num_layers=2, dtype=torch.float64)
    with torch.no_grad():
        for number, layer in enumerate(encoder.layers):
            getattr(theirs, f"weight_ih_l{number}").copy_(layer.input.weight)
            getattr(theirs, f"weight_hh_l{number}").copy_(layer.recurrent)
            getattr(theirs, f"bias_ih_l{number}").copy_(layer.input.bias)
            getattr(theirs, f"bias_hh_l{number}").zero_()
        wanted = torch.stack([theirs(encoder.tokens(tokens))[0][-1, :6] for tokens in each()])
        torch.testing.assert_close(encoded(encoder, CHUNKS), wanted, rtol=0, atol=1e-12)


def test_the_transformer_by_the_formulas() -> None:
    encoder = made("transformer")
    assert isinstance(encoder, TransformerEncoder)
    wanted = []
    for tokens in each():
        x = encoder.tokens.weight[tokens] + encoder.positions.weight[: len(tokens)]
        for block in encoder.blocks:
            y = F.layer_norm(x, (8,), block.norm.weight, block.norm.bias)
            q, k, v = (y @ block.attention.qkv.weight.t() + block.attention.qkv.bias).split(8, 1)
            heads = [(q[:, rows] @ k[:, rows].t() / 2).softmax(1) @ v[:, rows] for rows in (slice(0, 4), slice(4, 8))]
            x = x + torch.cat(heads, 1) @ block.attention.out.weight.t() + block.attention.out.bias
            last = block.feed_forward
            y = F.layer_norm(x, (8,), last.norm.weight, last.norm.bias)
            x = x + F.gelu(y @ last.up.weight.t() + last.up.bias) @ last.down.weight.t() + last.down.bias
        mean = F.layer_norm(x, (8,), encoder.norm.weight, encoder.norm.bias).mean(0)
        wanted.append(encoder.pooled.weight @ mean + encoder.pooled.bias)
    torch.testing.assert_close(encoded(encoder, CHUNKS), torch.stack(wanted), rtol=0, atol=1e-12)


def test_the_linear_one_is_a_norm_and_one_map() -> None:
    encoder = made("linear")
    assert isinstance(encoder, MLPEncoder)
    wanted = []
    for tokens in each():
        x = encoder.tokens.weight[[*tokens.tolist(), *[VOCABULARY] * (K - len(tokens))]].flatten()
        x = F.layer_norm(x, (15,), encoder.norm.weight, encoder.norm.bias)
        wanted.append(encoder.layers[0].weight @ x + encoder.layers[0].bias)
    torch.testing.assert_close(encoded(encoder, CHUNKS), torch.stack(wanted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_chunk_is_encoded_alike_whatever_is_beside_it(kind: str) -> None:
    encoder = made(kind)
    whole = encoded(encoder, CHUNKS)
    backwards = encoded(encoder, Chunks(CHUNKS.tokens.flip(0), CHUNKS.lengths.flip(0))).flip(0)
    alone = torch.cat([encoded(encoder, CHUNKS[rows]) for rows in torch.arange(40).split(1)])
    for other in (backwards, alone):
        torch.testing.assert_close(other, whole, rtol=0, atol=1e-12)
    nothing = encoder(encoder.prepare_inputs(CHUNKS[torch.empty(0, dtype=torch.long)]))
    assert nothing.vector.shape == (0, 6) and nothing.bias.shape == (0,)


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_table_adds_a_row_to_each_chunk_by_what_it_is(kind: str) -> None:
    """The vectors without one, plus the row of its hash, before the end; of chunks of bytes as of wide ones."""
    plain, encoder = made(kind, output="relu"), made(kind, output="relu", rows=64)
    encoder.load_state_dict(plain.state_dict(), strict=False)
    inputs = encoder.prepare_inputs(CHUNKS)
    assert inputs.lookup is not None and encoder.table is not None
    before = plain.embed_tokens(plain.prepare_inputs(CHUNKS).chunks)
    wanted = F.relu(before + encoder.table[inputs.lookup.row_indices])
    torch.testing.assert_close(encoded(encoder, CHUNKS), wanted, rtol=0, atol=0)
    torch.nn.init.zeros_(encoder.table)
    torch.testing.assert_close(encoded(encoder, CHUNKS), encoded(plain, CHUNKS), rtol=0, atol=0)
    narrow = encoder.prepare_inputs(Chunks(CHUNKS.tokens.to(torch.uint8), CHUNKS.lengths.to(torch.uint8)))
    assert narrow.lookup is not None and torch.equal(narrow.lookup.row_indices, inputs.lookup.row_indices)


def test_equal_chunks_have_one_row_and_others_mostly_others() -> None:
    """All 19,607 strings of up to 5 of 7 tokens in 4,096 rows: as evenly as by chance."""
    encoder = made("mlp", rows=4096)
    grid = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * K)
    parts = [grid[grid[:, n:].sum(1) == 0] for n in range(1, K + 1)]
    every = Chunks(torch.cat(parts), torch.tensor([n for n, part in enumerate(parts, 1) for _ in part]))
    lookup = encoder.prepare_inputs(every).lookup
    assert lookup is not None and len(every) == 19_607
    twice = encoder.prepare_inputs(Chunks(every.tokens.repeat(2, 1), every.lengths.repeat(2))).lookup
    rows = lookup.row_indices
    assert twice is not None and torch.equal(twice.row_indices, rows.repeat(2))
    counts = torch.bincount(rows, minlength=4096).double()
    mean = len(every) / 4096
    assert ((counts - mean) ** 2 / mean).sum() == pytest.approx(4096, abs=5 * (2 * 4096) ** 0.5)  # χ², 5 deviations


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("lstm", {"width": 9}, r"model\.encoder\.hidden=8 must be at least model\.encoder\.width=9"),
        ("transformer", {"heads": 3}, r"model\.encoder\.hidden=8 must be a multiple of model\.encoder\.heads=3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kind: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(kind, **changes)


class ScaledEncoder(MLPEncoder):
    """An encoder of one's own, whose first parameter is not the table of rows."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._parameters = {"scale": nn.Parameter(torch.ones(6)), **self._parameters}


def test_the_table_of_rows_is_its_own_group_wherever_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, "scaled", f"{__name__}:ScaledEncoder")
    options = replace(small_options("lstm"), encoder=replace(OPTIONS, kind="scaled", rows=16))
    system = HAED(options, IEMOptions(), ChunkingSpec(K, VOCABULARY, False, 8))
    groups = [group for group in system.parameter_groups() if group.role == "encoder"]
    assert [[tuple(x.shape) for x in group.parameters] for group in groups if group.table] == [[(16, 6)]]
    assert groups[1].parameters[0] is system.encoder.scale
