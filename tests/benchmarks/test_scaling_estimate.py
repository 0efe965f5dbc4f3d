"""What a step is said to cost on more devices, against counting, and against two processes."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.scaling_estimate import DistinctGrowth, MeasuredStep, TableUse, format_estimates, main, measure_step
from haed.options import IEMOptions
from pipeline.config import Options
from pipeline.run.metrics import read_metrics
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import open_shards
from pipeline.training import stages
from pipeline.training.profile import Profile


def step(**more: object) -> MeasuredStep:
    parts = {"data": 1.0, "candidates": 2.0, "encoder": 4.0, "main": 8.0, "decoder": 16.0, "loss": 32.0}
    parts["optimizer"] = 1.0
    kept = dict.fromkeys(parts, 1000)
    found = Profile("pretrain", 1, parts, kept, 1e9, 1e12, 0.1)
    values = {"speed": 0.5, "chunks": 100, "tokens": 12, "width": 15, "parameters": 1000}
    grams, chunks = DistinctGrowth([10, 15], 0.5, 50), DistinctGrowth([8], 1.0, 9)
    values |= {
        "tables": [TableUse(grams, 6, 50, False), TableUse(chunks, 3, 9, True)],
        "further": 1.5,
        "preparing": 0.25,
    }
    values["growth"] = DistinctGrowth([80, 120, 180, 270], 0.5, 1000)
    return MeasuredStep(**{"profile": found, **values, **more})


def test_distinct_chunks_grow_as_counted_then_as_a_power_up_to_all_of_the_split() -> None:
    growth = step().growth
    assert growth is not None
    assert [growth(batches) for batches in (1, 2, 4, 8)] == [80, 120, 180, 270]
    assert 120 < growth(3) < 180
    assert growth(32) == 540 and growth(1e6) == 1000
    assert DistinctGrowth([80], 0.0, None)(1024) == 80
    batches = [torch.tensor(numbers, dtype=torch.long) for numbers in ([3, 4], [4, 4], [5], [6, 7, 3])]
    assert DistinctGrowth.from_batches(batches, 5) == DistinctGrowth([2, 2, 5], math.log2(2.5) / 2, 5)
    assert DistinctGrowth.from_batches([batches[0][:0]] * 2, 5)(8) == 0


def test_memory_of_one_gpu_is_what_was_allocated_there() -> None:
    measured = step()
    known = sum(measured.estimate_step(1, 1e6).memory.values())
    measured.profile.peak = int(known) + 5000
    one, four = (measured.estimate_step(devices, 1e6).memory for devices in (1, 4))
    assert sum(one.values()) == measured.profile.peak and four["the rest"] == one["the rest"]


def test_what_a_step_costs_is_worked_out_from_its_parts() -> None:
    one, four = (step().estimate_step(devices, 1e6) for devices in (1, 4))
    assert one.candidates == 80 and sum(one.exchanged.values()) == 0 and one.efficiency == 1
    assert one.milliseconds == {
        "data": 1, "candidates": 0.5, "encoder": 2, "main": 4, "decoder": 8, "loss": 16, "optimizer": 0.5
    }  # fmt: skip
    assert four.candidates == 180
    assert four.milliseconds == one.milliseconds | {
        "candidates": 0.5 + 3 * 1.5 / 4,
        "encoder": 2 * 180 / 80 / 4,
        "loss": 16 * 180 / 80,
    }
    assert four.exchanged == {
        "gradients": 8 * 1000 * 3 / 4,
        "embeddings": 12 * 180 * 16 * 3 / 4,
        "chunks": 80 * 21 * 3,
        "counts": 0,
        "tables": ((10 + 21) * 32 + (8 * 180 / 80 / 4 + 9) * 20) * 3 / 4,
    }
    assert four.seconds == pytest.approx(sum(four.milliseconds.values()) / 1e3 + sum(four.exchanged.values()) / 1e6)
    assert four.chunks_per_second == pytest.approx(400 / four.seconds) and four.efficiency == one.seconds / four.seconds
    assert four.memory["tables"] == 4 * 7 * 50 + 4 * 4 * 9 and four.memory["scores"] == 10 * 180 * 100


def test_an_accelerator_computes_while_the_host_reads_but_where_it_waits_for_rows() -> None:
    waiting = step(ahead=True).estimate_step(4, 1e6)
    assert waiting.seconds == step().estimate_step(4, 1e6).seconds
    found = step(ahead=True, tables=[]).estimate_step(4, 1e6)
    parts = dict(found.milliseconds)
    host = parts.pop("data")
    exchanging = sum(found.exchanged.values()) / 1e6
    assert found.seconds == pytest.approx(max(host, sum(parts.values())) / 1e3 + exchanging)


def test_groups_bound_what_grows_with_the_candidates() -> None:
    alone, grouped = (step(iem=IEMOptions(group=group)).estimate_step(1024, 1e9) for group in (None, 8))
    assert grouped.candidates == 270 and alone.candidates == 1000
    assert grouped.milliseconds["loss"] < alone.milliseconds["loss"]
    assert grouped.exchanged["counts"] == 16 * 270 and alone.exchanged["counts"] == 0
    assert step(iem=IEMOptions(group=8)).estimate_step(4, 1e9).candidates == 180  # fewer devices than a group has
    with pytest.raises(ValueError, match="6 devices cannot be divided into groups of 4"):
        step(iem=IEMOptions(group=4)).estimate_step(6, 1e9)
    assert step(growth=None, iem=IEMOptions(group=4)).estimate_step(6, 1e9).devices == 6  # nothing is shared
    assert step(iem=IEMOptions(group=8, correction="none")).estimate_step(64, 1e9).exchanged["counts"] == 0
    assert step(iem=IEMOptions(extra_batches=3)).estimate_step(8, 1e9).exchanged["chunks"] == 180 * 21 * 7
    assert "iem.group makes groups" in format_estimates(step(), [1024, 64], 1e9)


def test_a_system_without_candidates_exchanges_gradients_and_tables() -> None:
    found = step(growth=None, width=0).estimate_step(4, 1e9)
    assert found.candidates == 0 and set(found.exchanged) == {"gradients", "tables"}


@pytest.mark.slow
def test_a_plan_is_made_from_a_run_and_writes_nothing(options: Options, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(options).write_corpus_record(open_shards(options))
    run = RunFolder.from_options(options).path
    before = sorted(run.rglob("*"))
    words = ["--steps", "1", "--devices", "1", "16"]
    main([str(run), *words, "--json"])
    one, many = json.loads(capsys.readouterr().out)
    assert one["devices"] == 1 and many["candidates"] > one["candidates"] > 0
    main([str(run), *words, "--rate", "400"])
    assert capsys.readouterr().out.startswith("devices  candidates")
    assert sorted(run.rglob("*")) == before
    for words in (["iem.group=4", "--devices", "6"], ["--devices", "6", "--rate", "1", "iem.group=4"]):
        with pytest.raises(ValueError, match="6 devices cannot be divided into groups of 4"):
            main([str(run), *words])
    for wrong in (["--link", "0"], ["--rate", "inf"], ["--rate", "1e-300"], ["--devices", "0"], ["--devices", "1.5"]):
        with pytest.raises(SystemExit):
            main([str(run), *wrong])
        assert f"{wrong[0]}: {wrong[1]}: must be a" in capsys.readouterr().err


def test_an_average_of_the_weights_is_held_too() -> None:
    tables = [
        TableUse(DistinctGrowth([10], 0.5, 100), 8, 100, False),
        TableUse(DistinctGrowth([0], 0.0, 50), 4, 50, True),
    ]
    plain, averaged = (step(tables=tables, average=average).estimate_step(1, 1e9).memory for average in (False, True))
    assert averaged["tables"] - plain["tables"] == 4 * (8 * 100 + 4 * 50)
    name = "weights, gradients and moments"
    assert averaged[name] == plain[name] * 20 / 16


@pytest.mark.nightly
def test_two_processes_choose_among_as_many_candidates_as_were_foreseen(options: Options) -> None:
    options.log_steps, options.pretrain.steps = 1, 20
    RunFolder.create(options).write_corpus_record(open_shards(options))
    foreseen = [measure_step(options, "pretrain", 1).estimate_step(devices, 1e9).candidates for devices in (1, 2)]
    found = []
    for options.launcher.processes in (1, 2):
        options.name = f"processes-{options.launcher.processes}"
        stages.pretrain(options)
        records = read_metrics(Path(options.runs_dir) / options.name / "pretrain" / "metrics.jsonl")
        found.append(sum(record["candidates"] for record in records if "candidates" in record) / 20)
    assert found == pytest.approx(foreseen, rel=0.15)
