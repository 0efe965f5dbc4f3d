"""Runners that execute the flows of deployments in child processes until told to stop, then let trainings save.

By default Prefect's runner ends with its flows. At Ctrl-C or SIGTERM its event loop is cancelled, which kills them at
once or after 30 s. Here we take the signals first. No new run starts, each flow gets one SIGTERM, and the runner
continues until the last flow has saved, ended, and told the server so.

Each kind of flow has its own runner with its own limit. So waiting trainings and stages that take hours leave room for
queries.
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

from flows.serving.engine import SpareProcess
from flows.states.heartbeat import ASKS, LONG, TRAINS
from flows.states.lost import report_lost_work
from pipeline.signals import SAME_SECONDS, StopSignal

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0  # for a slow step, a validation and a checkpoint
_TO_REPORT_SECONDS = 15.0  # for the states of flows that were killed
_WAITING_BYTES = 1 << 29  # memory of a training that waits for its turn, on a CPU


class _Proposer(StateProposer):
    """A state proposer that keeps the message of a flow that reported its own cancellation, and a Retry made since."""

    async def propose_cancelled(self, flow_run: Any, state_updates: dict[str, Any] | None = None) -> bool:
        now = (await self._client.read_flow_run(flow_run.id)).state
        if now is not None and not now.is_cancelling():
            return True
        return await super().propose_cancelled(flow_run, state_updates)


def run_flows(deployments: list[Any]) -> None:
    """Serve deployments in the foreground until SIGINT or SIGTERM.

    Raises:
        RuntimeError: flows were killed before they had saved, by a second signal or after the time limit.
    """
    from flows.flows import FLOWS

    for flow in FLOWS:
        flow.on_cancellation(report_lost_work)
        flow.on_crashed(report_lost_work)
    runner.StateProposer = _Proposer  # type: ignore[misc]
    made = [Runner(pause_on_shutdown=False, limit=max_training_processes())]
    made += [Runner(pause_on_shutdown=False) for _ in (LONG, ASKS)]
    for deployment in deployments:
        made[runner_index(deployment.flow_name)].add_deployment(deployment)
    asyncio.run(_serve_runners(made))


def runner_index(flow: str) -> int:
    """Return the index of the runner for a flow: 0 for training, 1 for other long stages, 2 for queries."""
    return 0 if flow in TRAINS else 1 if flow in LONG else 2


def max_training_processes() -> int:
    """Return the maximum number of training processes, most of which wait for a device: what half of the memory holds.

    Further ones stay Late. Prefect's own limit (PREFECT_RUNNER_PROCESS_LIMIT, 5) is a lower bound here, and applies to
    the other runners.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(Runner(pause_on_shutdown=False).limit or 0, memory // 2 // _WAITING_BYTES)


async def _serve_runners(made: list[Runner]) -> None:
    async with SpareProcess().keep_ready():
        await _run_until_stopped(made)


async def _run_until_stopped(runners: list[Runner]) -> None:
    loop, request = asyncio.get_running_loop(), StopSignal()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def take(number: int) -> None:
        if request.is_second_request(number):
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
    """Ask every flow to end, wait until all have, and return how many had to be killed."""
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
