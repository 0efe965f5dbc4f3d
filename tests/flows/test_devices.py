"""Turns on devices, and which processes are taken for alive; what waits in a flow is in `test_operator`."""

import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from data.filesystem import FLOW_RUN
from flows import lifecycle
from flows.flows import FLOWS
from flows.lifecycle import QUICK_FLOWS, TRAINING_FLOWS, acquire_device, list_training_devices
from pipeline.config import load_options
from pipeline.run.run_directory import RunFolder
from pipeline.signals import TrainingInterrupted


def test_devices_are_named_so_that_all_processes_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*words: str) -> list[str]:
        return list_training_devices(load_options("quickstart", words))

    assert named("device=cpu", "launcher.processes=2") == ["cpu"]
    assert named("device=cuda", "launcher.processes=2") == ["cuda:0", "cuda:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert named("device=cuda") == ["cuda:3"] and named("device=cuda:1") == ["cuda:5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-8932/1/2, 1")  # a name for a file
    assert named("device=cuda", "launcher.processes=2") == ["cuda:MIG-GPU-8932%2F1%2F2", "cuda:1"]


HOLDER = """
import sys
from pipeline.config import load_options
from flows.lifecycle import acquire_device

with acquire_device(load_options("quickstart", ["device=cuda", "launcher.processes=2"]), lambda: False):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_a_turn_is_held_alone_and_freed_by_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("HAED_TRAININGS", "1")
    monkeypatch.delenv(FLOW_RUN, raising=False)
    one, other, cpu = (load_options("quickstart", [f"device={name}"]) for name in ("cuda:1", "cuda:2", "cpu"))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and "has it" in holder.stdout.readline()
        with pytest.raises(TrainingInterrupted, match="waiting for its turn"), acquire_device(one, lambda: True):
            pass
        one.runs_dir, busy = str(tmp_path / "runs"), RunFolder(tmp_path / "runs" / one.name)
        busy.path.mkdir(parents=True)
        with busy.lock(), pytest.raises(BlockingIOError, match="in use by process"), acquire_device(one, lambda: False):
            pass
        tells, answers = [], iter([False, False, True, True, True])  # the server's
        monkeypatch.setattr("flows.lifecycle._rename_flow_run", lambda name: tells.append(name) or next(answers))
        monkeypatch.setattr("flows.lifecycle._POLL_SECONDS", 0.01)
        asked = iter([False] * 5 + [True])
        others = iter(["long (since noon)"] * 3 + ["short (since one)"] * 9)
        acquire = lifecycle._try_acquire  # the holder changes
        monkeypatch.setattr("flows.lifecycle._try_acquire", lambda *given: acquire(*given) and next(others))
        with pytest.raises(TrainingInterrupted), acquire_device(one, lambda: next(asked)):
            pass
        behind = [" · waits for cuda:1 behind long (since noon)"] * 3 + [" · waits for cuda:1 behind short (since one)"]
        assert tells == [*behind, ""]
        monkeypatch.setattr("flows.lifecycle._try_acquire", acquire)
        holds = acquire(["cuda:1"], 1, ExitStack())
        assert re.fullmatch(rf"a training \(since \d{{4}}-\d\d-\d\d \d\d:\d\d, process {holder.pid}\)", holds)
        with acquire_device(other, lambda: True), acquire_device(cpu, lambda: True):  # other devices are free
            pass
        monkeypatch.setenv("HAED_TRAININGS", "2")
        with acquire_device(one, lambda: True):
            pass
        monkeypatch.setenv("HAED_TRAININGS", "1")
        holder.kill()
        holder.wait()
        with acquire_device(one, lambda: True):
            pass


def test_only_a_recorded_process_that_is_gone_is_dead() -> None:
    here = {
        lifecycle.HOST: socket.gethostname(),
        lifecycle.PROCESS: os.getpid(),
        lifecycle.STARTED: lifecycle.process_start_ticks(os.getpid()),
    }
    assert lifecycle.is_alive(here)
    assert not lifecycle.is_alive(here | {lifecycle.STARTED: "1"})  # another process has its number now
    assert lifecycle.is_alive(here | {lifecycle.HOST: "elsewhere", lifecycle.STARTED: "1"})
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert not lifecycle.is_alive(here | {lifecycle.PROCESS: ended.pid}) and not lifecycle.is_alive({})


def test_a_process_counts_as_alive_where_the_system_does_not_tell_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, **_: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(lifecycle, "open", refuse, raising=False)  # macOS has no /proc
    here = {lifecycle.HOST: socket.gethostname(), lifecycle.PROCESS: os.getpid(), lifecycle.STARTED: ""}
    assert lifecycle.process_start_ticks(os.getpid()) == "" and lifecycle.is_alive(here)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    assert not lifecycle.is_alive(here | {lifecycle.PROCESS: ended.pid})


def test_flows_of_a_kind_of_their_own_exist_and_have_one_kind() -> None:
    assert {*TRAINING_FLOWS, *QUICK_FLOWS} < {flow.name for flow in FLOWS} and not {*TRAINING_FLOWS} & {*QUICK_FLOWS}
