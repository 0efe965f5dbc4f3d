"""Activation memory that a training step saves for its backward pass: measured, and computed from a model's sizes.

See Subramanian et al. 2020, appendix, Table 8. Every tensor that autograd saves is assigned to the module and function
that save it; each storage counts once. The formulas cover layers with rotary attention without dropout, in float32, on
a CPU, where attention is computed in blocks of queries (`haed.layers.attention`). Other models are not covered.

Legend: J positions of a scale, W width, H·D heads and their width, F hidden units, V vocabulary.
"""

from collections import Counter
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from haed.base import SequenceModel, TokenBatch, to_device
from haed.options import ModelOptions, TokenOptions
from pipeline.training.profile import SavedActivations

EMBEDDING, QKV, SCORES, VALUES = "embedding", "q, k, v", "scores", "values"
FEED_FORWARD, NORMS, HIERARCHY, OUTPUT = "feed-forward", "norms, residual", "hierarchy", "output"
KINDS = (EMBEDDING, QKV, SCORES, VALUES, FEED_FORWARD, NORMS, HIERARCHY, OUTPUT)
Table = Counter[tuple[str, str]]  # bytes by part and kind
_FLOAT, _INTEGER, _BLOCK = 4, 8, 128  # bytes, bytes, queries


def compute_saved_bytes(options: ModelOptions, vocabulary: int, sequences: int, length: int) -> Table | None:
    """Return the bytes by part and kind, or None for models that are not covered.

    Args:
        options: of the model.
        vocabulary: V.
        sequences: in a batch.
        length: of a sequence, in tokens.
    """
    token, saved = options.token, SavedBytes(options.token, sequences)
    if token.attention != "rotary" or token.dropout or token.grams.rows or token.positions != "none":
        return None
    if options.kind == "hourglass":
        number, _, factor = options.hourglass.hierarchy.partition("@")
        if factor != "1":
            return None
        layers = {1: int(number)}
    elif options.kind in ("top_down", "bottom_up") and (options.multiscale.pooling, options.multiscale.heads) == (
        "average",
        "",
    ):
        layers = {int(scale): int(depth) for depth, scale in (x.split("@") for x in options.multiscale.layers.split())}
    else:
        return None
    coarse = sorted(layers, reverse=True)[:-1]
    saved.table["embedding", EMBEDDING] = _INTEGER * sequences * length
    for scale, depth in layers.items():
        saved.add_scale(scale, (length - 1) // scale + 1, depth, options.kind == "top_down", scale == max(layers))
    if options.kind == "bottom_up":
        saved.add_aggregation(sorted(coarse), length)
    saved.add_norm("output", length)
    saved.add_values("output", OUTPUT, length * (token.width + vocabulary))
    saved.table["output", OUTPUT] += sequences * length * (_INTEGER + 1)  # targets, and whether each is one
    return saved.table


class SavedBytes:
    """A counter of activation bytes by part and kind.

    Args:
        token: sizes of the layers.
        sequences: B.
    """

    def __init__(self, token: TokenOptions, sequences: int) -> None:
        self.token, self.sequences = token, sequences
        self.table: Table = Counter()

    def add_values(self, part: str, kind: str, values: int, of_each: bool = True) -> None:
        """Add a number of values, for each sequence or for all together."""
        self.table[part, kind] += _FLOAT * values * (self.sequences if of_each else 1)

    def add_norm(self, part: str, positions: int) -> None:
        """Add the input of a norm, and two statistics of each position."""
        self.add_values(part, NORMS, positions * (self.token.width + 2))

    def add_feed_forward(self, part: str, positions: int) -> None:
        """Add the norm, the inputs of both matrices, and the input of the activation."""
        self.add_norm(part, positions)
        self.add_values(part, FEED_FORWARD, positions * (self.token.width + 2 * self.token.ffn))

    def add_attention(self, part: str, queries: int, keys: int, heads: int, step: int = 1) -> None:
        """Add attention by blocks of queries, each with the keys up to its last one.

        Values are copied for each block.
        """
        width, ends = self.token.head_width, [*range(_BLOCK, queries, _BLOCK), queries]
        seen = [(end - 1) // step + 1 for end in ends]
        rows = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        self.add_values(part, QKV, heads * width * (queries + keys + sum(seen)))
        self.add_values(part, QKV, 2 * (width // 2) * (queries + keys), of_each=False)  # cosines and sines
        self.add_values(part, SCORES, heads * sum(n * m for n, m in zip(rows, seen, strict=True)))
        self.add_values(part, VALUES, heads * width * queries)

    def add_scale(self, scale: int, positions: int, depth: int, top_down: bool, coarsest: bool) -> None:
        """Add the layers of a scale, and its connections to other scales."""
        part, width = f"scale_{scale}", self.token.width
        for _ in range(depth):
            self.add_norm(part, positions)
            self.add_values(part, QKV, positions * width)
            self.add_attention(part, positions, positions, self.token.heads)
            self.add_feed_forward(part, positions)
        if scale > 1:
            self.add_norm(part, positions)
        if top_down:  # what it is joined from, and that before its activation; what is lengthened
            self.add_values(part, HIERARCHY, positions * width * (3 * (not coarsest) + (scale > 1)))

    def add_aggregation(self, coarse: list[int], length: int) -> None:
        """Add the layer that attends to the coarse scales.

        The heads are divided equally among them; the remainder goes to the first scales of `coarse`, the finest.
        """
        part, width = "aggregation", self.token.width
        each, rest = divmod(self.token.heads, len(coarse))
        self.add_norm(part, length)
        self.add_values(part, QKV, length * width)
        for place, scale in enumerate(coarse):
            groups = (length - 1) // scale + 1
            self.add_values(part, QKV, groups * width)
            self.add_attention(part, length, groups, each + (place < rest), scale)
        self.add_feed_forward(part, length)


class SavedByKind(SavedActivations):
    """Saved bytes by part of the system and kind of tensor, recorded within its context."""

    def __init__(self, system: SequenceModel) -> None:
        super().__init__(system)
        self.table: Table = Counter()
        self._system, self._kinds, self._modules = system, Counter[str](), [""]
        self._hooks: list[RemovableHandle] = []
        self._functions = _FunctionNames()

    def __enter__(self) -> None:
        for name, module in self._system.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))
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

    def _leave(self) -> None:
        self._modules.pop()

    def _count_storage(self, tensor: Any) -> Any:
        before = self.pending
        tensor = super()._count_storage(tensor)
        self._kinds[classify_tensor(self._modules[-1], self._functions.name)] += self.pending - before
        return tensor


class _FunctionNames(TorchFunctionMode):
    """A mode that records the name of the PyTorch function being called."""

    name = ""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = getattr(function, "__name__", "")
        return function(*args, **(kwargs or {}))


def classify_tensor(module: str, function: str) -> str:
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


def measure_saved_bytes(system: SequenceModel, windows: TokenBatch) -> Table:
    """Measure the bytes saved in a training step on these windows."""
    system.train()
    inputs, mark = system.prepare_inputs(windows), system.mark
    system.mark = (saved := SavedByKind(system)).mark_part
    with saved:
        system.total_log_likelihood(to_device(inputs, system.device))
    saved.end_part("output")
    system.mark = mark
    system.eval()
    return +saved.table


def megabytes_per_layer(system: SequenceModel, saved: Table) -> list[tuple[float, float]]:
    """Return each scale and the MB of one of its layers, from the finest, without the connections between scales."""
    line = []
    for name, module in system.named_children():
        if name.startswith("scale_"):
            depth = sum(each.endswith("feed_forward") for each, _ in module.named_modules())
            size = sum(size for (part, kind), size in saved.items() if part == name and kind != HIERARCHY)
            line.append((float(name.removeprefix("scale_")), size / max(1, depth) / 1e6))
    return sorted(line)


def format_table(measured: Table, computed: Table | None) -> list[list[str]]:
    """Return the table by part and kind: measured and, below it, computed."""
    rows = [["MB", *KINDS, "all"]]
    parts = list(dict.fromkeys(part for part, _ in measured))
    for name, chosen in [*((part, [part]) for part in parts), ("all", parts)]:
        for title, table in {"measured": measured, "computed": computed}.items():
            if table is not None:
                sizes = [sum(table[part, kind] for part in chosen) for kind in KINDS]
                cells = [f"{size / 1e6:,.2f}" if size else "–" for size in [*sizes, sum(sizes)]]
                rows.append([f"{name}, {title}", *cells])
    return rows
