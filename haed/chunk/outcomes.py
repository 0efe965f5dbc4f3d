"""What the next chunk may be: the outcomes among which it is drawn, and the likeliest chunks with their probabilities.

A mixture has C + 1 outcomes, the known chunks with g · q(c) each, and to spell a chunk with 1 − g. What is spelled may be a
known chunk too, so that both ways to it add up.

A prompt may end inside a chunk. Then the chunk begins with given tokens: known chunks that do not are impossible, and to spell
has (1 − g) · p_decoder(these tokens). Divided by their sum, the probability of the beginning, these are by Bayes' rule the
outcomes given it.

Legend: N chunks, C known ones, K tokens of a chunk, V vocabulary, W width of ŷ.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from haed.chunk.model import HAED, mask_end
from haed.chunk.packing import Chunks, distinct
from haed.system import moved

_BEAM = 32  # chunks that are spelled at a time


def largest(values: Tensor, number: int | Tensor, nth: Tensor | None = None) -> Tensor:
    """Mask (…, n) of exactly so many of the largest values; of equal ones those with the lowest numbers.

    Args:
        values: (…, n).
        number: how many, 0 to n; or (…, 1).
        nth: (…, 1) the smallest value that is taken, where it is known; else `number` is an integer.
    """
    if nth is None:
        if not number:
            return torch.zeros_like(values, dtype=torch.bool)
        nth = values.topk(int(number)).values[..., -1:]
    above, equal = values > nth, values == nth
    return above | (equal & (equal.cumsum(-1) <= number - above.sum(-1, keepdim=True)))


def outcomes(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor) -> Tensor:
    """Log probabilities (N, C + 1), in nats, of each outcome together with the beginning; to spell is the last.

    Args:
        system: in evaluation mode; where no chunks are known there is one outcome, to spell.
        prediction: ŷ (N, W).
        before: the chunks before, on the CPU, of length 0 for none.
        opened: (n,) tokens with which the chunks begin, on the CPU, n ≤ K, perhaps none.
    """
    spelled = prediction.new_zeros(len(prediction))
    if n := len(opened):
        tokens = F.pad(opened.long(), (0, system.cut.k - n)).expand(len(prediction), -1)
        decisions = system.spelled(prediction, Chunks(tokens, torch.full((len(tokens),), n)), before)
        spelled = decisions[:, :n].sum(1)  # without the end
    if system.known is None or system.mixture is None:
        return spelled[:, None]
    gate = system.mixture(prediction)[:, None]
    summoned = system.known.scores(system.query(prediction), system.mixture.prior).log_softmax(1)
    if n:
        summoned[:, ~system.known.lexicon.beginning(opened).to(system.device)] = -torch.inf
    return torch.cat([F.logsigmoid(gate) + summoned, F.logsigmoid(-gate) + spelled[:, None]], 1)


@dataclass
class Likeliest:
    """Some chunks that may be next, the likeliest first, on the CPU; probabilities are given the beginning, float64.

    Attributes:
        chunks: n of them.
        probability: (n,) by both ways together.
        summoned: (n,) the share of that by which a chunk is summoned; the rest of it is spelled.
        rows: (n,) of the known chunks, −1 of others.
        gate: the probability that the next chunk is summoned, whichever it is.
    """

    chunks: Chunks
    probability: Tensor
    summoned: Tensor
    rows: Tensor
    gate: float


@torch.no_grad()
def likeliest(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor, count: int) -> Likeliest:
    """The likeliest next chunks, at most `count`, of ŷ (1, W); see `outcomes`.

    Probabilities are exact. Which chunks are considered is not quite: those with the most g · q(c), and those that a beam
    search among the decoder's finds.
    """
    shares = outcomes(system, prediction, before, opened)[0].double().cpu()
    found = _spelled(system, prediction, before, opened, max(count, _BEAM))
    if system.known is not None:
        possible = int(shares[:-1].isfinite().sum())
        named = system.known.lexicon.chunks[largest(shares[:-1], min(count, possible)).nonzero().squeeze(1)]
        found = Chunks(torch.cat([found.tokens, named.tokens]), torch.cat([found.lengths, named.lengths]))
    every = distinct(found.tokens, found.lengths)
    chunks, size = Chunks(every.tokens, every.lengths), len(every.keys)
    repeated = Chunks(before.tokens.expand(size, -1), before.lengths.expand(size))
    decisions = system.spelled(prediction.expand(size, -1), chunks, repeated).double().cpu()
    spelled = shares[-1] + decisions[:, len(opened) :].sum(1)
    rows = torch.full((size,), -1) if system.known is None else system.known.lexicon.find(chunks)
    summoned = shares[rows].where(rows >= 0, -torch.inf)
    joint, whole = torch.logaddexp(summoned, spelled), shares.logsumexp(0)
    best = joint.argsort(descending=True, stable=True)[:count]
    gate = float((shares[:-1].logsumexp(0) - whole).exp())
    return Likeliest(chunks[best], (joint - whole)[best].exp(), (summoned - joint)[best].exp(), rows[best], gate)


def _spelled(system: HAED, prediction: Tensor, before: Chunks, opened: Tensor, beam: int) -> Chunks:
    """The decoder's likeliest chunks with a given beginning, at most `beam`, by a beam search."""
    cut = system.cut
    decoder: Any = system.decoder  # each decoder has a state of its own kind
    state = decoder.begin(prediction, moved(before, system.device))
    tokens, score = torch.zeros(1, cut.k, dtype=torch.long), torch.zeros(1, dtype=torch.float64)
    symbol, ended = torch.full((1,), cut.vocabulary), []
    for place in range(cut.k):
        logits = decoder.step(state, symbol.to(system.device))
        if place < len(opened):
            symbol = opened[place : place + 1].long()
        else:
            logits = mask_end(logits, [len(logits)] if place == 0 else [0], cut.fixed)
            grown = score[:, None] + logits.double().log_softmax(1).cpu()
            ended.append((tokens, torch.full_like(tokens[:, 0], place), grown[:, -1]))
            score, best = grown[:, :-1].flatten().topk(min(beam, grown[:, :-1].numel()))
            parent, symbol = best // cut.vocabulary, best % cut.vocabulary
            tokens = tokens[parent]
            state.keep(parent.to(system.device))
        tokens[:, place] = symbol
    ended.append((tokens, torch.full_like(tokens[:, 0], cut.k), score))
    every, lengths, scores = (torch.cat(column) for column in zip(*ended, strict=True))
    best = scores.topk(min(beam, int(scores.isfinite().sum()))).indices
    return Chunks(every, lengths)[best]
