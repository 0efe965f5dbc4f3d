"""Characters per second of sampling: a trained run beside a flat transformer of as many parameters (x-transformers).

A run with known chunks is sampled twice, as the mixture that it is, and by its decoder alone; then the share of the chunks that
are summoned is told as well.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/sampling.py RUN [--characters 1000] [--batches 1 16] [--repeats 5] [--seed 0]
                                  [--temperature 1 --top-p 1] [--no-flat]

RUN should be trained, else its chunks have no natural lengths. The flat model has 6 layers and the width at which its
parameters come nearest to RUN's; bytes are its tokens, keys and values are cached (`generate(cache_kv=True)`), and its
window holds all characters, so that it never computes one anew. What it writes depends on nothing that takes time, so it is
not trained. Both in float32 on the CPU, one after the other in each repeat; medians, and the range of the ratio.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch
from torch import Tensor, nn

from haed.chunk.model import HAED
from pipeline.config import SampleOptions
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


def ours(run: Run, batch: int, characters: int, how: SampleOptions) -> tuple[float, float]:
    """Characters per second, and the share of summoned chunks; drawn until every text has enough on average."""
    began, written, drawn, summoned, how = time.perf_counter(), 0, 0, 0.0, replace(how, chunks=characters // 6)
    while written < batch * characters:
        found = run.continued("", batch, how)
        written += sum(len(text) for text in found.texts)
        drawn, summoned = drawn + batch * how.chunks, summoned + how.chunks * sum(found.summoned or [])
        how.chunks = max(1, round((batch * characters - written) / max(1, written / (drawn / batch))))
    return written / (time.perf_counter() - began), summoned / drawn


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
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--no-flat", action="store_true", help="leave the flat transformer out")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    run = open_run(asked.run)
    run.continued("", 1, SampleOptions(chunks=1))  # the known chunks are found at the first use
    arms = {"ours": lambda batch, how: ours(run, batch, asked.characters, how)}
    if isinstance(run.system, HAED) and run.system.known is not None:
        alone = Run(run.folder, run.folder.load_options(["evaluate.likelihood=decoder"], "sample"))
        arms["decoder alone"] = lambda batch, how: ours(alone, batch, asked.characters, how)
    print(f"parameters: {parameters(run.system):,}; {torch.get_num_threads()} threads")
    if not asked.no_flat:
        peer = flat(parameters(run.system), asked.characters + 1)
        arms[f"flat, {parameters(peer):,}"] = lambda batch, how: (theirs(peer, batch, asked.characters), 0.0)
    for batch in asked.batches:
        found = [
            [
                arm(batch, SampleOptions(temperature=asked.temperature, top_p=asked.top_p, seed=seed))
                for arm in arms.values()
            ]
            for seed in range(asked.repeats + 1)
        ][1:]
        print(f"{batch:4} at once, {100 * statistics.mean(row[0][1] for row in found):.1f} % of the chunks summoned")
        for number, name in enumerate(arms):
            ratios = sorted(row[0][0] / row[number][0] for row in found)
            speed = statistics.median(row[number][0] for row in found)
            ratio = f"; ours has {statistics.median(ratios):.2f} times that ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"  {speed:8,.0f} characters/s {name}{ratio if number else ''}", flush=True)


if __name__ == "__main__":
    main()
