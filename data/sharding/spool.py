"""Standard input or a named pipe as a source: a copy that can be read twice, and the removal of leftover copies."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from data.checked import add_path_to_errors
from data.filesystem import acquire_lock, file_lock, remove_folder, remove_unlocked_files
from data.options import SourceOptions
from data.sharding.corpora import is_piped
from data.sharding.progress import UNFINISHED
from data.sources.files import read_blocks


def sweep_spools(shards_dir: Path) -> None:
    """Remove leftovers of killed processes: copies of standard input, unfinished parts, and lock files."""
    if shards_dir.is_dir():
        with suppress(OSError), file_lock(shards_dir / ".stdin.lock"):  # it may be read-only
            for folder in shards_dir.glob(".stdin-*/"):
                remove_unlocked_files([folder / "stdin"])
                if not (folder / "stdin").exists():
                    remove_folder(folder)
        remove_unlocked_files(shards_dir.glob(".*.lock"), _remove_halves)


def _remove_halves(lock: Path) -> None:
    """Remove unfinished parts of a corpus that no process works on. Finished parts stay, for whoever continues."""
    for half in lock.with_name(lock.name[1 : -len(".lock")]).glob(f"parts/*{UNFINISHED}"):
        remove_folder(half)


@contextmanager
def save_stdin(source: SourceOptions, shards_dir: Path) -> Iterator[SourceOptions]:
    """Copy a pipe into a file first: it can be read only once, and its size decides where it is split."""
    if not is_piped(source):
        yield source
        return
    is_named_pipe = source.path is not None and Path(source.path).is_fifo()
    if source.kind == "stdin" and not is_named_pipe and source.path not in (None, "-"):
        raise ValueError(f"source.kind=stdin reads standard input, not source.path={source.path}: use source.kind=text")
    if not is_named_pipe and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(f"source.kind={source.kind} reads standard input: pipe a text into the command")
    shards_dir.mkdir(parents=True, exist_ok=True)
    with file_lock(shards_dir / ".stdin.lock"):  # see `sweep_spools`
        spool = Path(tempfile.mkdtemp(dir=shards_dir, prefix=".stdin-")) / "stdin"
        held = acquire_lock(spool)
    try:
        with held as file:
            with add_path_to_errors(spool):
                with open(str(source.path), "rb") if is_named_pipe else nullcontext(sys.stdin.buffer) as stream:
                    for block in read_blocks(stream):
                        file.write(block)
                file.flush()
            if not spool.stat().st_size:
                raise ValueError(f"{source.path if is_named_pipe else 'standard input'} was empty")
            yield replace(source, path=str(spool))
    finally:
        remove_folder(spool.parent)
