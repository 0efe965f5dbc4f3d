"""Detection of live servers and flow processes, so that only runs whose process has ended are marked Crashed.

A flow labels its run with its host, process ID and process start time, because process IDs are reused.
"""

import http.client
import logging
import os
import signal
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.signals import end_with_parent

log = logging.getLogger(__name__)
UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
_STATE: dict[str, Any] = {"state": {"type": {"any_": UNFINISHED}}}
_POLL_SECONDS = 2.0
_PAGE = 200
HOST, PROCESS, STARTED = "haed.host", "haed.process", "haed.started"
RUN = "haed.run"  # folder of the run that a flow trains
SERVER, SERVER_STARTED = "haed.server", "haed.server_started"  # the `haed serve` or worker of it
SERVED_BY = "HAED_SERVED_BY"  # of the environment: the process of `haed serve`
# Names of flows: those that train, other stages that may take hours, and those that answer.
TRAINS = ("haed", "pretrain", "finetune", "train")
LONG = ("shard", "evaluate", "index", "analyse")
ASKS = ("sample", "next", "neighbours", "compare", "report")
ENDED = "the process that ran it, or served it, ended while it ran"
OF_PARENT = "its parent ended while it ran"


def is_server_healthy(address: str) -> bool:
    """Return whether a healthy Prefect server runs at an address."""
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # nothing, or something else
        return False


def label_flow_run() -> None:
    """Label this flow run with its process, and make the process end with the one that serves it.

    Stages within a flow share the process of the outer flow run and get no label.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    if is_served():
        end_with_parent(serving_process_id())
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.parent_task_run_id is not None:
        return
    here: dict[str, Any] = {HOST: socket.gethostname(), PROCESS: os.getpid()}
    here[STARTED] = process_start_ticks(os.getpid()) or ""  # without /proc it counts as dead
    if is_served():
        here |= {SERVER: serving_process_id(), SERVER_STARTED: process_start_ticks(serving_process_id()) or ""}
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(context.flow_run.id, here)
    except Exception as error:  # whatever it is: the server's troubles are not the flow's
        log.debug("no record of the process: %s", error)


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
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    tags = list(dict.fromkeys([*context.flow_run.tags, *(f"run:{run}" for run in runs)]))
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(context.flow_run.id, tags=tags)
            if folder:
                client.update_flow_run_labels(context.flow_run.id, {RUN: str(Path(folder).resolve())})
    except Exception as error:  # likewise
        log.debug("no tags: %s", error)


def crash_orphaned_runs(deployments: list[str], patience: float = 600.0) -> list[str]:
    """Mark runs whose process is gone as Crashed, which enables Retry, and end processes that nobody serves any more.

    These are runs of an earlier `haed serve` of these deployments, and of `haed run` on this machine. The caller must
    be the only server of the deployments, so pending runs will not start either. A thread waits for processes that are
    still saving and then kills them. It checks their start time first, because a process ID may have been reused. Runs
    of other machines and of a live `haed serve` are left alone.

    Args:
        deployments: their names; an empty list: only runs without a deployment are checked.
        patience: seconds until a process is killed.

    Returns:
        The names of the runs marked now.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        dead, saving = [], []
        for run in _read_unfinished_runs(client, deployments):
            is_ours = run.labels.get(HOST, "") == socket.gethostname()
            if not is_alive(run.labels):
                if run.deployment_id is not None or is_ours:
                    dead.append(run)
            elif run.deployment_id is not None and is_ours and not _is_served_now(run.labels):
                saving.append(run)
        for run in dead:
            mark_crashed(client, run.id, ENDED)
        for stage in _read_orphaned_stages(client):
            mark_crashed(client, stage.id, OF_PARENT)
    if saving:
        threading.Thread(target=_wait_and_mark_crashed, args=(saving, patience), daemon=True).start()
    return [run.name for run in dead]


