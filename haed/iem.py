"""The Implicit Embedding Matrix loss: a softmax over chunks without a matrix of their embeddings.

The logit of candidate chunk c is s = scale · f_enc(c)·q + b(c), where q is the main model's prediction; the encoder *is*
the embedding matrix. The softmax runs over sampled candidates: the distinct chunks among the targets, further batches of
negatives, and a bank of chunks seen before.

A frequent chunk is nearly always among the candidates, a rare one hardly ever except as a target, so the plain sampled
loss learns log p(c | context)/Q(c). With n draws from the unigram distribution Q, candidate j is present with probability
π_j = 1 − (1 − Q_j)ⁿ; subtracting log π_j from *every* column, the target's as well, makes the expected normaliser that of
the full softmax (Horvitz–Thompson; compare log Q in Bengio & Senécal 2008 and Jean et al. 2015 §3). See docs/iem.md.

The matrix of logits is never held: blocks of queries are scored, and since the loss is a mean, their gradients are
accumulated in the same pass. Memory is linear in queries plus candidates and nothing is computed twice.

Legend: M queries, C candidates, E width of an embedding, H mined negatives of a query.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS = {"cpu": 256, "cuda": 2048}  # queries scored at a time: enough for fast products


class _BlockwiseSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        bias: Tensor,
        mined: Tensor | None,
        target: Tensor,
        replaced: Tensor | None,
        block: int,
        diagnose: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(queries.dtype, torch.float32)
        columns = len(candidates)
        d_queries = torch.empty_like(queries)
        d_candidates = torch.zeros_like(candidates, dtype=wide)
        d_bias = torch.zeros_like(bias, dtype=wide)
        d_mined = None if mined is None else torch.empty_like(mined, dtype=wide)
        total, figures = queries.new_zeros((), dtype=wide), queries.new_zeros(3, dtype=wide)
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            query, column = queries[part], target[part, None]
            scores = (query @ candidates.t()).to(wide).add_(bias)
            if mined is not None and replaced is not None:
                nothing = scores.new_full((), torch.inf)
                scores.scatter_reduce_(
                    1, replaced[part].clamp(min=0), torch.where(replaced[part] >= 0, -nothing, nothing), "amin"
                )
                scores = torch.cat([scores, mined[part].to(wide)], 1)
            wanted = scores.gather(1, column)
            top = scores.amax(1, keepdim=True)
            figures[0] += (wanted >= top).sum()
            if diagnose:
                figures[1] += (scores > wanted).sum() + len(query)
            normaliser = scores.sub_(top).exp_().sum(1, keepdim=True)
            total += (normaliser.log() + top - wanted).sum()
            probabilities = scores.div_(normaliser)
            if diagnose:
                figures[2] += torch.special.entr(probabilities).sum(1).exp().sum()
            probabilities.scatter_add_(1, column, probabilities.new_full((len(column), 1), -1))
            if d_mined is not None:
                d_mined[part] = probabilities[:, columns:]
                probabilities = probabilities[:, :columns]
            d_bias += probabilities.sum(0)
            narrow = probabilities.to(queries.dtype)
            d_queries[part] = narrow @ candidates
            if narrow.dtype == wide:
                d_candidates.addmm_(narrow.t(), query)
            else:
                d_candidates += narrow.t() @ query
            del scores, probabilities, narrow  # else they would live beside the next block's
        ctx.save_for_backward(d_queries, d_candidates, d_bias, d_mined)
        count = ctx.count = max(len(queries), 1)
        ctx.dtypes = queries.dtype, candidates.dtype, bias.dtype, None if mined is None else mined.dtype
        if not diagnose:
            figures[1:] = torch.nan
        figures /= count
        ctx.mark_non_differentiable(figures)
        return total / count, figures

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_queries, d_candidates, d_bias, d_mined = ctx.saved_tensors
        scale, found = grad / ctx.count, (d_queries, d_candidates, d_bias, d_mined)
        return *(
            None if d is None else torch.mul(d, scale, out=torch.empty_like(d, dtype=dtype))
            for d, dtype in zip(found, ctx.dtypes, strict=True)
        ), *[None] * 4


@dataclass
class SoftmaxLoss:
    """What `blockwise_cross_entropy` found, as scalars on the device, means over the queries.

    Attributes:
        loss: nats; has gradients.
        accuracy: how often the target scores highest among the candidates.
        rank: place of the target among them, from 1 on; NaN unless asked for.
        effective: exp of the entropy, the number of candidates that the softmax hesitates between; NaN likewise.
    """

    loss: Tensor
    accuracy: Tensor
    rank: Tensor
    effective: Tensor


def blockwise_cross_entropy(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor,
    target: Tensor,
    block: int | None = None,
    mined: tuple[Tensor, Tensor] | None = None,
    diagnose: bool = False,
) -> SoftmaxLoss:
    """Mean cross-entropy of softmax(queries · candidatesᵀ + bias).

    Args:
        queries: (M, E).
        candidates: (C, E), same type as the queries.
        bias: (C,) float32 or wider, added to every row, the correction included.
        target: (M,) column of each row's target.
        block: rows scored at a time, which bounds the memory beside inputs and gradients to some block × C numbers; None:
            as many as the device needs for fast products.
        mined: scores (M, H) of further candidates that count in their own row only, −∞ for none, and the columns (M, H)
            that these replace in their row, −1 for none.
        diagnose: also find rank and effective number; costs some passes over the scores.
    """
    rows = block or _ROWS.get(queries.device.type, 1024)
    own, replaced = mined or (None, None)
    loss, figures = _BlockwiseSoftmax.apply(queries, candidates, bias, own, target, replaced, rows, diagnose)
    return SoftmaxLoss(loss, *figures.unbind())


class UnigramCounts:
    """Estimate of Q, the distribution of chunks: counts in a table of hash buckets, on the CPU.

    Chunks that share a bucket share its count; with 2²⁰ buckets that concerns the rarest chunks, whose π is small anyway.
    Counting a chunk before its probability is asked for is add-one smoothing: over the draws, 1/π̂ of a chunk that is
    present then has the expectation (1 − e^−λ)/π for λ expected occurrences so far, almost unbiased.

    Args:
        smoothing: added to every count beside that.
        buckets: size of the table.
    """

    def __init__(self, smoothing: float = 0.0, buckets: int = 1 << 20) -> None:
        self.smoothing = smoothing
        self.counts = torch.zeros(buckets)
        self.total = torch.zeros((), dtype=torch.float64)

    def update(self, keys: Tensor, counts: Tensor) -> None:
        """Counts chunks, by key (C,) and number of occurrences (C,)."""
        self.counts.index_add_(0, keys.remainder(len(self.counts)), counts.to(self.counts.dtype))
        self.total += counts.sum()

    def probability(self, keys: Tensor) -> Tensor:
        """Q of chunks counted before, by key: (C,) float64."""
        mass = self.total
        if self.smoothing:
            mass = mass + self.smoothing * (self.counts > 0).sum()
        return (self.counts[keys.remainder(len(self.counts))].double() + self.smoothing) / mass

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"counts": self.counts, "total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`."""
        self.counts, self.total = state["counts"].clone(), state["total"].clone()


