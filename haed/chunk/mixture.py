"""One exact likelihood out of both phases: known chunks by the implicit matrix, all others by the decoder.

    P(c | context) = g · q(c) · [c ∈ S] + (1 − g) · p_decoder(c)

S are the known chunks of the train split, q the softmax over S of the IEM score plus β · log count, and g = σ(w · ŷ + b) the
gate. Both parts sum to one, q over S and the decoder over all strings, so P does. Word models that spell what they do not
know are relatives: Kawakami et al. 2017; Mielke and Eisner 2019.

Legend: N chunks, K tokens of a chunk, W width of ŷ.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Parts:
    """Log probabilities, in nats, of N chunks by each part, and how the parts are weighed.

    Attributes:
        decisions: (N, K + 1) of the decoder's tokens and end, see `System.decisions`.
        known: (N,) log q; −∞ of chunks that are not known. None: there is the decoder alone.
        gate: (N,) the gate's logit, of which σ is g; None likewise.
    """

    decisions: Tensor
    known: Tensor | None = None
    gate: Tensor | None = None

    @property
    def decoder(self) -> Tensor:
        """(N,) log p_decoder."""
        return self.decisions.sum(-1)

    @property
    def joint(self) -> Tensor:
        """(N,) log P, which is what counts."""
        if self.known is None or self.gate is None:
            return self.decoder
        return joint(self.gate, self.known, self.decoder)


def joint(gate: Tensor, known: Tensor, decoder: Tensor) -> Tensor:
    """log(σ(gate) · q + (1 − σ(gate)) · p) of log q and log p, (N,) each."""
    return torch.logaddexp(F.logsigmoid(gate) + known, F.logsigmoid(-gate) + decoder)


class Mixture(nn.Module):
    """Gate, and the weight of the counts.

    Args:
        width: W.

    Attributes:
        prior: β, which begins at 1: then q begins as the chunks' frequencies.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 1)
        self.prior = nn.Parameter(torch.empty(()))

    @torch.no_grad()
    def initialise(self) -> None:
        """Known chunks have e² : 1 of the probability everywhere, as they have in most corpora of words."""
        nn.init.zeros_(self.gate.weight)
        self.gate.bias.fill_(2.0)
        self.prior.fill_(1.0)

    def forward(self, prediction: Tensor) -> Tensor:
        """The gate's logit (N,), float32 or wider, from ŷ (N, W)."""
        logit = self.gate(prediction).squeeze(-1)
        return logit.to(torch.promote_types(logit.dtype, torch.float32))
