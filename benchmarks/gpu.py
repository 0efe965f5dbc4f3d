"""Measure speed and memory of training at the papers' sizes on a GPU, within a budget of seconds.

    python benchmarks/gpu.py --out FOLDER [--budget 200] [--parts NAME …] [--device auto] [--tiny]

Corpora are made here: text with a Zipfian vocabulary, and noise as pictures. Parts run in order of value, in a process of
their own, which continues after a failed part. If the process ends, another one does the rest. Every result is in
`FOLDER/gpu.json`, tables of the profiler are beside it.

1. `PRESET PHASE`: milliseconds of a step as training takes it (`step`), of reading and preparing a batch (`prepare`), of
   queueing a prepared step's operations (`queue`), and of a prepared step (`alone`). `prepare` and `alone` wait for the
   device. Peak memory is what torch allocates beyond what there was before the model. FLOPs are the project's count. Their
   share of the peak is of the card's data sheet (dense).
2. `profile PRESET PHASE`: milliseconds in which the device computed in a step (`busy`), kernels, the operations that take
   most, and the lines that wait for the device.
3. `memory PRESET PHASE`: the run's own check, and the plan of `benchmarks/scaling_estimate.py`, against the peak.
4. Other settings: `iem.block=512`, `deterministic=false`, float32, `compile=true`.
5. `decoder UNITS`: the decoder's share of a step's time (Mujika 2023, Figure 3).
6. `loss SIZE`: the IEM loss in blocks and its formula, a softmax over the whole matrix. There are SIZE queries and SIZE
   candidates of 256 dimensions in bfloat16, forward and backward. Memory is beyond inputs and gradients. The formula is
   left out where it does not fit.

Ratios of phase one to end to end are printed last. `--tiny` shrinks models and corpora, to try this on a CPU.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # else `data` would be the script beside this one

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.scaling_estimate import measure_step
from experiments.timing import build_phase_trainer
from haed.iem.sampled_softmax import blockwise_cross_entropy
from pipeline.config import Options, Phase, load_options
from pipeline.run.device import setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
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
SIZES = {"cpu": (4096, 16384, 32768), "cuda": (16384, 65536, 131072)}  # of the loss, the last for blocks alone

Result = dict[str, Any]


def list_parts() -> list[str]:
    """Return the names of all parts, the most valuable first."""
    pairs = [f"{preset} {phase}" for preset in (TEXT, PICTURES) for phase in PHASES[:2]]
    parts = ["machine", *pairs, *(f"profile {pair}" for pair in pairs), *(f"memory {pair}" for pair in pairs)]
    parts += [f"{pair} {name}" for name in VARIANTS for pair in pairs]
    sizes = SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    parts += [*(f"{preset} finetune" for preset in (TEXT, PICTURES)), *(f"decoder {units}" for units in UNITS)]
    return [*parts, *(f"loss {size}" for size in sizes)]


def wait_for_device() -> None:
    """Wait for all that is queued on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Peak:
    """Peak memory since it was made, beyond what was in use then, in bytes."""

    def __init__(self) -> None:
        free()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self._read_status("VmRSS")

    def bytes(self) -> int:
        """Return the peak so far."""
        now = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else self._read_status("VmHWM")
        return now - self.before

    @staticmethod
    def _read_status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


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
        if kind == "decoder":
            return self.measure_decoder(words[0])
        if kind == "loss":
            return self.measure_loss(int(words[0]))
        return self.measure_training(kind, words[0], VARIANTS[words[1]] if words[1:] else [])

    def describe_machine(self) -> Result:
        """Describe the card, and measure its two ceilings."""
        result: Result = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]}
        # A core without instructions for bf16 would take minutes.
        for precision in ("bf16", "fp32") if self.device != "cpu" else ("fp32",):
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
            prepared_batches = trainer.prepare_batches()
            for _ in range(8):
                began = time.perf_counter()
                batches.append(next(prepared_batches))
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
            sums = trainer.progress.sums
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
            del batches, batch, prepared_batches
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
        peak = Peak()
        with self.open_trainer(phase, options) as trainer:
            at_rest = Peak()
            checked = sum(trainer.count_memory(next(trainer.prepare_batches())).values())
            for batch in islice(trainer.prepare_batches(), 3):
                trainer.step(batch)
            wait_for_device()
            measured = peak.bytes()
            weights = at_rest.before - peak.before
            del batch
        planned = measure_step(options, phase, 3).estimate_step(1, 25e9).memory
        free()
        result: Result = {
            "peak_gb": measured / 1e9,
            "weights_gb": weights / 1e9,
            "checked_gb": (weights + checked) / 1e9,
        }
        result |= {"planned_gb": sum(planned.values()) / 1e9, "plan_gb": {key: x / 1e9 for key, x in planned.items()}}
        return result | {
            "checked_share": (weights + checked) / measured,
            "planned_share": sum(planned.values()) / measured,
        }

    def measure_loss(self, size: int) -> Result:
        """Measure the IEM loss and its formula with their gradients; seconds are the least of three passes after one."""
        device = setup_compute(self.load(TEXT)).device
        parts = [torch.randn(size, 256, device=device, dtype=torch.bfloat16) / 4 for _ in range(2)]
        parts = [part.requires_grad_() for part in (*parts, torch.zeros(size, device=device))]
        target = torch.arange(size, device=device)
        losses: dict[str, Callable[..., torch.Tensor]] = {
            "blocks": lambda *inputs: blockwise_cross_entropy(*inputs).loss,
            "formula": lambda queries, keys, bias, targets: F.cross_entropy(
                (queries @ keys.t()).float() + bias, targets
            ),
        }
        result: Result = {}
        for name, loss in list(losses.items())[: 2 if size < SIZES[device.type][-1] else 1]:
            few = [x[:256].detach().requires_grad_() for x in parts]
            torch.autograd.grad(loss(*few, target[:256]), few)  # loads what products need
            peak, spent = Peak(), []
            for _ in range(4):
                wait_for_device()
                began = time.perf_counter()
                gradients = torch.autograd.grad(loss(*parts, target), parts)
                wait_for_device()
                spent.append(time.perf_counter() - began)
            used = peak.bytes() - sum(x.numel() * x.element_size() for x in gradients)
            result |= {f"{name}_s": min(spent[1:]), f"{name}_mb": used / 1e6, f"{name}_share": used / (4 * size * size)}
            del gradients
        return result

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


