"""The dispatcher of `haed serve`: it starts due flow runs as child processes, until it is told to stop.

It takes the place of Prefect's runner, with the public client alone and the program that workers of Prefect start,
`python -m prefect.engine`. At Ctrl-C or SIGTERM Prefect's runner cancels its flows and kills them after 30 s. Here no
new run starts, each flow gets one SIGTERM, and the dispatcher waits until the last flow has saved and ended.

Each kind of flow has its own limit. So waiting trainings and stages that take hours leave room for queries.

A server that hangs keeps no signal waiting: the first one interrupts a request, a later one ends the wait.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import SetStateStatus
from prefect.logging.loggers import flow_run_logger
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_RUNNER_POLL_FREQUENCY,
    PREFECT_RUNNER_PROCESS_LIMIT,
    temporary_settings,
)
from prefect.states import Crashed, Pending

from flows.lifecycle import (
    QUICK_FLOWS,
    SERVED_BY,
    TRAINING_FLOWS,
    bare_run_name,
    log_failure,
    read_flow_runs,
    read_states,
    settle_flow_run,
)
from pipeline.signals import (
    SAME_SECONDS,
    StopRequested,
    StopSignal,
    die_with_parent,
    end_interruptible,
    interruptible_section,
)

PATIENCE_SECONDS = 600.0  # for a slow step, a validation and a checkpoint
CANCEL_SECONDS = 30.0  # as Prefect's runner and workers wait
_REPORT_SECONDS = 15.0  # for the states of flows that were killed
_REQUEST_SECONDS = 30.0  # until a request counts as failed
_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 2.0  # after an end that the server did not take
_WAITING_BYTES = 1 << 29  # memory of a training that waits for its turn, on a CPU


@dataclass
class FlowProcess:
    """The process of a flow run.

    Attributes:
        flow: name of the flow.
        process: the process.
        began: when it was started.
        kill_at: when it is killed, if the run has been cancelled.
        report_at: when its end is next reported.
    """

    flow: str
    process: "subprocess.Popen[bytes]"
    began: datetime = field(default_factory=datetime.now)
    kill_at: float | None = None
    report_at: float = 0.0


def run_flows(deployments: Mapping[str, UUID]) -> None:
    """Run the flows of deployments in the foreground until SIGINT or SIGTERM.

    Args:
        deployments: the id of each flow's deployment, by the name of the flow.

    Raises:
        RuntimeError: flows were killed before they had saved, by a second signal or after the time limit.
    """
    stop = StopSignal()
    # This loop asks again itself. Within a request that is repeated it would not notice a signal.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: _REQUEST_SECONDS}):
        killed = FlowDispatcher(deployments, stop).run()
    for handler in logging.getLogger("prefect.flow_runs").handlers:
        handler.flush()  # while there is a server
    if killed:
        raise RuntimeError(f"{killed} flow(s) were killed before they ended, so their work since the last save is lost")


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
        others = tuple(flow for flow in deployments if flow not in (*TRAINING_FLOWS, *QUICK_FLOWS))
        self._kinds = ((TRAINING_FLOWS, max_training_processes()), (others, limit), (QUICK_FLOWS, limit))
        self._deployments, self._stop = deployments, stop
        self._running: dict[UUID, FlowProcess] = {}
        self._logged_waits: dict[UUID, str] = {}  # what waiting runs were told

    def run(self) -> int:
        """Dispatch until a signal, then end all flows. Return how many had to be killed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._take_signal)
        with suppress(StopRequested):
            self._dispatch()
        return self._end_all()

    def _dispatch(self) -> None:
        every, due = float(PREFECT_RUNNER_POLL_FREQUENCY.value()), 0.0
        with get_client(sync_client=True) as client:
            while not self._stop():
                with interruptible_section():
                    self._settle_ended()
                if time.monotonic() >= due:
                    due = time.monotonic() + every
                    with log_failure("the server could not be asked for cancelled runs"), interruptible_section():
                        self._end_cancelled(client)
                    for kind in self._kinds:  # what fails for one does not keep the others from starting
                        with log_failure("the server could not be asked for runs"), interruptible_section():
                            self._start_due_runs(client, *kind)
                time.sleep(_LOOK_SECONDS)

    def _take_signal(self, number: int, _: object) -> None:
        """Record a signal. It raises StopRequested if it insists, or within a request of `_dispatch`."""
        if self._stop.handle_signal(number):
            raise StopRequested

    def _start_due_runs(self, client: SyncPrefectClient, names: tuple[str, ...], limit: int) -> None:
        """Start due runs of a kind, the oldest first, as far as its limit allows."""
        ids = {id: flow for flow, id in self._deployments.items() if flow in names}
        runs = client.get_scheduled_flow_runs_for_deployments(list(ids), scheduled_before=datetime.now(UTC))
        end_interruptible()  # a run that was made Pending is started too
        for run in runs:
            if self._stop():
                return
            if run.deployment_id not in ids or run.id in self._running:
                continue
            if sum(each.flow in names for each in self._running.values()) >= limit:
                return self._explain_wait(client, [run for run in runs if run.id not in self._running], names)
            accepted = True  # without an answer it may be Pending. Its process asks the server again before it begins
            with log_failure("a due run could not be set to Pending"):
                accepted = client.set_flow_run_state(run.id, Pending()).status == SetStateStatus.ACCEPT
            if not accepted:
                continue
            try:
                self._running[run.id] = FlowProcess(ids[run.deployment_id], _start_engine(run.id))
            except OSError as error:
                message = f"its process could not be started: {error}"
                client.set_flow_run_state(run.id, Crashed(message=message), force=True)
            self._logged_waits.pop(run.id, None)

    def _explain_wait(self, client: SyncPrefectClient, waiting: list[Any], names: tuple[str, ...]) -> None:
        """Log on the pages of waiting runs which runs have their places, whenever those change."""
        began = {id: each.began for id, each in self._running.items() if each.flow in names}
        flow_runs = read_flow_runs(client, began) if waiting else {}  # again each time: a flow renames its run
        named = {id: bare_run_name(flow_runs[id].name) if id in flow_runs else "a deleted run" for id in began}
        behind = ", ".join(f"{named[id]} (since {each:%Y-%m-%d %H:%M})" for id, each in began.items())
        for run in waiting:
            if self._logged_waits.get(run.id) != behind:
                self._logged_waits[run.id] = behind
                flow_run_logger(run).info("waits until one of these ends: %s", behind)

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
            now = time.monotonic()
            is_late = each.kill_at is not None and now > each.kill_at
            if (status := each.process.poll()) is None:
                if is_late:
                    each.process.kill()
                continue
            if now < each.report_at:
                continue
            each.report_at = now + _RETRY_SECONDS
            seconds = CANCEL_SECONDS if is_late and status == -signal.SIGKILL else None
            with log_failure("the end of a flow run could not be reported"):  # it is tried again
                settle_flow_run(id, status, seconds, each.kill_at is not None)
                del self._running[id]

    def _end_all(self) -> int:
        """Ask every flow to end, wait until all have, and return how many had to be killed."""
        end_interruptible()
        if self._running:
            print(
                f"stopping: {len(self._running)} flow(s) save and end first, within {PATIENCE_SECONDS:.0f} "
                f"s. Another signal after {SAME_SECONDS:.0f} s stops at once",
                flush=True,
            )
        with suppress(StopRequested):
            for each in self._running.values():
                if each.kill_at is None:  # a second signal would insist
                    each.process.terminate()
            self._wait_while(self._alive, PATIENCE_SECONDS)
        left = self._alive()
        for process in left:
            process.kill()
        with suppress(StopRequested):
            self._wait_while(lambda: self._running, _REPORT_SECONDS)
        return len(left)

    def _wait_while(self, condition: Callable[[], object], seconds: float) -> None:
        """Report ended runs as long as a condition holds, for some seconds at most."""
        until = time.monotonic() + seconds
        while condition() and time.monotonic() < until:
            self._settle_ended()
            time.sleep(_LOOK_SECONDS)

    def _alive(self) -> "list[subprocess.Popen[bytes]]":
        return [each.process for each in self._running.values() if each.process.poll() is None]


def _start_engine(run: UUID) -> "subprocess.Popen[bytes]":
    """Start the process of a flow run. It ends with this process, and a Ctrl-C in a terminal does not reach it."""
    settings = {"PREFECT__FLOW_RUN_ID": str(run), SERVED_BY: str(os.getpid())}
    settings["PYTHONSAFEPATH"] = "1"  # no module of the folder is taken for one of ours
    return subprocess.Popen(
        [sys.executable, "-m", "prefect.engine", str(run)],
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
