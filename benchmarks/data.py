"""Time sharding, storage and the loader, beside webdataset, in one process and in turns.

    python benchmarks/data.py FOLDER-OF-TEXTS [--repeats 5]

1. Sharding: MB/s from raw text to finished tars with checksums and statistics, with one worker and with two.
2. Storage: the same samples written, read, and resumed at 90 %, by this project and by plain webdataset. A sample is
   about a megabyte of text cut into words: tokens and lengths of the chunks. Files hold about 16 MB. Writing begins with
   arrays in memory. Ours always adds checksums and syncs to the disk; the second row adds both to the other. Reading
   touches every byte. Ours checks the sha256 of a file in the first pass only. Resuming is timed from nothing but the
   files to the first sample.
3. Loader: milliseconds from nothing to the first batch at 10, 50 and 99.9 % of the corpus, and windows per second.

It prints medians, with ratios to this project's. How long a step waits for its batch is the part *data* of
`haed profile RUN`.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be this file

import numpy as np

from data.build import shard
from data.chunkers import make_chunker
from data.corpus import MANIFEST, Corpus, Manifest
from data.filesystem import write_json
from data.loader import Loader
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.shards import Sample, ShardFile
from pipeline.console import exit_on_error

SAMPLE, FILE = 1 << 20, 16
Arrays = dict[str, np.ndarray]
Figures = dict[str, dict[str, list[float]]]  # by library or setting, and by metric


class HaedShards:
    """Shard files of this project, and a corpus that checks them once; the manifest is of another corpus, but for the shards."""

    name = "haed"

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    def write(self, samples: list[Arrays], folder: Path) -> None:
        shards = []
        for number in range(0, len(samples), FILE):
            file = ShardFile(folder / f"train-{number:05d}.tar", "train")
            for sample in samples[number : number + FILE]:
                chunks = np.array([len(sample["lengths"])])
                file.write_sample(Sample(sample["tokens"], sample["lengths"], chunks, ["text"]), len(sample["tokens"]))
            shards.append(vars(file.close()))
        write_json(folder / MANIFEST, self.manifest | {"shards": shards})

    def read(self, folder: Path, corpus: Corpus | None = None) -> Iterator[Arrays]:
        corpus = corpus or Corpus.open(folder)
        for each in corpus.shards_of("train"):
            for sample in corpus.read(each):
                yield {"tokens": sample.tokens, "lengths": sample.lengths}

    def resume(self, folder: Path, position: int) -> Any:
        corpus = Corpus.open(folder)
        for each in corpus.shards_of("train"):
            if position < each.samples:
                return corpus.read(each)[position]
            position -= each.samples
        raise AssertionError


class WebDataset:
    """Plain webdataset: ShardWriter, and WebDataset with its own decoder; it resumes by skipping."""

    name = "webdataset"

    def write(self, samples: list[Arrays], folder: Path) -> None:
        import webdataset  # brings torch along, which workers of part 1 would have to load

        with webdataset.ShardWriter(str(folder / "%05d.tar"), maxcount=FILE, verbose=0) as writer:
            for number, sample in enumerate(samples):
                writer.write({"__key__": f"{number:06d}", **{f"{k}.npy": v for k, v in sample.items()}})

    def read(self, folder: Path) -> Iterator[Arrays]:
        import webdataset

        files = [str(path) for path in sorted(folder.glob("*.tar"))]
        for sample in webdataset.WebDataset(files, shardshuffle=False).decode():
            yield {"tokens": sample["tokens.npy"], "lengths": sample["lengths.npy"]}

    def resume(self, folder: Path, position: int) -> Any:
        return next(islice(self.read(folder), position, None))


def time_call(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def drain_stream(stream: Iterator[Arrays]) -> int:
    """Read all samples, touching every byte, and return the number of tokens."""
    total = 0
    for sample in stream:
        total += sample["tokens"].size
        sample["tokens"].max(), sample["lengths"].max()
    return total


def sync_files(folder: Path) -> None:
    """Do for every file what this project does: compute its sha256, and wait until it is on the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")
            os.fsync(file.fileno())


