"""Pre-norm transformer blocks: for the chunk model, with a key/value cache, and for models of tokens.

Models of tokens use attention of any kind, dropout, and token shift.

Legend: B sequences, T or L positions, W width, H heads, D width of a head; H·D need not be W.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from haed.layers.attention import (
    Attention,
    AttentionCache,
    Grid,
    Local,
    Relative,
    Rotary,
    Shifted,
    apply_rotary_embedding,
)
from haed.layers.lsh_attention import LSH
from haed.options import TokenOptions


@dataclass
class PrefixKeyValues:
    """Further keys and values (B, H, P, D) that every position sees, except where `seen` (B, P) is false."""

    key: Tensor
    value: Tensor
    seen: Tensor

    def select_rows(self, rows: Tensor) -> "PrefixKeyValues":
        """Return those of the selected sequences; `rows` is a mask (B,) or their indices."""
        return PrefixKeyValues(self.key[rows], self.value[rows], self.seen[rows])


class KeyValueCache:
    """Cache of the keys and values of the positions seen so far, one pair of (B, H, T, D) per block."""

    def __init__(self, layers: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def count_positions(self, layer: int = 0) -> int:
        """Return the number of positions that a block has seen."""
        pair = self.layers[layer]
        return 0 if pair is None else pair[0].shape[2]

    def append_key_value(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values and return all of them."""
        past = self.layers[layer]
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        self.layers[layer] = (key, value)
        return key, value

    def select_rows(self, rows: Tensor) -> None:
        """Keep only the selected sequences; `rows` is a mask (B,) or their indices."""
        self.layers = [None if pair is None else (pair[0][rows], pair[1][rows]) for pair in self.layers]


_SEQUENCES = 65_535  # per call: the limit of CUDA's grid along the axis that PyTorch's kernels use


def causal_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Compute attention of the last queries (B, H, t, D) of a sequence to its keys and values (B, H, T, D), t ≤ T.

    Keys for which `seen` (B, T) is false are left out. On a CPU the plain products are used. Forward and backward took
    a quarter of the time of PyTorch's flash kernel for windows of 128 and 256 chunks in bfloat16.
    """
    if len(q) > _SEQUENCES:
        rest = itertools.repeat(None) if seen is None else seen.split(_SEQUENCES)
        parts = zip(q.split(_SEQUENCES), k.split(_SEQUENCES), v.split(_SEQUENCES), rest, strict=False)
        return torch.cat([causal_attention(*part) for part in parts])
    past = k.shape[2] - q.shape[2]
    if q.shape[2] == 1 and seen is None:  # while sampling: nothing is hidden
        return F.scaled_dot_product_attention(q, k, v)
    if q.device.type != "cpu" and past == 0 and seen is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    hidden = torch.full((q.shape[2], k.shape[2]), -torch.inf, dtype=q.dtype, device=q.device).triu(past + 1)
    if seen is not None:
        hidden = hidden.masked_fill(~seen[:, None, None], -torch.inf)  # (B, 1, t, T)
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)
    batch = q.shape[:2]
    hidden = hidden.expand(*batch, -1, -1).flatten(0, 1)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scores = torch.baddbmm(hidden, q, k.mT, alpha=q.shape[-1] ** -0.5)
    return (scores.softmax(-1).to(v.dtype) @ v).unflatten(0, batch)


def full_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute attention of queries to all keys and values, each (B, H, T, D), for which `seen` (B, T) is true.

    At least one must be true for each sequence.
    """
    if len(q) > _SEQUENCES:
        parts = zip(*(x.split(_SEQUENCES) for x in (q, k, v, seen)), strict=True)
        return torch.cat([full_attention(*part) for part in parts])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


