"""Optimizer of a phase: learning-rate schedule, parameter groups, and a moving average of the weights."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from haed.base import SequenceModel
from haed.distributed import is_sharded, load_weights, local_part, sum_gradient_rows, total_norm
from pipeline.config import OptimizerOptions, PhaseOptions
from pipeline.run.metrics import Position

COOLDOWN = 0.2  # the last part of a stable phase


def learning_rate_share(position: Position, phase: PhaseOptions, rates: OptimizerOptions) -> float:
    """Return the learning rate as a share of its peak.

    It warms up linearly in steps. Then it goes from `rate_from` to `rate_to`, or falls with 1/√steps. The schedule
    `stable` is the warmup-stable-decay schedule of MiniCPM (Hu et al. 2024, section 4), which decays in the last fifth
    of a phase.
    """
    step, warmup, done = position.step + 1, max(1, rates.warmup_steps), position.progress(phase)
    warm = min(1.0, step / warmup)
    if rates.schedule == "inverse_root":
        return phase.rate_from * warm * min(1.0, (warmup / step) ** 0.5)
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "stable": min(1.0, (1 - done) / COOLDOWN),
    }[rates.schedule]
    return warm * (phase.rate_to + (phase.rate_from - phase.rate_to) * left)


class AdamWAndRows(torch.optim.AdamW):
    """AdamW; and row-wise Adagrad for groups with `table`, whose gradients are sparse.

    A row is updated by its gradient divided by the root of a sum: the mean square of its gradient, over all steps that
    used it (Duchi et al. 2011; by rows: Naumov et al. 2019). Time and memory depend on the rows of a step, with one
    number stored a row.

    Methods of AdamW are called without their decorators, which import PyTorch's compiler: a second at every start.
    """

    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    _step_without_tables = inspect.unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters once; see the class."""
        for group in self.param_groups:
            for table in group["params"] if group["table"] else ():
                if table.grad is not None:
                    (rows, values), table.grad = sum_gradient_rows(table.grad), None
                    state = self.state[table]
                    squares = state["squares"] = state["squares"] if state else table.new_zeros(len(table))
                    squares.index_add_(0, rows, values.square().mean(1))
                    scale = -group["lr"] / (squares[rows].sqrt() + group["eps"]).clamp(min=1e-20)  # 0 / 0 is no step
                    table.index_add_(0, rows, values * scale[:, None])
        self._step_without_tables(closure)


def make_optimizer(system: SequenceModel, rates: OptimizerOptions, layer_decay: float = 1.0) -> AdamWAndRows:
    """Create AdamW with weight decay of matrices alone and the main model's own learning rate.

    Tables use row-wise Adagrad with their own learning rate. Transformer-XL's u and v, which have a row for each head,
    count as matrices.

    Args:
        system: the system; parameters that need no gradient are left out.
        rates: peak learning rates and other options.
        layer_decay: factor of the learning rate for each step of `ParameterGroup.depth` (ELECTRA: Clark et al. 2020, appendix
            A).

    Raises:
        ValueError: a parameter is in no group.
    """
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    parts = system.parameter_groups()
    grouped = {id(parameter) for part in parts for parameter in part.parameters}
    if left_out := [name for name, parameter in system.named_parameters() if id(parameter) not in grouped]:
        advice = "A main model lists all of its own in parameters_by_depth, and any other in parameter_groups"
        raise ValueError(f"parameters in no group, which would never be trained: {', '.join(left_out)}. {advice}")
    for group in parts:
        peak = rates.main_learning_rate if group.role == "main" else rates.learning_rate
        peak = (rates.table_learning_rate if group.table else peak) * layer_decay**group.depth
        for parameter in group.parameters:
            if parameter.requires_grad:
                decay = rates.weight_decay if parameter.ndim >= 2 and not group.table else 0.0
                groups.setdefault((peak, decay, group.table), []).append(parameter)
    return AdamWAndRows(
        [
            {"params": parameters, "peak": peak, "weight_decay": decay, "table": table}
            for (peak, decay, table), parameters in sorted(groups.items(), key=lambda each: each[0][2])  # tables last
        ],
        lr=rates.learning_rate,
        betas=(0.9, rates.beta2),
        eps=rates.epsilon,
        fused=True,
    )


def clip_gradients(parameters: list[Tensor], limit: float) -> Tensor:
    """Clip the gradients so that their norm together is at most `limit`, and return the norm before.

    If some are sharded, all ranks must call this.
    """
    gradients = [x.grad for x in parameters if x.grad is not None]
    if not any(is_sharded(x) for x in gradients):
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = total_norm(gradients)
    torch._foreach_mul_([local_part(x) for x in gradients], (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


class WeightAverage:
    """Exponential moving average of a model's weights, which evaluation uses in their place.

    The decay of update t is min(`decay`, (1 + t) / (10 + t)), so that the first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the model's weights after `step` updates."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = ([local_part(x) for x in each.values()] for each in (self.weights, self.model.state_dict()))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Continue from these averaged weights."""
        with self.use_average():
            load_weights(self.model, weights)
            self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    @contextmanager
    def use_average(self) -> Iterator[None]:
        """Put the average into the model for the length of the context."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self.model.load_state_dict(weights)
