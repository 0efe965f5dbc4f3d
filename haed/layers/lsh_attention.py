"""Causal attention by locality-sensitive hashing, with rotary positions (Reformer: Kitaev et al. 2020, section 2).

In each of several rounds every position gets a bucket, by random rotations of its query. Queries serve as keys too,
normalised to unit length. Reformer sorts positions by bucket, cuts the sorted sequence into pieces and lets each see
its own and the one before. There, later positions move the cuts and so change what earlier ones see.

Here attention is exactly causal. A position sees, in each round, the last `window` positions of its own bucket, itself
included: a sliding window over the positions sorted by (bucket, position). The softmax runs over all positions seen in
any round, each once. A position sees itself only if there is no other, as in Reformer. Buckets are computed from
contents before positions are added. Their number depends on the longest sequence, not on each one.

Legend: B sequences, H heads, L positions, D width of a head, R rounds, w window.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.layers.attention import Attention, BlockOptions, Grid, KeyValueCache, apply_rotary_embedding

_SELF = -1e5  # negligible beside any score


class LSH(Attention):
    """LSH attention; see the module.

    The random rotations are a buffer (H, D, R·N/2) for N buckets, saved with the weights.
    """

    projections = 2  # queries, which are keys too, and values
    rotations: Tensor

    def __init__(self, options: BlockOptions) -> None:
        super().__init__(options)
        self.window: int = options.window
        self.rounds = options.hashes
        # Reformer: twice as many buckets as pieces, so that most fit into one.
        half = -(-options.longest // options.window)
        rotations = torch.empty(options.heads, options.head_width, options.hashes * half)
        self.register_buffer("rotations", nn.init.normal_(rotations))

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """See `Attention.forward`."""
        grid = Grid(cache.seen if cache is not None else 0)
        q, v = self.split_heads(self.qkv(x))
        buckets = self.assign_buckets(q)
        k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5
        q, k = apply_rotary_embedding(q, grid), apply_rotary_embedding(k, grid)
        if cache is not None:
            k, v, buckets = cache.append(k, v, buckets)
        mixed = self._attend_sorted(q, k, v, buckets) if grid.first == 0 else self._attend_pairwise(q, k, v, buckets)
        return self.out(mixed.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def assign_buckets(self, q: Tensor) -> Tensor:
        """Return the buckets (B, H, L, R) of queries (B, H, L, D).

        The bucket is the nearest axis, or opposite of an axis, after the round's rotation.
        """
        kind = q.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            turned = (q.to(self.rotations.dtype) @ self.rotations).unflatten(-1, (self.rounds, -1))
        return torch.cat([turned, -turned], -1).argmax(-1)

    def _sort_positions(self, buckets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions sorted by (bucket, position) and their codes, each (B, H, L, R).

        A position sees those whose code is less than w below its own. Codes are places in the order, with a gap of w or
        more between buckets. The lowest code is w, so that the zeros which fill up blocks are never seen.
        """
        length = buckets.shape[2]
        order = (buckets * length + torch.arange(length, device=buckets.device)[:, None]).argsort(2)
        codes = buckets * (length + self.window) + order.argsort(2) + self.window
        count = 2 * self.rotations.shape[-1] // self.rounds  # of buckets
        narrow = (count + 1) * (length + self.window) <= torch.iinfo(torch.int32).max
        return order, codes.int() if narrow else codes

    def _visible_mask(self, codes: Tensor, others: Tensor, each: int) -> Tensor:
        """Return a mask (…, n, m) of the positions seen in round `each`, by the codes (…, n, R) and (…, m, R)."""
        below = codes[..., :, None, each] - others[..., None, :, each]
        return (below >= 0) & (below < self.window)

    def _masked_scores(self, q: Tensor, k: Tensor, seen: Tensor, offset: int) -> Tensor:
        """Return the scores (…, n, m), float32 or wider, of the pairs in `seen`; key i + `offset` is query i itself."""
        itself = torch.zeros(seen.shape[-2:], dtype=q.dtype, device=q.device)
        itself.diagonal(offset).fill_(_SELF)
        scores = (q @ k.mT + itself).to(torch.promote_types(q.dtype, torch.float32))
        return scores.masked_fill(~seen, -torch.inf)

    def _attend_sorted(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        """Attend within a whole sequence, in time linear in its length: blocks of w sorted queries see 2·w keys."""
        order, codes = self._sort_positions(buckets)
        outputs, weights = [], []
        for each, place in enumerate(order.unbind(-1)):
            queries, keys, values, query_codes = (
                _split_blocks(_gather_positions(x, place), self.window) for x in (q, k, v, codes)
            )
            keys, values, key_codes = (torch.cat([_previous_blocks(x), x], 3) for x in (keys, values, query_codes))
            scores = self._masked_scores(queries, keys, self._visible_mask(query_codes, key_codes, each), self.window)
            elsewhere = [
                self._visible_mask(query_codes, key_codes, other) for other in range(self.rounds) if other != each
            ]
            if elsewhere:  # a pair that meets in several rounds counts once
                scores = scores - torch.stack(elsewhere).sum(0, dtype=scores.dtype).log1p()
            shares = scores.softmax(-1)
            weight = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log()  # logsumexp, with one exp less
            mixed = F.dropout(shares.to(values.dtype), self.dropout if self.training else 0.0) @ values
            back = place.argsort(2)
            outputs.append(_gather_positions(mixed.flatten(2, 3), back))
            weights.append(_gather_positions(weight.flatten(2, 3), back))
        return (torch.stack(weights).softmax(0).to(v.dtype) * torch.stack(outputs)).sum(0)

    def _attend_pairwise(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        """Attend from the last positions of a sequence, comparing all pairs."""
        codes, offset = self._sort_positions(buckets)[1], k.shape[2] - q.shape[2]
        rounds = [self._visible_mask(codes[:, :, offset:], codes, each) for each in range(self.rounds)]
        seen = torch.stack(rounds).any(0)
        shares = self._masked_scores(q, k, seen, offset).softmax(-1).to(v.dtype)
        return F.dropout(shares, self.dropout if self.training else 0.0) @ v


def _gather_positions(x: Tensor, place: Tensor) -> Tensor:
    """Return the positions `place` (B, H, n) of x (B, H, L, ·): (B, H, n, ·)."""
    return x.gather(2, place[..., None].expand(-1, -1, -1, x.shape[-1]))


def _split_blocks(x: Tensor, size: int) -> Tensor:
    """Split (B, H, L, ·) into blocks (B, H, L / w, w, ·), padded with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _previous_blocks(blocks: Tensor) -> Tensor:
    """Return the block before each block, zeros before the first."""
    return F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :, :-1]
