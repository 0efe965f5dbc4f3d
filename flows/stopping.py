"""Signals inside a flow: training saves first, then Prefect hears of the end in its own words."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect.exceptions import TerminationSignal

from pipeline.launcher import die_with_parent
from pipeline.trainer import Interrupted


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a request to stop, for the length of a stage.

    Prefect's own handler of SIGTERM raises in the middle of a step, and the work since the last checkpoint is lost.
    Here the stage saves, and the same exception follows: Prefect then records Cancelled, or Crashed if nobody cancelled.

    Raises:
        TerminationSignal: the stage was stopped by SIGTERM and has saved.
        KeyboardInterrupt: the stage was stopped by Ctrl-C and has saved.
    """
    caught: list[int] = []

    def handler(number: int, _: object) -> None:
        if caught:  # a second one does not wait for the checkpoint
            raise _ending(number)
        caught.append(number)

    if "PREFECT__FLOW_RUN_ID" in os.environ:  # when the process that serves flows is killed, training saves and ends
        die_with_parent(signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    except Interrupted as error:
        raise _ending(caught[0]) from error
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _ending(number: int) -> BaseException:
    return TerminationSignal(signal=number) if number == signal.SIGTERM else KeyboardInterrupt()
