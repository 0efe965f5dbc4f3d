"""Exact bits on a fixed subset of the validation split, with the standard error over its windows."""

import math
from dataclasses import dataclass

import torch

from data.corpus import Corpus
from data.loader import Loader
from haed.model import HAED
from pipeline.device import Compute
from pipeline.options import Options


@dataclass
class Validation:
    """The subset: tensors (n, T, K), (n, T) and (n, T) as `HAED.log_likelihood` takes them."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, corpus: Corpus, options: Options) -> "Validation | None":
        """The first `validation.windows` of a fixed shuffle of the split, or None if it is empty or switched off."""
        limits = options.validation
        if not limits.times or corpus.counts("valid").chunks == 0:
            return None
        loader = Loader(corpus, "valid", context=options.batch.context, sequences=1, seed=0)
        count = min(limits.windows, loader.windows_per_epoch)
        batches = [batch for _, batch in zip(range(count), loader, strict=False)]
        parts = ([getattr(batch, name) for batch in batches] for name in ("tokens", "lengths", "starts"))
        return cls(*(torch.cat([torch.from_numpy(x) for x in part]) for part in parts))

    @torch.no_grad()
    def score(self, model: HAED, compute: Compute, at_once: int = 16) -> dict[str, float]:
        """Bits per token and the standard error over windows."""
        training = model.training
        model.eval()
        bits = []
        with compute.precision():
            for rows in torch.arange(len(self.tokens)).split(at_once):
                parts = self.tokens[rows], self.lengths[rows], self.starts[rows]
                bits.append(-model.log_likelihood(*parts).double().sum(1).cpu() / math.log(2))
        model.train(training)
        total, tokens = torch.cat(bits), self.lengths.double().sum(1)
        mean = total.sum() / tokens.sum()
        deviation = ((total - mean * tokens) ** 2).sum().sqrt() / tokens.sum()
        return {"validation/bits_per_token": float(mean), "validation/standard_error": float(deviation)}
