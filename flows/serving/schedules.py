"""Schedules of the deployments that `haed serve` serves: those of the command line, and what was missed meanwhile."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError


def timezone() -> str:
    """The name of this machine's time zone, in which a cron line of its command line is meant; UTC if it has none."""
    if zone := os.environ.get("TZ", "").lstrip(":"):
        return zone
    return str(Path("/etc/localtime").resolve()).partition("zoneinfo/")[2] or "UTC"


def cron_schedule(line: str) -> Any:
    """A cron line as a schedule in this machine's time zone.

    Raises:
        ConfigError: it is not a cron line.
    """
    from prefect.client.schemas.schedules import CronSchedule

    try:
        return CronSchedule(cron=line, timezone=timezone())
    except ValueError as error:
        raise ConfigError(f"--cron {line!r}: not a cron line such as '0 2 * * *' (time zone {timezone()})") from error


def add(deployment: Any, wanted: Any, parameters: dict[str, Any]) -> None:
    """Gives a deployment a schedule, unless it has it already, with these parameters."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate

    id = deployment.apply()
    with get_client(sync_client=True) as client:
        for known in client.read_deployment_schedules(id):
            if getattr(known.schedule, "cron", None) == wanted.cron and known.parameters == parameters:
                return
        client.create_deployment_schedules(id, [DeploymentScheduleCreate(schedule=wanted, parameters=parameters)])


def lines(deployments: list[str]) -> list[str]:
    """What is scheduled in the deployments of these names, a line each."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return [
            f"{client.read_flow(found.flow_id).name} {_line(each.schedule)}"
            + ("" if each.active and not found.paused else " (paused)")
            for found in client.read_deployments(deployment_filter=_named(deployments))
            for each in found.schedules
        ]


def skip_missed(deployments: list[str]) -> int:
    """Cancels what schedules wanted to start while nothing served it, which would otherwise start all at once; how many."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Cancelled

    missed = {
        "state": {"type": {"any_": ["SCHEDULED"]}},
        "next_scheduled_start_time": {"before_": datetime.now(UTC)},
    }
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=_named(deployments), flow_run_filter=FlowRunFilter.model_validate(missed), limit=200
        )
        runs = [run for run in found if run.auto_scheduled]
        for run in runs:
            client.set_flow_run_state(run.id, Cancelled(message="haed serve was not running at its time"), force=True)
    return len(runs)


def _named(deployments: list[str]) -> Any:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    return DeploymentFilter(name=DeploymentFilterName(any_=deployments))


def _line(schedule: Any) -> str:
    """A cron line with its time zone, or what stands for another kind of schedule."""
    said = getattr(schedule, "cron", None) or getattr(schedule, "rrule", None) or f"every {schedule.interval}"
    return f"{said} ({schedule.timezone or 'UTC'})"
