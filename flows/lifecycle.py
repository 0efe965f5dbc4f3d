"""The life of a flow run: how it is labelled, asked to stop, reported when it ends, and settled when its process died.

A flow labels its run with its host, process ID and process start time, because process IDs are reused. Only runs whose
process has ended are marked Crashed.

A training saves before it stops, then Prefect is told in its own terms. Cancel sends SIGTERM. A run that was paused,
suspended, deleted or marked as ended would train on unseen, possibly beside its successor. So `FlowRunWatcher` polls
the server. It also cancels the whole flow after Cancel of one of its stages, and a `haed run` that nobody serves:
Prefect ends processes, and these have none that it knows.

Errors that a user can cause are no crashes and get no traceback, which would hide the line. All others keep theirs.

So many trainings at a time use a device: 1 unless `haed serve --trainings` sets another number. The others wait for a
turn, which is a locked file. The lock is released when its process dies and needs no server. All flows of a user on a
machine share these files, whatever folder they run in.
"""

import contextvars
import fcntl
import logging
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import _RemoteTraceback
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import datetime
from dis import opmap
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, FlowFilter, FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, ObjectNotFound, ParameterTypeError, Pause, TerminationSignal
from prefect.logging.handlers import APILogWorker
from prefect.logging.loggers import flow_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Cancelling, Completed, Crashed, Failed, Scheduled, Suspended
from rich.console import Console

from data.filesystem import FLOW_RUN
from flows.artifacts import ROOMS, log_to_parent_run
from flows.server import is_server_healthy
from pipeline.config import Options
from pipeline.console import cut_middle, format_error, is_out_of_memory
from pipeline.run.checkpoints import resolve_pointer
from pipeline.run.metrics import read_newest_step
from pipeline.run.run_directory import LATEST_FIRST, RunFolder
from pipeline.signals import (
    END_SECONDS,
    StopRequested,
    StopSignal,
    TrainingInterrupted,
    die_with_parent,
    end_with_parent,
    is_running,
)
from pipeline.suggestions import name_flows

log = logging.getLogger(__name__)
UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
_STATE: dict[str, Any] = {"state": {"type": {"any_": UNFINISHED}}}
_SETTLE_SECONDS = 2.0
_PAGE = 200
HOST, PROCESS, STARTED = "haed.host", "haed.process", "haed.started"
RUN = "haed.run"  # folder of the run that a flow trains
SERVER, SERVER_STARTED = "haed.server", "haed.server_started"  # the `haed serve` or worker of it
SERVED_BY = "HAED_SERVED_BY"  # of the environment: the process of `haed serve`
# Flows that train, and flows that answer. All others are stages that may take hours.
TRAINING_FLOWS = ("haed", "pretrain", "finetune", "train")
QUICK_FLOWS = ("sample", "next", "neighbours", "compare", "report", "sweep")
ENDED = "its process or the one that served it ended"
OF_PARENT = "its parent run ended before it did"
EXPECTED = (ValueError, OSError, FloatingPointError, ParameterTypeError)
_WATCH_SECONDS = 3.0
_LONGEST_MESSAGE = 2000  # characters of a state's message, which may repeat what was typed
TRAININGS = "HAED_TRAININGS"  # of the environment: trainings at a time on a device; 0 or nothing: any number
WAITS = "waits for "  # in the log and in the name of a flow run, before what it waits for
_POLL_SECONDS = 0.5


@contextmanager
def log_failure(failure: str) -> Iterator[None]:
    """Only log an error: the server's troubles are not the flow's."""
    try:
        yield
    except Exception as error:  # whatever it is
        log.debug("%s: %s", failure, error)


@contextmanager
def try_client(failure: str) -> Iterator[SyncPrefectClient]:
    """Yield a client of the server, within `log_failure`."""
    with log_failure(failure), get_client(sync_client=True) as client:
        yield client


def _current_run() -> FlowRun | None:
    context = FlowRunContext.get()
    return None if context is None else context.flow_run


def is_inner() -> bool:
    """Return whether this flow run is a stage of another flow run, whose process it shares."""
    run = _current_run()
    return run is not None and run.parent_task_run_id is not None


