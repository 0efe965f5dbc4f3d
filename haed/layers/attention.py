"""Causal attention between vectors at positions of one sequence: plain, rotary, local, relative; and its cache.

The positions need not be adjacent: a sequence shortened by k has a vector at every k-th position of the finer one. So
the same code attends within a level and between two levels. LSH attention is in `haed.layers.lsh_attention`.

Legend: B sequences, L positions, n queries, m keys, W width, H heads, D width of a head; H·D need not be W.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.options import TokenOptions

_BLOCK, _CUDA_BLOCK = 128, 1024  # queries per block
_WHOLE = 256  # up to so many queries are one block on a CPU
_SEQUENCES = 65_535  # per call: the limit of CUDA's grid along the axis that PyTorch's kernels use


@dataclass(frozen=True)
class Grid:
    """The positions `first`, `first + step`, … of the vectors of a sequence."""

    first: int = 0
    step: int = 1

    def position_at(self, index: int) -> int:
        """Return the position of the vector with this index."""
        return self.first + index * self.step

    def skip_first(self, count: int) -> "Grid":
        """Return the grid without its first `count` positions; with further ones before it, if `count` is negative."""
        return Grid(self.position_at(count), self.step)

    def count_up_to(self, position: int) -> int:
        """Return the number of vectors at this position or before."""
        return max(0, (position - self.first) // self.step + 1)

    def first_positions(self, count: int, device: torch.device) -> Tensor:
        """Return the first `count` positions, (count,) integers."""
        return torch.arange(count, device=device) * self.step + self.first


class KeyValueCache:
    """The keys and values that one attention layer has seen, and what else its block must remember.

    A prefix, such as the chunk before, is seen by every position and counts as none.

    Attributes:
        seen: number of positions seen so far, without the prefix.
        tensors: (B, H, T, ·) each, such as keys and values; prefix, then positions.
        prefix_mask: (B, P) true where a sequence has a prefix; None without prefix.
        distances: (H, D, T) vectors of the distances 0, 1, … for relative attention; else None.
        shifted: (B, 1, ·) last output of each norm that shifts; see `haed.layers.transformer.Norm`.
    """

    def __init__(self, key: Tensor | None = None, value: Tensor | None = None, mask: Tensor | None = None) -> None:
        self.seen = 0
        self.tensors: tuple[Tensor, ...] = () if key is None or value is None else (key, value)
        self.prefix_mask = mask
        self.distances: Tensor | None = None
        self.shifted: dict[nn.Module, Tensor] = {}

    def append(self, *new: Tensor, keep: int | None = None) -> tuple[Tensor, ...]:
        """Append tensors (B, H, n, ·) of new positions and return all; only the last `keep` stay in the cache."""
        every = tuple(torch.cat(pair, 2) for pair in zip(self.tensors, new, strict=True)) if self.tensors else new
        self.seen += new[0].shape[2]
        self.tensors = every if keep is None else tuple(x[:, :, max(0, x.shape[2] - keep) :] for x in every)
        return every

    def visible_keys(self, count: int) -> Tensor | None:
        """Return a mask (B, count) of the first `count` keys that are not an absent prefix; None if all are there."""
        mask = self.prefix_mask
        return None if mask is None else torch.cat([mask, mask.new_ones(len(mask), count - mask.shape[1])], 1)

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the selected sequences; `rows` is a mask (B,) or their indices."""
        self.tensors = tuple(x[rows] for x in self.tensors)
        self.prefix_mask = None if self.prefix_mask is None else self.prefix_mask[rows]
        self.shifted = {norm: x[rows] for norm, x in self.shifted.items()}


