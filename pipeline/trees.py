"""Access to nested dictionaries and options by dotted keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any


def flatten_tree(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested dictionary with their values, in order."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten_tree(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@dataclass
class Difference:
    """A dotted key with different values in two nested dictionaries, and both values."""

    key: str
    was: Any
    now: Any


def diff_trees(was: Any, now: Any, key: str = "") -> Iterator[Difference]:
    """Yield the differences between two nested dictionaries, in order."""
    if isinstance(was, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in was if name not in now)]:
            yield from diff_trees(was.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif was != now:
        yield Difference(key, was, now)


def drop_key(tree: Any, key: list[str]) -> None:
    """Delete a key from nested dictionaries, together with dictionaries that become empty."""
    first, *rest = key
    if rest:
        drop_key(tree[first], rest)
    if not rest or not tree[first]:
        del tree[first]


def get_option(options: Any, key: str) -> Any:
    """Return the value of a dotted key in nested dataclasses."""
    return reduce(getattr, key.split("."), options)


def set_option(options: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key in nested dataclasses."""
    above, _, name = key.rpartition(".")
    setattr(get_option(options, above) if above else options, name, value)