Draws = Sequence[tuple[Tensor, int]]


def log_inclusion(draws: Draws) -> Tensor:
    """Log π with π = 1 − ∏ (1 − Q_k)^n_k, computed without cancellation.

    Args:
        draws: for each source of candidates Q_k (C,) float64 and n_k, the number of chunks drawn with repetition. A chunk
            that is always drawn has Q = 1, and π = 1.
    """
    absent = sum(n * torch.log1p(-q) for q, n in draws if n)
    return torch.log(-torch.expm1(torch.as_tensor(absent)))


def correction(kind: str, draws: Draws) -> Tensor:
    """What is subtracted from each candidate's score: 0, log of the expected number of draws, or log π: (C,) float64.

    Args:
        kind: `none` (the paper's plain loss), `log_q`, or `inclusion`.
        draws: see `log_inclusion`.
    """
    if kind == "none":
        return torch.zeros_like(draws[0][0])
    if kind == "log_q":
        expected = sum(n * q for q, n in draws)
        always = sum((q == 1) & (n > 0) for q, n in draws) > 0
        return torch.where(torch.as_tensor(always), 0.0, torch.as_tensor(expected).log())
    if kind == "inclusion":
        return log_inclusion(draws)
    raise ValueError(f"unknown correction {kind!r}: expected none, log_q or inclusion")


@torch.no_grad()
def log_likelihood(queries: Tensor, candidates: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Log p of each row's target in softmax(queries · candidatesᵀ + bias): (M,); a likelihood if these are all chunks.

    Arguments are as in `blockwise_cross_entropy`, without a correction in the bias.
    """
    rows = _ROWS.get(queries.device.type, 1024)
    found = []
    for query, column in zip(queries.split(rows), target.split(rows), strict=True):
        scores = (query @ candidates.t()).to(torch.promote_types(query.dtype, torch.float32)) + bias
        found.append(scores.gather(1, column[:, None]).squeeze(1) - scores.logsumexp(1))
    return torch.cat(found) if found else queries.new_zeros(0)
