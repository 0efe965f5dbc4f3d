"""The Implicit Embedding Matrix loss: a softmax over chunks without a matrix of their embeddings.

The logit of candidate chunk c is s = scale · f_enc(c)·q + b(c), where q is the head's image of the main model's
prediction. The encoder *is* the embedding matrix. The softmax runs over sampled candidates: the distinct chunks among
the targets and further batches of negatives.

A frequent chunk is nearly always among the candidates, a rare one hardly ever except as a target. So the plain sampled
loss learns about log p(c | context)/Q(c), with Q the probability of being a candidate. `haed.iem.candidates` determines
the candidates of a row and corrects their scores for this.

The matrix of logits is never held. Blocks of queries are scored, and since the loss is a mean, their gradients are
accumulated in the same pass. Memory is linear in queries plus candidates, and nothing is computed twice.

Legend: M queries, C candidates, E width of an embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from haed.layers.lstm import compute_dtype

_ROWS = {"cpu": 256, "cuda": 2048}  # queries scored at a time: enough for fast products

ScoreAdjustments = Callable[[slice, Tensor], tuple[Tensor, Tensor]]


class _BlockwiseSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        candidates: Tensor,
        bias: Tensor,
        target: Tensor,
        changes: ScoreAdjustments | None,
        block: int,
        diagnose: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(queries.dtype, torch.float32)
        d_queries = torch.empty_like(queries)
        d_candidates = torch.zeros_like(candidates, dtype=wide)
        d_bias = torch.zeros_like(bias, dtype=wide)
        total, figures = queries.new_zeros((), dtype=wide), queries.new_zeros(3, dtype=wide)
        rows = queries.new_zeros(2, len(queries), dtype=wide)
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            query, column = queries[part], target[part, None]
            scores = _wide_product(query, candidates.t(), wide).add_(bias)
            if changes is not None:
                columns, added = changes(part, target[part])
                scores.scatter_add_(1, columns, added.to(scores.dtype))
            target_score = scores.gather(1, column)
            if diagnose:
                figures[1] += (scores > target_score).sum() + len(query)
            probabilities, top, normaliser = (_in_place if scores.device.type == "cpu" else _in_one)(scores)
            figures[0] += (target_score >= top).sum()
            total += (normaliser - target_score).sum()
            rows[0, part], rows[1, part] = target_score[:, 0], normaliser[:, 0]
            if diagnose:
                figures[2] += torch.special.entr(probabilities).sum(1).exp().sum()
            probabilities.scatter_add_(1, column, probabilities.new_full((len(column), 1), -1))
            d_bias += probabilities.sum(0)
            narrow = probabilities.to(queries.dtype)
            d_queries[part] = narrow @ candidates
            if narrow.dtype == wide:
                d_candidates.addmm_(narrow.t(), query)
            else:
                d_candidates += _wide_product(narrow.t(), query, wide)
            del scores, probabilities, narrow  # else they would coexist with the next block's
        ctx.save_for_backward(d_queries, d_candidates, d_bias)
        count = ctx.count = max(len(queries), 1)
        ctx.dtypes = queries.dtype, candidates.dtype, bias.dtype
        if not diagnose:
            figures[1:] = torch.nan
        figures /= count
        ctx.mark_non_differentiable(figures, rows)
        return total / count, figures, rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad / ctx.count
        return *(
            torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ), *[None] * 4


def _wide_product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Return the product of a and b in type `wide`.

    A GPU sums in float32 anyway, and need not round the sums and widen them again.
    """
    if a.dtype != wide and a.is_cuda and "dtype" in torch.ops.aten.mm.overloads():
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def _in_place(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Overwrite the scores by probabilities (M, C), and return these.

    Also return the largest score and the log of the normaliser, (M, 1) each.
    """
    top = scores.amax(1, keepdim=True)
    normaliser = scores.sub_(top).exp_().sum(1, keepdim=True)
    return scores.div_(normaliser), top, normaliser.log() + top


def _in_one(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_in_place` with a second matrix, but in one pass instead of four.

    On a GPU memory bandwidth limits the speed here.
    """
    top, place = scores.max(1, keepdim=True)
    probabilities = scores.softmax(1)
    return probabilities, top, top - probabilities.gather(1, place).log()  # the largest probability, at least 1 / C


@dataclass
class SoftmaxLoss:
    """Result of `blockwise_cross_entropy`: scalars on the device, means over the queries, and two vectors.

    Attributes:
        loss: nats; has gradients.
        accuracy: how often the target scores highest among the candidates.
        rank: rank of the target among them, from 1 on; NaN unless requested.
        effective: exp of the entropy, the number of candidates that the softmax hesitates between; NaN unless
            requested.
        target_score: (M,) score of each row's target, including everything added to it; without a gradient.
        normaliser: (M,) logarithm of the sum of the exponentials of a row's scores; without a gradient.
    """

    loss: Tensor
    accuracy: Tensor
    rank: Tensor
    effective: Tensor
    target_score: Tensor
    normaliser: Tensor


def blockwise_cross_entropy(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor,
    target: Tensor,
    block: int | None = None,
    changes: ScoreAdjustments | None = None,
    diagnose: bool = False,
) -> SoftmaxLoss:
    """Return the mean cross-entropy of softmax(queries · candidatesᵀ + bias).

    The products are in autocast's type if that is on.

    Args:
        queries: (M, E).
        candidates: (C, E), same type as the queries.
        bias: (C,) float32 or wider, added to every row, the correction included.
        target: (M,) column of each row's target.
        block: number of rows scored at a time, which bounds the memory beside inputs and gradients to some block × C
            numbers. None: as many as the device needs for fast products.
        changes: given rows and their targets (m,), returns columns (m, n) and the terms added to the scores there, −∞
            for non-candidates of the row; a column may be named more than once.
        diagnose: also compute rank and effective number; costs some passes over the scores.
    """
    rows = block or _ROWS.get(queries.device.type, 1024)
    # A layer norm or normalisation before may have made float32 of autocast's type.
    narrow = [x.to(compute_dtype(x)) if x.dtype == torch.float32 else x for x in (queries, candidates)]
    loss, figures, each = _BlockwiseSoftmax.apply(*narrow, bias, target, changes, rows, diagnose)
    return SoftmaxLoss(loss, *figures.unbind(), *each.unbind())
