"""Activation memory saved for the backward pass, by scale and kind of tensor: measured and computed.

See Subramanian et al. 2020, appendix, Table 8. Every tensor that autograd saves is assigned to the module and function
that save it. Each storage counts once.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from haed.base import SequenceModel, TokenBatch, to_device
from pipeline.experiments.measures import Measured
from pipeline.experiments.measures.activations import (
    EMBEDDING,
    FEED_FORWARD,
    HIERARCHY,
    KINDS,
    NORMS,
    OUTPUT,
    QKV,
    SCORES,
    VALUES,
    Table,
    computed,
)
from pipeline.run.opened import Run
from pipeline.run.windows import require_subset
from pipeline.train.profile import SavedActivations


class ByKind(SavedActivations):
    """Saved bytes by part of the system and kind of tensor, recorded within its context."""

    def __init__(self, system: SequenceModel) -> None:
        super().__init__(system)
        self.table: Table = Counter()
        self._system, self._kinds, self._within = system, Counter[str](), [""]
        self._hooks: list[RemovableHandle] = []
        self._functions = _Functions()

    def __enter__(self) -> None:
        for name, module in self._system.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._into(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._out()))
        self._functions.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def end_part(self, part: str) -> None:
        """See `CheckpointInfo.end_part`."""
        for kind, size in self._kinds.items():
            self.table[part, kind] += size
        self._kinds.clear()
        super().end_part(part)

    def _into(self, name: str) -> Callable[..., None]:
        return lambda *_: self._within.append(name)

    def _out(self) -> None:
        self._within.pop()

    def _count_storage(self, tensor: Any) -> Any:
        before = self.pending
        tensor = super()._count_storage(tensor)
        self._kinds[kind_of(self._within[-1], self._functions.name)] += self.pending - before
        return tensor


class _Functions(TorchFunctionMode):
    """A mode that records the name of the PyTorch function being called."""

    name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = getattr(function, "__name__", "")
        return function(*args, **(kwargs or {}))


def kind_of(module: str, function: str) -> str:
    """Return the kind of a tensor saved by this function in the module of this name."""
    *_, last = module.split(".")
    if last.endswith("norm"):
        return NORMS
    if last == "qkv":
        return QKV
    if last == "out":
        return VALUES
    if "attention" in module:
        return SCORES if function == "softmax" else QKV
    if "feed_forward" in module:
        return FEED_FORWARD
    if module.startswith(("embedding", "positions")):
        return EMBEDDING
    return HIERARCHY if "scale_" in module else OUTPUT


def measured(system: SequenceModel, windows: TokenBatch) -> Table:
    """Measure the bytes saved in a training step on these windows."""
    system.train()
    laid, mark = system.prepare_inputs(windows), system.mark
    system.mark = (kept := ByKind(system)).mark_part
    with kept:
        system.total_log_likelihood(to_device(laid, system.device))
    kept.end_part("output")
    system.mark = mark
    system.eval()
    return +kept.table


def measure(run: Run) -> Measured:
    """Measure the MB saved and compare the computed MB; also per layer of each scale, and by part and kind.

    Raises:
        ValueError: there is nothing to train on.
    """
    options, system = run.options, run.system
    windows = require_subset(run.folder.open_corpus(), options.batch.context, options.batch.sequences, "train")
    found, cut = measured(system, windows), system.cut
    sequences, length = system.prepare_inputs(windows).symbols.shape  # type: ignore[attr-defined]
    worked_out = computed(options.model, cut.vocabulary, sequences, length) if system.device.type == "cpu" else None
    figures = {"MB measured": sum(found.values()) / 1e6}
    if worked_out is not None and run.compute.autocast is None:
        figures["MB computed"] = sum(worked_out.values()) / 1e6
        figures["share that the computed is off"] = abs(figures["MB computed"] / figures["MB measured"] - 1)
    line = _layers(system, found)
    figures |= {f"a layer at {scale}x, of one at 1x": size / line[0][1] for scale, size in line[1:]}
    return Measured(
        figures, ("scale", "MB a layer"), [(float(scale), size) for scale, size in line], _rows(found, worked_out)
    )


def _layers(system: SequenceModel, found: Table) -> list[tuple[int, float]]:
    """Return the MB of a layer of each scale, from the finest, without the connections between scales."""
    line = []
    for name, module in system.named_children():
        if name.startswith("scale_"):
            depth = sum(each.endswith("feed_forward") for each, _ in module.named_modules())
            kept = sum(size for (part, kind), size in found.items() if part == name and kind != HIERARCHY)
            line.append((int(name.removeprefix("scale_")), kept / max(1, depth) / 1e6))
    return sorted(line)


def _rows(found: Table, worked_out: Table | None) -> list[list[str]]:
    """Return the table by part and kind: measured and, below it, computed."""
    rows = [["MB", *KINDS, "all"]]
    parts = list(dict.fromkeys(part for part, _ in found))
    for name, chosen in [*((part, [part]) for part in parts), ("all", parts)]:
        for how, of in {"measured": found, "computed": worked_out}.items():
            if of is not None:
                sizes = [sum(of[part, kind] for part in chosen) for kind in KINDS]
                shown = [f"{size / 1e6:,.2f}" if size else "–" for size in [*sizes, sum(sizes)]]
                rows.append([f"{name}, {how}", *shown])
    return rows
