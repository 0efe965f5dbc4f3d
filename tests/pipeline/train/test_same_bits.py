"""The same command ends in the same bits: with several threads, at the presets' own sizes, in processes of their own.

A model that is small enough for quick tests hides what this is about: only tensors that are large enough are shared among
threads. So presets keep their widths, tables and batches, and take a few steps.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config import presets
from pipeline.options import Options
from pipeline.run.device import compute

ROOT = Path(__file__).resolve().parents[3]
CHUNKS = ("hred", "hred-transformer", "megabyte", "quickstart", "quickstart-no-iem", "wikitext2")
PHASES = {"quickstart": ("pretrain", "finetune", "train"), "wikitext2": ("pretrain", "finetune")}
PHASES |= {name: ("train",) for name in presets() if not name.startswith("paper-") and name not in CHUNKS}
PHASES |= {name: ("pretrain",) for name in CHUNKS if name not in PHASES}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text that is long enough for whole windows."""
    folder = tmp_path_factory.mktemp("bits")
    (folder / "text").mkdir()
    library = Path(os.__file__).parent
    for split, name in (("train", "argparse.py"), ("train2", "ast.py"), ("valid", "heapq.py"), ("test", "queue.py")):
        (folder / "text" / f"{split.rstrip('2')}-{name}").write_bytes((library / name).read_bytes())
    return folder


def arguments(place: Path, name: str, stage: str, preset: str, *words: str) -> list[str]:
    given = ["source.kind=text", "source.pattern=*.py", f"source.path={place / 'text'}", f"runs_dir={place / 'runs'}"]
    given += [f"shards_dir={place / 'shards'}", "validation.times=0", f"name={name}"]
    given += [] if stage == "shard" else [f"{stage}.seconds=null", f"{stage}.steps=3"]
    return [stage, "--config", preset, *given, *words]


def environment() -> dict[str, str]:
    """Without the one thread that `make test` gives its own processes."""
    hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONPATH": str(ROOT)}


def process(place: Path, *stages: list[str]) -> "subprocess.Popen[str]":
    """A process of its own for some stages, in a session of its own."""
    code = (
        "import json, sys; from pipeline.cli import main; sys.exit(any(main(each) for each in json.loads(sys.argv[1])))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(stages)],
        env=environment(),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(started: "subprocess.Popen[str]") -> str:
    found, said = started.communicate()
    assert started.returncode == 0, said[-2000:]
    return found


def run(place: Path, name: str, phases: tuple[str, ...], preset: str, *words: str) -> None:
    """Shards, and trains some phases."""
    stages = [arguments(place, name, phase, preset, *words) for phase in phases]
    finish(process(place, arguments(place, name, "shard", preset), *stages))


def digests(place: Path, name: str) -> dict[str, str]:
    """sha256 of weights and of all that the optimizer keeps, of each phase's last checkpoint."""
    found = {}
    for latest in sorted((place / "runs" / name).glob("*/checkpoints/latest")):
        for file in sorted((latest.parent / latest.read_text().strip()).glob("*.safetensors")):
            found[f"{latest.parent.parent.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found
    return found


def test_quickstart_ends_in_the_same_bits_with_two_threads(place: Path) -> None:
    for turn in "abc":
        run(place, f"quick-{turn}", ("pretrain",), "quickstart", "threads=2")
    assert digests(place, "quick-a") == digests(place, "quick-b") == digests(place, "quick-c")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", sorted(PHASES))
def test_every_preset_ends_in_the_same_bits_with_four_threads(place: Path, preset: str) -> None:
    """More threads than some machines have cores: they take turns, and end in another order each time."""
    for turn in "ab":
        run(place, f"{preset}-{turn}", PHASES[preset], preset, "threads=4")
    assert digests(place, f"{preset}-a") == digests(place, f"{preset}-b")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("word", ["precision=fp32", "launcher.processes=2"])
def test_so_do_single_precision_and_two_ranks(place: Path, word: str) -> None:
    for turn in "ab":
        run(place, f"{word}-{turn}", ("pretrain", "finetune"), "quickstart", "threads=2", word)
    assert digests(place, f"{word}-a") == digests(place, f"{word}-b")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_killed_and_resumed_it_ends_in_the_same_bits(place: Path, processes: int) -> None:
    words = ["threads=2", "pretrain.steps=8", "checkpoint.every_steps=1", f"launcher.processes={processes}"]
    run(place, f"whole-{processes}", ("pretrain",), "quickstart", *words)
    name = f"hurt-{processes}"
    checkpoints = place / "runs" / name / "pretrain" / "checkpoints"
    with process(place, arguments(place, name, "pretrain", "quickstart", *words)) as started:
        while started.poll() is None and not (checkpoints / "latest").is_file():
            time.sleep(0.01)
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
    reached = sorted(path.name for path in checkpoints.glob("step-*"))[-1]
    assert reached < "step-00000008", "it was killed too late to say anything"
    run(place, name, ("pretrain",), "quickstart", *words)
    assert digests(place, name) == digests(place, f"whole-{processes}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [2, 4])
def test_what_is_asked_of_a_run_has_the_same_bits_each_time(place: Path, threads: int) -> None:
    name = f"asked-{threads}"
    run(place, name, ("pretrain",), "quickstart", "threads=2")
    of = [str(place / "runs" / name), f"threads={threads}", "--json"]
    answers = []
    for _ in range(2):
        said = finish(process(place, ["evaluate", *of, "evaluate.yardsticks=false"], ["sample", *of], ["next", *of]))
        found = [json.loads(line) for line in said.splitlines()]
        answers.append([_without_times(each) for each in found])
    assert len(answers[0]) == 3 and answers[0] == answers[1]


def _without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_times(value) for name, value in found.items() if "second" not in name}
    return [_without_times(each) for each in found] if isinstance(found, list) else found


def test_algorithms_are_the_callers_own_again_after_use(options: Options) -> None:
    """In any thread: the last one that leaves puts back what was before the first came."""
    inner, outer = compute(options), compute(options)
    before = torch.get_deterministic_debug_mode()
    with outer.algorithms():
        with inner.precision():
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 2
    assert torch.get_deterministic_debug_mode() == before == 0
    options.deterministic = False
    with compute(options).precision():
        assert torch.get_deterministic_debug_mode() == 0
