"""Two phases against training end to end, at equal seconds of training, with the same model, text and batches.

    python benchmarks/two_phases.py --seconds 200 --seeds 3 --config wikitext2 source.path=../shared/data/wikitext-2

Arms, by their share of the seconds: `two-phases` (the preset's own phases), `end-to-end` (`haed train`), and `no-iem`
(the two phases with `pretrain.iem_weight=0`: decoding a random share of the chunks, then more of them). Every run has one
thread; --parallel of them run side by side, and the order of the arms is reversed for every other seed, so that noise on
the machine meets all arms. Prints exact bits/char of the valid split for every run, and means; nothing is asserted.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

from pipeline.config import load

ARMS = ("two-phases", "end-to-end", "no-iem")


def stage(*arguments: str) -> dict:
    """Runs a command of the pipeline and returns its JSON."""
    command = [sys.executable, "-m", "pipeline", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(arm: str, seed: int, seconds: float, config: str, overrides: list[str]) -> tuple[str, int, float, int]:
    """Trains one arm and scores it: arm, seed, bits/char, steps."""
    options = load(config, overrides)
    share = options.pretrain.seconds / (options.pretrain.seconds + options.finetune.seconds)
    name = f"{arm}-{config}-{seconds:.0f}s-{seed}"
    common = ["--config", config, *overrides, f"name={name}", f"seed={seed}", "threads=1", "validation.times=0"]
    if arm == "end-to-end":
        steps = stage("train", *common, f"train.seconds={seconds}")["steps"]
    else:
        weight = ["pretrain.iem_weight=0"] if arm == "no-iem" else []
        steps = stage("pretrain", *common, *weight, f"pretrain.seconds={seconds * share}")["steps"]
        steps += stage("finetune", *common, *weight, f"finetune.seconds={seconds * (1 - share)}")["steps"]
    found = stage("evaluate", name, "evaluate.split=valid", "evaluate.yardsticks=false", *overrides)
    return arm, seed, found["bits_per_char"], steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--config", default="wikitext2")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    stage("shard", "--config", arguments.config, *arguments.overrides)
    jobs = [(arm, seed) for seed in range(arguments.seeds) for arm in (ARMS if seed % 2 == 0 else ARMS[::-1])]
    with ThreadPoolExecutor(arguments.parallel) as pool:
        futures = [
            pool.submit(run, arm, seed, arguments.seconds, arguments.config, arguments.overrides) for arm, seed in jobs
        ]
        results = []
        for future in futures:
            results.append(future.result())
            print("{:12} seed {}  {:.4f} bits/char  {} steps".format(*results[-1]), flush=True)
    for arm in ARMS:
        bits = [result[2] for result in results if result[0] == arm]
        print(
            f"{arm:12} mean {statistics.mean(bits):.4f}  from {min(bits):.4f} to {max(bits):.4f}  ({len(bits)} seeds)"
        )


if __name__ == "__main__":
    main()