def _read_unfinished_runs(client: Any, deployments: list[str]) -> list[Any]:
    """Return the unfinished runs of these deployments, and those of our flows without a deployment."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowFilter, FlowRunFilter

    of_these = DeploymentFilter(name=DeploymentFilterName(any_=deployments))
    ours = FlowFilter.model_validate({"name": {"any_": [*TRAINS, *LONG, *ASKS]}})
    direct: dict[str, Any] = {"deployment_id": {"is_null_": True}, "parent_task_run_id": {"is_null_": True}}
    of_no_deployment = FlowRunFilter.model_validate(_STATE | direct)
    served = FlowRunFilter.model_validate(_STATE)
    found = _read_all_flow_runs(client, flow_run_filter=served, deployment_filter=of_these) if deployments else []
    return [*found, *_read_all_flow_runs(client, flow_run_filter=of_no_deployment, flow_filter=ours)]


def _read_orphaned_stages(client: Any) -> list[Any]:
    """Return the unfinished stages of flow runs that have ended or were deleted."""
    from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
    from prefect.exceptions import ObjectNotFound

    ours = FlowFilter.model_validate({"name": {"any_": [*TRAINS, *LONG, *ASKS]}})
    inner = FlowRunFilter.model_validate(_STATE | {"parent_task_run_id": {"is_null_": False}})
    found = []
    for stage in _read_all_flow_runs(client, flow_run_filter=inner, flow_filter=ours):
        try:
            outer = client.read_flow_run(client.read_task_run(stage.parent_task_run_id).flow_run_id)
        except ObjectNotFound:
            found.append(stage)
            continue
        if outer.state is not None and outer.state.is_final():
            found.append(stage)
    return found


def _read_all_flow_runs(client: Any, **filters: Any) -> list[Any]:
    """Return all flow runs that match a filter. The server returns at most 200 per request."""
    found: list[Any] = []
    while page := client.read_flow_runs(**filters, limit=_PAGE, offset=len(found)):
        found += page
        if len(page) < _PAGE:
            break
    return found


def _is_served_now(labels: dict[str, Any]) -> bool:
    """Return whether the `haed serve` that started a run's process is still alive."""
    return SERVER in labels and process_start_ticks(labels[SERVER]) == labels[SERVER_STARTED]


def _wait_and_mark_crashed(runs: list[Any], patience: float) -> None:
    """Mark runs as Crashed once their process has ended. Kill processes that exceed the time limit."""
    from prefect.client.orchestration import get_client

    until = time.monotonic() + patience
    while runs:
        for run in [run for run in runs if is_alive(run.labels)] if time.monotonic() > until else []:
            log.warning("%s: process %d has not ended, and is killed", run.name, run.labels[PROCESS])
            with suppress(ProcessLookupError):
                os.kill(run.labels[PROCESS], signal.SIGKILL)
        for run in [run for run in runs if not is_alive(run.labels)]:
            with suppress(Exception), get_client(sync_client=True) as client:  # a server that is busy is asked again
                if client.read_flow_run(run.id).state_type in UNFINISHED:
                    mark_crashed(client, run.id, ENDED)
                    log.warning("marked as crashed: %s; Retry goes on from its checkpoint", run.name)
                runs.remove(run)
        time.sleep(_POLL_SECONDS)


def mark_crashed(client: Any, id: Any, why: str) -> None:
    """Mark a flow run and its stages as Crashed."""
    from prefect.states import Crashed

    client.set_flow_run_state(id, Crashed(message=why), force=True)
    mark_stages_crashed(client, id)


def mark_stages_crashed(client: Any, id: Any) -> None:
    """Mark the unfinished stages and tasks of an ended flow run as Crashed."""
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.states import Crashed

    inner = FlowRunFilter.model_validate(_STATE | {"parent_flow_run_id": {"any_": [id]}})
    for stage in client.read_flow_runs(flow_run_filter=inner):
        mark_crashed(client, stage.id, OF_PARENT)
    of_it = FlowRunFilter.model_validate({"id": {"any_": [id]}})
    for task in client.read_task_runs(flow_run_filter=of_it, task_run_filter=TaskRunFilter.model_validate(_STATE)):
        client.set_task_run_state(task.id, Crashed(message=OF_PARENT), force=True)


def is_alive(labels: dict[str, Any]) -> bool:
    """Return whether the process of a run may still be alive."""
    if PROCESS not in labels:
        return False
    return labels[HOST] != socket.gethostname() or process_start_ticks(labels[PROCESS]) == labels[STARTED]


def process_start_ticks(process: int) -> str | None:
    """Return the start time of a process of this machine, in ticks since boot; None if it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state, *rest = file.read().rsplit(")", 1)[1].split()
        return None if state in "ZX" else rest[18]
    except OSError:
        return None
