"""The dispatcher of `haed serve`: it starts due flow runs as child processes, until it is told to stop.

It takes the place of Prefect's runner, with the public client alone and the program that workers of Prefect start,
`python -m prefect.engine`. At Ctrl-C or SIGTERM Prefect's runner cancels its flows and kills them after 30 s. Here no
new run starts, each flow gets one SIGTERM, and the dispatcher waits until the last flow has saved and ended.

Each kind of flow has its own limit. So waiting trainings and stages that take hours leave room for queries.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.settings import (
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_RUNNER_POLL_FREQUENCY,
    PREFECT_RUNNER_PROCESS_LIMIT,
    temporary_settings,
)
from prefect.states import Crashed, Pending

from flows.lifecycle import ASKS, SERVED_BY, TRAINS, read_states, settle_flow_run
from pipeline.signals import SAME_SECONDS, StopSignal, die_with_parent

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0  # for a slow step, a validation and a checkpoint
CANCEL_SECONDS = 30.0  # as Prefect's runner and workers wait
_REPORT_SECONDS = 15.0  # for the states of flows that were killed
_LOOK_SECONDS = 0.1
_WAITING_BYTES = 1 << 29  # memory of a training that waits for its turn, on a CPU


@dataclass
class FlowProcess:
    """The process of a flow run: the name of its flow, and when it is killed if it has been cancelled."""

    flow: str
    process: "subprocess.Popen[bytes]"
    kill_at: float | None = None


def run_flows(deployments: Mapping[str, UUID]) -> None:
    """Run the flows of deployments in the foreground until SIGINT or SIGTERM.

    Args:
        deployments: the id of each flow's deployment, by the name of the flow.

    Raises:
        RuntimeError: flows were killed before they had saved, by a second signal or after the time limit.
    """
    stop = StopSignal()
    # This loop asks again itself. Within a request that is repeated it would not notice a signal.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        killed = FlowDispatcher(deployments, stop).run()
    if killed:
        raise RuntimeError(
            f"{killed} flow(s) killed before they had ended: what they did since their last save is lost"
        )


def max_training_processes() -> int:
    """Return the maximum number of training processes, most of which wait for a device: what half of the memory holds.

    Further ones stay Late. Prefect's own limit (PREFECT_RUNNER_PROCESS_LIMIT, 5) is a lower bound here, and applies to
    the other kinds of flows.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(int(PREFECT_RUNNER_PROCESS_LIMIT.value()), memory // 2 // _WAITING_BYTES)


class FlowDispatcher:
    """A loop that starts due flow runs, ends cancelled ones, and reports those whose process died.

    Args:
        deployments: the id of each flow's deployment, by the name of the flow.
        stop: the request to stop, made by signals.
    """

    def __init__(self, deployments: Mapping[str, UUID], stop: StopSignal) -> None:
        limit = int(PREFECT_RUNNER_PROCESS_LIMIT.value())
        others = tuple(flow for flow in deployments if flow not in (*TRAINS, *ASKS))
        self._kinds = ((TRAINS, max_training_processes()), (others, limit), (ASKS, limit))
        self._deployments, self._stop, self._insists = deployments, stop, False
        self._flows = {id: flow for flow, id in deployments.items()}
        self._running: dict[UUID, FlowProcess] = {}

    def run(self) -> int:
        """Dispatch until a signal, then end all flows. Return how many had to be killed."""
        every, due = float(PREFECT_RUNNER_POLL_FREQUENCY.value()), 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take_signal)
        with get_client(sync_client=True) as client:
            while not self._stop():
                self._settle_ended()
                if time.monotonic() >= due:
                    due = time.monotonic() + every
                    with _log_failure("the server was not asked for runs"):
                        self._start_due_runs(client)
                        self._end_cancelled(client)
                time.sleep(_LOOK_SECONDS)
        return self._end_all()

    def _take_signal(self, number: int, _: object) -> None:
        self._insists = self._stop.is_second_request(number) or self._insists

    def _start_due_runs(self, client: SyncPrefectClient) -> None:
        """Start due runs, the oldest first, as far as the limits of their kinds allow."""
        for names, limit in self._kinds:
            free = limit - sum(each.flow in names for each in self._running.values())
            ids = [id for flow, id in self._deployments.items() if flow in names]
            runs = client.get_scheduled_flow_runs_for_deployments(ids, scheduled_before=datetime.now(UTC))
            due = [run for run in runs if run.id not in self._running]
            for run in due[: max(0, free)]:
                if self._stop():
                    return
                accepted = client.set_flow_run_state(run.id, Pending()).status == SetStateStatus.ACCEPT
                if not accepted or run.deployment_id is None:
                    continue
                try:
                    self._running[run.id] = FlowProcess(self._flows[run.deployment_id], _start_engine(run.id))
                except OSError as error:
                    message = f"its process could not start: {error}"
                    client.set_flow_run_state(run.id, Crashed(message=message), force=True)

    def _end_cancelled(self, client: SyncPrefectClient) -> None:
        """Send SIGTERM to the processes of runs that were cancelled since."""
        states = read_states(client, self._running) if self._running else {}
        for id, state in states.items():
            each = self._running[id]
            if state.is_cancelling() and each.kill_at is None:
                each.process.terminate()
                each.kill_at = time.monotonic() + CANCEL_SECONDS

    def _settle_ended(self) -> None:
        """Report runs whose process has ended, and kill cancelled ones whose time is over."""
        for id, each in list(self._running.items()):
            is_late = each.kill_at is not None and time.monotonic() > each.kill_at
            status = each.process.poll()
            if status is None:
                if is_late:
                    each.process.kill()
                continue
            seconds = CANCEL_SECONDS if is_late and status == -signal.SIGKILL else None
            with _log_failure("the end of a flow run was not reported"):  # it is tried again
                settle_flow_run(each.flow, id, status, seconds)
                del self._running[id]

    def _end_all(self) -> int:
        """Ask every flow to end, wait until all have, and return how many had to be killed."""
        if self._running:
            print(
                f"stopping: {len(self._running)} flow(s) save and end first, for at most {PATIENCE_SECONDS:.0f} s; "
                f"another signal after {SAME_SECONDS:.0f} s does not wait for them",
                flush=True,
            )
        for each in self._running.values():
            if each.kill_at is None:  # a second signal would insist
                each.process.terminate()
        until = time.monotonic() + PATIENCE_SECONDS
        while (left := self._alive()) and not self._insists and time.monotonic() < until:
            self._settle_ended()
            time.sleep(_LOOK_SECONDS)
        for process in left:
            process.kill()
        until = time.monotonic() + _REPORT_SECONDS
        while self._running and time.monotonic() < until:
            self._settle_ended()
            time.sleep(_LOOK_SECONDS)
        return len(left)

    def _alive(self) -> "list[subprocess.Popen[bytes]]":
        return [each.process for each in self._running.values() if each.process.poll() is None]


def _start_engine(run: UUID) -> "subprocess.Popen[bytes]":
    """Start the process of a flow run. It ends with this process, and a Ctrl-C in a terminal does not reach it."""
    here = {"PREFECT__FLOW_RUN_ID": str(run), SERVED_BY: str(os.getpid())}
    here["PYTHONSAFEPATH"] = "1"  # no module of the folder is taken for one of ours
    return subprocess.Popen(
        [sys.executable, "-m", "prefect.engine", str(run)],
        env=os.environ | here,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


@contextmanager
def _log_failure(what: str) -> Iterator[None]:
    """Log an error of the server, which is asked again later."""
    try:
        yield
    except Exception as error:  # whatever it is
        log.debug("%s: %s", what, error)