class SelfAttention(nn.Module):
    """Causal self-attention on (B, T, W)."""

    def __init__(self, width: int, heads: int, head_width: int, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.qkv = nn.Linear(width, 3 * heads * head_width)
        self.out = nn.Linear(heads * head_width, width)

    def split_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, T, 3·H·D) into queries, keys and values, each (B, H, T, D)."""
        q, k, v = x.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def cached_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KeyValueCache | None = None,
        layer: int = 0,
        before: PrefixKeyValues | None = None,
    ) -> Tensor:
        """Compute the attention of new positions (B, H, T, D), which follow those of the cache: (B, T, H·D).

        All positions see `before`.
        """
        if self.rotary:
            past = cache.count_positions(layer) if cache is not None else 0
            q, k = apply_rotary_embedding(torch.stack([q, k]), Grid(past)).unbind(0)
        if cache is not None:
            k, v = cache.append_key_value(layer, k, v)
        seen = None
        if before is not None:
            seen = torch.cat([before.seen, before.seen.new_ones(len(q), k.shape[2])], 1)
            k, v = torch.cat([before.key, k], 2), torch.cat([before.value, v], 2)
        return causal_attention(q, k, v, seen).transpose(1, 2).flatten(2)

    def forward(
        self, x: Tensor, cache: KeyValueCache | None = None, layer: int = 0, before: PrefixKeyValues | None = None
    ) -> Tensor:
        """Attend from x (B, T, W) to itself, to the cached positions before it and to `before`; see `attend`."""
        return self.out(self.cached_attention(*self.split_heads(self.qkv(x)), cache, layer, before))


class Block(nn.Module):
    """Attention and a GELU feed-forward layer, each after a layer norm and with a residual connection."""

    def __init__(self, width: int, heads: int, head_width: int, ffn: int, rotary: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, head_width, rotary)
        self.ffn_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn)
        self.down = nn.Linear(ffn, width)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Apply the position-wise half of the block, residual included."""
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))

    def forward(
        self, x: Tensor, cache: KeyValueCache | None = None, layer: int = 0, before: PrefixKeyValues | None = None
    ) -> Tensor:
        """Map (B, T, W) to (B, T, W); position t sees positions up to t, and `before`, see `SelfAttention.cached_attention`."""
        x = x + self.attention(self.attention_norm(x), cache, layer, before)
        return self.feed_forward(x)

    def forward_packed(
        self, x: Tensor, sizes: list[int], before: PrefixKeyValues | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """Apply `forward`, without a cache, to sequences in a packed layout; padding exists inside attention only.

        Args:
            x: (S, W) rows in time-major order, the longest sequence first.
            sizes: number of sequences that have a place t, for each t.
            before: see `SelfAttention.cached_attention`.
            seen: (B, T) true within each sequence. If given, every place sees all of its sequence, and `before` is
                ignored.
        """
        if not sizes:  # nothing to do on this rank; the gradients must still exist, as zeros
            return self(x[:, None], before=before).squeeze(1)
        attention = self.attention
        qkv = PackedSequence(attention.qkv(self.attention_norm(x)), torch.tensor(sizes, dtype=torch.long))
        grid, lengths = pad_packed_sequence(qkv, batch_first=True)
        q, k, v = attention.split_heads(grid)
        if seen is None:
            mixed = attention.cached_attention(q, k, v, before=before)
        else:
            mixed = full_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        x = x + attention.out(pack_padded_sequence(mixed, lengths, batch_first=True).data)
        return self.feed_forward(x)

    def weight_matrices(self) -> list[Tensor]:
        """Return the weights that every position is multiplied by."""
        return [self.attention.qkv.weight, self.attention.out.weight, self.up.weight, self.down.weight]


class Blocks(nn.ModuleList):
    """A sequence of `layers` blocks; the other arguments are the sizes that `Block` takes."""

    def __init__(self, layers: int, width: int, heads: int, head_width: int, ffn: int, rotary: bool) -> None:
        super().__init__(Block(width, heads, head_width, ffn, rotary) for _ in range(layers))

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks from the input to the output."""
        return super().__iter__()  # type: ignore[return-value]


ATTENTIONS: dict[str, type[Attention]] = {
    "plain": Attention,
    "rotary": Rotary,
    "relative": Relative,
    "local": Local,
    "lsh": LSH,
}


class Norm(nn.LayerNorm):
    """The layer norm before attention or feed-forward, with token shift if `model.token.shift` is set.

    Token shift (Peng et al. 2023, RWKV): the second half of the channels is taken from the position before, zeros for
    the first.
    """

    def __init__(self, options: TokenOptions) -> None:
        super().__init__(options.width)
        self.shift = options.shift

    def forward(self, x: Tensor, last: Shifted | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W).

        `last` holds this norm's previous output and is updated; None means that there is nothing before.
        """
        x = super().forward(x)
        if not self.shift:
            return x
        now, late = x.tensor_split([x.shape[2] // 2], 2)
        before = late.new_zeros(len(x), 1, late.shape[2]) if last is None or self not in last else last[self]
        late = torch.cat([before, late], 1)
        if last is not None:
            last[self] = late[:, -1:]
        return torch.cat([now, late[:, :-1]], 2)


class FeedForward(nn.Module):
    """Norm, hidden layer, activation and dropout with a residual connection, as they follow every attention."""

    def __init__(self, options: TokenOptions) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.gelu if options.activation == "gelu" else F.relu
        self.norm = Norm(options)
        self.up = nn.Linear(options.width, options.ffn)
        self.down = nn.Linear(options.ffn, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, last: Shifted | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W), each position by itself or, shifted, with the one before; see `Norm`."""
        hidden = self.dropout(self.activation(self.up(self.norm(x, last))))
        return x + self.dropout(self.down(hidden))


class Layer(nn.Module):
    """Attention and feed-forward, each after a layer norm and with a residual connection.

    Args:
        options: sizes and dropout.
        kind: kind of attention, one of `ATTENTIONS`.
        longest: number of positions of the longest sequence.
    """

    def __init__(self, options: TokenOptions, kind: str, longest: int) -> None:
        super().__init__()
        self.norm = Norm(options)
        self.attention = ATTENTIONS[kind](options, longest)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, past: AttentionCache | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W); position t sees positions up to t, and those in the past."""
        last = past.last if past is not None else None
        return self.feed_forward(x + self.dropout(self.attention(self.norm(x, last), past)), last)


class CrossLayer(nn.Module):
    """A layer whose vectors attend to others, such as those of another level; it takes the arguments of `Layer`."""

    def __init__(self, options: TokenOptions, kind: str, longest: int) -> None:
        super().__init__()
        self.norm, self.source_norm = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = ATTENTIONS[kind](options, longest)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, source: Tensor, queries: Grid, keys: Grid, past: AttentionCache) -> Tensor:
        """Map (B, n, W) to (B, n, W) by attending to others (B, m, W), which follow the past.

        See `Attention.cross_attention`.
        """
        found = self.attention.cross_attention(self.norm(x), self.source_norm(source), queries, keys, past)
        return self.feed_forward(x + self.dropout(found), past.last)


class Stack(nn.ModuleList):
    """A sequence of layers, which may be empty."""

    def __init__(self, options: TokenOptions, kind: str, layers: int, longest: int) -> None:
        super().__init__(Layer(options, kind, longest) for _ in range(layers))

    def create_memory(self) -> list[AttentionCache]:
        """Return an empty cache for each layer."""
        return [AttentionCache() for _ in self]

    def forward(self, x: Tensor, memory: list[AttentionCache] | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W); with a memory, x follows the positions seen before, and L may be 0."""
        for number, layer in enumerate(self):
            x = layer(x, memory[number] if memory is not None else None) if x.shape[1] else x
        return x


@torch.no_grad()
def scale_residual_init(module: nn.Module) -> None:
    """Divide the matrices that end a residual branch by the root of their number, so that depth adds no variance.

    This is as in GPT-2 (Radford et al. 2019, section 2.3). With attention and feed-forward in n layers the divisor is
    √(2·n).
    """
    ends = [each.out for each in module.modules() if isinstance(each, Attention)]
    ends += [each.down for each in module.modules() if isinstance(each, FeedForward)]
    for end in ends:
        end.weight /= len(ends) ** 0.5
