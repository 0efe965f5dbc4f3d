"""A GPU's stand-in: tensors that say they lie on another device, and are computed on the CPU.

Within `StandInDevice` tensors are made there, moved there and back. As on a GPU, an operation on tensors of both devices is
refused, unless one is a scalar. What would wait for a GPU is counted by name in `waits`: reading a value, shapes that depend
on values, indices on the CPU, and copies from the device or to it that are not asynchronous.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("standin", _Backend())
DEVICE = torch.device("standin", 0)
WAITING = {"_local_scalar_dense", "_unique2", "equal", "masked_select", "nonzero", "repeat_interleave"}
WAITING |= {"unique_consecutive", "unique_dim", "_coalesce"}
INDEXING = {"_index_put_impl_", "index", "index_put", "index_put_"}  # they take indices on the CPU, and copy them
SIZES = {"_pack_padded_sequence", "_pack_padded_sequence_backward", "_pad_packed_sequence"}  # always on the CPU


class StandIn(Tensor):
    """A tensor that says it lies on the device.

    Attributes:
        inner: the tensor on the CPU.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "StandIn":
        about: dict[str, Any] = {"dtype": inner.dtype, "layout": inner.layout, "device": DEVICE}
        if inner.layout == torch.strided:
            about |= {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, **about)
        made.inner = inner
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"StandIn({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: outside of the stand-in's context")


class StandInDevice(TorchDispatchMode):
    """The device, within its context.

    Attributes:
        waits: how often each operation would have waited for a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [*_list_tensors(args), *_list_tensors(kwargs.values())]
        is_here = any(isinstance(x, StandIn) for x in tensors)
        target = kwargs.get("device")
        goes_there = is_here if target is None else torch.device(target).type == DEVICE.type
        if not goes_there and not is_here:
            return func(*args, **kwargs)
        if name == "_to_copy" and not is_here and not kwargs.get("non_blocking"):
            self.waits["copy to the device"] += 1
        if name == "_fused_sdp_choice":
            return 0  # the formula: the CPU's kernels go by other names
        if is_here:
            self._check_devices(name, tensors)
            self._count_waits(name, args, goes_there)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        result = func(*_map(_unwrap, args), **{key: _map(_unwrap, value) for key, value in kwargs.items()})
        if not goes_there:
            return result
        if name in SIZES and isinstance(result, tuple):
            return StandIn(result[0]), result[1]
        known = {id(_unwrap(x)): x for x in tensors}  # an operation in place returns what it was given
        return _map(lambda x: known[id(x)] if id(x) in known else StandIn(x), result)

    def _check_devices(self, name: str, tensors: list[Tensor]) -> None:
        free = name in INDEXING | SIZES or name in ("_to_copy", "copy_")
        if not free and any(x.ndim for x in tensors if not isinstance(x, StandIn)):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found {DEVICE} and cpu")

    def _count_waits(self, name: str, args: Any, stays: bool) -> None:
        if name in INDEXING and any(not isinstance(x, StandIn) for x in _list_tensors(args)):
            self.waits["index on the CPU"] += 1
        elif name in INDEXING and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]):
            self.waits["index by a mask"] += 1
        elif name == "copy_" and not isinstance(args[1], StandIn) and args[1].ndim and not args[2:3] == (True,):
            self.waits["copy to the device"] += 1
        elif name == "_to_copy" and not stays or name == "copy_" and not isinstance(args[0], StandIn):
            self.waits["copy from the device"] += 1
        elif name in WAITING:
            self.waits[name] += 1


def _list_tensors(values: Iterable[Any]) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _list_tensors(value)
    return found


def _map(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Change all tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        return change(value)
    return type(value)(_map(change, x) for x in value) if isinstance(value, list | tuple) else value


def _unwrap(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, StandIn) else x
