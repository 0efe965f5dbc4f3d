"""The loader's order: every window exactly once per epoch, for any ranks, and the same from any position."""

from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.loader import Batch, Loader
from data.options import ChunkerOptions, ShardOptions, SourceOptions
from data.sharding import shard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Chunks that are all different, so that a window is known by its first one; six shards, the last window short."""
    folder = tmp_path_factory.mktemp("loader")
    for number in range(6):
        words = b"".join(b"%d%06d " % (number, i) for i in range(1000 + 37 * number))
        (folder / f"train-{number}.txt").write_bytes(words)
    source = SourceOptions(kind="text", path=str(folder), valid_percent=0)
    options = ShardOptions(megabytes=1)
    made = shard(source, ChunkerOptions(), options, folder / "shards")
    for part in made.shards:  # one shard per file, as if they were large
        assert part.split == "train"
    return made


def loader(corpus: Corpus, **options: object) -> Loader:
    return Loader(corpus, "train", **({"context": 16, "sequences": 3, "seed": 5} | options))


def names(batch: Batch) -> list[bytes]:
    return [window[0].tobytes() for window in batch.tokens]


def take(made: Loader, windows: int) -> list[bytes]:
    found: list[bytes] = []
    for batch in made:
        found += names(batch)
        if len(found) >= windows:
            return found
    raise AssertionError


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_window_once_per_epoch_over_all_ranks(corpus: Corpus, ranks: int) -> None:
    total = loader(corpus).windows_per_epoch
    batches = -(-total // (3 * ranks)) + 1
    dealt = [[names(b) for b in islice(loader(corpus, rank=r, ranks=ranks), batches)] for r in range(ranks)]
    order = [window for step in range(batches) for rank in range(ranks) for window in dealt[rank][step]]
    assert order[:total] == take(loader(corpus, sequences=1), total)[:total]
    assert set(Counter(order[:total]).values()) == {1}


def test_any_position_continues_with_exactly_what_would_have_come(corpus: Corpus) -> None:
    made = loader(corpus)
    for steps in (0, 1, 50, made.windows_per_epoch // 3 + 2):
        first = loader(corpus)
        for _ in islice(first, steps):
            pass
        second = loader(corpus)
        second.load_state_dict(first.state_dict())
        assert take(first, 30) == take(second, 30)


def test_the_number_of_ranks_may_change_in_the_middle(corpus: Corpus) -> None:
    total = loader(corpus).windows_per_epoch
    seen: list[bytes] = []
    state, ranks = {"epoch": 0, "windows": 0}, 1
    while state["epoch"] == 0:
        states = []
        for rank in range(ranks):
            made = loader(corpus, rank=rank, ranks=ranks)
            made.load_state_dict(state)
            seen += names(next(iter(made)))
            states.append(made.state_dict())
        assert all(other == states[0] for other in states)
        state, ranks = states[0], ranks % 4 + 1
    assert len(set(seen)) == total and len(seen) == total + state["windows"]


def test_windows_hold_every_chunk_and_mark_documents(corpus: Corpus) -> None:
    batches = take(loader(corpus, sequences=1, shuffle=False), loader(corpus).windows_per_epoch)
    assert len(set(batches)) == loader(corpus).windows_per_epoch
    tokens, starts = [], 0
    for batch in islice(loader(corpus, sequences=1, shuffle=False), loader(corpus).windows_per_epoch):
        real = np.arange(batch.tokens.shape[2]) < batch.lengths[..., None]
        tokens.append(batch.tokens[real].tobytes())
        starts += int(batch.starts.sum())
    assert b"".join(tokens) == b"".join(corpus.originals("train")) and starts == corpus.counts("train").documents


def test_epochs_seeds_and_streams_differ(corpus: Corpus) -> None:
    total = loader(corpus).windows_per_epoch
    both = take(loader(corpus, sequences=1), 2 * total)
    orders = [both[:total], both[total : 2 * total]]
    orders += [take(loader(corpus, sequences=1, seed=6), total), take(loader(corpus, sequences=1, stream=1), total)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_parts_share_nothing_and_leave_nothing_out(corpus: Corpus) -> None:
    whole = loader(corpus)
    halves = [loader(corpus, sequences=1, part=part) for part in ((0.0, 0.5), (0.5, 1.0))]
    first, second = (set(take(half, half.windows_per_epoch)) for half in halves)
    assert not first & second and len(first | second) == whole.windows_per_epoch


def test_a_split_without_windows_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the valid split of .* has no window"):
        Loader(corpus, "valid", context=4, sequences=1, seed=0)
    with pytest.raises(ValueError, match="not in a corpus"):
        loader(corpus).load_state_dict({"epoch": 0, "windows": 10**9})
