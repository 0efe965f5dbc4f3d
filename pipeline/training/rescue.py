"""Rescue of a training whose run folder was removed, moved or replaced: it is saved where it can be resumed."""

import itertools
import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from data.corpus import Corpus
from data.filesystem import FolderLostError, Guard, make_folders, write_atomically
from pipeline.config import Options, Phase, is_mixed, max_known_chunks
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.known import store_known_chunks
from pipeline.run.run_directory import RunFolder
from pipeline.suggestions import format_command
from pipeline.training.trainer import UnsavedCheckpointError

_PAUSE = 1.0  # seconds: whoever removes a folder around the run gets a moment to be done


def save_beside(
    unsaved: UnsavedCheckpointError, phase: Phase, options: Options, guard: Guard, corpus: Corpus, metrics: bytes
) -> FolderLostError:
    """Save an unsaved checkpoint in the run's moved folder, or as a new run beside the old place.

    A moved run has its lock file with it, so no other process trains it there. Files at the old place are not touched,
    because they may belong to another process. `metrics` is the content of metrics.jsonl.

    Returns:
        An error that says what happened, where the checkpoint is, and which command resumes it.
    """
    time.sleep(_PAUSE)
    try:
        if moved := guard.moved_to():
            run = RunFolder(moved)
            _save_checkpoint(run, unsaved, phase, options)
        else:
            run = _new_run(RunFolder.from_options(options).path)
            with run.lock():
                RunFolder.create(replace(options, name=run.path.name))
                run.write_corpus_record(corpus)
                if is_mixed(options, getattr(options, phase)):
                    store_known_chunks(run, corpus, max_known_chunks(options))
                make_folders(run.phase_folder(phase), within=run.path)
                write_atomically(run.phase_folder(phase) / "metrics.jsonl", metrics)
                _save_checkpoint(run, unsaved, phase, options)
    except OSError as error:
        return FolderLostError(
            f"{unsaved}; training stopped at step {unsaved.step:,}. The step could not be saved beside the "
            f"run either: {error.strerror or error}. Put the folder back, or run the same command to start from the beginning"
        )
    return FolderLostError(
        f"{unsaved}; training stopped, and step {unsaved.step:,} was saved in {run.path}. Run "
        f"{format_command(phase, run.path)} to resume"
    )


def _save_checkpoint(run: RunFolder, unsaved: UnsavedCheckpointError, phase: Phase, options: Options) -> None:
    with closing(Checkpoints(run.phase_folder(phase) / "checkpoints", options.checkpoint.keep)) as checkpoints:
        best = unsaved.is_best or not checkpoints.folder.is_dir()  # in a new run it is the best there is
        checkpoints.save(unsaved.step, *unsaved.captured, best=best)
        checkpoints.wait_until_written()


def _new_run(path: Path) -> RunFolder:
    """Create the folder of a new run beside another; the parent folder must still exist."""
    names = (path.with_name(f"{path.name}-rescued-{number}") for number in itertools.count(1))
    beside = next(name for name in names if not os.path.lexists(name))
    beside.mkdir()
    return RunFolder(beside)
