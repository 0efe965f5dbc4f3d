"""Schedules of the deployments of `haed serve`: the one of the command line, and runs that were missed meanwhile."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError


def local_timezone() -> str:
    """Return the name of this machine's time zone, which applies to cron lines; UTC if unknown."""
    if zone := os.environ.get("TZ", "").lstrip(":"):
        return zone
    return str(Path("/etc/localtime").resolve()).partition("zoneinfo/")[2] or "UTC"


def cron_schedule(line: str) -> Any:
    """Return a cron line as a schedule in this machine's time zone.

    Raises:
        ConfigError: it is not a cron line.
    """
    from prefect.client.schemas.schedules import CronSchedule

    try:
        return CronSchedule(cron=line, timezone=local_timezone())
    except ValueError as error:
        raise ConfigError(
            f"--cron {line!r}: not a cron line such as '0 2 * * *' (time zone {local_timezone()})"
        ) from error


def add_schedule(deployment: Any, wanted: Any, parameters: dict[str, Any]) -> None:
    """Add a schedule with parameters to a deployment, unless it exists already."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    id = deployment.apply()
    with get_client(sync_client=True) as client:
        for known in client.read_deployment_schedules(id):
            if getattr(known.schedule, "cron", None) == wanted.cron and known.parameters == parameters:
                return
        client.create_deployment_schedules(id, [DeploymentScheduleCreate(schedule=wanted, parameters=parameters)])


def describe_schedules(deployments: list[str]) -> list[str]:
    """Return the schedules of the deployments with these names, one per line."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [
            f"{client.read_flow(found.flow_id).name} {_format_schedule(each.schedule)}"
            + ("" if each.active and not found.paused else " (paused)")
            for found in client.read_deployments(deployment_filter=_filter_by_names(deployments))
            for each in found.schedules
        ]


def skip_missed(deployments: list[str]) -> int:
    """Cancel scheduled runs whose time passed while nothing served them, and return their number.

    Otherwise they would all start at once.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Cancelled

    missed = {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": {"before_": datetime.now(UTC)},
    }
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=_filter_by_names(deployments),
            flow_run_filter=FlowRunFilter.model_validate(missed),
            limit=200,
        )
        runs = [run for run in found if run.auto_scheduled]
        for run in runs:
            client.set_flow_run_state(run.id, Cancelled(message="haed serve was not running at its time"), force=True)
    return len(runs)


def _filter_by_names(deployments: list[str]) -> Any:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    return DeploymentFilter(name=DeploymentFilterName(any_=deployments))


def _format_schedule(schedule: Any) -> str:
    """Format a schedule: its cron line, recurrence rule or interval, with the time zone."""
    said = getattr(schedule, "cron", None) or getattr(schedule, "rrule", None) or f"every {schedule.interval}"
    return f"{said} ({schedule.timezone or 'UTC'})"
