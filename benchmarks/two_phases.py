"""Learning in the embedding space against learning end to end, at equal seconds of training (the paper's Figure 4).

    python benchmarks/two_phases.py --seconds 600 --seeds 3 source.path=../shared/data/wikitext-2

| arm | phase one | phase two |
|---|---|---|
| end-to-end | | every chunk decoded |
| share | no IEM loss, the preset's share of the chunks decoded | the preset's share |
| paper | the paper's IEM loss, plain products and 3 batches of negatives, nothing decoded | every chunk decoded |
| corrected | the same with log π, cosine, scale, bias and a head | every chunk decoded |
| two-phases | uncorrected IEM loss, and a share of the chunks decoded | the preset's share, no IEM loss |
| phase-one | the preset's, for the whole time; scored by the mixture | |
| mixture | the preset: IEM loss, and a share of the chunks decoded, in one likelihood | the same with a larger share |

All have the same model, text, batches and learning rates, and one thread each; --parallel of them run side by side, limited
in steps by a clock that is measured first (pipeline/train/clock.py). Runs that were finished are kept: the same command goes on
after it was stopped. Ends with `haed compare` over the runs of the first seed, and prints exact bits/char of the valid split
for all. Nothing is asserted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

from pipeline.config import load
from pipeline.run.metrics import read
from pipeline.run.shards import open_shards
from pipeline.train.clock import seconds_of_a_step, training, unlimited

NOTHING, ALL = ["pretrain.decode_fraction=0"], ["finetune.decode_fraction=1"]
PLAIN = ["iem.correction=none", "iem.duplicates=true", "iem.similarity=dot", "iem.scale=none", "iem.bias=false"]
PLAIN += ["iem.head=none", "iem.extra_batches=3"]
CORRECTED = ["iem.correction=inclusion", "iem.similarity=cosine", "iem.head=linear", "iem.extra_batches=3"]
ALONE = ["model.mixture.known=0", "finetune.iem_weight=0"]  # the decoder is the likelihood
ARMS = {
    "end-to-end": ALONE,
    "share": [*ALONE, "pretrain.iem_weight=0"],
    "paper": [*ALONE, *NOTHING, *ALL, *PLAIN],
    "corrected": [*ALONE, *NOTHING, *ALL, *CORRECTED],
    "two-phases": [*ALONE, "iem.correction=none"],
    "phase-one": ["pretrain.rate_to=0.05"],
    "mixture": [],
}
PHASES: dict[str, tuple[str, ...]] = {"end-to-end": ("train",), "phase-one": ("pretrain",)}
NO_LIMITS = unlimited("pretrain", "finetune", "train")
Clock = dict[str, float]  # of arm/phase, in seconds


def phases(arm: str) -> tuple[str, ...]:
    return PHASES.get(arm, ("pretrain", "finetune"))


def stage(*arguments: str) -> dict:
    """Runs a command of the pipeline and returns its JSON."""
    command = [sys.executable, "-m", "pipeline", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(config: str, overrides: list[str]) -> Clock:
    """The seconds of a step of every phase of every arm."""
    with tempfile.TemporaryDirectory() as folder:
        arms = {}
        for arm, more in ARMS.items():
            for phase in phases(arm):
                options = load(config, [*overrides, *more, *NO_LIMITS, "threads=1", f"{phase}.steps=1000"])
                arms[f"{arm}/{phase}"] = training(phase, options, open_shards(options), Path(folder) / arm)
        return seconds_of_a_step(arms)


def run(arm: str, seed: int, seconds: float, config: str, overrides: list[str], clock: Clock) -> tuple[str, str, float]:
    """Trains one arm and scores it: arm, run, bits/char."""
    options = load(config, overrides)
    share = options.pretrain.seconds / (options.pretrain.seconds + options.finetune.seconds)
    shares = {"pretrain": share, "finetune": 1 - share} if len(phases(arm)) > 1 else {phases(arm)[0]: 1.0}
    name = f"{arm}-{seconds:.0f}s-{seed}"
    folder = Path(options.runs_dir) / name
    if not (folder / "evaluation.json").is_file():
        settings = ["--config", config, *overrides, *ARMS[arm], *NO_LIMITS, f"name={name}", f"seed={seed}", "threads=1"]
        for phase in phases(arm):
            stage(phase, *settings, f"{phase}.steps={seconds * shares[phase] / clock[f'{arm}/{phase}']:.0f}")
        for phase in phases(arm):
            path = folder / phase / "metrics.jsonl"
            records = [record | {"seconds": record["step"] * clock[f"{arm}/{phase}"]} for record in read(path)]
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        stage("evaluate", name, "evaluate.split=valid", "evaluate.yardsticks=false", f"runs_dir={options.runs_dir}")
    return arm, name, json.loads((folder / "evaluation.json").read_text())["bits_per_char"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--config", default="wikitext2")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--output", type=Path, default=Path("two-phases"), help="folder of the comparison and the clock"
    )
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    stage("shard", "--config", arguments.config, *arguments.overrides)
    arguments.output.mkdir(exist_ok=True)
    kept = arguments.output / "clock.json"
    if not kept.is_file():
        kept.write_text(json.dumps(measured(arguments.config, arguments.overrides), indent=1))
    clock: Clock = json.loads(kept.read_text())
    for name, each in clock.items():
        print(f"{name:22} {each * 1000:7.1f} ms a step", flush=True)
    with ThreadPoolExecutor(arguments.parallel) as pool:
        futures = [
            pool.submit(run, arm, seed, arguments.seconds, arguments.config, arguments.overrides, clock)
            for seed in range(arguments.seeds)
            for arm in arguments.arms
        ]
        results = []
        for future in futures:
            results.append(future.result())
            print("{1:24} {2:.4f} bits/char".format(*results[-1]), flush=True)
    for arm in arguments.arms:
        bits = [result[2] for result in results if result[0] == arm]
        print(f"{arm:12} mean {statistics.mean(bits):.4f}  from {min(bits):.4f} to {max(bits):.4f}")
    runs_dir = load(arguments.config, arguments.overrides).runs_dir
    shown = [name for _, name, _ in results[: len(arguments.arms)]]
    stage("compare", *shown, "--output", str(arguments.output), "--runs-dir", runs_dir)


if __name__ == "__main__":
    main()
