"""The benchmark of a GPU, at tiny sizes on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.api import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_every_kind_of_part_gives_its_numbers_and_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    preset = "paper-wikitext103"
    parts = ["machine", "nothing of this name", f"{preset} pretrain", f"{preset} train", f"profile {preset} train"]
    parts += [f"memory {preset} pretrain", f"{preset} train fp32", "decoder 64"]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path), "--device", "cpu", "--tiny"]
    command += ["--budget", str(PATIENCE)]
    done = subprocess.run([*command, "--parts", *parts], capture_output=True, text=True, check=True)
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert list(results) == parts
    assert [part for part, result in results.items() if "error" in result] == ["nothing of this name"], done.stdout
    assert all(results[f"{preset} {phase}"]["alone_ms"] > 0 for phase in ("pretrain", "train", "train fp32"))
    assert (
        (tmp_path / results[f"profile {preset} train"]["table"])
        .read_text()
        .startswith("Two steps of paper-wikitext103")
    )
    assert done.stdout.splitlines()[-1].startswith(f"{preset} : phase one ")
