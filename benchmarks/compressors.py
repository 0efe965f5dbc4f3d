"""Compute the bits that compressors need for a split, alone and after the train split.

    python benchmarks/compressors.py shards/stdlib-words-DIGEST [--split test]   # a corpus that was sharded
    python benchmarks/compressors.py train.txt test.txt                          # text files

After the train split, the size is that of both in one piece, less that of train alone. `xz -9` has a window as long as
both. PPMd is pyppmd, with memory for both. `zpaq -m5` (Debian's package `zpaq`) mixes the predictions of many context
models. Without the program it is left out, with a line. Documents are joined in the corpus's order. A figure takes
seconds to minutes.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import pyppmd

from data.corpus import Corpus
from pipeline.console import exit_on_error
from pipeline.reporting.rendering import Table
from pipeline.run.opened import count_characters

ORDERS = {16: "I", 32: "H"}  # with the variant, since variant I knows orders up to 16 only


def xz_size(text: bytes) -> int:
    window = min(max(len(text), 1 << 12), 1536 << 20)  # the longest that xz takes
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": window}]
    return len(lzma.compress(text, filters=filters))


def ppmd_size(text: bytes, order: int) -> int:
    memory = min(max(64 * len(text), 1 << 20), 2 << 30)
    return len(pyppmd.compress(text, max_order=order, mem_size=memory, variant=ORDERS[order]))


def zpaq_size(text: bytes) -> int:
    """Return the size of an archive, of one block, of one file; its header is a few hundred bytes."""
    block = max(6, (len(text) >> 20).bit_length())  # of 2**block MiB
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text").write_bytes(text)
        command = ["zpaq", "add", "archive.zpaq", "text", "-method", f"5{block}", "-threads", "1", "-noattributes"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (Path(folder) / "archive.zpaq").stat().st_size


def list_compressors() -> dict[str, Callable[[bytes], int]]:
    """Return the function that gives the compressed size of a text, by name."""
    sizes: dict[str, Callable[[bytes], int]] = {"xz -9": xz_size}
    sizes |= {f"PPMd, order {order}": lambda text, order=order: ppmd_size(text, order) for order in ORDERS}
    if shutil.which("zpaq"):
        sizes["zpaq -m5"] = zpaq_size
    else:
        print("zpaq is left out: there is no such program (apt-get install zpaq)", file=sys.stderr)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of a corpus, or the text file to train on")
    parser.add_argument("held_out", type=Path, nargs="?", help="text file to compress, if the source is one")
    parser.add_argument("--split", default="test", help="split of the corpus")
    arguments = parser.parse_args()
    if arguments.held_out is None:
        corpus = Corpus.open(arguments.source)
        train, held_out = (b"".join(corpus.iterate_originals(each)) for each in ("train", arguments.split))
    else:
        train, held_out = arguments.source.read_bytes(), arguments.held_out.read_bytes()
    if not held_out:
        parser.error("there is nothing to compress")
    characters, cells = count_characters(held_out), []
    for name, size in list_compressors().items():
        added = size(held_out), size(train + held_out) - size(train)
        cells.append([name, *(f"{8 * each / characters:.3f}" for each in added)])
        print(*cells[-1], file=sys.stderr)
    print(Table(["bits/char", "alone", "given train"], cells, [False, True, True]).to_text())


if __name__ == "__main__":
    with exit_on_error():
        main()
