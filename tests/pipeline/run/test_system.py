"""What a phase asks for at least."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config import Options, Phase, PhaseOptions
from pipeline.run.checkpoints import Checkpoints
from pipeline.run.device import setup_compute
from pipeline.run.sharding import open_shards
from pipeline.run.system import SavedActivations, build_system, check_memory, estimate_memory
from pipeline.training import trainer
from pipeline.training.profile import profile_phase
from pipeline.training.stages import build_trainer, train


def test_what_is_frozen_asks_for_no_moments(options: Options) -> None:
    """A phase is refused for what it trains."""
    chunker = open_shards(options).build_chunker()
    options.model.decoder.width = 512
    weights = {
        group.role: sum(x.numel() for x in group.parameters)
        for group in build_system(options, chunker).parameter_groups()
    }
    assert weights["decoder"] > 20 * weights["main"]

    def fits(megabytes: float, limits: PhaseOptions) -> bool:
        try:
            check_memory(estimate_memory(options, chunker, limits), 1e6 * megabytes)
        except ValueError:
            return False
        return True

    some = 10e-6 * weights["decoder"]  # MB: more than its weights, less than these and what Adam keeps
    assert not fits(some, options.pretrain) and not fits(some, options.finetune)
    assert fits(some, replace(options.pretrain, decode_fraction=0.0))
    options.model.decoder.width, options.model.main.width, options.model.main.ffn = 16, 512, 512
    some = 10e-6 * sum(x.numel() for x in build_system(options, chunker).parameters())
    assert not fits(some, options.finetune) and fits(some, replace(options.finetune, trains="decoder"))
    without_loss, with_loss = (
        estimate_memory(options, chunker, replace(options.pretrain, iem_weight=weight))["model.*"] for weight in (0, 1)
    )
    head = [x for x in build_system(options, chunker).parameter_groups() if x.role == "head"]
    assert with_loss - without_loss == 12 * sum(x.numel() for group in head for x in group.parameters) > 0


def test_a_first_step_that_does_not_fit_is_refused_and_less_of_it_trains(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[dict[str, int]]()

    def check(needed: dict[str, int], available: float) -> None:
        counted.append(needed)
        check_memory(needed, available)

    monkeypatch.setattr(trainer, "check_memory", check)
    train(options)
    needed = sum(counted[0].values())
    monkeypatch.setattr(trainer, "free_memory", lambda device: needed - 1)
    for take_step in (lambda: profile_phase(options, "train", 1), lambda: train(replace(options, name="refused"))):
        said = r"not enough memory: at least batch.sequences × batch.context \(.* GB\), model"
        with pytest.raises(ValueError, match=said):
            take_step()
    options.name, options.batch.pieces = "pieces", 2
    train(options)
    monkeypatch.setattr(trainer, "free_memory", lambda device: needed)
    options.name, options.batch.pieces = "fits", 1
    train(options)


@pytest.mark.parametrize("phase", ["pretrain", "finetune"])
def test_pieces_save_one_of_them_at_a_time(options: Options, phase: Phase) -> None:
    """Each piece is an equal share of the windows, whose parts are computed one after the other."""
    options.batch.sequences, counted = 8, list[int]()
    for options.batch.pieces in (1, 2, 8):
        corpus, machine = open_shards(options), setup_compute(options)
        unused = Checkpoints(Path(options.runs_dir) / "unused")
        made = build_trainer(getattr(options, phase), options, corpus, unused, machine, lambda: False)
        counted.append(made.count_memory(next(made.prepare_batches()))["batch.sequences × batch.context"])
    assert counted[0] > 1.2 * counted[1] > 1.2 * counted[2]


def test_storages_that_are_freed_while_counting_leave_their_addresses() -> None:
    """Else what comes after them at the same place would not be counted."""
    x, count, system = torch.ones(1 << 16, requires_grad=True), 0, torch.nn.Identity()
    with (kept := SavedActivations(system, discard=True)):
        for _ in range(20):
            x = (x * 1.0).tanh()  # saves what it returns
            count += 1
    assert kept.total_bytes == count * 4 * (1 << 16)


# What is set before torch is loaded.


@pytest.mark.nightly
@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_idle_threads_of_openmp_sleep_unless_the_user_says_otherwise(own: str | None) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    given = clean | {"OMP_DISPLAY_ENV": "TRUE", "HAED_TRAININGS": "2"} | ({"OMP_WAIT_POLICY": own} if own else {})
    command = [sys.executable, "-c", "import pipeline.run.device"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    if "OMP_WAIT_POLICY" not in done.stderr:
        pytest.skip("torch came without OpenMP")
    assert f"OMP_WAIT_POLICY = '{own or 'PASSIVE'}'" in done.stderr


def test_a_training_alone_keeps_the_default_of_openmp() -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "HAED_"))}
    command = [sys.executable, "-c", "import os, pipeline; print(os.environ.get('OMP_WAIT_POLICY'))"]
    assert subprocess.run(command, env=clean, capture_output=True, text=True, check=True).stdout == "None\n"
