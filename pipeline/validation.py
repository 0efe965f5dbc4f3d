"""Exact bits on a fixed subset of the validation split, with the standard error over its windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from data.corpus import Corpus
from data.loader import Loader
from haed.model import HAED
from pipeline.device import Compute


@dataclass
class Validation:
    """The subset: tensors (n, T, K), (n, T) and (n, T) as `HAED.log_likelihood` takes them."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, corpus: Corpus, context: int, windows: int, split: str = "valid") -> "Validation | None":
        """The first `windows` of a fixed shuffle of a split, or None if it is empty or none are asked for."""
        if not windows or corpus.counts(split).chunks == 0:
            return None
        loader = Loader(corpus, split, context=context, sequences=1, seed=0)
        batches = list(islice(loader, min(windows, loader.windows_per_epoch)))
        parts = ([getattr(batch, name) for batch in batches] for name in ("tokens", "lengths", "starts"))
        return cls(*(torch.cat([torch.from_numpy(x) for x in part]) for part in parts))

    def batches(self, at_once: int = 16) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The windows, some at a time."""
        for rows in torch.arange(len(self.tokens)).split(at_once):
            yield self.tokens[rows], self.lengths[rows], self.starts[rows]

    @torch.no_grad()
    def score(self, model: HAED, compute: Compute, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Bits per token and the standard error over windows; empty if `stop` became true before the end."""
        training = model.training
        model.eval()
        bits = []
        with compute.precision():
            for batch in self.batches():
                if stop():
                    break
                bits.append(-model.log_likelihood(*batch).double().sum(1).cpu() / math.log(2))
        model.train(training)
        if sum(len(each) for each in bits) < len(self.tokens):
            return {}
        total, tokens = torch.cat(bits), self.lengths.double().sum(1)
        mean = total.sum() / tokens.sum()
        deviation = ((total - mean * tokens) ** 2).sum().sqrt() / tokens.sum()
        return {"validation/bits_per_token": float(mean), "validation/standard_error": float(deviation)}
