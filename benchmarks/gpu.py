"""Speed and memory of training at the papers' sizes on a GPU, within a budget of seconds.

    python benchmarks/gpu.py --out FOLDER [--budget 200] [--parts NAME …] [--device auto] [--tiny]

Corpora are made here: text with a Zipfian vocabulary, and noise as pictures. Parts run in order of value, in a process of
their own that goes on after a failed part. If it ends or hangs, another one does the rest. Every result is in
`FOLDER/gpu.json`, tables of the profiler are beside it.

1. `PRESET PHASE`: milliseconds of a step as training takes it (`step`); of reading and preparing a batch, waiting for its
   end (`prepare`); of queueing a prepared step's operations (`queue`); and of a prepared step, waiting for its end
   (`alone`). Peak memory is what torch allocates beyond what there was before the model. FLOPs are the project's count, and their share of
   the peak is of the card's data sheet (dense).
2. `profile PRESET PHASE`: milliseconds in which the device computed in a step (`busy`), kernels, the operations that take
   most, and the lines that wait for the device.
3. `memory PRESET PHASE`: the run's own check, and the plan of `benchmarks/scaling_estimate.py`, against the peak.
4. Other settings: `iem.block=512`, `deterministic=false`, float32, `compile=true`.
5. `graphs`: the main model's forward and backward pass as it is, and replayed from CUDA graphs.
6. `decoder UNITS`: the decoder's share of a step's time (Mujika 2023, Figure 3).

Ratios of phase one to end to end are printed last. `--tiny` shrinks models and corpora, to try this on a CPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch

from benchmarks.loss import Peak, wait_for_device
from benchmarks.scaling_estimate import measure_step
from experiments.timing import build_phase_trainer
from pipeline.config import Options, Phase, load_options
from pipeline.run.device import setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.run.system import estimate_memory
from pipeline.training.profile import product_rate, profile_phase
from pipeline.training.trainer import Trainer

TEXT, PICTURES = "paper-wikitext103", "paper-imagenet32"
PHASES = ("pretrain", "train", "finetune")
PEAKS = {"H100": {"bf16": 989.4e12, "fp32": 66.9e12}, "H200": {"bf16": 989.4e12, "fp32": 66.9e12}}  # SXM
UNITS = (64, 128, 256, 512, 1024, 2048)
VARIANTS = {
    "blocks": ["iem.block=512"],
    "unordered": ["deterministic=false"],
    "fp32": ["precision=fp32"],
    "compiled": ["compile=true"],
}
TINY = ["batch.sequences=1", "model.main.layers=1", "model.decoder.width=64"]
WARM_UP, STEPS, LONGEST = 6, 30, 4.0  # steps, steps, seconds of the measured ones

Result = dict[str, Any]


def list_parts() -> list[str]:
    """Return the names of all parts, the most valuable first."""
    pairs = [f"{preset} {phase}" for preset in (TEXT, PICTURES) for phase in PHASES[:2]]
    parts = ["machine", *pairs, *(f"profile {pair}" for pair in pairs), *(f"memory {pair}" for pair in pairs)]
    parts += [f"{pair} {name}" for name in VARIANTS for pair in pairs]
    return [
        *parts,
        "graphs",
        *(f"{preset} finetune" for preset in (TEXT, PICTURES)),
        *(f"decoder {units}" for units in UNITS),
    ]


def make_corpora(folder: Path, tiny: bool) -> None:
    """Write a folder of texts and one of pictures."""
    rng = np.random.default_rng(0)
    ranks = np.arange(150_000)
    lengths = np.clip(rng.normal(1.5 + 0.8 * np.log(ranks + 1.0) ** 0.8, 1.6), 1, 14).astype(int)
    letters = rng.choice(list("etaoinshrdlcumwfgypbvk"), lengths.sum()).tolist()
    ends = lengths.cumsum()
    words = ["".join(letters[end - size : end]) for end, size in zip(ends, lengths, strict=True)]
    likely = 1 / (ranks + 2.7) ** 1.15  # a step then has about as many distinct chunks as one of Wikipedia
    texts = folder / "texts"
    texts.mkdir(parents=True)
    for number in range(8 if tiny else 64):
        drawn = rng.choice(len(words), 3_000 if tiny else 24_000, p=likely / likely.sum())
        marks = rng.choice([" ", ", ", ". ", ".\n"], len(drawn), p=[0.86, 0.08, 0.05, 0.01])
        text = "".join(f"{words[word]}{mark}" for word, mark in zip(drawn, marks, strict=True))
        (texts / f"{number:03}.txt").write_text(text)
    pictures = folder / "pictures"
    pictures.mkdir()
    count = 256 if tiny else 4096
    noise = rng.integers(0, 256, (count, 3072), np.uint8)
    np.savez(pictures / "train_data_batch_1.npz", data=noise, labels=np.zeros(count, np.int64))


class Bench:
    """The parts, and what they have in common.

    Args:
        out: folder of the results.
        device: device=.
        tiny: shrink the models.
    """

    def __init__(self, out: Path, device: str, tiny: bool) -> None:
        self.out, self.device, self.tiny = out, device, tiny

    def load(self, preset: str, *words: str) -> Options:
        """Load the options of a preset with a corpus made here."""
        corpora = self.out / "corpora"
        source = {
            TEXT: ["source.kind=text", f"source.path={corpora}/texts"],
            PICTURES: [f"source.path={corpora}/pictures"],
        }
        limits = [f"{phase}.{limit}" for phase in PHASES for limit in ("epochs=null", "steps=1000")]
        return load_options(
            preset,
            [
                *source[preset],
                *limits,
                f"device={self.device}",
                f"runs_dir={self.out}/runs",
                f"shards_dir={self.out}/shards",
                "validation.times=0",
                *(TINY if self.tiny else []),
                *words,
            ],
        )

    @contextmanager
    def open_trainer(self, phase: str, options: Options) -> Iterator[Trainer]:
        """Build a trainer, and free its memory afterwards."""
        trainer = build_phase_trainer(phase, options, shard_source(options), self.out / "checkpoints")
        try:
            yield trainer
        finally:
            del trainer
            free()

    def run(self, part: str) -> Result:
        """Run a part by its name."""
        kind, *words = part.split()
        if kind == "machine":
            return self.describe_machine()
        if kind == "profile":
            return self.profile_step(*words)
        if kind == "memory":
            return self.compare_memory(*words)  # type: ignore[arg-type]
        if kind == "graphs":
            return self.compare_graphs()
        if kind == "decoder":
            return self.measure_decoder(words[0])
        return self.measure_training(kind, words[0], VARIANTS[words[1]] if words[1:] else [])

    def describe_machine(self) -> Result:
        """Describe the card, and measure its two ceilings."""
        result: Result = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
        for precision in ("bf16", "fp32"):
            machine = setup_compute(self.load(TEXT, f"precision={precision}"))
            result[f"product_{precision}_tflops"] = product_rate(machine) / 1e12
        result["name"] = machine.processor_name
        if machine.device.type == "cuda":
            with suppress(OSError):
                query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
                result["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            source = torch.empty(1 << 30, dtype=torch.uint8, device=machine.device)
            target = torch.empty_like(source)
            spent = []
            for _ in range(6):
                wait_for_device()
                began = time.perf_counter()
                target.copy_(source)
                wait_for_device()
                spent.append(time.perf_counter() - began)
            result["copy_tb_per_s"] = 2 * source.numel() / min(spent) / 1e12
        return result

    def measure_training(self, preset: str, phase: str, words: list[str]) -> Result:
        """Measure the steps of a phase; see the module."""
        options = self.load(preset, *words)
        setup_compute(options)
        peak = Peak()
        with self.open_trainer(phase, options) as trainer:
            with closing(trainer.run_steps()) as taken:  # type: ignore[type-var]
                began = time.perf_counter()
                for _ in islice(taken, WARM_UP):
                    wait_for_device()
                warm_up, before = time.perf_counter() - began, trainer.position.flops
                steps, began = 0, time.perf_counter()
                while steps < STEPS and time.perf_counter() - began < LONGEST:
                    next(taken)
                    steps += 1
                wait_for_device()
                step = (time.perf_counter() - began) / steps
                flops = (trainer.position.flops - before) / steps
            peak_bytes = peak.bytes()
            batches, prepared = [], []
            made = trainer.prepare_batches()
            for _ in range(8):
                began = time.perf_counter()
                batches.append(next(made))
                wait_for_device()
                prepared.append(time.perf_counter() - began)
            queue, alone = [], []
            for batch in batches:
                wait_for_device()
                began = time.perf_counter()
                trainer.step(batch)
                queue.append(time.perf_counter() - began)
                wait_for_device()
                alone.append(time.perf_counter() - began)
            precision, name = trainer.compute.precision_name, trainer.compute.processor_name
            parameters = sum(x.numel() for x in trainer.objective.system.parameters())
            sums = trainer.state.sums
            result = {
                "step_ms": 1e3 * step,
                "prepare_ms": 1e3 * statistics.median(prepared),
                "queue_ms": 1e3 * statistics.median(queue),
                "alone_ms": 1e3 * statistics.median(alone),
                "warm_up_s": warm_up,
                "steps": steps,
                "tflop": flops / 1e12,
                "tflops": flops / step / 1e12,
                "parameters": parameters,
                "precision": precision,
                "deterministic": trainer.compute.deterministic,
                "peak_gb": peak_bytes / 1e9,
                **{name: float(sums[name]) / float(sums["steps"]) for name in ("candidates", "chunks")},
            }
            if trainer.compute.device.type == "cuda":
                result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            for card, peaks in PEAKS.items():
                if card in name:
                    result["share_of_peak"] = flops / step / peaks[precision]
                    result["share_of_peak_alone"] = flops / statistics.median(alone) / peaks[precision]
            del batches, batch, made
        return result

    def profile_step(self, preset: str, phase: str) -> Result:
        """Profile steps as training takes them: operations, kernels, waits."""
        options = self.load(preset)
        with self.open_trainer(phase, options) as trainer:
            on_gpu = trainer.compute.device.type == "cuda"
            taken = trainer.run_steps()
            for _ in islice(taken, WARM_UP):
                wait_for_device()
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if on_gpu:
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=kinds) as profiler:
                for _ in islice(taken, 2):
                    pass
                wait_for_device()
            averages = profiler.key_averages()
            lines = [
                f"Two steps of {preset} {phase}, by time of the {'device' if on_gpu else 'host'}, then of the host.",
                averages.table(sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total", row_limit=40),
                averages.table(sort_by="self_cpu_time_total", row_limit=30),
            ]
            name = f"profile-{preset}-{phase}.txt"
            (self.out / name).write_text("\n".join(lines))
            calls = {event.key: event.count / 2 for event in averages}
            watched = ("Synchronize", "Memcpy", "_local_scalar_dense", "LaunchKernel", "nonzero")
            result: Result = {
                "table": name,
                "calls": {key: count for key, count in calls.items() if any(word in key for word in watched)},
            }
            if on_gpu:
                kernels = [x for x in profiler.events() if x.device_type == torch.autograd.DeviceType.CUDA]
                result |= {"kernels": len(kernels) / 2, "busy_ms": busy_time(kernels) / 2e3}
                top = sorted(averages, key=lambda x: x.self_device_time_total, reverse=True)[:12]
                result["top_ms"] = {x.key[:90]: x.self_device_time_total / 2e3 for x in top}
                result["waits"] = find_waits(taken)
        return result

    def compare_memory(self, preset: str, phase: Phase) -> Result:
        """Compare the planned memory with the peak of a few steps."""
        options = self.load(preset, f"name={preset}-{phase}")
        corpus = shard_source(options)
        run = RunFolder.create(options)
        run.write_corpus_record(corpus)
        setup_compute(options)
        peak = Peak()
        with self.open_trainer(phase, options) as trainer:
            at_rest = Peak()
            for batch in islice(trainer.prepare_batches(), 3):
                trainer.step(batch)
            wait_for_device()
            measured = peak.bytes()
            weights = at_rest.before - peak.before
            del batch
        checked = estimate_memory(options, corpus.build_chunker(), getattr(options, phase))
        planned = measure_step(options, phase, 3).estimate_step(1, 25e9).memory
        free()
        result: Result = {
            "peak_gb": measured / 1e9,
            "weights_gb": weights / 1e9,
            "checked_gb": sum(checked.values()) / 1e9,
        }
        result |= {"planned_gb": sum(planned.values()) / 1e9, "plan_gb": {key: x / 1e9 for key, x in planned.items()}}
        return result | {
            "checked_share": sum(checked.values()) / measured,
            "planned_share": sum(planned.values()) / measured,
        }

    def compare_graphs(self) -> Result:
        """Time the main model's forward and backward pass on its own, and replayed from graphs."""
        options = self.load(TEXT)
        machine, spent = setup_compute(options), dict[str, float]()
        with self.open_trainer("pretrain", options) as trainer:
            main: Any = trainer.objective.system.main
            batch = options.batch
            grid = torch.randn(batch.sequences, batch.context, options.model.encoder.width, device=machine.device)
            inputs = grid.requires_grad_(), torch.zeros(grid.shape[:2], dtype=torch.bool, device=machine.device)
            ways: dict[str, Any] = {"eager": main}
            for name in ("eager", "graphs"):
                if name == "graphs":
                    with torch.autocast("cuda", machine.autocast, machine.autocast is not None, cache_enabled=False):
                        ways[name] = torch.cuda.make_graphed_callables(main, inputs)
                for number in range(25):
                    if number == 5:
                        wait_for_device()
                        began = time.perf_counter()
                    with machine.use_precision():
                        found = ways[name](*inputs)
                    found.float().sum().backward()
                queued = time.perf_counter() - began
                wait_for_device()
                spent |= {f"{name}_queue_ms": 50 * queued, f"{name}_ms": 50 * (time.perf_counter() - began)}
            del found, inputs, grid, ways
        return spent

    def measure_decoder(self, units: str) -> Result:
        """Measure the decoder's share of an end-to-end step, with a synchronisation after each part."""
        options = self.load(TEXT, f"model.decoder.width={units}", "model.main.heads=8", f"name=decoder-{units}")
        corpus = shard_source(options)
        RunFolder.create(options).write_corpus_record(corpus)
        profile = asdict(profile_phase(options, "train", 8))
        free()
        spent = profile["milliseconds"]
        return {"share": spent["decoder"] / sum(spent.values()), "milliseconds": spent, "kept": profile["kept"]}


