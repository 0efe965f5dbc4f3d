"""Characters per second of sampling: a trained run beside a flat transformer of as many parameters (x-transformers).

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/sampling.py RUN [--characters 1000] [--batches 1 16] [--repeats 5] [--seed 0]

RUN should be trained, else its chunks have no natural lengths. The flat model has 6 layers and the width at which its
parameters come nearest to RUN's; bytes are its tokens, keys and values are cached (`generate(cache_kv=True)`), and its
window holds all characters, so that it never computes one anew. What it writes depends on nothing that takes time, so it is
not trained. Both in float32 on the CPU, one after the other in each repeat; medians, and the range of the ratio.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch
from torch import Tensor, nn

from pipeline.options import SampleOptions
from pipeline.run.opened import Run, open_run


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def flat(wanted: int, context: int) -> nn.Module:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    def make(dim: int) -> nn.Module:
        layers = Decoder(dim=dim, depth=6, heads=max(1, dim // 64), attn_dim_head=64, rotary_pos_emb=True)
        return TransformerWrapper(num_tokens=256, max_seq_len=context, attn_layers=layers, use_abs_pos_emb=False)

    with torch.device("meta"):
        width = min(range(64, 2049, 16), key=lambda dim: abs(parameters(make(dim)) - wanted))
    return AutoregressiveWrapper(make(width)).eval()


def ours(run: Run, batch: int, characters: int, seed: int) -> float:
    """Characters per second; chunks are drawn until every text has enough on average."""
    began, written, chunks = time.perf_counter(), 0, characters // 6
    while written < batch * characters:
        texts = run.sample("", batch, SampleOptions(chunks=chunks, temperature=1.0, top_p=1.0, seed=seed))
        written += sum(len(text) for text in texts)
        chunks = max(1, round((batch * characters - written) / max(1, written / chunks)))
    return written / (time.perf_counter() - began)


def theirs(model: nn.Module, batch: int, characters: int) -> float:
    began = time.perf_counter()
    with torch.no_grad():
        written: Tensor = model.generate(torch.zeros(batch, 1, dtype=torch.long), characters, cache_kv=True)
    assert written.shape == (batch, characters)
    return batch * characters / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--characters", type=int, default=1000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    run = open_run(arguments.run)
    peer = flat(parameters(run.system), arguments.characters + 1)
    print(f"parameters: {parameters(run.system):,} ours, {parameters(peer):,} flat; {torch.get_num_threads()} threads")
    for batch in arguments.batches:
        pairs = [
            (ours(run, batch, arguments.characters, seed), theirs(peer, batch, arguments.characters))
            for seed in range(arguments.repeats + 1)
        ][1:]
        ratios = sorted(a / b for a, b in pairs)
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{batch:4} at once: {a:8,.0f} characters/s ours, {b:8,.0f} flat: {a / b:.2f} times "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
