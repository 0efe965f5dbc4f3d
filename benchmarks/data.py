"""Writing, reading and resuming: this project beside plain webdataset and litdata, on the same samples in one process.

    python benchmarks/data.py TEXT... [--repeats 5] [--megabytes 64]

A sample is about a megabyte of text, cut into words: the tokens and the length of each chunk. Every library starts from the
raw text and ends with files of about 16 MB on disk; reading gives NumPy arrays back; resuming is from nothing to the first
sample at 90 % of the corpus. Runs are interleaved; printed are medians, and ratios to this project. Ours also counts
distinct chunks and writes and checks sums; the others do not. litdata is left out where it is not installed.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be this file

import numpy as np
import webdataset

from data.chunkers import make_chunker
from data.corpus import Corpus
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding import shard

SAMPLE, FILE = 1 << 20, 16 << 20
Sample = dict[str, np.ndarray]


def samples(texts: list[Path]) -> Iterator[Sample]:
    """The samples that the other libraries store."""
    chunker = make_chunker(ChunkerOptions())
    for text in texts:
        with open(text, "rb") as file:
            while block := file.read(SAMPLE):
                tokens, lengths = chunker.split(block)
                yield {"tokens": tokens, "lengths": lengths}


class Ours:
    """This project: shards, then one pass over them."""

    name = "haed"

    def write(self, texts: list[Path], folder: Path) -> None:
        source = SourceOptions(kind="text", path=str(texts[0].parent), pattern="*", test_pattern="^$")
        shard(source, ChunkerOptions(), ShardOptions(), folder)

    def _corpus(self, folder: Path) -> Corpus:
        return Corpus.open(next(folder.glob("*/manifest.json")).parent)

    def read(self, folder: Path) -> Iterator[Any]:
        corpus = self._corpus(folder)
        for each in corpus.of("train"):
            arrays = corpus.read(each)
            ends = np.cumsum(arrays.lengths, dtype=np.int64)
            cuts = np.searchsorted(ends, np.arange(SAMPLE, ends[-1] + SAMPLE, SAMPLE), "right")
            begin = start = 0
            for cut in cuts.tolist():
                end = int(ends[cut - 1])
                yield {"tokens": arrays.tokens[start:end], "lengths": arrays.lengths[begin:cut]}
                begin, start = cut, end

    def resume(self, folder: Path, share: float, count: int) -> Any:
        from data.loader import Loader

        loader = Loader(self._corpus(folder), "train", context=128, sequences=4, seed=0)
        loader.load_state_dict({"epoch": 0, "windows": int(loader.windows_per_epoch * share)})
        return next(iter(loader))


class WebDataset:
    """Plain webdataset: TarWriter, and WebDataset with its own decoder; to resume is to skip."""

    name = "webdataset"

    def write(self, texts: list[Path], folder: Path) -> None:
        with webdataset.ShardWriter(str(folder / "%05d.tar"), maxsize=FILE, verbose=0) as writer:
            for number, sample in enumerate(samples(texts)):
                writer.write({"__key__": f"{number:06d}", **{f"{k}.npy": v for k, v in sample.items()}})

    def read(self, folder: Path) -> Iterator[Any]:
        yield from webdataset.WebDataset([str(p) for p in sorted(folder.glob("*.tar"))], shardshuffle=False).decode()

    def resume(self, folder: Path, share: float, count: int) -> Any:
        return next(islice(self.read(folder), int(count * share), None))


class LitData:
    """litdata: its writer without worker processes, and StreamingDataset; resumes by its state."""

    name = "litdata"

    def write(self, texts: list[Path], folder: Path) -> None:
        from litdata.streaming import Cache

        cache = Cache(str(folder), chunk_bytes=FILE)
        for number, sample in enumerate(samples(texts)):
            cache[number] = sample
        cache.done()
        cache.merge()

    def _dataset(self, folder: Path) -> Any:
        from litdata import StreamingDataset

        return StreamingDataset(str(folder), shuffle=False, max_cache_size="100GB")

    def read(self, folder: Path) -> Iterator[Any]:
        yield from self._dataset(folder)

    def resume(self, folder: Path, share: float, count: int) -> Any:
        from litdata import StreamingDataLoader

        dataset = self._dataset(folder)
        loader = StreamingDataLoader(dataset, batch_size=1, num_workers=0)
        state = loader.state_dict() or {}
        state["dataset"] = dataset.state_dict(int(len(dataset) * share), 0, 1)
        state.update(num_samples_yielded=int(len(dataset) * share), current_epoch=1, latest_worker_idx=0)
        loader.load_state_dict(state)
        return next(iter(loader))


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def drain(stream: Iterator[Any]) -> int:
    """Reads all, touching every array; returns the tokens."""
    return sum(int(np.asarray(x["tokens"] if "tokens" in x else x["tokens.npy"]).size) for x in stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=64, help="of each text, at most")
    arguments = parser.parse_args()
    libraries: list[Any] = [Ours(), WebDataset()]
    try:
        import litdata  # noqa: F401

        libraries.append(LitData())
    except ImportError as error:
        print(f"without litdata: {error}")
    figures: dict[str, dict[str, list[float]]] = {each.name: {} for each in libraries}
    with tempfile.TemporaryDirectory(dir=".") as place:
        texts = []
        (Path(place) / "texts").mkdir()
        for number, text in enumerate(arguments.texts):
            texts.append(Path(place) / "texts" / f"{number:03d}.txt")
            with open(text, "rb") as file:
                texts[-1].write_bytes(file.read(arguments.megabytes << 20))
        size = sum(text.stat().st_size for text in texts)
        for _ in range(arguments.repeats):
            for library in libraries:
                folder = Path(place) / library.name
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                mine = figures[library.name]
                seconds = timed(lambda library=library, folder=folder: library.write(texts, folder))
                mine.setdefault("MB/s written", []).append(size / 1e6 / seconds)
            for library in libraries:
                folder, mine = Path(place) / library.name, figures[library.name]
                began = time.perf_counter()
                tokens = drain(library.read(folder))
                assert tokens == size, (library.name, tokens, size)
                mine.setdefault("samples/s read", []).append(size / SAMPLE / (time.perf_counter() - began))
            for library in libraries:
                folder = Path(place) / library.name
                seconds = timed(lambda library=library, folder=folder: library.resume(folder, 0.9, size // SAMPLE))
                figures[library.name].setdefault("s to resume at 90 %", []).append(seconds)
    print(f"{size / 1e6:.0f} MB of text, medians of {arguments.repeats} interleaved runs (and ratio to haed)")
    medians = {name: {k: statistics.median(v) for k, v in mine.items()} for name, mine in figures.items()}
    for row in medians["haed"]:
        cells = [f"{name} {mine[row]:,.3g} ({mine[row] / medians['haed'][row]:.2f})" for name, mine in medians.items()]
        print(f"{row:<20} " + "   ".join(f"{cell:<28}" for cell in cells))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
