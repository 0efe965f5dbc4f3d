"""What decides the bytes of shards beside the source and the settings: other people's code, which changes with its versions."""

import hashlib
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from data.options import CHUNKERS, SOURCES
from data.sources.source import Source, load


def versions(source: Source, chunker: str) -> dict[str, str]:
    """Versions of the packages that decode the source, and of those that sources and chunkers of one's own come from.

    Of such a package the file with the source or chunker counts as well, since a package that is being worked on keeps its
    version; of ours, chunkers have a version of their own.
    """
    found = dict(source.versions())
    for name, table, group in (
        (source.options.kind, SOURCES, "haed.sources"),
        (chunker, CHUNKERS, "haed.chunkers"),
    ):
        if name not in table:
            load(name, table, group)
            found[f"{group}:{name}"] = _version(next(iter(entry_points(group=group, name=name))))
    return found


def _version(entry: EntryPoint) -> str:
    module = sys.modules[entry.module]
    path = getattr(module, "__file__", None)
    content = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12] if path else "built in"
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "no package"
    return f"{package}, {entry.value}, {content}"
