"""Public packages at two to three million parameters, as benchmarks/systems.py trains and scores them beside ours.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/peers.py ../shared/data/wikitext-2 x-transformers --steps 1000 [--rates 1e-3 2e-3 4e-3]

All see the bytes of FOLDER/train.txt and are scored on FOLDER/valid.txt, run in bfloat16 where that is fast, with AdamW, warm-up
and a cosine; of several learning rates the best is taken, each tried for a tenth of the steps first. They see windows of 256
bytes, or as many as the name says; when scored, each window but the first brings half a window of new bytes after half a
window or more of context. Every byte is scored exactly once (the first one of all, which they cannot predict, at 8 bits), and
that no prediction depends on later bytes is checked before training.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import load
from pipeline.run.device import Compute, compute

CONTEXT, TOKENS, WARM_UP = 256, 2048, 100


def x_transformers(context: int = CONTEXT) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=192, depth=5, heads=4, attn_dim_head=48, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=256, max_seq_len=context, attn_layers=layers, use_abs_pos_emb=False)


def megabyte() -> nn.Module:
    from MEGABYTE_pytorch import MEGABYTE

    return MEGABYTE(num_tokens=256, dim=(256, 128), depth=(2, 2), max_seq_len=(CONTEXT // 4, 4), heads=4, dim_head=48)


def hourglass() -> nn.Module:
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
        x = self.embedding(x).transpose(0, 1) * 256**0.5 + self.positions[: x.shape[1]]
        return self.output(self.norm(self.hourglass(x))).transpose(0, 1)


class DynamicChunking(nn.Module):
    """H-Net (Hwang et al. 2025) of h-net-dynamic-chunking, one level; `auxiliary` is its ratio loss, of the last pass."""

    def __init__(self) -> None:
        from h_net_dynamic_chunking.h_net import HNet
        from x_transformers import Decoder

        super().__init__()
        layers = partial(Decoder, heads=4, attn_dim_head=48, rotary_pos_emb=True)
        self.embedding, self.norm, self.output = nn.Embedding(256, 192), nn.LayerNorm(192), nn.Linear(192, 256)
        inner = layers(dim=256, depth=2)
        self.net = HNet(layers(dim=192, depth=1), inner, layers(dim=192, depth=1), dim=192, dim_inner=256)
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(self.embedding(x))
        self.auxiliary = found.loss
        return self.output(self.norm(found.output))


class ByteLatent(nn.Module):
    """Byte Latent Transformer (Pagnoni et al. 2024) of transformers, with hashed n-grams.

    Patches by entropy need a model of bytes that was trained before; by spaces, where a patch ends with what is no letter or
    digit, is the paper's own alternative (section 2.2).
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
        letters = [range(48, 58), range(65, 91), range(97, 123), range(128, 256)]
        ends = torch.ones(256, dtype=torch.bool, device=x.device)
        ends[[byte for each in letters for byte in each]] = False
        begins = torch.ones(len(x), x.shape[1] + 1, dtype=torch.long, device=x.device)  # the first patch is one byte
        begins[:, 2:] = ends[x[:, 1:]]
        patches = begins.cumsum(1) - 1
        lengths = patches.new_zeros(len(x), int(patches.max()) + 1).scatter_add_(1, patches, torch.ones_like(patches))
        return self.model(input_ids=x + 4, patch_lengths=lengths, use_cache=False).logits[..., 4:]  # four special ones


PEERS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the bytes that it sees
    "x-transformers": (x_transformers, CONTEXT),
    "x-transformers, 768": (partial(x_transformers, 768), 768),
    "MEGABYTE-pytorch": (megabyte, CONTEXT),
    "hourglass-transformer-pytorch": (hourglass, CONTEXT),
    "labml-nn": (Annotated, CONTEXT),
    "h-net-dynamic-chunking": (DynamicChunking, CONTEXT),
    "transformers, BLT": (ByteLatent, CONTEXT),
}


def batch_of(context: int) -> int:
    """Windows of a step, so that all see about as many bytes."""
    return round(TOKENS / context)


