"""The stage `shard`, and finding what it made."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.corpus import Corpus
from data.sharding import corpus_folder
from data.sharding import shard as shard_corpus
from data.sources import SPLITS
from pipeline.options import Options


def shard(options: Options) -> Corpus:
    """Cuts the source into shards under `shards_dir`, or finds them finished there.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: it is empty, or not what `source.kind` says.
    """
    return shard_corpus(options.source, options.chunker, options.shard, Path(options.shards_dir))


def open_shards(options: Options) -> Corpus:
    """The corpus of the run's source and chunker.

    Raises:
        FileNotFoundError: it was not sharded yet.
    """
    folder = corpus_folder(options.source, options.chunker, options.shard, Path(options.shards_dir))
    if not (folder / "manifest.json").is_file():
        raise FileNotFoundError(
            f"no shards of this source and chunker at {folder}: run `haed shard` with the same options"
        )
    return Corpus.open(folder)


def summary(corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Documents, chunks, tokens and bytes of each split."""
    return {split: asdict(corpus.counts(split)) for split in SPLITS}
