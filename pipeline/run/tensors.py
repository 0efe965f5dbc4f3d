"""Files of tensors (safetensors), read and never memory-mapped.

If a mapped file is truncated while it is read, the process ends with SIGBUS.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from data.checked import CorruptFileError, add_path_to_errors, free_memory, open_file

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """Read the tensors of a file, by name.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is no file of tensors, or does not fit into memory.
        OSError: it cannot be read.
    """
    with add_path_to_errors(path), open_file(path) as file:
        size, free = os.fstat(file.fileno()).st_size, free_memory()
        if size > free:
            raise CorruptFileError(f"{path} has {size / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB of memory are free")
    with _open_tensors(path, "pt") as tensors:
        found: dict[str, Tensor] = tensors.get_tensors()
        return found


def read_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a file of tensors; raises as `read_tensors` does."""
    with _open_tensors(path) as tensors:
        return tensors.metadata() or {}


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Read the shapes of the tensors of a file, by name; raises as `read_tensors` does."""
    with _open_tensors(path) as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 - it is no dict


@contextmanager
def _open_tensors(path: Path, framework: str = "np") -> Iterator[Any]:
    """Open a file of tensors; one that is longer or shorter than its header says is damaged.

    So the size of the file bounds that of its tensors.
    """
    open_file(path).close()  # it is a file, and not one that is waited for
    try:
        with safe_open(path, framework, backend="pread") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CorruptFileError(f"{path} is damaged: {error}") from error
