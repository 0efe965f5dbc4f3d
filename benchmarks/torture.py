"""Kill training with SIGKILL at random moments, resume it, and compare it with a run that was left alone.

    python benchmarks/torture.py [--kills 50] [--steps 400] [--stages pretrain finetune train] [--cases lstm mixture ranks …]
        [--seed 0] [--threads 2]

A case is a small model on some of the Python standard library's files. A stage takes --steps steps, is saved every 5 steps
and validated 8 times. So kills meet set-up, steps, saves and evaluations. The whole group of processes is killed at a
moment drawn evenly from the time that the stage takes alone. After --kills kills of a running process, the stage is left to
end. Weights must agree in every bit, and metrics.jsonl in every line but for seconds and rates. `lost` is the time from the
last checkpoint (or the start) to the kill. It exits with 1 if anything differed.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.run.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SMALL = """
    model.encoder.token_width=4 model.encoder.hidden=16 model.encoder.width=16
    model.main.layers=1 model.main.width=16 model.main.heads=2 model.main.head_width=8 model.main.ffn=32
    model.decoder.width=16 model.decoder.token_width=8 model.decoder.ffn=32 model.decoder.heads=2
    batch.context=16 batch.sequences=2 optimizer.warmup_steps=20 optimizer.ema=0.9 iem.extra_batches=2
    validation.windows=16 validation.times=8 checkpoint.every_steps=5
""".split()
MIXTURE = """
    model.mixture.known=500 model.encoder.rows=64 model.decoder.grams.rows=64
    iem.correction=inclusion finetune.iem_weight=1
""".split()
CASES: dict[str, list[str]] = {
    "lstm": [],
    "transformer": ["model.decoder.kind=transformer"],
    "mixture": MIXTURE,
    "workers": ["loader.workers=2"],
    "ranks": ["launcher.processes=2", *MIXTURE],
    "first": ["launcher.processes=2", "finetune.trains=decoder_first", "finetune.decoder_steps=200"],
}
STAGES = ("pretrain", "finetune", "train")
TIMED = ("seconds", "steps_per_second", "chunks_per_second")


@dataclass
class Outcome:
    """Kills of a stage in a case, those that left a half-written checkpoint, seconds lost by each, and differences."""

    kills: int = 0
    in_saves: int = 0
    lost: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class Bench:
    """A folder with a text, its shards, and runs."""

    def __init__(self, folder: Path, steps: int, threads: int) -> None:
        self.folder = folder
        (folder / "text").mkdir()
        library = Path(sysconfig.get_paths()["stdlib"])
        for split, name in (("train", "textwrap.py"), ("valid", "heapq.py"), ("test", "queue.py")):
            (folder / "text" / f"{split}-{name}").write_bytes((library / name).read_bytes())
        self.settings = SMALL + [f"{stage}.{limit}" for stage in STAGES for limit in ("seconds=null", f"steps={steps}")]
        self.settings += [f"threads={threads}", "source.kind=text", f"source.path={folder / 'text'}"]
        self.finish("shard", "shards", [])

    def start(self, stage: str, name: str, more: list[str]) -> "subprocess.Popen[bytes]":
        """Start a stage whose waiting threads leave the cores to others: where they spin, a step takes ten times as long."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", stage, *self.settings, *more, f"name={name}", "--json"],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def finish(self, stage: str, name: str, more: list[str]) -> float:
        """Run a stage to its end and return the seconds it took."""
        began = time.monotonic()
        self.wait_for(self.start(stage, name, more))
        return time.monotonic() - began

    def wait_for(self, process: "subprocess.Popen[bytes]") -> None:
        errors = process.communicate()[1].decode()
        if process.returncode:
            raise RuntimeError(f"{process.args!r}: {errors[-1500:]}")

    def torture(self, case: str, stage: str, kills: int, chance: random.Random) -> Outcome:
        """Kill a stage so many times, and compare its end with that of an undisturbed one."""
        alone, hurt, outcome = f"{case}-alone", f"{case}-killed", Outcome()
        takes = self.finish(stage, alone, CASES[case])
        checkpoints = self.folder / "runs" / hurt / stage / "checkpoints"
        while outcome.kills < kills:
            began = time.time()
            process = self.start(stage, hurt, CASES[case])
            try:
                process.wait(chance.uniform(0, takes * 1.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                outcome.kills += 1
                outcome.in_saves += bool(list(checkpoints.glob(".step-*.partial")))
                latest = checkpoints / "latest"
                outcome.lost.append(time.time() - max(began, latest.stat().st_mtime if latest.is_file() else 0))
                continue
            self.wait_for(process)
            if outcome.kills < kills:  # it came to its end: once more from the start, under another name
                outcome.differences += self.compare(stage, alone, hurt)
                again = self.folder / "runs" / hurt / stage
                again.rename(again.with_name(f"{stage}-{time.time_ns()}"))
        self.finish(stage, hurt, CASES[case])
        outcome.differences += self.compare(stage, alone, hurt)
        return outcome

    def compare(self, stage: str, one: str, other: str) -> list[str]:
        """Return what differs between two runs of a stage."""
        weights, metrics = [], []
        for name in (one, other):
            folder = self.folder / "runs" / name / stage
            checkpoint = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
            weights.append({path.name: load_file(path) for path in sorted(checkpoint.glob("*.safetensors"))})
            records = read_metrics(folder / "metrics.jsonl")
            metrics.append([{key: value for key, value in record.items() if key not in TIMED} for record in records])
        different = [
            f"{file} {name}"
            for file in weights[0]
            for name, value in weights[0][file].items()
            if not torch.equal(value, weights[1][file][name])
        ]
        return different + (["metrics.jsonl"] if metrics[0] != metrics[1] or not metrics[0] else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    arguments = parser.parse_args()
    chance, wrong = random.Random(arguments.seed), 0
    if "finetune" in arguments.stages and "pretrain" not in arguments.stages:
        arguments.stages.insert(0, "pretrain")
    print(f"{'case':12} {'stage':9} {'kills':>5} {'in saves':>8} {'lost s: median':>14} {'worst':>6}  differences")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.steps, arguments.threads)
        for case in arguments.cases:
            for stage in arguments.stages:
                outcome = bench.torture(case, stage, arguments.kills, chance)
                lost = outcome.lost or [0.0]
                wrong += len(outcome.differences)
                print(
                    f"{case:12} {stage:9} {outcome.kills:5} {outcome.in_saves:8} {statistics.median(lost):14.2f} "
                    f"{max(lost):6.2f}  {len(outcome.differences)} {' '.join(outcome.differences[:3])}",
                    flush=True,
                )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
