"""Build a run's system, and estimate the least memory it needs, so that options which cannot fit are refused early.

The estimates are lower bounds, because options that might fit must not be refused. They count the weights, and the
state that Adam keeps for the trained ones. They also count the activations saved for the backward pass (`SequenceModel.activation_size`),
in the precision of matrix products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from data import processes
from data.chunkers import Chunker, make_chunker
from haed.base import ChunkingSpec, SequenceModel
from haed.registry import make_system
from pipeline.config import ConfigError, FinetuneOptions, Options, PhaseOptions
from pipeline.run.device import Compute

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
    options: Options,
    chunker: Chunker,
    machine: Compute,
    phase: PhaseOptions | None = None,
    shards: int = 1,
    chunk_length: float = 1.0,
) -> dict[str, int]:
    """Estimate the least bytes that a run needs on its device, by the options that determine them.

    Args:
        options: options of the run.
        chunker: chunker of its corpus.
        machine: the device, and the precision of its matrix products.
        phase: the phase that is trained; None if the model is only read.
        shards: number of devices over which the weights are sharded.
        chunk_length: mean number of tokens of a chunk that is trained on.
    """
    with _on_meta_device():
        system = build_system(options, chunker)
    alone = isinstance(phase, FinetuneOptions) and phase.trains == "decoder"  # the rest is frozen
    needed = {"model.*": 0}
    for group in system.parameter_groups():
        frozen = phase is None or (not phase.decode_fraction if group.role == "decoder" else alone)
        each = (_PLAIN if frozen or group.table else _ADAM) / (1 if group.table else shards)
        needed["model.*"] += int(each * sum(x.numel() for x in group.parameters))
    if phase is not None:
        chunks = options.batch.sequences * options.batch.context / options.batch.pieces
        size = (machine.autocast or torch.float32).itemsize
        tokens = chunks * phase.decode_fraction * chunk_length
        needed["batch.sequences × batch.context"] = int(size * system.activation_size(0 if alone else chunks, tokens))
    return needed


def check_memory(needed: dict[str, int], device: torch.device) -> None:
    """Raise ValueError naming the options that need more memory than the device has free.

    Args:
        needed: result of `estimate_memory`.
        device: the device.
    """
    available = free_memory(device)
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
