"""A set of known chunks, embedded once: the rows of the implicit matrix, among which the IEM score is normalised exactly.

Legend: C chunks of the set, K tokens of a chunk, E width of an embedding, N queries, or chunks that are looked up.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from haed.chunk.packing import Chunks, chunk_keys

_COLUMNS, _ROWS = 1 << 16, {"cpu": 256, "cuda": 2048}  # of the matrix of scores, at a time
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
        none = torch.zeros(1, dtype=torch.long)
        counts, documents = (torch.cat([none if x is None else x, none])[rows] for x in (self.counts, self.documents))
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
        small = keys.numel() * bias.element_size() <= _KEPT
        self.lexicon, self.keys, self.bias = lexicon, keys.to(bias.dtype) if small else keys, bias
        counts = lexicon.counts
        self.log_counts = torch.zeros_like(bias) if counts is None else counts.to(bias).log()

    def __len__(self) -> int:
        return len(self.lexicon)

    def scores(self, queries: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Scores (N, C) of all chunks; `prior` is the factor of the logarithms of their counts."""
        with torch.autocast(queries.device.type, enabled=False):
            wide = queries.to(self.bias.dtype)
            blocks = [wide @ keys.t() + bias for _, keys, bias in self._blocks(prior)]
        return torch.cat([wide.new_empty(len(wide), 0), *blocks], 1)

    def log_softmax(self, queries: Tensor, rows: Tensor, prior: Tensor | float = 0.0) -> Tensor:
        """Log q (N,), in nats, of the chunk in row `rows` (N,) after each query (N, E); −∞ where the row is −1.

        The matrix of scores is made block by block, and never held.
        """
        wide, rows = queries.to(self.bias.dtype), rows.to(queries.device)
        at_once = _ROWS.get(queries.device.type, 1024)
        normaliser = wide.new_full((len(wide),), -torch.inf)
        wanted = normaliser.clone()
        with torch.autocast(queries.device.type, enabled=False):
            for first, keys, bias in self._blocks(prior):
                sums = [(part @ keys.t()).add_(bias).logsumexp(1) for part in wide.split(at_once)]
                normaliser = torch.logaddexp(normaliser, torch.cat([normaliser[:0], *sums]))
                here = ((rows >= first) & (rows < first + len(bias))).nonzero().squeeze(1)
                own = rows[here] - first
                wanted[here] = (wide[here] * keys[own]).sum(1) + bias[own]
        return wanted - normaliser

    def _blocks(self, prior: Tensor | float) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Keys and what is added to their scores, in the type that is computed in, and the row of the first."""
        for first in range(0, len(self), _COLUMNS):
            rows = slice(first, first + _COLUMNS)
            yield first, self.keys[rows].to(self.bias.dtype), self.bias[rows] + prior * self.log_counts[rows]
