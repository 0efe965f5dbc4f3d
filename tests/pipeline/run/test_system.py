"""What a phase asks for at least."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pipeline.config import Options, PhaseOptions
from pipeline.run import system
from pipeline.run.device import setup_compute
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards
from pipeline.run.system import build_system, check_memory, estimate_memory
from pipeline.training.profile import profile_phase


def test_what_is_frozen_asks_for_no_moments(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase is refused for what it trains."""
    chunker = open_shards(options).build_chunker()
    options.model.decoder.width, options.batch.sequences, machine = 512, 1, setup_compute(options)
    weights = {
        group.role: sum(x.numel() for x in group.parameters)
        for group in build_system(options, chunker).parameter_groups()
    }
    assert weights["decoder"] > 20 * weights["main"]

    def fits(megabytes: float, limits: PhaseOptions) -> bool:
        monkeypatch.setattr(system, "free_memory", lambda device: 1e6 * megabytes)
        try:
            check_memory(estimate_memory(options, chunker, machine, limits), machine.device)
        except ValueError:
            return False
        return True

    some = 10e-6 * weights["decoder"]  # MB: more than its weights, less than these and what Adam keeps
    assert not fits(some, options.pretrain) and not fits(some, options.finetune)
    assert fits(some, replace(options.pretrain, decode_fraction=0.0))
    options.model.decoder.width, options.model.main.width, options.model.main.ffn = 16, 512, 512
    some = 10e-6 * sum(x.numel() for x in build_system(options, chunker).parameters())
    assert not fits(some, options.finetune) and fits(some, replace(options.finetune, trains="decoder"))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["haed", "hourglass"])
def test_a_step_saves_no_less_than_is_foreseen_in_its_precision(options: Options, kind: str, precision: str) -> None:
    options.model.kind, options.precision, options.batch.sequences = kind, precision, 8
    corpus, run = open_shards(options), RunFolder.create(options)
    run.write_corpus_record(corpus)
    kept, machine = sum(profile_phase(options, "train", 1).kept.values()), setup_compute(options)
    length = corpus.split_counts("train").mean_chunk_length
    foreseen = estimate_memory(options, corpus.build_chunker(), machine, options.train, chunk_length=length)
    assert 0.2 < foreseen["batch.sequences × batch.context"] / kept < 1


# What is set before torch is loaded.


@pytest.mark.slow
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
