"""Repair of missing or damaged shards: each is rebuilt by its part, which the same source gives again."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from data.checked import CorruptFileError, add_path_to_errors, open_file
from data.corpus import MANIFEST, Corpus
from data.filesystem import remove_folder, sync_folder
from data.options import ShardOptions
from data.sharding.parts import Part, PartRecord, Plan
from data.shards import Shard
from data.sources.source import SPLITS


def find_damaged_shards(corpus: Corpus, options: ShardOptions) -> list[str]:
    """Return the files of shards that are missing or differ from the manifest.

    Sizes are compared; with `verify`, also sha256.
    """

    def is_whole(shard: Shard) -> bool:
        path = corpus.folder / shard.file
        try:
            if path.stat().st_size != shard.file_bytes:
                return False
            if options.verify:
                with add_path_to_errors(path), open_file(path) as file:
                    return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
        except (FileNotFoundError, CorruptFileError):
            return False
        return True

    with ThreadPoolExecutor(options.workers) as pool:
        return [s.file for s, whole in zip(corpus.shards, pool.map(is_whole, corpus.shards), strict=True) if not whole]


def rebuild_shards(work: Plan, corpus: Corpus, names: list[str], write: Callable[[tuple[Part, ...]], None]) -> None:
    """Rebuild shards from the parts of the source that they come from.

    Args:
        work: plan of the corpus.
        corpus: the corpus.
        names: file names of the missing or damaged shards.
        write: writes parts.

    Raises:
        ValueError: the rebuilt shards differ from the manifest.
    """
    known = _read_noted_places(work, corpus)
    parts = [work.parts[at] for at in sorted({known[name][0] for name in names})] if known else list(work.parts)
    for part in parts:
        remove_folder(part.folder)  # an interrupted attempt may have moved some of it
    write(tuple(parts))
    if not known:
        known = locate_shards([PartRecord.read_record(part).shard_counts for part in work.parts])
    wanted = {shard.file: shard.sha256 for shard in corpus.shards}
    for name in names:
        at, own = known.get(name, (0, ""))
        made = PartRecord.read_record(work.parts[at]).shards_by_name.get(own)
        if made is None or made.sha256 != wanted[name]:
            raise ValueError(
                f"{corpus.folder}/{name} comes out otherwise than {MANIFEST} says, though its source is the same: was it "
                f"made by another version? Delete {MANIFEST} and run `haed shard` again to have all shards made anew"
            )
    for name in names:
        at, own = known[name]
        os.replace(work.parts[at].folder / own, work.folder / name)
    sync_folder(work.folder)
    remove_folder(work.folder / "parts")


def _read_noted_places(work: Plan, corpus: Corpus) -> dict[str, tuple[int, str]]:
    """Return the places that the manifest records; an empty mapping if they are missing or inconsistent."""
    noted = corpus.manifest.get("parts")
    if not (isinstance(noted, list) and len(noted) == len(work.parts)):
        return {}
    sane = all(isinstance(each, dict) and all(isinstance(n, int) and n < 1e6 for n in each.values()) for each in noted)
    known = locate_shards(noted) if sane else {}
    return known if set(known) == {shard.file for shard in corpus.shards} else {}


def locate_shards(parts: list[dict[str, int]]) -> dict[str, tuple[int, str]]:
    """Map each shard of a corpus to the number of the part that makes it and its file name there.

    Args:
        parts: the number of shards of each split in each part.
    """
    found: dict[str, tuple[int, str]] = {}
    for split in SPLITS:
        owners = [(at, own) for at, counts in enumerate(parts) for own in range(counts.get(split, 0))]
        found |= {_shard_name(split, number): (at, _shard_name(split, own)) for number, (at, own) in enumerate(owners)}
    return found


def _shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.tar"


def format_names(names: list[str]) -> str:
    """Return the first of some names, for people."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
