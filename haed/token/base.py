"""Base of the models of tokens, which read windows as sequences of tokens and know no ends of chunks.

At position t of a sequence a system is fed token t − 1 and predicts token t. At the start of a document or of the
window it is fed the symbol V. Sequences are padded only behind their tokens. Systems are causal, so padding needs no
mask.

The module also parses the notations of the options. A hierarchy is written as 2@1 8@4 2@1 (Hourglass), scales as 2@16
2@4 4@1. Commas may stand between entries, and parentheses, nested or not, around them (Nawrot et al. 2021, section 3).

Legend: B sequences, T chunks of a window, K tokens of a chunk, L tokens of a sequence, V vocabulary, W width.
"""

import itertools
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.base import (
    SHORTER,
    ChunkingSpec,
    CompiledFunction,
    ParameterGroup,
    SequenceModel,
    TokenBatch,
    length_mask,
    record_outputs,
    to_device,
)
from haed.layers.attention import sinusoidal_embedding
from haed.layers.ngram_embedding import Grams, SparseLookup
from haed.layers.transformer import scale_residual_init
from haed.options import TokenOptions

MULTIPLE = 16  # sequence lengths are multiples: few different shapes, fast on matrix units


@dataclass
class Tokens:
    """Windows as sequences.

    Attributes:
        symbols: (B, L) input symbols.
        targets: (B, L) tokens to predict; 0 for padding.
        real: (B, L) true where there is a token.
        place: (B, L) place of each token among the T·(K + 1) decisions of its window; T·(K + 1) for padding.
        route: result of the system's `route` for the symbols.
        lookup: look-up of the n-grams that end with each symbol, for a system with such a table; or None.
    """

    symbols: Tensor
    targets: Tensor
    real: Tensor
    place: Tensor
    route: object
    lookup: SparseLookup | None = None


