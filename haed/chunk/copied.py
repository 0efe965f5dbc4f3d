"""Chunks copied from the same document: a cache of states that points to what followed them.

    r(c) ∝ Σ_{i < t, c_i = c} exp(θ · h_t · h_i)

over the last N chunks of the document; h is ŷ of a place at unit length, so h_i predicted c_i. It sums to one over the
chunks of the cache, also those that no vocabulary has. Cf. Grave et al. 2017 (continuous cache) and Merity et al. 2017
(pointer sentinel), over tokens.

Legend: N chunks that are scored, P chunks in the cache, W width of ŷ, K tokens of a chunk.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from haed.chunk.memory import Part, PartPrediction, PartScores
from haed.chunk.packing import Chunks, chunk_keys

SHARPNESS = 12.0  # θ: 8 and 20 are worse (dev/LOG.md)
_BLOCK = 512  # chunks that are scored at a time


class Copied(Part):
    """The cache of one document.

    Args:
        most: maximum number of chunks that are remembered; older ones are forgotten.
        sharpness: θ.

    It says of itself the largest similarity, and the logarithm of the number of chunks in the cache.
    """

    name = "copied"
    features = 2

    def __init__(self, most: int, sharpness: float = SHARPNESS) -> None:
        self.most, self.sharpness = most, sharpness
        self.states = torch.zeros(0, 0)  # (P, W) at unit length
        self.chunks = Chunks.empty(0)

    def score(self, states: Tensor, chunks: Chunks) -> PartScores:
        """See `Part.score`."""
        blocks = [
            self._score_block(some, chunks[torch.arange(first, first + len(some))])
            for first, some in zip(range(0, len(states), _BLOCK), states.split(_BLOCK), strict=True)
        ]
        return PartScores(
            *(torch.cat([getattr(each, name) for each in blocks]) for name in ("log_prob", "features", "present"))
        )

    def _score_block(self, states: Tensor, chunks: Chunks) -> PartScores:
        count, past = len(chunks), len(self.chunks)
        self._append_chunks(states, chunks)
        keys = chunk_keys(self.chunks.tokens, self.chunks.lengths)
        with torch.autocast(states.device.type, enabled=False):
            scores = self.sharpness * (self.states[past:] @ self.states.t())
        place = torch.arange(past, past + count)[:, None]
        other = torch.arange(past + count)
        visible = ((other < place) & (other >= place - self.most)).to(scores.device)
        same = (keys[past:, None] == keys).to(scores.device) & visible
        scores = scores.masked_fill(~visible, -torch.inf)
        present = visible.any(1)
        log_prob = (scores.masked_fill(~same, -torch.inf).logsumexp(1) - scores.logsumexp(1)).where(
            same.any(1), -torch.inf
        )
        largest = (scores.amax(1) / self.sharpness).where(present, -1.0)
        features = torch.stack([largest.float().cpu(), visible.sum(1).float().log1p().cpu()], 1)
        self._forget_oldest()
        return PartScores(log_prob.double().cpu(), features, present.cpu())

    def predict_next(self, state: Tensor) -> PartPrediction:
        """See `Part.predict_next`; there is one outcome for each chunk of the cache."""
        chunks = self.chunks
        if not len(chunks):
            return PartPrediction(torch.tensor([-1.0, 0.0]), False, lambda: (chunks, torch.zeros(0)), lambda _: chunks)
        with torch.autocast(state.device.type, enabled=False):
            similarity = self.states @ F.normalize(state.to(self.states.dtype), dim=0)
        features = torch.tensor([float(similarity.amax()), math.log1p(len(chunks))])

        def list_outcomes() -> tuple[Chunks, Tensor]:
            return chunks, (self.sharpness * similarity).double().cpu().softmax(0)

        def draw_outcome(generator: torch.Generator | None) -> Chunks:
            return chunks[torch.multinomial(list_outcomes()[1], 1, generator=generator)]

        return PartPrediction(features, True, list_outcomes, draw_outcome)

    def remember_chunks(self, states: Tensor, chunks: Chunks) -> None:
        """See `Part.remember_chunks`."""
        self._append_chunks(states, chunks)
        self._forget_oldest()

    def _append_chunks(self, states: Tensor, chunks: Chunks) -> None:
        unit = F.normalize(states.to(torch.promote_types(states.dtype, torch.float32)), dim=1)
        if len(self.chunks):
            unit, chunks = torch.cat([self.states, unit]), Chunks.concatenate([self.chunks, chunks])
        self.states, self.chunks = unit, chunks

    def _forget_oldest(self) -> None:
        self.states, self.chunks = self.states[-self.most :], self.chunks[slice(-self.most, None)]
