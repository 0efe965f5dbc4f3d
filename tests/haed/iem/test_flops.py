"""Counted FLOPs against PyTorch's own counter over a real step."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from haed.base import ChunkingSpec, count_flops
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from haed.iem.objective import ChunkObjective
from haed.layers import lstm
from haed.options import DecoderOptions, EncoderOptions, IEMOptions, MainOptions, MixtureOptions, ModelOptions
from tests.haed.chunk.test_model import decoder_options, windows

ENCODER = EncoderOptions(token_width=8, hidden=64, heads=1, ffn=128, width=64)
NOTHING = ChunkVocabulary(Chunks(torch.zeros(0, 6, dtype=torch.long), torch.zeros(0, dtype=torch.long)))
CUT = ChunkingSpec(6, 256, False, 32)
MAIN = MainOptions(layers=2, width=96, heads=2, head_width=32, ffn=128)


@pytest.fixture(autouse=True)
def not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounding adds is no FLOP of the model."""
    monkeypatch.setattr(lstm, "ROW_MULTIPLE", 1)


@pytest.mark.parametrize(
    ("decoder", "weight", "fraction"),
    [("lstm", 1.0, 0.0), ("lstm", 0.0, 1.0), ("transformer", 1.0, 0.5), ("previous", 0.0, 1.0)],
)
def test_flops_are_those_of_the_products(decoder: str, weight: float, fraction: float) -> None:
    options = ModelOptions(encoder=ENCODER, main=MAIN, decoder=decoder_options(decoder, width=64, ffn=128, layers=2))
    counted, wanted = both(options, weight, fraction)
    assert 0.97 * wanted < counted < 1.001 * wanted  # the counter has the padding inside attention within chunks


@pytest.mark.parametrize("decoder", ["lstm", "previous"])
def test_flops_do_not_depend_on_pieces(decoder: str) -> None:
    options = ModelOptions(encoder=ENCODER, main=MAIN, decoder=decoder_options(decoder, width=64))
    model, found = HAED(options, IEMOptions(), CUT), []
    for pieces in (1, 4):
        made = ChunkObjective(model, IEMOptions(), 1.0, 0.5, pieces=pieces)
        batch = made.prepare_batch(windows(4, 32, 6, 256), None, torch.Generator().manual_seed(0))
        found.append(made.estimate_flops(batch))
    assert found[0] == found[1] > 0


def both(options: ModelOptions, weight: float, fraction: float, fixed: bool = False) -> tuple[float, float]:
    """FLOPs of a step, ours and the counter's."""
    model = HAED(options, IEMOptions(), replace(CUT, fixed=fixed))
    made = ChunkObjective(model, IEMOptions(), weight, fraction, lexicon=NOTHING)
    batch = made.prepare_batch(windows(4, 32, 6, 256, fixed))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        made(batch).total.backward()
    return made.estimate_flops(batch), counter.get_total_flops()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_layers_of_pytorch_are_counted_as_by_its_own_counter(mode: type[torch.no_grad]) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    calls = [
        lambda: layer(torch.ones(2, 5, 16)),
        lambda: torch.nn.functional.conv1d(torch.ones(1, 4, 9), torch.ones(8, 4, 3)),
        lambda: torch.einsum("ab,cb->ac", torch.ones(3, 4), torch.ones(5, 4)),
        lambda: torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 2, 4, 5, 8), is_causal=True),
        lambda: torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 2, 4, 1, 8)),
    ]
    for call in calls:
        with mode():
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as theirs:
                call()
            assert count_flops(call) == theirs.get_total_flops() > 0


def test_gradients_of_attention_and_of_an_lstm_cost_twice_the_forward_pass_on_a_cpu() -> None:
    q, k, v = torch.ones(3, 2, 4, 5, 8, requires_grad=True)
    attention, lstm = torch.nn.functional.scaled_dot_product_attention, torch.nn.LSTM(6, 5)
    x = torch.ones(7, 3, 6, requires_grad=True)
    for call in (lambda: attention(q, k, v, is_causal=True), lambda: lstm(x)[0]):
        assert count_flops(lambda: call().sum().backward()) == 3 * count_flops(call) > 0  # noqa: B023


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_lstms_of_pytorch_are_counted_on_a_cpu_and_with_cudnn(mode: type[torch.no_grad]) -> None:
    lstm = torch.nn.LSTM(6, 5, num_layers=2)
    expected = 2 * 7 * 3 * sum(x.numel() for x in lstm.parameters() if x.ndim == 2)
    with mode():
        assert count_flops(lambda: lstm(torch.ones(7, 3, 6))) == expected
    weights = list(lstm.parameters())
    found = flop_registry[torch.ops.aten._cudnn_rnn](torch.ones(7, 3, 6), weights, 4, None, out_val=None)
    assert found == expected


def test_a_gate_is_counted_and_a_table_costs_nothing() -> None:
    """As the difference of two steps, since a gate is little beside the rest."""
    plain = ModelOptions(encoder=ENCODER, main=MAIN, decoder=DecoderOptions(width=64))
    mixed = replace(plain, encoder=replace(ENCODER, rows=99), mixture=MixtureOptions(known=5))
    (counted, wanted), (without, theirs) = both(mixed, 1.0, 1.0), both(plain, 1.0, 1.0)
    assert without == theirs and counted == wanted
    assert counted - without == 3 * 2 * MAIN.width * 128  # forward and backward, of 128 chunks


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(
    ("encoder", "main", "decoder", "least"),
    [
        ("lstm", "lstm", DecoderOptions(width=64, layers=2), 1.0),
        ("lstm", "transformer", DecoderOptions(width=64), 1.0),
        ("transformer", "lstm", DecoderOptions(width=64), 0.98),
        (
            "linear",
            "transformer",
            DecoderOptions(kind="transformer", width=64, heads=1, ffn=128, context="each"),
            0.98,  # without padding inside attention
        ),
    ],
)
def test_flops_of_every_kind(encoder: str, main: str, decoder: DecoderOptions, least: float, fixed: bool) -> None:
    options = ModelOptions(encoder=replace(ENCODER, kind=encoder), main=replace(MAIN, kind=main), decoder=decoder)
    counted, wanted = both(options, 1.0, 1.0, fixed)
    assert least * wanted <= counted <= wanted
