"""Pickled CIFAR-10 and ImageNet32 batches, read by Python's `pickle` in a process of its own that may do little.

A pickle is a program that calls functions. Those of NumPy, called with what a pickle likes, read and write memory beyond
an array. So none of them is called: stand-ins of ours keep what an array is made of, and its bytes are checked at last.
The process has limits on memory and time, since a small pickle may describe a value without end. macOS sets none on
memory. The process imports nothing of ours, nor NumPy.
"""

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

SECONDS = 60  # of CPU time
_SPARE_BYTES = 1 << 30  # of address space beside the values
# Python may need these variables to start. Others, such as access keys, are withheld.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PATH")
_BYTE_TYPES = ("u1", b"u1", "|u1", b"|u1", "uint8", b"uint8")
_HEAD = struct.Struct("<qq")


class _DataType:
    """Stands in for `numpy.dtype`."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands in for `numpy.ndarray`, and is what `_reconstruct` returns."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def read_rows(self) -> tuple[int, int, bytes]:
        """Return N, D and the bytes, row after row, of an array (N, D) of uint8."""
        _, shape, kind, is_fortran, content = self.state
        is_bytes = isinstance(kind, _DataType) and kind.code in _BYTE_TYPES and type(content) is bytes
        if not is_bytes or type(shape) is not tuple or len(shape) != 2 or {type(size) for size in shape} != {int}:
            raise TypeError
        rows, width = shape
        if rows < 0 or width < 1 or rows * width != len(content):
            raise ValueError
        return rows, width, b"".join(content[row::rows] for row in range(rows)) if is_fortran else content


def _from_buffer(content: object, kind: object, shape: object, order: object, *_: object) -> _Array:
    """Stand in for the `_frombuffer` of protocol 5."""
    array = _Array()
    array.state = None, shape, kind, order == "F", bytes(content) if isinstance(content, bytearray) else content
    return array


def _encode(text: object, encoding: object = None) -> bytes:
    """Stand in for `_codecs.encode`, by which protocol 2 writes bytes."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("it encodes other than bytes")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], object] = {
    ("_codecs", "encode"): _encode,
    ("numpy", "dtype"): _DataType,
    ("numpy", "ndarray"): _Array,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it needs {module}.{name}, which is not allowed"[:200])
        return _STAND_INS[module, name]


def read_rows(path: str, number: int) -> "Iterator[np.ndarray]":
    """Read the array `data` (N, D) uint8 of a pickled batch, up to so many rows at a time.

    Raises:
        ValueError: it is no such batch, or takes too much memory or time.
    """
    import numpy as np

    command = [sys.executable, "-I", __file__, path, str(SECONDS)]
    variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            head = child.stdout.read(_HEAD.size)
            if len(head) < _HEAD.size:
                reason = child.stderr.read().decode(errors="replace").strip() or _explain_end(child.wait())
                raise ValueError(f"not a pickled batch: {reason[-300:]}")
            rows, width = _HEAD.unpack(head)
            for first in range(0, rows, number):
                content = child.stdout.read(size := min(number, rows - first) * width)
                if len(content) < size:
                    raise ValueError("reading it was ended before the last row. Is there enough memory?")
                yield np.frombuffer(content, np.uint8).reshape(-1, width)
        finally:
            child.kill()


def _explain_end(status: int) -> str:
    """Return why a process without a message may have ended."""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"reading it takes more than {SECONDS} s, or too much memory"
    return f"the process that reads it ended with status {status}"


def _main(path: str, seconds: int) -> None:
    import resource

    with suppress(ValueError):  # macOS counts its own libraries, and refuses; elsewhere a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (_SPARE_BYTES + 4 * os.path.getsize(path),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with open(path, "rb") as file:
        batch = _BatchUnpickler(file, encoding="bytes").load()
    if not isinstance(batch, dict):
        raise ValueError(f"expected a dictionary, got {type(batch).__name__}")
    data: Any = batch.get("data", batch.get(b"data"))
    try:
        rows, width, content = data.read_rows()
    except (AttributeError, TypeError, ValueError):
        raise ValueError("expected an array 'data' (N, D) of uint8") from None
    sys.stdout.buffer.write(_HEAD.pack(rows, width))
    sys.stdout.buffer.write(content)


if __name__ == "__main__":
    try:
        _main(sys.argv[1], int(sys.argv[2]))
    except MemoryError:
        sys.exit("reading it takes too much memory")
    except BaseException as error:
        sys.exit(f"{type(error).__name__}: {error}"[:300])
