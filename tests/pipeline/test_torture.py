"""The short form of benchmarks/torture.py: SIGKILL at random moments, resumption, the same bits."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("case", "stage"), [("workers", "pretrain")])
def test_killed_and_resumed(case: str, stage: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "torture.py"), "--kills", "1", "--steps", "60"]
    done = subprocess.run([*command, "--cases", case, "--stages", stage], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].split()[:3] == [case, stage, "1"]