def label_flow_run() -> None:
    """Label this flow run with its process, and make the process end with the one that serves it.

    Stages within a flow share the process of the outer flow run and get no label.
    """
    if is_served():
        end_with_parent(serving_process_id())
    run = _current_run()
    if run is None or is_inner():
        _stages.extend([] if run is None else [run.id])
        return
    labels: dict[str, Any] = {HOST: socket.gethostname(), PROCESS: os.getpid()}
    labels[STARTED] = process_start_ticks(os.getpid())
    if is_served():
        labels |= {SERVER: serving_process_id(), SERVER_STARTED: process_start_ticks(serving_process_id()) or ""}
    with try_client("no record of the process") as client:
        client.update_flow_run_labels(run.id, labels)
        if run.run_count > 1:  # no process has a stage of an earlier try, and Prefect would not start it again
            mark_stages_crashed(client, run.id)


def is_served() -> bool:
    """Return whether this process was started by `haed serve` or a worker, to run a flow of a deployment."""
    return "PREFECT__FLOW_RUN_ID" in os.environ


def serving_process_id() -> int:
    """Return the ID of the process that started this one for a flow run."""
    return int(os.environ.get(SERVED_BY) or os.getppid())


def tag_flow_run(*runs: str, folder: str | Path = "") -> None:
    """Tag this flow run or stage with `run:NAME`, so that the UI finds all flow runs of a run.

    Args:
        runs: names of the runs.
        folder: folder of the run that is trained, to find its last checkpoint if the process is killed.
    """
    if (current := _current_run()) is None:
        return
    tags = list(dict.fromkeys([*current.tags, *(f"run:{run}" for run in runs)]))
    with try_client("no tags") as client:
        client.update_flow_run(current.id, tags=tags)
        if folder:
            client.update_flow_run_labels(current.id, {RUN: str(Path(folder).resolve())})


def crash_orphaned_runs(deployments: list[str], flows: list[str]) -> list[str]:
    """Mark runs whose process is gone as Crashed, which enables Retry.

    These are runs of an earlier `haed serve` of these deployments, and of `haed run` on this machine. The caller must
    be the only server of the deployments, so pending runs will not start either. A thread waits for processes that are
    still saving. Runs of other machines and of a live `haed serve` are left alone.

    Args:
        deployments: their names; an empty list: only runs without a deployment are checked.
        flows: the names of all flows of this project.

    Returns:
        The names of the runs marked now.
    """
    ours = FlowFilter.model_validate({"name": {"any_": flows}})
    of_these = DeploymentFilter.model_validate({"name": {"any_": deployments}})
    with get_client(sync_client=True) as client:
        unfinished = _read_all_flow_runs(client, flow_run_filter=FlowRunFilter.model_validate(_STATE), flow_filter=ours)
        served = {each.id for each in client.read_deployments(deployment_filter=of_these)} if deployments else set()
        dead, saving = [], []
        for run in unfinished:
            labels = run.labels
            is_here = labels.get(HOST, "") == socket.gethostname()
            if run.parent_task_run_id is not None:
                if _has_lost_parent(client, run):
                    mark_stage_crashed(client, run.id)
            elif run.deployment_id is None:
                if is_here and not is_alive(labels):
                    dead.append(run)
            elif run.deployment_id in served:
                if not is_alive(labels):
                    dead.append(run)
                elif is_here and process_start_ticks(labels.get(SERVER, 0)) != labels.get(SERVER_STARTED, ""):
                    saving.append(run)
        ended = [run.name for run in dead if report_end(client, run, ENDED)]
    if saving:
        threading.Thread(target=_wait_and_mark_crashed, args=(saving,), daemon=True).start()
    return ended


def _has_lost_parent(client: Any, stage: Any) -> bool:
    """Return whether the flow run that a stage belongs to has ended or was deleted."""
    try:
        parent = client.read_flow_run(client.read_task_run(stage.parent_task_run_id).flow_run_id)
    except ObjectNotFound:
        return True
    return parent.state is not None and parent.state.is_final()


def _read_all_flow_runs(client: Any, **filters: Any) -> list[Any]:
    """Return all flow runs that match a filter. The server returns at most 200 per request."""
    runs: list[Any] = []
    while page := client.read_flow_runs(**filters, limit=_PAGE, offset=len(runs)):
        runs += page
        if len(page) < _PAGE:
            break
    return runs


