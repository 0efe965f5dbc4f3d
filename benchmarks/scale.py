"""Compare the estimates of `benchmarks/scaling_estimate.py` with runs: candidates, bytes exchanged, milliseconds, memory.

    python benchmarks/scale.py [key=value …] [--config quickstart] [--processes 1 2 4]

Processes talk by the loopback interface, whose counters are read around a short and a long run of each number of
processes. The difference of their bytes, divided by that of their steps, is the bytes of a step. So start-up, validation
and checkpoints do not count. Nothing else should use the interface meanwhile.

Each process has one thread. Estimated milliseconds are of computing alone, measured ones of whole steps. Processes that
share memory and cores wait for more. Memory is the most that one process had. The estimate counts what it can name.
PyTorch, the corpus, and what a step needs for a moment come on top. Nothing is asserted.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

from benchmarks.scaling_estimate import measure_step
from experiments.timing import lift_other_limits
from pipeline.config import load_options
from pipeline.console import exit_on_error
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source

SHORT, LONG = 20, 60


def count_received_bytes() -> int:
    """Return the bytes that the loopback interface has received so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


def measure_peak_memory(*words: str) -> int:
    """Run a Python command, and return the most bytes that it had in memory."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"runs_dir={folder}/runs", f"shards_dir={folder}/shards", "threads=1", "validation.times=0"]
        words += [*arguments.overrides, *lift_other_limits("pretrain"), "log_steps=10"]
        options = load_options(arguments.config, [*words, f"pretrain.steps={LONG}", "name=here"])
        RunFolder.create(options).write_corpus_record(shard_source(options))
        step = measure_step(options, "pretrain")
        print(
            "processes  candidates: foreseen, found   MB a step, all: foreseen, found   ms a step: foreseen, found"
            "   MB of a process: foreseen, found"
        )
        for processes in arguments.processes:
            plan, bytes_of = step.estimate_step(processes, 1e12), {}
            for steps in (SHORT, LONG):
                name, before = f"{processes}-{steps}", count_received_bytes()
                more = [f"name={name}", f"launcher.processes={processes}", f"pretrain.steps={steps}", "--json"]
                memory = measure_peak_memory("-m", "pipeline", "pretrain", "--config", arguments.config, *words, *more)
                bytes_of[steps] = count_received_bytes() - before
            path = Path(folder) / "runs" / name / "pretrain" / "metrics.jsonl"
            records = [record for record in read_metrics(path) if "candidates" in record][-3:]
            candidates = statistics.mean(record["candidates"] for record in records)
            spent = statistics.median(1e3 / record["steps_per_second"] for record in records)
            exchanged = (bytes_of[LONG] - bytes_of[SHORT]) / (LONG - SHORT)
            print(
                f"{processes:9}  {plan.candidates:20,} {candidates:8,.0f}  {processes * sum(plan.exchanged.values()) / 1e6:24,.2f} "
                f"{exchanged / 1e6:7,.2f}  {sum(plan.milliseconds.values()):19,.0f} {spent:7,.0f}"
                f"  {sum(plan.memory.values()) / 1e6:24,.0f} {memory / 1e6:7,.0f}",
                flush=True,
            )
            print({name: round(size * processes / 1e6, 2) for name, size in plan.exchanged.items()})


if __name__ == "__main__":
    with exit_on_error():
        main()
