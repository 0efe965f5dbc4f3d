"""The system of a run, and what it and its batches ask for at least: what cannot fit is refused before it is tried.

These are lower bounds, since what might fit must not be refused: the weights, with what Adam keeps of those that are trained,
and what a step must keep for its gradient (`System.kept`), in 2 bytes a value, were chunks only a quarter full, unless their
size is fixed.
"""

import torch

from data import checked
from data.chunkers import Chunker, make_chunker
from haed.build import make_system
from haed.system import Cut, System
from pipeline.config import ConfigError
from pipeline.options import FinetuneOptions, Options, PhaseOptions
from pipeline.run.device import Compute

_ADAM = 16  # bytes a weight: itself, its gradient, two moments
_PLAIN = 4  # tables in training, too: gradients and what Adagrad keeps are of rows


def build_system(options: Options, chunker: Chunker) -> System:
    """The system of a run for what its chunker cuts, initialised from the seed.

    Raises:
        ConfigError: options of its parts do not fit together, or not this corpus.
    """
    torch.manual_seed(options.seed)
    cut = Cut(chunker.k, chunker.vocabulary, chunker.fixed, options.batch.context)
    try:
        return make_system(options.model, options.iem, cut)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_system(options: Options) -> None:
    """Raises ConfigError for a model that cannot be, before a corpus is cut for it; shards that are given say how only later."""
    if options.source.kind != "shards":
        with torch.device("meta"):
            build_system(options, make_chunker(options.chunker))


def check_memory(options: Options, chunker: Chunker, machine: Compute, phase: PhaseOptions | None = None) -> None:
    """Raises ValueError naming the options that ask for more memory than there is.

    Args:
        options: of the run.
        chunker: of its corpus.
        machine: where it computes.
        phase: that is trained; None: the model is only read.
    """
    with torch.device("meta"):
        system = build_system(options, chunker)
    alone = isinstance(phase, FinetuneOptions) and phase.trains == "decoder"  # the rest is frozen
    asked = {"model.*": 0}
    for group in system.groups():
        frozen = phase is None or (not phase.decode_fraction if group.role == "decoder" else alone)
        asked["model.*"] += (_PLAIN if frozen or group.table else _ADAM) * sum(x.numel() for x in group.parameters)
    if phase is not None:
        chunks = options.batch.sequences * options.batch.context / options.batch.pieces
        tokens = chunks * phase.decode_fraction * chunker.k / (1 if chunker.fixed else 4)
        asked["batch.sequences × batch.context"] = int(2 * system.kept(0 if alone else chunks, tokens))
    available = free_memory(machine.device)
    if sum(asked.values()) > available:
        parts = sorted(((size, name) for name, size in asked.items() if size), reverse=True)
        listed = ", ".join(f"{name} for {size / 1e9:,.1f} GB" for size, name in parts)
        raise ValueError(
            f"not enough memory: at least {listed} are asked for, {available / 1e9:,.1f} GB are free: lower them"
        )


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device; of the machine, those that can be freed count."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return checked.free_memory()
