"""What Prefect costs: until the UI answers, until a training's first step, over a training, and over `haed run`.

    python benchmarks/overhead.py [--parts serve ask run training] [--repeats 3] [--turns 20] [--seconds 15]

`serve`: `haed serve` from nothing, and again, to the moment when every flow can be triggered; then from the click on a
training to its first step. `ask`: from the click on `neighbours` to its table, when a process is ready for it. `run`: `haed
run` without a server, the first time and with a database, beside the same stages called by one Python process; they take
turns. `training`: the preset wikitext2 as a bare stage and as a flow, with server, runner and TensorBoard on the same cores.
Both are there all the time, and all processes of one are stopped while the other runs, turn by turn, so that a noisy machine
is as noisy for both.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
SETTLING = 3.0  # seconds after a change of turns that do not count
sys.path[0] = str(ROOT)  # else `data` would be the script beside this one

from pipeline.run.metrics import read_metrics
from tests.flows.api import until
from tests.flows.conftest import Served

STAGES = """
import sys
from pipeline import config
from pipeline.train import stages
from pipeline.score.evaluate import evaluate_run
from pipeline.probe.index import build_index
from pipeline.show.report import write_report
from pipeline.probe.sample import sample
from pipeline.run.shards import shard_source
options = config.load_options("quickstart", sys.argv[1:])
for stage in (shard_source, stages.pretrain, stages.finetune, evaluate_run, build_index, sample, write_report):
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
    return timed(lambda: subprocess.run(command, cwd=folder, env=_clean(), check=True, capture_output=True))


def _clean() -> dict[str, str]:
    """The environment, without what is set for Prefect."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")} | {
        "PYTHONPATH": str(ROOT)
    }


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
            while not read_metrics(metrics):
                time.sleep(0.05)

        clicks.append(timed(click))
        served.stop()
    for name, found in (("serve, from nothing", first), ("serve, again", later), ("click to first step", clicks)):
        print(f"{name:20} {statistics.median(found):5.1f} s ({min(found):.1f} to {max(found):.1f})", flush=True)


def ask(folder: Path, repeats: int) -> None:
    place = folder / "ask"
    place.mkdir()
    served, asked = Served(place), {"run": "asked", "queries": ["return ", "def "]}
    served.start()
    try:
        made = served.trigger("haed", {"overrides": [*text(place), *SHORT, "name=asked"]})
        until(300, lambda: served.state(made) == "COMPLETED")
        seconds = []
        for _ in range(repeats):
            run = served.trigger("neighbours", asked)
            seconds.append(timed(lambda run=run: until(60, lambda: served.state(run) == "COMPLETED", every=0.02)))
    finally:
        served.stop()
    print(f"{'click to neighbours':20} {statistics.median(seconds):5.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")


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


def training(folder: Path, turns: int, seconds: float) -> None:
    """A bare stage, and a flow with all that stands around it; the one runs while the other's processes are stopped."""
    settings = [
        "source.kind=stdlib",
        f"shards_dir={folder / 'shards'}",
        "pretrain.seconds=null",
        "pretrain.steps=1000000",
    ]
    stage = [sys.executable, "-m", "pipeline", "{}", "--config", "wikitext2", *settings]
    ended([word.format("shard") for word in stage], folder)
    served = Served(folder)
    served.start()
    bare = subprocess.Popen(
        [*(word.format("pretrain") for word in stage), "name=bare", "log_steps=1"],
        cwd=folder,
        env=_clean(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        served.trigger("pretrain", {"preset": "wikitext2", "overrides": [*settings, "name=flow", "log_steps=1"]})
        logs = {name: folder / "runs" / name / "pretrain" / "metrics.jsonl" for name in ("bare", "flow")}
        until(120, lambda: all(len(read_metrics(path)) > 10 for path in logs.values()))
        processes = {"bare": bare.pid, "flow": served.process.pid}
        ratios = []
        for turn in range(turns):
            rates = {}
            for name in ("bare", "flow") if turn % 2 else ("flow", "bare"):
                for other, pid in processes.items():
                    _signal(pid, signal.SIGCONT if other == name else signal.SIGSTOP)
                time.sleep(SETTLING)
                first = read_metrics(logs[name])[-1]
                time.sleep(seconds)
                last = read_metrics(logs[name])[-1]
                rates[name] = (last["step"] - first["step"]) / (last["seconds"] - first["seconds"])
            ratios.append(rates["bare"] / rates["flow"] - 1)
            print(f"turn {turn}: {rates['bare']:.3f} steps/s bare, {rates['flow']:.3f} as a flow", flush=True)
    finally:
        for pid in (bare.pid, served.process.pid):
            _signal(pid, signal.SIGCONT)
        bare.kill()
        served.stop()
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"{turns} turns of {seconds:.0f} s: steps of a flow take {statistics.mean(ratios):+.2%} (standard error {error:.2%}; "
        f"median {middle:+.2%}, quartiles {low:+.2%} and {high:+.2%})"
    )


def _signal(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process and all that it started."""
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        process.send_signal(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("serve", "ask", "run", "training"), default=["serve", "ask", "run", "training"]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of a turn's two halves")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "serve" in arguments.parts:
            serve(folder, arguments.repeats)
        if "ask" in arguments.parts:
            ask(folder, arguments.repeats)
        if "run" in arguments.parts:
            run(folder, arguments.repeats)
        if "training" in arguments.parts:
            training(folder, arguments.turns, arguments.seconds)


if __name__ == "__main__":
    main()
