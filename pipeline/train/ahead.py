"""Making the next item of an iterator in a thread while the last one is used."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Generator[Item]) -> Generator[Item]:
    """The items of an endless generator in their order, one of them made ahead.

    Nothing is made before the first is asked for. What the generator raises is raised where the item would have come. Closing
    this one waits for the item that is being made, closes the generator in its own thread, and ends that.
    """
    with ThreadPoolExecutor(1, "ahead") as thread:
        try:
            waiting = thread.submit(next, items)
            while True:
                item = waiting.result()
                waiting = thread.submit(next, items)
                yield item
        finally:
            thread.submit(items.close).result()
