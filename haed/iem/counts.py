"""In how many windows each chunk was: a count-min sketch (Cormode and Muthukrishnan 2005) with conservative update.

Every key has a cell in each of some rows; its count is the smallest of them, and an update raises only the cells that lie
below the new count (Estan and Varghese 2002). Counts are never too small; too large are those of keys that collide in every
row. With 4 million distinct keys, each as likely, 2 rows of 2²¹ cells are 1.7 times too large in the geometric mean, where
one row of 2²⁰ is 5 times (docs/log.md).
"""

import torch
from torch import Tensor

_ODD = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xC2B2AE3D27D4EB4F - (1 << 64),
)  # of multiply-shift hashing (Dietzfelbinger 1997)


class CountMin:
    """Counts by 64-bit key, in bounded memory, on the CPU.

    Args:
        bits: logarithm of the number of cells of a row.

    Attributes:
        table: (R, 2^bits) int64.
    """

    def __init__(self, bits: int = 21) -> None:
        self.bits = bits
        self.table = torch.zeros(len(_ODD), 1 << bits, dtype=torch.long)

    def update(self, keys: Tensor, counts: Tensor) -> None:
        """Counts distinct keys (C,), each so many times (C,)."""
        cells = self._cells(keys)
        new = self.table.gather(1, cells).amin(0) + counts
        self.table.scatter_reduce_(1, cells, new.expand_as(cells), "amax")

    def __call__(self, keys: Tensor) -> Tensor:
        """Counts of keys (C,): (C,) float64."""
        return self.table.gather(1, self._cells(keys)).amin(0).double()

    def _cells(self, keys: Tensor) -> Tensor:
        return torch.stack([(keys * odd >> (64 - self.bits)) & ((1 << self.bits) - 1) for odd in _ODD])

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"table": self.table}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`."""
        self.table.copy_(state["table"])