def _wait_and_mark_crashed(runs: list[Any]) -> None:
    """Mark runs as Crashed once their process has ended, unless it reported its end, or the run was retried since."""
    while runs:
        time.sleep(_SETTLE_SECONDS)
        for run in [run for run in runs if not is_alive(run.labels)]:
            with try_client("the end of a flow run could not be reported") as client:  # it is tried again
                state = client.read_flow_run(run.id).state
                is_retried = state is None or state.id != run.state_id and not state.is_cancelling()
                if state is not None and state.type in UNFINISHED and not is_retried:
                    run.state = state
                    if report_end(client, run, ENDED):
                        log.warning("marked as crashed: %s. Retry resumes from its checkpoint", run.name)
                runs.remove(run)


def mark_stage_crashed(client: Any, flow_run_id: Any) -> None:
    """Mark a stage of an ended flow run and its own stages as Crashed."""
    client.set_flow_run_state(flow_run_id, Crashed(message=OF_PARENT), force=True)
    mark_stages_crashed(client, flow_run_id)


def mark_stages_crashed(client: Any, flow_run_id: Any) -> None:
    """Mark the unfinished stages and tasks of an ended flow run as Crashed."""
    inner = FlowRunFilter.model_validate(_STATE | {"parent_flow_run_id": {"any_": [flow_run_id]}})
    for stage in client.read_flow_runs(flow_run_filter=inner):
        mark_stage_crashed(client, stage.id)
    of_it = FlowRunFilter.model_validate({"id": {"any_": [flow_run_id]}})
    for task in client.read_task_runs(flow_run_filter=of_it, task_run_filter=TaskRunFilter.model_validate(_STATE)):
        client.set_task_run_state(task.id, Crashed(message=OF_PARENT), force=True)


def is_alive(labels: dict[str, Any]) -> bool:
    """Return whether the process of a run may still be alive."""
    if PROCESS not in labels:
        return False
    return labels[HOST] != socket.gethostname() or process_start_ticks(labels[PROCESS]) == labels[STARTED]


def process_start_ticks(process: int) -> str | None:
    """Return the start time of a process of this machine, in ticks since boot; None if it has ended.

    It is empty if the process runs, and the system does not tell when it started, as macOS.
    """
    with suppress(OSError), open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        state, *rest = file.read().rsplit(")", 1)[1].split()
        return None if state in "ZX" else rest[18]
    return "" if process and is_running(process) else None


_is_training = False  # within `stop_on_signals`, which takes the signals
_ends: list[BaseException] = []  # what ends the flow. Prefect sends the signal again at the end of each stage
_stages: list[UUID] = []  # flow runs of this process within another one


@contextmanager
def end_when_stopped(is_whole: bool = True) -> Iterator[None]:
    """Within a flow, but not in its training, raise at SIGTERM, and when the server no longer has it as running.

    Python ignores what is raised while it deletes an object, so it is raised again after `END_SECONDS`.

    Args:
        is_whole: the flow is no stage of another one. Only such a flow asks the server.

    Raises:
        TerminationSignal: SIGTERM.
        Pause: the run was paused or suspended.
        Abort: the run was deleted or marked as ended.
    """

    def end(watch: FlowRunWatcher) -> None:
        _ends.append(watch.finish_runs())
        os.kill(os.getpid(), signal.SIGTERM)

    def handler(*_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, END_SECONDS)
        raise _ends[0] if _ends else TerminationSignal(signal=signal.SIGTERM)

    if is_whole:
        _ends.clear()
        _stages.clear()
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGALRM)}
    try:
        with FlowRunWatcher(end) if is_whole else nullcontext():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, previous in before.items():
            signal.signal(number, previous)


def _check_not_cancelled() -> None:
    """Raise TerminationSignal if this run was cancelled, whose signal is on its way; Prefect would refuse its end."""
    if (run := _current_run()) is not None:
        with try_client("the server does not answer about this run") as client:  # TerminationSignal is no Exception
            state = client.read_flow_run(run.id).state
            if state is not None and state.is_cancelling():
                raise TerminationSignal(signal=signal.SIGTERM)


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
    stop = StopSignal()

    def handler(number: int, _: object) -> None:
        if stop.handle_signal(number):
            raise _exception_for_signal(number)

    global _is_training
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    _is_training = True
    if is_served():  # when the process that serves flows is killed, training saves and ends
        # Nobody reads its lines then; rich, with which Prefect writes them, would end the process at the next one.
        Console.on_broken_pipe = lambda self: None  # type: ignore[method-assign]
        end_with_parent(serving_process_id(), signal.SIGTERM)
    try:
        with FlowRunWatcher() as watch:
            yield lambda: stop() or watch.stopped is not None
    except (TrainingInterrupted, StopRequested) as error:
        is_orphan = serving_process_id() != os.getppid()
        if is_orphan and not is_server_healthy(str(PREFECT_API_URL.value()).removesuffix("/api")):
            log.info("%s. The server is gone, so it is not told", error)  # Prefect would try for minutes
            logging.shutdown()
            os._exit(128 + signal.SIGTERM)
        raise (_exception_for_signal(stop.number) if stop() else watch.finish_runs()) from error
    finally:
        if is_served():
            die_with_parent(signal.SIGKILL)  # there is nothing more to save
        _is_training = False
        for number, previous in before.items():
            signal.signal(number, previous)


