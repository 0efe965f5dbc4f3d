"""Transformers with separate layers for each scale: Top-down and Bottom-up (Subramanian et al. 2020, section 3).

Top-down goes from the coarsest scale to the tokens: layers over the pooled embeddings of a scale, joined with the
output of the scale above. Bottom-up goes the other way and pools the output of each scale's layers. Then the tokens
attend to all coarse scales at once. Layers are pre-norm, with a norm at the end of a coarse scale's layers, as the
paper's post-norm layers have one.

Top-down may end at a coarse scale k, whose vectors are then repeated. The next k tokens share one distribution, a bag,
that knows nothing of the group they are in. Their likelihood is the cross-entropy between it and the uniform
distribution over them, times k (section 6.2).

The heads of a scale are an attention of their own. Adding the results of all scales equals joining the heads by one
matrix.

Coarser scales of a sequence are groups of neighbours, pooled to one vector each. Pooling is causal and works on a
stream. At scale k, group j consists of positions (j − 1)·k + 1 … j·k. So it is complete at position j·k, and position t
may see groups 0 … ⌊t / k⌋. Position t holds token t − 1, so these are tokens (j − 1)·k … j·k − 1, as in the listings of
Subramanian et al. 2020. Group 0 is the first position, k times. It knows only that the window starts, and every
position has a group to attend to. Pooling the groups of scale k by a factor r gives those of scale k·r.

Legend: B sequences, L positions, J groups, W width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.base import ChunkingSpec, Mark, no_op_timer
from haed.layers.attention import Attention, BlockOptions, Grid, KeyValueCache
from haed.layers.transformer import ATTENTIONS, FeedForward, TransformerStack
from haed.options import IEMOptions, ModelOptions
from haed.token.base import NUMBER, TokenModel, parse_nested_scales, parse_scales


class PendingTokens:
    """The vectors of a stream (B, L, W) that have arrived and were not used yet."""

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def take_first(self, new: Tensor | None, number: int | None = None, multiple: int = 1) -> Tensor:
        """Return the first `number` of all held and new vectors, and hold the rest.

        Without `number`, return as many as are a multiple of `multiple`.
        """
        known = [each for each in (self.tensor, new) if each is not None]
        joined = known[0] if len(known) == 1 else torch.cat(known, 1)
        number = joined.shape[1] // multiple * multiple if number is None else number
        self.tensor = joined[:, number:]
        return joined[:, :number]


class Pool(nn.Module):
    """Pooling of groups of `factor` neighbours (B, L, W) to one vector each: average, maximum, or a convolution.

    The stride of the convolution is its kernel's size, so it is a linear map of a group's concatenated vectors.
    """

    def __init__(self, kind: str, factor: int, width: int) -> None:
        super().__init__()
        self.kind, self.factor, self.shift = kind, factor, factor - 1  # a smaller shift would leak the future
        self.convolution = nn.Linear(factor * width, width) if kind == "convolution" and factor > 1 else None

    def forward(self, x: Tensor, held: PendingTokens | None = None) -> Tensor:
        """Return the groups (B, J, W) that x (B, L, W) completes; x follows the vectors in `held`, if given."""
        if self.factor == 1:
            return x
        held = held or PendingTokens()
        if held.tensor is None:
            held.tensor = x[:, :1].expand(-1, self.shift, -1)
        x = held.take_first(x, multiple=self.factor)
        x = x.reshape(len(x), x.shape[1] // self.factor, self.factor, x.shape[2])
        if self.convolution is not None:
            return self.convolution(x.flatten(2))
        return x.mean(2) if self.kind == "average" else x.amax(2)


def divide_heads(notation: str, option: str, heads: int, scales: Iterable[int]) -> dict[int, int]:
    """Return the number of heads of each scale, the finest first.

    The notation is as in 2@16 2@4. If it is empty, scales get equal parts, and the finest ones get the rest.

    Raises:
        ValueError: they do not make up all heads, or a scale has none.
    """
    ordered = sorted(scales)
    if not notation:
        each, rest = divmod(heads, len(ordered))
        if not each:
            raise ValueError(
                f"model.token.heads={heads}: each of the {len(ordered)} scales needs a head. Set at least {len(ordered)}"
            )
        return {scale: each + (place < rest) for place, scale in enumerate(ordered)}
    heads_by_scale = {scale: int(number) for scale, number in parse_scales(notation, option, NUMBER).items()}
    if sorted(heads_by_scale) != ordered or sum(heads_by_scale.values()) != heads:
        example = " ".join(f"{number}@{scale}" for scale, number in divide_heads("", option, heads, ordered).items())
        raise ValueError(
            f"{option}={notation!r}: expected heads at the scales {ordered}, {heads} in all (model.token.heads). "
            f"Use {example}"
        )
    return dict(sorted(heads_by_scale.items()))


@dataclass
class ScaledMemory:
    """Memory of a `ScaledAttention` and of the layer it is in.

    Attributes:
        caches: cache of each scale's groups, or None where none is kept.
        layer: what the layer's norms remember; see `haed.layers.transformer.Norm`.
        fed: number of tokens so far.
    """

    caches: Sequence[KeyValueCache | None]
    layer: KeyValueCache
    fed: int = 0


class ScaledAttention(nn.Module):
    """Causal attention of tokens to groups of several scales.

    Args:
        options: sizes; the kind of attention, which is rotary for local and LSH.
        heads: number of heads of each scale.
        windows: distances of each scale, from the first one on and below the second, at which tokens are seen; None:
            all distances. A group is seen if it is complete and one of its tokens is at such a distance. A token
            without such a group sees the first one, which has no information.
    """

    def __init__(
        self, options: BlockOptions, heads: dict[int, int], windows: dict[int, tuple[int, int]] | None = None
    ) -> None:
        super().__init__()
        self.scales = list(heads)
        self.attentions = nn.ModuleList()
        kind = "rotary" if options.attention in ("local", "lsh") else options.attention  # these support one level only
        for scale, count in heads.items():
            attention = ATTENTIONS[kind](replace(options, heads=count))
            if windows is not None:
                begin, attention.window = windows[scale]
                attention.nearest = max(0, begin - scale + 1)
            self.attentions.append(attention)

    def forward(
        self, x: Tensor, groups: Iterable[Tensor], memory: ScaledMemory | None = None, mark: Mark = no_op_timer
    ) -> Tensor:
        """Attend from tokens (B, L, W) to the groups (B, J, W) of each scale, and mark each scale.

        Tokens and groups follow those in the memory.
        """
        memory = memory or ScaledMemory([None] * len(self.scales), KeyValueCache())
        attended, queries = torch.zeros_like(x), Grid(memory.fed)
        for attention, scale, new, cache in zip(self.attentions, self.scales, groups, memory.caches, strict=True):
            assert isinstance(attention, Attention)
            keys = Grid(cache.seen * scale if cache is not None else 0, scale)
            attended = mark(f"scale_{scale}", attended + attention.cross_attention(x, new, queries, keys, cache))
        memory.fed += x.shape[1]
        return attended

    def create_memory(self) -> ScaledMemory:
        """Return an empty memory."""
        return ScaledMemory([KeyValueCache() for _ in self.scales], KeyValueCache())


class Level(nn.Module):
    """The layers of a scale, with the pooling before them and the upsampling to the next scale after them.

    Args:
        options: options of its layers.
        pool: pooling to its groups; if a group has more than one vector, a norm follows the layers.
        layers: number of layers.
        above: true if it is joined with a coarser scale.
        ratio: number of vectors of the next finer scale that each vector becomes.
        repeat: true if these vectors are all the same.
    """

    def __init__(
        self, options: BlockOptions, pool: Pool, layers: int, above: bool = False, ratio: int = 1, repeat: bool = False
    ) -> None:
        super().__init__()
        width, self.ratio = options.width, ratio
        self.pool = pool
        self.join = nn.Linear(2 * width, width) if above else None
        self.layers = TransformerStack(layers, options)
        self.norm = nn.LayerNorm(width) if pool.factor > 1 else nn.Identity()
        # A transposed convolution whose stride is its kernel's size: a linear map of each vector to `ratio` of them.
        self.up = nn.Linear(width, ratio * width) if ratio > 1 and not repeat else None

    def forward(self, x: Tensor, above: Tensor | None, memory: "LevelMemory") -> Tensor:
        """Map x (B, L, W) and new vectors from above (B, J, W) to the vectors (B, J', W) given to the next scale."""
        x = self.pool(x, memory.below)
        if not x.shape[1]:  # no group was completed
            return x
        if self.join is not None:
            x = F.gelu(self.join(torch.cat([x, memory.above.take_first(above, x.shape[1])], -1)))
        x = self.norm(self.layers(x, memory.layers))
        if self.up is None:
            return x.repeat_interleave(self.ratio, 1) if self.ratio > 1 else x
        return self.up(x).unflatten(2, (self.ratio, -1)).flatten(1, 2)


class LevelMemory:
    """Memory of a level.

    Attributes:
        layers: caches of its layers, or None if they keep none.
        below: input vectors not used yet.
        above: vectors of the coarser scale not used yet.
    """

    def __init__(self, layers: list[KeyValueCache] | None = None) -> None:
        self.layers, self.below, self.above = layers, PendingTokens(), PendingTokens()


class MultiScale(TokenModel):
    """A system with a `Level` for each scale k of `scales`, as its child `scale_k`."""

    scales: list[int]

    def levels_by_scale(self) -> dict[int, Level]:
        """Return the levels by scale, in the order of `scales`."""
        return {scale: getattr(self, f"scale_{scale}") for scale in self.scales}

    def scale_outputs(self) -> dict[int, nn.Module]:
        """Return the modules of vectors before they are lengthened; see `SequenceModel.scale_outputs`."""
        return {scale: level.norm for scale, level in self.levels_by_scale().items()}

    def create_level_memories(self) -> list[LevelMemory]:
        """Return an empty memory for each level."""
        return [LevelMemory(level.layers.create_cache()) for level in self.levels_by_scale().values()]


class TopDown(MultiScale):
    """A model from the coarsest scale to the tokens, or to bags of them.

    Raises:
        ValueError: the scales do not nest or are too long; there are heads per scale, which it does not use; or bags
            have n-grams, which would reveal their tokens.
    """

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(options.token, cut)
        token, chosen, longest = options.token, options.multiscale, cut.context * cut.k
        if chosen.heads:
            raise ValueError(
                f"model.multiscale.heads={chosen.heads!r}: top_down has no heads per scale. Leave it empty"
            )
        repeat = chosen.upsampling == "repeat"
        layers = parse_nested_scales(chosen.layers, "model.multiscale.layers", NUMBER, cut, to_tokens=not repeat)
        self.scales = list(layers)
        if self.scales[-1] > 1 and self.grams is not None:
            raise ValueError(
                f"model.token.grams.rows={token.grams.rows}: a bag of tokens uses whole groups only. Set 0"
            )
        for scale, finer in zip(self.scales, [*self.scales[1:], 1], strict=True):
            pool, above = Pool(chosen.pooling, scale, token.width), scale < self.scales[0]
            sizes = BlockOptions.from_token_options(token, longest // scale + 1)
            level = Level(sizes, pool, int(layers[scale]), above, scale // finer, repeat)
            self.add_module(f"scale_{scale}", level)
        self.submodules = ("embedding", *(f"scale_{scale}" for scale in self.scales), "output")
        self.initialise_parameters()

    def forward_body(self, x: Tensor, route: object = None, memory: list[LevelMemory] | None = None) -> Tensor:
        """See `TokenModel.forward_body`."""
        coarser, (*levels, tokens) = None, memory or [LevelMemory() for _ in (*self.scales, 1)]
        for kept, (scale, level) in zip(levels, self.levels_by_scale().items(), strict=True):
            coarser = self.mark(f"scale_{scale}", level(x, coarser, kept))
        return tokens.above.take_first(coarser, x.shape[1])

    def create_body_memory(self, samples: int) -> list[LevelMemory]:
        """See `TokenModel.create_body_memory`."""
        return [*self.create_level_memories(), LevelMemory()]


class Aggregation(nn.Module):
    """A layer in which tokens attend to the groups of all coarse scales (section 3.3)."""

    def __init__(self, options: BlockOptions, heads: dict[int, int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(options.width)
        self.attention = ScaledAttention(options, heads)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, groups: list[Tensor], memory: ScaledMemory | None = None) -> Tensor:
        """Map tokens x (B, L, W), and the new groups (B, J, W) of each scale, to (B, L, W)."""
        attended = self.attention(self.norm(x), groups, memory)
        return self.feed_forward(x + self.dropout(attended), memory.layer if memory is not None else None)


@dataclass
class BottomUpMemory:
    """Memory of each coarse scale, of the aggregation layer, and of the finest scale's layers; None where none is kept."""

    levels: list[LevelMemory]
    aggregation: ScaledMemory | None = None
    finest: list[KeyValueCache] | None = None


class BottomUp(MultiScale):
    """A model from the tokens to the coarsest scale, and back to the tokens by attention.

    Raises:
        ValueError: the scales do not nest, are too long, or are only one; or the heads cannot be divided like this.
    """

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(options.token, cut)
        token, chosen, longest = options.token, options.multiscale, cut.context * cut.k
        if chosen.upsampling == "repeat":
            raise ValueError("model.multiscale.upsampling=repeat: bottom_up does not upsample. Leave it out")
        layers = parse_nested_scales(chosen.layers, "model.multiscale.layers", NUMBER, cut)
        self.scales = sorted(layers)[1:]
        if not self.scales:
            raise ValueError(f"model.multiscale.layers={chosen.layers!r}: bottom_up needs a coarse scale. Add 2@4")
        for finer, scale in zip([1, *self.scales], self.scales, strict=False):
            pool = Pool(chosen.pooling, scale // finer, token.width)
            sizes = BlockOptions.from_token_options(token, longest // scale + 1)
            self.add_module(f"scale_{scale}", Level(sizes, pool, int(layers[scale])))
        heads = divide_heads(chosen.heads, "model.multiscale.heads", token.heads, self.scales)
        sizes = BlockOptions.from_token_options(token, longest)
        self.aggregation = Aggregation(sizes, heads)
        self.scale_1 = TransformerStack(int(layers[1]), sizes)
        self.submodules = (
            "embedding",
            *(f"scale_{scale}" for scale in self.scales),
            "aggregation",
            "scale_1",
            "output",
        )
        self.initialise_parameters()

    def forward_body(self, x: Tensor, route: object = None, memory: BottomUpMemory | None = None) -> Tensor:
        """See `TokenModel.forward_body`."""
        memory = memory or BottomUpMemory([LevelMemory() for _ in self.scales])
        below, groups = x, []
        for kept, (scale, level) in zip(memory.levels, self.levels_by_scale().items(), strict=True):
            below = self.mark(f"scale_{scale}", level(below, None, kept))
            groups.append(below)
        x = self.mark("aggregation", self.aggregation(x, groups, memory.aggregation))
        return self.mark("scale_1", self.scale_1(x, memory.finest))

    def scale_outputs(self) -> dict[int, nn.Module]:
        """See `SequenceModel.scale_outputs`."""
        return super().scale_outputs() | {1: self.scale_1}

    def create_body_memory(self, samples: int) -> BottomUpMemory:
        """See `TokenModel.create_body_memory`."""
        return BottomUpMemory(
            self.create_level_memories(), self.aggregation.attention.create_memory(), self.scale_1.create_cache()
        )
