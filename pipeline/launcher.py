"""Several training processes on one machine: torchrun around `python -m pipeline STAGE`, and joining it from within."""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from haed.ranks import Ranks
from pipeline.config import dump
from pipeline.metrics import Listener, Tail
from pipeline.options import Options
from pipeline.trainer import Interrupted

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2


def started_by_torchrun() -> bool:
    """Whether this process is one of torchrun's."""
    return dist.is_torchelastic_launched()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the other processes of torchrun, if it started this one, for the length of a stage."""
    if not started_by_torchrun() or dist.is_initialized():
        yield Ranks()
        return
    die_with_parent()  # else a rank would outlive a killed launcher, and hold the run's lock
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


def launch(stage: str, options: Options, stop: Callable[[], bool], listener: Listener) -> dict[str, Any]:
    """Runs a training stage in `launcher.processes` processes, passes their lines on, and stops them all if asked to.

    Returns:
        What the stage printed as JSON.

    Raises:
        Interrupted: `stop` was true; the processes saved and ended.
        RuntimeError: the stage failed; its last words.
    """
    tail = Tail(Path(options.runs_dir) / options.name / stage / "metrics.jsonl")
    printed, said, stopping = deque[str](maxlen=1), deque[str](maxlen=200), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(dump(options))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={options.launcher.processes}", "-m", "pipeline", stage]
        with subprocess.Popen(
            [*command, "--config", str(config), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=die_with_parent,
        ) as process:
            threads = [
                threading.Thread(target=_collect, args=(process.stdout, printed, None, stopping)),
                threading.Thread(target=_collect, args=(process.stderr, said, log, stopping)),
            ]
            for thread in threads:
                thread.start()
            try:
                while process.poll() is None:
                    if stop() and not stopping.is_set():
                        stopping.set()
                        process.terminate()  # torchrun passes it on, and waits for the checkpoint
                    for record in tail.records():
                        listener(record)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_SECONDS)
            finally:
                if process.poll() is None:
                    process.terminate()
            for thread in threads:
                thread.join()
    for record in tail.records():
        listener(record)
    if stopping.is_set():
        saved = next((line for line in reversed(said) if "saved" in line), "stopped")
        raise Interrupted(saved.split(";")[0])
    if process.returncode:
        raise RuntimeError(_reason(said))
    result: dict[str, Any] = json.loads(printed[0])
    return result


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has Linux send a signal to this process when the thread that started it ends; elsewhere nothing happens."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _collect(stream: IO[str], lines: "deque[str]", logger: logging.Logger | None, stopping: threading.Event) -> None:
    """Keeps the last lines of a stream, and logs them until the processes are told to stop."""
    for line in stream:
        lines.append(line.rstrip())
        if logger is not None and line.strip() and not stopping.is_set() and not line.startswith("error: "):
            logger.info("%s", line.rstrip())


def _reason(said: "deque[str]") -> str:
    """The line in which a process says why it failed, else the last one that is not torchrun's."""
    errors = [line for line in said if line.startswith("error: ")]
    return errors[0].removeprefix("error: ") if errors else next(iter(reversed(said)), "the processes failed")
