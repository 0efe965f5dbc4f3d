"""Deployments of all flows and their schedules, for `haed serve` or for the workers of a work pool."""

import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import EntrypointType
from prefect.events import EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled
from prefect.utilities.callables import parameter_schema
from prefect.utilities.collections import deep_merge

from flows.environment import OF_FLOWS, deployment_suffix
from flows.flows import FLOWS
from flows.forms import add_run_choices, list_recent_runs
from pipeline.config import ConfigError

log = logging.getLogger(__name__)
_LOOK_SECONDS = 3.0
_SILENCE = timedelta(minutes=2)  # four heartbeats of a flow that a worker runs
# What belongs to the user once a deployment is there, and is not sent again.
_KEPT = {"schedules", "paused", "concurrency_limit", "concurrency_options", "tags", "description", "parameters"}
_KEPT |= {"enforce_parameter_schema"}


def build_deployments(name: str) -> list[Any]:
    """Return every flow as a deployment, named and tagged by its stage. `name` is the common part of their names."""
    deployments: list[Any] = [
        flow.to_deployment(
            name=f"{flow.name}-{name}",
            tags=[flow.name],
            description=(flow.description or "").split("\n\nArgs:")[0],  # the form has a text for each field
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        for flow in FLOWS
    ]
    for deployment in deployments:
        deployment.model_fields_set.difference_update(_KEPT)  # a new one gets them all the same
    return deployments


def offer_runs(deployments: Mapping[str, UUID], runs: list[str]) -> None:
    """Offer runs in the forms of registered deployments.

    Args:
        deployments: the id of each flow's deployment, by the name of the flow.
        runs: runs as `flows.forms.list_recent_runs` returns them.
    """
    with get_client(sync_client=True) as client:
        for flow in FLOWS:
            schema = parameter_schema(flow)
            add_run_choices(schema.properties, runs)
            # Else a mistyped field of a form's JSON would end the flow before it begins.
            strict = schema.model_dump(exclude_unset=True) | {"additionalProperties": False}
            client.update_deployment(deployments[flow.name], DeploymentUpdate(parameter_openapi_schema=strict))


def keep_offering_runs(deployments: Mapping[str, UUID]) -> None:
    """Offer the runs of this folder in the forms of registered deployments, and start a thread that follows changes."""
    offered = list_recent_runs()
    offer_runs(deployments, offered)

    def follow_changes() -> None:
        nonlocal offered
        while True:
            time.sleep(_LOOK_SECONDS)
            try:
                if (runs := list_recent_runs()) != offered:
                    offer_runs(deployments, runs)
                    offered = runs
            except Exception as error:  # whatever it is: a server that is busy is asked again
                log.debug("forms do not list the existing runs: %s", error)

    threading.Thread(target=follow_changes, daemon=True).start()


def deploy_to_pool(pool: str, folder: Path, image: str, variables: dict[str, Any], limit: int | None) -> list[str]:
    """Register every flow for the workers of a work pool. They need this package installed.

    Args:
        pool: name of the work pool.
        folder: working folder of the flows, with `runs/` and `shards/`. By default, workers of a process pool use a
            temporary folder and delete it afterwards. Workers of other pools use the folder of the image.
        image: in which workers run flows, unless they are of a process pool.
        variables: further job variables of the pool. Existing variables of a deployment are kept unless set here.
        limit: concurrent runs of the pool, over all deployments; None: unchanged.

    Raises:
        ValueError: the pool does not exist, or takes no image.
    """
    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            advice = f"Run prefect work-pool create {pool} --type process"
            raise ValueError(f"there is no work pool {pool!r}. {advice}") from None
        jobs: dict[str, Any] = {}
        if kind == "process":
            jobs["working_dir"] = str(folder.resolve())
            if not folder.is_dir():
                log.warning(
                    "--folder %s: there is no such folder on this machine. The workers need it on theirs", folder
                )
            if image:
                raise ValueError(
                    f"--image {image}: workers of pool {pool} (kind process) start no images. Leave --image out"
                )
        else:
            jobs |= {"image": image} if image else {}
            log.warning(
                "pool %s has kind %s, so runs are kept in the working folder of its image, or in runs_dir=", pool, kind
            )
        jobs = deep_merge(jobs, variables)
        if limit is not None:
            client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=limit))
        name = deployment_suffix(folder, pool) if kind == "process" else pool
        deployments = build_deployments(name)
        for deployment in deployments:
            kept: dict[str, Any] = {"env": OF_FLOWS}
            with suppress(ObjectNotFound):
                known = client.read_deployment_by_name(deployment.full_name)
                kept = deep_merge(kept, known.job_variables or {})
                deployment.work_queue_name = known.work_queue_name
            deployment.job_variables = deep_merge(kept, jobs)
    ids = {deployment.flow_name: deployment.apply(work_pool_name=pool) for deployment in deployments}
    offer_runs(ids, [])
    _crash_silent_runs(name, [str(id) for id in ids.values()])
    return [f"{deployment.flow_name}/{deployment.name}" for deployment in deployments]


