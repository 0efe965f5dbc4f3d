"""Causal attention between vectors at positions of one sequence: plain, rotary, local, relative.

The positions need not be adjacent: a sequence shortened by k has a vector at every k-th position of the finer one. So
the same code attends within a level and between two levels. LSH attention is in `haed.layers.lsh_attention`.

Legend: B sequences, L positions, n queries, m keys, W width, H heads, D width of a head; H·D need not be W.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.options import TokenOptions

_BLOCK, _CUDA_BLOCK = 128, 1024  # queries per block


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


Shifted = dict[nn.Module, Tensor]  # (B, 1, ·) of each norm that shifts: see `haed.layers.transformer.Norm`


class AttentionCache:
    """Cache of an attention layer: tensors (B, H, T, ·) of the vectors seen so far, such as their keys and values."""

    def __init__(self) -> None:
        self.seen = 0
        self.held: tuple[Tensor, ...] = ()
        self.table: Tensor | None = None  # relative attention: (H, D, T) cached vectors of distances
        self.last: Shifted = {}

    def append_tensors(self, *new: Tensor, keep: int | None = None) -> tuple[Tensor, ...]:
        """Append tensors of new vectors and return the whole cache; only the last `keep` vectors stay in it."""
        found = tuple(torch.cat(pair, 2) for pair in zip(self.held, new, strict=True)) if self.held else new
        self.seen += new[0].shape[2]
        self.held = found if keep is None else tuple(x[:, :, max(0, x.shape[2] - keep) :] for x in found)
        return found


def sinusoidal_embedding(places: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return alternating sines and cosines (n, W) of positions or distances (n,) (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange(0, width, 2, device=places.device, dtype=torch.promote_types(dtype, torch.float32))
    angle = places[:, None] * 10_000.0 ** (-pairs / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].to(dtype)


def apply_rotary_embedding(x: Tensor, grid: Grid) -> Tensor:
    """Apply the rotary position embedding (Su et al. 2021) to x (…, n, D) at the positions of a grid."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = grid.first_positions(x.shape[-2], x.device)[:, None] * frequency
    return _Rotation.apply(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))


