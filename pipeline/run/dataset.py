"""The loader for torch's DataLoader: an iterable data set that its workers share out, and every window comes once an epoch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset

from data.loader import Loader


class WindowDataset(IterableDataset[dict[str, np.ndarray]]):
    """This rank's batches of an epoch of a loader, for `DataLoader(WindowDataset(loader), batch_size=None, num_workers=2)`.

    The order is that of the loader, whatever the number of workers. An item is a batch: `tokens` (B, T, K) uint8, `lengths`
    (B, T) uint8 and `starts` (B, T) bool, see `data.loader.Batch`; the last one of an epoch may have fewer windows. The
    first epoch begins at the position of the loader; `set_epoch` chooses another.

    Args:
        loader: which windows, in which order, of which rank.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader, self._from = loader, loader.state_dict()
        self._epoch = torch.tensor(self._from["epoch"]).share_memory_()  # so that workers that persist see it change

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch of the next pass."""
        self._epoch.fill_(epoch)

    def _seek(self) -> None:
        epoch = int(self._epoch)
        self.loader.load_state_dict(self._from if epoch == self._from["epoch"] else {"epoch": epoch, "windows": 0})

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """The batches of the epoch, or a worker's share of them."""
        self._seek()
        for batch in self.loader.epoch():
            yield {"tokens": batch.tokens, "lengths": batch.lengths, "starts": batch.starts}

    def __len__(self) -> int:
        """Number of batches of the epoch, on this rank."""
        made = self.loader
        done = self._from["windows"] if int(self._epoch) == self._from["epoch"] else 0
        left = made.windows_per_epoch - done - made.rank * made.sequences
        return max(0, -(-left // (made.sequences * made.ranks)))
