"""Progress of sharding, measured from the files on disk.

So it is the same for processes, tasks of a flow and a cluster.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS = 0.5
UNFINISHED = ".partial"


@dataclass(frozen=True)
class ShardingProgress:
    """The progress of a sharding.

    Attributes:
        done: number of finished parts.
        parts: number of all parts.
        share: fraction of the work that is done, in [0, 1].
        written: bytes of shards.
        rate: bytes of shards per second since this process began.
        left: estimated seconds left, or None.
    """

    done: int
    parts: int
    share: float
    written: int
    rate: float
    left: float | None

    def format_line(self, what: str) -> str:
        """Return the progress as a line for people: share done, time left, then `what` is sharded, and how far."""
        words = [f"{self.share:.0%}"]
        words += [f"{self.left:,.0f} s left"] if self.left is not None and self.done < self.parts else []
        words += [what, f"part {self.done:,} of {self.parts:,}", f"{self.written / 1e6:,.0f} MB"]
        words += [f"{self.rate / 1e6:,.1f} MB/s"] if self.rate else []
        return " · ".join(words)


Listener = Callable[[ShardingProgress], None]


class ProgressMonitor:
    """A monitor of the folder of the parts.

    Args:
        folder: contains finished parts under their names, and unfinished ones with a suffix.
        sizes: bytes of the source that each part covers.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder, self._sizes = folder, sizes
        self._finished: dict[str, int] = {}
        self._began, self._first = time.monotonic(), (0, 0.0)
        found = self.measure_progress()
        self._first = found.written, found.share

    def measure_progress(self) -> ShardingProgress:
        """Measure the progress."""
        unfinished: dict[str, int] = {}
        for path in self._folder.iterdir():
            name = path.name.partition(".")[0]
            if path.name.endswith(UNFINISHED):
                unfinished[name] = max(_count_shard_bytes(path), unfinished.get(name, 0))
            elif name in self._sizes and name not in self._finished:
                self._finished[name] = _count_shard_bytes(path)
        live = {name: size for name, size in unfinished.items() if name in self._sizes and name not in self._finished}
        work = float(sum(self._sizes[name] for name in self._finished))
        work += sum(
            min(0.9 * self._sizes[name], size) for name, size in live.items()
        )  # nearly as large as their source
        written, share = sum(self._finished.values()) + sum(live.values()), work / max(1, sum(self._sizes.values()))
        seconds = max(1e-6, time.monotonic() - self._began)
        gained = share - self._first[1]
        left = (1 - share) * seconds / gained if gained > 0 else None
        rate = max(0, written - self._first[0]) / seconds
        return ShardingProgress(len(self._finished), len(self._sizes), share, written, rate, left)

    @contextmanager
    def report_to(self, listener: Listener | None) -> Iterator[None]:
        """Run a thread that calls the listener twice a second, and once more at the end."""
        if listener is None:
            yield
            return
        ended = threading.Event()

        def tell() -> None:
            while not ended.wait(SECONDS):
                listener(self.measure_progress())

        thread = threading.Thread(target=contextvars.copy_context().run, args=(tell,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        listener(self.measure_progress())


def _count_shard_bytes(folder: Path) -> int:
    """Return the bytes of the shards in a folder, which may disappear meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".tar")
    except OSError:
        return 0
