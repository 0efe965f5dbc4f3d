"""A bank of chunks seen before, as further negatives. It stores chunks, not embeddings, so that nothing in it is stale."""

import torch
from torch import Tensor

from haed.chunks import Distinct


class Bank:
    """The distinct chunks seen last, on the CPU; the same on all ranks, since all see the same candidates.

    Args:
        capacity: chunks that it holds; those that came first make room.
        k: tokens per chunk.

    Attributes:
        tokens: (n, K) uint8 of the n chunks in it, in no order.
        lengths: (n,) uint8.
        keys: (n,) int64, see `chunks.chunk_keys`.
    """

    def __init__(self, capacity: int, k: int) -> None:
        self.capacity, self.next = capacity, 0
        self.tokens = torch.zeros(0, k, dtype=torch.uint8)
        self.lengths = torch.zeros(0, dtype=torch.uint8)
        self.keys = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.keys)

    def draw(self, count: int, seed: int) -> Tensor:
        """Rows of `count` chunks, each as likely as any other and none twice; all of them if there are no more."""
        if count >= len(self):
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]

    def holds(self, keys: Tensor) -> Tensor:
        """Which of the chunks with these keys (C,) are in it: (C,) bool."""
        return torch.isin(keys, self.keys)

    def add(self, chunks: Distinct) -> None:
        """Adds what is new among distinct chunks."""
        new = (~self.holds(chunks.keys)).nonzero().squeeze(1)[: self.capacity]
        columns = (
            (self.tokens, chunks.tokens[new].to(torch.uint8)),
            (self.lengths, chunks.lengths[new].to(torch.uint8)),
            (self.keys, chunks.keys[new]),
        )
        room = self.capacity - len(self)
        grown = [torch.cat([old, fresh[:room]]) for old, fresh in columns]
        rest = len(new) - room
        if rest > 0:
            rows = (self.next + torch.arange(rest)).remainder(self.capacity)
            for old, (_, fresh) in zip(grown, columns, strict=True):
                old[rows] = fresh[room:]
            self.next = int(rows[-1] + 1) % self.capacity
        self.tokens, self.lengths, self.keys = grown

    def state_dict(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"tokens": self.tokens, "lengths": self.lengths, "keys": self.keys, "next": torch.tensor(self.next)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See `state_dict`."""
        self.tokens, self.lengths, self.keys = (state[name].clone() for name in ("tokens", "lengths", "keys"))
        self.next = int(state["next"])