def _exception_for_signal(number: int | None) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else TerminationSignal(signal=signal.SIGTERM)


class FlowRunWatcher:
    """A thread that polls the server for the state of this flow run and its parent; a context manager.

    A server that does not answer is no reason to stop.

    Args:
        end: called in the thread once the run is to stop. A watcher with it is that of a whole flow. It does nothing while
            a stage trains, which has a watcher of its own.
    """

    def __init__(self, end: "Callable[[FlowRunWatcher], object] | None" = None) -> None:
        self._end = end
        ids = (os.environ.get("PREFECT__FLOW_RUN_ID"), flow_run.id, flow_run.parent_flow_run_id)
        self._runs = [UUID(run) for run in dict.fromkeys(ids) if run]
        self._is_cancelled = False
        self._ended = threading.Event()
        # In the settings of `haed run`, which name its server; without them Prefect would start another one.
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._poll_server,), daemon=True)
        self.stopped: tuple[UUID, State | None] | None = None  # the run, and its state; none if it was deleted

    def __enter__(self) -> "FlowRunWatcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _poll_server(self) -> None:
        while self.stopped is None and not self._ended.is_set():
            try:
                with get_client(sync_client=True) as client:  # of all requests: making one costs more than a request
                    while self.stopped is None and not self._ended.wait(_WATCH_SECONDS):
                        if self._end is not None and _is_training:  # a second signal would insist
                            continue
                        states = read_states(client, self._runs)
                        self._look_at_states(states)
                        self._cancel_outer_run(client, states)
            except Exception as error:  # whatever it is
                log.debug("the server does not answer about this run: %s", error)
                self._ended.wait(_WATCH_SECONDS)

    def _look_at_states(self, states: dict[UUID, State]) -> None:
        gone = [run for run in self._runs if (state := states.get(run)) is None or state.type not in UNFINISHED]
        if gone:
            self.stopped = gone[0], states.get(gone[0])
            log.info("the run was %s: %s", self._describe_state(), "stopping" if self._end else "saving, then stopping")
            if self._end is not None:
                self._end(self)

    def _cancel_outer_run(self, client: SyncPrefectClient, states: dict[UUID, State]) -> None:
        cancelled = [run for run, state in states.items() if state.is_cancelling()]
        if self._is_cancelled or not cancelled:
            return
        outer = self._runs[0 if is_served() else -1]
        if outer not in cancelled:
            client.set_flow_run_state(outer, Cancelling(), force=True)
        self._is_cancelled = True
        if not is_served():
            os.kill(os.getpid(), signal.SIGTERM)

    def _describe_state(self) -> str:
        assert self.stopped is not None
        state = self.stopped[1]
        return "deleted" if state is None else f"set to {state.name}"

    def finish_runs(self) -> BaseException:
        """Set states on the server that can be continued, and return the exception that ends Prefect's engine quietly.

        Resume restarts a suspended run but expects a paused one to be alive, so paused runs become suspended. A run
        that was resumed meanwhile starts again.
        """
        assert self.stopped is not None
        run, state = self.stopped
        paused = state is not None and state.is_paused()
        is_inner_run = run != self._runs[0]
        ending = "saved and stopped" if _is_training else "stopped"
        message = f"{ending}: its {'part' if is_inner_run else 'parent'} was {self._describe_state()}"
        with try_client("the state of a stopped run could not be set") as client:
            if state is not None and paused and not is_inner_run:
                now = client.read_flow_run(run).state
                if now is not None and now.is_running():
                    client.set_flow_run_state(run, Scheduled(name="Resuming"), force=True)
                elif now is not None and now.id == state.id and not state.state_details.pause_reschedule:
                    client.set_flow_run_state(run, Suspended(), force=True)
            for other in self._runs:
                if other != run:
                    is_outer = paused and other == self._runs[0]
                    last: State = Suspended(message=message) if is_outer else Crashed(message=message)
                    client.set_flow_run_state(other, last, force=True)
            if paused and is_inner_run:  # Resume on its page would let it seem to run, without a process
                client.set_flow_run_state(run, Crashed(message="paused, and saved. Resume its parent run"), force=True)
            stages = {} if _is_training or not _stages else read_states(client, _stages)
            for stage, left in stages.items():
                if left.type in UNFINISHED:  # a deleted run no longer says which are its own
                    client.set_flow_run_state(stage, Crashed(message=message), force=True)
        return Pause(state=state) if paused else Abort(message)


