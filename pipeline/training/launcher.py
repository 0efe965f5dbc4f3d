"""Several training processes on one machine: torchrun around `python -m pipeline STAGE`, and joining its ranks."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from data.processes import available_threads
from haed.distributed import Ranks, group_size
from pipeline.config import Options, dump_options
from pipeline.console import print_stdout
from pipeline.run.metrics import Listener, Progress, Record
from pipeline.signals import RESUME_ADVICE, TrainingInterrupted, die_with_parent, signals_end_process
from pipeline.training.trainer import TrainingResult

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_KILLED = "exitcode: -9"
_OTHER_ENDED = "ends because another rank has ended"
_LAUNCHED = "HAED_LAUNCHED"
_RECORD = '{"step": '  # begins a line that `print_record` prints
_SAVING = "3600"  # seconds until torchrun kills what has not ended; by itself it gives a checkpoint 30
_LOST_RANK = re.compile(r"\[\S*gloo\S*\]|NCCL|Connection (closed|reset) by peer")  # of a rank whose peer has ended
_OF_TORCHRUN = re.compile(
    r"[WEF]\d{4} .*(Sending process|failed \(exitcode)|Traceback \(most recent|\[\S*gloo\S*\]|.*resource_tracker|  warnings.warn"
)


def is_torchrun_child() -> bool:
    """Return whether torchrun started this process."""
    return dist.is_torchelastic_launched()


def is_launched() -> bool:
    """Return whether this process was started by `launch_stage`, which shows the progress by what `print_record` prints."""
    return _LAUNCHED in os.environ


def print_record(record: Record) -> None:
    """Print a metrics record, or the position, for `launch_stage` in the process above. Without a reader, training goes on."""
    with suppress(OSError):
        print_stdout(json.dumps(record))


def choose_backends() -> str:
    """Return the communication backends by device type; a machine with GPUs may still train on its CPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the other processes of torchrun for the length of a stage, if torchrun started this one.

    Raises:
        ChildProcessError: another process ended first. Its own error says why.
    """
    if not is_torchrun_child() or dist.is_initialized():
        yield Ranks()
        return
    _end_with_launcher()
    with signals_end_process():
        dist.init_process_group(choose_backends())
    try:
        with signals_end_process():
            ranks = Ranks()
        yield ranks
    except RuntimeError as error:
        if not _LOST_RANK.search(str(error)):
            raise
        raise ChildProcessError(f"rank {dist.get_rank()} {_OTHER_ENDED}, which has said why") from error
    finally:
        dist.destroy_process_group()


def _end_with_launcher() -> None:
    """Make this rank end with torchrun, which ends with its launcher; else it would keep the run's lock.

    Both may have ended while this process was loading. Then torchrun's parent is no longer the launcher.
    """
    die_with_parent()
    launcher = os.environ.get(_LAUNCHED)
    with suppress(OSError, ValueError, IndexError):
        above = Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1]
        if launcher is not None and above != launcher:
            os._exit(1)


def launch_stage(stage: str, options: Options, stop: Callable[[], bool], listener: Listener) -> TrainingResult:
    """Run a training stage in `launcher.processes` processes, forward their log lines, and stop them on request.

    Returns:
        The result that the stage printed.

    Raises:
        TrainingInterrupted: `stop` was true; the processes saved and ended.
        ChildProcessError: one of the processes was killed or told to stop, or reported why it failed.
        RuntimeError: the stage failed; the message is its last line.
        ValueError: the processes do not divide into `iem.group`.
    """
    if getattr(options, stage).iem_weight and options.iem.group is not None:
        group_size(options.iem.group, options.launcher.processes)
    printed, log_lines, stopping = deque[str](), deque[str](maxlen=200), threading.Event()
    result = ""  # the last line that is no record
    with closing(Progress(stage, getattr(options, stage))) as progress, tempfile.TemporaryDirectory() as folder:

        def tell() -> None:
            nonlocal result
            while printed:
                if not (line := printed.popleft()).startswith(_RECORD):
                    result = line
                    continue
                record = json.loads(line)
                progress(record)
                listener(record)

        config = Path(folder) / "config.yaml"
        config.write_text(dump_options(options), encoding="utf-8")
        # Ranks meet at localhost: the name of a Mac often leads nowhere.
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        command += [f"--nproc-per-node={options.launcher.processes}", f"--log-dir={folder}", "-m", "pipeline", stage]
        env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SAVING} | os.environ | {_LAUNCHED: str(os.getpid())}
        env["OMP_NUM_THREADS"] = str(max(1, available_threads() // options.launcher.processes))
        with subprocess.Popen(
            [*command, "--config", str(config), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="backslashreplace",
            env=env,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=die_with_parent,
        ) as process:
            threads = [
                threading.Thread(target=printed.extend, args=(process.stdout,)),
                threading.Thread(target=_log_lines, args=(process.stderr, log_lines, stopping)),
            ]
            for thread in threads:
                thread.start()
            try:
                while process.poll() is None:
                    if stop() and not stopping.is_set():
                        stopping.set()
                        log.info("waiting for the ranks to save. A further Ctrl-C ends them without")
                        process.terminate()  # torchrun passes it on, and waits for the checkpoint
                    tell()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_SECONDS)
            except KeyboardInterrupt:  # a signal that insists; a rank may hang
                process.kill()  # and with it the ranks, see `_end_with_launcher`
                raise
            finally:
                if process.poll() is None:
                    process.terminate()
                for thread in threads:  # until the ranks have saved: their output needs a reader
                    thread.join()
        tell()
    if process.returncode:
        if stopping.is_set() and not any(_KILLED in line for line in log_lines):
            raise TrainingInterrupted(_explain_stop(list(log_lines)))
        raise _explain_failure(process.returncode, list(log_lines))
    return TrainingResult(**json.loads(result))


def _explain_stop(log_lines: list[str]) -> str:
    """Return a message of a rank that was told to stop. A checkpoint that could not be written precedes `saved step …`."""
    lines = [line.removesuffix(RESUME_ADVICE) for line in log_lines if line.endswith(RESUME_ADVICE)]
    lines = [line for line in lines if _OTHER_ENDED not in line]
    return min(lines, key=lambda line: line.startswith("saved step"), default="stopped")


def _explain_failure(status: int, log_lines: list[str]) -> Exception:
    """Return the error that says why torchrun ended with a status other than 0, from the last lines that were logged."""
    number, ended, others = -status, "torchrun", "all ranks with it"
    if rank := re.search(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)", "\n".join(log_lines)):
        number, ended, others = int(rank[1]), f"rank {rank[2]}", "all other ranks were stopped"
    if number > 0:
        return ChildProcessError(
            f"{ended} was ended by signal {number} ({signal.strsignal(number)}), and {others}. "
            "Run the same command to resume from the last checkpoint"
        )
    if errors := [line.removeprefix("error: ") for line in log_lines if line.startswith("error: ")]:
        return ChildProcessError(min(errors, key=lambda line: _OTHER_ENDED in line))  # the first of a cause
    if lines := [line for line in log_lines if line.startswith("saved step")]:
        return ChildProcessError(f"a rank was told to stop, so all have: {lines[-1]}")
    return RuntimeError(log_lines[-1] if log_lines else "the processes failed")


def _log_lines(stream: IO[str], lines: "deque[str]", stopping: threading.Event) -> None:
    """Keep the last lines of a stream, and log those of the stage until the processes are told to stop."""
    ended = False
    for line in stream:
        lines.append(line.rstrip())
        ended = ended or stopping.is_set() or _OF_TORCHRUN.match(line) is not None
        if line.strip() and not ended and not line.startswith("error: "):
            log.info("%s", line.rstrip())
