"""The command line as a person meets it: every stage, bad input, exit status, JSON, signals."""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data.filesystem import read_json
from pipeline import ROOT
from pipeline.arguments import UsageError, options_from_arguments, parse_arguments
from pipeline.cli import main
from pipeline.commands import COMMANDS
from pipeline.config import ConfigError
from pipeline.signals import END_SECONDS
from tests.pipeline.conftest import CommandLine

PROGRAM = [sys.executable, "-m", "pipeline"]


def test_a_pipe_that_breaks_within_a_command_is_said(monkeypatch: pytest.MonkeyPatch, haed: CommandLine) -> None:
    def breaks(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("data.corpus.Corpus.open", breaks)
    assert "Broken pipe" in haed.error("cat", "shards")


@pytest.mark.slow
def test_stages_of_a_trained_run(run: Path, text: Path, capsys: pytest.CaptureFixture[str], haed: CommandLine) -> None:
    where = f"runs_dir={run.parent}"
    shutil.rmtree(run / "index")
    (run / "evaluation.json").unlink()
    found = haed.json("evaluate", "run", where, "evaluate.baselines=true")
    held_out = (text / "test-queue.py").read_bytes()
    assert found["bytes"] == found["tokens"] == len(held_out) and found["characters"] == len(held_out.decode())
    assert found["bits_per_char"] == pytest.approx(found["bits"] / found["characters"])
    assert len(found["baselines"]) == 8 and read_json(run / "evaluation.json") == found

    said = haed.json("evaluate", run, "--text", text / "test-queue.py")
    assert said["bits"] == pytest.approx(found["bits"], rel=1e-6)
    assert read_json(run / "evaluation.json") == found

    assert haed.json("index", "run", where)["chunks"] > 100
    first, second = haed.json("neighbours", run, "def ", "zorgl ", "--count", "3")
    assert (first["query"], second["query"]) == ("def ", "zorgl ")
    for item in first["neighbours"] + second["neighbours"]:
        assert bytes.fromhex(item["hex"]).decode() == item["text"] != "def " and item["count"] > 0
        assert -1.001 <= item["score"] <= 1.001
    assert len(first["neighbours"]) == 3

    once = haed.json("sample", "run", where, "--prompt", "def f", "--samples", "2")
    for item in (*once, *(again := haed.json("sample", "run", where, "--prompt", "def f", "--samples", "2"))):
        assert item.pop("characters_per_second") > 0 and sum(item["parts"].values()) == pytest.approx(1)
    assert once == again and len(once) == 2

    # Options anywhere among queries; what has the key of an option is one, unless it stands after `--`.
    words = ["device=cpu", run, "x=1", "--count", "2", "def ", "--", "seed=1", "--json"]
    assert [item["query"] for item in haed.json("neighbours", *words)] == ["x=1", "def ", "seed=1", "--json"]

    prompt = "\udcff\x1b[2J"  # no UTF-8; it would clear
    shown = haed.output("sample", where, "--prompt", prompt, "run", "--samples", "2")
    assert "\\xff\\x1b[2J" in shown and "\x1b" not in shown

    for command in ("sample", "report"):
        haed.output(command, "run", where)
    page = (run / "report.html").read_text()
    assert "<svg" in page and "n-gram, 5 bytes of context" in page and "http" not in page.replace("xmlns", "")

    (run / "evaluation.json").unlink()
    (run / "evaluation.json").mkdir()  # as if the disk did not take it
    capsys.readouterr()
    assert main(["evaluate", "run", where, "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["bits"] == found["bits"] and "could not be written" in said.err


def test_cat_gives_the_bytes_back(sharded: Path, text: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (folder,) = sharded.glob("*/")
    content = (text / "test-queue.py").read_bytes()
    capfdbinary.readouterr()
    assert main(["cat", str(folder), "--split", "test"]) == 0
    assert capfdbinary.readouterr().out == content


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["pretrain", "pretrain.stps=1"], 2, "did you mean pretrain.steps=1?"),
        (["pretrain", "--config", "quickstart", "nokey"], 2, "not of the form key=value"),
        (["pretrain", "--config", "quickstart", "sample.temperature"], 2, "Give a value after sample.temperature="),
        (["pretrain", "temperature=1"], 2, "temperature; did you mean iem.temperature= or sample.temperature=?"),
        (["shard", "source.kind=text", "source.path=~/nowhere"], 1, f"source.path={Path.home()}/nowhere: no such"),
        (
            ["pretrain", "--config", "quickstart", "iem.correction=none"],
            2,
            "iem.correction=inclusion, or model.mixture",
        ),
        (["shard", "source.kind=text", "source.path=nowhere"], 1, "source.path=nowhere: no such file or folder"),
        (["shard", "source.kind=text"], 1, "needs source.path="),
        (["evaluate", "nowhere"], 1, "no run 'nowhere'"),
        (["evaluate", "."], 1, "is not a run: it has no config.yaml"),
        (["cat", "."], 1, "is not a sharded corpus"),
        (["cat", ".", "--json"], 2, "cat writes the bytes of a corpus"),
        (["config", "nothing"], 2, "no preset 'nothing'"),
        (["config", "nowhere.yaml"], 2, "no configuration file at nowhere.yaml"),
        (["next", "nowhere", "x", "--count", "0"], 2, "must be at least 1"),
        (["sample", "nowhere", "--prompt", "—Oui, dit-il"], 1, "no run 'nowhere'"),  # texts, not options
        (["sample", "--prompt", "def f(x=", "nowhere"], 1, "no run 'nowhere'"),
    ],
)
def test_bad_input_ends_in_a_line_or_two(
    arguments: list[str], status: int, message: str, here: Path, haed: CommandLine
) -> None:
    error = haed.error(*arguments, status=status)
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error
    assert list(here.iterdir()) == []


def test_a_text_of_two_dashes_is_a_text() -> None:
    """Python's argparse drops it, also behind an equals sign."""
    assert parse_arguments(["sample", "run", "--prompt=--", "--prompt=---"], "haed", COMMANDS).prompt == ["--", "---"]
    found = parse_arguments(["neighbours", "run", "--like=--", "--file=--", "a", "--", "--"], "haed", COMMANDS)
    assert (found.like, found.file, found.queries) == (["--"], "--", ["a", "--"])
    for words in (["compare", "a", "b", "--out=--"], ["neighbours", "a", "--count=--"], ["profile", "a", "--phase=--"]):
        with pytest.raises(UsageError) as caught:
            parse_arguments(words, "haed", COMMANDS)
        assert caught.value.message == f"argument {words[-1][:-3]}: -- is no value"


def test_a_run_may_have_an_equals_sign(here: Path) -> None:
    for name in ("runs/lr=0.1", "others/x=1", "lr=0.1/runs/mine"):
        (here / name).mkdir(parents=True)
        (here / name / "config.yaml").touch()
    for command in ("evaluate", "neighbours"):
        for words, run in (
            (["lr=0.1/runs/mine", "seed=1"], "lr=0.1/runs/mine"),
            (["seed=1", "lr=0.1"], "lr=0.1"),
            (["x=1", "seed=1", "runs_dir=others"], "x=1"),
        ):
            found = parse_arguments([command, *words], "haed", COMMANDS)
            assert found.run == run and found.words == [word for word in words if word != run]
    with pytest.raises(FileNotFoundError, match="no run 'runs/lr=0.3'"):
        options_from_arguments(argparse.Namespace(config=None, words=["seed=1", "runs/lr=0.3"]))
    with pytest.raises(ConfigError, match="there is no option lr"):
        options_from_arguments(argparse.Namespace(config=None, words=["lr=0.2"]))
    words = [f"sample.prompts=[{'x' * 999}]", "name=a\N{GRINNING FACE}"]  # the first no name of a file
    assert options_from_arguments(argparse.Namespace(config=None, words=words)).sample.prompts == ["x" * 999]
    with pytest.raises(ConfigError, match="there is no option xxx"):
        options_from_arguments(argparse.Namespace(config=None, words=[f"{'x' * 999}=1"]))


@pytest.mark.slow
def test_raw_samples_are_bytes_and_a_pipe_can_be_scored(
    run: Path, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    folder = str(run)
    capfdbinary.readouterr()
    assert main(["sample", folder, "--prompt", "\udcff", "--json"]) == 0
    (sample,) = json.loads(capfdbinary.readouterr().out)
    assert main(["sample", folder, "--prompt", "\udcff", "--raw"]) == 0
    assert capfdbinary.readouterr().out == bytes.fromhex(sample["hex"]) != b"" and sample["hex"].startswith("ff")
    done = subprocess.run(
        [*PROGRAM, "evaluate", folder, "--json", "--text", "-"], input=b"from a pipe", capture_output=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["split"], found["bytes"]) == ("standard input", 11)
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor() as beside:  # which waits until the command reads
        beside.submit(pipe.write_bytes, b"from a pipe")
        assert main(["evaluate", folder, "--json", "--text", str(pipe)]) == 0
    assert json.loads(capfdbinary.readouterr().out)["bits"] == found["bits"]


def test_a_named_pipe_is_a_source(tmp_path: Path, text: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command, ours = [*PROGRAM, "shard", "source.kind=text", "source.path=pipe", "--json"], {"PYTHONPATH": ROOT}
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | ours, stdout=subprocess.PIPE) as process:
        (tmp_path / "pipe").write_bytes((text / "test-queue.py").read_bytes())
        splits = json.loads(process.communicate()[0])["splits"]
    assert sum(size["source_bytes"] for size in splits.values()) == (text / "test-queue.py").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        ("PYTHONIOENCODING=ascii", 0, ""),
        (">/dev/full", 1, "error: standard output cannot be written: No space left on device"),
        (">&-", 1, "error: standard output is closed, so the result is not printed"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        ("<&- RANK=1", 0, ""),  # of some other launcher; torchrun sets more
        ("</dev/null RANK=1 TORCHELASTIC_RUN_ID=x >&-", 0, ""),
        ("| true", None, ""),
    ],
)
def test_streams_that_are_closed_or_full_and_what_is_left_in_the_environment(
    redirection: str, status: int | None, said: str
) -> None:
    before = [word for word in redirection.split() if word.split("=")[0].isupper()]
    after = [word for word in redirection.split() if word not in before]
    command = [*before, shlex.quote(sys.executable), "-m", "pipeline", "config", "sample.prompts='[ä\u202e]'", *after]
    done = subprocess.run(["bash", "-c", " ".join(command)], cwd=ROOT, capture_output=True, text=True)
    assert status in (None, done.returncode) and done.stderr.strip() == said
    if not {">/dev/full", ">&-", "|"} & set(after):
        assert "\\u202e" in done.stdout and ("ä" in done.stdout) == ("ascii" not in redirection)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["pretrain", "runs_dir="], "runs_dir is empty"),
        (["shard", "shards_dir="], "shards_dir is empty"),
        (["train", "loader.cache_dir="], "loader.cache_dir is empty"),
        (["compare", "a", "b", "--output="], "argument --output: the path is empty"),
        (["evaluate", "a", "--text="], "argument --text: the path is empty"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(words: list[str], named: str, haed: CommandLine) -> None:
    """As of a variable of the shell that is not set."""
    said = haed.error(*words, status=2)
    assert f"error: {named}" in said and ". is the current" in said


@pytest.mark.parametrize("words", [["evaluate.memory=0"], ["evaluate.parts=[copied]"], ["evaluate.likelihood=decoder"]])
def test_samples_and_next_chunks_are_those_of_the_parts_that_are_asked_for(
    words: list[str], run: Path, haed: CommandLine
) -> None:
    parts = {"copied"} if "parts" in words[0] else set()
    shares = haed.output("sample", run, "--prompt", "def f(", "sample.chunks=20", *words).rpartition("chunks ")[2]
    assert {name for name in ("copied", "repeated", "recalled") if name in shares} == parts
    columns = haed.output("next", run, "def f(", *words)
    assert {name for name in ("copied", "repeated", "recalled") if name in columns} == parts


def test_a_current_folder_that_was_removed_is_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, haed: CommandLine
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "error: the current folder was removed" in haed.error("next", run.absolute(), "a")


def test_an_output_folder_that_cannot_be_written(tiny: list[str], tmp_path: Path, haed: CommandLine) -> None:
    (tmp_path / "file").touch()
    said = haed.error("shard", "--config", "quickstart", *tiny, f"shards_dir={tmp_path}/file/shards")
    assert f"error: {tmp_path}/file is a file, not a folder" in said
    assert main(["shard", "--config", "quickstart", *tiny]) == 0
    said = haed.error("train", "--config", "quickstart", *tiny, f"runs_dir={tmp_path}/file/runs")
    assert f"error: {tmp_path}/file is a file, not a folder" in said
    assert main(["train", "--config", "quickstart", *tiny, "name=comparison", "train.steps=1"]) == 0
    words = ["compare", "comparison", f"runs_dir={tmp_path}/runs"]
    said = haed.error(*words, "--output", f"{tmp_path}/runs/comparison", status=2)
    assert "comparison is a run. Name another folder" in said
    assert f"{tmp_path}/runs/comparison-of-runs/comparison.html" in haed.output(*words)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT), (signal.SIGHUP,)])
