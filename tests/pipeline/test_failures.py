"""What a program is told of a failure, and what is said where a disk or memory has no more."""

import errno
import json
import os
import pwd
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from data.filesystem import add_path_to_errors, make_folders, write_atomically
from flows.cli import main as haed
from flows.commands import COMMANDS as MORE
from pipeline import ROOT
from pipeline.commands import COMMANDS
from pipeline.config import Options
from pipeline.console import format_error
from pipeline.training import trainer
from pipeline.training.stages import train
from pipeline.training.trainer import Trainer
from tests.pipeline.conftest import exit_status
from tests.pipeline.test_cli import PROGRAM, is_met, send_until_ended
from tests.pipeline.training.test_stages import at_update

main = partial(exit_status, haed)


def last_error(out: str) -> dict[str, object]:
    found = json.loads(out.splitlines()[-1])
    assert list(found) == ["error"] and list(found["error"]) == ["message", "type", "exit"]
    return dict(found["error"])


# What each command cannot do, in a folder without runs.
FAILING = {
    **{name: ["nowhere"] for name in ("pretrain", "finetune", "train", "evaluate", "sample", "next", "index", "run")},
    **{name: ["nowhere"] for name in ("neighbours", "explore", "analyse", "compare", "profile", "report", "cat")},
    "shard": ["source.kind=text", "source.path=nowhere"],
    "config": ["nothing"],
    "experiment": ["nothing"],
    "serve": ["seed=3"],
    "deploy": ["--pool", "x", "--limit", "0"],
}