def read_flow_runs(client: SyncPrefectClient, ids: Iterable[UUID]) -> dict[UUID, FlowRun]:
    """Return these runs by ID, without those that the server does not have."""
    selected = FlowRunFilter.model_validate({"id": {"any_": list(ids)}})
    return {run.id: run for run in _read_all_flow_runs(client, flow_run_filter=selected)}


def read_states(client: SyncPrefectClient, ids: Iterable[UUID]) -> dict[UUID, State]:
    """Return the states of these runs, without those that the server does not have."""
    return {id: run.state for id, run in read_flow_runs(client, ids).items() if run.state is not None}


def settle_flow_run(flow_run_id: UUID, status: int, cancel_seconds: float | None, is_cancelled: bool) -> None:
    """Report how a flow run ended whose process has ended without doing so: in its state and in its log.

    Args:
        flow_run_id: the flow run.
        status: exit status of the process; negative: the signal that ended it.
        cancel_seconds: seconds after which the process was killed, as it had not ended after Cancel; None: it was not.
        is_cancelled: it was sent a signal after Cancel. Prefect takes one that comes after the flow's work for a crash.
    """
    with suppress(ObjectNotFound), get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
        if is_cancelled and run.state is not None and run.state.is_crashed():
            message = "cancelled when its work was done or nearly so; Retry does the rest"
            client.set_flow_run_state(flow_run_id, Cancelled(message=message), force=True)
            flow_run_logger(run).error("%s", message)
        if run.state is None or run.state.type not in UNFINISHED:
            return
        if cancel_seconds is not None:
            ending = f"killed, because it did not end within {cancel_seconds:.0f} s after Cancel"
        elif run.state.is_cancelling():
            ending = "cancelled"
        else:
            ending = f"its process {'was killed' if status < 0 else f'ended with status {status}'}"
        report_end(client, run, ending)


def bare_run_name(name: str) -> str:
    """Return the name of a flow run without what it waits for."""
    return name.partition(f" · {WAITS}")[0]


def report_end(client: Any, run: FlowRun, ending: str) -> bool:
    """Report, in the state and the log of a flow run, how it ended and what was saved.

    Returns:
        Whether it crashed. If not, it ended after Cancel.
    """
    kept = " before the flow began"
    if PROCESS in run.labels:
        try:
            kept = f": {describe_saved_progress(client.read_flow(run.flow_id).name, run.labels)}"
        except (OSError, ValueError) as error:  # the end is reported all the same
            kept = f". What it saved cannot be read: {error}"
    is_cancelled = run.state is not None and run.state.is_cancelling()
    last: State = Cancelled(message=f"{ending}{kept}") if is_cancelled else Crashed(message=f"{ending}{kept}")
    mark_stages_crashed(client, run.id)  # first: once the run has ended, nothing of it is settled again
    if (name := bare_run_name(run.name)) != run.name:
        client.update_flow_run(run.id, name=name)
    client.set_flow_run_state(run.id, last, force=True)
    flow_run_logger(run).error("%s", last.message)
    return not is_cancelled