def test_a_signal_saves_and_says_how_to_go_on(
    numbers: tuple[signal.Signals, ...], tiny: list[str], tmp_path: Path, haed: CommandLine
) -> None:
    """Several are no impatience: a parent may pass on what all have got. A terminal that is closed hangs up."""
    arguments = ["--config", "quickstart", *tiny, "name=stopped"]
    assert main(["shard", *arguments]) == 0
    words = ["train", *arguments, "train.steps=1000000", "checkpoint.every_steps=20"]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it, and children with it
    process = subprocess.Popen([*PROGRAM, *words], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGHUP, before)
    latest = tmp_path / "runs" / "stopped" / "train" / "checkpoints" / "latest"
    try:
        while not latest.is_file() and process.poll() is None:
            time.sleep(0.05)
        for number in numbers:
            process.send_signal(number)
        error = process.communicate()[1]
    finally:
        process.kill()
    assert process.returncode in (130, 143) and "Run the same command to resume" in error
    saved = int(latest.read_text().strip().removeprefix("step-"))
    assert haed.json("train", *arguments, f"train.steps={saved + 5}")["resumed_from"] == saved


def is_met(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler of its own for a signal."""
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> number - 1 & 1)


def send_until_ended(process: subprocess.Popen[str], number: int) -> None:
    """Sends a signal again and again: Python meets one late that arrives just before it waits for bytes."""
    while process.poll() is None:
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS + 1)


@pytest.mark.parametrize(("command", "number"), [("evaluate", signal.SIGINT), ("pretrain", signal.SIGTERM)])
def test_a_signal_ends_what_has_nothing_to_save_from_the_start(command: str, number: signal.Signals) -> None:
    with subprocess.Popen([*PROGRAM, command, "nowhere"], stderr=subprocess.PIPE, text=True) as process:
        while not is_met(process, signal.SIGTERM) or not is_met(process, number):
            time.sleep(0.001)
        process.send_signal(number)
        said = "stopped\n" if command == "evaluate" else "stopped"
        assert process.communicate()[1].startswith(said) and process.returncode == 128 + number


@pytest.mark.nightly  # test_failures.py ends another command at its work
def test_a_signal_ends_a_command_at_work(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = ["evaluate", str(run), "--text", str(tmp_path / "pipe")]
    with subprocess.Popen([*PROGRAM, *words], stderr=subprocess.PIPE, text=True) as process:
        with open(tmp_path / "pipe", "wb"):  # it waits here until the command reads
            send_until_ended(process, signal.SIGINT)
        assert process.stderr.read() == "stopped\n" and process.returncode == 130  # type: ignore[union-attr]


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    code = (
        "import sys; from pipeline.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert main(['train', 'sed=1']) == 2\n"
        "assert not {'torch', 'prefect', 'webdataset', 'faiss', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)


@pytest.mark.slow
def test_modules_of_the_working_folder_are_not_taken_for_ours(tiny: list[str], tmp_path: Path) -> None:
    for name in ("data", "haed", "pipeline"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the module of a user')")
    given = [*tiny, "--config", "quickstart", "loader.workers=1", "pretrain.steps=1", "validation.times=0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for module, stage in (("flows.cli", "shard"), ("pipeline", "pretrain")):  # whose worker starts from nothing
        if module == "pipeline":
            (tmp_path / "pipeline.py").rename(tmp_path / "flows.py")
        command = [sys.executable, "-m", module, stage, *given]
        done = subprocess.run(command, cwd=tmp_path, env=clean | {"PYTHONPATH": ROOT}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "user" not in done.stderr