def free() -> None:
    """Free what is referred to no more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def busy_time(kernels: list[Any]) -> float:
    """Return the microseconds in which at least one of the kernels ran."""
    total, end = 0.0, 0.0
    for start, stop in sorted((x.time_range.start, x.time_range.end) for x in kernels):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def find_waits(steps: Iterator[None]) -> dict[str, int]:
    """Return the lines of a step that wait for the device, with how often they do."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            next(steps)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(Counter(f"{x.filename}:{x.lineno}" for x in caught if "called a synchronizing" in str(x.message)))


def run_parts(arguments: argparse.Namespace) -> None:
    """Run parts in this process, and write what they find after each one."""
    bench = Bench(arguments.out, arguments.device, arguments.tiny)
    for part in arguments.parts:
        if time.time() > arguments.until:
            break
        began = time.perf_counter()
        print(json.dumps({"begins": part}), flush=True)
        try:
            result = bench.run(part)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()[-4000:]}
        result["seconds"] = time.perf_counter() - began
        print(json.dumps({"part": part, "result": result}), flush=True)
        free()  # raises if the device is lost, and another process goes on


def supervise(arguments: argparse.Namespace) -> dict[str, Result]:
    """Run all parts in child processes: another one goes on where one ends or hangs."""
    left, results, until = list(arguments.parts), dict[str, Result](), arguments.until
    while left and time.time() < until:
        command = [sys.executable, "-u", __file__, "--out", str(arguments.out), "--device", arguments.device]
        command += ["--child", "--until", str(until), *(["--tiny"] if arguments.tiny else []), "--parts", *left]
        with open(arguments.out / "errors.txt", "a") as errors:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            timer = threading.Timer(max(1.0, until + 5 - time.time()), child.kill)
            timer.start()
            assert child.stdout is not None
            running = left[0]
            for line in child.stdout:
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                running = said.get("begins", running)
                if "part" in said:
                    results[said["part"]] = said["result"]
                    print(format_result(said["part"], said["result"]), flush=True)
                    (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1))
            status = child.wait()
            timer.cancel()
        if running not in results:
            results[running] = {"error": f"the process ended with status {status}, see errors.txt"}
            print(format_result(running, results[running]), flush=True)
        left = left[left.index(running) + 1 :]
        if status == 0:
            break
    (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1))
    return results


