"""Interface of a model family to the rest of the project: a `SequenceModel`, trained through an `Objective`.

A family implements `SequenceModel` in a file of its own and gets a line in `haed.options` and in `haed.registry`. The trainer,
evaluation, sampling, profile and comparison know nothing else of it.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of a batch, V vocabulary, E width of a
vector.
"""

import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_flop_count

from haed.distributed import Ranks

log = logging.getLogger(__name__)

Mark = Callable[[str, Tensor], Tensor]
_LENGTH_SCALES = (16, 64)  # of embeddings over values, by turns of the columns
SHORTER = "Set batch.context to at most the context of training"


def no_op_timer(part: str, tensor: Tensor) -> Tensor:
    """Return the tensor unchanged (no profiler)."""
    return tensor


@dataclass
class TokenBatch:
    """A batch of windows of chunks.

    Attributes:
        tokens: (B, T, K) integers in [0, V), zero beyond each length.
        lengths: (B, T), 0 where there is no chunk.
        starts: (B, T) true where a chunk begins a document.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def from_chunks(cls, tokens: Tensor, lengths: Tensor) -> "TokenBatch":
        """Return windows of chunks (B, T, K) of lengths (B, T); only the first chunk of each begins a document."""
        starts = torch.zeros_like(lengths, dtype=torch.bool)
        starts[:, :1] = True
        return cls(tokens, lengths, starts)

    @classmethod
    def concatenate_batches(cls, parts: "list[TokenBatch]") -> "TokenBatch":
        """Concatenate several batches."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    @property
    def chunk_mask(self) -> Tensor:
        """Mask (B, T), true where there is a chunk."""
        return self.lengths > 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: "Tensor | slice") -> "TokenBatch":
        return TokenBatch(self.tokens[rows], self.lengths[rows], self.starts[rows])

    def split(self, at_once: int) -> "Iterator[TokenBatch]":
        """Yield the windows in batches of at most `at_once`."""
        return (self[first : first + at_once] for first in range(0, len(self), at_once))


@dataclass(frozen=True)
class ChunkingSpec:
    """The properties of a corpus's chunks that a model needs to know.

    Attributes:
        k: maximum number of tokens of a chunk.
        vocabulary: V, the number of tokens.
        fixed: true for chunks of a fixed size, whose ends are certain and never predicted.
        context: T, the maximum number of chunks of a window.
    """

    k: int
    vocabulary: int
    fixed: bool
    context: int


@dataclass
class ParameterGroup:
    """Parameters that are trained alike.

    Attributes:
        parameters: parameters of the system, in its own order.
        role: part they belong to; the `main` model has a learning rate of its own, the `decoder` can be trained alone.
        depth: number of steps between them and the exact loss, 0 for the decoder.
        table: true for a table whose rows are looked up. Its gradient is a sparse tensor of a step's rows; other rows
            stay as they are.
    """

    parameters: list[nn.Parameter]
    role: str
    depth: int
    table: bool = False

    def split_off_table(self, table: nn.Parameter | None) -> "list[ParameterGroup]":
        """Return the table as a group of its own, if there is one, and the rest."""
        if table is None:
            return [self]
        rest = [each for each in self.parameters if each is not table]
        return [replace(self, parameters=[table], table=True), replace(self, parameters=rest)]


