"""A signal where there is nothing to save ends a training at once; one inside a validation has it save at once."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.config import Options
from pipeline.run.metrics import encode_record
from pipeline.signals import Interrupt, postponed_signals
from pipeline.training import stages, trainer
from pipeline.training.stages import train
from pipeline.training.trainer import Validation


def endless(*_: Any) -> Any:
    """What takes longer than anybody waits, in which a signal comes."""
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


@pytest.mark.timeout(120)
def test_a_signal_inside_a_validation_saves_at_once(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    options.train.steps, options.validation.times, options.optimizer.ema = 4, 2, 0.9

    def scored(self: Validation, system: Any) -> Iterator[Tensor]:
        yield endless()

    with monkeypatch.context() as patched:
        patched.setattr(Validation, "_exact_bits", scored)
        with pytest.raises(Interrupt) as ended, postponed_signals() as stop:
            train(options, stop)
    assert ended.value.words.startswith("saved step 2 of train")
    latest = Path(options.runs_dir, "tiny/train/checkpoints/latest")
    assert latest.read_text().strip() == "step-00000002"
    assert train(options).steps == 4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", [(stages, "build_trainer"), (trainer.Trainer, "count_memory")])
def test_a_signal_before_the_first_step_ends_it_at_once(
    place: tuple[Any, str], options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, endless)
    with pytest.raises(Interrupt) as ended, postponed_signals() as stop:
        train(options, stop)
    assert "before the first step of train, so there is nothing to save" in ended.value.words


def test_steps_that_a_kill_took_are_said(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    options.train.steps = 2
    train(options)
    with open(Path(options.runs_dir, "tiny/train/metrics.jsonl"), "ab") as file:
        for step in (3, 4):
            file.write(encode_record({"step": step, "seconds": 1.0}))
    caplog.clear()
    options.train.steps = 5
    with caplog.at_level("WARNING"):
        train(options)
    said = "the steps after 2, up to at least 4, are lost: no whole checkpoint has them. They are repeated"
    assert said in caplog.text
