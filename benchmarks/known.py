"""What it costs to score known chunks: seconds a chunk, arithmetic, and memory, by how many are known.

    python benchmarks/known.py [--known 33895 1000000] [--width 256] [--scored 1024] [--repeats 3]

Keys are random, in bfloat16 and mapped from a file, as an evaluation has them. Each number is measured in a process of its own,
with one thread: the median processor time of some passes over the same queries after a first one, beside that of as many
products of blocks alone; and the most memory that the process had. Of that, what is mapped can be dropped at any time.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from haed.chunk.mixture import ChunkVocabulary, VocabularyScorer
from haed.chunk.packing import Chunks

K = 12


def write(path: Path, known: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.empty(known, width, dtype=torch.bfloat16)
    for block in keys.split(1 << 14):
        block.copy_(torch.nn.functional.normalize(torch.randn(block.shape, generator=generator), dim=-1))
    save_file({"keys": keys, "bias": torch.randn(known, generator=generator)}, path)


def measure(path: Path, scored: int, repeats: int) -> None:
    torch.set_num_threads(1)
    with safe_open(path, "pt") as file:
        keys, bias = file.get_tensor("keys"), file.get_tensor("bias")
    known, width = keys.shape
    numbers = torch.arange(known)
    tokens = torch.stack([numbers >> 8 * place & 255 for place in range(K)], 1)
    lexicon = ChunkVocabulary(Chunks(tokens, torch.full((known,), K)), numbers + 1)
    generator = torch.Generator().manual_seed(1)
    queries = 10 * torch.nn.functional.normalize(torch.randn(scored, width, generator=generator), dim=-1)
    rows = torch.randint(known, (scored,), generator=generator)
    found, own = VocabularyScorer(lexicon, keys, bias), torch.randn(1 << 11, width)

    def products() -> None:
        for _ in range(0, known, len(own)):
            queries[: 1 << 10] @ own.t()

    def passed(work: Callable[[], None]) -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    def score() -> None:
        with torch.no_grad():
            assert found.log_softmax(queries, rows, 1.0).isfinite().all()

    score()
    times = [(passed(score) / scored, passed(products) / min(scored, 1 << 10)) for _ in range(repeats)]
    whole, least = (statistics.median(each) for each in zip(*times, strict=True))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{known:>9,} known, width {width}: {1e3 * whole:.3f} ms a chunk, {2e-9 * known * width / whole:.0f} GFLOP/s, "
        f"{whole / least:.2f} times its products alone; {most / 1024:,.0f} MiB in all at most, of which "
        f"{path.stat().st_size / (1 << 20):,.0f} are mapped",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=int, nargs="+", default=[33_895, 1_000_000])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--scored", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    for known in arguments.known:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "keys.safetensors"
            for work in (
                (write, (path, known, arguments.width)),
                (measure, (path, arguments.scored, arguments.repeats)),
            ):
                process = fresh.Process(target=work[0], args=work[1])
                process.start()
                process.join()


if __name__ == "__main__":
    main()
