"""Run whole phases, resuming, evaluation, samples and the index on a GPU that is not there; `make dry-run-cuda`.

    .venv-cuda/bin/python benchmarks/dry_run_cuda.py [STEP …]

torch's CUDA build is given a CUDA runtime that computes nothing (`no_gpu.c`). Tensors lie on `cuda:0`, autocast is
CUDA's, and every check before a kernel is torch's own (devices, types, shapes). Within a training step torch refuses
whatever waits for the device (`torch.cuda.set_sync_debug_mode`). Results are meaningless and are not looked at.

Shapes that a kernel would find (`nonzero` on the device) are empty. So code that depends on one fails, as it would wait.
Batches are small: the gradient of more than 3,072 rows of an embedding is sorted on the device, which crashes on memory
that no kernel has written.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("libc10_cuda", "libtorch_python", "libtorch_cuda", "libcaffe2_nvrtc")
MODELS = {
    "lstm": ["iem.similarity=cosine", "model.encoder.rows=4096", "model.decoder.grams.rows=4096"],
    "transformer": ["model.decoder.kind=transformer", "model.decoder.previous=true", "iem.head=none", "batch.pieces=2"],
    "paper": [
        "model.mixture.known=0", "iem.correction=none", "iem.extra_batches=2", "iem.head=none",
        "model.main.positions=concatenated",
    ],
}  # fmt: skip
FAMILIES = (  # presets, trained end to end
    "flat", "hourglass", "hourglass-annotated", "top-down", "bottom-up", "retina", "spacebyte", "megabyte", "hred", "hred-transformer",
)  # fmt: skip
SMALL = [
    "device=cuda", "precision=bf16", "threads=1", "log_steps=5", "batch.sequences=2", "batch.context=32", "validation.windows=8",
    "validation.times=2", "evaluate.baselines=false",
]  # fmt: skip
SIZES = ["model.main.layers=2", "model.main.width=320", "model.encoder.width=256"]


def compile_stand_in(folder: Path) -> Path:
    """Compile the runtime as the library that torch would load for a driver, and return its path."""
    import torch

    written = (ROOT / "benchmarks" / "no_gpu.c").read_text()
    libraries = [Path(torch.__file__).parent / "lib" / f"{name}.so" for name in LIBRARIES]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = set(re.findall(r"\b(?:cuda|cublas|cu)[A-Z]\w+", symbols.stdout)) - {
        "cudaGetErrorName",
        "cudaGetErrorString",
    }
    rest = [f"int {name}(void) {{ return 0; }}" for name in sorted(names) if not re.search(rf"\b{name}\b", written)]
    source, library = folder / "rest.c", folder / "libcuda.so.1"
    source.write_text("\n".join(rest))
    headers = Path(torch.__file__).parents[1] / "triton" / "backends" / "nvidia" / "include"
    command: list[str | Path] = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        "-I",
        headers,
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library,
    ]
    subprocess.run([*command, ROOT / "benchmarks" / "no_gpu.c", source], check=True)
    return library


def list_commands(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the names and arguments of the commands, in order."""
    places = [f"runs_dir={folder}/runs", f"shards_dir={folder}/shards", "source.kind=text", f"source.path={ROOT}/haed"]
    places.append("source.pattern=**/*.py")
    commands = [("shard", ["shard", *places])]
    for name, model in MODELS.items():
        common = [*places, *SMALL, *SIZES, *model, f"name={name}"]
        for phase in ("pretrain", "finetune"):
            commands += [(name, [phase, *common, f"{phase}.steps={limit}"]) for limit in (12, 24)]  # and go on
        commands.append((name, ["train", *common, f"name={name}-train", "train.steps=12"]))
        commands += [(name, [stage, f"{folder}/runs/{name}"]) for stage in ("evaluate", "sample", "index")]
    for name in FAMILIES:
        common = ["--config", name, *places, *SMALL, f"name={name}"]
        commands.append((name, ["shard", *common]))
        commands += [(name, ["train", *common, f"train.steps={limit}"]) for limit in (12, 24)]
        commands += [(name, [stage, f"{folder}/runs/{name}"]) for stage in ("evaluate", "sample")]
    two = [*places, *SMALL, *SIZES, "device=cpu", "name=two", "launcher.processes=2", "train.steps=4"]
    commands.append(("ranks", ["train", *two]))  # on the CPU of a machine with a GPU
    return [*commands, ("types", ["pytest", "tests/haed/iem/test_precision.py"])]


def run_inside(arguments: list[str]) -> int:
    """Run a command in the process that has the GPU, and return its exit status."""
    import torch

    from haed import base
    from haed.sampling import Draw

    base.check_finite = lambda values, name: values  # no kernel has written them; sampling has bound its own
    from haed.iem import objective
    from pipeline.cli import main
    from pipeline.run.files import Evaluation
    from pipeline.training.trainer import Trainer

    # The number of distinct chunks is needed, which a GPU that is not there cannot find.
    objective.choose_preparation_device = lambda system: torch.device("cpu")
    step, draw = Trainer.step, Draw.__call__

    def watched(trainer: Trainer, batch: object) -> None:
        if trainer.position.step > 1:  # libraries wait when they are set up
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(trainer, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def draw_anything(drawn: Draw, logits: torch.Tensor) -> torch.Tensor:
        try:
            return draw(drawn, logits)
        except FloatingPointError:  # no kernel has written the scores
            return draw(drawn, torch.zeros(logits.shape))

    Trainer.step = watched  # type: ignore[method-assign,assignment]
    Trainer._check_finite = lambda *_: None  # type: ignore[method-assign]
    Evaluation.perplexity_note = ""  # type: ignore[method-assign,assignment]
    Draw.__call__ = draw_anything  # type: ignore[method-assign,assignment]
    return main(arguments)


def run_commands(chosen: list[str]) -> int:
    """Run all commands, or those chosen, and return the number of those that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = os.environ | {
            "LD_PRELOAD": str(compile_stand_in(folder)),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        environment["PYTHONFAULTHANDLER"] = "1"
        for title, arguments in list_commands(folder):
            if chosen and title not in ["shard", *chosen]:
                continue
            words = ["-m", *arguments] if title == "types" else [__file__, "--inside", *arguments, "--debug"]
            command = [sys.executable, *words]
            ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            how = f"FAILED ({ended.returncode})" if ended.returncode else "ok"
            print(f"{how:<12} {title}: {arguments[0]} {arguments[-1]}", flush=True)
            if ended.returncode:
                failed += 1
                print("\n".join(f"    {line}" for line in lines[-20:]), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", metavar="STEP", nargs="*", help="lstm, transformer, paper, a preset, ranks or types")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return run_inside(arguments.inside) if arguments.inside else run_commands(arguments.steps) > 0


if __name__ == "__main__":
    sys.exit(main())
