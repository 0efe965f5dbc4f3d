"""Build a run's system, and find out the least memory it needs, so that options which cannot fit are refused early.

What is counted is a lower bound, because options that might fit must not be refused. Before the model is built these are
its weights, the state that Adam keeps for the trained ones, and the batch. Before the first step it is everything that
the step's forward pass saves for its backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from data import processes
from data.chunkers import Chunker, make_chunker
from haed.base import ChunkingSpec, Objective, SequenceModel
from haed.options import SYSTEMS
from haed.registry import make_system
from pipeline.config import ConfigError, FinetuneOptions, Options, PhaseOptions

MODEL_OPTIONS, BATCH_OPTIONS = "model.*", "batch.sequences × batch.context"
_ADAM = 16  # bytes a weight: itself, its gradient, two moments
_PLAIN = 4  # tables in training, too: gradients and what Adagrad keeps are of rows


def build_system(options: Options, chunker: Chunker) -> SequenceModel:
    """Build the system of a run for its chunker, initialised from the seed.

    Raises:
        ConfigError: options of its parts do not fit together, or do not fit this corpus.
    """
    torch.manual_seed(options.seed)
    cut = ChunkingSpec(chunker.k, chunker.vocabulary, chunker.fixed, options.batch.context)
    try:
        return make_system(options.model, options.iem, cut)
    except ValueError as error:
        raise ConfigError(str(error)) from error


class _SkipInitialisation(TorchFunctionMode):
    """Return tensors as they are from functions that write to one, such as `torch.nn.init.zeros_` and `div_`."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = kwargs or {}, function.__name__
        if name.endswith("_") and not name.endswith("__"):
            return args[0] if args else named["tensor"]
        return function(*args, **named)


@contextmanager
def _on_meta_device() -> Iterator[None]:
    """Build modules without values.

    Initialisation is skipped, because PyTorch imports its compiler or SymPy to write on this device. That takes up to a
    second.
    """
    with torch.device("meta"), _SkipInitialisation():
        yield


def check_system(options: Options) -> None:
    """Raise ConfigError for a model that cannot be built, before a corpus is cut for it.

    With `source.kind=shards` the check happens later, since the chunker is not known yet.
    """
    if options.source.kind != "shards":
        with _on_meta_device():
            build_system(options, make_chunker(options.chunker))


def estimate_memory(
    options: Options, chunker: Chunker, phase: PhaseOptions | None = None, shards: int = 1
) -> dict[str, int]:
    """Estimate the least bytes that a run needs on its device, by the options that determine them.

    These are the weights, what trains them, and a batch with one vector in 16 bits for each of its chunks.

    Args:
        options: options of the run.
        chunker: chunker of its corpus.
        phase: the phase that is trained; None if the model is only read.
        shards: number of devices over which the weights are sharded.
    """
    with _on_meta_device():
        system = build_system(options, chunker)
    alone = isinstance(phase, FinetuneOptions) and phase.trains == "decoder"  # the rest is frozen
    needed = 0
    for group in system.parameter_groups():
        if phase is None:
            frozen = True
        elif group.role == "decoder":
            frozen = not phase.decode_fraction
        else:
            frozen = alone or (group.role == "head" and not phase.iem_weight)
        each = (_PLAIN if frozen or group.table else _ADAM) / (1 if group.table else shards)
        needed += int(each * sum(x.numel() for x in group.parameters))
    if phase is None:
        return {MODEL_OPTIONS: needed}
    vector = (options.model.encoder if SYSTEMS[options.model.kind].chunks else options.model.token).width
    chunks = options.batch.sequences * options.batch.context
    return {MODEL_OPTIONS: needed, BATCH_OPTIONS: int(chunks * (chunker.k + 2 * vector / options.batch.pieces))}


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Counter of the bytes saved for the backward pass, by part: each storage once, parameters left out.

    Counting works inside this context. Copies of parameters in another precision count. Activations that `batch.pieces`
    computes again are not saved (Subramanian et al. 2020 break memory down so by scale, appendix, Table 8).

    Args:
        system: the model.
        discard: save nothing. Then there is no backward pass, and a step that does not fit can be counted.
    """

    def __init__(self, system: nn.Module, discard: bool = False) -> None:
        super().__init__(self._count_storage, lambda tensor: tensor)
        self.bytes, self.pending, self.largest, self.discard = dict[str, int](), 0, 0, discard
        self.weights = {x.untyped_storage().data_ptr() for x in system.parameters()}
        self.seen = WeakValueDictionary[int, torch.UntypedStorage]()  # a storage that is freed leaves its address

    @property
    def total_bytes(self) -> int:
        """The number of bytes saved so far."""
        return sum(self.bytes.values()) + self.pending

    def mark_part(self, part: str, tensor: Tensor) -> Tensor:
        """Assign the bytes saved since the last mark to this part, and return the tensor."""
        if not torch.compiler.is_compiling():
            self.end_part(part)
        return tensor

    def end_part(self, part: str) -> None:
        """Assign the bytes saved since the last mark to this part."""
        self.bytes[part] = self.bytes.get(part, 0) + self.pending
        self.pending = 0

    def count_alone(self, function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        """Call a function whose inside is computed again, instead of `torch.utils.checkpoint.checkpoint`.

        Of all these, only the largest is saved at a time.
        """
        before, self.pending = self.pending, 0
        value = function(*arguments)
        self.largest, self.pending = max(self.largest, self.pending), before
        return value

    def _count_storage(self, tensor: Tensor) -> Tensor | None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights and storage.data_ptr() not in self.seen:
            self.seen[storage.data_ptr()] = storage
            self.pending += storage.nbytes()
        return None if self.discard else tensor


def count_activations(objective: Objective, batch: object) -> int:
    """Return the bytes that a step saves for its backward pass at least, by a forward pass that saves nothing."""
    with (counter := SavedActivations(objective.system, discard=True)):
        objective.recompute = counter.count_alone
        try:
            objective(batch)
        finally:
            del objective.recompute
    return counter.total_bytes + counter.largest


def check_memory(needed: dict[str, int], available: float) -> None:
    """Raise ValueError naming the options that need more than the available bytes.

    Args:
        needed: bytes by the options that determine them.
        available: result of `free_memory`.
    """
    if sum(needed.values()) > available:
        parts = sorted(((size, name) for name, size in needed.items() if size), reverse=True)
        listed = ", ".join(f"{name} ({size / 1e9:,.1f} GB)" for size, name in parts)
        raise ValueError(
            f"not enough memory: at least {listed} are needed, but {available / 1e9:,.1f} GB are free. Lower them"
        )


def free_memory(device: torch.device) -> float:
    """Return the free bytes of a device; in main memory, reclaimable memory counts as free."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return processes.free_memory()
