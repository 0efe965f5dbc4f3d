"""Changes that the pages of runs make: notes, tags, the archive, and the name or existence of a run's folder.

A run is renamed or deleted under its lock and its reservation. So that never happens while a process trains it, nor between
two stages of a flow, nor while another run starts from it. A single evaluation, index or report holds neither: it ends with an
error that says so, and writes nothing.
"""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from uuid import uuid4

from data.filesystem import write_json
from pipeline.config import ConfigError, check_name
from pipeline.reporting.run_state import read_settings
from pipeline.run.files import NOTES, RunNotes, read_notes
from pipeline.run.run_directory import RunFolder
from pipeline.web.runs import ServedRuns

_ABANDONED = 60.0  # seconds without a change
_notes = Lock()  # of all requests: a note and the archive are fields of one file


class RefusedChangeError(ValueError):
    """Raised when a change of a run is refused.

    Attributes:
        field: the box that is wrong: name, tags, note, or empty.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def edit_run(runs: ServedRuns, folder: RunFolder, name: str, tags: str, note: str, seen: str) -> None:
    """Rename a run, and write its note and its tags. If one is refused, nothing is changed.

    Args:
        runs: the runs that are served.
        folder: the run.
        name: its new name, or the present one.
        tags: its tags, with blanks or commas between them.
        note: its note.
        seen: digest of the notes that these replace; see `RunNotes.digest`.

    Raises:
        RefusedChangeError: a value is not allowed, the run cannot be renamed, or somebody changed the notes meanwhile.
        OSError: a file cannot be written.
    """
    words = list(dict.fromkeys(tags.replace(",", " ").split()))
    if len(words) > 20 or any(len(word) > 50 for word in words):
        raise RefusedChangeError("Use at most 20 tags of at most 50 characters each.", "tags")
    if len(note) > 10_000:
        raise RefusedChangeError(f"The note has {len(note):,} characters. Use at most 10,000.", "note")
    with _notes:
        now = read_or_empty(folder)
        if seen != now.digest and (note, words) != (now.note, now.tags):
            raise RefusedChangeError(
                f"Somebody saved other notes meanwhile. The tags are now {' '.join(now.tags) or 'none'}, and the note is "
                f"{now.note or 'empty'}. Save again to replace them."
            )
        if name.strip() != folder.path.name:
            folder = rename_run(runs, folder, name)
        write_json(folder.path / NOTES, asdict(RunNotes(note, words, now.archived)))


def archive_run(folder: RunFolder, archived: bool) -> None:
    """Archive a run, so that the list leaves it out, or restore it. Its files stay where they are.

    Raises:
        RefusedChangeError: a process uses the run.
        OSError: the file cannot be written.
    """
    if archived and (holder := folder.user()):
        raise RefusedChangeError(f"{folder.path.name} is in use by {holder}. Archive it when that has ended.")
    with _notes:
        notes = read_or_empty(folder)
        notes.archived = archived
        write_json(folder.path / NOTES, asdict(notes))


def rename_run(runs: ServedRuns, folder: RunFolder, name: str) -> RunFolder:
    """Rename the folder of a run, and return it.

    Raises:
        RefusedChangeError: the name is not that of a folder or is taken, or the run is in use.
        OSError: the folder cannot be renamed.
    """
    if runs.single:
        raise RefusedChangeError("`haed explore` shows one run. Rename it in the pages of `haed serve`.", "name")
    try:
        name = check_name(name)
    except ConfigError as error:
        raise RefusedChangeError(str(error), "name") from None
    if os.path.lexists(target := folder.path.with_name(name)):
        raise RefusedChangeError(f"{name} exists already. Choose another name.", "name")
    _check_unused(runs, folder)
    try:
        with folder.reserve(), RunFolder(target).reserve(), folder.lock():
            os.rename(folder.path, target)
    except BlockingIOError as error:
        raise RefusedChangeError(f"{error}.", "name") from None
    return RunFolder(target)


def delete_run(runs: ServedRuns, folder: RunFolder) -> None:
    """Delete a run with all its files.

    It first gets a hidden name, so that no half of a run is ever listed.

    Raises:
        RefusedChangeError: the run is in use.
        OSError: it cannot be deleted as a whole; the message names the folder that is left.
    """
    _check_unused(runs, folder)
    hidden = folder.path.with_name(f".deleted-{uuid4().hex[:12]}")
    try:
        with folder.reserve(), folder.lock():
            os.rename(folder.path, hidden)
            shutil.rmtree(hidden)
        for rest in folder.path.parent.glob(".deleted-*"):
            with suppress(OSError):
                if rest.lstat().st_mtime < time.time() - _ABANDONED:  # by a server that was killed
                    shutil.rmtree(rest, ignore_errors=True)
    except BlockingIOError as error:
        raise RefusedChangeError(f"{error}.") from None
    except OSError as error:
        left = f" The rest is in {hidden}" if hidden.exists() else ""
        raise OSError(f"{folder.path} could not be deleted: {error.strerror or error}.{left}") from error


def measure_size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                size += os.lstat(f"{place}/{name}").st_size
    return size


def _check_unused(runs: ServedRuns, folder: RunFolder) -> None:
    """Refuse to move a link, the only run of these pages, or a run that another one starts from."""
    if runs.single:
        raise RefusedChangeError("`haed explore` shows one run. Delete it in the pages of `haed serve`.")
    if folder.path.is_symlink():
        raise RefusedChangeError(f"{folder.path.name} is a link. Change it in its folder {folder.path.resolve()}.")
    for other in runs.list_folders()[0]:
        try:
            start = read_settings(other).get("finetune.start_from")
        except (OSError, ValueError):
            continue
        places = (Path(str(start)).resolve(), (folder.path.parent / str(start)).resolve())  # a path, or a run beside it
        if other.path != folder.path and start and folder.path.resolve() in places:
            raise RefusedChangeError(
                f"{other.path.name} starts from phase one of {folder.path.name}. As long as that run is here, this one "
                "cannot be renamed or deleted."
            )


def read_or_empty(folder: RunFolder) -> RunNotes:
    """Return the notes of a run, empty if they are damaged and will be replaced."""
    with suppress(ValueError):
        return read_notes(folder.path)
    return RunNotes()
