"""WindowDataset in torch's DataLoader: each once an epoch, in the loader's order, for any ranks and workers."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from data.loader import Loader
from pipeline.config import Options
from pipeline.run.sharding import open_shards
from pipeline.run.windows import WindowDataset


def loader(options: Options, rank: int = 0, ranks: int = 1) -> Loader:
    return Loader(open_shards(options), "train", context=16, sequences=7, seed=0, rank=rank, ranks=ranks)


def windows(batches: Any) -> list[bytes]:
    return [np.asarray(window).tobytes() for batch in batches for window in batch["tokens"]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_window_once_an_epoch_for_any_ranks_and_workers(options: Options, ranks: int) -> None:
    made = loader(options)
    batches = islice(Loader(made.corpus, "train", context=16, sequences=1, seed=0), 2 * made.windows_per_epoch)
    order = [batch.tokens[0].tobytes() for batch in batches]
    for workers in (0, 2):
        seen: dict[int, list[list[bytes]]] = {0: [], 1: []}
        for rank in range(ranks):
            data = WindowDataset(loader(options, rank, ranks))
            feed = DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
            for epoch in seen:
                data.set_epoch(epoch)
                found = list(feed)
                assert len(found) == len(feed)
                seen[epoch].append([window for batch in found for window in windows([batch])])
            del feed
        for epoch, dealt in seen.items():
            wanted = order[epoch * made.windows_per_epoch :][: made.windows_per_epoch]
            steps = [each[step : step + 7] for step in range(0, max(map(len, dealt)), 7) for each in dealt]
            assert [window for step in steps for window in step] == wanted


def test_the_first_epoch_begins_where_the_loader_is(options: Options) -> None:
    made = loader(options)
    made.load_state_dict({"epoch": 1, "windows": 10})
    data = WindowDataset(made)
    rest = windows(data)
    data.set_epoch(2)
    assert len(rest) == made.windows_per_epoch - 10 and len(windows(data)) == made.windows_per_epoch
    data.set_epoch(1)
    assert windows(data) == rest


class Endless(IterableDataset[Any]):
    def __init__(self, made: Loader) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        return ({"tokens": batch.tokens} for batch in self.made)


def test_workers_share_the_endless_loader_too(options: Options) -> None:
    wanted = windows(islice(Endless(loader(options)), 20))
    assert windows(islice(DataLoader(Endless(loader(options)), batch_size=None, num_workers=2), 20)) == wanted
