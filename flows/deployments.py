"""Every flow as a deployment: for `haed serve`, or for the workers of a work pool."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from flows.environment import OF_FLOWS

log = logging.getLogger(__name__)
SILENCE = timedelta(minutes=2)  # four heartbeats of a flow that a worker runs


def deployments(name: str, chain: bool = False) -> list[Any]:
    """Every flow as a deployment of that name, tagged with its stage."""
    from prefect.deployments.runner import EntrypointType
    from prefect.events import DeploymentEventTrigger

    from flows.flows import FLOWS

    after = {"pretrain": "shard", "finetune": "pretrain"} if chain else {}
    template = {"__prefect_kind": "jinja", "template": "{{ event.payload.overrides | tojson }}"}
    parameters = {
        "preset": {"__prefect_kind": "jinja", "template": "{{ event.payload.preset }}"},
        "overrides": {"__prefect_kind": "json", "value": template},
    }
    return [
        flow.to_deployment(
            name=name,
            tags=[flow.name],
            description=(flow.description or "").split("\n\nArgs:")[0],  # the form has a text for each field
            entrypoint_type=EntrypointType.MODULE_PATH,
            triggers=[
                DeploymentEventTrigger(
                    name=f"{flow.name} after {after[flow.name]}",
                    expect={f"haed.{after[flow.name]}.completed"},
                    parameters=parameters,
                )
            ]
            if flow.name in after
            else None,
        )
        for flow in FLOWS
    ]


def deploy(pool: str, folder: Path) -> list[str]:
    """Registers every flow for the workers of a work pool, which must have this package installed.

    Args:
        pool: its name.
        folder: in which workers run flows, so that `runs/` and `shards/` lie there. Left to themselves, workers of a process
            pool run them in a temporary folder, and delete it. Those of other kinds run them where the image says.

    Raises:
        ValueError: there is no such pool.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            raise ValueError(f"no work pool {pool!r}: prefect work-pool create {pool} --type process") from None
    jobs: dict[str, Any] = {"env": OF_FLOWS}
    if kind == "process":
        jobs["working_dir"] = str(folder.resolve())
    else:
        log.warning("pool %s is of kind %s: runs lie in the working folder of its image, or in runs_dir=", pool, kind)
    made = deployments(pool)
    for deployment in made:
        deployment.job_variables = jobs
    _crash_silent_runs(pool, [str(deployment.apply(work_pool_name=pool)) for deployment in made])
    return [f"{deployment.flow_name}/{deployment.name}" for deployment in made]


def _crash_silent_runs(pool: str, ids: list[str]) -> None:
    """An automation that marks runs Crashed which ended with their worker, so that Retry is there.

    A worker tells the server of the end of its runs, but nobody tells of the worker's.
    """
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.events import EventTrigger, Posture, ResourceSpecification
    from prefect.events.actions import ChangeFlowRunState

    name, states = f"haed: silent runs of {pool}", ("Completed", "Failed", "Cancelled", "Crashed")
    message = f"silent for {SILENCE.seconds} s: did its worker die?"
    with get_client(sync_client=True) as client:
        for known in client.read_automations_by_name(name):
            client.delete_automation(known.id)
    of_pool: dict[str, str | list[str]] = {
        "prefect.resource.role": "deployment",
        "prefect.resource.id": [f"prefect.deployment.{id}" for id in ids],
    }
    Automation(
        name=name,
        description="Marks runs Crashed that have sent no heartbeat: their worker was killed or its machine went down.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(of_pool),
            for_each={"prefect.resource.id"},
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{state}" for state in states)},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=message, force=False)],
    ).create()