class SequenceModel(nn.Module, ABC):
    """A model of sequences cut into chunks, with exact likelihood.

    Attributes:
        cut: how its data is cut.
        kind: its name in `haed.registry`.
        submodules: names of its children in the order of the data, which profiles and gradient norms report.
        vector_spaces: names of the spaces that `extract_vectors` supports.
        option_warnings: warnings about unusual but valid options.
        mark: function called with the name of each part of a step and the tensor that ends it; returns the tensor. A
            profiler replaces it by its clock. A model that marks no part in `total_log_likelihood` is one part,
            "system".
    """

    submodules: tuple[str, ...] = ()
    vector_spaces: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cut: ChunkingSpec) -> None:
        super().__init__()
        self.cut, self.kind = cut, ""
        self.option_warnings: list[str] = []
        self.mark: Mark = no_op_timer

    @abstractmethod
    def initialise_parameters(self) -> None:
        """Initialise every parameter from PyTorch's global generator."""

    @torch.no_grad()
    def initialise_layers(self) -> None:
        """Initialise the standard layers.

        Matrices get a deviation of 1/√fan_in, embeddings of 1. Biases are 0 and norms neutral.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    @torch.no_grad()
    def smooth_values(self) -> None:
        """Make embeddings and output rows of near values alike, where tokens are values of pictures or sound.

        Each of their columns becomes a Gaussian process over the values, of the same deviation. Without it, what is
        learned of one value says nothing about the next one (dev/LOG.md).
        """
        size = self.cut.vocabulary
        values = torch.arange(size, dtype=torch.float64)
        for module in self.modules():
            layers = [getattr(module, name, None) for name in ("tokens", "embedding", "output")]
            for layer in layers:
                if not isinstance(layer, nn.Embedding | nn.Linear) or len(layer.weight) not in (size, size + 1):
                    continue
                for turn, scale in enumerate(_LENGTH_SCALES):
                    kernel = torch.exp(-((values[:, None] - values) / scale).square())
                    columns = layer.weight[:size, turn :: len(_LENGTH_SCALES)]
                    columns.copy_(F.normalize(kernel) @ columns.cpu().double())

    @abstractmethod
    def decision_log_likelihood(self, windows: TokenBatch) -> Tensor:
        """Return exact log p, in nats, of every token and end of a chunk, given what precedes it in its window.

        Args:
            windows: on any device; a system whose shapes depend on the data waits for it unless that is the CPU.

        Returns:
            (B, T, K + 1) float32 or wider on the system's device. Token t is at place t, the end at the place after the
            last token; 0 where nothing is decided. A system of tokens has no ends, so theirs are 0.
        """

    def log_likelihood(self, windows: TokenBatch) -> Tensor:
        """Return exact log p (B, T), in nats, of whole chunks: the sum of their decisions."""
        return self.decision_log_likelihood(windows).sum(-1)

    def prepare_inputs(self, windows: TokenBatch) -> object:
        """Prepare, on the CPU, everything whose shape depends on the data, for `total_log_likelihood`.

        By default, return the windows themselves.
        """
        return windows

    def total_log_likelihood(self, inputs: object) -> Tensor:
        """Return log p, in nats, of everything that `prepare_inputs` was given, as a scalar; waits for no device."""
        assert isinstance(inputs, TokenBatch)
        return self.mark("system", self.log_likelihood(inputs).sum())

    def scale_outputs(self) -> dict[int, nn.Module]:
        """Return, by scale in tokens, the module whose output (B, J, W) are the vectors of that scale's groups.

        By default there is none. Group j is complete at position j · scale of the sequence, before the token there is
        read. So position t may see group ⌊t / scale⌋ and those before it.
        """
        return {}

    def collect_scale_outputs(self, windows: TokenBatch) -> dict[int, Tensor]:
        """Return the outputs (B, J, W) of `scale_outputs`, by scale, for windows on the CPU."""
        return {}

    def extract_vectors(
        self, windows: TokenBatch, space: str, layer: int | None = None, scale: int | None = None
    ) -> Tensor:
        """Return vectors (M, E) of the real chunks of windows, in one of `vector_spaces`.

        Args:
            windows: on the CPU.
            space: `chunks`: each chunk by itself; `contexts`: the text before it in its window.
            layer: layer of `contexts`, counted from 0; None: the output of all layers.
            scale: scale of `contexts`, in tokens: the last of its groups that is complete where a chunk begins. None:
                the output of all scales.

        Raises:
            ValueError: the system has no such space, or no such layer or scale to look at.
        """
        if space in self.vector_spaces and scale is not None:
            there = ", ".join(str(each) for each in sorted(self.scale_outputs()))
            raise ValueError(
                f"{type(self).__name__} has no scale {scale} of {space}. Its scales are: {there or 'none'}"
            )
        if space in self.vector_spaces:
            raise ValueError(f"{type(self).__name__} has no layer {layer} of {space}. Leave the layer out")
        raise ValueError(
            f"{type(self).__name__} has no space {space!r}. Its spaces are: {', '.join(self.vector_spaces) or 'none'}"
        )

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all parameters in groups, each parameter once."""
        return [ParameterGroup(list(self.parameters()), "all", 0)]

    def compile_training(self) -> bool:
        """Let torch.compile compile `total_log_likelihood` at its first call, if all its calls have one shape.

        If shapes differed, what is compiled, and so the last bits, would depend on the order in which a process meets
        them. Then a resumed training would not end in the same bits.

        Returns:
            Whether anything is compiled; by default nothing is.
        """
        return False

    def shape_key(self, inputs: object) -> tuple[int, ...]:
        """Return everything that the shapes in `total_log_likelihood` depend on, by which its FLOPs are counted once."""
        assert isinstance(inputs, TokenBatch)
        return tuple(inputs.tokens.shape)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device


@dataclass
class StepOutput:
    """A step's loss and metrics; means over ranks are those of the joined batch.

    Attributes:
        total: scalar that is minimised.
        chunks: number of chunks of all ranks.
        nats: exact loss in nats of everything decoded on all ranks; None if nothing was decoded.
        tokens: number of tokens decoded, of all ranks if each had as many as this one.
        figures: scalars whose means over steps are recorded.
        diagnosis: scalars of this step alone, if requested.
    """

    total: Tensor
    chunks: int
    nats: Tensor | None = None
    tokens: Tensor | int = 0
    figures: dict[str, Tensor | float] = field(default_factory=dict)
    diagnosis: dict[str, Tensor] = field(default_factory=dict)


