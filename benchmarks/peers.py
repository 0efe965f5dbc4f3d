"""Bits per byte at equal seconds of training: this project beside x-transformers, MEGABYTE-pytorch and hourglass.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/peers.py ../shared/data/wikitext-2 [--seconds 200] [--only haed x-transformers] [--json]

All see the bytes of FOLDER/train.txt and are scored on FOLDER/valid.txt, have about two million parameters, run in bfloat16
where that is fast, with AdamW, warm-up and a cosine; the peers' learning rates are the best of --rates, each tried for a
tenth of the time first. Peers see windows of 256 bytes; when scored, each window but the first brings 128 new bytes after
128 or more of context. Every byte is scored exactly once (the first one of all, which they cannot predict, at 8 bits), and
that no prediction depends on later bytes is checked before training. Ours is the preset `wikitext2` at the peers' size, with
its phases' shares of the time, scored over windows of 128 chunks with half of them context.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import load
from pipeline.run.device import Compute, compute

CONTEXT, WINDOWS, WARM_UP = 256, 8, 100
OURS = ["model.main.layers=2", "model.main.ffn=512", "model.decoder.width=320", "model.decoder.token_width=32"]
OURS += ["model.encoder.rows=0", "model.decoder.grams.rows=0"]  # of as many parameters as the others


def x_transformers() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=192, depth=5, heads=4, attn_dim_head=48, rotary_pos_emb=True)
    return TransformerWrapper(num_tokens=256, max_seq_len=CONTEXT, attn_layers=layers, use_abs_pos_emb=False)


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


PEERS: dict[str, Callable[[], nn.Module]] = {
    "x-transformers": x_transformers,
    "MEGABYTE-pytorch": megabyte,
    "hourglass-transformer-pytorch": hourglass,
    "labml-nn": Annotated,
}


def check_causality(model: nn.Module) -> None:
    """Raises if a prediction changes with a later byte; logits at i are those of byte i + 1."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(256, (1, CONTEXT), generator=generator)
    with torch.no_grad():
        before = model(text)
        assert before.shape == (1, CONTEXT, 256)
        for place in (1, 2, 3, 64, 129, CONTEXT - 1):
            changed = text.clone()
            changed[0, place:] = (changed[0, place:] + 7) % 256
            after = model(changed)
            if not torch.allclose(before[0, :place], after[0, :place], atol=1e-4):
                raise AssertionError(f"{type(model).__name__} sees bytes from {place} on before it predicts them")


