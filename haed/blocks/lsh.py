"""Attention by locality-sensitive hashing (Reformer: Kitaev et al. 2020, section 2), made exactly causal, with rotary positions.

In each of some rounds every position gets a bucket, by random rotations of its query; queries serve as keys too, these of unit
length. Reformer sorts positions by bucket, cuts the sorted sequence into pieces and lets each see its own and the one before,
so that later positions move the cuts and with them what earlier ones see. Here a position sees, in each round, the last
`window` positions of its own bucket, itself included: a sliding window over the positions sorted by (bucket, position). The
softmax runs over all that it sees in any round, each position once; itself it sees only where there is nothing else, as in
Reformer. Buckets belong to contents before positions are worked in, and their number to the longest sequence, not to each.

Legend: B sequences, H heads, L positions, D width of a head, R rounds, w window.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.blocks.attention import Attention, Grid, Past, rotated
from haed.options import TokenOptions

_SELF, _HIDDEN = -1e5, -1e9  # beside any score: exp of their difference is 0


class LSH(Attention):
    """See the module. The random rotations are a buffer (H, D, R·N/2) for N buckets, saved with the weights."""

    rotations: Tensor

    def __init__(self, options: TokenOptions, longest: int) -> None:
        super().__init__(options, longest)
        del self.key_value
        self.value = nn.Linear(options.width, self.out.in_features)
        self.window: int = options.window
        self.rounds = options.hashes
        half = -(-longest // options.window)  # Reformer: twice as many buckets as pieces, so that most fit into one
        rotations = torch.randn(options.heads, options.head_width, options.hashes * half)
        self.register_buffer("rotations", rotations)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        """See `Attention.forward`."""
        grid = Grid(past.seen if past is not None else 0)
        (q,), (v,) = self.split(self.query(x)), self.split(self.value(x))
        buckets = self.buckets(q)
        k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5
        q, k = rotated(q, grid), rotated(k, grid)
        if past is not None:
            k, v, buckets = past.extend(k, v, buckets)
        mixed = self._sorted(q, k, v, buckets) if grid.first == 0 else self._pairwise(q, k, v, buckets)
        return self.out(mixed.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def buckets(self, q: Tensor) -> Tensor:
        """(B, H, L, R) integers of queries (B, H, L, D): which of the axes and their opposites is nearest, once rotated."""
        kind = q.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
            turned = (q.to(self.rotations.dtype) @ self.rotations).unflatten(-1, (self.rounds, -1))
        return torch.cat([turned, -turned], -1).argmax(-1)

    def _order(self, buckets: Tensor) -> tuple[Tensor, Tensor]:
        """Positions sorted by (bucket, position), and codes of positions, each (B, H, L, R).

        A position sees those whose code is less than w below its own: codes are places in the order, with a gap of w or more
        between buckets; the lowest is w, out of sight of the zeros that fill up blocks.
        """
        length = buckets.shape[2]
        order = (buckets * length + torch.arange(length, device=buckets.device)[:, None]).argsort(2)
        return order, (buckets * (length + self.window) + order.argsort(2) + self.window).int()

    def _seen(self, below: Tensor) -> Tensor:
        return (below >= 0) & (below < self.window)

    def _scores(self, q: Tensor, k: Tensor, seen: Tensor, itself: Tensor) -> Tensor:
        """Scores (…, n, m), float32 or wider, of pairs that are `seen` and of those of a position with itself."""
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        return (scores + _SELF * itself).masked_fill(~seen, _HIDDEN)

    def _sorted(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        """Of a whole sequence, in time linear in its length: in sorted order, blocks of w queries see 2·w keys."""
        order, codes = self._order(buckets)
        outputs, weights = [], []
        for each, place in enumerate(order.unbind(-1)):
            queries, keys, values, mine = (_blocks(_taken(x, place), self.window) for x in (q, k, v, codes))
            keys, values, theirs = (torch.cat([_before(x), x], 3) for x in (keys, values, mine))
            below = mine[..., None, :] - theirs[..., None, :, :]
            seen = self._seen(below)  # in each round; a pair that meets in several counts once in all
            scores = self._scores(queries, keys, seen[..., each], below[..., each] == 0)
            scores = scores - seen.sum(-1).clamp(min=1).to(scores.dtype).log()
            weight = scores.logsumexp(-1, keepdim=True)
            shares = F.dropout((scores - weight).exp().to(values.dtype), self.dropout if self.training else 0.0)
            back = place.argsort(2)
            outputs.append(_taken((shares @ values).flatten(2, 3), back))
            weights.append(_taken(weight.flatten(2, 3), back))
        mixed = torch.stack(weights).softmax(0).to(v.dtype) * torch.stack(outputs)
        return mixed.sum(0)

    def _pairwise(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor) -> Tensor:
        """Of the last positions of a sequence, pair by pair."""
        codes = self._order(buckets)[1]
        below = codes[:, :, -q.shape[2] :, None] - codes[:, :, None]
        scores = self._scores(q, k, self._seen(below).any(-1), below[..., 0] == 0)
        return F.dropout(scores.softmax(-1).to(v.dtype), self.dropout if self.training else 0.0) @ v


def _taken(x: Tensor, place: Tensor) -> Tensor:
    """Of x (B, H, L, ·), positions (B, H, n): (B, H, n, ·)."""
    return x.gather(2, place[..., None].expand(-1, -1, -1, x.shape[-1]))


def _blocks(x: Tensor, size: int) -> Tensor:
    """(B, H, L, ·) in blocks (B, H, L / w, w, ·), filled up with zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _before(blocks: Tensor) -> Tensor:
    """The block before each, zeros before the first."""
    return F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :, :-1]
