"""Chunks recalled from the train split: n-grams of chunks of orders up to 32, in a suffix array.

The order-n distribution is interpolated by Witten and Bell (1991):

    p_n(c | h) = (count(h, c) + types(h) · p_{n−1}(c | h′)) / (count(h) + types(h))

h is the last n chunks, h′ the same without its first, and p_0 the frequencies in the train split. Orders are `ORDERS`; an
order whose context was not seen is skipped. Each p_n sums to one over the distinct chunks of the train split.

A suffix array of contexts (positions sorted by the chunks before them, the nearest first) finds the occurrences of a
context as a range, and the range of the next order inside it. Cf. Liu et al. 2024 (infini-gram), over chunks. The
beginning of a document is a chunk of its own in contexts, so that beginnings are recalled as well.

Legend: M positions of the train split, U distinct chunks, N chunks of a document that are scored, K tokens of a chunk.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from haed.chunk.memory import Part, PartPrediction, PartScores
from haed.chunk.packing import Chunks, chunk_keys

ORDERS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
DEPTH = ORDERS[-1]
_BORDER = 0  # id of the place between documents; real chunks begin at 1
_Order = tuple[slice, int, int]  # of a context that matched: its places, the chunks that follow, the different ones
_SMALL = 32  # a context with at most so many occurrences has its types counted when it is asked


@dataclass
class ChunkRecall:
    """The chunk sequence of a train split, searchable for any sequence of chunks.

    Attributes:
        chunks: (U, K) the distinct chunks, in the order of their keys.
        keys: (U,) their keys, sorted; see `chunk_keys`.
        sequence: (DEPTH + n,) int32 id of every chunk, from 1, with `_BORDER` at both ends of every document. The first
            `DEPTH` are borders.
        order: (M,) int32 positions in `sequence`, sorted by what precedes them, the nearest first.
        starts: (U + 2,) where in `order` the positions after each id begin.
        ends: (D,) places in `order` of the positions that are the end of a document, sorted.
        ranges: (R,) sorted `order · M + first place` of every context that occurs more than `_SMALL` times.
        types: (R,) number of different chunks after each of them.
        counts: (U,) occurrences of each chunk.
    """

    chunks: Chunks
    keys: Tensor
    sequence: Tensor
    order: Tensor
    starts: Tensor
    ends: Tensor
    ranges: Tensor
    types: Tensor
    counts: Tensor

    @classmethod
    def build(cls, chunks: Chunks, ids: Tensor) -> "ChunkRecall":
        """Sort the positions of a train split.

        Args:
            chunks: the U distinct chunks, in the order of their keys.
            ids: (n,) int32 index of every chunk in them, plus 1; 0 after each document.
        """
        border = ids.new_zeros(DEPTH)
        sequence = torch.cat([border, ids]).int()
        positions = torch.arange(DEPTH, len(sequence))
        positions = positions[(sequence[positions] != _BORDER) | (sequence[positions - 1] != _BORDER)]
        order = _sort_contexts(sequence, positions)
        size = len(chunks)
        before = sequence[order.long() - 1]
        starts = torch.cat([border[:1].long(), torch.bincount(before.long(), minlength=size + 1).cumsum(0)])
        successors = sequence[order.long()]
        ranges, types = _count_types(sequence, order, successors)
        counts = torch.bincount(ids.long(), minlength=size + 1)[1:]
        ends = (successors == _BORDER).nonzero().squeeze(1)
        keys = chunk_keys(chunks.tokens, chunks.lengths)
        return cls(chunks, keys, sequence, order.int(), starts, ends, ranges, types, counts)

    def __post_init__(self) -> None:
        """Raise ValueError for tensors that do not fit together, as of a damaged file."""
        sizes = len(self.chunks), len(self.keys), len(self.counts), len(self.starts) - 2
        bounds = [(self.order, len(self.sequence)), (self.sequence, len(self.chunks) + 1), (self.ends, len(self.order))]
        bounds.append((self.starts, len(self.order) + 1))
        inside = all(bool(((x >= 0) & (x < most)).all()) for x, most in bounds)
        if len(set(sizes)) > 1 or not inside or len(self.ranges) != len(self.types) or bool((self.counts < 1).any()):
            raise ValueError("the tensors of the recalled part do not fit together")

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def cumulative_counts(self) -> Tensor:
        """Sums (U,) float64 of the counts up to each chunk."""
        return self.counts.double().cumsum(0)

    def find_ids(self, chunks: Chunks) -> Tensor:
        """Return the id (N,) of each of N chunks, −1 for those that the train split does not have."""
        if not len(self.keys):
            return torch.full((len(chunks),), -1)
        place = torch.searchsorted(self.keys, chunk_keys(chunks.tokens, chunks.lengths)).clamp(max=len(self.keys) - 1)
        same = self.chunks.lengths[place] == chunks.lengths
        same &= (self.chunks.tokens[place] == chunks.tokens).all(1)
        return (place + 1).where(same, -1)

    def find_contexts(self, ids: Tensor, depth: int, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Return the range in `order` of the contexts of each place: first and end, (N + 1, depth + 1) each.

        Column d is the range of the last d chunks, empty (0, 0) if they were not seen.

        Args:
            ids: (N,) ids of a document; place N is that behind the last.
            depth: the longest context.
            begin: the first place that is searched; those before have no ranges.
        """
        places = len(ids) + 1
        first, end = torch.zeros(2, places, depth + 1, dtype=torch.long)
        end[:, 0] = len(self)
        active = torch.arange(begin, places)
        for d in range(depth):
            active = active[active > d]
            wanted = ids[active - 1 - d].long()
            low, high = first[active, d], end[active, d]
            if d == 0:
                known = wanted >= 0
                wanted = wanted.clamp(min=0)
                low, high = self.starts[wanted], self.starts[wanted + 1].where(known, self.starts[wanted])
            else:
                low, high = self._narrow(low, high, wanted, d)
            alive = low < high
            active = active[alive]
            if not len(active):
                break
            first[active, d + 1], end[active, d + 1] = low[alive], high[alive]
        return first, end

    def find_last_context(self, ids: Tensor, depth: int) -> list[tuple[int, int]]:
        """Return the range of the last 0, 1, … chunks of ids (N,), as far as they were seen; see `find_contexts`.

        For one place it takes a fifth of the time.
        """
        sequence, order = self.sequence.numpy(), self.order.numpy()
        ranges = [(0, len(self))]
        for d, chunk in enumerate(ids.flip(0)[:depth].tolist()):
            low, high = ranges[-1]
            if d == 0:
                low, high = self.starts[chunk : chunk + 2].tolist() if chunk >= 0 else (0, 0)
            else:
                places, chunk_before = range(low, high), partial(_chunk_before, sequence, order, d + 1)
                first = bisect_left(places, chunk, key=chunk_before)
                end = bisect_right(places, chunk, first, key=chunk_before)
                low, high = low + first, low + end
            if low >= high:
                break
            ranges.append((low, high))
        return ranges

    def _narrow(self, low: Tensor, high: Tensor, wanted: Tensor, d: int) -> tuple[Tensor, Tensor]:
        """Return the part of each range [low, high) whose chunk at distance d + 1 is `wanted`."""
        bounds = []
        for value in (wanted, wanted + 1):
            a, b = low.clone(), high.clone()
            while len(a) and bool((a < b).any()):
                middle = (a + b) // 2
                seen = self.sequence[self.order[middle.clamp(max=len(self) - 1)].long() - 1 - d].long()
                smaller = (seen < value) & (a < b)
                a, b = (middle + 1).where(smaller, a), middle.where(~smaller & (a < b), b)
            bounds.append(a)
        return bounds[0], bounds[1]

    def count_outcomes(self, first: Tensor, end: Tensor) -> Tensor:
        """Return how many chunks follow the contexts of ranges (n,): the ends of documents left out."""
        inside = torch.searchsorted(self.ends, end) - torch.searchsorted(self.ends, first)
        return end - first - inside

    def count_types(self, order: int, first: Tensor, end: Tensor) -> Tensor:
        """Return how many different chunks follow the contexts of non-empty ranges (n,) of an order."""
        result = torch.ones_like(first)
        large = (end - first > _SMALL).nonzero().squeeze(1)
        if len(large):
            place = torch.searchsorted(self.ranges, order * len(self) + first[large])
            result[large] = self.types[place].long()
        small = ((end - first <= _SMALL) & (end - first > 1)).nonzero().squeeze(1)
        if len(small):
            places = first[small, None] + torch.arange(_SMALL)
            inside = places < end[small, None]
            after = self.sequence[self.order[places.clamp(max=len(self) - 1)].long()].where(inside, _BORDER)
            after = after.sort(1).values
            new = torch.cat([after[:, :1] != _BORDER, after[:, 1:] != after[:, :-1]], 1) & (after != _BORDER)
            result[small] = new.sum(1)
        return result

    def count_after(self, order: int, places: slice) -> tuple[int, int]:
        """Return how many chunks follow the context of one range of an order, and how many different ones.

        For one range it takes a seventh of the time of `count_outcomes` and `count_types`, or less.
        """
        first, end, ends = places.start, places.stop, self.ends.numpy()
        if end - first <= _SMALL:
            after = self.sequence.numpy()[self.order.numpy()[places]].tolist()
            return len(after) - after.count(_BORDER), len({*after} - {_BORDER})
        total = end - first - int(ends.searchsorted(end) - ends.searchsorted(first))
        return total, int(self.types[self.ranges.numpy().searchsorted(order * len(self) + first)])


