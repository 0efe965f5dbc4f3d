"""The final state of a flow run, with one line: the result, the error, or what was saved.

Errors that a user can cause are no crashes and get no traceback, which would hide the line. All others keep theirs.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures.process import _RemoteTraceback
from contextlib import suppress
from dis import opmap
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.states import Cancelled, Completed, Crashed, Failed, State

from flows.page.live import log_to_parent_run
from pipeline.console import format_error

log = logging.getLogger(__name__)
ROOMS = ("pipeline", "data", "haed", "flows")
EXPECTED = (ValueError, OSError, FloatingPointError, ParameterTypeError)


def finish_flow_run(stage: str, work: Callable[[], Any], told: Callable[[Any], str]) -> State[Any]:
    """Run a flow's work and return its final state.

    Args:
        stage: name of the flow.
        work: returns the flow's result.
        told: returns the one-line summary of the result.

    Raises:
        BaseException: an error that the user did not cause, or one that ends a process.
    """
    try:
        found = work()
    except TerminationSignal as error:
        _finish_stopped_run(error)
        raise
    except Exception as error:
        if not is_user_error(error):
            raise
        inner = next(iter(getattr(error, "__notes__", ())), "")  # the stage of this flow in which it came up
        if not inner:
            error.add_note(stage)
        return Failed(message=f"{inner}{': ' if inner else ''}{format_error(error)}", data=error)
    message = told(found)
    if stage != "haed":  # whose result is that of a stage
        log.info("%s: %s", stage, message)
    log_to_parent_run("%s: %s", stage, message)
    return Completed(message=message, data=found)


def is_user_error(error: BaseException | None) -> bool:
    """Return whether an error comes from the user's input or the machine, so that its message is enough.

    As on the command line, these are ValueError, OSError and FloatingPointError, and also Prefect's
    ParameterTypeError. A ValueError or FloatingPointError counts only if our own code raised it, or if it comes from
    a pool process. One from a library, in Python or C, is a bug of ours.
    """
    if not isinstance(error, EXPECTED) or error.__traceback__ is None:
        return False
    if isinstance(error, OSError | ParameterTypeError) or isinstance(error.__cause__, _RemoteTraceback):
        return True  # that of a process of a pool has its traceback as a text only
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    ours = last.tb_frame.f_globals.get("__name__", "").split(".")[0] in ROOMS
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]


class _NoTracebacks(logging.Filter):
    """A log filter that drops Prefect's log records of user errors and of results, which are logged already.

    A record of a failed state is logged as an error.
    """

    def filter(self, record: logging.LogRecord) -> bool:  # noqa: D102
        if str(record.msg).startswith("Finished in state Failed("):
            record.levelno, record.levelname = logging.ERROR, "ERROR"
        if str(record.msg).startswith("Finished in state Completed("):
            return False
        return not (record.exc_info and is_user_error(record.exc_info[1]))


def drop_tracebacks() -> None:
    """Stop Prefect's engine from logging tracebacks of user errors."""
    engine = logging.getLogger("prefect.flow_runs")
    if not any(isinstance(each, _NoTracebacks) for each in engine.filters):
        engine.addFilter(_NoTracebacks())


def _finish_stopped_run(error: TerminationSignal) -> None:
    """Set the final state of this flow run, with a message on what was saved.

    Prefect's engine has no message for this case and leaves a final state alone.
    """
    saved = str(error.__cause__ or "stopped")
    message = f"{saved}; Retry {'goes on from there' if saved.startswith('saved') else 'does what is left'}"
    log.info("%s", message)
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    with suppress(Exception), get_client(sync_client=True) as client:  # the server's troubles are not ours
        outer = client.read_flow_run(UUID(os.environ.get("PREFECT__FLOW_RUN_ID") or str(context.flow_run.id))).state
        asked = outer is not None and (outer.is_cancelling() or outer.is_cancelled())
        last: State[Any] = Cancelled(message=message) if asked else Crashed(message=message)
        context.flow_run.state = client.set_flow_run_state(context.flow_run.id, last, force=True).state
    with suppress(Exception):
        APILogWorker.drain_all(timeout=5)  # the signal comes again, and ends the process
