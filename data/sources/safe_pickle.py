"""Pickled CIFAR-10 and ImageNet32 batches, read by Python's `pickle` in a process of its own that may do little.

A pickle is a program that calls functions. The process allows those of which NumPy arrays are made, and no others. It has limits
on memory and time, since a small pickle may describe a value without end. It imports nothing of ours.
"""

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

SECONDS = 60  # of CPU time
_SPARE_BYTES = 2 << 30  # of address space beside the values: Python and NumPy
_ALLOWED = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
}
_HEAD = struct.Struct("<qq")


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which is not allowed"[:200])
        return super().find_class(module, name)


def read_rows(path: str, number: int) -> Iterator[np.ndarray]:
    """Read the array `data` (N, D) uint8 of a pickled batch, up to so many rows at a time.

    Raises:
        ValueError: it is no such batch, or takes too much memory or time.
    """
    command = [sys.executable, "-P", __file__, path, str(SECONDS)]
    settings = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=settings
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            head = child.stdout.read(_HEAD.size)
            if len(head) < _HEAD.size:
                reason = (
                    child.stderr.read().decode(errors="replace").strip() or f"reading it takes more than {SECONDS} s"
                )
                raise ValueError(f"not a pickled batch: {reason[-300:]}")
            rows, width = _HEAD.unpack(head)
            for first in range(0, rows, number):
                content = child.stdout.read(size := min(number, rows - first) * width)
                if len(content) < size:
                    raise ValueError("reading it was ended before the last row. Is there enough memory?")
                yield np.frombuffer(content, np.uint8).reshape(-1, width)
        finally:
            child.kill()


def _main(path: str, seconds: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_SPARE_BYTES + 4 * os.path.getsize(path),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with open(path, "rb") as file:
        batch = _BatchUnpickler(file, encoding="bytes").load()
    if not isinstance(batch, dict):
        raise ValueError(f"expected a dictionary, got {type(batch).__name__}")
    data = batch.get("data", batch.get(b"data"))
    if type(data) is not np.ndarray or data.dtype != np.uint8 or data.ndim != 2 or not data.shape[1]:
        raise ValueError("expected an array 'data' (N, D) of uint8")
    sys.stdout.buffer.write(_HEAD.pack(*data.shape))
    sys.stdout.buffer.write(np.ascontiguousarray(data).data)


if __name__ == "__main__":
    try:
        _main(sys.argv[1], int(sys.argv[2]))
    except BaseException as error:
        sys.exit(
            f"{type(error).__name__}: {error}"[:300]
            if not isinstance(error, MemoryError)
            else "reading it takes too much memory"
        )
