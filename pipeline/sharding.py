"""The stage `shard`, and finding what it made."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.sharding import Mapper, corpus_folder
from data.sharding import shard as shard_corpus
from data.sources import SPLITS, make_source
from pipeline.options import Options


def shard(options: Options, mapper: Mapper | None = None) -> Corpus:
    """Cuts the source into shards under `shards_dir`, or finds them finished there.

    Args:
        options: the run's options.
        mapper: maps the work over parts, see `data.sharding.shard`; None: over processes here, or on `launcher.dask`.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty, or not what `source.kind` says.
    """
    if options.source.kind == "shards":
        return open_shards(options)
    source, shards_dir = options.source, Path(options.shards_dir)
    if options.launcher.dask:  # whose workers may have another working directory
        shards_dir = shards_dir.resolve()
        if source.path and Path(source.path).exists():
            source = replace(source, path=str(Path(source.path).resolve()))
        mapper = mapper or _on_dask(options.launcher.dask, options.shard.workers)
    return shard_corpus(source, options.chunker, options.shard, shards_dir, mapper)


def _on_dask(address: str, workers: int) -> Mapper:
    """Maps parts over a Dask cluster, or over one of `workers` processes that is started here for it."""

    def map_parts(write: Any, parts: Any) -> None:
        try:
            from distributed import Client, LocalCluster
        except ImportError as error:
            raise ValueError("launcher.dask needs Dask: pip install 'haed[dask]'") from error
        if address == "local":
            with (
                LocalCluster(
                    n_workers=workers, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
                ) as cluster,
                Client(cluster) as client,
            ):
                client.gather(client.map(write, parts, pure=False))
            return
        with Client(address) as client:
            client.gather(client.map(write, parts, pure=False))

    return map_parts


def check_source(options: Options) -> None:
    """Says at once what would go wrong at the first look at the source.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is empty or not of its kind.
    """
    source = options.source
    if source.kind not in ("shards", "stdin") and source.path != "-":
        next(iter(make_source(source).inputs(1 << 24, 1)), None)


def open_shards(options: Options) -> Corpus:
    """The corpus of the run's source and chunker; with `source.kind=shards` the one at `source.path`.

    Raises:
        FileNotFoundError: it was not sharded yet.
        ValueError: another chunker is asked for than the one that cut it.
    """
    if options.source.kind == "shards":
        if not options.source.path:
            raise ValueError("source.kind=shards needs source.path=, the folder or URL of a sharded corpus")
        corpus = Corpus.open(options.source.path, options.loader)
        if corpus.options != options.chunker:
            wanted, cut = asdict(options.chunker), asdict(corpus.options)
            key = next(key for key in wanted if wanted[key] != cut[key])
            raise ValueError(f"{corpus.location} was cut with chunker.{key}={cut[key]}, not {wanted[key]}: set it so")
        return corpus
    folder = corpus_folder(options.source, options.chunker, options.shard, Path(options.shards_dir))
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"no shards of this source and chunker at {folder}: run `haed shard` with the same options"
        )
    return Corpus.open(folder, options.loader)


def summary(corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Documents, chunks, tokens and bytes of each split, and its number of distinct chunks."""
    statistics = corpus.manifest.get("statistics", {})
    distinct = {split: statistics.get(split, {}).get("distinct_chunks") for split in SPLITS}
    return {split: asdict(corpus.counts(split)) | {"distinct_chunks": distinct[split]} for split in SPLITS}
