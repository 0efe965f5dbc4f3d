"""Mixture of both phases in an exact likelihood: the implicit matrix for known chunks, the decoder for all others.

    P(c | context) = g · q(c) · [c ∈ S] + (1 − g) · p_decoder(c)

S is the set of known chunks of the train split, q the softmax over S of the IEM score plus β · log count. The gate is g
= σ(w · ŷ + b). q sums to one over S and the decoder over all strings, so P sums to one. Related work: word models that
spell unknown words (Kawakami et al. 2017; Mielke and Eisner 2019).

The embeddings of known chunks are stored as rows of the implicit matrix, over which the IEM score is normalised exactly.

Legend: N chunks (or queries), C known chunks, K tokens of a chunk, W width of ŷ, E width of an embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from haed.base import to_device
from haed.chunk.packing import Chunks, chunk_keys
from haed.chunk.rejection import RejectionSampler


@dataclass
class MixtureScores:
    """Log probabilities, in nats, of N chunks by each part of the mixture, and the weight of the parts.

    Attributes:
        prediction: (N, W) ŷ of their places.
        decisions: (N, K + 1) of the decoder's tokens and end, see `SequenceModel.decision_log_likelihood`.
        known: (N,) log q; −∞ for unknown chunks. None if the decoder is the only part.
        gate: (N,) logit of the gate, g = σ(gate). None if the decoder is the only part.
    """

    prediction: Tensor
    decisions: Tensor
    known: Tensor | None = None
    gate: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> "MixtureScores":
        known, gate = (None if x is None else x[rows] for x in (self.known, self.gate))
        return MixtureScores(self.prediction[rows], self.decisions[rows], known, gate)

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


# Queries and chunks that are scored at a time. On a CPU both and their scores should fit into its cache (dev/LOG.md).
_BLOCK, _LARGE = {"cpu": (1 << 10, 1 << 11)}, (1 << 11, 1 << 16)
_KEPT = 1 << 28  # bytes: smaller sets keep their keys in the type of the computation


class ChunkVocabulary:
    """A vocabulary of chunks, with their counts in the train split.

    Args:
        chunks: C different chunks.
        counts: (C,) counts in the train split; None if scores do not use them.
        documents: (C,) number of documents of the train split that have each chunk; None if nothing is trained.
    """

    def __init__(self, chunks: Chunks, counts: Tensor | None = None, documents: Tensor | None = None) -> None:
        self.chunks, self.counts, self.documents = chunks, counts, documents
        self._hashes, self._order = chunk_keys(chunks.tokens, chunks.lengths).sort()

    def __len__(self) -> int:
        return len(self.chunks)

    def to(self, device: torch.device) -> "ChunkVocabulary":
        """Return a copy on a device, for chunks that are there."""
        return ChunkVocabulary(*to_device((self.chunks, self.counts, self.documents), device))

    def find_rows(self, chunks: Chunks, keys: Tensor | None = None) -> Tensor:
        """Return the row (N,) of each of N chunks, −1 for those that are not in the vocabulary.

        Args:
            chunks: on the vocabulary's device.
            keys: (N,) their keys, if known.
        """
        keys = chunk_keys(chunks.tokens, chunks.lengths) if keys is None else keys
        if not len(self):
            return torch.full_like(keys, -1)
        place = torch.searchsorted(self._hashes, keys).clamp(max=len(self) - 1)
        rows = self._order[place]
        same = (self.chunks.lengths[rows] == chunks.lengths) & (self.chunks.tokens[rows] == chunks.tokens).all(1)
        return rows.where(same, -1)  # compare tokens: two strings with one hash would share a probability

    def counts_of(self, chunks: Chunks, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the counts of N chunks in the train split, and of its documents that have them: (N,) each.

        Both counts are 0 for unknown chunks. See `find_rows`.
        """
        rows = self.find_rows(chunks, keys)
        counts, documents = (
            torch.zeros_like(rows) if x is None or not len(self) else x[rows.clamp(min=0)].masked_fill(rows < 0, 0)
            for x in (self.counts, self.documents)
        )
        return counts, documents

    def prefix_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (C,) of the chunks that begin with `tokens` (n,), on the CPU."""
        return (self.chunks.lengths >= len(tokens)) & (self.chunks.tokens[:, : len(tokens)] == tokens).all(1)


class VocabularyScorer:
    """A vocabulary of chunks with its embeddings, which scores queries.

    Args:
        lexicon: C chunks.
        keys: (C, E) vectors that a query is multiplied with, of any floating type, in memory or mapped from a file.
        bias: (C,) term added to the scores, on the keys' device. Its type, float32 or wider, is the type of the
            computation.

    Attributes:
        log_counts: (C,) like `bias`; 0 without counts.
        rejection: draws chunks without all scores, once it is made.
    """

    rejection: RejectionSampler | None = None

    def __init__(self, lexicon: ChunkVocabulary, keys: Tensor, bias: Tensor) -> None:
        self._small = keys.numel() * bias.element_size() <= _KEPT
        self.lexicon, self.keys, self.bias = lexicon, keys.to(bias.dtype) if self._small else keys, bias
        counts = lexicon.counts
        self.log_counts = torch.zeros_like(bias) if counts is None else counts.to(bias).log()

    def __len__(self) -> int:
        return len(self.lexicon)

    def score_queries(self, queries: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Return scores (N, C) of all chunks; `prior` is the factor of the logarithms of their counts."""
        wide = queries.to(self.bias.dtype)
        if self.key_columns is not None:
            with torch.autocast(queries.device.type, enabled=False):
                return wide @ self.key_columns + self.score_bias(prior)
        return torch.cat([wide.new_empty(len(wide), 0), *self._score_blocks(wide, self.score_bias(prior))], 1)

    @cached_property
    def key_columns(self) -> Tensor | None:
        """Keys of a small set as columns (E, C), else None; one query is multiplied in 0.8 of the time or less."""
        return self.keys.t().contiguous() if self._small else None

    def log_softmax(self, queries: Tensor, rows: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Return log q (N,), in nats, of the chunk in row `rows` (N,) after each query (N, E); −∞ where the row is −1.

        The matrix of scores is computed block by block and never held whole. Unknown chunks cost nothing.
        """
        result = queries.new_full((len(queries),), -torch.inf, dtype=self.bias.dtype)
        added, known = self.score_bias(prior), (rows >= 0).nonzero().squeeze(1)
        for some in known.split(_BLOCK.get(queries.device.type, _LARGE)[0]):
            here, target_rows = some.to(result.device), rows[some].to(result.device)
            wide = queries[here].to(result.dtype)
            target_score = (wide * self.keys[target_rows].to(wide.dtype)).sum(1) + added[target_rows]
            normaliser = torch.full_like(target_score, -torch.inf)
            for block in self._score_blocks(wide, added):
                normaliser = torch.logaddexp(normaliser, block.logsumexp(1))
            result[here] = target_score - normaliser
        return result

    def score_bias(self, prior: Tensor | float) -> Tensor:
        """Return the terms (C,) that are added to the products of a query with the keys."""
        return self.bias + prior * self.log_counts

    def _score_blocks(self, queries: Tensor, added: Tensor) -> Iterator[Tensor]:
        """Yield scores (N, c) of one block of chunks after the other, in the type of the bias."""
        columns = _BLOCK.get(queries.device.type, _LARGE)[1]
        for keys, bias in zip(self.keys.split(columns), added.split(columns), strict=True):
            with torch.autocast(queries.device.type, enabled=False):
                block = torch.addmm(bias, queries, keys.to(queries.dtype).t())
            yield block


def target_log_prob(target_score: Tensor, normaliser: Tensor, correction: Tensor) -> Tensor:
    """Estimate log q (M,) of a step's targets among all chunks from its sampled candidates.

    The correction, 1/π each, makes the sum over the candidates other than the target an unbiased estimate of the sum
    over all other chunks (Horvitz and Thompson 1952). The target is there anyway, and counts once.

    Args:
        target_score: (M,) corrected score of each target.
        normaliser: (M,) logarithm of the sum of the exponentials of the candidates' corrected scores.
        correction: (M,) amount that was subtracted from each target's score.
    """
    others = normaliser + torch.log1p(-(target_score - normaliser).exp().clamp(max=1))
    uncorrected = target_score + correction.to(target_score.dtype)
    return uncorrected - torch.logaddexp(others, uncorrected)


def select_decoded(
    targets: int, fraction: float, other_documents: Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """Choose the chunks to decode: a mask (M,), and the inverse (M,) of the probability of choosing each.

    Args:
        targets: M.
        fraction: share of the chunks; at least one chunk, if it is not 0.
        other_documents: (M,) number of other documents that have each chunk, for a mixture. None: all are equally likely,
            there are no weights, and the mask is on the CPU.
        generator: generator of the choice.
    """
    chosen = torch.zeros(targets, dtype=torch.bool)
    if not fraction:
        return chosen, None
    count = max(round(targets * fraction), min(1, targets))
    if other_documents is not None:
        likely = inclusion_probabilities(other_documents, count)
        return systematic_sample(likely, generator), 1 / likely
    chosen[torch.randperm(targets, generator=generator)[:count] if count < targets else slice(None)] = True
    return chosen, None


def inclusion_probabilities(other_documents: Tensor, count: int) -> Tensor:
    """Return the probabilities (M,) of decoding each chunk, higher for rarer chunks; about `count` are decoded in all.

    The IEM score is bad at rare chunks, and the decoder's gradient is weighted by how much better the decoder is. The
    probability of a chunk that n other documents have is proportional to 1/√(n + 1), at most 1.

    Args:
        other_documents: (M,) n of each chunk.
        count: at most M.
    """
    rarity = (other_documents.double().clamp(min=0) + 1).rsqrt()
    ranked = rarity.sort(descending=True).values
    rest = ranked.flip(0).cumsum(0).flip(0)  # sum of each and all after it
    factors = (count - torch.arange(len(ranked), device=rest.device)) / rest  # valid if all before it are certain
    certain = (factors * ranked >= 1).sum(0, keepdim=True)
    return (rarity * torch.cat([factors, rest.new_full((1,), torch.inf)])[certain]).clamp(max=1)


def systematic_sample(share: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw from M elements, each with its probability `share` (M,), by systematic sampling in random order.

    Return a mask (M,). The number drawn is the sum of the probabilities, rounded up or down.
    """
    order = to_device(torch.randperm(len(share), generator=generator), share.device)
    first = float(torch.rand((), dtype=torch.float64, generator=generator))
    passed = (first + F.pad(share[order].cumsum(0), (1, 0))).floor()
    return torch.empty_like(share, dtype=torch.bool).scatter_(0, order, passed[1:] > passed[:-1])