def new_figures() -> Figures:
    return defaultdict(lambda: defaultdict(list))


def print_table(title: str, figures: Figures, first: str) -> None:
    """Print medians and ratios to the first, with a row for each metric and a column for each library or setting."""
    print(f"\n{title}")
    for row in figures[first]:
        base = statistics.median(figures[first][row])
        cells = [(name, statistics.median(mine[row])) for name, mine in figures.items() if row in mine]
        print(f"  {row:<26}" + "".join(f"{f'{name} {x:,.3g} ({x / base:.2f})':<28}" for name, x in cells))


def measure_sharding(texts: Path, place: Path, repeats: int) -> Corpus:
    figures = new_figures()
    source = SourceOptions(kind="text", path=str(texts))
    for _ in range(repeats):
        for workers in (1, 2):
            shutil.rmtree(place / "shards", ignore_errors=True)
            began = time.perf_counter()
            corpus = shard(source, ChunkerOptions(), ShardOptions(workers=workers), place / "shards")
            size = sum(each.source_bytes for each in corpus.shards) / 1e6
            figures[f"{workers} workers"]["MB/s sharded"].append(size / (time.perf_counter() - began))
    print_table(f"Sharding of {size:.0f} MB in {len(corpus.shards)} shards", figures, "1 workers")
    return corpus


def measure_storage(corpus: Corpus, place: Path, repeats: int) -> None:
    import webdataset  # noqa: F401 - not within the time of the first writing

    chunker = make_chunker(ChunkerOptions())
    text = b"".join(corpus.iterate_original_blocks("train"))
    cut = [chunker.split(text[at : at + SAMPLE]) for at in range(0, len(text), SAMPLE)]
    samples = [{"tokens": tokens, "lengths": lengths} for tokens, lengths in cut]
    libraries: list[Any] = [HaedShards(corpus.manifest), WebDataset()]
    figures = new_figures()
    position = int(0.9 * len(samples))
    for _ in range(repeats):
        for library in libraries:
            folder, mine = place / library.name, figures[library.name]
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            took = time_call(lambda library=library, folder=folder: library.write(samples, folder))
            mine["MB/s written"].append(len(text) / 1e6 / took)
            took += 0 if library.name == "haed" else time_call(lambda folder=folder: sync_files(folder))
            mine["MB/s, summed and synced"].append(len(text) / 1e6 / took)
        for library in libraries:
            folder, mine = place / library.name, figures[library.name]
            reopened = {"corpus": Corpus.open(folder)} if library.name == "haed" else {}
            for row in ("samples/s read", "samples/s read again"):
                began = time.perf_counter()
                assert drain_stream(library.read(folder, **reopened)) == len(text)
                mine[row].append(len(samples) / (time.perf_counter() - began))
        for library in libraries:
            took = time_call(lambda library=library: library.resume(place / library.name, position))
            figures[library.name]["ms to resume at 90 %"].append(1e3 * took)
    print_table(f"Storage of {len(samples)} samples", figures, "haed")


def measure_loader(corpus: Corpus, repeats: int) -> None:
    figures = new_figures()
    for _ in range(repeats):
        for share in (0.1, 0.5, 0.999):

            def first(share: float = share) -> Loader:
                batches = Loader(Corpus.open(corpus.folder), "train", context=128, sequences=4, seed=0)
                batches.load_state_dict({"epoch": 0, "windows": int(batches.windows_per_epoch * share)})
                next(iter(batches))
                return batches

            mine = figures[f"at {100 * share:g} %"]
            mine["ms to the first batch"].append(1e3 * time_call(first))
            batches = first()
            took = time_call(lambda batches=batches: [None for _ in islice(batches, 2000)])
            mine["windows/s"].append(8000 / took)
    print_table("Loader, 4 windows of 128 chunks a batch", figures, "at 10 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as place:
        corpus = measure_sharding(arguments.texts, Path(place), arguments.repeats)
        measure_loader(corpus, arguments.repeats)
        measure_storage(corpus, Path(place), arguments.repeats)


if __name__ == "__main__":
    with exit_on_error():
        main()
