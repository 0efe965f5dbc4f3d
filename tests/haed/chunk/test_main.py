"""Main models: the LSTM by its formulas, cached steps against the whole window, and what options are refused."""

from dataclasses import replace

import pytest
import torch

from haed.base import ChunkingSpec
from haed.chunk.main import LSTMMain, Main
from haed.options import MAINS, EncoderOptions, IEMOptions, MainOptions, ModelOptions
from haed.registry import make_system
from tests.haed.layers.test_lstm import by_the_formulas

OPTIONS = MainOptions(layers=2, width=6, heads=2, head_width=4, ffn=8)
KINDS = {
    "rotary": OPTIONS,
    "learned": replace(OPTIONS, positions="learned"),
    "concatenated": replace(OPTIONS, positions="concatenated"),
    "lstm": replace(OPTIONS, kind="lstm", units=7),
}


def made(options: MainOptions) -> Main:
    torch.manual_seed(0)
    main = MAINS.load_class(options.kind)(options, 4, 9).double()
    for parameter in main.parameters():
        torch.nn.init.normal_(parameter)
    return main


def test_the_lstm_by_the_formulas() -> None:
    main = made(KINDS["lstm"])
    assert isinstance(main, LSTMMain)
    embeddings = torch.randn(3, 9, 4, dtype=torch.float64)
    starts = torch.rand(3, 9) < 0.3
    found = main(embeddings, starts)
    for row in range(3):
        x = torch.stack([main.start if t == 0 or starts[row, t] else embeddings[row, t - 1] for t in range(9)])
        for layer in main.layers:
            x = by_the_formulas(x @ layer.input.weight.t() + layer.input.bias, layer.recurrent, [1] * 9)
        torch.testing.assert_close(found[row], x[:, :6], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cached_steps_of_any_length_give_the_same(kind: str) -> None:
    main = made(KINDS[kind])
    inputs = torch.randn(3, 9, 4, dtype=torch.float64)
    whole, cache = main.step(inputs, None), main.create_cache()
    for part in inputs.split([4, 1, 1, 3], 1):
        found = main.step(part, cache)
        torch.testing.assert_close(found, whole[:, : found.shape[1]], rtol=0, atol=1e-12)
        whole = whole[:, found.shape[1] :]
    assert whole.shape[1] == 0


@pytest.mark.parametrize(
    ("main", "iem", "message"),
    [
        ({"kind": "lstm", "units": 5}, {}, r"model\.main\.units=5 must be at least model\.main\.width=6"),
        ({"width": 3}, {}, r"model\.main\.width=3: expected at least 4 \(model\.encoder\.width\)"),
        ({"kind": "lstm", "width": 3}, {"head": "none"}, "iem.head=none needs .*but it is 3. Set iem.head=linear"),
    ],
)
def test_what_does_not_fit_is_refused(main: dict[str, object], iem: dict[str, str], message: str) -> None:
    options = ModelOptions(encoder=EncoderOptions(width=4), main=replace(OPTIONS, **main))
    with pytest.raises(ValueError, match=message):
        make_system(options, IEMOptions(**iem), ChunkingSpec(3, 3, False, 9))
