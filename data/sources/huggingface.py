"""Hugging Face `datasets`: a document per row, from the field `source.field`.

The package is optional: `pip install haed[datasets]`.
"""

import hashlib
import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from glob import has_magic
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from data.filesystem import RESULT, check_tree, parse_json, read_bytes
from data.options import SourceOptions
from data.sources.files import ANY, expand_braces
from data.sources.source import Input, Piece, Source, stamp_source_file
from data.sources.splits import assign_splits, named_split
from data.urls import guard_fsspec

log = logging.getLogger(__name__)
_ROWS = 1000
_NAMED = 10  # maximum columns that an error names
_FORMATS = ("parquet", "arrow", "csv", "json")  # of files of a folder, by the names of their builders
_SUFFIXES = (".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl")
_DESCRIPTIONS = ("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json")
_MOST_VALUES = 1_000_000  # of YAML; a README may describe hundreds of configurations
_LONGEST = 1000  # characters of a reason that `datasets` gives
_STRINGS = ("string", "large_string", "string_view")


class DatasetsSource(Source):
    """A source of Hugging Face data sets: one saved to disk, a folder of its files, or the name of one on the hub.

    If it has several splits, they are kept; else a hash of the text decides. `source.pattern` selects splits by their
    names. The field must be a column of strings.
    """

    is_text, gives = True, "text"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        if not options.path:
            raise ValueError("source.kind=datasets needs source.path=, a folder or the name of a data set")

    @cached_property
    def dataset_splits(self) -> dict[str, Any]:
        """The data set's splits by their names there."""
        path, pattern = str(self.options.path), self.options.pattern
        if os.path.isfile(path):
            raise ValueError(
                f"source.path={path} is a file, but source.kind=datasets reads a folder. Put it into one of its own, "
                "and give that. Texts, also JSON lines, need none: see source.kind=text and source.kind=jsonl"
            )
        if os.path.exists(path):
            path = os.path.abspath(path)  # `datasets` has loaders called json, csv and so on
        there = sorted(each for each in Path(path).rglob("*") if each.is_file())
        stamp = tuple(stamp_source_file(str(each)) for each in there)
        splits = _load_splits(path, self.options.config, self.options.revision, stamp)
        if pattern != ANY:
            wanted = expand_braces(pattern, "source.pattern")
            others = [name for name in splits if not any(fnmatchcase(name, each) for each in wanted)]
            if len(others) == len(splits):
                raise ValueError(
                    f"source.path={path}: no split matches source.pattern={pattern}. Its splits are {', '.join(splits)}"
                )
            splits = {name: rows for name, rows in splits.items() if name not in others}
            if others:
                self.record.left_out["of other names than source.pattern"] = others
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
        for number, text in enumerate(self._read_texts(item.name, item.start, item.stop or 0), item.start):
            if text:
                data = self.convert_newlines(text.encode("utf-8", "surrogatepass"))
                name = f"{item.name}@{number}"
                yield Piece(name, self.split_of(name, item.splits, data), data)
            self.remarks["rows without text were left out"] += not text

    def _read_texts(self, name: str, start: int, stop: int) -> Iterator[str | None]:
        """Yield the texts of some rows of a split, which are read a few at a time."""
        rows = self.dataset_splits[name].select_columns([self.options.field]).with_format("arrow")
        for first in range(start, stop, _ROWS):
            try:
                column = rows[first : min(first + _ROWS, stop)].column(self.options.field)
                column.validate(full=True)  # offsets of a damaged file lead out of its memory
                yield from column.to_pylist()
            except ValueError as error:
                raise ValueError(
                    f"{self.options.path}, split {name!r}: a text after row {first:,} is damaged, or not UTF-8, as strings "
                    f"must be: {error}"
                ) from error

    def decoder_versions(self) -> dict[str, str]:
        """Return the version of `datasets`."""
        return {"datasets": version("datasets")}

    def fingerprint(self) -> list[str]:
        """Return sizes and times of the files that hold the rows; for rows in memory, their digest."""
        stamps = []
        for name, rows in self.dataset_splits.items():
            stamps += [stamp_source_file(each["filename"]) for each in rows.cache_files] or [self._digest_split(name)]
        return stamps

    def compute_digest(self, threads: int) -> str:
        """Return a hash of the names of the splits and of their texts, wherever and in whatever format they lie."""
        return hashlib.sha256("\n".join(map(self._digest_split, self.dataset_splits)).encode()).hexdigest()

    def _digest_split(self, name: str) -> str:
        total = len(self.dataset_splits[name])
        whole = hashlib.sha256(f"{name}\0{total}\n".encode())
        for text in self._read_texts(name, 0, total):
            data = text.encode("utf-8", "surrogatepass") if text else b""
            whole.update(len(data).to_bytes(8, "little") + data)
        return whole.hexdigest()


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
    method = "flatten()" if within else "map()"
    return f"{wrong}. No column holds strings. Make one with {method} of datasets, use save_to_disk(), and give that folder"


def _find_cause(error: BaseException) -> str:
    """Return the cause of an error of `datasets`, whose own message does not give it."""
    while error.__cause__ is not None and type(error).__module__.startswith("datasets."):
        error = error.__cause__
    encoding = ". CSV and JSON must be UTF-8: convert them with `iconv -f … -t UTF-8 < OLD > NEW`"
    reason = shorten(str(error), _LONGEST, placeholder=" …")[:_LONGEST] or type(error).__name__
    return f"{reason}{encoding if isinstance(error, UnicodeError) else ''}"


