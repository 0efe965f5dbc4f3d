"""What is a user's error, and what the page of `haed` is told of a phase."""

import json
import logging
import os
import signal
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
import torch
from prefect.client.schemas.objects import State
from prefect.exceptions import Abort, Pause, TerminationSignal
from prefect.states import Cancelling, Completed, Crashed, Paused, Running, Scheduled, Suspended

from flows import lifecycle
from flows.artifacts import _PipelineStatus
from flows.lifecycle import (
    FlowRunWatcher,
    end_when_stopped,
    finish_flow_run,
    is_user_error,
    keep_record,
    settle_flow_run,
)
from pipeline import config
from pipeline.config import FinetuneOptions, PretrainOptions
from pipeline.config.loading import parse_override
from pipeline.run.metrics import format_validation


def raised(function: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        function(*arguments)  # type: ignore[operator]
    return caught.value


def test_what_our_code_and_the_machine_say_is_the_users_and_the_rest_a_bug() -> None:
    assert is_user_error(raised(config.load_options, "quickstat")) and is_user_error(raised(open, "/nowhere/at/all"))
    assert not is_user_error(raised({}.__getitem__, "key")) and not is_user_error(raised(json.loads, "{"))
    assert not is_user_error(raised(parse_override, "key"))  # in our code, which raises nothing itself: a bug
    assert is_user_error(torch.OutOfMemoryError("CUDA out of memory."))


def test_the_engine_logs_a_users_error_once_and_a_bug_as_it_is() -> None:
    kept = []
    for error in (raised(config.load_options, "quickstat"), raised({}.__getitem__, "key")):
        told = (type(error), error, error.__traceback__)
        record = logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "Encountered %r", (error,), told)
        kept.append(keep_record(record))
    assert kept == [False, True]
    last = logging.LogRecord("prefect.flow_runs", logging.INFO, "", 0, "Finished in state Failed('why')", (), None)
    assert keep_record(last) and last.levelname == "ERROR"
    assert not keep_record(logging.LogRecord("", logging.INFO, "", 0, "Finished in state Completed()", (), None))


def test_the_live_line_is_of_all_phases_with_share_and_time_left_first() -> None:
    limits = {"pretrain": PretrainOptions(steps=10), "finetune": FinetuneOptions(steps=10)}
    whole = _PipelineStatus("run", limits, {"pretrain": 0.75, "finetune": 0.25})
    whole(("shard", {}))
    assert whole.line() == "0% of training · run: shard"
    whole(("pretrain", {"step": 1}))
    whole(("pretrain", {"step": 5, "loss": 2.0}))
    share, left, *rest = whole.line().split(" · ")
    assert share == "38% of training" and left.endswith("left") and rest == ["run: pretrain", "step 5", "loss 2.000"]
    whole(("finetune", {"step": 5}))
    assert whole.progress() == 0.875  # phase one ended early: it is done
    found = format_validation(3, {"step": 3, "seconds": 1.0, "validation/bits_per_token": 6.0, "loss": 2.0})
    assert found == "step 3: validation bits/token 6.0000" and not format_validation(3, {"step": 3})


PAUSED, SUSPENDED = Paused(timeout_seconds=600), Suspended(timeout_seconds=600)


class Server:
    """Prefect's server: what it says of every run, and the names of the states that were set."""

    def __init__(self) -> None:
        self.now: State | None = None
        self.states: dict[UUID, str] = {}

    def read_flow_run(self, id: UUID) -> Any:
        return SimpleNamespace(state=self.now)

    def set_flow_run_state(self, id: UUID, state: State, force: bool) -> None:
        self.states[id] = state.name or ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(lifecycle, "get_client", lambda **_: nullcontext(made))
    monkeypatch.setattr(lifecycle, "flow_run_logger", lambda run: logging.getLogger("none"))
    return made