def sinusoidal_embedding(places: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return alternating sines and cosines (n, W) of positions or distances (n,) (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange(0, width, 2, device=places.device, dtype=torch.promote_types(dtype, torch.float32))
    angle = places[:, None] * 10_000.0 ** (-pairs / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].to(dtype)


def apply_rotary_embedding(x: Tensor, grid: Grid) -> Tensor:
    """Apply the rotary position embedding (Su et al. 2021) to x (…, n, D) at the positions of a grid."""
    at = grid, x.shape[-2], x.shape[-1], x.dtype, x.device
    sampling = not torch.is_grad_enabled() and torch.is_inference_mode_enabled()  # a compiler cannot trace the second
    if sampling:  # a step of it is mostly calls, and every layer needs the same factors
        return _rotate_pairs(x, *_cached_factors(*at))
    return _Rotation.apply(x, *_rotation_angles(*at))


def _rotation_angles(
    grid: Grid, count: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (n, D/2) of the angles of n positions."""
    half = width // 2
    wide = torch.promote_types(dtype, torch.float32)
    frequency = 10_000.0 ** (-torch.arange(half, device=device, dtype=wide) / half)
    angle = grid.first_positions(count, device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _widen(cos: Tensor, sin: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the factors (n, D) of each coordinate and of the one that it is rotated with."""
    rest = cos.new_ones(len(cos), width - 2 * cos.shape[-1])
    return torch.cat([cos, cos, rest], -1), torch.cat([-sin, sin, 0 * rest], -1)


@lru_cache(maxsize=4)
def _cached_factors(
    grid: Grid, count: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    return _widen(*_rotation_angles(grid, count, width, dtype, device), width)


class _Rotation(torch.autograd.Function):
    """Rotation of coordinates i and i + D/2 of x by angles with given cosines and sines (n, D/2).

    The backward pass is the opposite rotation. It takes three passes over x in place of seven, and as many backwards
    (dev/LOG.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, *_widen(cos, sin, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(gradient, *_widen(cos, -sin, gradient.shape[-1])), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    other = torch.cat([x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]], -1)
    return other.mul_(sin).addcmul_(x, cos)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Grid,
    keys: Grid,
    window: int | None = None,
    nearest: int = 0,
    dropout: float = 0.0,
    bias: Callable[[slice, slice], Tensor] | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention (B, H, n, D) of queries to the keys at their own positions and before.

    It is computed in blocks of queries, each with only the keys that it may see. On a CPU the plain products are used:
    forward and backward took a quarter of the time of PyTorch's flash kernel for windows of 128 and 256 chunks in
    bfloat16. A block of a sequence of more than 256 has 128 queries there, which skips nearly half of the square (1,024
    positions in float32 took half as long). On a GPU all queries are one block, or 1,024 where there is a window or a
    bias, which would fill the square.

    Args:
        q: (B, H, n, D). Scores are divided by √D.
        k: (B, H, m, D).
        v: (B, H, m, D).
        queries: positions of the queries; each must see a key.
        keys: positions of the keys.
        window: number of positions that a query sees, its own included; None: all before it.
        nearest: distance of the first key that a query sees; if there is none so far back, it sees the very first.
        dropout: dropout of the probabilities.
        bias: returns what is added to the scores (B, H, n', m') of a slice of the queries and one of the keys.
        visible: (B, m) false for keys that their sequence lacks.
    """
    if len(q) > _SEQUENCES and bias is None:
        masks = [None] * -(-len(q) // _SEQUENCES) if visible is None else visible.split(_SEQUENCES)
        pieces = zip(q.split(_SEQUENCES), k.split(_SEQUENCES), v.split(_SEQUENCES), masks, strict=True)
        return torch.cat(
            [attention(x, y, z, queries, keys, window, nearest, dropout, None, mask) for x, y, z, mask in pieces]
        )
    (*batch, n, width), m = q.shape, k.shape[2]
    if window is None and not nearest and bias is None and visible is None:
        if n == 1 and keys.count_up_to(queries.first) >= m:  # while sampling: nothing is hidden
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        if q.is_cuda and queries == keys and n == m:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    if q.is_cuda:
        size = n if window is None and bias is None else _CUDA_BLOCK
    else:
        size = n if window is None and n <= _WHOLE else _BLOCK
    parts = []
    for first in range(0, n, max(1, size)):
        rows, at = slice(first, min(n, first + size)), queries.skip_first(first)
        part, high = q[:, :, rows], keys.count_up_to(queries.position_at(min(n, first + size) - 1))
        low = 0 if window is None else keys.count_up_to(at.first - window)
        places = at.first_positions(part.shape[2], q.device)[:, None]
        back = places - keys.skip_first(low).first_positions(high - low, q.device)
        hidden = back < places.clamp(max=nearest)
        hidden = hidden if window is None else hidden | (back >= window)
        if visible is not None:
            hidden = hidden | ~visible[:, None, None, low:high]
        added = torch.zeros_like(hidden, dtype=q.dtype) if bias is None else bias(rows, slice(low, high))
        added = added.masked_fill(hidden, -torch.inf)
        if q.is_cuda:
            mixed = F.scaled_dot_product_attention(
                part, k[:, :, low:high], v[:, :, low:high], attn_mask=added, dropout_p=dropout
            )
        else:
            added = added.expand(*batch, -1, -1).flatten(0, 1)
            keys_seen = k[:, :, low:high].flatten(0, 1)
            scores = torch.baddbmm(added, part.flatten(0, 1), keys_seen.mT, alpha=width**-0.5)
            shares = F.dropout(scores.softmax(-1).to(v.dtype), dropout)
            mixed = (shares @ v[:, :, low:high].flatten(0, 1)).unflatten(0, batch)
        parts.append(mixed)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2) if parts else q


def full_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Compute attention of queries to all keys and values, each (B, H, T, D), for which `visible` (B, T) is true.

    At least one must be true for each sequence.
    """
    if len(q) > _SEQUENCES:
        pieces = zip(*(x.split(_SEQUENCES) for x in (q, k, v, visible)), strict=True)
        return torch.cat([full_attention(*piece) for piece in pieces])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None])


@dataclass(frozen=True)
class BlockOptions:
    """Sizes and kinds of a transformer block.

    Attributes:
        width: W.
        heads: H.
        head_width: D; H·D need not be W.
        ffn: hidden units of the feed-forward layer.
        attention: kind of attention, one of `haed.layers.transformer.ATTENTIONS`.
        dropout: dropout of what a block adds, and of the attention probabilities.
        activation: gelu or relu.
        shift: true for token shift; see `haed.layers.transformer.Norm`.
        window: positions that local attention sees.
        hashes: rounds of LSH attention.
        longest: number of positions of the longest sequence.
    """

    width: int
    heads: int
    head_width: int
    ffn: int
    attention: str = "plain"
    dropout: float = 0.0
    activation: str = "gelu"
    shift: bool = False
    window: int = 0
    hashes: int = 0
    longest: int = 0

    @classmethod
    def from_token_options(cls, options: TokenOptions, longest: int, **changes: Any) -> "BlockOptions":
        """Return the sizes of a token model's blocks for sequences of up to `longest` positions, with changes."""
        taken = {each.name: getattr(options, each.name) for each in fields(cls) if each.name != "longest"}
        return cls(**(taken | {"longest": longest} | changes))


class Attention(nn.Module):
    """Causal attention without position information ("plain").

    Attributes:
        projections: number of vectors that each input is projected to.
    """

    projections = 3

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        inner = options.heads * options.head_width
        self.heads, self.dropout = options.heads, options.dropout
        self.window: int | None = None
        self.nearest = 0
        self.qkv = nn.Linear(options.width, self.projections * inner)
        self.out = nn.Linear(inner, options.width)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attend from x (B, L, W) to itself and, if given, to the vectors before it."""
        q, k, v = self.split_heads(self.qkv(x))
        return self.out(self.attend(q, k, v, cache))

    def cross_attention(
        self, x: Tensor, source: Tensor, queries: Grid, keys: Grid, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attend from vectors (B, n, W) to others (B, m, W) and to those in the cache, which precede the others.

        Each vector sees those at its own position or before.
        """
        inner = self.out.in_features
        weights, biases = (each.split([inner, 2 * inner]) for each in (self.qkv.weight, self.qkv.bias))
        (q,) = self.split_heads(F.linear(x, weights[0], biases[0]))
        k, v = self.split_heads(F.linear(source, weights[1], biases[1]))
        return self.out(self.attend(q, k, v, cache, queries, keys))

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split (B, n, p·H·D) into p tensors (B, H, n, D)."""
        inner = self.out.in_features
        return x.unflatten(-1, (x.shape[-1] // inner, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KeyValueCache | None = None,
        queries: Grid | None = None,
        keys: Grid | None = None,
    ) -> Tensor:
        """Return the mixed values (B, n, H·D) of queries (B, H, n, D).

        Keys and values (B, H, m, D) follow those of the cache. By default queries and keys are the next positions.
        """
        following = Grid(cache.seen if cache is not None else 0)
        queries, keys = queries or following, keys or following
        q, k = self.add_positions(q, queries), self.add_positions(k, keys)
        if cache is not None:
            new = k.shape[2]
            k, v = cache.append(k, v, keep=None if self.window is None else -(-(self.window - 1) // keys.step))
            keys = keys.skip_first(new - k.shape[2])
        return self.mix_values(q, k, v, queries, keys, cache).transpose(1, 2).flatten(2)

    def add_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Return queries or keys (B, H, n, D) with their positions added; here unchanged."""
        return x

    def mix_values(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Grid,
        keys: Grid,
        cache: KeyValueCache | None,
        bias: Callable[[slice, slice], Tensor] | None = None,
    ) -> Tensor:
        """Call `attention` with the window, the nearest distance and the dropout of this layer."""
        visible = cache.visible_keys(k.shape[2]) if cache is not None else None
        dropout = self.dropout if self.training else 0.0
        return attention(q, k, v, queries, keys, self.window, self.nearest, dropout, bias, visible)


class Rotary(Attention):
    """Attention with rotary positions (Su et al. 2021)."""

    def add_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Rotate by angles in proportion to the positions."""
        return apply_rotary_embedding(x, grid)


class Local(Rotary):
    """Rotary attention to the last `window` positions, its own included, in time linear in the length."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options)
        self.window = options.window


class Relative(Attention):
    """Transformer-XL's attention (Dai et al. 2019, section 3.3): (q_i + u)·k_j + (q_i + v)·W_r R_{i−j}, scaled.

    R are sinusoids of the distance, as wide as the model. Each layer has its own u, v and W_r.
    """

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options)
        self.distance = nn.Linear(options.width, options.heads * options.head_width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(options.heads, 1, options.head_width))
        self.distance_bias = nn.Parameter(torch.zeros(options.heads, 1, options.head_width))

    def mix_values(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Grid,
        keys: Grid,
        cache: KeyValueCache | None,
        bias: Callable[[slice, slice], Tensor] | None = None,
    ) -> Tensor:
        """Compute the attention; see `Attention.mix_values`.

        The scores of distances are computed once for each distance, then shifted to their places.
        """
        if not q.shape[2]:
            return q
        table = self._distance_table(queries.position_at(q.shape[2] - 1) - keys.first + 1, cache)
        distance = (q + self.distance_bias) * q.shape[-1] ** -0.5

        def distance_scores(rows: slice, seen: slice) -> Tensor:
            first, those = queries.skip_first(rows.start), keys.skip_first(seen.start)
            return relative_shift(distance[:, :, rows], table, first, those, seen.stop - seen.start)

        return super().mix_values(q + self.content_bias, k, v, queries, keys, cache, distance_scores)

    def _distance_table(self, count: int, cache: KeyValueCache | None) -> Tensor:
        """Return W_r R (H, D, count) of the distances 0, 1, …, reusing the part that is cached."""
        known = cache.distances if cache is not None else None
        have = 0 if known is None else known.shape[2]
        if known is None or have < count:
            weight = self.distance.weight
            waves = sinusoidal_embedding(torch.arange(have, count, device=weight.device), weight.shape[1], weight.dtype)
            new = self.distance(waves).unflatten(-1, (self.heads, -1)).permute(1, 2, 0)
            known = new if known is None else torch.cat([known, new], 2)
        if cache is not None:
            cache.distances = known
        return known[..., :count]


def relative_shift(q: Tensor, table: Tensor, queries: Grid, keys: Grid, m: int) -> Tensor:
    """Return scores (B, H, n, m) of queries (B, H, n, D) for their distances from the first m keys.

    `table` (H, D, T) holds the vectors of the distances 0, 1, …. Each query is multiplied with each distance once. Row
    i, in the order of falling distances, is then read from i·step further left (the relative shift, Dai et al. 2019,
    appendix B). Scores of keys after the query are meaningless.
    """
    n = q.shape[2]
    far = queries.position_at(n - 1) - keys.first  # the largest distance, in column 0
    columns = max(far, (m - 1) * keys.step + queries.step) + 1
    by_distance = q @ F.pad(table[..., : far + 1].flip(-1), (0, columns - far - 1))  # (B, H, n, columns)
    *outer, row, column = by_distance.stride()
    strides = (*outer, row - queries.step * column, keys.step * column)
    return by_distance.as_strided((*q.shape[:2], n, m), strides, (n - 1) * queries.step * column)
