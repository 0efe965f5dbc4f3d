"""Training in two processes of torchrun (gloo): launched, interrupted, resumed, failed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from pipeline import training
from pipeline.config import dump
from pipeline.options import Options
from pipeline.trainer import Interrupted
from tests.pipeline.test_training import stripped, weights


@pytest.fixture
def together(options: Options) -> Options:
    options.launcher.processes = 2
    options.checkpoint.every_steps = 2
    options.iem.bank, options.iem.extra_batches = 64, 1
    return options


def test_launched_interrupted_and_resumed_runs_end_in_the_same_bits(together: Options) -> None:
    together.pretrain.steps = 100
    heard: list[float] = []
    whole = training.pretrain(together, listener=lambda record: heard.append(record["step"]))
    assert whole.steps == 100 and heard == sorted(heard) and 50 in heard and 100 in heard
    first = weights(together, "pretrain"), stripped(together, "pretrain")
    together.name = "again"
    folder = Path(together.runs_dir) / "again" / "pretrain" / "checkpoints"
    began = time.monotonic()
    with pytest.raises(Interrupted, match="stopped after step"):
        training.pretrain(together, lambda: any(folder.glob("step-*")))
    assert time.monotonic() - began < 60
    assert not [p for p in psutil.Process().children(recursive=True) if "pretrain" in " ".join(p.cmdline())]
    resumed = training.pretrain(together)
    assert 2 <= resumed.resumed_from < 100
    again = weights(together, "pretrain"), stripped(together, "pretrain")
    assert again[1] == first[1] and again[0].keys() == first[0].keys()
    assert all(torch.equal(again[0][name], value) for name, value in first[0].items())


def test_torchrun_by_hand_and_on_in_one_process(
    together: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "options.yaml"
    config.write_text(dump(together))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pipeline"]
    done = subprocess.run(
        [*command, "pretrain", "--config", str(config), "--json"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["steps"] == together.pretrain.steps
    together.launcher.processes, together.pretrain.steps = 1, 8
    with caplog.at_level("INFO"):
        assert training.pretrain(together).resumed_from == 6
    assert "ranks: 1 now, 2 then" in caplog.text
    assert training.finetune(together).steps == together.finetune.steps


def test_what_fails_there_is_said_here(together: Options, tmp_path: Path) -> None:
    together.shards_dir = str(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match="no shards of this source and chunker"):
        training.train(together)
