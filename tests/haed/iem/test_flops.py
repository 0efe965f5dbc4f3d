"""Counted FLOPs against PyTorch's own counter over a real step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from haed.chunk.model import HAED
from haed.iem.objective import ChunkObjective
from haed.options import EncoderOptions, IEMOptions, MainOptions, ModelOptions
from haed.system import Cut
from tests.haed.chunk.test_model import decoder_options, windows


def in_place(_: object, a: torch.Size, b: torch.Size, **__: object) -> int:
    """Of addmm_, which the counter does not know."""
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize(
    ("decoder", "weight", "fraction"),
    [("lstm", 1.0, 0.0), ("lstm", 0.0, 1.0), ("transformer", 1.0, 0.5), ("previous", 0.0, 1.0)],
)
def test_flops_are_those_of_the_products(decoder: str, weight: float, fraction: float) -> None:
    options = ModelOptions(
        encoder=EncoderOptions(token_width=8, hidden=64, width=64),
        main=MainOptions(layers=2, width=96, heads=2, head_width=32, ffn=128),
        decoder=decoder_options(decoder, width=64, ffn=128, layers=2),
    )
    model = HAED(options, IEMOptions(), Cut(6, 256, False, 32))
    made = ChunkObjective(model, IEMOptions(), weight, fraction)
    batch = made.prepare(windows(4, 32, 6, 256))
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        made(batch).total.backward()
    wanted = counter.get_total_flops()
    assert 0.97 * wanted < made.flops(batch) < 1.01 * wanted  # the counter has attention within chunks
