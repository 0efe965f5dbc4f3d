"""What each part that remembers is worth to a run.

    python benchmarks/memory.py RUN [--split test] [--chunks 60000]

Held-out chunks of valid and those of the split are read once, by all parts. For every set of parts the gate is fitted anew,
as `haed evaluate` does, and gives the bits per character of the split, or of as many whole documents of it as have so many
chunks. `sampling.py` measures what they cost a sample.
"""

import argparse
import math
import sys
import time
from itertools import combinations
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch

from haed.chunk.memory import Memory, ReadChunks
from haed.chunk.model import HAED
from pipeline.console import exit_on_error
from pipeline.reporting.rendering import Table
from pipeline.run.opened import Run, count_characters, open_run
from pipeline.run.remembered import choose_held_out, read_documents

Document = tuple[np.ndarray, np.ndarray]


def choose_documents(run: Run, split: str, most: int) -> tuple[list[Document], int]:
    """Return the first whole documents of a split with about `most` chunks, and their number of characters."""
    corpus = run.folder.open_corpus()
    documents: list[Document] = []
    characters, left = 0, most
    for (tokens, lengths), original in zip(
        corpus.iterate_documents(split), corpus.iterate_originals(split), strict=True
    ):
        if left <= 0:
            break
        documents.append((tokens, lengths))
        characters += count_characters(original)
        left -= len(lengths)
    return documents, characters


def list_columns(memory: Memory, width: int, names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Return which features and parts a gate between the parts of a model of some width and some that remember sees."""
    own = [number for number, name in enumerate(memory.names) if name in ("known", "spelled")]
    parts = memory.start_document().parts
    first = width + len(own) - 1
    features = list(range(first))
    columns = list(own)
    for number, part in enumerate(parts):
        if part.name in names:
            features += range(first, first + part.features)
            columns.append(len(own) + number)
        first += part.features
    return features, columns


def measure_bits(memory: Memory, width: int, fitted: ReadChunks, held_out: ReadChunks, names: tuple[str, ...]) -> float:
    """Return the bits of chunks by a gate between some parts."""
    features, columns = list_columns(memory, width, names)
    fitted, held_out = (
        ReadChunks(
            read.features[:, features],
            read.present[:, columns],
            read.log_prob[:, columns],
            read.decisions,
            read.counts if "words" in names else None,
        )
        for read in (fitted, held_out)
    )
    chosen = tuple(memory.names[column] for column in columns)
    some = Memory.fit(chosen, memory.start_document, fitted)
    if some.speller is not None:
        held_out.spell(some.speller, chosen.index("spelled"))
    weights = some.gate.weigh_parts(held_out.features, held_out.present)
    return -float((weights + held_out.log_prob).logsumexp(1).sum()) / math.log(2)


@torch.no_grad()
def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--split", default="test")
    parser.add_argument("--chunks", type=int, default=60_000)
    arguments = parser.parse_args()
    run = open_run(arguments.run)
    system = run.likelihood
    if not isinstance(system, HAED) or (memory := system.memory) is None:
        reason = "it is no model of chunks, evaluate.memory is 0, or its shards are not there"
        sys.exit(f"error: {arguments.run} has no memory: {reason}")
    documents, characters = choose_documents(run, arguments.split, arguments.chunks)
    began = time.process_time()
    with run.compute.use_precision():
        fitted, read = (
            read_documents(system, memory.start_document, some, run.stride)
            for some in (choose_held_out(run.folder.open_corpus()), documents)
        )
    seconds = time.process_time() - began
    names = [*(part.name for part in memory.start_document().parts), *(["words"] if memory.speller else [])]
    subsets = [subset for size in range(len(names) + 1) for subset in combinations(names, size)]
    bits = {
        " + ".join(subset) or "none": measure_bits(memory, system.width, fitted, read, subset) / characters
        for subset in subsets
    }
    print(
        f"{len(read.features):,} chunks of {arguments.split}, {characters:,} characters, read in {seconds:.0f} s of CPU time"
    )
    cells = [[parts, f"{value:.4f}"] for parts, value in bits.items()]
    print(Table(["parts", "bits/char"], cells, [False, True]).to_text())


if __name__ == "__main__":
    with exit_on_error():
        main()
