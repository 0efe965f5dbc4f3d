"""Runs the flows of deployments in this process's children until it is told to stop, and lets their trainings save then.

Left to itself, Prefect's runner ends with its flows: at Ctrl-C or SIGTERM its event loop is cancelled, which kills them at
once, or after 30 s. Here the signals are taken before it: no new run starts, each flow gets one SIGTERM, and the runner goes
on until the last has saved, ended, and told the server so.
"""

import asyncio
import logging
import signal
import time
from contextlib import suppress
from typing import Any

from prefect.runner import Runner, runner
from prefect.runner._state_proposer import StateProposer

from flows.serving.engine import Spare
from pipeline.stopping import SAME_SECONDS, Request

log = logging.getLogger(__name__)
PATIENCE_SECONDS = 600.0  # for a slow step, a validation and a checkpoint
_TO_REPORT_SECONDS = 15.0  # for the states of flows that were killed


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
    runner.StateProposer = _Proposer  # type: ignore[misc]
    made = Runner(pause_on_shutdown=False)
    for deployment in deployments:
        made.add_deployment(deployment)
    asyncio.run(_serve(made))


async def _serve(made: Runner) -> None:
    async with Spare().kept():
        await _run(made)


async def _run(runner: Runner) -> None:
    loop, request = asyncio.get_running_loop(), Request()
    asked, insisted = asyncio.Event(), asyncio.Event()

    def take(number: int) -> None:
        if request.insists(number):
            insisted.set()
        asked.set()

    polling = asyncio.ensure_future(runner.start())
    await asyncio.sleep(0)  # it sets a handler of its own before it first waits
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, take, number)
    stopped = asyncio.ensure_future(asked.wait())
    await asyncio.wait({polling, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not asked.is_set():
        stopped.cancel()
        return await polling
    killed = 0
    if runner.started:
        killed = await _end_flows(runner, insisted)
        await runner.astop()
    else:
        polling.cancel()
    with suppress(asyncio.CancelledError, TimeoutError):
        await asyncio.wait_for(polling, 2 * _TO_REPORT_SECONDS)
    if killed:
        raise RuntimeError(
            f"{killed} flow(s) killed before they had ended: what they did since their last save is lost"
        )


async def _end_flows(runner: Runner, insisted: asyncio.Event) -> int:
    """Asks every flow to end and waits until all have; returns how many had to be killed."""
    poller, processes = runner._scheduled_run_poller, runner._process_manager
    flows = poller._submitting_flow_run_ids  # from before a flow's process starts until the server knows its last state
    poller.stopping = True
    if flows:
        print(
            f"stopping: {len(flows)} flow(s) save and end first, for at most {PATIENCE_SECONDS:.0f} s; "
            f"another signal after {SAME_SECONDS:.0f} s does not wait for them",
            flush=True,
        )
    told: set[Any] = set()
    until = time.monotonic() + PATIENCE_SECONDS
    while flows and not insisted.is_set() and time.monotonic() < until:
        for flow in processes.flow_run_ids() - told:
            told.add(flow)
            with suppress(ProcessLookupError, AttributeError):  # it has just ended
                processes.get(flow).graceful_kill()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
    left = processes.flow_run_ids()
    for flow in left:
        await processes.kill(flow, force=True)
    until = time.monotonic() + _TO_REPORT_SECONDS
    while flows and time.monotonic() < until:
        await asyncio.sleep(0.1)
    return len(left)
