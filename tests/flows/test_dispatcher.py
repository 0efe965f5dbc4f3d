"""What the dispatcher does with processes and with answers of a server, without either."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.responses import SetStateStatus

from flows import dispatcher
from flows.dispatcher import FlowDispatcher, FlowProcess
from flows.lifecycle import QUICK_FLOWS, TRAINING_FLOWS, WAITS
from pipeline.signals import StopSignal

LONG = ("shard", "evaluate", "index", "analyse")
DEPLOYMENTS = {flow: uuid4() for flow in (*TRAINING_FLOWS, *LONG, *QUICK_FLOWS)}
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
Settled = list[tuple[UUID, int, float | None, bool]]
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def start_deaf_process() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    return process


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Settled:
    """Run, exit status and seconds after Cancel of what was reported."""
    calls = Settled()
    monkeypatch.setattr(dispatcher, "settle_flow_run", lambda *reported: calls.append(reported))
    return calls


class Server:
    """The server's runs that are due, by deployment; it refuses those of `refused`."""

    name = "run"

    def __init__(self, due: dict[str, int], refused: str = "") -> None:
        self.due = [
            SimpleNamespace(id=uuid4(), deployment_id=DEPLOYMENTS[flow]) for flow in due for _ in range(due[flow])
        ]
        self.refused = DEPLOYMENTS.get(refused)

    def get_scheduled_flow_runs_for_deployments(self, ids: list[UUID], scheduled_before: Any) -> list[Any]:
        return [run for run in self.due if run.deployment_id in ids]

    def read_flow_runs(self, flow_run_filter: Any, limit: int, offset: int) -> list[Any]:
        ids = flow_run_filter.id.any_[offset : offset + limit]
        return [SimpleNamespace(id=id, name=f"{self.name} {id} · {WAITS}cpu behind another") for id in ids]

    def set_flow_run_state(self, id: UUID, state: Any, force: bool = False) -> Any:
        (run,) = (run for run in self.due if run.id == id)
        refused = run.deployment_id == self.refused
        return SimpleNamespace(status=SetStateStatus.REJECT if refused else SetStateStatus.ACCEPT)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """The runs whose processes were started; they never end."""
    found: list[UUID] = []
    running = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(dispatcher, "_start_engine", lambda run: found.append(run) or running)
    return found


@pytest.mark.usefixtures("started")
def test_each_kind_starts_as_many_as_its_own_limit_and_a_refused_run_starts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatcher, "max_training_processes", lambda: 2)
    monkeypatch.setattr(FlowDispatcher, "_explain_wait", lambda *_: None)
    made = FlowDispatcher(DEPLOYMENTS, StopSignal())
    server: Any = Server({"train": 5, "pretrain": 1, "shard": 9, "neighbours": 3, "report": 1}, refused="report")
    for _ in range(2):  # what runs already is not started again
        for kind in made._kinds:
            made._start_due_runs(server, *kind)
        flows = [each.flow for each in made._running.values()]
        assert {flow: flows.count(flow) for flow in flows} == {"train": 2, "shard": 5, "neighbours": 3}


@pytest.mark.usefixtures("started")
def test_a_run_without_a_place_is_told_who_has_them_once_and_again_when_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    logger = SimpleNamespace(info=lambda message, *values: told.append(message % values))
    monkeypatch.setattr(dispatcher, "flow_run_logger", lambda run: logger)
    monkeypatch.setattr(dispatcher, "max_training_processes", lambda: 1)
    made = FlowDispatcher(DEPLOYMENTS, StopSignal())
    server: Any = Server({"train": 3})
    for _ in range(2):
        made._start_due_runs(server, *made._kinds[0])
    first, second, third = (f"run {run.id}" for run in server.due)
    assert [line.split(" (since ")[0] for line in told] == [f"waits until one of these ends: {first}"] * 2
    server.name = "train"  # the flow has renamed its run
    made._start_due_runs(server, *made._kinds[0])
    assert told.pop().startswith(f"waits until one of these ends: train {server.due[0].id} (since ") and told.pop()
    server.name = "run"
    del made._running[server.due[0].id], server.due[0]
    made._start_due_runs(server, *made._kinds[0])
    assert [line.split(" (since ")[0] for line in told[2:]] == [f"waits until one of these ends: {second}"], third


