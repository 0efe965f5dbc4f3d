"""Nested dictionaries and options with dotted keys, as configurations and what checkpoints say of them are."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any


def leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a nested dictionary, in order, with their values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass
class Difference:
    """A dotted key in which two nested dictionaries differ, and its values in both."""

    key: str
    was: Any
    now: Any


def differences(was: Any, now: Any, key: str = "") -> Iterator[Difference]:
    """Where two nested dictionaries differ, in order."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from differences(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield Difference(key, was, now)


def drop(tree: Any, key: list[str]) -> None:
    """Takes a key out of nested dictionaries, and those that it leaves empty."""
    first, *rest = key
    if rest:
        drop(tree[first], rest)
    if not rest or not tree[first]:
        del tree[first]


def get(options: Any, key: str) -> Any:
    """The value of a dotted key in nested dataclasses."""
    return reduce(getattr, key.split("."), options)


def put(options: Any, key: str, value: Any) -> None:
    """Sets it there."""
    above, _, name = key.rpartition(".")
    setattr(get(options, above) if above else options, name, value)