def train(name: str, rate: float, seconds: float, text: Tensor, machine: Compute, seed: int) -> tuple[nn.Module, int]:
    """Trains a peer for so many seconds; returns it and its steps."""
    torch.manual_seed(seed)
    model = PEERS[name]().to(machine.device)
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(seed)
    offsets, spent, step = torch.arange(CONTEXT + 1), 0.0, 0
    model.train()
    while spent < seconds:
        began = time.perf_counter()
        for group in optimizer.param_groups:
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, spent / seconds)))
            group["lr"] = rate * cosine * min(1.0, (step + 1) / WARM_UP)
        begin = torch.randint(len(text) - CONTEXT, (WINDOWS, 1), generator=generator)
        batch = text[begin + offsets].long().to(machine.device)
        with machine.precision():
            logits = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        spent += time.perf_counter() - began
        step += 1
    return model, step


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, machine: Compute) -> float:
    """Every byte once."""
    model.eval()
    scored = torch.zeros(len(text), dtype=torch.long)
    scored[0] += 1
    total, known = 8.0, 1
    windows = []
    while known < len(text):
        begin = min(max(0, known - CONTEXT // 2 - 1), len(text) - CONTEXT - 1)
        windows.append((begin, known))
        known = begin + CONTEXT + 1
    for at in range(0, len(windows), WINDOWS):
        begins = torch.tensor([begin for begin, _ in windows[at : at + WINDOWS]])
        batch = text[begins[:, None] + torch.arange(CONTEXT + 1)].long()
        with machine.precision():
            logits = model(batch[:, :-1].to(machine.device)).float().cpu()
        nats = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").unflatten(
            0, (-1, CONTEXT)
        )
        for row, (begin, known) in zip(nats.double(), windows[at : at + WINDOWS], strict=True):
            total += float(row[known - begin - 1 :].sum()) / math.log(2)
            scored[known : begin + CONTEXT + 1] += 1
    assert bool((scored == 1).all())
    return total / len(text)


def peer(name: str, arguments: argparse.Namespace, machine: Compute, train_text: Tensor, valid: Tensor) -> dict:
    check_causality(PEERS[name]().to(machine.device))
    tried = {}
    for rate in arguments.rates if len(arguments.rates) > 1 else ():
        model, _ = train(name, rate, arguments.seconds / 10, train_text, machine, arguments.seed)
        tried[rate] = bits_per_byte(model, valid[:100_000], machine)
    rate = min(tried, key=tried.__getitem__) if tried else arguments.rates[0]
    model, steps = train(name, rate, arguments.seconds, train_text, machine, arguments.seed)
    size = sum(parameter.numel() for parameter in model.parameters())
    return result(name, bits_per_byte(model, valid, machine), size, steps, flops_per_byte(name), rate=rate)


def flops_per_byte(name: str) -> float:
    """Of the products of a step, forward and backward, as PyTorch counts them."""
    model, text = PEERS[name](), torch.zeros(WINDOWS, CONTEXT, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(text).sum().backward()
    return counter.get_total_flops() / text.numel()


def ours(arguments: argparse.Namespace, folder: str) -> dict:
    options = load("wikitext2")
    total = options.pretrain.seconds + options.finetune.seconds
    limits = [
        f"{phase}.seconds={getattr(options, phase).seconds / total * arguments.seconds}"
        for phase in ("pretrain", "finetune")
    ]
    common = [
        f"source.path={arguments.folder}",
        "source.pattern=*.txt",
        *OURS,
        *limits,
        "validation.times=0",
        f"seed={arguments.seed}",
        f"threads={arguments.threads or 'null'}",
    ]
    common += [f"runs_dir={folder}/runs", f"shards_dir={folder}/shards", *arguments.overrides]
    for stage in ("shard", "pretrain", "finetune"):
        found = stage_of(stage, "--config", "wikitext2", *common)
    steps = found["steps"]
    found = stage_of(
        "evaluate", "wikitext2", f"runs_dir={folder}/runs", "evaluate.split=valid", "evaluate.yardsticks=false"
    )
    compared = stage_of("compare", "wikitext2", "--runs-dir", f"{folder}/runs")["rows"][0]
    assert found["bytes"] == (arguments.folder / "valid.txt").stat().st_size
    remark = f"{steps} of them in phase two"
    return result("haed", found["bits_per_byte"], compared["parameters"], compared["steps"], remark=remark)


def stage_of(*words: str) -> dict:
    """Runs a command of the pipeline and returns its JSON."""
    done = subprocess.run([sys.executable, "-m", "pipeline", *words, "--json"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def result(name: str, bits: float, parameters: int, steps: int, flops: float | None = None, **more: object) -> dict:
    found = {
        "name": name,
        "bits_per_byte": bits,
        "parameters": parameters,
        "steps": steps,
        "flops_per_byte": flops,
        **more,
    }
    remark = ", ".join(f"{key} {value}" for key, value in more.items())
    print(f"  {name:<30} {bits:.4f} bits/byte  {parameters:>10,} parameters  {steps:>6,} steps  {remark}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3])
    parser.add_argument("--only", nargs="+", choices=["haed", *PEERS], default=["haed", *PEERS])
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--json", action="store_true", help="a line of JSON after each")
    parser.add_argument("overrides", nargs="*", help="options of our run, key=value")
    arguments = parser.parse_args()
    machine = compute(load(None, [f"threads={arguments.threads or 'null'}"]))
    texts = (arguments.folder / f"{split}.txt" for split in ("train", "valid"))
    train_text, valid = (torch.from_numpy(np.fromfile(path, np.uint8)) for path in texts)
    print(f"{arguments.seconds:g} s of training each, seed {arguments.seed}, {torch.get_num_threads()} threads")
    for name in arguments.only:
        if name == "haed":
            with tempfile.TemporaryDirectory() as folder:
                found = ours(arguments, folder)
        else:
            found = peer(name, arguments, machine, train_text, valid)
        if arguments.json:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