Key = TypeVar("Key")
Value = TypeVar("Value")


class Objective(nn.Module, ABC):
    """A model together with its loss, which is everything that the trainer knows.

    Args:
        system: model to train; parameters that the loss does not use are frozen.
        ranks: processes that train together.
    """

    recompute = staticmethod(checkpoint)  # a count of what a step saves puts its own here

    def __init__(self, system: SequenceModel, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.system, self.ranks = system, ranks or Ranks()

    @abstractmethod
    def prepare_batch(
        self, windows: TokenBatch, negatives: TokenBatch | None = None, generator: torch.Generator | None = None
    ) -> object:
        """Compute everything whose shape depends on the data, on the CPU or where the system is.

        Args:
            windows: on the CPU.
            negatives: windows read only for their chunks, as further candidates.
            generator: generator of this step's random choices.

        Returns:
            The batch that `estimate_flops` takes, and `forward` after `to_device`. After an error the state is as before.
        """

    def undo_preparation(self) -> None:
        """Restore the state as it was before the last batch was prepared, which is not trained on; by default nothing."""

    @abstractmethod
    def forward(self, batch: object, diagnose: bool = False) -> StepOutput:
        """Return the losses of a prepared batch on the system's device; `diagnose` adds metrics that cost time."""

    @abstractmethod
    def estimate_flops(self, batch: object) -> float:
        """Return the model FLOPs of a step on all ranks, assuming that each rank's batch is like this one."""

    @abstractmethod
    def compile_training(self) -> bool:
        """Let torch.compile compile the parts of `forward` whose shapes are the same in all steps, at their first call.

        Returns:
            Whether there is such a part.
        """

    def extra_state(self) -> dict[str, Tensor]:
        """Return the state beside the weights that influences the next step, for a checkpoint."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore the result of `extra_state`; names of others are ignored."""


@dataclass
class PreparedBatch:
    """The prepared inputs of a system, with the numbers of chunks and tokens of all ranks together."""

    inputs: object
    chunks: int
    tokens: int


class Likelihood(Objective):
    """The exact loss of any system: nats per chunk, every token decoded."""

    def __init__(self, system: SequenceModel, ranks: Ranks | None = None) -> None:
        super().__init__(system, ranks)
        self._flops: dict[tuple[int, ...], int] = {}
        self._is_compiled = False

    def prepare_batch(
        self, windows: TokenBatch, negatives: TokenBatch | None = None, generator: torch.Generator | None = None
    ) -> PreparedBatch:
        """Count chunks and tokens and prepare the inputs; see `Objective.prepare_batch`."""
        chunks, tokens = self.ranks.sum_over_ranks([int(windows.chunk_mask.sum()), int(windows.lengths.sum())])
        return PreparedBatch(self.system.prepare_inputs(windows), int(chunks), int(tokens))

    def forward(self, batch: object, diagnose: bool = False) -> StepOutput:
        """See `Objective.forward`."""
        assert isinstance(batch, PreparedBatch)
        key = self.system.shape_key(batch.inputs)
        compiled = self._is_compiled and torch.is_grad_enabled()  # which cannot be counted
        counter = FlopCounter() if key not in self._flops and not compiled else None
        with counter or nullcontext():
            nats = -self.system.total_log_likelihood(batch.inputs) * self.ranks.size
        if counter is not None:
            self._flops[key] = counter.flops
        return StepOutput(nats / max(1, batch.chunks), batch.chunks, nats, batch.tokens)

    def estimate_flops(self, batch: object) -> float:
        """Return FLOPs, of which a backward pass costs twice those of a forward pass; see `Objective.estimate_flops`.

        Everything that is multiplied counts, also padding and hidden pairs. A CPU multiplies fewer of those.
        `forward` counts it when it meets new shapes, unless it is compiled.
        """
        assert isinstance(batch, PreparedBatch)
        key = self.system.shape_key(batch.inputs)
        if key not in self._flops:
            with torch.no_grad():
                self(to_device(batch, self.system.device))
        return 3.0 * self._flops[key] * self.ranks.size

    def compile_training(self) -> bool:
        """See `Objective.compile_training`."""
        self._is_compiled = self.system.compile_training()
        return self._is_compiled


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products by PyTorch's formulas.

    PyTorch's own counter also keeps them by module, which takes longer than the small calls that are counted here.

    Attributes:
        flops: of all calls in its context so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler: a second at every start

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and func.overloadpacket not in flop_registry:
            with self:  # nothing else splits an operation into those that have formulas
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def _register_formula(operation: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as the FLOPs of an operation, unless this version of PyTorch has a formula of its own."""
    if operation in flop_registry:
        return lambda formula: formula
    return register_flop_formula(operation)


@_register_formula(torch.ops.aten.addmm_)
def _count_addmm(added: torch.Size, a: torch.Size, b: torch.Size, **_: object) -> int:
    return 2 * a[0] * a[1] * b[1]


# PyTorch's own LSTM, for families and parts that use it: each row is multiplied with all matrices of its layers.
@_register_formula(torch.ops.aten.mkldnn_rnn_layer)
def _count_lstm_layer(x: torch.Size, w_input: torch.Size, w_state: torch.Size, *_: object, **__: object) -> int:
    return 2 * math.prod(x[:-1]) * (math.prod(w_input) + math.prod(w_state))


@_register_formula(torch.ops.aten.mkldnn_rnn_layer_backward)
def _count_lstm_gradients(x: torch.Size, w_input: torch.Size, w_state: torch.Size, *_: object, **__: object) -> int:
    return 2 * _count_lstm_layer(x, w_input, w_state)


@_register_formula(torch.ops.aten._cudnn_rnn)
def _count_cudnn_rnn(x: torch.Size, weights: list[torch.Size], *_: object, **__: object) -> int:
    return 2 * math.prod(x[:-1]) * sum(math.prod(each) for each in weights if len(each) == 2)


@_register_formula(torch.ops.aten._cudnn_rnn_backward)
def _count_cudnn_gradients(x: torch.Size, weights: list[torch.Size], *_: object, **__: object) -> int:
    return 2 * _count_cudnn_rnn(x, weights)


@_register_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
def _count_attention_on_cpu(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    flops: int = sdpa_flop_count(q, k, v)
    return flops


@_register_formula(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _count_attention_gradients(
    grad: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object
) -> int:
    return 2 * _count_attention_on_cpu(q, k, v)


def count_flops(function: Callable[..., object], *arguments: object) -> int:
    """Return the FLOPs of the matrix products in a call, by PyTorch's formulas; on the meta device nothing is computed.

    Random generators are left as they are: dropout must draw the same masks whether or not FLOPs are counted.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), FlopCounter() as counter:
        function(*arguments)
    return counter.flops


class CompiledFunction:
    """A function that torch.compile compiles at its first call. If that fails, the function runs as it is.

    Only calls that record gradients are compiled. So a model is scored and sampled by the same code as without.

    Args:
        function: takes and returns tensors, of the same shapes at every call that records gradients.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.compiled: Callable[..., Any] | None = torch.compile(function, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. A failure of the compiler is logged once."""
        if self.compiled is not None and torch.is_grad_enabled():
            try:
                return self.compiled(*arguments)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # many kinds: no compiler, an unknown operator, …
                result = self.function(*arguments)  # it fails as well if the compiler is not the reason
                reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
                cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "PyTorch's cache of compiled code")
                log.warning(
                    "torch.compile failed (%s). Training continues without it. If a process was killed while it compiled, "
                    "delete %s and start again",
                    reason,
                    cache,
                )
                self.compiled = None
                return result
        return self.function(*arguments)


