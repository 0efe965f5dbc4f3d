"""The runs that pages show, and the files that are served of each."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.run.run_directory import LATEST_FIRST, RunFolder


class NotFoundError(LookupError):
    """Raised when no run, or no file of a run, has the requested name."""


class ServedRuns:
    """The runs that pages show: those of a folder, or a single one.

    Args:
        place: folder of the runs, or of the single run.
        single: whether `place` is a single run.
    """

    def __init__(self, place: Path, single: bool = False) -> None:
        self.place, self.single = place.resolve(), single

    def list_folders(self) -> tuple[list[RunFolder], list[str]]:
        """Return the runs, sorted by name, and the names of those that are not shown.

        These are links to folders elsewhere, and names that are not UTF-8, which an address cannot hold.
        """
        if self.single:
            return [RunFolder(self.place)], []
        folders, elsewhere = [], []
        for name in sorted(os.listdir(self.place) if self.place.is_dir() else []):
            if name.startswith(".") or not os.path.lexists(f"{self.place}/{name}/config.yaml"):
                continue
            folder, shown = self.place / name, name.encode(errors="replace").decode()
            if name == shown and (not folder.is_symlink() or folder.resolve().parent == self.place):
                folders.append(RunFolder(folder))
            else:
                elsewhere.append(shown)
        return folders, elsewhere

    def find_folder(self, name: str) -> RunFolder:
        """Return the run of that name. The name is only compared, never used as a path.

        Raises:
            NotFoundError: no run has that name.
        """
        for folder in self.list_folders()[0]:
            if folder.path.name == name and os.path.lexists(folder.path / "config.yaml"):
                return folder
        if self.single and name == self.place.name:
            raise NotFoundError(f"{self.place} was moved, renamed or removed. Start again with its new place")
        raise NotFoundError(f"there is no run {name!r} {'here' if self.single else f'in {self.place}'}")


# Files of a run that are served, with descriptions. Files in `analysis/` are served as well.
FILES = {
    "report.html": "the report",
    "evaluation.json": "bits of the evaluated split",
    "samples.json": "samples of the report",
    "samples.png": "pictures, completed",
    "neighbours.png": "neighbours, drawn",
    "config.yaml": "complete configuration",
    "environment.json": "versions, commit, machine",
    **{f"{phase}/metrics.jsonl": f"metrics of {phase}" for phase in reversed(LATEST_FIRST)},
}


@dataclass
class ServedFile:
    """A file of a run that is served.

    Attributes:
        name: its name in the address.
        description: a short description.
        bytes: its size.
        path: its path on disk.
        written: when it was last written, in ns.
    """

    name: str
    description: str
    bytes: int
    path: Path
    written: int


def list_served_files(folder: RunFolder) -> list[ServedFile]:
    """Return the files that are served of a run: `FILES` and those in `analysis/`.

    Links are left out, also those to other places within the run.
    """
    names = dict(FILES)
    for path in sorted((folder.path / "analysis").glob("*")):
        if not path.name.startswith("."):
            names[f"analysis/{path.name}"] = "an analysis"
    files, inside = [], folder.path.resolve()
    for name, description in names.items():
        path = (folder.path / name).resolve()
        if path.is_file() and path == inside / name:
            status = path.stat()
            files.append(ServedFile(name, description, status.st_size, path, status.st_mtime_ns))
    return files


def stamp_results(files: list[ServedFile]) -> str:
    """Return a text that changes with the served files of a run, but not with its metrics, which grow as it trains."""
    written = [(file.name, file.written) for file in files if not file.name.endswith("metrics.jsonl")]
    return hashlib.blake2b(repr(written).encode(), digest_size=8).hexdigest()