@pytest.mark.parametrize(
    ("seen", "now", "changes"),
    [
        (PAUSED, PAUSED, ["Suspended"]),  # Resume would expect its process to be alive
        (SUSPENDED, SUSPENDED, []),
        (PAUSED, Running(), ["Resuming"]),  # resumed while it saved
        (SUSPENDED, Scheduled(name="Resuming"), []),
    ],
    ids=["paused", "suspended", "paused and resumed", "suspended and resumed"],
)
def test_a_stopped_run_can_be_resumed_also_while_it_saves(
    seen: State, now: State, changes: list[str], server: Server
) -> None:
    watcher, run, server.now = FlowRunWatcher(), uuid4(), now
    watcher._runs, watcher.stopped = [run], (run, seen)
    watcher.finish_runs()
    assert [*server.states.values()] == changes


def test_a_stage_that_is_paused_alone_leaves_resume_to_its_parent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its own page it would seem to run, without a process."""
    watcher, outer, stage, done, left = FlowRunWatcher(), uuid4(), uuid4(), uuid4(), uuid4()
    monkeypatch.setattr(lifecycle, "_stages", [done, left])
    monkeypatch.setattr(lifecycle, "read_states", lambda client, runs: {done: Completed(), left: Running()})
    watcher._runs, watcher.stopped = [outer, stage], (stage, PAUSED)
    assert isinstance(watcher.finish_runs(), Pause)
    assert server.states == {outer: "Suspended", stage: "Crashed", left: "Crashed"}


class Lost:
    """An object at whose end Python ignores what is raised."""

    def __init__(self) -> None:
        weakref.finalize(self, os.kill, os.getpid(), signal.SIGTERM)


def wait_long() -> None:
    began = time.monotonic()
    while time.monotonic() < began + 20:
        time.sleep(0.01)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_loses_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "END_SECONDS", 0.3)
    monkeypatch.setattr(FlowRunWatcher, "_poll_server", lambda self: None)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    begun = time.monotonic()
    with pytest.raises(TerminationSignal), end_when_stopped():
        made = Lost()
        del made
        wait_long()
    assert time.monotonic() < begun + 10 and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == before


@pytest.mark.parametrize(("state", "ends"), [(None, Abort), (Completed(), Abort), (PAUSED, Pause)])
def test_a_flow_that_is_no_longer_to_run_ends_outside_of_training_too(
    state: State | None, ends: type[BaseException], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server.now = uuid4(), state
    monkeypatch.setattr(lifecycle, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(lifecycle, "read_states", lambda client, runs: {} if state is None else {run: state})
    monkeypatch.setattr(lifecycle, "flow_run", SimpleNamespace(id=str(run), parent_flow_run_id=None))
    with pytest.raises(ends), end_when_stopped():
        wait_long()


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_cancel_that_comes_when_the_work_is_done_is_no_crash(is_cancelled: bool, server: Server) -> None:
    server.now = Crashed(message="Execution was aborted by a termination signal.")
    settle_flow_run(uuid4(), -signal.SIGTERM, None, is_cancelled)
    assert [*server.states.values()] == ["Cancelled"] * is_cancelled


def test_a_run_that_is_killed_while_it_waits_no_longer_says_that_it_waits(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    name = f"train a · {lifecycle.WAITS}cpu behind train b"
    run: Any = SimpleNamespace(id=uuid4(), labels={}, name=name, state=Running())
    server.update_flow_run = lambda id, name: names.append(name)
    monkeypatch.setattr(lifecycle, "mark_stages_crashed", lambda client, id: None)
    assert lifecycle.report_end(server, run, "its process was killed") and names == ["train a"]


def test_a_run_that_was_cancelled_does_not_say_that_it_is_completed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect would refuse that, with a traceback."""
    server.now = Cancelling()
    monkeypatch.setattr(lifecycle, "_current_run", lambda: SimpleNamespace(id=uuid4(), parent_task_run_id=None))
    monkeypatch.setattr(lifecycle, "_finish_stopped_run", lambda error: None)
    monkeypatch.setattr(FlowRunWatcher, "_poll_server", lambda self: None)
    monkeypatch.setattr(lifecycle, "is_served", lambda: True)
    with pytest.raises(TerminationSignal):
        finish_flow_run("evaluate", lambda: None, str)
