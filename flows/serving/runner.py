"""Runs the flows of deployments in this process's children until it is told to stop, and lets their trainings save then.

Left to itself, Prefect's runner ends with its flows: at Ctrl-C or SIGTERM its event loop is cancelled, which kills them at
once, or after 30 s. Here the signals are taken before it: no new run starts, each flow gets one SIGTERM, and the runner goes
on until the last has saved, ended, and told the server so.

Each kind of flow has a runner of its own, with places of its own: trainings that wait for a device, or stages that take hours,
leave those free in which questions are answered.
"""

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from typing import Any

from prefect.runner import Runner, runner
from prefect.runner._state_proposer import StateProposer

from flows.serving.engine import Spare
from flows.states.alive import ASKS, LONG, TRAINS
from flows.states.lost import say_what_is_lost
from pipeline.stopping import SAME_SECONDS, Request

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0  # for a slow step, a validation and a checkpoint
_TO_REPORT_SECONDS = 15.0  # for the states of flows that were killed
_WAITING_BYTES = 1 << 29  # memory of a training that waits for its turn, on a CPU


class _Proposer(StateProposer):
    """Leaves the words in which a flow itself said that it was cancelled, and what was saved; and a Retry that came since."""

    async def propose_cancelled(self, flow_run: Any, state_updates: dict[str, Any] | None = None) -> bool:
        now = (await self._client.read_flow_run(flow_run.id)).state
        if now is not None and not now.is_cancelling():
            return True
        return await super().propose_cancelled(flow_run, state_updates)


def run_flows(deployments: list[Any]) -> None:
    """Serves deployments in the foreground, until SIGINT or SIGTERM.

    Raises:
        RuntimeError: some flows were killed before they had saved: a second signal came, or patience ended.
    """
    from flows.flows import FLOWS

    for flow in FLOWS:
        flow.on_cancellation(say_what_is_lost)
        flow.on_crashed(say_what_is_lost)
    runner.StateProposer = _Proposer  # type: ignore[misc]
    made = [Runner(pause_on_shutdown=False, limit=waiting_room())]
    made += [Runner(pause_on_shutdown=False) for _ in (LONG, ASKS)]
    for deployment in deployments:
        made[kind_of(deployment.flow_name)].add_deployment(deployment)
    asyncio.run(_serve(made))


def kind_of(flow: str) -> int:
    """Which runner a flow has: 0 for what trains, 1 for other stages that may take hours, 2 for questions."""
    return 0 if flow in TRAINS else 1 if flow in LONG else 2


def waiting_room() -> int:
    """How many trainings may be processes at a time, most of which wait for a device: as many as half of the memory holds.

    More of them stay Late. Prefect's own limit (PREFECT_RUNNER_PROCESS_LIMIT, 5) is of what works, and is that of the others.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(Runner(pause_on_shutdown=False).limit or 0, memory // 2 // _WAITING_BYTES)


async def _serve(made: list[Runner]) -> None:
    async with Spare().kept():
        await _run(made)


async def _run(runners: list[Runner]) -> None:
    loop, request = asyncio.get_running_loop(), Request()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def take(number: int) -> None:
        if request.insists(number):
            insisted.set()
        asked.set()

    polling: asyncio.Future[Any] = asyncio.gather(*(runner.start() for runner in runners))
    await asyncio.sleep(0)  # each sets a handler of its own before it first waits
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, take, number)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(asked.wait())
    await asyncio.wait({polling, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not asked.is_set():
        stopped.cancel()
        await polling
        return
    killed = 0
    if all(runner.started for runner in runners):
        killed = await _end_flows(runners, insisted)
        for each in runners:
            await each.astop()
    else:
        polling.cancel()
    with suppress(asyncio.CancelledError, TimeoutError):
        await asyncio.wait_for(polling, 2 * _TO_REPORT_SECONDS)
    if killed:
        raise RuntimeError(
            f"{killed} flow(s) killed before they had ended: what they did since their last save is lost"
        )


async def _end_flows(runners: list[Runner], insisted: asyncio.Event) -> int:
    """Asks every flow to end and waits until all have; returns how many had to be killed."""
    managers = [runner._process_manager for runner in runners]
    for each in runners:
        each._scheduled_run_poller.stopping = True

    def flows() -> int:  # from before a flow's process starts until the server knows its last state
        return sum(len(runner._scheduled_run_poller._submitting_flow_run_ids) for runner in runners)

    if flows():
        print(
            f"stopping: {flows()} flow(s) save and end first, for at most {PATIENCE_SECONDS:.0f} s; "
            f"another signal after {SAME_SECONDS:.0f} s does not wait for them",
            flush=True,
        )
    told: set[Any] = set()
    until = time.monotonic() + PATIENCE_SECONDS
    while flows() and not insisted.is_set() and time.monotonic() < until:
        for manager in managers:
            for flow in manager.flow_run_ids() - told:
                told.add(flow)
                with suppress(ProcessLookupError, AttributeError):  # it has just ended
                    manager.get(flow).graceful_kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
    left = [(manager, flow) for manager in managers for flow in manager.flow_run_ids()]
    for manager, flow in left:
        await manager.kill(flow, force=True)
    until = time.monotonic() + _TO_REPORT_SECONDS
    while flows() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return len(left)
