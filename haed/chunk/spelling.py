"""The decoder helped by the words of the document: it spells a new chunk that begins as others did.

At every symbol of a chunk, the different chunks of the document that begin alike vote for the next symbol. Witten and
Bell's interpolation (1991) joins them with the decoder:

    p(x | s) = (count(s, x) + τ_|s| · types(s) · p_decoder(x)) / (count(s) + τ_|s| · types(s))

s is the chunk so far, count(s) the number of different chunks that begin with s and go on, and types(s) the number of
their next symbols, one of which may be the end. Where no chunk begins with s, p is the decoder's. So p sums to one over
the symbols, and spelling over all strings. τ for each length of s is fitted on held-out chunks. `zimbalo: ` costs little
after `zimbalo`, which copying whole chunks cannot do.

Legend: N chunks, K tokens of a chunk at most, V vocabulary; symbol V is the end of a chunk.
"""

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from haed.chunk.packing import Chunks

_MOST = 1 << 17  # different chunks of a document; further ones are not remembered
_STEPS = 60  # of L-BFGS
_START, _PRIOR = 1.0, 2.0  # τ at first, and the strength of the pull of its logarithm towards that, in chunks
_FEWEST = 200  # chunks that no other part knows, on which τ is fitted; of fewer, on all


class DocumentWords:
    """The different chunks of one document, by how they begin.

    Args:
        k: K.
        end: V.
        fixed: true if chunks have a fixed size, so that no end is spelled.
    """

    def __init__(self, k: int, end: int, fixed: bool) -> None:
        self.k, self.end, self.fixed = k, end, fixed
        self._words: set[tuple[int, ...]] = set()
        self._next: dict[tuple[int, ...], dict[int, int]] = {}  # by beginning, the counts of the next symbols
        self._totals: dict[tuple[int, ...], int] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> "DocumentWords":
        copied = DocumentWords(self.k, self.end, self.fixed)
        copied._words, copied._totals = set(self._words), dict(self._totals)
        copied._next = {beginning: dict(counts) for beginning, counts in self._next.items()}
        return copied

    def read_chunks(self, chunks: Chunks) -> Tensor:
        """Return the counts for N chunks of the document, each given those before it, and remember them.

        Returns:
            (N, K + 1, 3) count(s, x), count(s) and types(s) at every symbol x of each chunk; 0 behind the last.
        """
        return self._count(chunks, remember=True)

    def count_symbols(self, chunks: Chunks) -> Tensor:
        """Return the counts for N possible next chunks, as `read_chunks`, and remember nothing."""
        return self._count(chunks, remember=False)

    def _count(self, chunks: Chunks, remember: bool) -> Tensor:
        counts = torch.zeros(len(chunks), self.k + 1, 3)
        places: list[tuple[int, int]] = []
        values: list[tuple[int, int, int]] = []
        for number, (tokens, length) in enumerate(zip(chunks.tokens.tolist(), chunks.lengths.tolist(), strict=True)):
            word = tuple(tokens[:length])
            for place, symbol in enumerate(self._symbols(word)):
                beginning = word[:place]
                if (total := self._totals.get(beginning)) is None:
                    break  # no longer beginning has been seen either
                following = self._next[beginning]
                places.append((number, place))
                values.append((following.get(symbol, 0), total, len(following)))
            if remember:
                self._add(word)
        if places:
            rows, columns = torch.tensor(places).unbind(1)
            counts[rows, columns] = torch.tensor(values, dtype=torch.float32)
        return counts

    def _symbols(self, word: tuple[int, ...]) -> tuple[int, ...]:
        return word if self.fixed or len(word) == self.k else (*word, self.end)

    def _add(self, word: tuple[int, ...]) -> None:
        if word in self._words or len(self._words) >= _MOST:
            return
        self._words.add(word)
        for place, symbol in enumerate(self._symbols(word)):
            beginning = word[:place]
            following = self._next.setdefault(beginning, {})
            following[symbol] = following.get(symbol, 0) + 1
            self._totals[beginning] = self._totals.get(beginning, 0) + 1

    def remember_chunks(self, chunks: Chunks) -> None:
        """Remember N chunks."""
        for tokens, length in zip(chunks.tokens.tolist(), chunks.lengths.tolist(), strict=True):
            self._add(tuple(tokens[:length]))

    def next_symbols(self, beginning: tuple[int, ...]) -> dict[int, int]:
        """Return how many different chunks that begin so go on with each symbol."""
        return self._next.get(beginning, {})

    def fork(self) -> "DocumentWords":
        """Return a copy that goes on by itself."""
        return deepcopy(self)


@dataclass
class Speller:
    """Joins decoder and words of the document.

    Attributes:
        log_scale: (K + 1,) float64 log τ by the length of the beginning.
    """

    log_scale: Tensor

    @classmethod
    def fit(cls, decisions: Tensor, counts: Tensor, spelled: Tensor) -> "Speller":
        """Fit τ by maximum likelihood on held-out chunks.

        Args:
            decisions: (N, K + 1) the decoder's log p, see `SequenceModel.decision_log_likelihood`.
            counts: (N, K + 1, 3), see `DocumentWords.read_chunks`.
            spelled: (N,) true for the chunks that only the decoder knows.
        """
        rows = spelled if int(spelled.sum()) >= _FEWEST else torch.ones_like(spelled)
        decisions, counts = decisions[rows], counts[rows]
        start = torch.full((counts.shape[1],), _START, dtype=torch.float64).log()
        scale = start.clone().requires_grad_()
        speller = cls(scale)
        optimizer = torch.optim.LBFGS([scale], max_iter=_STEPS, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = -speller.mix_decisions(decisions, counts).sum(1).mean()
            value = value + _PRIOR / max(1, len(decisions)) * (scale - start).square().sum()
            value.backward()
            return value

        if len(decisions):
            optimizer.step(loss)
        return cls(scale.detach())

    def mix_decisions(self, decisions: Tensor, counts: Tensor) -> Tensor:
        """Return log p (N, K + 1) float64 of every decision from the decoder's and the counts (N, K + 1, 3)."""
        decisions, (chosen, total, types) = decisions.double(), counts.double().unbind(2)
        pull = self.log_scale.exp() * types
        seen = total > 0
        mixed = (chosen + pull * decisions.exp()) / (total + pull).where(seen, 1.0)
        return mixed.clamp(min=torch.finfo(torch.float64).tiny).log().where(seen, decisions)

    def mix_symbols(self, logits: Tensor, following: list[dict[int, int]], place: int) -> Tensor:
        """Return log p (B, V + 1) float64 of the symbols at a place, from the decoder's logits and counts of each row."""
        result = logits.double().cpu().log_softmax(1)
        scale = float(self.log_scale[place].exp())
        for row, counts in enumerate(following):
            if counts:
                pull = scale * len(counts)
                votes = torch.zeros_like(result[row])
                votes[list(counts)] = torch.tensor(list(counts.values()), dtype=votes.dtype)
                result[row] = ((votes + pull * result[row].exp()) / (sum(counts.values()) + pull)).log()
        return result