def test_a_cancelled_flow_gets_one_signal_and_is_killed_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, settled: Settled
) -> None:
    monkeypatch.setattr(dispatcher, "CANCEL_SECONDS", 0.5)
    made, states = FlowDispatcher(DEPLOYMENTS, StopSignal()), {}
    processes = {"sample": subprocess.Popen(SLEEP), "train": start_deaf_process(), "index": subprocess.Popen(SLEEP)}
    ids = {flow: uuid4() for flow in processes}
    for flow, process in processes.items():
        made._running[ids[flow]] = FlowProcess(flow, process)
        states[ids[flow]] = SimpleNamespace(is_cancelling=lambda flow=flow: flow != "index")
    monkeypatch.setattr(dispatcher, "read_states", lambda client, runs: states)
    server: Any = None
    made._end_cancelled(server)
    while len(settled) < 2:
        made._settle_ended()
        time.sleep(0.05)
    assert settled == [(ids["sample"], -signal.SIGTERM, None, True), (ids["train"], -signal.SIGKILL, 0.5, True)]
    (left,) = made._running.values()
    assert left.flow == "index" and left.process.poll() is None
    assert made._end_all() == 0 and settled[2:] == [(ids["index"], -signal.SIGTERM, None, False)] and not made._running


def test_a_flow_that_does_not_end_is_killed_and_counted(monkeypatch: pytest.MonkeyPatch, settled: Settled) -> None:
    monkeypatch.setattr(dispatcher, "PATIENCE_SECONDS", 0.3)
    made = FlowDispatcher(DEPLOYMENTS, StopSignal())
    made._running[id := uuid4()] = FlowProcess("train", start_deaf_process())
    assert made._end_all() == 1 and settled == [(id, -signal.SIGKILL, None, False)]


def test_an_end_that_the_server_did_not_take_is_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionError("The server is gone"), None])

    def settle(*_: object) -> None:
        if error := next(answers):
            raise error

    monkeypatch.setattr(dispatcher, "settle_flow_run", settle)
    made, process = FlowDispatcher(DEPLOYMENTS, StopSignal()), subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    made._running[uuid4()] = FlowProcess("train", process)
    made._settle_ended()
    made._settle_ended()  # a server that does not answer is not asked ten times a second
    assert made._running
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + dispatcher._RETRY_SECONDS)
    made._settle_ended()
    assert not made._running


def test_a_signal_ends_the_wait_for_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one interrupts a request and lets flows save; one after some seconds interrupts the report of an end."""
    monkeypatch.setattr("pipeline.signals.SAME_SECONDS", 0.5)
    made, asked = FlowDispatcher(DEPLOYMENTS, StopSignal()), []
    process = subprocess.Popen(SLEEP)
    made._running[uuid4()] = FlowProcess("train", process)

    def hang(*_: object) -> None:
        asked.append(process.poll())
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    @contextmanager
    def client(**_: object) -> Iterator[None]:
        yield

    def settle(*words: object) -> None:
        time.sleep(0.6)
        hang()

    monkeypatch.setattr(dispatcher, "get_client", client)
    monkeypatch.setattr(dispatcher, "read_states", hang)
    monkeypatch.setattr(dispatcher, "settle_flow_run", settle)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert made.run() == 0  # it ended at the first signal; the second one ended waiting for the report
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert asked[0] is None and asked[1] == -signal.SIGTERM


def test_a_run_that_may_have_become_pending_without_an_answer_is_started(
    started: list[UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FlowDispatcher(DEPLOYMENTS, StopSignal())
    server: Any = Server({"shard": 2})

    def lose_answer(*_: object) -> None:
        raise ConnectionError("the answer is lost")

    monkeypatch.setattr(server, "set_flow_run_state", lose_answer)
    for _ in range(2):
        made._start_due_runs(server, *next(kind for kind in made._kinds if "shard" in kind[0]))
    assert started == [run.id for run in server.due]
