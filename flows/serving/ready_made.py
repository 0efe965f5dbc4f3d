"""Automations that `haed serve` creates switched off: a nightly run, a retry of crashed trainings, and a notification.

Existing ones are left unchanged. Users switch them on in the UI.
"""

from typing import Any

from prefect.automations import Automation
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import StateType
from prefect.events import EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.exceptions import ObjectNotFound

from flows.serving.schedules import cron_schedule

TRAIN = ("haed", "pretrain", "finetune", "train")
NIGHTLY = {"preset": "quickstart", "overrides": ["name=nightly-{date}"]}
_BLOCK = "haed-notification"
_NOWHERE = "http://127.0.0.1:9/"  # until somebody writes the address of a chat or a service into the block


def propose_automations(deployments: list[Any], nightly: bool = True) -> None:
    """Create the schedule and automations for deployments that are about to be served.

    Args:
        deployments: all deployments of a folder, the first of which is that of `haed`.
        nightly: also create the schedule if the deployment is new. A deleted schedule is not created again.
    """
    whole = deployments[0]
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(whole.full_name)
        except ObjectNotFound:
            every_night = DeploymentScheduleCreate(
                schedule=cron_schedule("0 2 * * *"), active=False, parameters=NIGHTLY
            )
            if nightly:
                client.create_deployment_schedules(whole.apply(), [every_night])
    ids = [str(each.apply()) for each in deployments if each.flow_name in TRAIN]
    name = whole.name.removeprefix("haed-")
    _propose_retry(f"haed: a second try of crashed trainings of {name}", ids)
    _propose_notification(f"haed: tell what came of trainings of {name}", ids)


def _propose_retry(name: str, ids: list[str]) -> None:
    retry = ChangeFlowRunState(
        name="AwaitingRetry",
        state=StateType.SCHEDULED,
        message="crashed: tried once more, from its checkpoint",
        force=True,
    )
    about = "Retries a training that crashed in its first try; it goes on from its checkpoint. Switch it on to have it."
    _create_automation(name, about, _run_ended_trigger(ids, "Crashed", {"prefect.run-count": "1"}), retry)


def _propose_notification(name: str, ids: list[str]) -> None:
    with get_client(sync_client=True) as client:
        if client.read_automations_by_name(name):
            return
        try:
            block = client.read_block_document_by_name(_BLOCK, CustomWebhookNotificationBlock.get_block_type_slug()).id
        except ObjectNotFound:
            hook: Any = CustomWebhookNotificationBlock
            block = hook(name=_BLOCK, url=_NOWHERE, json_data={"text": "{{subject}}: {{body}}"}).save(_BLOCK)
    tell = SendNotification(
        block_document_id=block,
        subject="{{ flow_run.name }} {{ flow_run.state.name }}",
        body="{{ flow_run.state.message }}",  # of a completed run its headline
    )
    about = f"Sends what came of a training, its headline or its error. Write an address into the block {_BLOCK} first."
    _create_automation(name, about, _run_ended_trigger(ids, "Completed", {}, "Failed", "Crashed"), tell)


def _run_ended_trigger(ids: list[str], state: str, labels: dict[str, str], *others: str) -> EventTrigger:
    """Return a trigger for flow runs of these deployments that reach one of these states."""
    related: dict[str, str | list[str]] = {
        "prefect.resource.role": "deployment",
        "prefect.resource.id": [f"prefect.deployment.{id}" for id in ids],
    }
    return EventTrigger(
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*", **labels}),
        match_related=ResourceSpecification(related),
        expect={f"prefect.flow-run.{each}" for each in (state, *others)},
        posture=Posture.Reactive,
        threshold=1,
    )


def _create_automation(name: str, about: str, trigger: EventTrigger, action: Any) -> None:
    with get_client(sync_client=True) as client:
        if client.read_automations_by_name(name):
            return
    Automation(name=name, description=about, enabled=False, trigger=trigger, actions=[action]).create()
