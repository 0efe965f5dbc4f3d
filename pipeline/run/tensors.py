"""Files of tensors (safetensors), read into memory: a mapped file that is cut meanwhile would end the process with SIGBUS."""

import hashlib
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from data.checked import DamagedFile, named, open_file, parse_json, read_large

_LENGTH, _LONGEST = 8, 100_000_000  # bytes that say how long the header is, and of the longest that safetensors takes


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file by name.

    Args:
        path: of the file.
        sha256: of it; None: not checked.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it is not what was written, or does not fit into memory.
        OSError: it cannot be read.
    """
    content = read_large(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedFile(f"{path} is not what was written")
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedFile(f"{path} is damaged: {error}") from error


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file of tensors: of each its `shape`, and `__metadata__` if there is any.

    Raises:
        FileNotFoundError: there is none.
        DamagedFile: it has no such header.
        OSError: it cannot be read.
    """
    with named(path), open_file(path) as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if length > min(_LONGEST, os.fstat(file.fileno()).st_size - _LENGTH):
            raise DamagedFile(f"{path} is damaged: it has no header")
        found = parse_json(file.read(length), path)
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise DamagedFile(f"{path} is damaged: its header is of something else")
    return found
