"""The same command ends in the same bits: with several threads, at the presets' own sizes, in processes of their own.

A model that is small enough for quick tests hides what this is about: only tensors that are large enough are shared among
threads. So presets keep their widths, tables and batches, and take a few steps. What is compared runs side by side, so that
its threads also disturb each other. A process takes several commands, since to import torch takes longer than these steps.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from haed.options import DECODERS, ENCODERS, MAINS, SYSTEMS
from pipeline.cli import main
from pipeline.config import Options, load_options
from pipeline.run.device import is_cublas_deterministic, setup_compute
from tests.conftest import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 900  # until a process that has not ended is a failure
TRANSFORMERS = ("model.encoder.kind=transformer", "model.encoder.hidden=256")
# A preset of each architecture, and what no preset has; with the phases that it takes.
Trained = dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]
TRAINED: Trained = {
    name: (name, ("pretrain", "finetune", "train") if name == "quickstart" else ("train",), ())
    for name in ARCHITECTURES
} | {
    "transformers": ("quickstart", ("train",), TRANSFORMERS),
    "single": ("quickstart", ("pretrain", "finetune"), ("precision=fp32",)),
}
# What is killed in its first phase, by the number of processes that train.
KILLED: dict[int, Trained] = {
    1: {"quickstart": TRAINED["quickstart"]},
    2: {"ranks": ("quickstart", ("pretrain", "finetune"), ("launcher.processes=2", "finetune.steps=3"))},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with shards of a text that is long enough for whole windows; its runs are of three gigabytes."""
    folder = tmp_path_factory.mktemp("bits")
    (folder / "text").mkdir()
    library = Path(os.__file__).parent
    for split, name in (("train", "argparse.py"), ("train2", "ast.py"), ("valid", "heapq.py"), ("test", "bisect.py")):
        (folder / "text" / f"{split.rstrip('2')}-{name}").write_bytes((library / name).read_bytes())
    yield folder
    shutil.rmtree(folder)


def where(place: Path, preset: str) -> list[str]:
    """Words of every command on a preset: its data and its folders."""
    given = ["source.kind=text", "source.pattern=*.py", f"source.path={place / 'text'}", f"runs_dir={place / 'runs'}"]
    return ["--config", preset, *given, f"shards_dir={place / 'shards'}"]


def cut(place: Path, *chosen: str) -> None:
    """Makes the shards of some presets."""
    for preset in chosen:
        assert main(["shard", *where(place, preset)]) == 0


def trainings(
    place: Path, name: str, preset: str, phases: Iterable[str], *words: str, steps: int = 3
) -> list[list[str]]:
    """Commands that train a run; `words` are stronger than `steps`."""
    given = [*where(place, preset), f"name={name}", "validation.times=0"]
    return [[phase, *given, f"{phase}.seconds=null", f"{phase}.steps={steps}", *words] for phase in phases]


def environment() -> dict[str, str]:
    """Without the one thread that `make test` gives its own processes; who waits leaves the cores to the other turn."""
    hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    more = {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    return {name: value for name, value in os.environ.items() if name not in hidden} | more


@contextmanager
def process(place: Path, commands: list[list[str]]) -> Iterator["subprocess.Popen[str]"]:
    """A process of its own for some commands, in a session of its own; it does not outlive the block."""
    code = "import json, sys; from pipeline.cli import main; sys.exit(any(map(main, json.loads(sys.argv[1]))))"
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(commands)],
        env=environment(),
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            yield started
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)


def run(place: Path, *turns: list[list[str]]) -> list[str]:
    """Runs each turn's commands in a process of its own, all at the same time; returns what each said."""
    with ExitStack() as stack:
        said = [stack.enter_context(process(place, commands)) for commands in turns]
        found = [each.communicate(timeout=SECONDS)[0] for each in said]
        for each, lines in zip(said, found, strict=True):
            assert each.returncode == 0, lines[-2000:]
    return found


