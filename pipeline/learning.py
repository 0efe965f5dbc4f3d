"""How weights move: learning rates, the optimizer's groups, and a moving average of the weights."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from haed.model import HAED
from pipeline.metrics import Position
from pipeline.options import OptimizerOptions, PhaseOptions


def rate(position: Position, phase: PhaseOptions, warmup_steps: int) -> float:
    """Share of the learning rates: linear warm-up in steps, and a half cosine from `rate_from` to `rate_to`."""
    cosine = 0.5 * (1 + math.cos(math.pi * position.progress(phase)))
    warm = min(1.0, (position.step + 1) / warmup_steps) if warmup_steps else 1.0
    return warm * (phase.rate_to + (phase.rate_from - phase.rate_to) * cosine)


def depth(name: str, blocks: int) -> int:
    """Steps between a parameter and the exact loss: 0 for the decoder, then the main model from its last block down."""
    if name.startswith("main."):
        block = re.match(r"main\.blocks\.(\d+)\.", name)
        return blocks - int(block[1]) if block else (1 if name.startswith("main.norm") else blocks)
    return blocks + 1 if name.startswith("encoder.") else 0


def make_optimizer(model: HAED, rates: OptimizerOptions, layer_decay: float = 1.0) -> torch.optim.AdamW:
    """AdamW with the main model's own learning rate, and weight decay on matrices only.

    Args:
        model: parameters that need no gradient are left out.
        rates: peak learning rates and the rest.
        layer_decay: factor of the learning rate for each step of `depth` (ELECTRA: Clark et al. 2020, appendix A).
    """
    blocks = len(model.main.blocks)
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            peak = rates.main_learning_rate if name.startswith("main.") else rates.learning_rate
            decay = rates.weight_decay if parameter.ndim >= 2 else 0.0
            groups.setdefault((peak * layer_decay ** depth(name, blocks), decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": found, "peak": peak, "weight_decay": decay} for (peak, decay), found in groups.items()],
        lr=rates.learning_rate,
        betas=(0.9, rates.beta2),
        fused=True,
    )


class Average:
    """Exponential moving average of a model's weights, which evaluation uses in their place.

    The decay of update t is min(`decay`, (1 + t) / (10 + t)), so that the first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the model's weights after `step` updates."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.weights.values()), list(self.model.state_dict().values()), 1 - decay)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Goes on from these weights."""
        for name, value in weights.items():
            self.weights[name].copy_(value)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Lends the average to the model."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self.model.load_state_dict(own)
