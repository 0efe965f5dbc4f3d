"""Mixture of both phases in an exact likelihood: the implicit matrix for known chunks, the decoder for all others.

    P(c | context) = g · q(c) · [c ∈ S] + (1 − g) · p_decoder(c)

S is the set of known chunks of the train split, q the softmax over S of the IEM score plus β · log count. The gate is g
= σ(w · ŷ + b). q sums to one over S and the decoder over all strings, so P sums to one. Related work: word models that
spell unknown words (Kawakami et al. 2017; Mielke and Eisner 2019).

Legend: N chunks, K tokens of a chunk, W width of ŷ.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class MixtureScores:
    """Log probabilities, in nats, of N chunks by each part of the mixture, and the weight of the parts.

    Attributes:
        decisions: (N, K + 1) of the decoder's tokens and end, see `SequenceModel.decision_log_likelihood`.
        known: (N,) log q; −∞ for unknown chunks. None if the decoder is the only part.
        gate: (N,) logit of the gate, g = σ(gate). None if the decoder is the only part.
    """

    decisions: Tensor
    known: Tensor | None = None
    gate: Tensor | None = None

    @property
    def decoder_log_prob(self) -> Tensor:
        """Log p_decoder (N,)."""
        return self.decisions.sum(-1)

    @property
    def joint_log_prob(self) -> Tensor:
        """Log P (N,), the likelihood of the mixture."""
        if self.known is None or self.gate is None:
            return self.decoder_log_prob
        return mixture_log_prob(self.gate, self.known, self.decoder_log_prob)


def mixture_log_prob(gate: Tensor, known: Tensor, decoder: Tensor) -> Tensor:
    """Return log(σ(gate) · q + (1 − σ(gate)) · p) from log q and log p, (N,) each."""
    return torch.logaddexp(F.logsigmoid(gate) + known, F.logsigmoid(-gate) + decoder)


class Mixture(nn.Module):
    """The gate, and the weight of the counts.

    Args:
        width: W.

    Attributes:
        prior: β, initially 1, so that q begins as the chunks' frequencies.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 1)
        self.prior = nn.Parameter(torch.empty(()))

    @torch.no_grad()
    def initialise_parameters(self) -> None:
        """Initialise the gate to odds of e² : 1 for known chunks everywhere, as in most corpora of words."""
        nn.init.zeros_(self.gate.weight)
        self.gate.bias.fill_(2.0)
        self.prior.fill_(1.0)

    def forward(self, prediction: Tensor) -> Tensor:
        """Return the gate's logit (N,), float32 or wider, from ŷ (N, W)."""
        logit = self.gate(prediction).squeeze(-1)
        return logit.to(torch.promote_types(logit.dtype, torch.float32))