def format_result(part: str, result: Result) -> str:
    """Format a part's numbers in a line, an error with the end of its traceback."""
    if "error" in result:
        return f"{part}: FAILED {result['error']}\n{result.get('traceback', '')[-700:]}"
    shown = {key: f"{x:.4g}" if isinstance(x, float) else x for key, x in result.items() if not isinstance(x, dict)}
    lines = [f"{part}: " + ", ".join(f"{key} {x}" for key, x in shown.items())]
    for key, table in result.items():
        if isinstance(table, dict):
            cells = (f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in table.items())
            lines.append(f"    {key}: " + "; ".join(cells))
    return "\n".join(lines)


def format_ratios(results: dict[str, Result]) -> list[str]:
    """Compare phase one with training end to end, for each preset and setting that has both."""
    lines = []
    for preset in (TEXT, PICTURES):
        for name in ("", *VARIANTS):
            one, end = (results.get(f"{preset} {phase} {name}".strip(), {}) for phase in PHASES[:2])
            if "step_ms" in one and "step_ms" in end:
                times = {key: end[f"{key}_ms"] / one[f"{key}_ms"] for key in ("step", "alone")}
                share = one["peak_gb"] / max(end["peak_gb"], 1e-9)
                lines.append(
                    f"{preset} {name}: phase one {times['step']:.2f} times as fast ({times['alone']:.2f} without preparing), "
                    f"{share:.3f} of the memory"
                )
    return lines


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds")
    parser.add_argument("--parts", nargs="+", default=list_parts(), metavar="NAME")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_parts(arguments)
        return
    arguments.until = time.time() + arguments.budget
    if not (arguments.out / "corpora").exists():
        make_corpora(arguments.out / "corpora", arguments.tiny)
    for line in format_ratios(supervise(arguments)):
        print(line)


if __name__ == "__main__":
    main()
