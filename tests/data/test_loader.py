"""The loader's order: every window exactly once per epoch, for any ranks, and the same from any position."""

import multiprocessing
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from data import build, shards
from data.corpus import Corpus
from data.loader import Batch, Loader
from data.options import LoaderOptions
from data.shards import CorruptShardError
from data.sources import files
from tests.conftest import mostly_nightly
from tests.data.conftest import shard_source


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Chunks that are all different, so that a window is known by its first one; six shards, their last windows short."""
    folder = tmp_path_factory.mktemp("loader")
    for number in range(3):
        words = b"".join(b"%d%06d " % (number, i) for i in range(2_300))
        (folder / f"train-{number}.txt").write_bytes(words)
    with pytest.MonkeyPatch.context() as patch:  # shards of ten thousand bytes
        patch.setattr(build, "_SLACK", 10_000 - (1 << 20))
        patch.setattr(shards, "SAMPLE_BYTES", 2_000)
        patch.setattr(files, "BLOCK", 1_500)
        made = shard_source(folder, folder / "shards", megabytes=1, valid_percent=0)
    assert len(made.shards_of("train")) == 6 and made.split_counts("train").documents == 3
    return made


@pytest.fixture
def damaged(corpus: Corpus, tmp_path: Path) -> Corpus:
    """A copy of the corpus whose second shard has a wrong byte, and whose fourth is cut short."""
    shutil.copytree(corpus.folder, tmp_path / "copy")
    made = Corpus.open(tmp_path / "copy")
    for number, change in ((1, lambda old: old[:700] + b"x" + old[701:]), (3, lambda old: old[: len(old) // 2])):
        path = made.folder / made.shards_of("train")[number].file
        path.write_bytes(change(path.read_bytes()))
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
    """Also where there are more ranks than shards."""
    total = loader(corpus).windows_per_epoch
    batches = -(-total // (3 * ranks)) + 1
    dealt = [[names(b) for b in islice(loader(corpus, rank=r, ranks=ranks), batches)] for r in range(ranks)]
    order = [window for step in range(batches) for rank in range(ranks) for window in dealt[rank][step]]
    assert order[:total] == take(loader(corpus, sequences=1), total)[:total]
    assert set(Counter(order[:total]).values()) == {1}


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [(1, [0, 1, 2]), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, [1]), (4, [2])))],
)
def test_workers_change_nothing_that_a_rank_sees(corpus: Corpus, workers: int, ranks: list[int]) -> None:
    """With `test_every_window_once_per_epoch_over_all_ranks` this is every number of ranks times every one of workers."""
    steps = loader(corpus).windows_per_epoch // 9 + 5  # into the second epoch
    for rank in ranks:
        alone = loader(corpus, rank=rank, ranks=3)
        helped = loader(corpus, rank=rank, ranks=3, options=LoaderOptions(workers=workers))
        stream = iter(helped)
        for one, two in zip(islice(alone, steps), stream, strict=False):
            assert all(np.array_equal(getattr(one, x), getattr(two, x)) for x in ("tokens", "lengths", "starts"))
            assert helped.state_dict() == alone.state_dict()
        stream.close()  # type: ignore[attr-defined]


def begin(corpus: Corpus, workers: int) -> tuple[Iterator[Batch], list[psutil.Process]]:
    """A loader that has returned its first batch, and its workers."""
    before = set(psutil.Process().children(recursive=True))
    stream = iter(loader(corpus, options=LoaderOptions(workers=workers)))
    next(stream)
    started = set(psutil.Process().children(recursive=True)) - before
    return stream, [process for process in started if "resource_tracker" not in " ".join(process.cmdline())]


def test_workers_end_with_the_iteration(corpus: Corpus) -> None:
    stream, workers = begin(corpus, 2)
    assert len(workers) == 2
    stream.close()  # type: ignore[attr-defined]
    assert not any(process.is_running() for process in workers)


_kept: list[object] = []


def _read_in_a_process(folder: Path, close: bool, wanted: list[bytes]) -> None:
    made = loader(Corpus.open(folder), options=LoaderOptions(workers=2))
    stream = iter(made)
    assert names(next(stream)) == wanted
    stream.close() if close else _kept.append(stream)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("start", mostly_nightly(["spawn", "fork"], "fork"))
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_of_multiprocessing_that_has_workers_ends(corpus: Corpus, start: str) -> None:
    context = multiprocessing.get_context(start)
    wanted = names(next(iter(loader(corpus))))
    ways = [(True, False), (False, False), (False, True)]  # the daemon has no workers
    made = [
        context.Process(target=_read_in_a_process, args=(corpus.folder, close, wanted), daemon=daemon)  # type: ignore[attr-defined]
        for close, daemon in ways
    ]
    try:
        for process in made:
            process.start()
        for process in made:
            process.join(60)
        assert [process.exitcode for process in made] == [0, 0, 0]
    finally:
        for process in made:
            process.kill()


@pytest.mark.parametrize("found", ["in a result", "when the next is asked for"])
def test_a_killed_worker_is_an_error_and_no_end_of_the_data(corpus: Corpus, found: str) -> None:
    stream, (worker,) = begin(corpus, 1)
    managers = [thread for thread in threading.enumerate() if "ExecutorManager" in type(thread).__name__]
    worker.kill()
    if found == "when the next is asked for":  # the pool knows already
        for thread in managers:
            thread.join()
    with pytest.raises(OSError, match="a loader worker died"):
        list(islice(stream, 100))


def test_any_position_continues_with_exactly_what_would_have_come(corpus: Corpus) -> None:
    made = loader(corpus)
    for steps in (0, 1, 50, made.windows_per_epoch // 3 + 2):
        first = loader(corpus)
        for _ in islice(first, steps):
            pass
        second = loader(corpus, options=LoaderOptions(workers=steps % 2))
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
    reader, tokens, starts = loader(corpus, sequences=1, shuffle=False), b"", 0
    for batch in islice(reader, reader.windows_per_epoch):
        real = np.arange(batch.tokens.shape[2]) < batch.lengths[..., None]
        tokens += batch.tokens[real].tobytes()
        starts += int(batch.starts.sum())
    assert tokens == b"".join(corpus.iterate_originals("train")) and starts == corpus.split_counts("train").documents


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
    with pytest.raises(ValueError, match="outside the corpus"):
        loader(corpus).load_state_dict({"epoch": 0, "windows": 10**9})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_shard_stops_or_is_skipped_and_counted(damaged: Corpus, corpus: Corpus, workers: int) -> None:
    total = loader(corpus).windows_per_epoch
    with pytest.raises(CorruptShardError, match="train-0000[13].tar is damaged at byte"):
        take(loader(damaged, options=LoaderOptions(workers=workers)), total)
    whole = [window for batch in islice(loader(corpus, sequences=1), total) for window in batch.tokens]
    made = loader(damaged, sequences=1, options=LoaderOptions(workers=workers, damaged="skip"))
    found = list(islice(made, total))
    missing = sum(-(-damaged.shards_of("train")[number].chunks // 16) for number in (1, 3))
    assert sum(batch.skipped for batch in found) == made.skipped == missing
    for batch, window in zip(found, whole, strict=True):  # the others are the same, in the same places
        assert batch.skipped or np.array_equal(batch.tokens[0], window)
        assert not batch.skipped or not batch.lengths.any()


def test_a_missing_shard_is_named(damaged: Corpus) -> None:
    (damaged.folder / "train-00000.tar").unlink()
    with pytest.raises(CorruptShardError, match="train-00000.tar is missing. Make it again"):
        damaged.read(damaged.shards_of("train")[0])


@pytest.mark.parametrize(("context", "pictures"), [(256, 1), (300, 1), (512, 2), (1000, 3)])
def test_pictures_stay_whole(tmp_path: Path, context: int, pictures: int) -> None:
    planes = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", data=planes)
    made = shard_source(tmp_path / "train.npz", tmp_path / "shards", "images", "pixels")
    reader = loader(made, context=context, sequences=1)
    assert reader.windows_per_epoch == -(-20 // pictures)
    seen = []
    for batch in islice(reader, reader.windows_per_epoch):
        count = int((batch.lengths[0] > 0).sum())
        assert batch.starts[0].nonzero()[0].tolist() == list(range(0, count, 256)) and count % 256 == 0
        seen += [batch.tokens[0, at : at + 256].tobytes() for at in range(0, count, 256)]
    assert sorted(seen) == sorted(made.iterate_originals("train"))
    with pytest.raises(ValueError, match="Set batch.context=256"):
        loader(made, context=255)


def test_epochs_since_a_position_are_exact(corpus: Corpus) -> None:
    """A limit of whole epochs is met exactly, wherever the phase began, also after it was resumed."""
    made = loader(corpus)
    total = made.windows_per_epoch
    for begun in range(total):
        made.load_state_dict({"epoch": 2, "windows": begun})
        assert made.epochs_passed == (2 * total + begun) / total
        made.restart_epoch_count()
        kept = made.state_dict()
        assert made.epochs_passed == 0
        for later, epochs in ((3, 1), (9, 7)):
            made.load_state_dict(kept | {"epoch": later})
            assert made.epochs_passed == epochs
