"""The mapping from options to corpora: by the contents of the source, or, without reading it, the last one made.

The mapping is stored in `.sources.json` beside the corpora. It is a cache. Without it the source is hashed again, and
the manifests record the options of each corpus.

Besides the source and the settings, other packages' code determines the bytes of shards. So its versions are part of
the digest.

Standard input and named pipes are copied into the folder of all corpora first, so that they can be read twice.
"""

import hashlib
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from data.corpus import FORMAT, MANIFEST
from data.filesystem import (
    MANY,
    acquire_lock,
    add_path_to_errors,
    file_lock,
    read_json,
    remove_folder,
    remove_unlocked_files,
    write_json,
)
from data.options import CHUNKERS, SOURCES, ChunkerOptions, ShardOptions, SourceOptions, restore_options
from data.parts import UNFINISHED
from data.sources.files import ANY, NOTES, read_blocks
from data.sources.source import Source, make_source, source_title

log = logging.getLogger(__name__)
_KEPT = 1000
_FOLDER = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NOT_PIPED = ("images", "audio", "datasets", "webdataset")  # kinds whose files are known by their names


def collect_versions(source: Source, chunker: str) -> dict[str, str]:
    """Return versions of the packages that decode the source, and of those that provide custom sources and chunkers.

    For a custom source or chunker the contents of its file count too, since a package in development keeps its version.
    Our chunkers have a version of their own.
    """
    version_of = dict(source.decoder_versions())
    for name, table in ((source.options.kind, SOURCES), (chunker, CHUNKERS)):
        if name not in table:
            table.load_class(name)
            (entry, *_) = entry_points(group=table.group, name=name)
            path = getattr(sys.modules[entry.module], "__file__", None)
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else "built in"
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "no package"
            version_of[f"{table.group}:{name}"] = f"{package}, {entry.value}, {content}"
    return version_of