@contextmanager
def record_outputs(modules: "Mapping[Key, nn.Module]") -> "Iterator[dict[Key, Tensor]]":
    """Record what modules return within the context: the output of each one's last call, by its key."""
    outputs: dict[Key, Tensor] = {}

    def record(key: Key, module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs[key] = output

    hooks = [module.register_forward_hook(partial(record, key)) for key, module in modules.items()]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def length_mask(lengths: Tensor, places: int) -> Tensor:
    """Return a mask (…, places) of the filled places of rows that are filled from the left up to `lengths` (…)."""
    return torch.arange(places, device=lengths.device) < lengths[..., None]


def describe_value(value: object) -> str:
    """Return the shape and type of a tensor, or the beginning of another value, for an error message."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.100}"


def check_finite(values: Tensor, name: str) -> Tensor:
    """Return values that a model computed, after checking that all of them are finite.

    Raises:
        FloatingPointError: a value is infinite or no number.
    """
    if not values.isfinite().all():
        raise FloatingPointError(f"the model's {name} are infinite or no numbers. Use an earlier checkpoint")
    return values


def to_device(value: Value, device: torch.device) -> Value:
    """Move a tensor, or all tensors in nested dataclasses, lists and tuples, to a device.

    Copies to a GPU are asynchronous.
    """
    moved: object = value
    if isinstance(value, Tensor):
        away = device.type != "cpu" and value.device.type == "cpu"  # a copy to the CPU must wait for the values
        moved = (value.pin_memory() if away and device.type == "cuda" else value).to(device, non_blocking=away)
    elif isinstance(value, list | tuple):
        moved = type(value)(to_device(each, device) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        moved = replace(value, **{each.name: to_device(getattr(value, each.name), device) for each in fields(value)})
    return moved  # type: ignore[return-value]
