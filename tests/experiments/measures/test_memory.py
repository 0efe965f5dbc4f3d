"""What a step keeps: every byte once, and as many as the sizes say."""

from dataclasses import replace

import pytest
import torch

from experiments.activation_memory import compute_saved_bytes, measure_saved_bytes
from experiments.measures import measure_memory
from haed.base import ChunkingSpec, SequenceModel, TokenBatch
from haed.options import HourglassOptions, IEMOptions, ModelOptions, MultiscaleOptions, TokenOptions
from haed.registry import make_system
from pipeline.run.opened import Run
from pipeline.training.profile import SavedActivations

TOKEN = TokenOptions(width=24, heads=4, head_width=6, ffn=40)
MODELS = {
    "vanilla": ModelOptions(kind="hourglass", token=TOKEN, hourglass=HourglassOptions(hierarchy="6@1")),
    "top-down": ModelOptions(kind="top_down", token=TOKEN, multiscale=MultiscaleOptions(layers="1@16 2@4 3@1")),
    "bottom-up": ModelOptions(kind="bottom_up", token=TOKEN, multiscale=MultiscaleOptions(layers="1@16 2@4 3@1")),
}


def made(options: ModelOptions, context: int) -> tuple[SequenceModel, TokenBatch]:
    torch.manual_seed(0)
    system = make_system(options, IEMOptions(), ChunkingSpec(16, 50, True, context))
    tokens = torch.randint(50, (3, context, 16))
    return system, TokenBatch.from_chunks(tokens, torch.full((3, context), 16))


@pytest.mark.parametrize("context", [5, 20])  # of 128 positions, fewer and more
@pytest.mark.parametrize("name", MODELS)
def test_computed_is_measured(name: str, context: int) -> None:
    system, windows = made(MODELS[name], context)
    found = measure_saved_bytes(system, windows)
    wanted = compute_saved_bytes(MODELS[name], 50, 3, 16 * context)
    assert wanted is not None
    for key in found | wanted:
        assert found[key] == pytest.approx(wanted[key], rel=0.01, abs=64), key
    assert sum(found.values()) == pytest.approx(sum(wanted.values()), rel=0.001)


def test_kinds_make_up_what_a_profile_says_is_kept() -> None:
    system, windows = made(MODELS["top-down"], 5)
    found = measure_saved_bytes(system, windows)
    laid = system.prepare_inputs(windows)
    with (kept := SavedActivations(system)):
        system.total_log_likelihood(laid)
    assert sum(found.values()) == kept.total_bytes > 0


def test_a_system_on_another_device_is_measured_there() -> None:
    system, windows = made(MODELS["top-down"], 5)
    measure_saved_bytes(system.to("meta"), windows)  # raises where a tensor of the host meets one of the device


def test_a_run_has_its_table(scaled: Run) -> None:
    found = measure_memory(scaled)
    assert found.metrics["share that the computed is off"] < 0.01
    assert 0 < found.metrics["a layer at 2x, of one at 1x"] < 1
    head, *rows = found.examples
    parts = ["embedding", "scale_2", "scale_1", "output", "all"]
    assert [row[0] for row in rows] == [f"{part}, {how}" for part in parts for how in ("measured", "computed")]
    assert all(measured[1:] == computed[1:] for measured, computed in zip(rows[::2], rows[1::2], strict=True))
    assert all(len(row) == len(head) for row in rows)


def test_models_whose_sizes_are_not_told_have_no_count() -> None:
    assert compute_saved_bytes(ModelOptions(kind="retina", token=TOKEN), 50, 3, 64) is None
    assert compute_saved_bytes(replace(MODELS["vanilla"], token=TokenOptions(dropout=0.1)), 50, 3, 64) is None
