"""Trainings at once on the same cores: how long a step takes alone and beside another, by how idle OpenMP threads wait.

    python benchmarks/together.py [rounds] [seconds] [key=value …]

Processes that keep their model live through all rounds; in each turn one or two of a kind train and the others sleep, so that
whatever else the machine does falls on all kinds alike. Prints the median steps/s of a training in every turn.
"""

import os
import statistics
import subprocess
import sys
import tempfile

KINDS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def work(overrides: list[str]) -> None:
    import time
    from pathlib import Path

    import torch

    from pipeline.config import load_options
    from pipeline.run.checkpoints import Checkpoints
    from pipeline.run.device import setup_compute
    from pipeline.run.shards import shard_source
    from pipeline.train.stages import build_trainer

    if os.environ.get("OMP_NUM_THREADS") == "1":
        overrides = [*overrides, "threads=1"]
    options = load_options("quickstart", overrides)
    machine = setup_compute(options)
    trainer = build_trainer(
        options.pretrain, options, shard_source(options), Checkpoints(Path("none")), machine, lambda: False
    )
    batches = trainer.prepare_batches()
    for _ in range(3):
        trainer.step(next(batches))
    print("ready", torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < float(line):
            trainer.step(next(batches))
            steps += 1
        print(steps / (time.perf_counter() - began), flush=True)


def main(rounds: int, seconds: float, overrides: list[str]) -> None:
    made = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, variables in KINDS.items():
            clean = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
            command = [sys.executable, __file__, "--work", f"shards_dir={folder}", f"runs_dir={folder}", *overrides]
            made[kind] = [
                subprocess.Popen(
                    command, env=clean | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                for _ in range(2)
            ]
            for process in made[kind]:
                print(kind, process.stdout.readline().strip(), file=sys.stderr)
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for count in (1, 2):
                for kind, processes in made.items():
                    for process in processes[:count]:
                        process.stdin.write(f"{seconds}\n")
                        process.stdin.flush()
                    rates = [float(process.stdout.readline()) for process in processes[:count]]
                    found.setdefault((kind, count), []).append(statistics.mean(rates))
                    print(kind, count, *(f"{rate:.2f}" for rate in rates), file=sys.stderr, flush=True)
        for processes in made.values():
            for process in processes:
                process.communicate()
    for (kind, count), rates in found.items():
        print(
            f"{kind:<10} {count} at once: {statistics.median(rates):6.2f} steps/s each ({min(rates):.2f} to {max(rates):.2f})"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
    else:
        numbers = [float(word) for word in sys.argv[1:] if "=" not in word]
        main(
            int(numbers[0]) if numbers else 5, numbers[1] if numbers[1:] else 4.0, [w for w in sys.argv[1:] if "=" in w]
        )