def _describe_column(column: Any) -> str:
    """Return the type of a column in the words of `datasets`, shortened."""
    return shorten(str(column), 80, placeholder=" …")


@lru_cache(maxsize=2)
def _load_splits(path: str, config: str | None, revision: str | None, stamp: tuple[str, ...]) -> dict[str, Any]:
    """Load the splits of a data set, memory-mapped, once per process as long as its files have the same `stamp`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "source.kind=datasets needs Hugging Face datasets. Install it with pip install 'haed[datasets]'"
        ) from error
    guard_fsspec()
    is_local = Path(path).exists()
    if is_local:
        _check_descriptions(Path(path))
    else:
        log.info("source.path=%s is not a folder, so the data set of this name on the hub is used", path)
    is_saved = any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if is_saved and (config or revision):
        raise ValueError(
            f"{path} is a saved data set, so source.config= and source.revision= do not apply. Leave them out"
        )
    if is_local and not is_saved and has_magic(path):
        raise ValueError(f"source.path={path}: datasets takes *, ? and [ for patterns. Rename the folder")
    files = f"data set files ({', '.join(_SUFFIXES)})"
    others = f"source.path={path} has no {files}. Use source.kind=text for others"
    settings: dict[str, Any] = {"revision": revision}
    try:
        if is_saved:
            dataset = datasets.load_from_disk(path)
            return dict(dataset) if isinstance(dataset, dict) else {"all": dataset}
        builder = datasets.load_dataset_builder(path, config, **settings)
        if is_local:
            if builder.name not in _FORMATS:
                if any(each.partition("\0")[0].endswith(_SUFFIXES) for each in stamp):
                    others = (
                        f"source.path={path}: datasets takes it for {builder.name}, as most of its files are none of the "
                        f"{files}. Move the others away"
                    )
                raise ValueError(others)
            # The cache knows a file by its path and time alone.
            files_of_splits = (builder.config.data_files or {}).values()
            paths = sorted({os.path.realpath(each) for names in files_of_splits for each in names})
            key = hashlib.sha256("\n".join(map(stamp_source_file, paths)).encode()).hexdigest()[:16]
            settings["cache_dir"] = str(Path(datasets.config.HF_DATASETS_CACHE) / f"haed-{key}")
        if hasattr(builder.config, "keep_default_na"):  # CSV, where NA, null, … would be no texts
            try:
                return dict(datasets.load_dataset(path, config, keep_default_na=False, na_values=[""], **settings))
            except datasets.exceptions.DatasetGenerationError:  # such as of a NA among many numbers
                loaded = dict(datasets.load_dataset(path, config, **settings))
            log.warning("source.path=%s: texts such as NA, null and nan are taken for missing ones (pandas)", path)
            return loaded
        return dict(datasets.load_dataset(path, config, **settings))
    except datasets.exceptions.DataFilesNotFoundError as error:
        raise ValueError(others) from error
    except (MemoryError, ConnectionError, TimeoutError):  # of the hub
        raise
    except Exception as error:  # whatever `datasets` raises for what it did not expect
        is_of_network = not is_local and isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        if str(error) == others or is_of_network:  # which may pass
            raise
        reason = _find_cause(error)
        if isinstance(error, IndexError) or "corresponds to no data" in reason or "BatchSize must be" in reason:
            raise ValueError(
                f"source.path={path} has no rows, or a split without rows, which datasets cannot load. Remove such "
                "a split: `del data['valid']`, then `data.save_to_disk(…)`, or delete its files"
            ) from error
        raise ValueError(f"source.path={path} cannot be read as a data set: {reason}") from error


def _check_descriptions(folder: Path) -> None:
    """Refuse files that describe a data set, before `datasets` obeys them, if they name others outside its folder."""
    import yaml

    described = list[tuple[Path, Any]]()
    for file in (folder / "README.md", folder / ".huggingface.yaml"):
        if file.is_file():
            text = read_bytes(file, RESULT).decode(errors="replace")
            if file.suffix == ".md":  # its front matter, as `datasets` finds it
                begin, *lines = text.splitlines() or [""]
                text = "\n".join(lines[: lines.index("---")]) if begin == "---" and "---" in lines else ""
            try:
                check_tree(text, file, most=_MOST_VALUES)
                tree = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{file} is not valid YAML: {' '.join(str(error).split())[:200]}") from error
            described.append((file, tree.get("configs") if isinstance(tree, dict) else None))
    splits = sorted(each for each in folder.iterdir() if each.is_dir())
    for file in (place / name for place in (folder, *splits) for name in _DESCRIPTIONS):
        if file.is_file():
            tree = parse_json(read_bytes(file, RESULT), file)
            if not isinstance(tree, dict):
                raise ValueError(f"{file} is damaged: it is no object of JSON")
            described.append((file, tree.get("_data_files")))
            splits_named = tree.get("splits") if file.name == "dataset_dict.json" else None
            if any("/" in name for name in _list_texts(splits_named)):
                raise ValueError(f"{file} names a split by a path. Remove it")
    for file, tree in described:
        for text in _list_texts(tree):
            if "://" in text or os.path.isabs(text) or ".." in Path(text).parts:
                raise ValueError(f"{file} names {text[:100]!r}, which is outside of its folder. Remove it")


def _list_texts(tree: Any) -> Iterator[str]:
    """Yield all texts of a tree of dictionaries and lists."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _list_texts(each)
