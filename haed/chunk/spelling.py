"""The decoder helped by the words of the document: it spells a new chunk as others of the document are spelled.

At every symbol of a chunk, the different chunks of the document vote for the next symbol. They do so in three contexts:
the last 3 symbols of the chunk so far, the last 5, and all of it from its beginning. Witten and Bell's interpolation
(1991) joins them with the decoder, one after the other:

    p_j(x) = (count(s_j, x) + τ · types(s_j) · p_{j−1}(x)) / (count(s_j) + τ · types(s_j)),    p_0 = p_decoder

count(s) is the number of times that different chunks have s and go on, and types(s) the number of their next symbols, one
of which may be the end. A context that no chunk has is skipped. So p sums to one over the symbols, and spelling over all
strings. τ for each place and context is fitted on held-out chunks. `zimbalo: ` costs little after `zimbalo`, and so does
`_zimbalo`, which copying whole chunks cannot do.

Legend: N chunks, K tokens of a chunk at most, V vocabulary; symbol V is the end of a chunk; S contexts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from haed.chunk.packing import Chunks

SUFFIXES = (3, 5)  # symbols of a context; 2 to 6 gave no more (dev/LOG.md)
_BEGIN = -1  # marks the context that is all of the chunk so far
_MOST = 1 << 17  # different chunks of a document; further ones are not remembered
_START, _PRIOR = 1.0, 2.0  # τ at first, and the strength of the pull of its logarithm towards that, in chunks
_FEWEST = 200  # chunks that no other part knows, on which τ is fitted; of fewer, on all

Outcome = TypeVar("Outcome")


def minimise(compute_loss: Callable[[], Tensor], parameters: list[Tensor]) -> None:
    """Minimise a loss by at most 60 steps of L-BFGS."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = compute_loss()
        value.backward()
        return value

    optimizer.step(loss)


class ContextCounts(Generic[Outcome]):
    """Counts of the outcomes after each context, which is a tuple of earlier ones."""

    def __init__(self) -> None:
        self._following: dict[tuple[Outcome, ...], dict[Outcome, int]] = {}
        self._totals: dict[tuple[Outcome, ...], int] = {}

    def add(self, context: tuple[Outcome, ...], outcome: Outcome) -> None:
        """Count an outcome after a context."""
        following = self._following.setdefault(context, {})
        following[outcome] = following.get(outcome, 0) + 1
        self._totals[context] = self._totals.get(context, 0) + 1

    def remove(self, context: tuple[Outcome, ...], outcome: Outcome) -> None:
        """Forget an outcome that was counted after a context."""
        following = self._following[context]
        following[outcome] -= 1
        self._totals[context] -= 1
        if not following[outcome]:
            del following[outcome]
        if not following:
            del self._following[context], self._totals[context]

    def find(self, context: tuple[Outcome, ...]) -> tuple[dict[Outcome, int], int]:
        """Return the counts of the outcomes after a context, and their sum; none and 0 for an unseen one."""
        return self._following.get(context, {}), self._totals.get(context, 0)

    def fork(self) -> "ContextCounts[Outcome]":
        """Return a copy that goes on by itself."""
        copied: ContextCounts[Outcome] = ContextCounts()
        copied._following = {context: dict(counts) for context, counts in self._following.items()}
        copied._totals = dict(self._totals)
        return copied


class DocumentWords:
    """The different chunks of one document, by how they are spelled.

    Args:
        k: K.
        end: V.
        fixed: true if chunks have a fixed size, so that no end is spelled.
    """

    contexts = len(SUFFIXES) + 1  # S

    def __init__(self, k: int, end: int, fixed: bool) -> None:
        self.k, self.end, self.fixed = k, end, fixed
        self._words: set[tuple[int, ...]] = set()
        self._counts: ContextCounts[int] = ContextCounts()

    def read_chunks(self, chunks: Chunks) -> Tensor:
        """Return the counts for N chunks of the document, each given those before it, and remember them.

        Returns:
            (N, K + 1, S, 3) count(s, x), count(s) and types(s) at every symbol x of each chunk; 0 behind the last.
        """
        return self._count(chunks, remember=True)

    def count_symbols(self, chunks: Chunks) -> Tensor:
        """Return the counts for N possible next chunks, as `read_chunks`, and remember nothing."""
        return self._count(chunks, remember=False)

    def _count(self, chunks: Chunks, remember: bool) -> Tensor:
        counts = torch.zeros(len(chunks), self.k + 1, self.contexts, 3)
        places: list[tuple[int, int, int]] = []
        values: list[tuple[int, int, int]] = []
        for number, word in enumerate(_list_words(chunks)):
            for place, symbol in enumerate(self._symbols(word)):
                for which, context in _list_contexts(word[:place]):
                    following, total = self._counts.find(context)
                    if total:
                        places.append((number, place, which))
                        values.append((following.get(symbol, 0), total, len(following)))
            if remember:
                self._add(word)
        if places:
            counts[torch.tensor(places).unbind(1)] = torch.tensor(values, dtype=torch.float32)
        return counts

    def _symbols(self, word: tuple[int, ...]) -> tuple[int, ...]:
        return word if self.fixed or len(word) == self.k else (*word, self.end)

    def _add(self, word: tuple[int, ...]) -> None:
        if word in self._words or len(self._words) >= _MOST:
            return
        self._words.add(word)
        for place, symbol in enumerate(self._symbols(word)):
            for _, context in _list_contexts(word[:place]):
                self._counts.add(context, symbol)

    def remember_chunks(self, chunks: Chunks) -> None:
        """Remember N chunks."""
        for word in _list_words(chunks):
            self._add(word)

    def next_symbols(self, beginning: tuple[int, ...]) -> list[tuple[int, dict[int, int]]]:
        """Return the contexts of a chunk that begins so, with how often chunks went on with each symbol there."""
        return [(which, self._counts.find(context)[0]) for which, context in _list_contexts(beginning)]

    def fork(self) -> "DocumentWords":
        """Return a copy that goes on by itself."""
        copied = DocumentWords(self.k, self.end, self.fixed)
        copied._words, copied._counts = set(self._words), self._counts.fork()
        return copied


