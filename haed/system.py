"""What every model family is to the rest of the project: a `System`, trained through an `Objective`.

A family fulfils `System` in a file of its own and gets a line in `haed.options` and in `haed.build`; the trainer,
evaluation, sampling, profile and comparison know nothing else of it.

Legend: B sequences, T chunks of a window, K tokens of a chunk, M real chunks of a batch, V vocabulary, E width of a vector.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from haed.ranks import Ranks

Mark = Callable[[str, Tensor], Tensor]
SHORTER = "set a batch.context up to the one it was trained with"


def unmarked(part: str, tensor: Tensor) -> Tensor:
    """The tensor, where nobody profiles."""
    return tensor


@dataclass
class Windows:
    """A batch of windows of chunks.

    Attributes:
        tokens: (B, T, K) integers in [0, V), zero beyond each length.
        lengths: (B, T), 0 where no chunk is.
        starts: (B, T) true where a chunk begins a document.
    """

    tokens: Tensor
    lengths: Tensor
    starts: Tensor

    @classmethod
    def of(cls, tokens: Tensor, lengths: Tensor) -> "Windows":
        """Chunks (B, T, K) of lengths (B, T), of which none begins a document but the first of each window."""
        starts = torch.zeros_like(lengths, dtype=torch.bool)
        starts[:, :1] = True
        return cls(tokens, lengths, starts)

    @classmethod
    def cat(cls, parts: "list[Windows]") -> "Windows":
        """All windows of several batches."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))

    @property
    def real(self) -> Tensor:
        """(B, T) true where a chunk is."""
        return self.lengths > 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: "Tensor | slice") -> "Windows":
        return Windows(self.tokens[rows], self.lengths[rows], self.starts[rows])

    def split(self, at_once: int) -> "Iterator[Windows]":
        """The same windows, at most so many at a time."""
        return (self[first : first + at_once] for first in range(0, len(self), at_once))


@dataclass(frozen=True)
class Cut:
    """How a corpus is cut, as far as a system must know.

    Attributes:
        k: tokens of a chunk at most.
        vocabulary: V, the number of tokens.
        fixed: chunks have a fixed size, so that their ends are certain and never predicted.
        context: T, chunks of a window at most.
    """

    k: int
    vocabulary: int
    fixed: bool
    context: int


@dataclass
class Group:
    """Parameters that are trained alike.

    Attributes:
        parameters: of the system, in its own order.
        role: what they belong to; the `main` model has a learning rate of its own, the `decoder` can be trained alone.
        depth: steps between them and the exact loss, 0 for the decoder.
        table: rows are looked up, and the gradient has only those of a step (a sparse tensor): the others stay as they are.
    """

    parameters: list[nn.Parameter]
    role: str
    depth: int
    table: bool = False