class Corpora:
    """The corpora made from a source with a chunker and a shard size, in a folder of all corpora.

    Args:
        source: what is read.
        chunker: how it is split into chunks.
        options: size of shards; its number of workers is used for hashing too.
        shards_dir: folder of all corpora.
        piped: the source is a copy of standard input.
    """

    def __init__(
        self,
        source: SourceOptions,
        chunker: ChunkerOptions,
        options: ShardOptions,
        shards_dir: Path,
        piped: bool = False,
    ) -> None:
        self.source, self.chunker, self.options, self.shards_dir = source, chunker, options, shards_dir
        self.piped = piped or is_piped(source)
        self._stamped, self._fingerprint = "", list[str]()
        self.versions: dict[str, str] = {}

    @cached_property
    def folder(self) -> Path:
        """Path of the corpus of the source's present contents, which may not exist yet.

        The contents are hashed. The hash is remembered as long as the files of the source stay the same.

        Raises:
            FileNotFoundError: the source is not there.
            ValueError: it is empty.
        """
        reader = make_source(self.source)
        self.versions, self._fingerprint = collect_versions(reader, self.chunker.kind), reader.fingerprint()
        self._stamped = self._hash_contents(self._fingerprint)
        known = self._read_notes().get(self._stamped, [""])[0]
        if known.rpartition("-")[0] != source_title(self.source):
            digest = self._hash_contents(reader.compute_digest(self.options.workers))
            known = f"{source_title(self.source)}-{digest[:12]}"
            self._write_notes({self._stamped: [known, ""]})
        return self.shards_dir / known

    @property
    def source_name(self) -> str:
        """The source, for people."""
        return self.source.path or source_title(self.source)

    def find_changed_file(self) -> str | None:
        """Return the name of a file that changed in the source since `folder` hashed it; None if nothing did."""
        reader = make_source(self.source)
        try:
            different = set(self._fingerprint) ^ set(reader.fingerprint())
        except (FileNotFoundError, ValueError):  # all of it was removed
            return self.source_name
        if not different:
            return None
        digest = self._hash_contents(reader.compute_digest(self.options.workers))
        if self.folder.name.endswith(digest[:12]):
            return None  # only times changed, as files were copied or linked
        name = min(different).partition("\0")[0]
        is_alone = name == os.path.basename(self.source_name)  # the source is this file
        return self.source_name if is_alone else f"{name} in {self.source_name}"

    def remember_corpus(self, folder: Path) -> None:
        """Record that this corpus, the one at `folder`, was the last one made or found finished."""
        self._write_notes({key: [folder.name, "" if self.piped else self._stamped] for key in self._request_keys()})

    def find_last_corpus(self) -> Path | None:
        """Return the last finished corpus made with these options, wherever its source is now; None: there is none."""
        known = self._read_notes()
        for key in self._request_keys():
            folder = self.shards_dir / known.get(key, ["."])[0]
            if folder.name and os.path.lexists(folder / MANIFEST):
                return folder
        wanted = replace(self.source, path="-") if self.piped else self.source
        for folder, manifest in iterate_manifests(self.shards_dir):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                source = restore_options(manifest["source"], SourceOptions, SOURCES)
                chunker = restore_options(manifest["chunker"], ChunkerOptions, CHUNKERS)
                if (source, chunker, manifest["megabytes"]) != (wanted, self.chunker, self.options.megabytes):
                    continue
                # A relative path may be another one in another folder.
                if wanted.path in (None, "-") or os.path.isabs(wanted.path) or manifest["place"] == self.place:
                    return folder
        return None

    def has_changed(self) -> bool:
        """Return if files of the source exist and differ, by size and time, from those of the last corpus."""
        stamps = {entry[1] for key, entry in self._read_notes().items() if key in self._request_keys()}
        try:
            reader = None if self.piped else make_source(self.source)
            if reader is None or not stamps or type(reader).fingerprint is not Source.fingerprint:
                return False  # its fingerprint may be expensive
            self.versions = collect_versions(reader, self.chunker.kind)
            return self._hash_contents(reader.fingerprint()) not in stamps
        except (OSError, ValueError):
            return False

    def _digest_settings(self) -> dict[str, Any]:
        """Return the settings that a corpus digest covers besides the contents; how files were found is left out."""
        source_settings = asdict(replace(self.source, path=None, pattern="", follow_links=False))
        return {
            "source": source_settings,
            "chunker": asdict(self.chunker),
            "chunker_version": CHUNKERS.load_class(self.chunker.kind).version,
            "megabytes": self.options.megabytes,
            "format": FORMAT,
        }

    def _hash_contents(self, content: Any) -> str:
        return _hash_settings(self._digest_settings() | {"versions": self.versions}, content)

    @property
    def place(self) -> str | None:
        """The path of the source relative to the corpora, which may be moved together; None if it has none."""
        path = None if self.piped else self.source.path
        if path in (None, "-"):
            return None
        is_name = self.source.kind == "datasets" and not os.path.exists(str(path))  # on the hub
        return path if is_name else os.path.relpath(str(path), self.shards_dir)

    def _request_keys(self) -> list[str]:
        """Return the keys of these options in the notes.

        They differ in the path of the source: absolute, real, and relative to the corpora, which may be moved together.
        """
        path = "-" if self.piped else self.source.path
        places = [path]
        if self.place is not None:
            places = [os.path.abspath(str(path)), self.place, os.path.realpath(str(path))]
        settings = self._digest_settings() | {"format": None, "files": [self.source.pattern, self.source.follow_links]}
        return list(dict.fromkeys(_hash_settings(settings, place) for place in places))

    def _read_notes(self) -> dict[str, list[str]]:
        """Return the notes: by digest, the name of a corpus and the stamp of the source that it was made from."""
        path = self.shards_dir / NOTES
        try:
            entries = read_json(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s is ignored: %s. It is a cache and is made again", path, error)
            return {}
        return {key: entry for key, entry in entries.items() if _is_note(key, entry)}

    def _write_notes(self, new: dict[str, list[str]]) -> None:
        """Add notes. If they cannot be written, warn and go on without."""
        path = self.shards_dir / NOTES
        try:
            self.shards_dir.mkdir(parents=True, exist_ok=True)
            with file_lock(path.with_name(f"{NOTES}.lock")):
                known = [(key, entry) for key, entry in self._read_notes().items() if key not in new]
                write_json(path, dict(known[len(new) - _KEPT :]) | new)
                remove_unlocked_files(self.shards_dir.glob(f".{NOTES}.*.partial"))
        except OSError as error:
            log.warning("%s could not be stored: %s", path, error.strerror or error)


def iterate_manifests(shards_dir: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the folders of corpora with their manifests, the newest first. Manifests that cannot be read are skipped."""
    times = []
    for path in shards_dir.glob(f"*/{MANIFEST}"):
        with suppress(OSError):  # it may be removed meanwhile
            times.append((path.lstat().st_mtime_ns, path))
    for _, path in sorted(times, reverse=True):
        with suppress(OSError, ValueError):
            yield path.parent, read_json(path, MANY)


def _is_note(key: str, entry: Any) -> bool:
    is_pair = isinstance(entry, list) and [type(value) for value in entry] == [str, str]
    return is_pair and bool(_DIGEST.fullmatch(key) and _FOLDER.fullmatch(entry[0]))


def _hash_settings(settings: dict[str, Any], content: Any) -> str:
    return hashlib.sha256(json.dumps([settings, content], sort_keys=True).encode()).hexdigest()


class EmptyInputError(ValueError):
    """A source that can be read only once and gave nothing; `source` names it."""

    def __init__(self, source: str) -> None:
        super().__init__(f"{source} was empty. Pipe a text to it")
        self.source = source


def is_piped(source: SourceOptions) -> bool:
    """Return if the source can be read only once: standard input, or a named pipe such as a shell's `<(…)`."""
    return source.kind == "stdin" or source.path == "-" or (source.path is not None and Path(source.path).is_fifo())


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
    if source.kind in _NOT_PIPED:
        raise ValueError(
            f"source.kind={source.kind} reads files, and source.path={source.path} is a stream. Only texts can be piped in"
        )
    is_named_pipe = source.path is not None and Path(source.path).is_fifo()
    if source.kind == "stdin" and not is_named_pipe and source.path not in (None, "-"):
        raise ValueError(f"source.kind=stdin reads standard input, not source.path={source.path}. Use source.kind=text")
    if not is_named_pipe and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError(f"source.kind={source.kind} reads standard input. Pipe a text into the command")
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
                raise EmptyInputError(str(source.path) if is_named_pipe else "standard input")
            yield replace(source, path=str(spool), pattern=ANY)
    finally:
        remove_folder(spool.parent)
