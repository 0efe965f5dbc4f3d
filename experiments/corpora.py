"""Corpora of experiments: folders below `--data`, or replacements for missing ones."""

import hashlib
import lzma
import math
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from data.options import SourceOptions
from data.sources.files import File
from data.sources.source import make_source
from experiments.catalogue import Data, Variant

_RECORDINGS = {"valid": "_[5-9].wav", "test": "_[0-4].wav"}  # names of those that are not trained on
CORPORA: dict[Data, tuple[str, str, tuple[str, ...]]] = {  # folder below --data, its files, and how they are read
    "text": ("wikitext-2", "*.txt", ("source.kind=wikitext",)),
    "articles": ("wikipedia-en-2015", "*[!1-9].txt.xz", ("source.kind=wikitext",)),  # the first of four parts of train
    "pictures": (
        "imagenette32",
        "*.npz",
        ("source.kind=images", "source.valid_pattern=val_data", "chunker.kind=pixels"),
    ),
    "sound": (
        "fsdd-8khz",
        "*.tar.xz",
        (
            "source.kind=audio",
            *(f"source.{split}_pattern={pattern}" for split, pattern in _RECORDINGS.items()),
            "chunker.kind=fixed",
        ),
    ),
}
COPIES = ("source.kind=text", "source.pattern=*.txt", "chunker.kind=fixed", "chunker.k=3")
_COPIES = {"train": 20_000, "valid": 200, "test": 200}  # sequences
_LETTERS, _CHUNKS = 26, 16
_PICTURE = 3072  # bytes


def select_available(
    variants: tuple[Variant, ...], data: Path, scored: int | None
) -> tuple[tuple[Variant, ...], list[str]]:
    """Return the variants whose data is available, and notes on the data.

    Args:
        variants: of an experiment.
        data: folder with the corpora.
        scored: bytes kept of each split except train; None: all.
    """
    notes, missing = [], set()
    part = f", of whose valid and test splits the first {scored / 1e6:g} MB are scored" if scored else ""
    for kind in dict.fromkeys(variant.data for variant in variants):
        if kind == "copies":
            notes.append(f"copies: sequences of {_CHUNKS} chunks of three, made here")
        elif (folder := data / CORPORA[kind][0]).is_dir():
            notes.append(f"{kind}: {CORPORA[kind][0]}{part}")
        elif kind == "text":
            scored_part = part.replace("the first", "about the first")
            notes.append(f"text: the Python standard library's sources{scored_part}, as {folder} is not there")
        else:
            missing.add(kind)
            notes.append(f"no {kind}: {folder} is not there, and their rows are left out")
    return tuple(variant for variant in variants if variant.data not in missing), notes


def prepare_source(kind: Data, data: Path, scored: int | None, place: Path) -> tuple[str, ...]:
    """Return the options that read a corpus.

    Args:
        kind: kind of data.
        data: folder with the corpora.
        scored: bytes kept of each split except train; None: all.
        place: folder for prepared files, which are made once.
    """
    if kind == "copies":
        return (f"source.path={_fill_once(place / 'copies', _write_copies)}", *COPIES)
    name, pattern, options = CORPORA[kind]
    if not (data / name).is_dir():
        return ("source.kind=stdlib",) if scored is None else _prepare_library(scored, place)
    paths = sorted((data / name).resolve().glob(pattern))
    known = [(path.name, _digest_file(path)) for path in paths]
    folder = place / _name_with_digest(name, [*known, scored])
    return (f"source.path={_fill_once(folder, lambda whole: _copy_truncated(paths, scored, whole))}", *options)


@cache
def _digest_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fill_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Return a folder, after filling it if it does not exist. It is filled completely or not at all."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as place:
            (whole := Path(place) / folder.name).mkdir()
            fill(whole)
            with suppress(OSError):  # another process was first
                whole.rename(folder)
    return folder


def _copy_truncated(paths: list[Path], scored: int | None, folder: Path) -> None:
    """Copy the files, truncating those that are not trained on."""
    for path in paths:
        target = folder / path.name
        if "train" in path.name or scored is None:
            shutil.copyfile(path, target)
        elif path.name.endswith(".tar.xz"):
            _extract_recordings(path, scored, folder)
        elif path.suffix == ".xz":
            with lzma.open(path) as file:
                text = file.read(scored)
            target.write_bytes(lzma.compress(text[: text.rindex(b"\n") + 1]))
        elif path.suffix == ".npz":
            np.savez(target, data=np.load(path)["data"][: max(1, scored // _PICTURE)])
        else:
            text = path.read_bytes()[:scored]
            target.write_bytes(text[: text.rindex(b"\n") + 1])


def _extract_recordings(path: Path, scored: int, folder: Path) -> None:
    """Extract WAV files of 16 bits: all of train, the first of valid and test by the numbers that end their names."""
    left = {"train": math.inf, "valid": scored, "test": scored}  # samples
    with tarfile.open(path) as archive:
        recordings = [member for member in archive if member.name.endswith(".wav")]
        for member in sorted(recordings, key=lambda member: (member.name.rpartition("_")[2], member.name)):
            split = next((split for split, pattern in _RECORDINGS.items() if re.search(pattern, member.name)), "train")
            if left[split] > 0 and (recording := archive.extractfile(member)):
                left[split] -= member.size // 2
                (folder / Path(member.name).name).write_bytes(recording.read())


def _prepare_library(scored: int, place: Path) -> tuple[str, ...]:
    """Prepare the standard library's sources in their usual splits, with about `scored` bytes in valid and in test."""
    files = _list_library()
    known = [(file.name, file.size, split) for file, split in files]

    def copy(folder: Path) -> None:
        left = {"train": math.inf, "valid": scored, "test": scored}
        for number, (file, split) in enumerate(files):
            if left[split] > 0:
                left[split] -= file.size
                shutil.copyfile(file.path, folder / f"{split}-{number:05}-{Path(file.name).name}")

    folder = place / _name_with_digest("stdlib", [*known, scored])
    return ("source.kind=text", f"source.path={_fill_once(folder, copy)}", "source.pattern=*.py")


@cache
def _list_library() -> list[tuple[File, str]]:
    """Return the files of the standard library and their splits, cached for all variants."""
    source = make_source(SourceOptions(kind="stdlib"))
    return [(file, splits[0]) for file, splits in source.places(source.files).items()]


def _name_with_digest(name: str, parts: list[object]) -> str:
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def _write_copies(folder: Path) -> None:
    """Write sequences of a random letter, #, and the letter again, one file per split.

    See Nawrot et al. 2021, appendix A.1.
    """
    draw = np.random.default_rng(0)
    for split, count in _COPIES.items():
        letters = draw.integers(97, 97 + _LETTERS, (count, _CHUNKS), dtype=np.uint8)
        rows = np.stack([letters, np.full_like(letters, ord("#")), letters], -1)
        (folder / f"{split}.txt").write_bytes(rows.tobytes())