def digests(place: Path, name: str) -> dict[str, str]:
    """sha256 of weights and of all that the optimizer keeps, of each phase's last checkpoint."""
    found = {}
    for latest in sorted((place / "runs" / name).glob("*/checkpoints/latest")):
        for file in sorted((latest.parent / latest.read_text().strip()).glob("*.safetensors")):
            found[f"{latest.parent.parent.name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    assert found
    return found


def differing(place: Path, *names: str) -> dict[str, list[str]]:
    """Of each name, which files of two turns have other bits."""
    found = {}
    for name in names:
        one, other = (digests(place, f"{name}-{turn}") for turn in "ab")
        assert one.keys() == other.keys()
        if files := [file for file in one if one[file] != other[file]]:
            found[name] = files
    return found


def test_presets_are_of_every_kind() -> None:
    made = [load_options(preset, words).model for preset, _, words in TRAINED.values()]
    assert {model.kind for model in made} == set(SYSTEMS)
    chunks = [model for model in made if SYSTEMS[model.kind].chunks]
    for part, kinds in (("encoder", ENCODERS), ("main", MAINS), ("decoder", DECODERS)):
        assert {getattr(model, part).kind for model in chunks} == set(kinds)


def turn(place: Path, of: str, trained: Trained, threads: int, steps: int) -> list[list[str]]:
    """The commands of one of two turns, which train the same runs."""
    commands = list[list[str]]()
    for name, (preset, phases, words) in trained.items():
        chosen = (f"threads={threads}", *words)
        commands += trainings(place, f"{name}-{threads}-{of}", preset, phases, *chosen, steps=steps)
    return commands


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_kind_and_phase_ends_in_the_same_bits(place: Path) -> None:
    """Four are more threads than some machines have cores: they take turns, and end in another order each time."""
    cut(place, *{preset for preset, *_ in TRAINED.values()})
    run(place, *(turn(place, of, TRAINED, 4, 2) for of in "ab"))
    assert not differing(place, *(f"{name}-4" for name in TRAINED))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_killed_and_resumed_it_ends_in_the_same_bits(place: Path, processes: int) -> None:
    """As what was left alone. Gradients that are summed in any order are seen to differ after some steps: eight showed it."""
    cut(place, "quickstart")
    trained = KILLED[processes]
    whole, hurt = (turn(place, of, trained, 2, 8) for of in "ab")
    checkpoints = place / "runs" / f"{next(iter(trained))}-2-b" / "pretrain" / "checkpoints"
    ends = time.monotonic() + SECONDS
    with process(place, [[*hurt[0], "checkpoint.every_steps=1"]]) as started:
        while not (checkpoints / "latest").is_file():
            assert started.poll() is None and time.monotonic() < ends, "no checkpoint came"
            time.sleep(0.01)
        os.killpg(started.pid, signal.SIGKILL)
    reached = sorted(path.name for path in checkpoints.glob("step-*"))[-1]
    assert reached < "step-00000008", "it was killed too late to say anything"
    run(place, whole, hurt)
    assert not differing(place, *(f"{name}-2" for name in trained))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_what_is_asked_of_a_run_has_the_same_bits_each_time(place: Path) -> None:
    cut(place, "quickstart")
    trained = trainings(place, "asked", "quickstart", ("pretrain",), "threads=2")
    run(place, trained)
    asked = [
        [word, str(place / "runs" / "asked"), f"threads={threads}", "--json", *more]
        for threads in (2, 4)
        for word, *more in (["evaluate", "evaluate.baselines=false"], ["sample"], ["next"])
    ]
    one, other = ([line for line in said.splitlines() if line[:2] in ('{"', "[{")] for said in run(place, asked, asked))
    assert len(one) == len(asked)
    assert [_without_times(json.loads(line)) for line in one] == [_without_times(json.loads(line)) for line in other]


def _without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_times(value) for name, value in found.items() if "second" not in name}
    return [_without_times(each) for each in found] if isinstance(found, list) else found


def test_algorithms_are_the_callers_own_again_after_use(options: Options) -> None:
    """In any thread: the last one that leaves puts back what was before the first came."""
    inner, outer = setup_compute(options), setup_compute(options)
    before = torch.get_deterministic_debug_mode()
    with outer.use_algorithms():
        with inner.use_precision():
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 2
    assert torch.get_deterministic_debug_mode() == before == 0
    options.deterministic = False
    with setup_compute(options).use_precision():
        assert torch.get_deterministic_debug_mode() == 0


def test_an_operation_without_a_deterministic_algorithm_is_named_with_the_way_out(options: Options) -> None:
    """None of ours is one; those of other versions of PyTorch, or of a user's own model, may be."""
    machine = setup_compute(options)
    with (
        pytest.raises(ValueError, match=r"no deterministic algorithm for put_.*Use deterministic=false\."),
        machine.use_algorithms(),
        machine.use_precision(),
    ):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    assert torch.get_deterministic_debug_mode() == 0
    options.deterministic = False
    with setup_compute(options).use_algorithms():
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


def test_a_cublas_setting_of_the_users_own_is_no_error(
    options: Options, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch refuses every product on a GPU with deterministic algorithms and another value."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    for value in (":4096:8", ":16:8"):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
        assert is_cublas_deterministic(gpu)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    assert is_cublas_deterministic(cpu)
    assert not caplog.messages
    assert not is_cublas_deterministic(gpu) and not is_cublas_deterministic(gpu)
    assert [message.split(":")[0] for message in caplog.messages] == ["CUBLAS_WORKSPACE_CONFIG="]
    compute = setup_compute(options)
    assert compute.deterministic == (compute.device.type == "cpu")


# The short form of benchmarks/torture.py: SIGKILL at random moments, resumption, the same bits.


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_and_resumed() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "torture.py"), "--kills", "1", "--steps", "60"]
    done = subprocess.run([*command, "--cases", "workers", "--stages", "pretrain"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].split()[:3] == ["workers", "pretrain", "1"]
