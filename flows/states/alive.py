"""Who is there: the server, and the process that a flow run runs in, so that only runs are called dead whose process is.

A flow writes its host, process and the start of that process, since numbers of processes are used again, into the labels of
its run.
"""

import http.client
import logging
import os
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)
_UNFINISHED = ["RUNNING", "PENDING", "CANCELLING"]
_POLL_SECONDS = 2.0
HOST, PROCESS, STARTED = "haed.host", "haed.process", "haed.started"


def answers(address: str) -> bool:
    """Whether a healthy server is there."""
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # nothing, or something else
        return False


def record() -> None:
    """Labels the flow run of a deployment with the process it is in. Stages within a flow are as alive as that."""
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return
    here: dict[str, Any] = {HOST: socket.gethostname(), PROCESS: os.getpid()}
    here[STARTED] = started(os.getpid()) or ""  # without /proc it counts as dead
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(context.flow_run.id, here)
    except Exception as error:  # whatever it is: the server's troubles are not the flow's
        log.debug("no record of the process: %s", error)


def tag(*runs: str) -> None:
    """Tags this flow run, or stage of one, with `run:NAME`, by which the UI finds all that was done with a run."""
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    tags = list(dict.fromkeys([*context.flow_run.tags, *(f"run:{run}" for run in runs)]))
    try:
        with get_client(sync_client=True) as client:
            client.update_flow_run(context.flow_run.id, tags=tags)
    except Exception as error:  # likewise
        log.debug("no tags: %s", error)


def mark_dead(deployments: list[str]) -> list[str]:
    """Marks runs as Crashed that an earlier `haed serve` of these deployments has left, so that Retry is there.

    The caller serves them alone, so what has not begun begins no more. What still saves is marked when it has ended, by a
    thread, unless it could tell of its end itself. What another machine runs is left alone.

    Returns:
        The names of the runs that are marked now.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter

    of_these = DeploymentFilter(name=DeploymentFilterName(any_=deployments))
    with get_client(sync_client=True) as client:
        unfinished = FlowRunFilter.model_validate({"state": {"type": {"any_": _UNFINISHED}}})
        left = client.read_flow_runs(deployment_filter=of_these, flow_run_filter=unfinished, limit=200)
        dead = [run for run in left if not lives(run.labels)]
        for run in dead:
            _mark(client, run.id)
    saving = [run for run in left if run not in dead and run.labels[HOST] == socket.gethostname()]
    if saving:
        threading.Thread(target=_mark_when_dead, args=(saving,), daemon=True).start()
    return [run.name for run in dead]


def _mark_when_dead(runs: list[Any]) -> None:
    from prefect.client.orchestration import get_client

    while runs:
        time.sleep(_POLL_SECONDS)
        for run in [run for run in runs if not lives(run.labels)]:
            with suppress(Exception), get_client(sync_client=True) as client:  # a server that is busy is asked again
                if client.read_flow_run(run.id).state_type in _UNFINISHED:
                    _mark(client, run.id)
                    log.warning("marked as crashed: %s; Retry goes on from its checkpoint", run.name)
                runs.remove(run)


def _mark(client: Any, id: Any) -> None:
    """Marks a flow run, and the stages in it, as Crashed."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Crashed

    client.set_flow_run_state(id, Crashed(message="haed serve ended while it ran"), force=True)
    inner = {"state": {"type": {"any_": _UNFINISHED}}, "parent_flow_run_id": {"any_": [id]}}
    for stage in client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(inner)):
        client.set_flow_run_state(stage.id, Crashed(message="its parent crashed"), force=True)


def lives(labels: dict[str, Any]) -> bool:
    """Whether the process of a run may still be there."""
    if PROCESS not in labels:
        return False
    return labels[HOST] != socket.gethostname() or started(labels[PROCESS]) == labels[STARTED]


def started(process: int) -> str | None:
    """When a process of this machine started, in ticks since the boot; None: it is not there any more."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state, *rest = file.read().rsplit(")", 1)[1].split()
        return None if state in "ZX" else rest[18]
    except OSError:
        return None
