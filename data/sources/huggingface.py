"""Hugging Face `datasets`: a document per row, from the field `source.field`.

The package is optional: `pip install haed[datasets]`.
"""

import hashlib
import logging
import shlex
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from data.options import SourceOptions
from data.sources.source import Input, Piece, Source
from data.sources.splits import assign_splits, named_split
from data.urls import guard_fsspec

log = logging.getLogger(__name__)
_ROWS = 1000
_NAMED = 10  # maximum columns that an error names
_STRINGS = ("string", "large_string", "string_view")


class DatasetsSource(Source):
    """A source of Hugging Face data sets: one saved to disk, a folder of its files, or the name of one on the hub.

    If it has several splits, they are kept; else a hash of the text decides. The field must be a column of strings.
    """

    is_text, gives = True, "text"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        if not options.path:
            raise ValueError("source.kind=datasets needs source.path=, a folder or the name of a data set")

    @cached_property
    def dataset_splits(self) -> dict[str, Any]:
        """The data set's splits by their names there."""
        path = str(self.options.path)
        there = sorted(each for each in Path(path).rglob("*") if each.is_file())
        stamp = tuple((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in there)
        try:
            splits = _load_splits(path, self.options.config, self.options.revision, stamp)
        except (IndexError, ValueError) as error:  # errors of `datasets` for files without rows
            message = str(error)
            if isinstance(error, IndexError) or "corresponds to no data" in message or "BatchSize must be" in message:
                raise ValueError(
                    f"source.path={path} has no rows, or a split without rows, which datasets cannot load. Remove such "
                    "a split: `del data['valid']`, then `data.save_to_disk(…)`, or delete its files"
                ) from error
            raise
        for name, rows in splits.items():
            if not _holds_strings(rows.features.get(self.options.field)):
                raise ValueError(
                    _explain_column(f"{self.options.path}, split {name!r}", rows.features, self.options.field)
                )
        return splits

    def inputs(self, size: int, align: int) -> Iterator[Input]:
        """Yield ranges of rows of each split of the data set."""
        stated = {name: named_split(name) if len(self.dataset_splits) > 1 else None for name in self.dataset_splits}
        places = assign_splits(stated, self.options, self.record)
        self.record.add_places(places, f"source.path={self.options.path}")
        for name, rows in self.dataset_splits.items():
            total = int(rows.data.nbytes)
            step = max(1, len(rows) * size // max(total, 1))
            for start in range(0, len(rows), step):
                stop = min(start + step, len(rows))
                weight = max(1, total * (stop - start) // len(rows))
                yield Input(name, str(self.options.path), weight, places[name], start, stop)

    def read(self, item: Input) -> Iterator[Piece]:
        """Yield a document per row."""
        rows = self.dataset_splits[item.name].select_columns([self.options.field])
        for start in range(item.start, item.stop or 0, _ROWS):
            try:
                texts = rows[start : min(start + _ROWS, item.stop or 0)][self.options.field]
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{self.options.path}, split {item.name!r}: a text after row {start:,} is not UTF-8, as strings "
                    f"must be: {error}"
                ) from error
            for number, text in enumerate(texts, start):
                if text:
                    data = self.convert_newlines(text.encode("utf-8", "surrogatepass"))
                    name = f"{item.name}@{number}"
                    yield Piece(name, self.split_of(name, item.splits, data), data)
                self.remarks["rows without text were left out"] += not text

    def decoder_versions(self) -> dict[str, str]:
        """Return the version of `datasets`."""
        return {"datasets": version("datasets")}

    def fingerprint(self) -> list[str]:
        """Return the data set's own fingerprints."""
        return [f"{name}\0{rows._fingerprint}\0{len(rows)}" for name, rows in self.dataset_splits.items()]

    def compute_digest(self, threads: int) -> str:
        """Return a hash of the fingerprints, which determine the contents of a data set."""
        return hashlib.sha256("\n".join(self.fingerprint()).encode()).hexdigest()


def _holds_strings(column: Any) -> bool:
    return getattr(column, "dtype", None) in _STRINGS


def _explain_column(where: str, columns: Mapping[str, Any], field: str) -> str:
    """Return what is wrong with a column that holds no strings, and which column could be read instead."""
    if field not in columns:
        there = ", ".join(f"{name!r}: {_describe_column(column)}" for name, column in list(columns.items())[:_NAMED])
        more = f" and {len(columns) - _NAMED:,} more" if len(columns) > _NAMED else ""
        wrong = f"{where}, has no column {field!r}. Its columns are {there or 'none'}{more}"
    else:
        wrong = f"{where}: column {field!r} holds {_describe_column(columns[field])}, not strings"
    strings = [name for name, column in columns.items() if _holds_strings(column)]
    if strings:
        others = f", or {', '.join(map(repr, strings[1:_NAMED]))}" if strings[1:] else ""
        return f"{wrong}. Set {shlex.quote(f'source.field={strings[0]}')}{others}"
    within = isinstance(columns.get(field), dict) or any(isinstance(column, dict) for column in columns.values())
    how = "flatten()" if within else "map()"
    return (
        f"{wrong}. No column holds strings. Make one with {how} of datasets, use save_to_disk(), and give that folder"
    )


def _find_cause(error: BaseException) -> str:
    """Return the cause of an error of `datasets`, whose own message does not give it."""
    while error.__cause__ is not None and type(error).__module__.startswith("datasets."):
        error = error.__cause__
    encoding = ". CSV and JSON must be UTF-8: convert them with `iconv -f … -t UTF-8 < OLD > NEW`"
    return f"{error}{encoding if isinstance(error, UnicodeError) else ''}"


def _describe_column(column: Any) -> str:
    """Return the type of a column in the words of `datasets`, shortened."""
    return shorten(str(column), 80, placeholder=" …")


@lru_cache(maxsize=2)
def _load_splits(
    path: str, config: str | None, revision: str | None, stamp: tuple[tuple[str, int, int], ...]
) -> dict[str, Any]:
    """Load the splits of a data set, once per process for all its parts, as long as its files have the same `stamp`.

    Its rows are memory-mapped.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "source.kind=datasets needs Hugging Face datasets. Install it with pip install 'haed[datasets]'"
        ) from error
    guard_fsspec()
    if not Path(path).exists():
        log.info("source.path=%s is not a folder, so the data set of this name on the hub is used", path)
    if any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json")):
        if config or revision:
            raise ValueError(
                f"{path} is a saved data set, so source.config= and source.revision= do not apply. Leave them out"
            )
        dataset = datasets.load_from_disk(path)
    else:
        try:
            dataset = datasets.load_dataset(path, config, revision=revision)
        except datasets.exceptions.DataFilesNotFoundError as error:
            raise ValueError(
                f"source.path={path} has no data set files (.parquet, .arrow, .csv, .tsv, .json or .jsonl). "
                "Use source.kind=text for others"
            ) from error
        except (ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(f"source.path={path} cannot be read as a data set: {_find_cause(error)}") from error
    return dict(dataset) if isinstance(dataset, dict) else {"all": dataset}
