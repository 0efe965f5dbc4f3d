"""Signals inside a flow: training saves first, then Prefect hears of the end in its own words."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal
from prefect.settings import PREFECT_API_URL
from rich.console import Console

from flows.states.alive import SERVED_BY, answers, is_served, served_by
from flows.states.watch import Watch
from pipeline.stopping import Request, StopRequested, die_with_parent, end_with_parent
from pipeline.train.trainer import Interrupted

log = logging.getLogger(__name__)


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a request to stop, for the length of a stage.

    Prefect's own handler of SIGTERM raises in the middle of a step, and the work since the last checkpoint is lost.
    Here the stage saves, and the same exception follows: Prefect then records Cancelled, or Crashed if nobody cancelled.

    A run that the server no longer takes for running stops in the same way; see `flows.states.watch`.

    Raises:
        TerminationSignal: the stage was stopped by SIGTERM and has saved.
        KeyboardInterrupt: the stage was stopped by Ctrl-C and has saved.
        Pause: its run was paused or suspended; it has saved.
        Abort: its run was deleted, or marked as ended; it has saved.
    """
    asked = Request()

    def handler(number: int, _: object) -> None:
        if asked.takes(number):
            raise _ending(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    if is_served():  # when the process that serves flows is killed, training saves and ends
        # Nobody reads its lines then; rich, with which Prefect writes them, would end the process at the next one.
        Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]
        end_with_parent(served_by(), signal.SIGTERM)
    try:
        with Watch() as watch:
            yield lambda: asked() or watch.stopped is not None
    except (Interrupted, StopRequested) as error:
        if _is_orphan() and not answers(str(PREFECT_API_URL.value()).removesuffix("/api")):
            log.info("%s; the server is gone: it is not told", error)  # Prefect would try for minutes
            logging.shutdown()
            os._exit(128 + signal.SIGTERM)
        raise (_ending(asked.number) if asked() else watch.conclude()) from error
    finally:
        if is_served():
            die_with_parent(signal.SIGKILL)  # there is nothing more to save
        for number, previous in before.items():
            signal.signal(number, previous)


def _is_orphan() -> bool:
    """Whether the `haed serve` that started this flow has ended."""
    return os.environ.get(SERVED_BY, str(os.getppid())) != str(os.getppid())


def _ending(number: int | None) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else TerminationSignal(signal=signal.SIGTERM)
