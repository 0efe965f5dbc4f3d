"""What Prefect costs: until the UI answers, until a training's first step, over a training, and over `haed run`.

    python benchmarks/overhead.py [--parts serve run training] [--repeats 3] [--steps 700]

`serve`: `haed serve` from nothing, and again, to the moment when every flow can be triggered; then from the click on a
training to its first step. `run`: `haed run` without a server, the first time and with a database, beside the same stages
called by one Python process; they take turns. `training`: so many steps of the preset wikitext2 as a bare stage, with no server
about, and as a flow, with server, runner and TensorBoard on the same cores; they take turns.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

from pipeline.metrics import read
from tests.flows.api import until
from tests.flows.conftest import Served

STAGES = """
import sys
from pipeline import config, training
from pipeline.evaluate import evaluate
from pipeline.index import index
from pipeline.report import report
from pipeline.sampling import sample
from pipeline.sharding import shard
options = config.load("quickstart", sys.argv[1:])
for stage in (shard, training.pretrain, training.finetune, evaluate, index, sample, report):
    stage(options)
"""
SHORT = ["pretrain.seconds=null", "finetune.seconds=null", "pretrain.steps=20", "finetune.steps=20", "source.kind=text"]
SHORT += ["validation.times=0", "batch.sequences=1"]


def text(folder: Path) -> list[str]:
    """A small source in a folder, and its options."""
    (folder / "text").mkdir(exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for split, name in (("train", "argparse.py"), ("valid", "heapq.py"), ("test", "queue.py")):
        shutil.copy(library / name, folder / "text" / f"{split}-{name}")
    return [f"source.path={folder / 'text'}"]


def timed(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def ended(command: list[str], folder: Path) -> float:
    """Seconds that a command takes."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    environment = clean | {"PYTHONPATH": str(ROOT)}
    return timed(lambda: subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True))


def serve(folder: Path, repeats: int) -> None:
    first, later, clicks = [], [], []
    for repeat in range(repeats):
        place = folder / f"serve-{repeat}"
        place.mkdir()
        served = Served(place)
        first.append(timed(served.start))
        served.stop()
        later.append(timed(served.start))
        overrides = [*text(place), *SHORT, "name=clicked"]
        run = served.trigger("shard", {"overrides": overrides})
        until(60, lambda served=served, run=run: served.state(run) == "COMPLETED")
        metrics = place / "runs" / "clicked" / "pretrain" / "metrics.jsonl"

        def click(served: Served = served, overrides: list[str] = overrides, metrics: Path = metrics) -> None:
            served.trigger("pretrain", {"overrides": overrides})
            while not read(metrics):
                time.sleep(0.05)

        clicks.append(timed(click))
        served.stop()
    for name, found in (("serve, from nothing", first), ("serve, again", later), ("click to first step", clicks)):
        print(f"{name:20} {statistics.median(found):5.1f} s ({min(found):.1f} to {max(found):.1f})", flush=True)


def run(folder: Path, repeats: int) -> None:
    first, later = [], []
    for repeat in range(repeats):
        place = folder / f"run-{repeat}"
        place.mkdir()
        chosen = [*text(place), *SHORT]
        program = [sys.executable, "-m", "flows.cli", "run", "--config", "quickstart", *chosen]
        bare = [sys.executable, "-c", STAGES, *chosen]
        seconds = {}
        for name, command in (("first", program), ("one", bare), ("again", program), ("two", bare)):
            seconds[name] = ended([*command, f"name={name}", f"shards_dir=shards-{name}"], place)
        first.append(seconds["first"] - seconds["one"])
        later.append(seconds["again"] - seconds["two"])
    for name, found in (("haed run, first", first), ("haed run, again", later)):
        print(
            f"{name:20} {statistics.median(found):5.1f} s more than its stages ({min(found):.1f} to {max(found):.1f})"
        )


def training(folder: Path, repeats: int, steps: int) -> None:
    settings = [
        "source.kind=stdlib",
        f"shards_dir={folder / 'shards'}",
        "pretrain.seconds=null",
        f"pretrain.steps={steps}",
    ]
    stage = [sys.executable, "-m", "pipeline", "{}", "--config", "wikitext2", *settings]
    ended([word.format("shard") for word in stage], folder)
    served, ratios, fixed = Served(folder), [], []
    for repeat in range(repeats):
        whole, inside, rates = {}, {}, {}
        whole["bare"] = ended([*(word.format("pretrain") for word in stage), f"name=bare-{repeat}"], folder)
        served.start()
        began = time.monotonic()
        try:
            run = served.trigger("pretrain", {"preset": "wikitext2", "overrides": [*settings, f"name=flow-{repeat}"]})
            until(900, lambda run=run: served.state(run) == "COMPLETED")
            whole["flow"] = time.monotonic() - began
        finally:
            served.stop()
        for name in whole:
            records = read(folder / "runs" / f"{name}-{repeat}" / "pretrain" / "metrics.jsonl")
            inside[name] = records[-1]["seconds"]
            rates[name] = [
                record["steps_per_second"] for record in records if record["step"] % 50 == 0 and "loss" in record
            ]
        ratios += [bare / flow - 1 for bare, flow in zip(rates["bare"], rates["flow"], strict=True)]
        fixed.append(whole["flow"] - inside["flow"] - (whole["bare"] - inside["bare"]))
        print(f"steps {inside['bare']:.1f} s bare, {inside['flow']:.1f} s as a flow", flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{len(ratios)} times fifty steps take {middle:+.2%} (quartiles {low:+.2%} and {high:+.2%}); and "
        f"{statistics.median(fixed):+.1f} s before and after them"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("serve", "run", "training"), default=["serve", "run", "training"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=700)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "serve" in arguments.parts:
            serve(folder, arguments.repeats)
        if "run" in arguments.parts:
            run(folder, arguments.repeats)
        if "training" in arguments.parts:
            training(folder, arguments.repeats, arguments.steps)


if __name__ == "__main__":
    main()
