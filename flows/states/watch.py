"""Whether the server still takes a training for running; Prefect's runner passes Cancel on to it, and nothing else.

A run that is paused, suspended or deleted, or marked as ended by somebody, would train on unseen, and beside its successor.
"""

import contextvars
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import Abort, Pause
from prefect.runtime import flow_run
from prefect.states import Crashed, Suspended

log = logging.getLogger(__name__)
EVERY_SECONDS = 3.0
_GOES_ON = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)  # of a cancelled one Prefect takes care


class Watch:
    """Asks the server every few seconds about this flow run and the one it is part of; a context manager.

    A server that does not answer is no reason to stop.
    """

    def __init__(self) -> None:
        known = (os.environ.get("PREFECT__FLOW_RUN_ID"), flow_run.id, flow_run.parent_flow_run_id)
        self._runs = [UUID(run) for run in dict.fromkeys(known) if run]
        self._ended = threading.Event()
        # In the settings of `haed run`, which name its server; without them Prefect would start another one.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._look,), daemon=True)
        self.stopped: tuple[UUID, State | None] | None = (
            None  # the run, and its state, which is None once it is deleted
        )

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _look(self) -> None:
        while self.stopped is None and not self._ended.wait(EVERY_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    states = _states(client, self._runs)
            except Exception as error:  # whatever it is
                log.debug("the server says nothing of this run: %s", error)
                continue
            gone = [run for run in self._runs if (state := states.get(run)) is None or state.type not in _GOES_ON]
            if gone:
                self.stopped = gone[0], states.get(gone[0])
                log.info("the run was %s: saving, then stopping", self._what())

    def _what(self) -> str:
        assert self.stopped is not None
        state = self.stopped[1]
        return "deleted" if state is None else f"set to {state.name}"

    def conclude(self) -> BaseException:
        """Leaves the server with states from which one can go on, and returns what tells Prefect's engine to end quietly.

        Resume starts a suspended run again, but takes a paused one for still alive: that becomes suspended.
        """
        assert self.stopped is not None
        run, state = self.stopped
        paused = state is not None and state.is_paused()
        message = f"saved and stopped: its {'part' if run != self._runs[0] else 'parent'} was {self._what()}"
        with suppress(Exception), get_client(sync_client=True) as client:
            if paused and run == self._runs[0]:
                client.set_flow_run_state(run, Suspended(), force=True)
            for other in self._runs:
                if other != run:
                    is_outer = paused and other == self._runs[0]
                    last: State = Suspended(message=message) if is_outer else Crashed(message=message)
                    client.set_flow_run_state(other, last, force=True)
        return Pause(state=state) if paused else Abort(message)


def _states(client: SyncPrefectClient, runs: Iterable[UUID]) -> dict[UUID, State]:
    """Those that the server has."""
    found = client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=list(runs))))
    return {run.id: run.state for run in found if run.state is not None}
