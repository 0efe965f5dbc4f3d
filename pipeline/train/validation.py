"""A phase's loss on a fixed subset of the validation split while training, with the standard error over its windows.

It is the exact loss, in bits per token, of a phase that decodes. A phase one without a decoded share is scored by the IEM
loss, in nats per chunk: a softmax over the distinct chunks of the subset, so that windows and candidates are the same each
time; in a mixture with the prior of their counts in train. That says which checkpoint is better, and is no likelihood.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from haed.chunk.known import Lexicon
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, distinct
from haed.system import System, Windows
from pipeline.run.device import Compute
from pipeline.run.windows import some_at_once
from pipeline.stopping import StopRequested, interruptible


@dataclass
class Validation:
    """What a system is scored on now and then.

    Attributes:
        windows: the subset.
        exact: by the exact loss, else by the IEM loss.
        lexicon: the known chunks of a mixture, which is then the likelihood.
    """

    windows: Windows
    exact: bool = True
    lexicon: Lexicon | None = None

    @property
    def figure(self) -> str:
        """The name of the figure that decides, the lower the better."""
        return "validation/bits_per_token" if self.exact else "validation/iem"

    @torch.no_grad()
    def score(self, system: System, compute: Compute, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """The figure and its standard error over windows; empty if `stop` became true before the end."""
        training = system.training
        system.eval()
        found: list[Tensor] = []
        with compute.precision(), suppress(StopRequested), interruptible(), self._known(system):
            for losses in self._bits(system) if self.exact else self._nats(system):
                found.append(losses)
                if stop():
                    break
        system.train(training)
        if sum(len(each) for each in found) < len(self.windows):
            return {}
        total = torch.cat(found)
        size = (self.windows.lengths if self.exact else self.windows.real).double().sum(1)
        mean = total.sum() / size.sum()
        deviation = ((total - mean * size) ** 2).sum().sqrt() / size.sum()
        return {self.figure: float(mean), "validation/standard_error": float(deviation)}

    @contextmanager
    def _known(self, system: System) -> Iterator[None]:
        """Lends the system the known chunks, as it embeds them now."""
        if self.lexicon is None or not isinstance(system, HAED):
            yield
            return
        system.known = system.embedded(self.lexicon, torch.bfloat16)
        try:
            yield
        finally:
            system.known = None

    def _bits(self, system: System) -> Iterator[Tensor]:
        """Exact bits of each window, (b,) float64 on the CPU, some windows at a time."""
        for part in some_at_once(self.windows):
            yield -system.log_likelihood(part).double().sum(1).cpu() / math.log(2)

    def _nats(self, system: System) -> Iterator[Tensor]:
        """IEM loss of each window, likewise."""
        assert isinstance(system, HAED)
        real = self.windows.real
        found = distinct(self.windows.tokens[real], self.windows.lengths[real])
        chunks = Chunks(found.tokens, found.lengths)
        prior = 0.0 if system.mixture is None else system.mixture.prior
        lexicon = Lexicon(chunks, None if self.lexicon is None else self.lexicon.told(chunks)[0].clamp(min=1))
        closed = system.embedded(lexicon)
        for part in some_at_once(self.windows):
            nats = torch.zeros(part.real.shape, dtype=torch.float64)
            rows = lexicon.find(Chunks(part.tokens, part.lengths)[part.real])
            nats[part.real] = -closed.log_softmax(system.query(system.predictions(part)), rows, prior).double().cpu()
            yield nats.sum(1)