def describe_saved_progress(flow: str, labels: dict[str, Any]) -> str:
    """Describe the last checkpoint of a killed training, from its run folder, and the lost steps."""
    if flow not in TRAINING_FLOWS:
        return "unfinished work is lost; Retry repeats it"
    if RUN not in labels:
        return "its work since the last checkpoint is lost; Retry resumes from there"
    run = RunFolder(Path(labels[RUN]))
    lines = {phase: run.phase_folder(phase) / "metrics.jsonl" for phase in LATEST_FIRST}
    phases: list[tuple[float, str, int, int]] = []
    for phase, path in lines.items():
        if path.is_file():
            latest = resolve_pointer(run.phase_folder(phase) / "checkpoints", "latest")
            saved = 0 if latest is None else int(latest.name.removeprefix("step-"))
            done = read_newest_step(path)
            newest = path if done > saved or latest is None else latest  # a finished phase is looked at again by Retry
            phases.append((newest.stat().st_mtime, phase, saved, done))
    if not phases:
        return "no step was saved; Retry does the rest"
    _, last, saved, done = max(phases)
    number = f"at least {done - saved:,}" if done > saved else ""
    if not saved:
        return f"no step of {last} was saved, so its steps are lost{number and f', {number}'}; Retry starts it again"
    return f"saved step {saved:,} of {last}; {number or 'any'} steps after it are lost; Retry resumes from there"


def finish_flow_run(stage: str, work: Callable[[], Any], summarize: Callable[[Any], str]) -> State[Any]:
    """Run a flow's work and return its final state.

    Args:
        stage: name of the flow.
        work: returns the flow's result.
        summarize: returns the one-line summary of the result.

    Raises:
        BaseException: an error that the user did not cause, or one that ends a process.
    """
    takes_signals = threading.current_thread() is threading.main_thread()
    try:
        with end_when_stopped(not is_inner()) if takes_signals else nullcontext():
            result = work()
            if takes_signals and is_served() and not is_inner():
                _check_not_cancelled()
        message = name_flows(summarize(result))
        if stage != "haed" or is_served():  # a terminal prints the result of `haed` by itself
            log.info("%s: %s", stage, message)
        log_to_parent_run("%s: %s", stage, message)
        return Completed(message=message, data=result)
    except TerminationSignal as error:
        _ends.append(error)
        _finish_stopped_run(error)
        raise
    except Exception as error:
        if not is_user_error(error):
            raise
        inner = next(iter(getattr(error, "__notes__", ())), "")  # the stage of this flow in which it came up
        if not inner:
            error.add_note(stage)
        text = cut_middle(name_flows(format_error(error, inner or stage)), _LONGEST_MESSAGE)
        return Failed(message=f"{inner}{': ' if inner else ''}{text}", data=error)


def is_user_error(error: BaseException | None) -> bool:
    """Return whether an error comes from the user's input or the machine, so that its message is enough.

    As on the command line, these are ValueError, OSError, FloatingPointError and exhausted memory, and also Prefect's
    ParameterTypeError. A ValueError or FloatingPointError counts only if our own code raised it, or if it comes from
    a pool process. One from a library, in Python or C, is a bug of ours.
    """
    if error is not None and is_out_of_memory(error):
        return True
    if not isinstance(error, EXPECTED) or error.__traceback__ is None:
        return False
    if isinstance(error, OSError | ParameterTypeError) or isinstance(error.__cause__, _RemoteTraceback):
        return True  # that of a process of a pool has its traceback as a text only
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    ours = last.tb_frame.f_globals.get("__name__", "").split(".")[0] in ROOMS
    return ours and last.tb_frame.f_code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]


def keep_record(record: logging.LogRecord) -> bool:
    """Return whether a log record of Prefect is no user error and no result, which are logged already.

    A record of a failed state becomes an error.
    """
    message = str(record.msg)
    if message.startswith("Finished in state Failed("):
        record.levelno, record.levelname = logging.ERROR, "ERROR"
    is_user = record.exc_info and is_user_error(record.exc_info[1])
    return not is_user and _is_not_completion(record)