def _crash_silent_runs(deployment: str, ids: list[str]) -> None:
    """Create an automation that marks runs as Crashed if their worker has died, which enables Retry.

    A worker reports the end of its runs, but nobody reports the end of a worker.
    """
    name = f"haed: silent runs of {deployment}"
    states = ("Completed", "Failed", "Cancelled", "Crashed", "Paused", "Suspended")  # in which no heartbeat is due
    message = f"silent for {_SILENCE.seconds} s; its worker may have died"
    with get_client(sync_client=True) as client:
        for known in client.read_automations_by_name(name):
            client.delete_automation(known.id)
    of_these: dict[str, str | list[str]] = {
        "prefect.resource.role": "deployment",
        "prefect.resource.id": [f"prefect.deployment.{id}" for id in ids],
    }
    Automation(
        name=name,
        description="Marks runs Crashed that have sent no heartbeat: their worker was killed or its machine went down.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(of_these),
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in states)},
            posture=Posture.Proactive,
            threshold=1,
            within=_SILENCE,
        ),
        actions=[ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=message, force=False)],
    ).create()


def local_timezone() -> str:
    """Return the name of this machine's time zone, which applies to cron lines.

    Raises:
        ConfigError: it is unknown, and not UTC.
    """
    if zone := os.environ.get("TZ", "").lstrip(":"):
        return zone.rpartition("zoneinfo/")[2]
    if zone := str(Path("/etc/localtime").resolve()).partition("zoneinfo/")[2]:
        return zone
    with suppress(OSError):  # of Debian; in a container /etc/localtime may be a copy
        if zone := Path("/etc/timezone").read_text().strip():
            return zone
    if time.localtime().tm_gmtoff:
        raise ConfigError("the time zone of this machine has no name. Set it, such as TZ=Europe/Berlin")
    return "UTC"


def cron_schedule(line: str) -> Any:
    """Return a cron line as a schedule in this machine's time zone.

    Raises:
        ConfigError: it is not a cron line.
    """
    zone = local_timezone()
    try:
        ZoneInfo(zone)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"TZ={zone} is not the name of a time zone, which --cron needs. Set one such as TZ=Europe/Berlin"
        ) from error
    try:
        return CronSchedule(cron=line, timezone=zone)
    except ValueError as error:
        usage = f"Use one such as '0 2 * * *' (time zone {zone})"
        raise ConfigError(f"--cron {line!r} is not a cron line. {usage}") from error


def add_schedule(deployment: UUID, wanted: Any, parameters: dict[str, Any]) -> None:
    """Add a schedule with parameters to a deployment, unless it exists already."""
    with get_client(sync_client=True) as client:
        for known in client.read_deployment_schedules(deployment):
            if getattr(known.schedule, "cron", None) == wanted.cron and known.parameters == parameters:
                return
        new = DeploymentScheduleCreate(schedule=wanted, parameters=parameters)
        client.create_deployment_schedules(deployment, [new])


def describe_schedules(deployments: list[str]) -> list[str]:
    """Return the schedules of the deployments with these names, one per line."""
    lines = []
    with get_client(sync_client=True) as client:
        for deployment in client.read_deployments(deployment_filter=_filter_by_names(deployments)):
            for each in deployment.schedules:
                schedule: Any = each.schedule
                rule = (
                    getattr(schedule, "cron", None) or getattr(schedule, "rrule", None) or f"every {schedule.interval}"
                )
                paused = "" if each.active and not deployment.paused else " (paused)"
                flow = client.read_flow(deployment.flow_id).name
                lines.append(f"{flow} {rule} ({schedule.timezone or 'UTC'}){paused}")
    return lines


def skip_missed(deployments: list[str]) -> int:
    """Cancel scheduled runs whose time passed while nothing served them, and return their number.

    Otherwise they would all start at once.
    """
    missed = {"state": {"type": {"any_": ["SCHEDULED"]}}, "next_scheduled_start_time": {"before_": datetime.now(UTC)}}
    with get_client(sync_client=True) as client:
        is_missed, of_these = FlowRunFilter.model_validate(missed), _filter_by_names(deployments)
        due = client.read_flow_runs(deployment_filter=of_these, flow_run_filter=is_missed, limit=200)
        runs = [run for run in due if run.auto_scheduled and not run.run_count]  # else it is retried
        for run in runs:
            client.set_flow_run_state(
                run.id, Cancelled(message="haed serve was not running at the scheduled time"), force=True
            )
    return len(runs)


def _filter_by_names(deployments: list[str]) -> Any:
    return DeploymentFilter(name=DeploymentFilterName(any_=deployments))
