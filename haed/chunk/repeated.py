"""Chunks repeated from the same document: n-grams of its chunks so far, of orders up to 8.

    p_n(c | h) = (count(h, c) + types(h) · p_{n−1}(c | h′)) / (count(h) + types(h))

as in `recalled.py`, but over the document: h is its last n chunks, p_0 their frequencies. So a line that returns is
repeated word for word, whether or not its states are alike, which is what `copied.py` compares. Cf. the contexts of
prediction by partial matching (Cleary and Witten 1984), over chunks.

Legend: N chunks that are scored, P different chunks of the document, K tokens of a chunk.
"""

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from haed.chunk.memory import Part, PartPrediction, PartScores
from haed.chunk.packing import Chunks
from haed.chunk.spelling import ContextCounts

ORDERS = (1, 2, 3, 4, 6, 8)
MOST = 1 << 16  # chunks of a document that are counted; older ones are forgotten
_BORDER = b""  # stands before a document, so that its beginning is a context

Level = tuple[int, dict[bytes, int], int]  # an order, the counts of what followed its context, and their sum


class Repeated(Part):
    """The n-grams of one document.

    It says of itself which orders matched, how many different chunks follow there as a share of the occurrences, the
    logarithm of these, and the share of different chunks in the document.

    Args:
        k: K.
        most: maximum number of chunks that are counted.
    """

    name = "repeated"
    features = len(ORDERS) + 3

    def __init__(self, k: int, most: int = MOST) -> None:
        self.k, self.most = k, most
        self._counts: ContextCounts[bytes] = ContextCounts()
        self._counted: deque[bytes] = deque()
        self._before: tuple[bytes, ...] = (_BORDER,)  # the last chunks that are forgotten
        self._last: tuple[bytes, ...] = (_BORDER,)

    def __copy__(self) -> "Repeated":
        copied = Repeated(self.k, self.most)
        copied._counts, copied._counted = self._counts.fork(), self._counted.copy()
        copied._before, copied._last = self._before, self._last
        return copied

    def score(self, states: Tensor, chunks: Chunks) -> PartScores:
        """See `Part.score`; `states` are not used."""
        log_prob, features = [], []
        for word in _list_words(chunks):
            levels = self._match_orders()
            probability = 0.0
            for order, following, total in levels:
                pull = len(following) if order else 0
                probability = (following.get(word, 0) + pull * probability) / (total + pull)
            log_prob.append(math.log(probability) if probability else -math.inf)
            features.append(_describe_levels(levels))
            self._remember(word)
        features_of_all = torch.tensor(features, dtype=torch.float32).view(len(chunks), self.features)
        present = features_of_all[:, -1] > 0
        return PartScores(torch.tensor(log_prob, dtype=torch.float64), features_of_all, present)

    def remember_chunks(self, states: Tensor, chunks: Chunks) -> None:
        """See `Part.remember_chunks`; `states` are not used."""
        for word in _list_words(chunks):
            self._remember(word)

    def predict_next(self, state: Tensor) -> PartPrediction:
        """See `Part.predict_next`; there is one outcome for each different chunk of the document."""
        levels = self._match_orders()
        features = torch.tensor(_describe_levels(levels))
        return PartPrediction(
            features, bool(levels), lambda: self._list_outcomes(levels), lambda g: self._draw_outcome(levels, g)
        )

    def _list_outcomes(self, levels: list[Level]) -> tuple[Chunks, Tensor]:
        """Return the P different chunks and p (P,), from the orders that matched."""
        place = {word: number for number, word in enumerate(levels[0][1])}
        probability = torch.zeros(len(place), dtype=torch.float64)
        for order, following, total in levels:
            pull = len(following) if order else 0
            counts = torch.tensor(list(following.values()), dtype=torch.float64)
            probability *= pull / (total + pull)
            probability[[place[word] for word in following]] += counts / (total + pull)
        return self._stack_words(list(place)), probability

    def _draw_outcome(self, levels: list[Level], generator: torch.Generator | None) -> Chunks:
        """Draw a chunk: the longest order that matched, or with the probability that it leaves them a shorter one."""
        for order, following, total in reversed(levels):
            pull = len(following) if order else 0
            place = float(torch.rand(1, dtype=torch.float64, generator=generator)) * (total + pull)
            for word, count in following.items():
                place -= count
                if place < 0:
                    return self._stack_words([word])
        return self._stack_words([word])  # what rounding leaves

    def _stack_words(self, words: list[bytes]) -> Chunks:
        padded = b"".join(word.ljust(self.k, b"\0") for word in words)
        tokens = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(-1, self.k).long()
        return Chunks(tokens, torch.tensor([len(word) for word in words]))

    def _match_orders(self) -> list[Level]:
        """Return each order that matched with the counts of what followed there, and their sum; the shortest first."""
        levels = []
        for context in _list_contexts(self._last):
            following, total = self._counts.find(context)
            if not total:
                break
            levels.append((len(context), following, total))
        return levels

    def _remember(self, word: bytes) -> None:
        for context in _list_contexts(self._last):
            self._counts.add(context, word)
        self._last = (*self._last, word)[-ORDERS[-1] :]
        self._counted.append(word)
        if len(self._counted) > self.most:
            oldest = self._counted.popleft()
            for context in _list_contexts(self._before):
                self._counts.remove(context, oldest)
            self._before = (*self._before, oldest)[-ORDERS[-1] :]


def _list_words(chunks: Chunks) -> list[bytes]:
    return [row[:n].tobytes() for row, n in zip(chunks.tokens.byte().numpy(), chunks.lengths.tolist(), strict=True)]


def _list_contexts(before: tuple[bytes, ...]) -> Iterator[tuple[bytes, ...]]:
    """Yield the contexts of a chunk, the shortest first: no chunk, and the last ones of each order."""
    yield ()
    for order in ORDERS:
        if len(before) >= order:
            yield before[-order:]


def _describe_levels(levels: list[Level]) -> list[float]:
    """Return the features of the orders that matched."""
    if not levels:
        return [0.0] * Repeated.features
    matched = [float(any(order == level[0] for level in levels)) for order in ORDERS]
    order, following, total = levels[-1]
    longest = [len(following) / total, math.log1p(total)] if order else [0.0, 0.0]
    return [*matched, *longest, len(levels[0][1]) / levels[0][2]]
