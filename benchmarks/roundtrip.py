"""Shard every corpus of a folder by the command line, read it back, and compare it byte for byte with the originals.

    python benchmarks/roundtrip.py FOLDER [--workers 2]

The originals are read here by other means (lzma, tarfile, Pillow, wave, NumPy). It prints the size of each corpus, MB/s as
the command says, and the peak memory of its largest process. It exits with 1 if a byte differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside

import lzma

import numpy as np
from PIL import Image

from data.corpus import Corpus
from data.sources.audio import encode_mulaw
from pipeline.console import exit_on_error

CORPORA: dict[str, tuple[str, list[str]]] = {
    "wikitext-2": (".", ["source.kind=wikitext", "source.pattern=*.txt"]),
    "wikitext-103": (".", ["source.kind=wikitext", "source.pattern=*.txt", "source.test_pattern=^test"]),  # no train
    "wikipedia-en-2015": (".", ["source.kind=wikitext", "source.pattern=*.xz"]),
    "enwik8-prefix": ("enwik8_prefix_4150000.xz", ["source.kind=enwik8", "chunker.kind=entropy"]),
    "tiny-shakespeare": ("input.txt", ["source.kind=text", "chunker.kind=sentences", "chunker.k=255"]),
    "imagenette32": (".", ["source.kind=images", "source.pattern=*.npz", "chunker.kind=pixels"]),
    "tiny-imagenet-32-jpeg": (".", ["source.kind=images", "source.pattern=*.tar.xz", "chunker.kind=pixels"]),
    "fsdd-8khz": (
        "recordings.tar.xz",
        [
            "source.kind=audio",
            "source.encoding=pcm16",
            r"source.test_pattern=_[0-4]\.wav$",
            r"source.valid_pattern=_[5-9]\.wav$",
            "chunker.kind=fixed",
            "chunker.k=16",
        ],
    ),
    "fsdd-8khz, µ-law": ("recordings.tar.xz", ["source.kind=audio", "chunker.kind=fixed", "chunker.k=16"]),
}


def read_originals(name: str, folder: Path) -> Iterator[bytes]:
    """Yield the documents' bytes in any order, or whole texts in the order of the splits."""
    if name.startswith(("wikitext", "wikipedia", "enwik8", "tiny-shakespeare")):
        order = {"train": 0, "valid": 1, "test": 2}
        files = [f for f in folder.iterdir() if f.suffix in (".txt", ".xz")]
        for path in sorted(files, key=lambda f: (order.get(f.name.partition(".")[0].partition("-")[0], 0), f.name)):
            yield lzma.open(path).read() if path.suffix == ".xz" else path.read_bytes()
    elif name == "imagenette32":
        for path in folder.glob("*.npz"):
            for planes in np.load(path)["data"]:
                yield planes.reshape(3, -1).T.tobytes()
    else:
        for path in folder.glob("*.tar.xz"):
            with tarfile.open(path) as tar:
                for member in (each for each in tar if each.isfile()):
                    content = tar.extractfile(member)
                    assert content is not None
                    if member.name.endswith(".wav"):
                        with wave.open(content) as recording:
                            frames = recording.readframes(recording.getnframes())
                        mulaw = name.endswith("µ-law")
                        yield encode_mulaw(np.frombuffer(frames, "<i2")).tobytes() if mulaw else frames
                    elif member.name.endswith(".JPEG"):
                        yield Image.open(content).convert("RGB").tobytes()


def has_same_documents(name: str, folder: Path, corpus: Corpus) -> bool:
    """Return whether texts are equal as they stand, pictures and recordings as multisets of documents."""
    documents = (document for split in ("train", "valid", "test") for document in corpus.iterate_originals(split))
    if name.startswith(("wikitext", "wikipedia", "enwik8", "tiny-shakespeare")):
        sums = hashlib.sha256(), hashlib.sha256()
        for stream, total in zip((read_originals(name, folder), documents), sums, strict=True):
            for content in stream:
                total.update(content)
        return sums[0].digest() == sums[1].digest()
    return sorted(map(hash, read_originals(name, folder))) == sorted(map(hash, documents))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    wrong = 0
    print(f"{'corpus':<24}{'documents':>11}{'MB':>9}{'seconds':>9}{'MB/s':>8}{'peak MB':>9}  bytes")
    for name, (path, settings) in CORPORA.items():
        folder = arguments.data / name.partition(",")[0]
        if not folder.is_dir():
            print(f"{name:<24} is not in {arguments.data}")
            continue
        with tempfile.TemporaryDirectory(dir=".") as place:
            command = [sys.executable, "-m", "pipeline", "shard", f"source.path={folder / path}", *settings, "--json"]
            command += [f"shards_dir={place}", f"shard.workers={arguments.workers}"]
            with open(Path(place) / "out", "w+b") as out:
                child = subprocess.Popen(command, stdout=out)
                _, status, usage = os.wait4(child.pid, 0)
                out.seek(0)
                lines = out.read().splitlines()
            if status:
                raise RuntimeError(f"{' '.join(command)} failed")
            result = json.loads(lines[-1])
            corpus = Corpus.open(result["folder"])
            equal = has_same_documents(name, folder, corpus)
            wrong += not equal
            size = sum(shard.source_bytes for shard in corpus.shards) / 1e6
            documents = sum(split["documents"] for split in result["splits"].values())
            print(
                f"{name:<24}{documents:>11,}{size:>9.1f}{result['seconds']:>9.1f}{size / result['seconds']:>8.1f}"
                f"{usage.ru_maxrss / 1024:>9.0f}  {'equal' if equal else 'DIFFERENT'}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    with exit_on_error():
        sys.exit(main())
