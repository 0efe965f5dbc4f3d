"""One item ahead, in a thread of its own that ends with the iterator."""

import threading
from collections.abc import Generator

import pytest

from pipeline.training.trainer import prefetch


class Source:
    """Numbers, and what happened to them."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.fails_at, self.made, self.threads, self.closed = fails_at, threading.Semaphore(0), set[str](), False

    def items(self) -> Generator[int]:
        try:
            for number in range(self.fails_at):
                self.threads.add(threading.current_thread().name)
                self.made.release()
                yield number
            raise ValueError("no more")
        finally:
            self.closed = True
            self.threads.add(threading.current_thread().name)


def test_one_item_is_made_while_the_last_is_used() -> None:
    source = Source()
    made = prefetch(source.items())
    assert not source.made.acquire(blocking=False)  # nothing before the first is asked for
    assert [next(made) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert all(source.made.acquire(timeout=60) for _ in range(6))  # without being asked for the sixth
    made.close()
    assert not source.made.acquire(blocking=False)  # and no seventh
    assert source.closed and len(source.threads) == 1 and not source.threads & {"MainThread"}
    assert not any(thread.name in source.threads for thread in threading.enumerate())


def test_what_fails_is_raised_where_the_item_would_have_come() -> None:
    source = Source(3)
    made = prefetch(source.items())
    assert [next(made) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(made)
    assert source.closed and not any(thread.name in source.threads for thread in threading.enumerate())
