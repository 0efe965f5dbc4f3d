"""Pools of processes that end as they should, whichever process began them."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from data.processes import process_pool

_kept: list[object] = []


def _note(folder: Path) -> None:
    """What a worker begins with: it leaves a file if it is terminated."""

    def terminated(*_: object) -> None:
        (folder / f"{os.getpid()}").touch()
        os._exit(1)

    signal.signal(signal.SIGTERM, terminated)


def _keep_a_pool(folder: Path) -> None:
    pool = process_pool(2, _note, (folder,))
    assert list(pool.map(abs, range(8))) == list(range(8))
    _kept.append(pool)


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_pool_that_is_never_closed_ends_by_itself_not_by_a_signal(tmp_path: Path, start: str) -> None:
    """Terminated workers look like a crash to the pool, which clears up just while the process ends: status 1 now and then."""
    process = multiprocessing.get_context(start).Process(target=_keep_a_pool, args=(tmp_path,))  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert (process.exitcode, list(tmp_path.iterdir())) == (0, [])
