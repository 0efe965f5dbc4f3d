"""The IEM score as a likelihood: a softmax over all chunks of a closed set.

Legend: C chunks of the set, M real chunks of windows, E width of an embedding.
"""

import torch
from torch import Tensor

from haed.chunk.model import HAED
from haed.chunk.packing import Chunks, chunk_keys
from haed.system import Windows

_ENCODED, _SCORED = 1 << 13, {"cpu": 256, "cuda": 2048}  # chunks at a time


class ClosedSoftmax:
    """Embeds every chunk of the set once.

    Args:
        model: in evaluation mode.
        chunks: C different ones, on the CPU.
    """

    @torch.no_grad()
    def __init__(self, model: HAED, chunks: Chunks) -> None:
        self.model = model
        self._keys, order = chunk_keys(chunks.tokens, chunks.lengths).sort()
        parts = [chunks[rows] for rows in order.split(_ENCODED)]
        found = [model.encode(part) for part in parts]
        self._vectors = torch.cat([model.key(each.vector) for each in found])
        self._bias = torch.cat([each.bias for each in found]).to(
            torch.promote_types(self._vectors.dtype, torch.float32)
        )

    def __len__(self) -> int:
        return len(self._keys)

    @torch.no_grad()
    def log_likelihood(self, windows: Windows) -> Tensor:
        """Log p, in nats, of each real chunk of windows on the CPU among the chunks of the set, to which it belongs: (M,)."""
        real = windows.real
        target = torch.searchsorted(self._keys, chunk_keys(windows.tokens[real], windows.lengths[real]))
        queries = self.model.query(self.model.predictions(windows))
        rows = _SCORED.get(queries.device.type, 1024)
        found, vectors = [queries.new_zeros(0, dtype=self._bias.dtype)], self._vectors.to(queries.dtype)
        for query, column in zip(queries.split(rows), target.to(queries.device).split(rows), strict=True):
            scores = (query @ vectors.t()).to(self._bias.dtype) + self._bias
            found.append(scores.gather(1, column[:, None]).squeeze(1) - scores.logsumexp(1))
        return torch.cat(found)
