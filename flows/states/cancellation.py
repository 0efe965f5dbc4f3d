"""Signals and server states that stop a flow: the training saves first, then Prefect is told in its own terms.

Prefect's runner forwards only Cancel. A run that was paused, suspended, deleted or marked as ended would train on
unseen, possibly beside its successor. So `FlowRunWatcher` polls the server.
"""

import contextvars
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed, Suspended
from rich.console import Console

from flows.states.heartbeat import SERVED_BY, is_served, is_server_healthy, serving_process_id
from pipeline.signals import StopRequested, StopSignal, die_with_parent, end_with_parent
from pipeline.train.trainer import TrainingInterrupted

log = logging.getLogger(__name__)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Turn SIGINT and SIGTERM into a request to stop, for the duration of a stage.

    Prefect's own SIGTERM handler raises in the middle of a step, and the work since the last checkpoint is lost. Here
    the stage saves, and the same exception follows. Prefect then records Cancelled, or Crashed if nobody cancelled.

    A run that the server no longer regards as running stops in the same way.

    Raises:
        TerminationSignal: the stage was stopped by SIGTERM and has saved.
        KeyboardInterrupt: the stage was stopped by Ctrl-C and has saved.
        Pause: the run was paused or suspended; it has saved.
        Abort: the run was deleted or marked as ended; it has saved.
    """
    asked = StopSignal()

    def handler(number: int, _: object) -> None:
        if asked.handle_signal(number):
            raise _exception_for_signal(number)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    if is_served():  # when the process that serves flows is killed, training saves and ends
        # Nobody reads its lines then; rich, with which Prefect writes them, would end the process at the next one.
        Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]
        end_with_parent(serving_process_id(), signal.SIGTERM)
    try:
        with FlowRunWatcher() as watch:
            yield lambda: asked() or watch.stopped is not None
    except (TrainingInterrupted, StopRequested) as error:
        if _is_orphan() and not is_server_healthy(str(PREFECT_API_URL.value()).removesuffix("/api")):
            log.info("%s; the server is gone: it is not told", error)  # Prefect would try for minutes
            logging.shutdown()
            os._exit(128 + signal.SIGTERM)
        raise (_exception_for_signal(asked.number) if asked() else watch.finish_runs()) from error
    finally:
        if is_served():
            die_with_parent(signal.SIGKILL)  # there is nothing more to save
        for number, previous in before.items():
            signal.signal(number, previous)


def _is_orphan() -> bool:
    """Return whether the `haed serve` that started this flow has ended."""
    return os.environ.get(SERVED_BY, str(os.getppid())) != str(os.getppid())


def _exception_for_signal(number: int | None) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else TerminationSignal(signal=signal.SIGTERM)


EVERY_SECONDS = 3.0
_GOES_ON = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)  # of a cancelled one Prefect takes care


class FlowRunWatcher:
    """A thread that polls the server for the state of this flow run and its parent; a context manager.

    A server that does not answer is no reason to stop.
    """

    def __init__(self) -> None:
        known = (os.environ.get("PREFECT__FLOW_RUN_ID"), flow_run.id, flow_run.parent_flow_run_id)
        self._runs = [UUID(run) for run in dict.fromkeys(known) if run]
        self._ended = threading.Event()
        # In the settings of `haed run`, which name its server; without them Prefect would start another one.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._poll_server,), daemon=True)
        self.stopped: tuple[UUID, State | None] | None = (
            None  # the run, and its state, which is None once it is deleted
        )

    def __enter__(self) -> "FlowRunWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _poll_server(self) -> None:
        while self.stopped is None and not self._ended.wait(EVERY_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    states = _read_states(client, self._runs)
            except Exception as error:  # whatever it is
                log.debug("the server says nothing of this run: %s", error)
                continue
            gone = [run for run in self._runs if (state := states.get(run)) is None or state.type not in _GOES_ON]
            if gone:
                self.stopped = gone[0], states.get(gone[0])
                log.info("the run was %s: saving, then stopping", self._describe_state())

    def _describe_state(self) -> str:
        assert self.stopped is not None
        state = self.stopped[1]
        return "deleted" if state is None else f"set to {state.name}"

    def finish_runs(self) -> BaseException:
        """Set states on the server that can be continued, and return the exception that ends Prefect's engine quietly.

        Resume restarts a suspended run but expects a paused one to be alive, so paused runs become suspended.
        """
        assert self.stopped is not None
        run, state = self.stopped
        paused = state is not None and state.is_paused()
        message = f"saved and stopped: its {'part' if run != self._runs[0] else 'parent'} was {self._describe_state()}"
        with suppress(Exception), get_client(sync_client=True) as client:
            if paused and run == self._runs[0]:
                client.set_flow_run_state(run, Suspended(), force=True)
            for other in self._runs:
                if other != run:
                    is_outer = paused and other == self._runs[0]
                    last: State = Suspended(message=message) if is_outer else Crashed(message=message)
                    client.set_flow_run_state(other, last, force=True)
        return Pause(state=state) if paused else Abort(message)


def _read_states(client: SyncPrefectClient, runs: Iterable[UUID]) -> dict[UUID, State]:
    """Return the states of these runs, without those that the server does not have."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(runs))))
    return {run.id: run.state for run in found if run.state is not None}