class System(nn.Module, ABC):
    """A model of sequences cut into chunks, with exact likelihood.

    Attributes:
        cut: how its data is cut.
        kind: its name in `haed.build`.
        parts: names of children in the order of the data, of which profiles tell, and gradient norms.
        spaces: names of the spaces that `vectors` knows.
        remarks: what is odd about its options, though it can be.
        mark: called with the name of each part of a step and the tensor that ends it, returns the tensor; a profile puts its
            clock here. Who marks no part in `total_log_likelihood` is one, "system".
    """

    parts: tuple[str, ...] = ()
    spaces: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.cut, self.kind = cut, ""
        self.remarks: list[str] = []
        self.mark: Mark = unmarked

    @abstractmethod
    def initialise(self) -> None:
        """Sets every parameter, from PyTorch's global generator."""

    @torch.no_grad()
    def initialise_layers(self) -> None:
        """Sets what most families set alike: matrices to a deviation of 1/√fan_in, embeddings to 1, biases 0, norms neutral."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()

    @abstractmethod
    def decisions(self, windows: Windows) -> Tensor:
        """Exact log p, in nats, of every token and end of a chunk given what precedes it in its window.

        Args:
            windows: on any device; a system whose shapes depend on the data waits for it unless that is the CPU.

        Returns:
            (B, T, K + 1) float32 or wider on the system's device: of token t at place t, of the end at the place after the
            last one (0 for a system of tokens, which knows no ends); 0 where nothing is decided.
        """

    def log_likelihood(self, windows: Windows) -> Tensor:
        """Exact log p (B, T), in nats, of whole chunks: the sum of their decisions."""
        return self.decisions(windows).sum(-1)

    def lay_out(self, windows: Windows) -> object:
        """On the CPU, all whose shape depends on the data, for `total_log_likelihood`; by default the windows themselves."""
        return windows

    def total_log_likelihood(self, laid: object) -> Tensor:
        """Log p, in nats, of all that `lay_out` was given, a scalar; waits for no device."""
        assert isinstance(laid, Windows)
        return self.mark("system", self.log_likelihood(laid).sum())

    def outlets(self) -> dict[int, nn.Module]:
        """By scale, in tokens, the module that gives what its layers make of each group, (B, J, W); by default there is none.

        Group j is complete at position j · scale of the sequence, before the token there is read, so that position t may see
        group ⌊t / scale⌋ and those before it.
        """
        return {}

    def at_scales(self, windows: Windows) -> dict[int, Tensor]:
        """What the `outlets` give for windows on the CPU, (B, J, W) by scale."""
        return {}

    def vectors(self, windows: Windows, space: str, layer: int | None = None, scale: int | None = None) -> Tensor:
        """Vectors (M, E) of the real chunks of windows on the CPU, in one of `spaces`.

        Args:
            windows: on the CPU.
            space: `chunks`: of each chunk by itself; `contexts`: of what stands before it in its window.
            layer: of `contexts`, from 0; None: what comes out of all of them.
            scale: of `contexts`, in tokens: of the last of its groups that is complete where a chunk begins; None: what comes
                out of all of them.

        Raises:
            ValueError: the system has no such space, or no such layer or scale that could be looked at.
        """
        if space in self.spaces and scale is not None:
            there = ", ".join(str(each) for each in sorted(self.outlets()))
            raise ValueError(f"{type(self).__name__} has no scale {scale} of {space}, only: {there or 'none'}")
        if space in self.spaces:
            raise ValueError(
                f"{type(self).__name__} has no layer {layer} of {space} to be looked at: leave the layer out"
            )
        raise ValueError(f"{type(self).__name__} has no space {space!r}, only: {', '.join(self.spaces) or 'none'}")

    def groups(self) -> list[Group]:
        """All parameters, each once."""
        return [Group(list(self.parameters()), "all", 0)]

    def flops(self, laid: object) -> float:
        """FLOPs of the products of `total_log_likelihood`; by default every matrix sees every token once."""
        assert isinstance(laid, Windows)
        embeddings = {id(module.weight) for module in self.modules() if isinstance(module, nn.Embedding)}
        matrices = (x.numel() for x in self.parameters() if x.ndim == 2 and id(x) not in embeddings)
        return 2.0 * sum(matrices) * float(laid.lengths.sum())

    def kept(self, chunks: float, tokens: float) -> float:
        """Values that a training step must keep for its gradient, at the least; by default 0: nothing is known.

        Args:
            chunks: in the step's windows.
            tokens: of them that are decoded.
        """
        return 0.0

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device


@dataclass
class Losses:
    """A step's loss and what is told of it; means over ranks are those of the joined batch.

    Attributes:
        total: scalar that is minimised.
        chunks: number of chunks of all ranks.
        nats: exact loss in nats of all that was decoded on all ranks, or None where nothing was.
        tokens: number of tokens decoded, of all ranks if each had as many as this one.
        figures: scalars, of which the means over steps are recorded.
        diagnosis: scalars of this step alone, if it was asked for.
    """

    total: Tensor
    chunks: int
    nats: Tensor | None = None
    tokens: int = 0
    figures: dict[str, Tensor | float] = field(default_factory=dict)
    diagnosis: dict[str, Tensor] = field(default_factory=dict)


Value = TypeVar("Value")


class Objective(nn.Module, ABC):
    """A system and its loss in one: all that the trainer knows.

    Args:
        system: that is trained; parameters that the loss has no use for are frozen.
        ranks: processes that train together.
    """

    def __init__(self, system: System, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.system, self.ranks = system, ranks or Ranks()

    @abstractmethod
    def prepare(
        self, windows: Windows, negatives: Windows | None = None, generator: torch.Generator | None = None
    ) -> object:
        """Works out, on the CPU, everything whose shape depends on the data.

        Args:
            windows: on the CPU.
            negatives: read only for their chunks, as further candidates.
            generator: of this step's random choices.

        Returns:
            What `forward` and `flops` take, after `moved` to the device.
        """

    @abstractmethod
    def forward(self, batch: object, diagnose: bool = False) -> Losses:
        """The losses of a prepared batch on the system's device; `diagnose` adds figures that cost something."""

    @abstractmethod
    def flops(self, batch: object) -> float:
        """Model FLOPs of a step on all ranks, each rank's batch taken to be like this one."""

    def compile_parts(self) -> None:
        """Has what profits most compiled by torch.compile at its first use; by default nothing."""

    def extra_state(self) -> dict[str, Tensor]:
        """What influences the next step beside the weights, for a checkpoint."""
        return {}

    def load_extra_state(self, state: dict[str, Tensor]) -> None:
        """Puts back what `extra_state` gave; names that are not its own are left alone."""


@dataclass
class Counted:
    """What a system laid out, with the numbers of chunks and tokens on all ranks together."""

    laid: object
    chunks: int
    tokens: int


class Likelihood(Objective):
    """The exact loss of any system: nats per chunk, every token decoded."""

    def prepare(
        self, windows: Windows, negatives: Windows | None = None, generator: torch.Generator | None = None
    ) -> Counted:
        """Counts and lays out; see `Objective.prepare`."""
        chunks, tokens = self.ranks.sum([int(windows.real.sum()), int(windows.lengths.sum())])
        return Counted(self.system.lay_out(windows), int(chunks), int(tokens))

    def forward(self, batch: object, diagnose: bool = False) -> Losses:
        """See `Objective.forward`."""
        assert isinstance(batch, Counted)
        nats = -self.system.total_log_likelihood(batch.laid) * self.ranks.size
        return Losses(nats / max(1, batch.chunks), batch.chunks, nats, batch.tokens)

    def flops(self, batch: object) -> float:
        """See `Objective.flops`; a backward pass costs twice a forward pass."""
        assert isinstance(batch, Counted)
        return 3 * self.system.flops(batch.laid) * self.ranks.size


def occupied(lengths: Tensor, places: int) -> Tensor:
    """Which of so many places hold something, (…, places), of rows that are filled from the left to `lengths` (…)."""
    return torch.arange(places, device=lengths.device) < lengths[..., None]


def moved(value: Value, device: torch.device) -> Value:
    """The same on a device: a tensor, or dataclasses, lists and tuples of any depth with tensors in them.

    Nothing waits for copies to a GPU.
    """
    found: object = value
    if isinstance(value, Tensor):
        to_gpu = device.type == "cuda" and value.device.type == "cpu"  # towards the CPU, it must wait for the numbers
        found = (value.pin_memory() if to_gpu else value).to(device, non_blocking=to_gpu)
    elif isinstance(value, list | tuple):
        found = type(value)(moved(each, device) for each in value)
    elif is_dataclass(value) and not isinstance(value, type):
        found = replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return found  # type: ignore[return-value]
