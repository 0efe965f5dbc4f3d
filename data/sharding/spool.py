"""Standard input or a named pipe as a source: a copy that can be read twice, and the removal of leftover copies."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from data.checked import named
from data.durable import hold, locked, remove, sweep
from data.options import SourceOptions
from data.sharding.corpora import is_piped
from data.sharding.progress import UNFINISHED
from data.sources.files import blocks


def sweep_spools(shards_dir: Path) -> None:
    """Remove leftovers of killed processes: copies of standard input, unfinished parts, and lock files."""
    if shards_dir.is_dir():
        with suppress(OSError), locked(shards_dir / ".stdin.lock"):  # it may be read-only
            for folder in shards_dir.glob(".stdin-*/"):
                sweep([folder / "stdin"])
                if not (folder / "stdin").exists():
                    remove(folder)
        sweep(shards_dir.glob(".*.lock"), _remove_halves)


def _remove_halves(lock: Path) -> None:
    """Remove unfinished parts of a corpus that no process works on. Finished parts stay, for whoever continues."""
    for half in lock.with_name(lock.name[1 : -len(".lock")]).glob(f"parts/*{UNFINISHED}"):
        remove(half)


@contextmanager
def spooled(source: SourceOptions, shards_dir: Path) -> Iterator[SourceOptions]:
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
    with locked(shards_dir / ".stdin.lock"):  # see `sweep_spools`
        spool = Path(tempfile.mkdtemp(dir=shards_dir, prefix=".stdin-")) / "stdin"
        held = hold(spool)
    try:
        with held as file:
            with named(spool):
                with open(str(source.path), "rb") if is_named_pipe else nullcontext(sys.stdin.buffer) as stream:
                    for block in blocks(stream):
                        file.write(block)
                file.flush()
            if not spool.stat().st_size:
                raise ValueError(f"{source.path if is_named_pipe else 'standard input'} was empty")
            yield replace(source, path=str(spool))
    finally:
        remove(spool.parent)
