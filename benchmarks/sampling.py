"""Time a sampled chunk, with and without memory.

    python benchmarks/sampling.py RUN [--chunks 40] [--repeats 3] [--samples 1] [--threads 1]

Chunks follow the first 200 of a held-out document. The settings take turns, so that other work on the machine meets all of
them alike. Seconds are of the process's CPU time; the least of the repeats counts.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch

from haed.base import TokenBatch
from haed.chunk.model import HAED
from haed.sampling import ChunkSampler, Draw
from pipeline.console import exit_on_error
from pipeline.reporting.rendering import Table
from pipeline.run.opened import Run, open_run
from pipeline.run.remembered import choose_held_out
from pipeline.run.windows import pad_chunks

WAYS = {"temperature 1": (1.0, 0, 1.0), "temperature 0.8": (0.8, 0, 1.0), "temperature 0.8, top_p 0.95": (0.8, 0, 0.95)}


def choose_prompt(run: Run, most: int = 200) -> TokenBatch:
    """Return the first chunks of a held-out document."""
    (tokens, lengths), *_ = choose_held_out(run.folder.open_corpus())
    lengths = lengths[:most]
    rows = pad_chunks(tokens[: int(lengths.astype(np.int64).sum())], lengths, run.chunker.k)
    return TokenBatch.from_chunks(*(torch.from_numpy(x.astype(np.int64))[None] for x in (rows, lengths)))


@torch.no_grad()
def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    for name, value in (("chunks", 40), ("repeats", 3), ("samples", 1), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run = open_run(arguments.run)
    system, prompt = run.likelihood, choose_prompt(run)
    if not isinstance(system, HAED):
        sys.exit(f"error: {arguments.run} is no model of chunks")
    memory, best = system.memory, dict[tuple[str, str], tuple[float, float]]()
    for _ in range(arguments.repeats):
        for remembers in ("with memory", "without")[memory is None :]:
            system.memory = memory if remembers == "with memory" else None
            for name, how in WAYS.items():
                draw = Draw(*how, torch.Generator().manual_seed(0))
                with run.compute.use_precision():
                    sampler = ChunkSampler(system, prompt, arguments.samples)
                    sampler.draw_chunk(draw)
                    began = time.process_time()
                    tokens = sum(int(sampler.draw_chunk(draw).lengths.sum()) for _ in range(arguments.chunks))
                seconds = time.process_time() - began
                drawn = arguments.chunks * arguments.samples
                measured = 1e3 * seconds / drawn, tokens / seconds
                best[name, remembers] = min(best.get((name, remembers), measured), measured)
    cells = [[*key, *(f"{x:.1f}" for x in value)] for key, value in best.items()]
    print(Table(["", "", "ms a chunk", "bytes/s"], cells, [False, False, True, True]).to_text())


if __name__ == "__main__":
    with exit_on_error():
        main()