class _Rotation(torch.autograd.Function):
    """Rotation of coordinates i and i + D/2 of x by angles with given cosines and sines (n, D/2).

    The backward pass is the opposite rotation. It takes three passes over x in place of seven, and as many backwards
    (dev/LOG.md).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_pairs(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_pairs(gradient, cos, -sin), None, None


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    one, zero = x.new_ones(len(cos), x.shape[-1] - 2 * half), x.new_zeros(len(cos), x.shape[-1] - 2 * half)
    other = torch.cat([x[..., half : 2 * half], x[..., :half], x[..., 2 * half :]], -1)
    return other.mul_(torch.cat([-sin, sin, zero], -1)).addcmul_(x, torch.cat([cos, cos, one], -1))


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
) -> Tensor:
    """Compute softmax attention (B, H, n, D) of queries to the keys at their own positions and before.

    It is computed in blocks of queries, each with only the keys that it may see. On a CPU a block has 128 queries,
    which skips nearly half of the square. (1,024 positions in float32 took half as long, as much as PyTorch's flash
    kernel.) On a GPU all queries are one block, or 1,024 where there is a window or a bias, which would fill the
    square.

    Args:
        q: (B, H, n, D), scaled.
        k: (B, H, m, D).
        v: (B, H, m, D).
        queries: positions of the queries; each must see a key.
        keys: positions of the keys.
        window: number of positions that a query sees, its own included; None: all before it.
        nearest: distance of the first key that a query sees; if there is none so far back, it sees the very first.
        dropout: dropout of the probabilities.
        bias: returns what is added to the scores (B, H, n', m') of a slice of the queries and one of the keys.
    """
    batch, n = q.shape[:2], q.shape[2]
    if q.is_cuda and queries == keys and n == k.shape[2] and window is None and not nearest and bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=1.0)
    size, parts = _BLOCK if not q.is_cuda else n if window is None and bias is None else _CUDA_BLOCK, []
    for first in range(0, n, max(1, size)):
        rows, at = slice(first, min(n, first + size)), queries.skip_first(first)
        part, high = q[:, :, rows], keys.count_up_to(queries.position_at(min(n, first + size) - 1))
        low = 0 if window is None else keys.count_up_to(at.first - window)
        places = at.first_positions(part.shape[2], q.device)[:, None]
        back = places - keys.skip_first(low).first_positions(high - low, q.device)
        hidden = back < places.clamp(max=nearest)
        hidden = hidden if window is None else hidden | (back >= window)
        added = torch.zeros_like(hidden, dtype=q.dtype) if bias is None else bias(rows, slice(low, high))
        added = added.masked_fill(hidden, -torch.inf)
        if q.is_cuda:
            found = F.scaled_dot_product_attention(
                part, k[:, :, low:high], v[:, :, low:high], attn_mask=added, dropout_p=dropout, scale=1.0
            )
        else:
            added = added.expand(*batch, -1, -1).flatten(0, 1)
            scores = torch.baddbmm(added, part.flatten(0, 1), k[:, :, low:high].flatten(0, 1).mT)
            shares = F.dropout(scores.softmax(-1).to(v.dtype), dropout)
            found = (shares @ v[:, :, low:high].flatten(0, 1)).unflatten(0, batch)
        parts.append(found)
    return torch.cat(parts, 2) if parts else q


class Attention(nn.Module):
    """Causal attention without position information ("plain").

    Args:
        options: sizes, dropout of the probabilities.
        longest: number of positions of the longest sequence.
    """

    def __init__(self, options: TokenOptions, longest: int) -> None:
        super().__init__()
        inner = options.heads * options.head_width
        self.heads, self.dropout = options.heads, options.dropout
        self.window: int | None = None
        self.nearest = 0
        self.query = nn.Linear(options.width, inner)
        self.key_value = nn.Linear(options.width, 2 * inner)
        self.out = nn.Linear(inner, options.width)

    def forward(self, x: Tensor, past: AttentionCache | None = None) -> Tensor:
        """Attend from x (B, L, W) to itself and, if given, to the vectors before it."""
        grid = Grid(past.seen if past is not None else 0)
        return self.cross_attention(x, x, grid, grid, past)

    def cross_attention(
        self, x: Tensor, source: Tensor, queries: Grid, keys: Grid, past: AttentionCache | None = None
    ) -> Tensor:
        """Attend from vectors (B, n, W) to others (B, m, W) and the past before those.

        Each vector sees those at its own position or before.
        """
        (q,), (k, v) = self.split_heads(self.query(x)), self.split_heads(self.key_value(source))
        q, k = self.add_positions(q * q.shape[-1] ** -0.5, queries), self.add_positions(k, keys)
        if past is not None:
            new = k.shape[2]
            k, v = past.append_tensors(k, v, keep=None if self.window is None else -(-(self.window - 1) // keys.step))
            keys = keys.skip_first(new - k.shape[2])
        return self.out(self.combine_heads(q, k, v, queries, keys, past).transpose(1, 2).flatten(2))

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split (B, n, p·H·D) into p tensors (B, H, n, D)."""
        inner = self.out.in_features
        return x.unflatten(-1, (x.shape[-1] // inner, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def add_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Return queries or keys (B, H, n, D) with their positions added; here unchanged."""
        return x

    def combine_heads(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid, past: AttentionCache | None
    ) -> Tensor:
        """Compute the attention (B, H, n, D); see `attend`."""
        return self.windowed_attention(q, k, v, queries, keys)

    def windowed_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Grid,
        keys: Grid,
        bias: Callable[[slice, slice], Tensor] | None = None,
    ) -> Tensor:
        """Call `attend` with the window, the nearest distance and the dropout of this layer."""
        return attention(
            q, k, v, queries, keys, self.window, self.nearest, self.dropout if self.training else 0.0, bias
        )


class Rotary(Attention):
    """Attention with rotary positions (Su et al. 2021)."""

    def add_positions(self, x: Tensor, grid: Grid) -> Tensor:
        """Rotate by angles in proportion to the positions."""
        return apply_rotary_embedding(x, grid)


class Local(Rotary):
    """Rotary attention to the last `window` positions, its own included, in time linear in the length."""

    def __init__(self, options: TokenOptions, longest: int) -> None:
        super().__init__(options, longest)
        self.window = options.window


class Relative(Attention):
    """Transformer-XL's attention (Dai et al. 2019, section 3.3): (q_i + u)·k_j + (q_i + v)·W_r R_{i−j}, scaled.

    R are sinusoids of the distance, as wide as the model. Each layer has its own u, v and W_r.
    """

    def __init__(self, options: TokenOptions, longest: int) -> None:
        super().__init__(options, longest)
        self.distance = nn.Linear(options.width, options.heads * options.head_width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(options.heads, 1, options.head_width))
        self.distance_bias = nn.Parameter(torch.zeros(options.heads, 1, options.head_width))

    def combine_heads(
        self, q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid, past: AttentionCache | None
    ) -> Tensor:
        """Compute the attention; see `attend`.

        The scores of distances are computed once for each distance, then shifted to their places.
        """
        if not q.shape[2]:
            return q
        scale = q.shape[-1] ** -0.5
        table = self._distance_table(queries.position_at(q.shape[2] - 1) - keys.first + 1, past)
        content, distance = q + self.content_bias * scale, q + self.distance_bias * scale

        def bias(rows: slice, seen: slice) -> Tensor:
            first, those = queries.skip_first(rows.start), keys.skip_first(seen.start)
            return relative_shift(distance[:, :, rows], table, first, those, seen.stop - seen.start)

        return self.windowed_attention(content, k, v, queries, keys, bias)

    def _distance_table(self, count: int, past: AttentionCache | None) -> Tensor:
        """Return W_r R (H, D, count) of the distances 0, 1, …, reusing the part that is cached in `past`."""
        known = past.table if past is not None else None
        have = 0 if known is None else known.shape[2]
        if known is None or have < count:
            weight = self.distance.weight
            waves = sinusoidal_embedding(torch.arange(have, count, device=weight.device), weight.shape[1], weight.dtype)
            new = self.distance(waves).unflatten(-1, (self.heads, -1)).permute(1, 2, 0)
            known = new if known is None else torch.cat([known, new], 2)
        if past is not None:
            past.table = known
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
