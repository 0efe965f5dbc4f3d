"""Sampling chunk by chunk with cached state: nothing is recomputed from the start.

The prompt's last chunk is left open: its tokens are fed to the decoder, which may go on with it or end it, so a prompt
may stop in the middle of a word. When the window of T chunks is full, the main model's cache is rebuilt from the newest
half of it, a constant cost per chunk.

Legend: B samples, K tokens of a chunk, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from haed.model import HAED, mask_end


@dataclass
class Draw:
    """How a symbol is drawn from its distribution.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest symbol.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together have this probability.
        generator: of the draws, on the CPU.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Draws from logits (B, V + 1): symbols (B,)."""
        logits = logits.double().cpu()
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k:
            logits[logits < logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]] = -torch.inf
        probabilities = logits.softmax(-1)
        if self.top_p < 1:
            ranked, order = probabilities.sort(-1, descending=True)
            rest = ranked.cumsum(-1) - ranked >= self.top_p  # the likeliest always stays
            probabilities.scatter_(1, order, ranked.masked_fill(rest, 0))
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


class Sampler:
    """Continues B prompts of the same number of chunks, or B copies of one, chunk by chunk.

    Args:
        model: in evaluation mode.
        tokens: (P, K) closed chunks of a prompt, P may be 0, or (B, P, K).
        lengths: (P,), or (B, P).
        samples: B.
    """

    def __init__(self, model: HAED, tokens: Tensor, lengths: Tensor, samples: int = 1) -> None:
        self.model, self.samples = model, samples
        self.device = model.scale.device
        self.cache = model.main.cache()
        start = model.main.start.expand(samples, 1, -1)
        first = max(0, lengths.shape[-1] - model.context + 1)
        tokens, lengths = tokens[..., first:, :], lengths[..., first:]
        tokens, lengths = tokens.expand(samples, -1, -1), lengths.expand(samples, -1)
        shape = lengths.shape
        seen = model.embed(tokens.flatten(0, 1).to(self.device), lengths.flatten().to(self.device)).vector
        self.inputs = torch.cat([start, seen.to(start.dtype).unflatten(0, shape)], 1)
        self.prediction = model.main.step(self.inputs, self.cache)[:, -1]
        none = tokens.new_zeros(samples, model.k), lengths.new_zeros(samples)
        self.last = (tokens[:, -1], lengths[:, -1]) if shape[1] else none

    @torch.no_grad()
    def chunk(self, draw: Draw, opened: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draws the next chunk of every sample and feeds it to the main model.

        Args:
            draw: how.
            opened: (n,) tokens with which every chunk begins, n ≤ K.

        Returns:
            tokens (B, K), zero beyond their ends, and lengths (B,), on the CPU.
        """
        model, batch = self.model, self.samples
        tokens = torch.zeros(batch, model.k, dtype=torch.long)
        lengths = torch.full((batch,), model.k)
        opened = tokens.new_zeros(0) if opened is None else opened.long()
        decoder: Any = model.decoder  # each decoder has a state of its own kind
        state = decoder.begin(self.prediction, (self.last[0].to(self.device), self.last[1].to(self.device)))
        open_rows, symbol = torch.arange(batch), torch.full((batch,), model.vocabulary)
        for position in range(model.k):
            logits = decoder.step(state, symbol.to(self.device))
            if position < len(opened):
                symbol = opened[position].expand(batch)
            else:
                symbol = draw(mask_end(logits, [batch] if position == 0 else [0], model.fixed))
            goes_on = symbol != model.vocabulary
            if not goes_on.all():  # chunks that have ended cost nothing more
                lengths[open_rows[~goes_on]] = position
                open_rows, symbol = open_rows[goes_on], symbol[goes_on]
                if not len(open_rows):
                    break
                state.keep(goes_on.to(self.device))
            tokens[open_rows, position] = symbol
        self._feed(tokens, lengths)
        return tokens, lengths

    def _feed(self, tokens: Tensor, lengths: Tensor) -> None:
        """Lets the main model see the chunks and predict the next ones."""
        self.last = tokens, lengths
        vector = self.model.embed(tokens.to(self.device), lengths.to(self.device)).vector[:, None]
        self.inputs = torch.cat([self.inputs, vector.to(self.inputs.dtype)], 1)
        if self.inputs.shape[1] > self.model.context:
            start = self.model.main.start.expand(self.samples, 1, -1)
            kept = self.model.context // 2
            self.inputs = torch.cat([start, self.inputs[:, len(self.inputs[0]) - kept :]], 1)
            self.cache = self.model.main.cache()
            self.prediction = self.model.main.step(self.inputs, self.cache)[:, -1]
        else:
            self.prediction = self.model.main.step(vector, self.cache)[:, -1]