def _is_not_completion(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("Finished in state Completed(")


def drop_tracebacks() -> None:
    """Stop Prefect's engine from logging tracebacks of user errors and of a server that starts anew, and success twice."""

    def drop_traceback(record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        return True

    logging.getLogger("prefect.flow_runs").addFilter(keep_record)
    logging.getLogger("prefect.task_runs").addFilter(_is_not_completion)
    logging.getLogger("prefect.FlowRunSuspendingObserver").addFilter(drop_traceback)


def _finish_stopped_run(error: TerminationSignal) -> None:
    """Set the final state of this flow run, with a message on what was saved.

    Prefect's engine has no message for this case and leaves a final state alone.
    """
    saved = str(error.__cause__ or "stopped")
    message = f"{saved}; Retry {'resumes from there' if saved.startswith('saved') else 'does the rest'}"
    log.info("%s", message)
    if (run := _current_run()) is None:
        return
    with try_client("the state of a stopped run could not be set") as client:
        outer = client.read_flow_run(UUID(os.environ.get("PREFECT__FLOW_RUN_ID") or str(run.id))).state
        is_cancelled = outer is not None and (outer.is_cancelling() or outer.is_cancelled())
        last: State[Any] = Cancelled(message=message) if is_cancelled else Crashed(message=message)
        run.state = client.set_flow_run_state(run.id, last, force=True).state
    with suppress(Exception):
        APILogWorker.drain_all(timeout=5)  # the signal comes again, and ends the process


@contextmanager
def acquire_device(options: Options, stop: Callable[[], bool]) -> Iterator[None]:
    """Wait until the devices of a training are free, and hold them.

    Raises:
        TrainingInterrupted: `stop` became true while waiting.
        BlockingIOError: the devices are busy and another process is training this run.
    """
    limit = int(os.environ.get(TRAININGS) or 0)
    names = list_training_devices(options) if limit else []
    with ExitStack() as held:
        if others := _try_acquire(names, limit, held):
            run = RunFolder.from_options(options)
            if run.path.is_dir():  # a second flow of a run that trains is refused, and need not wait for that
                with run.lock():
                    pass
            _wait_for_devices(names, limit, held, others, stop)
        yield


def _wait_for_devices(names: list[str], limit: int, held: ExitStack, others: str, stop: Callable[[], bool]) -> None:
    """Wait, and tell in the log and in the name of the flow run behind whom. The name is restored afterwards."""
    name, began, logged, shown = os.environ.get(FLOW_RUN, ""), time.monotonic(), "", ""
    try:
        while others:
            note = f"{WAITS}{', '.join(names)} behind {others}"
            if note != logged:
                log.info("%s", note)
                log_to_parent_run("%s", note)
                logged = note
            if stop():
                raise TrainingInterrupted("it was waiting for its turn, so there is nothing to save")
            if note != shown and _rename_flow_run(f"{name} · {note}"):
                shown = note
            time.sleep(_POLL_SECONDS)
            others = _try_acquire(names, limit, held)
    finally:
        if not _rename_flow_run(name):
            log.warning("the server did not answer, so the run's name may still say that it waits")
    log.info("has its turn after %.0f s", time.monotonic() - began)


def list_training_devices(options: Options) -> list[str]:
    """Return the names of the devices that a training uses, the same in all processes of this machine, for names of files."""
    import torch

    kind, _, number = options.device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind != "cuda":
        return [kind]
    wanted = [int(number)] if number.isdigit() else range(options.launcher.processes)
    visible = [quote(name.strip(), safe="") for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return [f"cuda:{visible[n] if n < len(visible) and visible[n] else n}" for n in wanted]


def _try_acquire(names: list[str], limit: int, held: ExitStack) -> str:
    """Lock every device, or none if one is busy. Return who holds the busy one, or an empty string."""
    with ExitStack() as taken:
        for name in names:
            files = [taken.enter_context(open(_lock_folder() / f"{name}.{slot}", "a+")) for slot in range(limit)]
            lock = next(filter(_try_lock_file, files), None)
            if lock is None:
                for file in files:
                    file.seek(0)
                holders = (file.read(400).strip() for file in files)
                return ", ".join(filter(None, holders)) or "another training"  # which has not written its name yet
            lock.truncate(0)
            name = os.environ.get(FLOW_RUN, "a training")
            lock.write(f"{name} (since {datetime.now():%Y-%m-%d %H:%M}, process {os.getpid()})")
            lock.flush()
        held.enter_context(taken.pop_all())
    return ""


def _try_lock_file(file: Any) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _lock_folder() -> Path:
    """Return the folder of lock files of this user, shared by all of the user's flows on this machine."""
    path = Path(tempfile.gettempdir()) / f"haed-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of yours. Move it away, or set TMPDIR")
    return path


def _rename_flow_run(name: str) -> bool:
    """Rename the flow run, if there is one, and return whether this succeeded."""
    if flow_run.id is None:
        return True
    with try_client("not renamed") as client:
        client.update_flow_run(UUID(flow_run.id), name=name)
        return True
    return False
