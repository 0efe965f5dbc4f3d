"""The command line as a person meets it: every stage, bad input, exit status, JSON, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.cli import main


@pytest.fixture
def trained(tiny: list[str]) -> list[str]:
    """A tiny run, sharded and trained in both phases; its overrides."""
    arguments = [*tiny, "name=cli"]
    for stage in ("shard", "pretrain", "finetune"):
        assert main([stage, "--config", "quickstart", *arguments]) == 0
    return arguments


def runs_dir(arguments: list[str]) -> str:
    return next(item.split("=", 1)[1] for item in arguments if item.startswith("runs_dir="))


def last_json(capsys: pytest.CaptureFixture[str]) -> object:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_stages_of_a_trained_run(trained: list[str], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = f"runs_dir={runs_dir(trained)}"
    folder = Path(runs_dir(trained)) / "cli"
    assert main(["evaluate", "cli", where, "--json"]) == 0
    found = last_json(capsys)
    held_out = (text / "test-queue.py").read_bytes()
    assert found["bytes"] == found["tokens"] == len(held_out) and found["characters"] == len(held_out.decode())
    assert found["bits_per_char"] == pytest.approx(found["bits"] / found["characters"])
    assert len(found["yardsticks"]) == 7 and json.loads((folder / "evaluation.json").read_text()) == found

    assert main(["evaluate", str(folder), "--text", str(text / "test-queue.py"), "--json"]) == 0
    assert last_json(capsys)["bits"] == pytest.approx(found["bits"], rel=1e-6)
    assert json.loads((folder / "evaluation.json").read_text()) == found

    assert main(["index", "cli", where, "--json"]) == 0
    assert last_json(capsys)["chunks"] > 100
    assert main(["neighbours", str(folder), "def ", "zorgl ", "--count", "3", "--json"]) == 0
    first, second = last_json(capsys)
    assert (first["query"], second["query"]) == ("def ", "zorgl ")
    for item in first["neighbours"] + second["neighbours"]:
        assert bytes.fromhex(item["hex"]).decode() == item["text"] != "def " and item["count"] > 0
        assert -1.001 <= item["score"] <= 1.001
    assert len(first["neighbours"]) == 3

    assert main(["sample", "cli", where, "--prompt", "def f", "--samples", "2", "--json"]) == 0
    once = last_json(capsys)
    assert main(["sample", "cli", where, "--prompt", "def f", "--samples", "2", "--json"]) == 0
    assert once == last_json(capsys) and len(once) == 2

    assert main(["sample", "cli", where]) == 0 and main(["report", "cli", where]) == 0
    page = (folder / "report.html").read_text()
    assert (
        "data:image/png;base64" in page
        and "n-gram, 5 bytes of context" in page
        and "http" not in page.replace("xmlns", "")
    )


def test_cat_gives_the_bytes_back(trained: list[str], text: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    shards = next(item.split("=", 1)[1] for item in trained if item.startswith("shards_dir="))
    (folder,) = Path(shards).glob("*/")
    content = (text / "test-queue.py").read_bytes()
    capfdbinary.readouterr()
    assert main(["cat", str(folder), "--split", "test"]) == 0
    assert capfdbinary.readouterr().out == content


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["pretrain", "--config", "quickstat"], 2, "did you mean quickstart"),
        (["pretrain", "pretrain.stps=1"], 2, "Did you mean: 'steps'"),
        (["pretrain", "--config", "quickstart", "nokey"], 2, "not of the form key=value"),
        (["shard", "source.kind=text", "source.path=nowhere"], 1, "source.path=nowhere: no such file or folder"),
        (["shard", "source.kind=text"], 1, "needs source.path="),
        (["evaluate", "nowhere"], 1, "no run 'nowhere'"),
        (["evaluate", "."], 1, "is not a run: it has no config.yaml"),
        (["neighbours", "nowhere", "x"], 1, "no run 'nowhere'"),
        (["finetune", "nowhere"], 1, "no run 'nowhere'"),
        (["cat", "."], 1, "is not a sharded corpus"),
        (["config", "nothing"], 2, "no preset 'nothing'"),
    ],
)
def test_bad_input_ends_in_a_line_or_two(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") <= 2 and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_can_lack(trained: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(runs_dir(trained)) / "cli"
    assert main(["neighbours", str(folder), "x"]) == 1
    assert "has no index yet: run `haed index" in capsys.readouterr().err
    assert main(["index", str(folder)]) == 0
    for query, message in (("", "has 0 bytes"), ("a chunk that is too long", "has 24 bytes; a chunk has 1 to 12")):
        assert main(["neighbours", str(folder), query]) == 1
        assert message in capsys.readouterr().err
    index = folder / "index" / "chunks.faiss"
    index.write_bytes(index.read_bytes()[:-1])
    assert main(["neighbours", str(folder), "x"]) == 1
    assert "is damaged (chunks.faiss)" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "model.main.layers=2"]) == 1
    assert "is of another model than config.yaml says" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["shard", "--config", "quickstart", *tiny, f"shards_dir={tmp_path}/file/shards"]) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert main(["shard", "--config", "quickstart", *tiny]) == 0
    assert main(["train", "--config", "quickstart", *tiny, f"runs_dir={tmp_path}/file/runs"]) == 1
    assert "Not a directory" in capsys.readouterr().err


def test_a_signal_saves_and_says_how_to_go_on(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "quickstart", *tiny, "name=stopped"]
    assert main(["shard", *arguments]) == 0
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "train",
        *arguments,
        "train.steps=1000000",
        "checkpoint.every_steps=20",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    latest = Path(runs_dir(arguments)) / "stopped" / "train" / "checkpoints" / "latest"
    try:
        until = time.monotonic() + 60
        while not latest.is_file() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == 143 and "the same command goes on from there" in error
    saved = int(latest.read_text().strip().removeprefix("step-"))
    capsys.readouterr()
    assert main(["train", *arguments, f"train.steps={saved + 5}", "--json"]) == 0
    assert last_json(capsys)["resumed_from"] == saved


def test_help_and_usage_errors_import_nothing_heavy() -> None:
    code = (
        "import sys; from pipeline.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert main(['train', 'sed=1']) == 2\n"
        "assert not {'torch', 'prefect', 'webdataset', 'faiss', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ)


def test_known_chunks_are_looked_up_without_the_model(trained: list[str]) -> None:
    folder = Path(runs_dir(trained)) / "cli"
    assert main(["index", str(folder)]) == 0
    code = (
        f"import sys; from pipeline.cli import main; assert main(['neighbours', {str(folder)!r}, 'def ']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
