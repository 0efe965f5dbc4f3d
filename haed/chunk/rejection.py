"""Exact draws from the softmax over a large vocabulary, of which only a few hundred chunks are scored.

A chunk is proposed with weight exp(u), where u is an upper bound of its score s, and accepted with probability
exp(s − u). So an accepted chunk follows softmax(s) however loose the bound is, and no normaliser is computed. The bound
sees R directions D, orthonormal, instead of all E:

    s = q · k + b  ≤  u = (Dᵀq) · (Dᵀk) + |q − DDᵀq| · |k − DDᵀk| + b

by Cauchy and Schwarz. It reads about R / E of the keys, and memory is what a draw waits for. The directions are those in
which queries and keys vary most. Bad ones make draws slower, not wrong. Cf. Mussmann and Ermon 2016, who bound the
scores by an index of nearest neighbours; in 256 dimensions that bound excludes little.

Legend: N queries, C chunks, E width of an embedding, R directions, P proposals for each query.
"""

import torch
from torch import Tensor

LEAST = 1 << 14  # chunks: fewer are all scored, which takes no longer
_DIRECTIONS = 32
_PROPOSED, _ROUNDS = 256, 4
_AT_ONCE, _BLOCK = 32, 1 << 13  # queries, and chunks


class RejectionSampler:
    """Draws chunks of a vocabulary with the probabilities of a softmax over their scores.

    Args:
        keys: (C, E), see `haed.chunk.mixture.VocabularyScorer`.
        bias: (C,) terms that are added to the products.
        queries: (n, E) queries like those of the draws, which choose the directions.
    """

    @torch.no_grad()
    def __init__(self, keys: Tensor, bias: Tensor, queries: Tensor) -> None:
        self.keys, self.bias = keys, bias
        queries = queries.to(self.bias.dtype)
        some = self.keys[:: -(-len(self.keys) // _BLOCK)].to(queries.dtype)
        scatter = [x.t() @ x / x.square().sum().clamp(min=1e-30) for x in (queries, queries, some)]  # 2 : 1 is good
        self.directions = torch.linalg.eigh(sum(scatter)).eigenvectors[:, -_DIRECTIONS:].contiguous()
        # Rounding: a product of n terms is off by at most n·ε·|q|·|k|, here for both bound and score.
        self.rounding = 4 * queries.shape[1] * torch.finfo(queries.dtype).eps
        blocks = [self._project(block.to(queries.dtype)) for block in self.keys.split(_BLOCK)]
        self.columns = torch.cat(blocks).t().contiguous()

    def _project(self, vectors: Tensor) -> Tensor:
        """Return (n, R + 2): vectors (n, E) along the directions, the length of what is left, and their length."""
        along = vectors @ self.directions
        left = (vectors - along @ self.directions.t()).norm(dim=1, keepdim=True)
        return torch.cat([along, left, self.rounding**0.5 * vectors.norm(dim=1, keepdim=True)], 1)

    def bound_scores(self, queries: Tensor, scale: float = 1.0) -> Tensor:
        """Return upper bounds (N, C) of the scores of all chunks, with `scale` times the bias."""
        with torch.autocast(queries.device.type, enabled=False):
            return torch.addmm(self.bias, self._project(queries.to(self.bias.dtype)), self.columns, beta=scale)

    @torch.no_grad()
    def draw_rows(self, queries: Tensor, generator: torch.Generator | None, temperature: float = 1.0) -> Tensor:
        """Return the row (N,) of a chunk for each query, −1 where no proposal was accepted, on the CPU.

        Those need the scores of all chunks. Whether a query is one of them does not depend on what it would draw.

        Args:
            queries: (N, E).
            generator: random generator, on the CPU.
            temperature: divides the scores. The lower it is, the fewer proposals are accepted.
        """
        scale = 1 / temperature
        rows = torch.full((len(queries),), -1)
        for some in torch.arange(len(queries)).split(_AT_ONCE):
            wide = queries[some.to(queries.device)].to(self.bias.dtype) * scale
            bounds = self.bound_scores(wide, scale)
            passed = (bounds - bounds.amax(1, keepdim=True)).exp_().cumsum(1, dtype=torch.float64)
            for _ in range(_ROUNDS):
                chance = torch.rand(2, len(some), _PROPOSED, dtype=torch.float64, generator=generator).to(wide.device)
                place = torch.searchsorted(passed, chance[0] * passed[:, -1:], right=True)
                place = place.clamp(max=len(self.keys) - 1)  # beyond the last, if a bound is infinite or no number
                score = (self.keys[place].to(wide.dtype) * wide[:, None]).sum(2) + self.bias[place] * scale
                accepted = (chance[1].log() < score - bounds.gather(1, place)) & passed[:, -1:].isfinite()
                drawn = place.gather(1, accepted.int().argmax(1, keepdim=True)).squeeze(1)  # the first accepted
                rows[some] = drawn.where(accepted.any(1), -1).cpu()
                left = rows[some] < 0
                if not left.any():
                    break
                here = left.to(wide.device)
                some, wide, bounds, passed = some[left], wide[here], bounds[here], passed[here]
        return rows