def as_tokens(windows: TokenBatch, cut: ChunkingSpec, filled: bool = False) -> Tokens:
    """Lay out windows as sequences on the CPU, without a route.

    Args:
        windows: B windows of T chunks.
        cut: how they are cut.
        filled: pad them to T·K tokens; if not, to the longest window.
    """
    k, chunks = cut.k, windows.lengths.shape[1]
    real = length_mask(windows.lengths, k)  # (B, T, K)
    counts = real.sum((1, 2))
    longest = max(1, chunks * k if filled else int(counts.max()) if len(counts) else 1)
    order = (~real).flatten(1).byte().argsort(dim=1, stable=True)[:, : longest + -longest % MULTIPLE]
    real = torch.arange(order.shape[1]) < counts[:, None]
    targets = windows.tokens.long().flatten(1).gather(1, order) * real
    starts = windows.starts.gather(1, order // k) & (order % k == 0)
    starts[:, 0] = True
    symbols = targets.roll(1, 1).masked_fill(starts, cut.vocabulary)
    place = torch.where(real, order // k * (k + 1) + order % k, chunks * (k + 1))
    return Tokens(symbols, targets, real, place, None)


@dataclass
class Memory:
    """State of a system after the symbols fed so far.

    Attributes:
        fed: number of symbols fed.
        body: memory of the body.
        recent: (B, n) the last symbols, on the CPU, if n-grams are looked up.
    """

    fed: int
    body: Any
    recent: Tensor | None = None


class TokenModel(SequenceModel):
    """Embedding, a `body` that a family implements, last norm and output layer.

    Args:
        options: options that all families share.
        cut: how the corpus is cut into chunks.
    """

    vector_spaces = ("contexts",)

    def __init__(self, options: TokenOptions, cut: ChunkingSpec) -> None:
        super().__init__(cut)
        self.grams = Grams(options.grams, options.width, cut.vocabulary) if options.grams.rows else None
        self.embedding = nn.Embedding(cut.vocabulary + 1, options.width)
        self.positions = Positions(options, cut.context * cut.k)
        self.dropout = nn.Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.width)
        self.output = nn.Linear(options.width, cut.vocabulary)

    @abstractmethod
    def forward_body(self, x: Tensor, route: Any = None, memory: Any = None) -> Tensor:
        """Compute the layers between the embedding and the last norm; position t depends only on positions up to t.

        Args:
            x: (B, L, W) embedded input; with a memory, it follows the positions seen before.
            route: result of `route_symbols` for the same symbols, on the device.
            memory: result of `create_body_memory`, which the call extends; None: nothing comes before, and nothing is kept.

        Returns:
            (B, L, W).
        """

    @abstractmethod
    def create_body_memory(self, samples: int) -> Any:
        """Return an empty memory of the body, for sampling `samples` sequences."""

    def route_symbols(self, symbols: Tensor, memory: Any = None) -> object:
        """Compute, on the CPU, what the body's shapes depend on, from symbols (B, L) that follow those in `memory`."""
        return None

    @torch.no_grad()
    def initialise_parameters(self) -> None:
        """Initialise every parameter, except those that a family initialises after it.

        Matrices are normal with deviation 1/√fan_in. This includes the output layer, without which nothing else learns
        at first (dev/LOG.md). Those that end a residual branch are smaller (`scale_residual_init`). Embeddings are normal
        with deviation 1.
        """
        self.initialise_layers()
        scale_residual_init(self)
        if self.grams is not None:
            self.grams.initialise_parameters()

    def parameter_groups(self) -> list[ParameterGroup]:
        """See `SequenceModel.parameter_groups`."""
        (every,) = super().parameter_groups()
        return every.split_off_table(None if self.grams is None else self.grams.table)

    def create_memory(self, samples: int) -> Memory:
        """Return the memory of `samples` sequences before their first symbol."""
        return Memory(0, self.create_body_memory(samples))

    def look_up(self, symbols: Tensor, memory: Memory | None = None) -> SparseLookup | None:
        """Look up the n-grams that end with each of the symbols (B, L), which follow those in the memory.

        The symbols are on the CPU. Return None without a table.
        """
        if self.grams is None:
            return None
        before = symbols.new_full((len(symbols), self.grams.longest - 1), self.cut.vocabulary)
        every = torch.cat([before if memory is None or memory.recent is None else memory.recent, symbols], 1)
        if memory is not None:
            memory.recent = every[:, symbols.shape[1] :]
        return self.grams.look_up(every.unfold(1, self.grams.longest, 1))

    def ngram_terms(self, lookup: SparseLookup | None) -> tuple[Tensor | float, Tensor | float]:
        """Return the n-grams' share of the embedding (B, L, W) and of the logits (B, L, V); 0 without a table."""
        return self.grams(lookup) if self.grams is not None and lookup is not None else (0.0, 0.0)

    def hidden_states(
        self, symbols: Tensor, route: object, added: Tensor | float, memory: Memory | None = None
    ) -> Tensor:
        """Return the input (B, L, W) of the output layer.

        Args:
            symbols: (B, L) on the device; they follow those in the memory.
            route: result of `route_symbols` for them, on the device.
            added: the n-grams' share of the embedding.
            memory: see `forward`.
        """
        fed = memory.fed if memory is not None else 0
        x = self.embedding(symbols)
        x = x + added if isinstance(added, Tensor) else x
        x = self.mark("embedding", self.dropout(self.positions(x, fed)))
        x = self.norm(self.forward_body(x, route, memory.body if memory is not None else None))
        if memory is not None:
            memory.fed += symbols.shape[1]
        return x

    def forward(self, symbols: Tensor, memory: Memory | None = None) -> Tensor:
        """Return logits (B, L, V) after each of the symbols (B, L), which follow those in the memory.

        The symbols are on the CPU.
        """
        route = self.route_symbols(symbols, memory.body if memory is not None else None)
        symbols, route, lookup = to_device((symbols, route, self.look_up(symbols, memory)), self.device)
        layer, logits = self.ngram_terms(lookup)
        return self.output(self.hidden_states(symbols, route, layer, memory)) + logits

    def prepare_inputs(self, windows: TokenBatch) -> Tokens:
        """See `SequenceModel.prepare_inputs`."""
        inputs = as_tokens(windows, self.cut, filled=self.is_compiled)
        inputs.route, inputs.lookup = self.route_symbols(inputs.symbols), self.look_up(inputs.symbols)
        return inputs

    def compile_training(self) -> bool:
        """Compile all but the look-up of n-grams, whose gradient is sparse; see `SequenceModel.compile_training`.

        Windows of chunks of a fixed size are filled up to one length.
        """
        if self.cut.fixed:
            self._score_tokens = CompiledFunction(self._score_tokens)  # type: ignore[method-assign, assignment]
        return self.cut.fixed

    @property
    def is_compiled(self) -> bool:
        """True after `compile_training`, if it compiles anything."""
        return isinstance(self._score_tokens, CompiledFunction)

    def token_log_likelihood(self, inputs: Tokens) -> Tensor:
        """Return log p (B, L) of every token, float32 or wider, 0 for padding."""
        scores = self._score_tokens(replace(inputs, lookup=None), *self.ngram_terms(inputs.lookup))
        return self.mark("system" if self.is_compiled else "output", scores)

    def _score_tokens(self, inputs: Tokens, layer: Tensor | float, added: Tensor | float) -> Tensor:
        logits = self.output(self.hidden_states(inputs.symbols, inputs.route, layer)) + added
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = -F.cross_entropy(wide.flatten(0, 1), inputs.targets.flatten(), reduction="none")
        return log_probs.unflatten(0, inputs.targets.shape) * inputs.real

    def total_log_likelihood(self, inputs: object) -> Tensor:
        """See `SequenceModel.total_log_likelihood`."""
        assert isinstance(inputs, Tokens)
        return self.token_log_likelihood(inputs).sum()

    def decision_log_likelihood(self, windows: TokenBatch) -> Tensor:
        """See `SequenceModel.decision_log_likelihood`; nothing is decided at the end of a chunk."""
        inputs = to_device(self.prepare_inputs(to_device(windows, torch.device("cpu"))), self.device)
        scores, (chunks, k) = self.token_log_likelihood(inputs), (windows.lengths.shape[1], self.cut.k)
        log_probs = scores.new_zeros(len(scores), chunks * (k + 1) + 1).scatter(1, inputs.place, scores)
        return log_probs[:, :-1].unflatten(1, (chunks, k + 1))

    def shape_key(self, inputs: object) -> tuple[int, ...]:
        """See `SequenceModel.shape_key`."""
        assert isinstance(inputs, Tokens)
        return tuple(inputs.symbols.shape)

    def collect_scale_outputs(self, windows: TokenBatch) -> dict[int, Tensor]:
        """See `SequenceModel.collect_scale_outputs`."""
        return self._hidden_at_scales(self.prepare_inputs(windows))[1]

    def extract_vectors(
        self, windows: TokenBatch, space: str, layer: int | None = None, scale: int | None = None
    ) -> Tensor:
        """Return `contexts`: the output layer's input where a chunk begins, which knows all tokens before it.

        The last group of a scale does not know the last tokens, fewer than `scale`. The first group knows nothing. See
        `SequenceModel.extract_vectors`.
        """
        if space != "contexts" or layer is not None or not (scale is None or scale in self.scale_outputs()):
            return super().extract_vectors(windows, space, layer, scale)
        inputs = self.prepare_inputs(windows)
        row, place = ((inputs.place % (self.cut.k + 1) == 0) & inputs.real).nonzero(as_tuple=True)
        last, seen = self._hidden_at_scales(inputs)
        return last[row, place] if scale is None else seen[scale][row, place // scale]

    def _hidden_at_scales(self, inputs: Tokens) -> tuple[Tensor, dict[int, Tensor]]:
        """Return the output layer's input (B, L, W), and the `scale_outputs`, for windows laid out on the CPU."""
        inputs = to_device(inputs, self.device)
        with record_outputs(self.scale_outputs()) as seen:
            return self.hidden_states(inputs.symbols, inputs.route, self.ngram_terms(inputs.lookup)[0]), seen


class Positions(nn.Module):
    """Position information added to embeddings: learned vectors, or sinusoids (Vaswani et al. 2017, section 3.5)."""

    def __init__(self, options: TokenOptions, longest: int) -> None:
        super().__init__()
        self.kind = options.positions
        self.table = nn.Embedding(longest, options.width) if options.positions == "learned" else None

    def forward(self, x: Tensor, fed: int) -> Tensor:
        """Add positions to embeddings (B, L, W), which follow `fed` others.

        Raises:
            ValueError: there are more positions than were trained.
        """
        if self.kind == "none":
            return x
        if self.table is not None:
            if (needed := fed + x.shape[1]) > (known := self.table.num_embeddings):
                raise ValueError(f"{needed} tokens exceed the {known} positions of this model. {SHORTER}")
            return x + self.table.weight[fed : fed + x.shape[1]]
        return x + sinusoidal_embedding(torch.arange(fed, fed + x.shape[1], device=x.device), x.shape[2], x.dtype)


MOST = 1024  # layers of a level at most
NUMBER, WINDOW = r"[0-9]{1,6}", r"[0-9]{1,9}:[0-9]{1,9}"
_EXAMPLES = {NUMBER: "2@16 2@4 4@1", WINDOW: "256:512@16 8:256@4 0:8@1"}


def split_entries(text: str) -> list[str]:
    """Return the entries of a notation.

    If parentheses do not match, they stay a part of the entries, which are then invalid.
    """
    depths = [0, *itertools.accumulate((letter == "(") - (letter == ")") for letter in text)]
    matched = min(depths) == depths[-1] == 0
    return re.sub(r"[,()]" if matched else ",", " ", text).split()


@dataclass(frozen=True)
class Scale:
    """A level of a hierarchy.

    Attributes:
        factor: number of tokens of a position.
        before: number of layers before the coarser levels.
        after: number of layers after the coarser levels.
    """

    factor: int
    before: int
    after: int


def parse_hierarchy(text: str, longest: int) -> list[Scale]:
    """Parse a hierarchy such as "2@1 1@2 4@4 1@2 2@1", also with commas and parentheses, from the finest scale on.

    Args:
        text: layers@factor from the input to the output.
        longest: number of tokens of the longest window.

    Raises:
        ValueError: it is not a hierarchy, does not nest, has no layers, or shortens by more than a window.
    """
    where = f"model.hourglass.hierarchy={text!r}"
    entries = split_entries(text)
    if not entries or not all(re.fullmatch(rf"{NUMBER}@[1-9][0-9]{{0,6}}", entry) for entry in entries):
        raise ValueError(f"{where}: entries are layers@factor. Use something like 2@1 8@4 2@1")
    layers, factors = zip(*((int(number) for number in entry.split("@")) for entry in entries), strict=True)
    if max(layers) > MOST:
        raise ValueError(f"{where}: a level has at most {MOST:,} layers")
    middle = len(factors) // 2
    down = factors[: middle + 1]
    if factors != factors[::-1] or len(factors) % 2 == 0:
        raise ValueError(
            f"{where}: factors must rise to the middle and fall in the same steps. Use something like 2@1 8@4 2@1"
        )
    if down[0] != 1:
        raise ValueError(f"{where}: the first factor must be 1. Use 0@1 {' '.join(entries)} 0@1 for no layers there")
    for fine, coarse in zip(down, down[1:], strict=False):
        if coarse % fine or coarse == fine:
            raise ValueError(
                f"{where}: {coarse} is not a larger multiple of {fine}. Each factor must be a multiple of the "
                "one before"
            )
    if not any(layers):
        raise ValueError(f"{where}: no scale has a layer, so no token sees another. Use something like 2@1 8@4 2@1")
    if down[-1] > longest:
        raise ValueError(
            f"{where}: factor {down[-1]} exceeds the {longest} tokens of a window. Use a smaller one, or "
            "raise batch.context"
        )
    backwards = layers[::-1]
    return [Scale(factor, layers[i], backwards[i] if i < middle else 0) for i, factor in enumerate(down)]


def parse_scales(notation: str, option: str, pattern: str) -> dict[int, str]:
    """Parse a notation such as 2@16 2@4 4@1; return the text before each @, by scale.

    Args:
        notation: as given by the user.
        option: name of the option, for errors.
        pattern: regular expression of the text before each @, `NUMBER` (of layers, or of heads) or `WINDOW`.

    Raises:
        ValueError: the notation is invalid, a scale is there twice, or a number is 0 or too large.
    """
    before_scale: dict[int, str] = {}
    where, example = f"{option}={notation!r}", f"Use something like {_EXAMPLES[pattern]}"
    for part in (parts := split_entries(notation)):
        match = re.fullmatch(rf"({pattern})@([1-9][0-9]{{0,6}})", part)
        if match is None:
            raise ValueError(f"{where}: {part!r} is not of the form WHAT@SCALE. {example}")
        if int(match[2]) in before_scale:
            raise ValueError(f"{where}: scale {match[2]} is given twice. {example}")
        if pattern == NUMBER and not 1 <= int(match[1]) <= MOST:
            raise ValueError(f"{where}: {part} must be from 1 to {MOST:,} at scale {match[2]}, or left out. {example}")
        before_scale[int(match[2])] = match[1]
    if not parts:
        raise ValueError(f"{where}: there is no scale. {example}")
    return before_scale


def parse_nested_scales(
    notation: str, option: str, pattern: str, cut: ChunkingSpec, to_tokens: bool = True
) -> dict[int, str]:
    """Parse a notation as `parse_scales` does, sorted from the coarsest scale to scale 1, the tokens themselves.

    Without `to_tokens` it may end at a coarser scale.

    Raises:
        ValueError: as for `parsed`, or the scales do not nest, do not end with 1, or do not fit into a window of the
            corpus.
    """
    before_scale = parse_scales(notation, option, pattern)
    scales, window, where = sorted(before_scale, reverse=True), cut.context * cut.k, f"{option}={notation!r}"
    if to_tokens and scales[-1] != 1:
        raise ValueError(
            f"{where}: the finest scale must be 1 (tokens). Add something like {_EXAMPLES[pattern].split()[-1]}"
        )
    for coarse, fine in itertools.pairwise(scales):
        if coarse % fine:
            raise ValueError(f"{where}: {fine} does not divide {coarse}. Use scales that divide each other")
    if scales[0] > window:
        raise ValueError(
            f"{where}: a window has {window} tokens (batch.context × chunker.k). Use scales up to that, "
            "or longer windows"
        )
    return {scale: before_scale[scale] for scale in scales}