def _sort_contexts(sequence: Tensor, positions: Tensor) -> Tensor:
    """Sort positions by the chunks before each, the nearest first, by doubling.

    More than DEPTH chunks are compared: a chunk is counted after a context by the context that is longer by this chunk.
    """
    rank = torch.cat([sequence.new_zeros(1), sequence[:-1]]).long()  # by the chunk before
    length = 1
    while length <= DEPTH:
        earlier = torch.cat([rank.new_zeros(length), rank[:-length]])
        rank = torch.unique(rank * (len(sequence) + 1) + earlier, return_inverse=True)[1]
        length *= 2
    return positions[rank[positions].argsort(stable=True)].int()


def _count_types(sequence: Tensor, order: Tensor, successors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of frequent contexts, and how many different chunks follow each; see `ChunkRecall.ranges`."""
    size, places = len(order), torch.arange(len(order))
    alike = torch.ones(size, dtype=torch.bool)  # the context is that of the place before
    alike[:1] = False
    ranges, types = [], []
    for depth in range(1, DEPTH + 1):
        left = alike.nonzero().squeeze(1)
        both = sequence[order[left].long() - depth] == sequence[order[left - 1].long() - depth]
        alike[left[~both]] = False
        if depth not in ORDERS:
            continue
        first = (~alike).nonzero().squeeze(1)
        sizes = torch.diff(first, append=first.new_tensor([size]))
        frequent = (sizes > _SMALL).nonzero().squeeze(1)
        group = torch.full((len(first),), -1)
        group[frequent] = torch.arange(len(frequent))
        groups = group.repeat_interleave(sizes)
        which = ((groups >= 0) & (successors != _BORDER)).nonzero().squeeze(1)
        pairs = torch.unique(groups[which] * (int(sequence.max()) + 1) + successors[which].long())
        types.append(torch.bincount(pairs // (int(sequence.max()) + 1), minlength=len(frequent)))
        ranges.append(depth * size + places[first[frequent]])
    return torch.cat(ranges), torch.cat(types).int()


def _chunk_before(sequence: np.ndarray, order: np.ndarray, distance: int, place: int) -> int:
    """Return the chunk at a distance before a place of the sorted contexts."""
    return int(sequence[order[place] - distance])


class Recalled(Part):
    """The part of a likelihood that recalls what followed the last chunks of a document in the train split.

    Args:
        recall: the train split's chunks.

    It says of itself the longest order that matched, how many different chunks follow there as a share of the
    occurrences, and the logarithm of the occurrences.
    """

    name = "recalled"
    features = len(ORDERS) + 2

    def __init__(self, recall: ChunkRecall) -> None:
        self.recall = recall
        self.ids = torch.zeros(1, dtype=torch.long)  # the border, then the last chunks of the document

    @property
    def vocabulary(self) -> Chunks:
        """The distinct chunks of the train split."""
        return self.recall.chunks

    def score(self, states: Tensor, chunks: Chunks) -> PartScores:
        """See `Part.score`; `states` are not used."""
        recall, count = self.recall, len(chunks)
        new_ids = recall.find_ids(chunks)
        before = len(self.ids)
        ids = torch.cat([self.ids, new_ids])
        first, end = recall.find_contexts(ids, DEPTH + 1, before)
        here = slice(before, before + count)
        known = new_ids > 0
        probability = torch.zeros(count, dtype=torch.float64)
        probability[known] = recall.counts[new_ids[known] - 1].double() / max(1, int(recall.counts.sum()))
        features = torch.zeros(count, self.features)
        for order, seen, totals, types in self._match_orders(first[here], end[here], features):
            after = seen + before + 1
            times = (end[after, order + 1] - first[after, order + 1]).double()
            probability[seen] = (times + types * probability[seen]) / (totals + types)
        self.ids = ids[-(DEPTH + 1) :]
        return PartScores(probability.log(), features, torch.full((count,), len(recall.keys) > 0))

    def _match_orders(
        self, first: Tensor, end: Tensor, features: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield each order with the places (n,) where it matched, the occurrences there and their types, float64.

        The shortest order comes first.

        Args:
            first: (N, D) of the ranges of contexts, see `ChunkRecall.find_contexts`.
            end: (N, D) likewise.
            features: (N, F) zeros, which are filled.
        """
        for number, order in enumerate(ORDERS):
            low, high = first[:, order].contiguous(), end[:, order].contiguous()
            totals = self.recall.count_outcomes(low, high)
            seen = (totals > 0).nonzero().squeeze(1)
            if not len(seen):
                break  # nor is a longer context
            occurrences = totals[seen].double()
            types = self.recall.count_types(order, low[seen], high[seen]).double()
            features[seen, number] = 1
            features[seen, -2], features[seen, -1] = (types / occurrences).float(), occurrences.log1p().float()
            yield order, seen, occurrences, types

    def remember_chunks(self, states: Tensor, chunks: Chunks) -> None:
        """See `Part.remember_chunks`; `states` are not used."""
        self.ids = torch.cat([self.ids, self.recall.find_ids(chunks)])[-(DEPTH + 1) :]

    def predict_next(self, state: Tensor) -> PartPrediction:
        """See `Part.predict_next`; the outcomes are all distinct chunks of the train split."""
        recall, orders, features = self.recall, list[_Order](), [0.0] * self.features
        ranges = recall.find_last_context(self.ids, DEPTH)
        for number, order in enumerate(ORDERS[: bisect_left(ORDERS, len(ranges))]):
            places = slice(*ranges[order])
            total, types = recall.count_after(order, places)
            if not total:
                break
            orders.append((places, total, types))
            features[number], features[-2], features[-1] = 1.0, types / total, math.log1p(total)
        return PartPrediction(
            torch.tensor(features),
            len(recall.keys) > 0,
            lambda: self._list_outcomes(orders),
            lambda generator: self._draw_outcome(orders, generator),
        )

    def _draw_outcome(self, orders: list[_Order], generator: torch.Generator | None) -> Chunks:
        """Draw a chunk: from the longest order that matched, or with the probability that it leaves from a shorter one."""
        recall = self.recall
        draw = partial(torch.rand, 1, dtype=torch.float64, generator=generator)
        for places, total, types in reversed(orders):
            if float(draw()) * (total + types) >= total:
                continue
            while True:  # few places are the end of a document
                place = places.start + int(float(draw()) * (places.stop - places.start))
                if (chunk := int(recall.sequence[recall.order[place]])) != _BORDER:
                    return recall.chunks[slice(chunk - 1, chunk)]
        passed = draw() * recall.cumulative_counts[-1]
        row = torch.searchsorted(recall.cumulative_counts, passed, right=True).clamp(max=len(recall.keys) - 1)
        return recall.chunks[row]

    def _list_outcomes(self, orders: list[_Order]) -> tuple[Chunks, Tensor]:
        """Return all chunks and p (U,), from the ranges, occurrences and types of the orders that matched."""
        recall, left, weights = self.recall, 1.0, []
        for places, total, types in reversed(orders):  # the longest context leaves a share to the shorter ones
            weights.append((places, left / (total + types)))
            left *= types / (total + types)
        probability = F.pad(recall.counts.double() * (left / max(1, int(recall.counts.sum()))), (1, 0))  # by id
        for places, weight in weights:
            after = recall.sequence.index_select(0, recall.order[places])
            probability.index_add_(0, after, torch.full((len(after),), weight, dtype=torch.float64))
        return recall.chunks, probability[1:]
