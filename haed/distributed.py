"""Communication between processes that train together (torchrun), beside DistributedDataParallel's gradients.

Tensors travel between the devices on which they are: candidates, embeddings with their gradients, and the rows of
tables (`average_sparse_gradient`). They use a process group of their own, so that they never interfere with the averaging
of other gradients. Numbers, such as the lengths of tensors whose shape depends on the data, go through gloo on the CPU.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from haed.layers.ngram_embedding import SparseLookup

SUMMED_IN_SHARES = 4  # ranks from which rows of tables are summed in shares; two or three would exchange more
_PATIENCE = timedelta(days=1)  # the first rank may count a corpus or validate; torchrun ends all if one dies


class _GatherWithGradients(torch.autograd.Function):
    """Concatenation of all ranks' rows; the gradient of a row is the sum of all ranks' gradients of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.tensor_split(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Ranks:
    """The processes that train together, seen from this one; a single process without `torch.distributed`.

    Args:
        members: global ranks of the processes, this one's included; None: all processes.

    Attributes:
        rank: rank of this process among them.
        size: number of processes.
    """

    def __init__(self, members: list[int] | None = None) -> None:
        together = dist.is_available() and dist.is_initialized()
        members = members or list(range(dist.get_world_size() if together else 1))
        self.size = len(members)
        self.rank = members.index(dist.get_rank()) if self.size > 1 else 0
        self._cpu = (
            dist.new_group(members, _PATIENCE, "gloo", use_local_synchronization=True) if self.size > 1 else None
        )
        self._devices = dist.new_group(members, use_local_synchronization=True) if self.size > 1 else None

    def split_into_groups(self, size: int | None) -> "tuple[Ranks, Ranks]":
        """Return this process's group of neighbours, and the processes with the same place in all groups.

        Args:
            size: size of a group. If it is None or at least the number of processes, all form one group, and no other
                process has this one's place.

        Raises:
            ValueError: groups of this size leave some processes over.
        """
        size = group_size(size, self.size)
        if size == self.size:
            return self, single_process()
        first = self.rank - self.rank % size
        return Ranks(list(range(first, first + size))), Ranks(list(range(self.rank % size, self.size, size)))

    @property
    def is_first(self) -> bool:
        """True for the process that writes the files."""
        return self.rank == 0

    def gather_tensors(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of the ranks.

        The tensors are of one type, on devices of one kind, and of any length along dimension 0.
        """
        if self.size == 1:
            return [x]
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(x)]), group=self._cpu)
        longest = max(int(size) for size in sizes)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._devices)
        return [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, x: Tensor, number: int, by: int) -> tuple[Tensor, int]:
        """Broadcast the tensor of rank `by`, and a number, to all ranks.

        The tensors are of one type and one number of columns, on devices of one kind. Their lengths may differ.
        """
        if self._cpu is None:
            return x, number
        source = dist.get_global_rank(self._cpu, by)
        header = torch.tensor([len(x), number])
        dist.broadcast(header, source, group=self._cpu)
        size, number = header.tolist()
        received = x.contiguous() if by == self.rank else x.new_empty(size, *x.shape[1:])
        dist.broadcast(received, source, group=self._devices)
        return received, number

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Return the sum of each number over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        """Return the maximum of each number over all ranks."""
        return self._all_reduce(values, dist.ReduceOp.MAX)

    def _all_reduce(self, values: list[float], operation: "dist.ReduceOp.RedOpType") -> list[float]:
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, group=self._cpu)
        return tensor.tolist()

    def own_slice(self, count: int) -> slice:
        """Return this rank's slice of `count` rows. All slices have one length; the last may reach beyond the end."""
        each = -(-count // self.size)
        return slice(self.rank * each, (self.rank + 1) * each)

    def gather_with_gradients(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' shares (n, …), all of one shape, on their devices.

        The gradients of a share flow back to its rank.
        """
        return _GatherWithGradients.apply(x, self._devices) if self.size > 1 else x

    def wrap_data_parallel(self, module: nn.Module, tables: list[nn.Parameter]) -> nn.Module:
        """Wrap the module so that a backward pass averages its gradients over ranks.

        The gradients of `tables` are left out; see `average_sparse_gradient`.
        """
        if self.size == 1:
            return module
        trained = [table for table in tables if table.requires_grad]
        for table in trained:
            table.requires_grad_(False)  # what needs no gradient while it is wrapped is not averaged
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        for table in trained:
            table.requires_grad_(True)
        return wrapped

    def average_sparse_gradient(self, table: Tensor) -> Tensor | None:
        """Return the mean of the ranks' sparse gradients of a table.

        From four ranks on, each sums a share of the rows, and all gather the sums. So a rank receives a row that several
        ranks have once, not from each of them. This waits for the device twice.
        """
        if self.size == 1:
            return table.grad
        rows, values = table.new_empty(0, dtype=torch.long), table.new_empty(0, *table.shape[1:])
        if table.grad is not None:
            rows, values = sum_gradient_rows(table.grad)
        values = values / self.size
        if self.size >= SUMMED_IN_SHARES:
            rows, values = self._sum_share(rows, values)
        rows, values = (torch.cat(self.gather_tensors(x)) for x in (rows, values))
        return torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False)

    def _sum_share(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct rows of this rank's share, and the sums over ranks of their values.

        Row r belongs to rank r mod n. The rows of a table are hashes, so the shares are alike.

        Args:
            rows: (R,) distinct rows of this rank, sorted, and padding.
            values: (R, D).
        """
        owner = (rows % self.size).where(mark_rows(rows), self.size)  # none owns padding
        owner, order = owner.sort(stable=True)
        bounds = torch.searchsorted(owner, torch.arange(self.size + 1, device=rows.device))
        sent = bounds.diff().cpu()
        counts = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(counts, sent, group=self._cpu)
        received, parts = [int(each[self.rank]) for each in counts], list[Tensor]()
        for x in (rows, values):
            part = x.new_empty(sum(received), *x.shape[1:])
            dist.all_to_all_single(part, x[order[: int(sent.sum())]], received, sent.tolist(), group=self._devices)
            parts.append(part)
        lookup = SparseLookup.from_rows(parts[0])
        sums = values.new_zeros(len(lookup.rows), *values.shape[1:]).index_add_(0, lookup.inverse, parts[1])
        count = int(mark_rows(lookup.rows).sum())
        return lookup.rows[:count], sums[:count]

    def average_gradient(self, parameter: Tensor) -> None:
        """Average a parameter's gradient, which all ranks have, over the ranks."""
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, group=self._devices)
            parameter.grad /= self.size

    def wait_for_all(self) -> None:
        """Wait until all ranks have called this (a barrier)."""
        if self.size > 1:
            dist.barrier(group=self._cpu)


def group_size(group: int | None, size: int, members: str = "processes") -> int:
    """Return the number of processes that share candidates, according to `iem.group`.

    Args:
        group: the option; None or a value of at least `size` means all processes.
        size: number of processes.
        members: name of the processes in the error message.

    Raises:
        ValueError: groups of this size leave some processes over.
    """
    if group is None or group >= size:
        return size
    if size % group:
        raise ValueError(
            f"iem.group={group}: {size} {members} cannot be divided into groups of {group}. Set a divisor "
            f"of {size}, or null"
        )
    return group


def sum_gradient_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row indices (R,) of a table's sparse gradient, and the sum (R, D) of each row's values.

    On the CPU they are distinct and sorted. On a device they are padded as in `SparseLookup`; unlike `coalesce`, this
    waits for none. PyTorch does not know that a gradient's rows are distinct when it accumulates it.
    """
    rows, values = gradient._indices()[0], gradient._values()
    lookup = SparseLookup.from_rows(rows)
    if rows.device.type == "cpu" and torch.equal(rows, lookup.rows):
        return rows, values
    return lookup.rows, values.new_zeros(len(lookup.rows), *values.shape[1:]).index_add_(0, lookup.inverse, values)


def mark_rows(rows: Tensor) -> Tensor:
    """Return a mask (R,) of sorted distinct row indices that is false for the padding at their end."""
    mask = torch.ones_like(rows, dtype=torch.bool)
    torch.gt(rows[1:], rows[:-1], out=mask[1:])
    return mask


def is_sharded(x: Tensor) -> bool:
    """Return whether a tensor is sharded over ranks; see `haed.fsdp`."""
    return hasattr(x, "full_tensor")  # DTensor takes a second to import


def local_part(x: Any) -> Tensor:
    """Return this rank's share of a sharded tensor, which shares its memory; any other tensor as it is."""
    return x.to_local() if is_sharded(x) else x


def copy_to_cpu(x: Any, is_wanted: bool = True) -> Tensor:
    """Return a copy of a tensor on the CPU, or an empty one if it is not wanted here.

    If the tensor is sharded, all ranks must call this. The copy is whole.
    """
    whole: Tensor = x.detach().full_tensor() if is_sharded(x) else x.detach()
    if not is_wanted:
        return torch.empty(0)
    return (whole.cpu() if is_sharded(x) else whole.to("cpu", copy=True)).contiguous()


def shard_like(x: Tensor, like: Any) -> Tensor:
    """Return a tensor that all ranks have as a whole, sharded as another one is."""
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load whole weights into a module, sharded or not.

    Raises:
        RuntimeError: they are of another model.
    """
    current = module.state_dict()
    module.load_state_dict({name: shard_like(value, current.get(name)) for name, value in weights.items()})


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of tensors together. If some are sharded, all ranks must call this."""
    sharded = [x for x in tensors if is_sharded(x)]
    if not sharded:
        return torch.nn.utils.get_total_norm(tensors)
    norm: Any = torch.nn.utils.get_total_norm(sharded)
    norm = norm.full_tensor()
    whole = torch.nn.utils.get_total_norm([x for x in tensors if not is_sharded(x)])
    return torch.linalg.vector_norm(torch.stack([norm, whole.to(norm)]))


def single_process() -> Ranks:
    """Return this process as if it were alone."""
    return Ranks([dist.get_rank() if dist.is_available() and dist.is_initialized() else 0])
