"""Hugging Face `datasets` (optional: `pip install haed[datasets]`): a document per row, from the field `source.field`."""

import hashlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from data.options import SourceOptions
from data.sources import SPLITS, Input, Piece, Source, named_split

_ROWS = 1000


class DatasetsSource(Source):
    """A data set saved to disk, a folder of its files, or the name of one on the hub.

    Its own splits are kept where it has several; else a hash of the text decides. What is read must be a column of strings.
    """

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        if not options.path:
            raise ValueError("source.kind=datasets needs source.path=, a folder or the name of a data set")

    @cached_property
    def splits(self) -> dict[str, Any]:
        """The data set's splits by their names there."""
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                "source.kind=datasets needs Hugging Face datasets: pip install 'haed[datasets]'"
            ) from error
        path = Path(self.options.path or "")
        saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(self.options.path))
        splits = dict(found) if isinstance(found, dict) else {"all": found}
        for name, rows in splits.items():
            column = rows.features.get(self.options.field)
            if getattr(column, "dtype", None) not in ("string", "large_string"):
                raise ValueError(
                    f"{self.options.path}, split {name!r}, has no column {self.options.field!r} of strings "
                    f"(it has {', '.join(rows.features)}): set source.field="
                )
        return splits

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """See `Source.inputs`."""
        for name, rows in self.splits.items():
            split = named_split(name) if len(self.splits) > 1 else None
            total = int(rows.data.nbytes)
            step = max(1, len(rows) * size // max(total, 1))
            for start in range(0, len(rows), step):
                stop = min(start + step, len(rows))
                weight = max(1, total * (stop - start) // len(rows))
                yield Input(name, str(self.options.path), weight, (split,) if split else SPLITS, start, stop)

    def read(self, item: Input) -> Iterator[Piece]:
        """See `Source.read`."""
        rows = self.splits[item.name].select_columns([self.options.field])
        for start in range(item.start, item.stop or 0, _ROWS):
            texts = rows[start : min(start + _ROWS, item.stop or 0)][self.options.field]
            for number, text in enumerate(texts, start):
                if text:
                    data = text.encode("utf-8", "surrogatepass")
                    name = f"{item.name}@{number}"
                    yield Piece(name, self.split_of(name, item.splits, data), data)

    def fingerprint(self) -> list[str]:
        """The data set's own fingerprints."""
        return [f"{name}\0{rows._fingerprint}\0{len(rows)}" for name, rows in self.splits.items()]

    def digest(self, threads: int) -> str:
        """See `fingerprint`: what a data set holds follows from it."""
        return hashlib.sha256("\n".join(self.fingerprint()).encode()).hexdigest()
