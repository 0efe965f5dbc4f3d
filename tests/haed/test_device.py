"""Models, losses, samplers and the optimizer on a device give what they give on the CPU, and a step never waits for it.

The device is a stand-in (`tests/haed/stand_in.py`), or a GPU where HAED_TEST_DEVICE=cuda is set.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from haed.base import SequenceModel, TokenBatch, to_device
from haed.distributed import mark_rows, sum_gradient_rows
from haed.iem.objective import ChunkObjective
from haed.options import IEMOptions
from haed.registry import make_objective, make_sampler
from haed.sampling import Draw
from pipeline.config import OptimizerOptions
from pipeline.training.optimizer import clip_gradients, make_optimizer
from tests.conftest import mostly_nightly
from tests.haed.chunk.test_model import small, windows
from tests.haed.conftest import ComputeDevice
from tests.haed.iem import test_mixed
from tests.haed.test_systems import CASES, TOKENS, system

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def batch(seed: int = 1) -> TokenBatch:
    """Windows with an empty one, padding, and a document that begins within."""
    made = windows(4, 6, 3, 3)
    made.tokens = (made.tokens + seed) % 3 * (made.tokens > -1)
    made.tokens *= torch.arange(3) < made.lengths[..., None]
    made.lengths[1, 4:], made.lengths[2] = 0, 0
    made.starts[0, 3] = True
    return made


def as_plain(x: Tensor) -> Tensor:
    """A tensor on the CPU, dense."""
    return x.detach().cpu().to_dense()


def check_same(there: dict[str, Tensor], here: dict[str, Tensor]) -> None:
    assert there.keys() == here.keys()
    for name, value in there.items():
        torch.testing.assert_close(value, here[name], **CLOSE, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize(
    "case", mostly_nightly(CASES, "lstm decoder", "megabyte", "hourglass, nested, relative", "retina")
)
@torch.no_grad()
def test_a_system_scores_on_a_device_as_on_the_cpu(case: str, device: ComputeDevice) -> None:
    here, there = (system(case).to(place).decision_log_likelihood(batch()) for place in (CPU, device.place))
    assert there.device.type == device.place.type
    torch.testing.assert_close(as_plain(there), here, **CLOSE)


@pytest.mark.parametrize("case", mostly_nightly(TOKENS, "flat", "top-down", "bottom-up", "spacebyte"))
def test_a_step_of_a_token_model_is_the_same_on_a_device_and_never_waits(case: str, device: ComputeDevice) -> None:
    found = []
    for place in (CPU, device.place):
        made = make_objective(system(case).to(place), IEMOptions(), iem_weight=0, decode_fraction=1)
        for is_first in (True, False) if place.type == "cuda" else (False,):
            given = to_device(made.prepare_batch(batch()), place)
            made.zero_grad()
            with device.refuse_waits(is_first) if place != CPU else nullcontext():
                losses = made(given)
                losses.total.backward()
        found.append({name: as_plain(x.grad) for name, x in made.named_parameters() if x.grad is not None})
        found[-1]["total"] = as_plain(losses.total)
    check_same(*found)


CHUNK_STEPS = {
    f"{kind} {name}": (kind, iem_weight, fraction, iem)
    for kind in ("lstm", "previous", "hred", "megabyte", "reader", "grams")
    for name, iem_weight, fraction, iem in (
        ("phase one", 1.0, 0.0, IEMOptions()),
        ("both", 1.0, 0.5, IEMOptions(similarity="cosine", block=5)),
        ("paper", 1.0, 0.0, IEMOptions(correction="none", duplicates=True)),
        ("end to end", 0.0, 1.0, IEMOptions()),
    )
    if kind == "lstm" or name in ("both", "end to end")
}


def chunk_objective(step: str, pieces: int, place: torch.device) -> ChunkObjective:
    if step == "mixture":
        return test_mixed.objective(0.5, pieces, place)
    kind, iem_weight, fraction, iem = CHUNK_STEPS[step]
    return ChunkObjective(small(kind, iem=iem).to(place), iem, iem_weight, fraction, pieces)


@pytest.mark.parametrize(
    ("step", "pieces"),
    [
        *((step, 1) for step in CHUNK_STEPS),
        ("mixture", 1),
        ("mixture", 3),
        pytest.param("reader both", 3, marks=pytest.mark.nightly),
        pytest.param("previous end to end", 3, marks=pytest.mark.nightly),
    ],
)
def test_steps_of_a_chunk_model_are_the_same_on_a_device_and_wait_once(
    step: str, pieces: int, device: ComputeDevice
) -> None:
    """For all sizes together, when the batch is prepared; with several pieces also for the sizes of what they encode.

    Candidates, loss, backward pass and the optimizer, with its table of rows, twice.
    """
    found = []
    for place in (CPU, device.place):
        made = chunk_objective(step, pieces, place)
        optimizer = make_optimizer(made.system, OptimizerOptions())
        values: dict[str, Tensor] = {}
        for number in range(2):
            given = test_mixed.given() if step == "mixture" else batch(number)
            if device.stand_in is not None:
                device.stand_in.waits.clear()
            extra = batch(5) if step != "mixture" else None
            prepared = made.prepare_batch(given, extra, torch.Generator().manual_seed(0))
            if place != CPU and device.stand_in is not None:
                waits = 1 + pieces * (step == "reader both" and pieces > 1)
                assert device.stand_in.waits == {"copy from the device": waits}
            there = to_device(prepared, place)
            with device.refuse_waits(is_first=not number) if place != CPU else nullcontext():
                losses = made(there, diagnose=number == 1)
                losses.total.backward()
                dense = [x for group in optimizer.param_groups if not group["table"] for x in group["params"]]
                clip_gradients(dense, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            shown = {"total": losses.total, **losses.figures, **losses.diagnosis}
            values |= {f"{name} {number}": as_plain(torch.as_tensor(x)) for name, x in shown.items()}
        found.append(values | {name: as_plain(x) for name, x in made.system.state_dict().items()})
    check_same(*found)


@pytest.mark.parametrize("rows", [[7, 0, 7, 3, 0, 0], [0, 3, 7], [3, 7, 0], []])
def test_rows_of_a_gradient_are_summed_without_a_wait(rows: list[int], device: ComputeDevice) -> None:
    """Whatever is padded adds nothing, and a row has one sum."""
    values = torch.randn(len(rows), 4)
    gradient = torch.sparse_coo_tensor(torch.tensor([rows], dtype=torch.long), values, (9, 4), check_invariants=True)
    for place in (CPU, device.place):
        indices = gradient._indices().to(place)
        sparse = torch.sparse_coo_tensor(indices, values.to(place), (9, 4), check_invariants=False)
        with device.refuse_waits(is_first=False) if place != CPU else nullcontext():
            found, sums = sum_gradient_rows(sparse)
            mask = mark_rows(found)
        found, sums, mask = found.cpu(), sums.cpu(), mask.cpu()
        assert torch.equal(found[mask], found.unique()) and not sums[~mask].any()
        assert sums.any(1).sum() == len({*rows})
        assert torch.equal(sums.new_zeros(9, 4).index_add(0, found, sums), gradient.to_dense())


SAMPLED = ["lstm decoder", "sees the chunk before, dropout", "megabyte", "lstm decoder, n-grams", "flat, n-grams"]
SAMPLED += ["spacebyte", "hourglass, nested, relative", "top-down, threes, maxima, lsh", "bottom-up", "retina"]


@pytest.mark.parametrize("case", mostly_nightly(SAMPLED, "lstm decoder", "spacebyte"))
@torch.no_grad()
def test_samples_on_a_device_are_those_of_the_cpu(case: str, device: ComputeDevice) -> None:
    found = []
    for place in (CPU, device.place):
        made: SequenceModel = system(case, fixed=True).to(place)
        sampler = make_sampler(made, windows(2, 2, 3, 3, fixed=True), 2)
        drawn = [sampler.draw_chunk(Draw(temperature=0)) for _ in range(5)]
        found.append([as_plain(each.tokens).tolist() for each in drawn])
    assert found[0] == found[1]
