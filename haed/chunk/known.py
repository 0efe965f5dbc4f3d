"""A set of known chunks, embedded once: the rows of the implicit matrix, among which the IEM score is normalised exactly.

Legend: C chunks of the set, K tokens of a chunk, E width of an embedding, N queries, or chunks that are looked up.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from haed.chunk.packing import Chunks, chunk_keys

# Queries and chunks that are scored at a time. On a CPU both and their scores are to stay in its cache (docs/log.md).
_BLOCK, _LARGE = {"cpu": (1 << 10, 1 << 11)}, (1 << 11, 1 << 16)
_KEPT = 1 << 28  # bytes: keys of a smaller set are kept in the type that is computed in


class Lexicon:
    """Chunks by what they are, and how often the train split has them.

    Args:
        chunks: C different ones, on the CPU.
        counts: (C,) of the train split; None where they have no part in scores.
        documents: (C,) of the train split that have each; None where nothing is trained.
    """

    def __init__(self, chunks: Chunks, counts: Tensor | None = None, documents: Tensor | None = None) -> None:
        self.chunks, self.counts, self.documents = chunks, counts, documents
        self._hashes, self._order = chunk_keys(chunks.tokens, chunks.lengths).sort()

    def __len__(self) -> int:
        return len(self.chunks)

    def find(self, chunks: Chunks) -> Tensor:
        """The row of each of N chunks on the CPU, −1 of those that are not here: (N,)."""
        if not len(self):
            return torch.full((len(chunks),), -1)
        place = torch.searchsorted(self._hashes, chunk_keys(chunks.tokens, chunks.lengths)).clamp(max=len(self) - 1)
        rows = self._order[place]
        same = (self.chunks.lengths[rows] == chunks.lengths) & (self.chunks.tokens[rows] == chunks.tokens).all(1)
        return rows.where(same, -1)  # by the tokens: two strings with one hash would both have its probability

    def told(self, chunks: Chunks) -> tuple[Tensor, Tensor]:
        """Counts of N chunks on the CPU in the train split, and of its documents that have them, 0 of unknown ones: (N,) each."""
        rows = self.find(chunks)
        none = torch.zeros(len(self) + 1, dtype=torch.long)
        told = (none if x is None else torch.cat([x, none[:1]]) for x in (self.counts, self.documents))
        counts, documents = (x[rows] for x in told)
        return counts, documents

    def beginning(self, tokens: Tensor) -> Tensor:
        """(C,) true of the chunks that begin with `tokens` (n,), on the CPU."""
        return (self.chunks.lengths >= len(tokens)) & (self.chunks.tokens[:, : len(tokens)] == tokens).all(1)


class Known:
    """A lexicon with its embeddings.

    Args:
        lexicon: C chunks.
        keys: (C, E) what a query is multiplied with, of any floating type, in memory or mapped from a file.
        bias: (C,) that is added to scores, float32 or wider, which is the type that is computed in; on the keys' device.

    Attributes:
        log_counts: (C,) like `bias`; 0 without counts.
    """

    def __init__(self, lexicon: Lexicon, keys: Tensor, bias: Tensor) -> None:
        self._small = keys.numel() * bias.element_size() <= _KEPT
        self.lexicon, self.keys, self.bias = lexicon, keys.to(bias.dtype) if self._small else keys, bias
        counts = lexicon.counts
        self.log_counts = torch.zeros_like(bias) if counts is None else counts.to(bias).log()

    def __len__(self) -> int:
        return len(self.lexicon)

    def scores(self, queries: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Scores (N, C) of all chunks; `prior` is the factor of the logarithms of their counts."""
        wide = queries.to(self.bias.dtype)
        if self.columns is not None:
            with torch.autocast(queries.device.type, enabled=False):
                return wide @ self.columns + self._added(prior)
        return torch.cat([wide.new_empty(len(wide), 0), *self._blocks(wide, self._added(prior))], 1)

    @cached_property
    def columns(self) -> Tensor | None:
        """The keys of a small set as columns (E, C): one query is multiplied with them in half the time or less."""
        return self.keys.t().contiguous() if self._small else None

    def log_softmax(self, queries: Tensor, rows: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Log q (N,), in nats, of the chunk in row `rows` (N,) after each query (N, E); −∞ where the row is −1.

        The matrix of scores is made block by block, and never held; what is not known costs nothing.
        """
        result = queries.new_full((len(queries),), -torch.inf, dtype=self.bias.dtype)
        added, known = self._added(prior), (rows >= 0).nonzero().squeeze(1)
        for some in known.split(_BLOCK.get(queries.device.type, _LARGE)[0]):
            here, own = some.to(result.device), rows[some].to(result.device)
            wide = queries[here].to(result.dtype)
            wanted = (wide * self.keys[own].to(wide.dtype)).sum(1) + added[own]
            normaliser = torch.full_like(wanted, -torch.inf)
            for block in self._blocks(wide, added):
                normaliser = torch.logaddexp(normaliser, block.logsumexp(1))
            result[here] = wanted - normaliser
        return result

    def _added(self, prior: Tensor | float) -> Tensor:
        """What is added to the products (C,)."""
        return self.bias + prior * self.log_counts

    def _blocks(self, queries: Tensor, added: Tensor) -> Iterator[Tensor]:
        """Scores (N, c) of some chunks after the others, in the type that is computed in."""
        columns = _BLOCK.get(queries.device.type, _LARGE)[1]
        for keys, bias in zip(self.keys.split(columns), added.split(columns), strict=True):
            with torch.autocast(queries.device.type, enabled=False):
                block = torch.addmm(bias, queries, keys.to(queries.dtype).t())
            yield block
