"""Deployments of all flows, for `haed serve` or for the workers of a work pool."""

import hashlib
import logging
import re
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from flows.choices import add_run_choices, list_recent_runs
from flows.serving.environment import OF_FLOWS

log = logging.getLogger(__name__)
LOOK_SECONDS = 3.0
SILENCE = timedelta(minutes=2)  # four heartbeats of a flow that a worker runs


# What belongs to the user once a deployment is there, and is not sent again.
KEPT = {"schedules", "paused", "concurrency_limit", "concurrency_options", "tags", "description", "parameters"}
KEPT |= {"enforce_parameter_schema"}


def deployment_suffix(folder: Path, host: str = "") -> str:
    """Return the common part of the names of a folder's deployments: host, folder name, and digits of a hash of both.

    Args:
        folder: where the deployments run.
        host: name of a host or work pool, to tell apart those that share a server.
    """
    digits = hashlib.sha256(f"{host}:{folder.resolve()}".encode()).hexdigest()[:4]
    return "-".join([*filter(None, [host]), re.sub(r"[^\w.]+", "-", folder.resolve().name) or "root", digits])


def list_deployment_names(name: str) -> list[str]:
    """Return the names of a folder's deployments, one per stage."""
    from flows.flows import FLOWS

    return [f"{flow.name}-{name}" for flow in FLOWS]


def build_deployments(name: str, chain: bool = False) -> list[Any]:
    """Return every flow as a deployment, named and tagged by its stage.

    Args:
        name: the common part of their names.
        chain: see `flows.serving.serve.serve_flows`.
    """
    from prefect.deployments.runner import EntrypointType
    from prefect.events import DeploymentEventTrigger

    from flows.flows import FLOWS

    after = {"pretrain": "shard", "finetune": "pretrain", "train": "shard"} if chain else {}
    template = {"__prefect_kind": "jinja", "template": "{{ event.payload.overrides | tojson }}"}
    parameters = {
        "preset": {"__prefect_kind": "jinja", "template": "{{ event.payload.preset }}"},
        "overrides": {"__prefect_kind": "json", "value": template},
    }
    made: list[Any] = [
        flow.to_deployment(
            name=f"{flow.name}-{name}",
            tags=[flow.name],
            description=(flow.description or "").split("\n\nArgs:")[0],  # the form has a text for each field
            entrypoint_type=EntrypointType.MODULE_PATH,
            triggers=[
                DeploymentEventTrigger(
                    name=f"{flow.name} after {after[flow.name]}",
                    expect={f"haed.{after[flow.name]}.completed"},
                    match={"haed.deployment": f"{after[flow.name]}-{name}", "haed.next": flow.name},
                    parameters=parameters,
                )
            ]
            if flow.name in after
            else None,
        )
        for flow in FLOWS
    ]
    for deployment in made:
        deployment.model_fields_set.difference_update(KEPT)  # a new one gets them all the same
    offer_runs(made, [])
    return made


def offer_runs(made: list[Any], runs: list[str]) -> None:
    """Offer these runs in the forms of deployments that are not registered yet."""
    for deployment in made:
        add_run_choices(deployment._parameter_openapi_schema.properties, runs)


def keep_offering(made: list[Any], runs: list[str]) -> None:
    """Start a thread that updates the list of runs in the forms of registered deployments whenever it changes."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentUpdate
    from prefect.utilities.callables import parameter_schema

    from flows.flows import FLOWS

    def look() -> None:
        offered = runs
        while True:
            time.sleep(LOOK_SECONDS)
            if (now := list_recent_runs()) == offered:
                continue
            try:
                with get_client(sync_client=True) as client:
                    for flow, deployment in zip(FLOWS, made, strict=True):
                        schema = parameter_schema(flow)
                        add_run_choices(schema.properties, now)
                        id = client.read_deployment_by_name(deployment.full_name).id
                        client.update_deployment(id, DeploymentUpdate(parameter_openapi_schema=schema.model_dump()))
                offered = now
            except Exception as error:  # whatever it is: a server that is busy is asked again
                log.debug("forms do not list the runs of now: %s", error)

    threading.Thread(target=look, daemon=True).start()


def deploy_to_pool(
    pool: str, folder: Path, image: str = "", variables: dict[str, Any] | None = None, limit: int | None = None
) -> list[str]:
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
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    with get_client(sync_client=True) as client:
        try:
            kind = client.read_work_pool(pool).type
        except ObjectNotFound:
            raise ValueError(f"no work pool {pool!r}: prefect work-pool create {pool} --type process") from None
        jobs: dict[str, Any] = {"env": OF_FLOWS}
        if kind == "process":
            jobs["working_dir"] = str(folder.resolve())
            if image:
                raise ValueError(f"--image {image}: pool {pool} is of kind process, whose workers start no images")
        else:
            jobs |= {"image": image} if image else {}
            log.warning(
                "pool %s is of kind %s: runs lie in the working folder of its image, or in runs_dir=", pool, kind
            )
        jobs = _merge_nested(jobs, variables or {})
        if limit is not None:
            client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=limit))
        name = deployment_suffix(folder, pool) if kind == "process" else pool
        made = build_deployments(name)
        for deployment in made:
            deployment.job_variables = jobs
            with suppress(ObjectNotFound):
                known = client.read_deployment_by_name(deployment.full_name)
                deployment.job_variables = _merge_nested(known.job_variables or {}, jobs)
                deployment.work_queue_name = known.work_queue_name
    ids = {deployment.flow_name: deployment.apply(work_pool_name=pool) for deployment in made}
    _crash_silent_runs(name, [str(id) for id in ids.values()])
    return [f"{deployment.flow_name}/{deployment.name}" for deployment in made]


def _merge_nested(was: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries. The second one takes precedence."""
    for key, value in now.items():
        before = was.get(key)
        was = was | {
            key: _merge_nested(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        }
    return was


def _crash_silent_runs(deployment: str, ids: list[str]) -> None:
    """Create an automation that marks runs as Crashed if their worker has died, which enables Retry.

    A worker reports the end of its runs, but nobody reports the end of a worker.
    """
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.events import EventTrigger, Posture, ResourceSpecification
    from prefect.events.actions import ChangeFlowRunState

    name, states = f"haed: silent runs of {deployment}", ("Completed", "Failed", "Cancelled", "Crashed")
    message = f"silent for {SILENCE.seconds} s: did its worker die?"
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
            within=SILENCE,
        ),
        actions=[ChangeFlowRunState(name="Crashed", state=StateType.CRASHED, message=message, force=False)],
    ).create()