def read_results(arguments: argparse.Namespace) -> dict[str, Result]:
    """Return the results so far, of a part that did not end as an error."""
    path = arguments.out / "gpu.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run_parts(arguments: argparse.Namespace) -> None:
    """Run the parts that have no result in this process, and write what they find."""
    bench, results = Bench(arguments.out, arguments.device, arguments.tiny), read_results(arguments)

    def keep(part: str, result: Result) -> None:
        results[part] = result
        (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1))

    for part in arguments.parts:
        if part in results or time.time() > arguments.until:
            continue
        began = time.perf_counter()
        keep(part, {"error": "its process ended, see errors.txt"})
        try:
            result = bench.run(part)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500], "traceback": traceback.format_exc()[-4000:]}
        keep(part, result | {"seconds": time.perf_counter() - began})
        print(format_result(part, results[part]), flush=True)
        free()  # raises if the device is lost, and another process goes on


def supervise(arguments: argparse.Namespace) -> None:
    """Run all parts in child processes: another one goes on where one ends."""
    command = [sys.executable, "-u", __file__, *sys.argv[1:], "--child", "--until", str(arguments.until)]
    for _ in arguments.parts:
        left = arguments.until - time.time()
        if left > 0 and not set(read_results(arguments)).issuperset(arguments.parts):
            with open(arguments.out / "errors.txt", "a") as errors, suppress(subprocess.TimeoutExpired):
                subprocess.run(command, stderr=errors, timeout=left + 5)


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
    (arguments.out / "gpu.json").unlink(missing_ok=True)
    supervise(arguments)
    for line in format_ratios(read_results(arguments)):
        print(line)


if __name__ == "__main__":
    main()
