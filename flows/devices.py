"""A limit on concurrent trainings per device: 1 unless `haed serve --trainings` sets another. The others wait.

A turn is a locked file. The lock is released when its process dies and needs no server. All flows of a user on a
machine share these files, whatever folder they run in.
"""

import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from data.filesystem import FLOW_RUN
from pipeline.config import Options
from pipeline.run.run_directory import RunFolder
from pipeline.training.trainer import TrainingInterrupted

log = logging.getLogger(__name__)
TRAININGS = "HAED_TRAININGS"  # at a time on a device; 0 or nothing: any number
_POLL_SECONDS = 0.5


@contextmanager
def acquire_device(options: Options, stop: Callable[[], bool]) -> Iterator[None]:
    """Wait until the devices of a training are free, and hold them.

    Raises:
        Interrupted: `stop` became true while waiting.
        BlockingIOError: the devices are busy and another process is training this run.
    """
    limit = int(os.environ.get(TRAININGS) or 0)
    names = list_training_devices(options) if limit else []
    with ExitStack() as held:
        others = _try_acquire(names, limit, held)
        if others:
            run = RunFolder.from_options(options)
            if run.path.is_dir():  # a second flow of a run that trains is refused, and need not wait for that
                with run.lock():
                    pass
            log.info("waits for its turn on %s: %s", ", ".join(names), others)
            began = time.monotonic()
            with _show_in_run_name(f"waits for {', '.join(names)}") as say:
                while others:
                    if stop():
                        raise TrainingInterrupted("it was waiting for its turn: there is nothing to save")
                    say()
                    time.sleep(_POLL_SECONDS)
                    others = _try_acquire(names, limit, held)
            log.info("has its turn after %.0f s", time.monotonic() - began)
        yield


def list_training_devices(options: Options) -> list[str]:
    """Return the names of the devices that a training uses, numbered the same way in all processes of this machine."""
    import torch

    kind, _, number = options.device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind != "cuda":
        return [kind]
    count = options.launcher.processes
    wanted = [int(number)] if number.isdigit() else list(range(count))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [f"cuda:{visible[n] if n < len(visible) and visible[n] else n}" for n in wanted]


def _try_acquire(names: list[str], limit: int, held: ExitStack) -> str:
    """Lock every device, or none if one is busy. Return who holds the busy one, or an empty string."""
    busy = []
    with ExitStack() as taken:
        for name in names:
            files = [taken.enter_context(open(_lock_folder() / f"{name}.{slot}", "a+")) for slot in range(limit)]
            mine = next(filter(_try_lock_file, files), None)
            if mine is None:
                for file in files:
                    file.seek(0)
                    busy.append(file.read(200).strip())
                return ", ".join(busy)
            mine.truncate(0)
            mine.write(f"{os.environ.get(FLOW_RUN)!r}, process {os.getpid()}")
            mine.flush()
        held.enter_context(taken.pop_all())
    return ""


def _try_lock_file(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_folder() -> Path:
    """Return the folder of lock files of this user, shared by all of the user's flows on this machine."""
    path = Path(tempfile.gettempdir()) / f"haed-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of yours: move it away, or set TMPDIR")
    return path


@contextmanager
def _show_in_run_name(what: str) -> Iterator[Callable[[], None]]:
    """Show in the name of the flow run that it waits, and restore the name afterwards.

    The function yielded renames the run. It does nothing once the server has accepted the name.
    """
    before, heard = os.environ.get(FLOW_RUN, ""), False

    def say() -> None:
        nonlocal heard
        heard = heard or _renamed(f"{before} · {what}")

    try:
        yield say
    finally:
        if not _renamed(before):
            log.warning("the server did not answer: the run's name may go on to say that it %s", what)


def _renamed(name: str) -> bool:
    """Rename the flow run, if there is one, and return whether this succeeded."""
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    if flow_run.id is None:
        return True
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(flow_run.id, name=name)
    except Exception as error:  # whatever it is: the server's troubles are not training's
        log.debug("not renamed: %s", error)
        return False
    return True