def _list_words(chunks: Chunks) -> list[tuple[int, ...]]:
    return [tuple(row[:n]) for row, n in zip(chunks.tokens.tolist(), chunks.lengths.tolist(), strict=True)]


def _list_contexts(beginning: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the contexts of the symbol after a beginning, each with its number."""
    for number, size in enumerate(SUFFIXES):
        if len(beginning) >= size:
            yield number, beginning[-size:]
    yield len(SUFFIXES), (_BEGIN, *beginning)


@dataclass
class Speller:
    """Joins decoder and words of the document.

    Attributes:
        log_scale: (K + 1, S) float64 log τ by place and context.
    """

    log_scale: Tensor

    @classmethod
    def fit(cls, decisions: Tensor, counts: Tensor, spelled: Tensor) -> "Speller":
        """Fit τ by penalised maximum likelihood on held-out chunks.

        Args:
            decisions: (N, K + 1) the decoder's log p, see `SequenceModel.decision_log_likelihood`.
            counts: (N, K + 1, S, 3), see `DocumentWords.read_chunks`.
            spelled: (N,) true for the chunks that only the decoder knows.
        """
        rows = spelled if int(spelled.sum()) >= _FEWEST else torch.ones_like(spelled)
        decisions, counts = decisions[rows], counts[rows]
        start = torch.full(counts.shape[1:3], _START, dtype=torch.float64).log()
        scale = start.clone().requires_grad_()
        speller = cls(scale)

        def loss() -> Tensor:
            value = -speller.mix_decisions(decisions, counts).sum(1).mean()
            return value + _PRIOR / max(1, len(decisions)) * (scale - start).square().sum()

        if len(decisions):
            minimise(loss, [scale])
        return cls(scale.detach())

    def mix_decisions(self, decisions: Tensor, counts: Tensor) -> Tensor:
        """Return log p (N, K + 1) float64 of every decision from the decoder's and the counts (N, K + 1, S, 3)."""
        decisions = decisions.double()
        probability, helped = decisions.exp(), (counts[..., 1] > 0).any(-1)
        for number, scale in enumerate(self.log_scale.exp().unbind(1)):
            chosen, total, types = counts[:, :, number].double().unbind(-1)
            pull, seen = scale * types, total > 0
            mixed = (chosen + pull * probability) / (total + pull).where(seen, 1.0)
            probability = mixed.where(seen, probability)
        return probability.clamp(min=torch.finfo(torch.float64).tiny).log().where(helped, decisions)

    def mix_symbols(self, logits: Tensor, following: list[list[tuple[int, dict[int, int]]]], place: int) -> Tensor:
        """Return log p (B, V + 1) float64 of the symbols at a place.

        Args:
            logits: (B, V + 1) of the decoder.
            following: for each row the counts of each context, see `DocumentWords.next_symbols`.
            place: number of symbols before, the same for all rows.
        """
        result = logits.double().cpu().log_softmax(1)
        scales = self.log_scale[place].exp().tolist()
        for row, contexts in enumerate(following):
            for which, counts in contexts:
                if not counts:
                    continue
                pull = scales[which] * len(counts)
                votes = torch.zeros_like(result[row])
                votes[list(counts)] = torch.tensor(list(counts.values()), dtype=votes.dtype)
                result[row] = ((votes + pull * result[row].exp()) / (sum(counts.values()) + pull)).log()
        return result
