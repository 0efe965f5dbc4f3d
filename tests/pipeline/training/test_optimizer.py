"""Learning rates, groups of the optimizer, the moving average, early stop, and the decoder alone."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from haed.base import ChunkingSpec
from haed.chunk.model import HAED
from haed.options import EncoderOptions, IEMOptions, MainOptions, ModelOptions
from pipeline.config import OptimizerOptions, Options, PhaseOptions, load_options
from pipeline.run.opened import open_run
from pipeline.training.optimizer import Position, WeightAverage, learning_rate_share, make_optimizer
from pipeline.training.stages import finetune, pretrain, train
from tests.pipeline.training.test_stages import newest, stripped, weights


@pytest.fixture
def hundred_steps() -> PhaseOptions:
    return load_options(None, ["train.steps=100", "train.rate_from=0.8", "train.rate_to=0.2"]).train


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", {0: 0.08, 50: 0.5, 100: 0.2}),
        ("linear", {0: 0.08, 25: 0.65, 75: 0.35, 100: 0.2}),
        ("stable", {0: 0.08, 25: 0.8, 80: 0.8, 90: 0.5, 100: 0.2}),
        ("inverse_root", {0: 0.08, 4: 0.4, 9: 0.8, 39: 0.4}),
    ],
)
def test_the_rate_is_a_function_of_progress(
    schedule: Any, rates: dict[int, float], hundred_steps: PhaseOptions
) -> None:
    options = OptimizerOptions(warmup_steps=10, schedule=schedule)
    assert {step: learning_rate_share(Position(step), hundred_steps, options) for step in rates} == pytest.approx(rates)


def test_the_limit_that_is_nearest_is_the_progress(hundred_steps: PhaseOptions) -> None:
    phase = replace(hundred_steps, seconds=30.0)
    assert learning_rate_share(Position(50, 30.0), phase, OptimizerOptions(warmup_steps=0)) == pytest.approx(0.2)


def test_rates_fall_from_the_decoder_to_the_encoder() -> None:
    model = HAED(ModelOptions(main=MainOptions(layers=3)), IEMOptions(), ChunkingSpec(4, 256, False, 8))
    optimizer = make_optimizer(model, OptimizerOptions(learning_rate=1.0, main_learning_rate=2.0), 0.5)
    rates = {id(parameter): group["peak"] for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert found["decoder.output.weight"] == found["head.weight"] == 1.0
    assert found["main.norm.weight"] == found["main.blocks.2.feed_forward.down.weight"] == 1.0  # 2.0 · 0.5
    assert found["main.blocks.0.feed_forward.down.weight"] == found["main.start"] == 0.25
    assert {found[name] for name in found if name.startswith("encoder.")} == {1 / 16}
    assert found["log_scale"] == 1.0 and len(rates) == len(list(model.parameters()))


def test_rows_of_a_table_are_moved_by_adagrad_where_there_is_a_gradient() -> None:
    """Others stay, as weight decay would not let them; all other matrices decay."""
    model = HAED(ModelOptions(encoder=EncoderOptions(rows=4)), IEMOptions(), ChunkingSpec(4, 256, False, 8))
    table, linear = model.encoder.table, model.main.get_parameter("blocks.0.feed_forward.down.weight")
    assert table is not None
    torch.nn.init.ones_(table)
    optimizer = make_optimizer(
        model, OptimizerOptions(learning_rate=0.1, weight_decay=0.5, main_learning_rate=0.1, table_learning_rate=0.2)
    )
    for group in optimizer.param_groups:
        group["lr"] = group["peak"]
    before, expected, squares = linear.detach().clone(), torch.ones_like(table), torch.zeros(4)
    for rows in ([1, 3], [1], []):
        values = torch.randn(len(rows), table.shape[1])
        table.grad = torch.sparse_coo_tensor([rows], values, table.shape, check_invariants=True)
        linear.grad = torch.zeros_like(linear)
        optimizer.step()
        for row, gradient in zip(rows, values, strict=True):
            squares[row] += gradient.square().mean()
            expected[row] -= 0.2 * gradient / squares[row].sqrt()
    torch.testing.assert_close(table.detach(), expected)
    torch.testing.assert_close(linear.detach(), before * (1 - 0.1 * 0.5) ** 3)


def test_the_average_of_weights_against_its_formula() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    average, expected = WeightAverage(model, 0.5), model.weight.detach().clone()
    for step in range(1, 30):
        torch.nn.init.normal_(model.weight)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.detach().clone()
    with average.use_average():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, own)


def test_the_average_is_what_is_evaluated(options: Options) -> None:
    options.optimizer.ema = 0.9
    train(options)
    folder = newest(options, "train")
    average, own = load_file(folder / "average.safetensors"), weights(options, "train")
    used = {name: x.cpu() for name, x in open_run(options.name, options.runs_dir).system.state_dict().items()}
    assert all(torch.equal(used[name], average[name]) for name in used)
    assert not all(torch.equal(used[name], own[name]) for name in used)


@pytest.mark.parametrize(("trains", "moved"), [("decoder", False), ("decoder_first", True)])
def test_the_decoder_alone(options: Options, trains: str, moved: bool) -> None:
    pretrain(options)
    options.finetune.trains, options.finetune.decoder_steps, options.finetune.steps = trains, 3, 5  # type: ignore[assignment]
    options.checkpoint.every_steps, options.checkpoint.keep = 1, 9
    finetune(options)
    before = weights(options, "pretrain")
    folder = Path(options.runs_dir) / options.name / "finetune" / "checkpoints"
    for step in (3, 5):
        now = load_file(folder / f"step-{step:08d}" / "model.safetensors")
        same = {name: torch.equal(now[name], before[name]) for name in now}
        main = [same[name] for name in now if name.startswith("main.")]
        assert all(main) if step == 3 or not moved else not any(main)
        assert not any(same[name] for name in now if name.startswith("decoder."))


def test_the_recorded_rate_is_that_of_the_options(options: Options) -> None:
    pretrain(options)
    options.finetune.layer_decay, options.finetune.rate_from, options.finetune.rate_to = 0.5, 1.0, 1.0
    options.optimizer.warmup_steps = 0
    finetune(options)
    rates = [line["learning_rate"] for line in stripped(options, "finetune") if "learning_rate" in line]
    assert rates and rates == [options.optimizer.learning_rate] * len(rates)


def test_a_phase_without_decoding_is_validated_by_the_iem_loss(
    options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    options.pretrain.decode_fraction, options.pretrain.steps, options.validation.times = 0.0, 12, 3
    options.optimizer.ema = 0.5
    pretrain(options)
    scored = [line for line in stripped(options, "pretrain") if "validation/iem" in line]
    found = [line["validation/iem"] for line in scored]
    assert [line["step"] for line in scored] == [4, 8, 12] and found == sorted(found, reverse=True)
    assert not any("validation/bits_per_token" in line for line in stripped(options, "pretrain"))
    folder = newest(options, "pretrain").parent
    assert (folder / "best").read_text().strip() == "step-00000012"
    options.optimizer.learning_rate = options.optimizer.main_learning_rate = 1e-12
    options.optimizer.ema = 0.0
    options.pretrain.steps, options.validation.times, options.pretrain.patience = 40, 20, 2
    assert pretrain(options).steps < 40  # the same candidates each time: nothing moves, nothing is better
    options.pretrain.patience, options.pretrain.decode_fraction = 0, 0.5
    with caplog.at_level(logging.INFO):
        pretrain(options)
    assert "earlier validations are not compared" in caplog.text
    assert (folder / "best").read_text().strip() != "step-00000012"  # bits are more than nats, and not compared


def test_bits_of_the_decoder_are_not_compared_with_those_of_the_mixture(
    mixed: Options, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(mixed.runs_dir) / mixed.name / "finetune" / "checkpoints"
    before = (folder / "latest").read_text()
    mixed.finetune.iem_weight, mixed.validation.times = 0.0, 3
    assert mixed.finetune.steps is not None
    mixed.finetune.steps += 4
    with caplog.at_level(logging.INFO):
        finetune(mixed)
    assert "earlier validations are not compared" in caplog.text
    assert (folder / "best").read_text() > before  # the mixture had fewer bits


@pytest.mark.slow
def test_a_phase_ends_when_validation_does_not_improve(options: Options, caplog: pytest.LogCaptureFixture) -> None:
    options.train.steps, options.validation.times, options.train.patience = 40, 20, 2
    rates = options.optimizer  # such that nothing moves
    rates.learning_rate = rates.main_learning_rate = rates.table_learning_rate = 1e-30
    with caplog.at_level(logging.INFO):
        found = train(options)
    bits = [line[key] for line in stripped(options, "train") if (key := "validation/bits_per_token") in line]
    assert found.steps == 2 * len(bits) < 40 and min(bits) == bits[-3] and "so the phase ends" in caplog.text
    recorded = [line["step"] for line in stripped(options, "train") if "loss" in line]
    assert recorded[-1] == found.steps and recorded == sorted(set(recorded))  # its last steps too, once
    with caplog.at_level(logging.INFO):
        assert train(options).steps == found.steps  # it stays ended
    assert "the phase ended early by train.patience=2. Raise it to continue" in caplog.text
    options.train.patience = 0
    assert train(options).steps == 40
