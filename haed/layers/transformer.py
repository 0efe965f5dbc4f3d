"""Pre-norm transformer blocks, with caches, packed sequences, attention of any kind, dropout, and token shift.

Legend: B sequences, T or L positions, W width, H heads, D width of a head; H·D need not be W.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from haed.layers.attention import Attention, BlockOptions, Grid, KeyValueCache, Local, Relative, Rotary, full_attention
from haed.layers.lsh_attention import LSH

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

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options.width)
        self.shift = options.shift

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W); the cache, which is updated, holds this norm's previous output."""
        x = super().forward(x)
        if not self.shift:
            return x
        now, late = x.tensor_split([x.shape[2] // 2], 2)
        before = cache.shifted.get(self) if cache is not None else None
        late = torch.cat([late.new_zeros(len(x), 1, late.shape[2]) if before is None else before, late], 1)
        if cache is not None:
            cache.shifted[self] = late[:, -1:]
        return torch.cat([now, late[:, :-1]], 2)


class FeedForward(nn.Module):
    """Norm, hidden layer, activation and dropout with a residual connection, as they follow every attention."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = F.gelu if options.activation == "gelu" else F.relu
        self.norm = Norm(options)
        self.up = nn.Linear(options.width, options.ffn)
        self.down = nn.Linear(options.ffn, options.width)
        self.dropout = nn.Dropout(options.dropout)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map (…, W) to (…, W), each position by itself; with token shift (B, L, W), see `Norm`."""
        hidden = self.dropout(self.activation(self.up(self.norm(x, cache))))
        return x + self.dropout(self.down(hidden))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a layer norm and with a residual connection."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.norm = Norm(options)
        self.attention = ATTENTIONS[options.attention](options)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W); position t sees positions up to t, and those in the cache."""
        return self.feed_forward(x + self.dropout(self.attention(self.norm(x, cache), cache)), cache)

    def forward_packed(
        self, x: Tensor, sizes: list[int], cache: KeyValueCache | None = None, visible: Tensor | None = None
    ) -> Tensor:
        """Apply the block to sequences in a packed layout; padding exists inside attention only.

        Args:
            x: (S, W) rows in time-major order, the longest sequence first.
            sizes: number of sequences that have a place t, for each t.
            cache: cache with nothing but a prefix, which all places see.
            visible: (B, T) true within each sequence. If given, every place sees all of its sequence, and the cache is
                ignored.
        """
        if not sizes:  # nothing to do on this rank; the gradients must still exist, as zeros
            return self.forward(x[:, None], cache).squeeze(1).clone()  # a sharded block may return no view
        qkv = PackedSequence(self.attention.qkv(self.norm(x)), torch.tensor(sizes, dtype=torch.long))
        grid, lengths = pad_packed_sequence(qkv, batch_first=True)
        q, k, v = self.attention.split_heads(grid)
        if visible is None:
            mixed = self.attention.attend(q, k, v, cache)
        else:
            mixed = full_attention(q, k, v, visible).transpose(1, 2).flatten(2)
        mixed = pack_padded_sequence(mixed, lengths, batch_first=True).data
        return self.feed_forward(x + self.dropout(self.attention.out(mixed)))

    def project(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values (S, 3·W) of vectors (S, W) together; `Attention.split_heads` parts them."""
        projected: Tensor = self.attention.qkv(self.norm(x))
        return projected


class CrossBlock(nn.Module):
    """A block whose vectors attend to others, such as those of another level."""

    def __init__(self, options: BlockOptions) -> None:
        super().__init__()
        self.norm, self.source_norm = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = ATTENTIONS[options.attention](options)
        self.dropout = nn.Dropout(options.dropout)
        self.feed_forward = FeedForward(options)

    def forward(self, x: Tensor, source: Tensor, queries: Grid, keys: Grid, cache: KeyValueCache) -> Tensor:
        """Map (B, n, W) to (B, n, W) by attending to others (B, m, W), which follow the cache.

        See `Attention.cross_attention`.
        """
        added = self.attention.cross_attention(self.norm(x), self.source_norm(source), queries, keys, cache)
        return self.feed_forward(x + self.dropout(added), cache)


class TransformerStack(nn.ModuleList):
    """A sequence of blocks, which may be empty."""

    def __init__(self, layers: int, options: BlockOptions) -> None:
        super().__init__(TransformerBlock(options) for _ in range(layers))

    def __iter__(self) -> Iterator[TransformerBlock]:
        """Iterate over the blocks from the input to the output."""
        return super().__iter__()  # type: ignore[return-value]

    def create_cache(self) -> list[KeyValueCache]:
        """Return an empty cache for each block."""
        return [KeyValueCache() for _ in self]

    def forward(self, x: Tensor, cache: list[KeyValueCache] | None = None) -> Tensor:
        """Map (B, L, W) to (B, L, W); with a cache, x follows the positions seen before, and L may be 0."""
        for number, block in enumerate(self):
            x = block(x, cache[number] if cache is not None else None) if x.shape[1] else x
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
