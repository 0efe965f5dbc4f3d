"""Training in two processes of torchrun (gloo): launched, interrupted, resumed, failed."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from pipeline.config import Options, dump_options
from pipeline.run.checkpoints import Checkpoint, make_identity
from pipeline.signals import Interrupt, TrainingInterrupted
from pipeline.training import launcher, stages
from pipeline.training.launcher import choose_backends
from pipeline.training.stages import _check_ranks_agree
from tests.flows.api import PATIENCE, until
from tests.pipeline.run.test_metrics import Terminal
from tests.pipeline.training.test_stages import assert_same


def find_below(word: str) -> list[psutil.Process]:
    """Processes below this one that have a word in their command or environment; not what has ended and is a zombie."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(process.cmdline()) or word in process.environ():
                found.append(process)
    return found


@pytest.fixture
def together(options: Options) -> Options:
    options.launcher.processes = 2
    options.checkpoint.every_steps = 2
    options.iem.extra_batches = 1
    return options


@pytest.mark.slow
def test_launched_interrupted_and_resumed_runs_end_in_the_same_bits(
    together: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In groups of one rank; in one group of all, tests/pipeline/training/test_same_bits.py kills and resumes."""
    nowhere = "import socket; socket.getfqdn = lambda *_: 'mac.invalid'"  # as on some Macs
    (tmp_path / "sitecustomize.py").write_text(nowhere)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    terminal, temporary = Terminal(), tmp_path / "temporary"
    monkeypatch.setattr("sys.stderr", terminal)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    together.pretrain.steps, together.iem.group = 40, 1
    heard: list[float] = []
    whole = stages.pretrain(together, listener=lambda record: heard.append(record["step"]))
    assert "━ 100% · pretrain · step 40 · " in terminal.getvalue().splitlines()[-1]
    assert whole.steps == 40 and heard == sorted(heard) and 20 in heard and 40 in heard
    again = replace(together, name="again")
    folder = Path(again.runs_dir) / "again" / "pretrain" / "checkpoints"
    with pytest.raises(TrainingInterrupted, match="^saved step [0-9]+ of pretrain$"):
        stages.pretrain(again, lambda: any(folder.glob("step-*")))
    assert not find_below("pretrain")
    assert 2 <= stages.pretrain(again).resumed_from < 40
    assert_same(again, together, "pretrain")
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]  # PyTorch's own
    assert not left, "torchrun leaves a folder for each start, unless it is told where"


@pytest.mark.nightly
def test_torchrun_by_hand_and_on_in_one_process(
    together: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(dump_options(together))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pipeline"]
    done = subprocess.run([*command, "pretrain", "--config", str(config), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["steps"] == together.pretrain.steps
    environment = Path(together.runs_dir) / together.name / "environment.json"
    assert json.loads(environment.read_text())["processes"] == 2
    together.launcher.processes, together.pretrain.steps = 1, 8
    with caplog.at_level("INFO"):
        assert stages.pretrain(together).resumed_from == 6
    assert "ranks: 1 (before: 2)" in caplog.text
    assert stages.finetune(together).steps == together.finetune.steps


@pytest.mark.slow
def test_ranks_that_hang_end_with_a_signal_that_insists(together: Options) -> None:
    together.pretrain.steps, folder = 100_000, Path(together.runs_dir) / together.name / "pretrain" / "checkpoints"
    asked: list[float] = []

    def hang() -> bool:
        if any(folder.glob("step-*")) and not asked:
            asked.append(time.monotonic())
            for process in find_below("LOCAL_RANK"):
                process.suspend()
        if asked and time.monotonic() - asked[0] > 3:
            raise Interrupt(signal.SIGINT)
        return bool(asked)

    with pytest.raises(Interrupt):
        stages.pretrain(together, hang)
    assert not find_below("pretrain")
    assert time.monotonic() - asked[0] < PATIENCE


@pytest.mark.nightly
def test_a_rank_that_waits_for_a_slow_one_to_join_ends_with_a_signal(together: Options) -> None:
    """It waits outside of Python, where no handler runs."""
    late: list[psutil.Process] = []
    began = 0.0

    def stop() -> bool:
        nonlocal began
        ranks = {process.environ()["LOCAL_RANK"]: process for process in find_below("LOCAL_RANK")}
        if not late and "1" in ranks:
            ranks["1"].suspend()  # while it imports
            late.append(ranks["1"])
        if late and not began and ranks["0"].cpu_percent(1) < 2 and ranks["0"].cpu_times().user > 1:  # it waits
            began = time.monotonic()
            threading.Timer(1, late[0].resume).start()
        return bool(began)

    with pytest.raises(TrainingInterrupted):
        stages.pretrain(together, stop)
    assert not find_below("pretrain") and time.monotonic() - began < 30


@pytest.mark.nightly
def test_ctrl_c_says_if_the_ranks_could_save_nothing(together: Options, tmp_path: Path) -> None:
    together.pretrain.steps, together.checkpoint.every_steps = 100_000, None
    config = tmp_path / "options.yaml"
    config.write_text(dump_options(together))
    command = [sys.executable, "-m", "pipeline", "pretrain", "--config", str(config)]
    metrics = Path(together.runs_dir) / together.name / "pretrain" / "metrics.jsonl"

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, 24 << 10))

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit_files) as process:
        until(PATIENCE, lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert re.search(r"the checkpoint of step \d+ could not be written to .*; there is no earlier one", said), said
    assert "saved step" not in said


SAVED, UNWRITTEN = "saved step 9 of pretrain", "the checkpoint of step 9 could not be written; there is no earlier one"
RESUME = ". Run the same command to resume"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([SAVED + RESUME] * 2, SAVED),
        ([UNWRITTEN + RESUME, SAVED + RESUME], UNWRITTEN),
        (["W1130 Sending process 1 closing signal SIGTERM"], "stopped"),
        ([], "stopped"),
    ],
)
def test_what_ranks_say_that_are_stopped(lines: list[str], said: str) -> None:
    assert launcher._explain_stop(lines) == said


def test_ranks_with_different_checkpoints_do_not_go_on(options: Options) -> None:
    identity = make_identity(options, "corpus")
    first, second = (Checkpoint(Path("x"), {"step": 4, "digest": digest}) for digest in ("a", "b"))
    for of_first, of_second, agree in ((first, first, True), (first, second, False), (first, None, False)):
        told: list[list[float]] = []

        def exchange(values: list[float], told: list[list[float]] = told) -> list[float]:
            told.append(values)
            return [max(each) for each in zip(*told, strict=True)]

        ranks: Any = SimpleNamespace(max_over_ranks=exchange)
        _check_ranks_agree(ranks, of_first, identity)
        with nullcontext() if agree else pytest.raises(ValueError, match="would not resume from the same checkpoint"):
            _check_ranks_agree(ranks, of_second, identity)


@pytest.mark.nightly
def test_a_killed_rank_is_named_in_a_line(together: Options, caplog: pytest.LogCaptureFixture) -> None:
    together.pretrain.steps = 100_000
    folder = Path(together.runs_dir) / together.name / "pretrain" / "checkpoints"

    def kill_one() -> bool:
        if any(folder.glob("step-*")):
            for process in find_below("LOCAL_RANK"):
                with suppress(psutil.Error):
                    if process.environ()["LOCAL_RANK"] == "1":
                        process.kill()
        return False

    with caplog.at_level("INFO"), pytest.raises(ChildProcessError, match=r"rank 1 was ended by signal 9 \(Killed\)"):
        stages.pretrain(together, kill_one)
    assert "Traceback" not in caplog.text and "torchrun" not in caplog.text and "exitcode" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "number", "said"),
    [
        ("LOCAL_RANK=1", signal.SIGTERM, r"a rank was told to stop, so all have: saved step \d+ of pretrain\. Run"),
        ("torch.distributed.run", signal.SIGKILL, r"torchrun was ended by signal 9 \(Killed\), and all ranks with it"),
    ],
)
def test_what_ended_the_ranks_is_said(wanted: str, number: int, said: str, together: Options) -> None:
    together.pretrain.steps = 100_000
    folder = Path(together.runs_dir) / together.name / "pretrain" / "checkpoints"

    def signal_once() -> bool:
        for process in psutil.Process().children(recursive=True) if any(folder.glob("step-*")) else ():
            with suppress(psutil.Error):
                known = [*process.cmdline(), f"LOCAL_RANK={process.environ().get('LOCAL_RANK')}"]
                if wanted in known and process.pid not in signalled:
                    signalled.add(process.pid)
                    process.send_signal(number)
        return False

    signalled: set[int] = set()
    with pytest.raises(ChildProcessError, match=said):
        stages.pretrain(together, signal_once)
    assert len(signalled) == 1


@pytest.mark.nightly
def test_ranks_save_if_the_launcher_fails_while_torchrun_is_slow(
    together: Options, capfd: pytest.CaptureFixture[str]
) -> None:
    together.pretrain.steps = together.checkpoint.every_steps = 100_000

    def fail(record: dict[str, float]) -> None:
        if record["step"] >= 5:
            (torchrun,) = find_below("torch.distributed.run")
            torchrun.suspend()  # the ranks go on, and print
            threading.Timer(1, torchrun.resume).start()
            raise ValueError("the display failed")

    with pytest.raises(ValueError, match="the display failed"):
        stages.pretrain(together, listener=fail)
    assert list((Path(together.runs_dir) / together.name / "pretrain" / "checkpoints").glob("step-*"))
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_talk_by_device_not_by_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with GPUs trains on its CPU as well; the library of GPUs is not asked for where there is none."""
    assert choose_backends() == ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert choose_backends() == "cpu:gloo,cuda:nccl"
