"""Files that appear whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside, syncs and renames, so that a reader, or a machine that lost power, finds the old file or the new.

    Raises:
        OSError: the disk is full or not writable; `path` is as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_json(path: Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a JSON object that has these keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
        missing = [key for key in keys if key not in found] if isinstance(found, dict) else ["everything"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if missing:
        raise ValueError(f"{path} is damaged, or of another version: it lacks {', '.join(missing[:5])}")
    return dict(found)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
