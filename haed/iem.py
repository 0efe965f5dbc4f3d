"""The Implicit Embedding Matrix loss: a softmax over chunks without a matrix of their embeddings.

The logit of candidate chunk c is s = scale · f_enc(c)·q + b(c), where q is the main model's prediction; the encoder *is*
the embedding matrix. The softmax runs over sampled candidates: the distinct chunks among the targets and some negatives.

A frequent chunk is nearly always among the candidates, a rare one hardly ever except as a target, so the plain sampled
loss learns log p(c | context)/Q(c). With n draws from the unigram distribution Q, candidate j is present with probability
π_j = 1 − (1 − Q_j)ⁿ; subtracting log π_j from *every* column, the target's as well, makes the expected normaliser that of
the full softmax (Horvitz–Thompson; compare log Q in Bengio & Senécal 2008 and Jean et al. 2015 §3).

The matrix of logits is never held: blocks of queries are scored, and since the loss is a mean, their gradients are
accumulated in the same pass. Memory is linear in queries plus candidates and nothing is computed twice.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _BlockwiseSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, candidates: Tensor, bias: Tensor, target: Tensor, block: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(queries.dtype, torch.float32)
        needed = queries.requires_grad or candidates.requires_grad or bias.requires_grad
        d_queries = torch.empty_like(queries) if needed else None
        d_candidates = torch.zeros_like(candidates, dtype=wide)
        d_bias = torch.zeros_like(bias, dtype=wide)
        losses, hits = [], []
        for rows in torch.arange(len(queries), device="cpu").split(block):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            query, column = queries[part], target[part, None]
            scores = (query @ candidates.t()).to(wide)
            scores += bias
            wanted = scores.gather(1, column).squeeze(1)
            top = scores.amax(1)
            hits.append(wanted >= top)
            normaliser = scores.sub_(top[:, None]).exp_().sum(1)
            losses.append(normaliser.log() + top - wanted)
            if d_queries is None:
                continue
            probabilities = scores.div_(normaliser[:, None])
            probabilities.scatter_add_(1, column, probabilities.new_full((len(column), 1), -1))
            d_bias += probabilities.sum(0)
            narrow = probabilities.to(queries.dtype)
            d_queries[part] = narrow @ candidates
            d_candidates += narrow.t() @ query
        ctx.save_for_backward(d_queries, d_candidates, d_bias)
        ctx.count = max(len(queries), 1)
        ctx.dtypes = candidates.dtype, bias.dtype
        accuracy = torch.cat(hits).to(wide).mean() if hits else queries.new_zeros((), dtype=wide)
        ctx.mark_non_differentiable(accuracy)
        return torch.cat(losses).mean() if losses else queries.sum() * 0.0, accuracy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        d_queries, d_candidates, d_bias = ctx.saved_tensors
        scale = grad / ctx.count
        candidates_dtype, bias_dtype = ctx.dtypes
        return (
            d_queries * scale.to(d_queries.dtype),
            (d_candidates * scale).to(candidates_dtype),
            (d_bias * scale).to(bias_dtype),
            None,
            None,
        )


def blockwise_cross_entropy(
    queries: Tensor, candidates: Tensor, bias: Tensor, target: Tensor, block: int = 1024
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of softmax(queries · candidatesᵀ + bias), and how often the target scores highest.

    Args:
        queries: (M, E).
        candidates: (C, E), same type as the queries.
        bias: (C,) added to every row, the correction included.
        target: (M,) column of each row's target.
        block: rows scored at a time; peak memory beside inputs and gradients is block × C.

    Returns:
        Loss in nats and top-1 accuracy, both scalars; the loss has gradients for the first three arguments.
    """
    return _BlockwiseSoftmax.apply(queries, candidates, bias, target, block)


class UnigramCounts(nn.Module):
    """Streaming estimate of Q, the distribution of chunks: counts in a table of hash buckets.

    Chunks that share a bucket share its count; with 2²⁰ buckets that concerns the rarest chunks, whose π is small anyway.
    """

    def __init__(self, buckets: int = 1 << 20) -> None:
        super().__init__()
        self.counts: Tensor
        self.total: Tensor
        self.register_buffer("counts", torch.zeros(buckets, dtype=torch.float32))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def update(self, keys: Tensor, counts: Tensor) -> None:
        """Counts distinct chunks, by key (C,) and number of occurrences (C,)."""
        self.counts.index_add_(0, keys.remainder(len(self.counts)), counts.to(self.counts.dtype))
        self.total += counts.sum()

    def probability(self, keys: Tensor) -> Tensor:
        """Q of chunks counted before, by key: (C,) float64."""
        return self.counts[keys.remainder(len(self.counts))].double() / self.total


def log_inclusion(probability: Tensor, draws: int) -> Tensor:
    """Log π with π = 1 − (1 − Q)ⁿ, computed without cancellation.

    Args:
        probability: (C,) Q, float64.
        draws: n, the number of chunks drawn, with repetition.
    """
    certain = probability.clamp(max=1 - 1e-12)
    return torch.log(-torch.expm1(draws * torch.log1p(-certain)))


def correction(kind: str, probability: Tensor, draws: int) -> Tensor:
    """What is subtracted from each candidate's score: 0, log(n·Q) or log π, (C,) float64.

    Args:
        kind: `none` (the paper's plain loss), `log_q`, or `inclusion`.
        probability: (C,) Q.
        draws: n.
    """
    if kind == "none":
        return torch.zeros_like(probability)
    if kind == "log_q":
        return probability.log() + math.log(draws)
    if kind == "inclusion":
        return log_inclusion(probability, draws)
    raise ValueError(f"unknown correction {kind!r}: expected none, log_q or inclusion")
