"""A model sharded over ranks, for models that do not fit one device (FSDP: Zhao et al. 2023; PyTorch's `fully_shard`).

Each rank keeps a share of every weight, of its gradient and of what the optimizer keeps for it. A block's weights are
gathered when it is computed, and let go after it. Weights outside of blocks are gathered for the whole step. Tables of
hashed rows and scalars are whole on each rank, and `Ranks` averages their gradients.

All ranks must call the same modules in the same order. So validation and checkpoints are the work of all.

This module is imported where a model is sharded alone, since PyTorch's part of it takes a second to import.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from haed.base import Objective, SequenceModel, StepOutput
from haed.chunk.model import HAED
from haed.layers.transformer import CrossBlock, TransformerBlock
from haed.token.multiscale import Aggregation
from haed.token.retina import RetinaLayer


def shard_blocks(system: SequenceModel, device: torch.device) -> DeviceMesh:
    """Shard the blocks of a system, one after another, onto this rank's device; the rest stays where it is.

    Returns:
        The ranks, for `ShardedModule`.
    """
    if isinstance(system, HAED):
        system.count_all_flops()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in system.modules():
        if isinstance(block, TransformerBlock | CrossBlock | RetinaLayer | Aggregation):
            fully_shard(block, mesh=mesh)
        if isinstance(block, TransformerBlock):
            for method in ("forward_packed", "project"):
                register_fsdp_forward_method(block, method)
    return mesh


class ShardedModule(nn.Module):
    """An objective whose weights are sharded over all ranks; its parameters become distributed tensors.

    Args:
        objective: system and loss, with the blocks sharded, on this rank's device. Its optimizer is made afterwards.
        mesh: the ranks.

    Attributes:
        scalars: the scalar parameters, which are whole on each rank.
    """

    def __init__(self, objective: Objective, mesh: DeviceMesh) -> None:
        super().__init__()
        self.objective = objective
        self.scalars = [x for x in objective.parameters() if not x.ndim]
        tables = [x for group in objective.system.parameter_groups() if group.table for x in group.parameters]
        fully_shard(self, mesh=mesh, ignored_params={*self.scalars, *tables})

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function while the weights outside of blocks are whole."""
        return function(*arguments)

    def compute_losses(self, batch: object, diagnose: bool) -> StepOutput:
        """Return the objective's losses. A backward pass averages the gradients, and leaves each rank its share of them."""

        def total_first() -> tuple[Tensor, StepOutput]:  # a hook at this tensor starts the backward pass
            losses = self.objective(batch, diagnose)
            return losses.total, losses

        losses: StepOutput = self(total_first)[1]
        return losses

    def average_scalars(self) -> None:
        """Average the gradients of the scalars over ranks, after a backward pass."""
        for scalar in self.scalars:
            self.objective.ranks.average_gradient(scalar)

    def evaluate(self, function: Callable[[], Any]) -> Any:
        """Return the value of a function of the system that needs no gradient."""
        assert isinstance(self, FSDPModule)
        try:
            return self(function)
        finally:
            self.reshard()  # the weights may be other ones when they are needed next