def check_causality(model: nn.Module, context: int) -> None:
    """Raises if a prediction changes with a later byte; logits at i are those of byte i + 1."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (1, context), generator=generator)
    text[:, ::5] = 32
    text = text.to(next(model.parameters()).device)
    with torch.no_grad():
        before = model(text)
        assert before.shape == (1, context, 256)
        for place in (1, 2, 3, 64, 65, 129, context - 1):
            changed = text.clone()
            changed[0, place:] = (changed[0, place:] + 7) % 256
            after = model(changed)
            if not torch.allclose(before[0, :place], after[0, :place], atol=1e-4):
                raise AssertionError(f"{type(model).__name__} sees bytes from {place} on before it predicts them")


def training(
    model: nn.Module, context: int, rate: float, steps: int, text: Tensor, machine: Compute, seed: int
) -> Iterator[None]:
    """Trains a peer, one step at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = rate * cosine * min(1.0, (step + 1) / WARM_UP)
        begin = torch.randint(len(text) - context, (batch_of(context), 1), generator=generator)
        batch = text[begin + offsets].long().to(machine.device)
        with machine.precision():
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        (loss + getattr(model, "auxiliary", 0.0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def trained(name: str, rate: float, steps: int, text: Tensor, machine: Compute, seed: int) -> nn.Module:
    build, context = PEERS[name]
    torch.manual_seed(seed)
    model = build().to(machine.device)
    for _ in training(model, context, rate, steps, text, machine, seed):
        pass
    return model


@torch.no_grad()
def bits_per_byte(model: nn.Module, context: int, text: Tensor, machine: Compute) -> float:
    """Every byte once."""
    model.eval()
    scored = torch.zeros(len(text), dtype=torch.long)
    scored[0] += 1
    total, known, batch = 8.0, 1, batch_of(context)
    windows = []
    while known < len(text):
        begin = min(max(0, known - context // 2 - 1), len(text) - context - 1)
        windows.append((begin, known))
        known = begin + context + 1
    for at in range(0, len(windows), batch):
        begins = torch.tensor([begin for begin, _ in windows[at : at + batch]])
        seen = text[begins[:, None] + torch.arange(context + 1)].long()
        with machine.precision():
            logits = model(seen[:, :-1].to(machine.device)).float().cpu()
        nats = F.cross_entropy(logits.flatten(0, 1), seen[:, 1:].flatten(), reduction="none").unflatten(
            0, (-1, context)
        )
        for row, (begin, known) in zip(nats.double(), windows[at : at + batch], strict=True):
            total += float(row[known - begin - 1 :].sum()) / math.log(2)
            scored[known : begin + context + 1] += 1
    assert bool((scored == 1).all())
    return total / len(text)


def peer(name: str, arguments: argparse.Namespace, machine: Compute, text: Tensor, valid: Tensor) -> dict:
    build, context = PEERS[name]
    check_causality(build().to(machine.device), context)
    tried = {}
    for rate in arguments.rates if len(arguments.rates) > 1 else ():
        model = trained(name, rate, max(1, arguments.steps // 10), text, machine, arguments.seed)
        tried[rate] = bits_per_byte(model, context, valid[:100_000], machine)
    rate = min(tried, key=tried.__getitem__) if tried else arguments.rates[0]
    model = trained(name, rate, arguments.steps, text, machine, arguments.seed)
    return {
        "bits_per_byte": bits_per_byte(model, context, valid, machine),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_byte": flops_per_byte(name),
        "rate": rate,
    }


def flops_per_byte(name: str) -> float:
    """Of the products of a step, forward and backward, as PyTorch counts them, those of attention too."""
    build, context = PEERS[name]
    model, generator = build(), torch.Generator().manual_seed(0)
    text = torch.randint(97, 123, (batch_of(context), context), generator=generator)
    text[torch.rand(text.shape, generator=generator) < 0.17] = 32  # where some of them divide it
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(text).sum().backward()
    return counter.get_total_flops() / text.numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--threads", default="null", help="CPU threads (default: all cores)")
    arguments = parser.parse_args()
    machine = compute(load(None, [f"threads={arguments.threads}"]))
    texts = (arguments.folder / f"{split}.txt" for split in ("train", "valid"))
    text, valid = (torch.from_numpy(np.fromfile(path, np.uint8)) for path in texts)
    print(json.dumps(peer(arguments.name, arguments, machine, text, valid)))


if __name__ == "__main__":
    main()
