"""`haed run` where something is wrong: a line or two, no traceback, whether Prefect had started or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def haed(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT")}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, cwd=place, env=clean | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--config", "quickstat"], 2, "did you mean quickstart"),
        (["source.kind=text", "source.path=nowhere"], 1, "source.path=nowhere: no such file or folder"),
        (["nowhere"], 1, "no run 'nowhere'"),
    ],
)
def test_what_is_wrong_is_said_before_prefect_starts(
    arguments: list[str], status: int, message: str, tmp_path: Path
) -> None:
    done = haed(tmp_path, "run", *arguments)
    assert done.returncode == status and message in done.stderr and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failing_stage_ends_in_a_line_too(tiny: list[str], tmp_path: Path) -> None:
    done = haed(tmp_path, "run", *tiny, "name=failing", "resume=required")
    assert done.returncode == 1 and "has no checkpoint: use resume=auto to start" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
