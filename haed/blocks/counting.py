"""FLOPs of a module, counted by running it without numbers."""

import copy
from typing import Any, TypeVar

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

Module = TypeVar("Module", bound=nn.Module)


class Counter(TorchDispatchMode):
    """Adds up the FLOPs of the products computed while it is active, by PyTorch's own formulas.

    Unlike torch.utils.flop_counter.FlopCounterMode it puts no hooks on modules, which are global: batches are prepared in a
    thread while the model runs in another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=found)
        return found


def weightless(module: Module) -> Module:
    """A copy whose parameters and buffers are on the meta device: it computes shapes alone."""
    tensors = {id(x): x.detach().to("meta") for x in module.buffers()}
    tensors |= {id(x): nn.Parameter(x.detach().to("meta")) for x in module.parameters()}
    return copy.deepcopy(module, tensors)
