"""Compiled training: the same losses and gradients, one graph for all steps, and nothing but training is compiled."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from haed.base import CompiledFunction, Objective
from haed.options import IEMOptions
from haed.registry import make_objective
from tests.conftest import mostly_nightly
from tests.haed.test_device import batch
from tests.haed.test_systems import CASES, TOKENS, system

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler meets PyTorch's own


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that torch.compile finds from now on. They are run as they are, without a compiler of C++."""
    found: list[torch.fx.GraphModule] = []

    def keep_graph(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        found.append(graph)
        return graph

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep_graph))
    return found


def objective(case: str, fixed: bool = True, pieces: int = 1) -> Objective:
    weight = 0.0 if case in TOKENS else 1.0
    made = system(case, fixed=fixed)
    return make_objective(made, IEMOptions(), iem_weight=weight, decode_fraction=1.0, pieces=pieces)


def train(made: Objective, seed: int) -> Tensor:
    torch.manual_seed(0)  # for dropout
    loss = made(made.prepare_batch(batch(seed))).total
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("case", mostly_nightly(CASES, "lstm decoder", "flat", "hourglass, linear"))
def test_a_compiled_system_has_the_same_loss_and_gradients_in_one_graph_for_all_steps(
    case: str, graphs: list[torch.fx.GraphModule], caplog: pytest.LogCaptureFixture
) -> None:
    plain, compiled = objective(case), objective(case)
    compiles = compiled.compile_training()
    for seed in range(4):
        torch.testing.assert_close(train(compiled, seed), train(plain, seed))
    for (name, one), other in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad.to_dense(), other.grad.to_dense(), msg=partial("{}: {}".format, name))
    assert compiles == (case != "hred" and "spacebyte" not in case)
    assert len(graphs) == compiles and "failed" not in caplog.text


def test_nothing_is_compiled_where_shapes_differ_so_that_a_resumed_run_ends_in_the_same_bits(
    graphs: list[torch.fx.GraphModule],
) -> None:
    varying = objective("flat", fixed=False), objective("lstm decoder", pieces=3)
    for made in (*varying, objective("spacebyte"), objective("hred")):
        assert not made.compile_training()
        train(made, 0)
    assert not graphs


@pytest.mark.parametrize("case", ["lstm decoder", "flat"])
def test_scores_and_state_of_a_compiled_system_are_those_without(case: str, graphs: list[torch.fx.GraphModule]) -> None:
    plain, compiled = objective(case), objective(case)
    compiled.compile_training()
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        scores = (each.system.decision_log_likelihood(batch()) for each in (compiled, plain))
        assert torch.equal(*scores) and not graphs


def test_flops_of_compiled_steps_are_counted(graphs: list[torch.fx.GraphModule]) -> None:
    plain, compiled = objective("flat"), objective("flat")
    compiled.compile_training()
    for seed in range(3):
        windows = batch(seed)
        windows.lengths[:] = 3
        steps = [each.prepare_batch(windows) for each in (compiled, plain)]
        for each, step in zip((compiled, plain), steps, strict=True):
            each(step).total.backward()
        assert compiled.estimate_flops(steps[0]) == plain.estimate_flops(steps[1]) > 0
    assert len(graphs) == 1


def test_a_failure_of_the_compiler_is_said_once_and_memory_that_runs_out_is_no_such_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> Callable[..., object]:
        def broken(*_: object) -> object:
            raise error

        return lambda *_, **__: broken

    x = torch.ones(2, requires_grad=True)
    monkeypatch.setattr(torch, "compile", fail(RuntimeError("no compiler\nhere\nor there")))
    doubled = CompiledFunction(lambda x: 2 * x)
    with caplog.at_level(logging.WARNING):
        assert [doubled(x).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert (
        caplog.text.count("torch.compile failed (no compiler here). Training continues without it. If a process") == 1
    )
    monkeypatch.setattr(torch, "compile", fail(torch.OutOfMemoryError("none left")))
    with pytest.raises(torch.OutOfMemoryError):
        CompiledFunction(lambda x: 2 * x)(x)
    none_left = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")  # the function itself raises it, too
    monkeypatch.setattr(torch, "compile", fail(none_left))
    compiled = CompiledFunction(fail(none_left)())
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        compiled(x)
    assert compiled.compiled is not None


@pytest.mark.nightly  # the compiler of C++ takes a quarter of a minute
def test_what_the_real_compiler_makes_agrees() -> None:
    torch.compiler.reset()
    plain, compiled = objective("flat"), objective("flat")
    compiled.compile_training()
    torch.testing.assert_close(train(compiled, 0), train(plain, 0))