@pytest.mark.parametrize("command", [command.name for command in (*COMMANDS, *MORE)])
@pytest.mark.parametrize("wrong", ["", "--nothing", "seed=x", "batch_size=8"])
def test_every_failure_with_json_ends_with_an_object(
    command: str, wrong: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    status = main([command, *FAILING[command], *([wrong] if wrong else []), "--json"])
    told = capsys.readouterr()
    error = last_error(told.out)
    assert error["exit"] == status != 0 and error["message"] and str(error["message"]) in told.err.replace("\n", " ")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("flag", ["--js", "--json=true"])
def test_the_flag_may_be_short_or_wrong(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere", flag]) != 0
    assert last_error(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("words", [["list"], [], ["--nothing"], ["evaluate"], ["sample", "x", "-p", "y"]])
def test_usage_errors_are_objects_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 2
    assert last_error(capsys.readouterr().out)["type"] == "UsageError"
    assert main(words) == 2 and capsys.readouterr().out == ""


@pytest.mark.usefixtures("here")
def test_a_query_is_no_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["neighbours", "nowhere", "--", "--json"]) == 1 and capsys.readouterr().out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so_to_programs(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = ["shard", "source.kind=text", f"source.path={tmp_path}/pipe", f"shards_dir={tmp_path}/shards", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*PROGRAM, *words], cwd=ROOT, text=True, **pipes) as process:
        with open(tmp_path / "pipe", "wb"):  # it waits here until the command reads
            assert is_met(process, number)
            send_until_ended(process, number)
        out, said = process.communicate()
    assert last_error(out)["type"] == number.name and process.returncode == 128 + number == last_error(out)["exit"]
    assert said.endswith("stopped. Run the same command to resume\n")


def test_every_command_refuses_weights_that_make_nonsense(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are finite, so the checkpoint was written, but too large to compute with."""
    options.train.steps, options.validation.times = 2, 0

    def enlarge(self: Trainer, update: Callable[..., torch.Tensor]) -> torch.Tensor:
        norm = update(self)
        for parameter in self.objective.parameters():
            parameter.data.mul_(1e30)
        return norm

    monkeypatch.setattr(trainer, "EARLY_RECORDS", ())
    with at_update(1, enlarge):
        train(options)
    run = f"{options.runs_dir}/{options.name}"
    for command in ("evaluate", "sample", "next", "index", "index --space contexts", "analyse"):
        assert haed([*command.split(), run]) == 1, command
        told = capsys.readouterr().err
        assert "are infinite or no numbers. Use an earlier checkpoint" in told, command
        assert "damaged" not in told, command


WITHOUT_PRIVILEGES = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if not os.geteuid() else []
)


@pytest.mark.slow
@pytest.mark.skipif(not os.geteuid() and not shutil.which("setpriv"), reason="root may read and write all files")
def test_a_run_that_may_not_be_written_or_read_is_said_with_its_owner(run: Path) -> None:
    vectors, is_root = run / "index" / "chunks" / "vectors.faiss", not os.geteuid()
    (run / "report.html").write_text("ours")
    for path in (run, *run.rglob("*")):
        path.chmod(0o555)
        if is_root and path.name != "report.html":
            os.chown(path, 65534, -1)
    (run / "report.html").chmod(0o644)
    owner = pwd.getpwuid(65534).pw_name if is_root else ""
    try:
        for words, place, refusing in (
            (["index", run], run / "index" / "chunks.lock", run / "index"),
            (["report", run], run / "report.html", run),
            (["analyse", run], run / "analysis", run),
            (["finetune", run, "finetune.steps=9"], run / "lock", run / "lock"),
            (["neighbours", run, "the "], vectors, vectors),
        ):
            if place == vectors:
                vectors.chmod(0)
            command = [*WITHOUT_PRIVILEGES, *PROGRAM, *map(str, words)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            advice = (
                f"Ask {owner}, who owns {refusing}, or copy what you need"
                if is_root
                else f"{refusing} is yours: allow it"
            )
            assert done.returncode == 1
            assert f"error: {place}: permission denied. {advice}" in done.stderr.splitlines()[-1]
    finally:
        for path in (run, *run.rglob("*")):
            path.chmod(0o755)


def limited(words: list[str], cwd: Path, **limits: int) -> subprocess.CompletedProcess[str]:
    """Runs a command under limits of this process: the size of a file, or of memory."""

    def limit() -> None:
        for name, size in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (size, size))

    environment = os.environ | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    how = {"cwd": cwd, "env": environment, "preexec_fn": limit}
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, **how)


@pytest.mark.nightly
def test_a_file_that_cannot_grow_is_named_by_every_stage(run: Path, text: Path, tmp_path: Path) -> None:
    """A limit on the size of files, which the disk tells as it tells that it is full: in the middle of a write."""
    for words, name, size in (
        (["shard", "source.kind=text", f"source.path={text}", "shards_dir=new"], "new/", 4096),
        (["index", str(run)], "runs/run/index/", 2048),
        (["analyse", str(run), "analyse.map=pca"], "analys", 2048),
        (["report", str(run)], "runs/run/", 2048),
        (["sample", str(run)], "samples.json", 16),
    ):
        done = limited(words, tmp_path, FSIZE=size)
        said = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and name in said, done.stderr
        assert "exceeds a size limit (of ulimit -f" in said or "could not be written" in said, said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_a_full_disk_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "shards" / "x"
    with (
        pytest.raises(OSError, match="No space left") as caught,
        add_path_to_errors(path),
        open("/dev/full", "wb", 0) as file,
    ):
        file.write(b"x")
    assert caught.value.filename == str(path) and caught.value.errno == errno.ENOSPC
    assert format_error(caught.value).startswith(
        f"{path}: no space left on the disk. Free some, or choose another disk with runs_dir="
    )


@pytest.mark.parametrize("missing", ["", "runs", "runs/run/train"])
def test_a_file_where_a_folder_should_be_is_named(tmp_path: Path, missing: str) -> None:
    (file := tmp_path / "taken").write_text("")
    for act in (
        lambda: make_folders(file / missing, tmp_path),
        lambda: (file / missing).mkdir(parents=True),
        lambda: write_atomically(file / missing / "report.json", b"{}"),
        lambda: (file / missing / "report.json").write_bytes(b"{}"),
    ):
        with pytest.raises(OSError) as caught:
            act()
        said = f"{file} is a file, not a folder. Choose another path, or move it away"
        assert format_error(caught.value) == said


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A folder that is a disk of this size; a test is skipped if none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a disk cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_shards_on_a_disk_that_is_full(tmp_path: Path, text: Path) -> None:
    with small_disk(small := tmp_path / "small", "64k"):
        words = ["shard", "source.kind=text", f"source.path={text}", f"shards_dir={small}", "--json"]
        done = limited(words, tmp_path)
        with pytest.raises(OSError, match="No space left on device: .*report.json"):
            write_atomically(small / "report.json", bytes(100_000))
    message = str(last_error(done.stdout)["message"])
    assert message.startswith(f"{small}/") and "no space left on the disk. Free some" in message, message


@pytest.mark.slow
def test_memory_that_ran_out_names_its_limit_and_what_to_lower(tiny: list[str], tmp_path: Path) -> None:
    large = ["model.encoder.rows=3000000", "model.encoder.width=256", "model.main.width=256"]  # 3.1 GB
    assert main(["shard", "--config", "quickstart", *tiny]) == 0
    done = limited(["pretrain", "--config", "quickstart", *tiny, *large, "--json"], tmp_path, AS=3 << 30)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and said.startswith("error: out of memory of 3.0 GiB (ulimit -v)"), done.stderr
    assert said.endswith("or use a smaller model")
    assert last_error(done.stdout)["message"] == said.removeprefix("error: ")
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")):
        assert format_error(error).startswith("out of memory")


def test_memory_of_a_gpu_that_ran_out_is_told_from_that_of_the_machine() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 5.00 MiB is free."
    more = " Including non-PyTorch memory, this process has 79.09 GiB memory in use. See documentation for Memory Management"
    told = format_error(RuntimeError(said + more), "train")
    assert told.startswith(f"out of memory of the GPU: {said} Lower batch.seq")
    cublas = RuntimeError("CUBLAS error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert format_error(cublas).startswith("out of memory of")
