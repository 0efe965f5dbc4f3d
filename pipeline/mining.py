"""Hard negatives: each query's nearest chunks in the bank, by a FAISS index that is built anew every so often."""

import numpy as np
import torch
from torch import Tensor

from haed.bank import Bank
from haed.model import HAED

_FLAT = 1 << 13  # larger banks are searched by cells
_AT_ONCE = 1 << 13
_COLUMNS = ("tokens", "lengths", "keys")


class Miner:
    """Finds the chunks that score highest for a query, of those the bank had, and as they were embedded, at `refresh`.

    Only who is a neighbour may be stale: the objective embeds the mined chunks anew.

    Args:
        model: embeds the bank.
        bank: of chunks.
        count: H, negatives of each query.
    """

    def __init__(self, model: HAED, bank: Bank, count: int) -> None:
        self.model, self.bank, self.count = model, bank, count
        self._chunks: dict[str, Tensor] = {}

    @torch.no_grad()
    def refresh(self) -> None:
        """Indexes the bank as it is."""
        if not len(self.bank):
            return
        device = self.model.scale.device
        parts = zip(self.bank.tokens.split(_AT_ONCE), self.bank.lengths.split(_AT_ONCE), strict=True)
        found = [self.model.embed(tokens.to(device), lengths.to(device)) for tokens, lengths in parts]
        rows = [torch.cat([self.model.key(each.vector), each.bias[:, None]], 1).float().cpu() for each in found]
        self._index({"vectors": torch.cat(rows)} | {name: getattr(self.bank, name).clone() for name in _COLUMNS})

    def _index(self, chunks: dict[str, Tensor]) -> None:
        import faiss

        self._chunks = chunks
        vectors = chunks["vectors"].numpy()
        cells = f"IVF{int(4 * len(vectors) ** 0.5)}," if len(vectors) > _FLAT else ""
        self._found = faiss.index_factory(vectors.shape[1], f"{cells}Flat", faiss.METRIC_INNER_PRODUCT)
        self._found.train(vectors)
        self._found.add(vectors)
        if cells:
            faiss.ParameterSpace().set_index_parameter(self._found, "nprobe", 8)

    def __call__(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Tokens (M, H, K), lengths (M, H) and keys (M, H) for queries (M, E); None before the first `refresh`.

        A score is query · key + bias, so a query gets one more coordinate, 1.
        """
        if not self._chunks or not len(query):
            return None
        wide = np.ascontiguousarray(torch.nn.functional.pad(query.float().cpu(), (0, 1), value=1.0).numpy())
        _, rows = self._found.search(wide, min(self.count, self._found.ntotal))
        chosen = torch.from_numpy(rows).clamp(min=0)  # -1: the cells had fewer; the first chunk is as good as another
        return self._chunks["tokens"][chosen], self._chunks["lengths"][chosen], self._chunks["keys"][chosen]

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint: the chunks and their embeddings at the last `refresh`."""
        return self._chunks

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`."""
        self._index(dict(state))
