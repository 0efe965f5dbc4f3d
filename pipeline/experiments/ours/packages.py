"""Public packages at two to three million parameters.

Their models map bytes (B, L) to the logits (B, L, 256) of the next bytes.

pip install --no-deps -r benchmarks/peers.txt
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

CONTEXT = 256  # bytes


def x_transformers(context: int = CONTEXT) -> nn.Module:
    """Return a flat transformer."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=192, depth=5, heads=4, attn_dim_head=48, rotary_pos_emb=True, rotary_emb_dim=32)
    return TransformerWrapper(num_tokens=256, max_seq_len=context, attn_layers=layers, use_abs_pos_emb=False)


def megabyte() -> nn.Module:
    """Return a model with patches of four bytes."""
    from MEGABYTE_pytorch import MEGABYTE

    return MEGABYTE(num_tokens=256, dim=(256, 128), depth=(2, 2), max_seq_len=(CONTEXT // 4, 4), heads=4, dim_head=48)


def hourglass() -> nn.Module:
    """Return the package's simple variant, shortened by 2."""
    from hourglass_transformer_pytorch import HourglassTransformerLM

    return HourglassTransformerLM(
        num_tokens=256, dim=192, max_seq_len=CONTEXT, depth=(1, 2, 1), shorten_factor=2, heads=4, dim_head=48
    )


class Annotated(nn.Module):
    """labml-nn's Hourglass in the model of its experiment, without dropout."""

    def __init__(self) -> None:
        from labml_nn.transformers.hour_glass import HourGlass
        from labml_nn.transformers.positional_encoding import get_positional_encoding

        super().__init__()
        self.embedding, self.norm, self.output = nn.Embedding(256, 256), nn.LayerNorm(256), nn.Linear(256, 256)
        self.hourglass = HourGlass(4, 256, 0.0, 512, [4, 2])
        self.register_buffer("positions", get_positional_encoding(256, CONTEXT), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embedding(x).transpose(0, 1) * 256**0.5 + self.get_buffer("positions")[: x.shape[1]]
        return self.output(self.norm(self.hourglass(x))).transpose(0, 1)


class DynamicChunking(nn.Module):
    """H-Net (Hwang et al. 2025) of h-net-dynamic-chunking, with one level.

    `auxiliary` is its ratio loss in the last pass.
    """

    def __init__(self) -> None:
        from h_net_dynamic_chunking.h_net import HNet
        from x_transformers import Decoder

        super().__init__()
        layers = partial(Decoder, heads=4, attn_dim_head=48, rotary_pos_emb=True, rotary_emb_dim=32)
        self.embedding, self.norm, self.output = nn.Embedding(256, 192), nn.LayerNorm(192), nn.Linear(192, 256)
        inner = layers(dim=256, depth=2)
        self.net = HNet(layers(dim=192, depth=1), inner, layers(dim=192, depth=1), dim=192, dim_inner=256)
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        found = self.net(self.embedding(x))
        self.auxiliary = found.loss
        return self.output(self.norm(found.output))


class ByteLatent(nn.Module):
    """Byte Latent Transformer (Pagnoni et al. 2024) of transformers, with hashed n-grams.

    Patches by entropy need a byte model trained beforehand. Patches by spaces are the paper's own alternative (section
    2.2): a patch ends with a character that is neither letter nor digit.
    """

    def __init__(self) -> None:
        from transformers.models.blt.configuration_blt import BltConfig
        from transformers.models.blt.modeling_blt import BltForCausalLM

        super().__init__()
        local = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384, "hidden_size_global": 256}
        main = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 704}
        encoder, decoder = local | {"num_hidden_layers": 1}, local | {"num_hidden_layers": 2}
        self.model = BltForCausalLM(
            BltConfig(
                patch_in_forward=False,
                encoder_hash_byte_group_vocab=500,
                encoder_config=encoder,
                decoder_config=decoder,
                global_config=main,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        letters = [range(48, 58), range(65, 91), range(97, 123), range(128, 256)]
        ends = torch.ones(256, dtype=torch.bool, device=x.device)
        ends[[byte for each in letters for byte in each]] = False
        begins = torch.ones(len(x), x.shape[1] + 1, dtype=torch.long, device=x.device)  # the first patch is one byte
        begins[:, 2:] = ends[x[:, 1:]]
        patches = begins.cumsum(1) - 1
        lengths = patches.new_zeros(len(x), int(patches.max()) + 1).scatter_add_(1, patches, torch.ones_like(patches))
        return self.model(input_ids=x + 4, patch_lengths=lengths, use_cache=False).logits[..., 4:]  # four special ones


@dataclass(frozen=True)
class Package:
    """A public package: a function that builds its model, the module it needs, and its context in bytes."""

    build: Callable[[], nn.Module]
    module: str
    context: int = CONTEXT

    @property
    def is_there(self) -> bool:
        """Return whether it is installed."""
        return find_spec(self.module) is not None


PACKAGES = {
    "x-transformers": Package(x_transformers, "x_transformers"),
    "x-transformers, 768": Package(partial(x_transformers, 768), "x_transformers", 768),
    "MEGABYTE-pytorch": Package(megabyte, "MEGABYTE_pytorch"),
    "hourglass-transformer-pytorch": Package(hourglass, "hourglass_transformer_pytorch"),
    "labml-nn": Package(Annotated, "labml_nn"),
    "h-net-dynamic-chunking": Package(DynamicChunking, "h_net_dynamic_chunking"),
    "transformers, BLT": Package(ByteLatent, "transformers"),
}
