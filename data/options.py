"""Options of sources, chunkers, shards and the loader. Importing this module imports nothing heavy."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

LARGEST_CHUNK = 255  # tokens: lengths are bytes
SOURCES = {
    "stdlib": "data.text:StdlibSource",
    "text": "data.text:TextSource",
    "jsonl": "data.text:JsonLinesSource",
    "wikitext": "data.text:WikiTextSource",
    "enwik8": "data.text:Enwik8Source",
    "stdin": "data.text:TextSource",
    "images": "data.images:ImageSource",
    "audio": "data.audio:AudioSource",
    "datasets": "data.huggingface:DatasetsSource",
    "shards": "",  # sharded already: nothing to read
}
CHUNKERS = {
    "words": "data.chunkers:WordChunker",
    "fixed": "data.chunkers:FixedChunker",
    "pixels": "data.chunkers:PixelChunker",
    "sentences": "data.chunkers:SentenceChunker",
    "entropy": "data.entropy:EntropyChunker",
}


def known(table: dict[str, str], group: str) -> Callable[[str], str]:
    """A check that a name is in the table, or an entry point of the group that some installed package declares."""

    def check(name: str) -> str:
        if name not in table:
            others = sorted(entry.name for entry in entry_points(group=group))
            if name not in others:
                raise ValueError(f"{name!r} is not known: expected one of {', '.join([*table, *others])}")
        return name

    return check


def _choices(table: dict[str, str], group: str) -> Callable[[dict[str, Any]], None]:
    """Puts the names into a JSON schema, for forms; asked for only when a schema is made."""
    return lambda schema: schema.update(enum=[*table, *sorted(entry.name for entry in entry_points(group=group))])


@dataclass(kw_only=True)
class SourceOptions:
    """What is read, and how it is split into train, valid and test."""

    kind: Annotated[
        str,
        Field(
            description="stdlib: the Python standard library's own .py files; text: a document per file; jsonl: a document "
            "per line; wikitext: documents by ' = Title = ' headings; enwik8: splits by offset; stdin: standard input; "
            "images: PNG, JPEG, ImageNet32, CIFAR-10; audio: WAV; datasets: Hugging Face; shards: an existing corpus, "
            "also http(s):// and s3://; or a source of your own (docs/data.md)",
            json_schema_extra=_choices(SOURCES, "haed.sources"),
        ),
        AfterValidator(known(SOURCES, "haed.sources")),
    ] = "stdlib"
    path: Annotated[
        str | None,
        Field(description="file, folder or glob; text may be compressed (.gz .xz .bz2 .zst); - is standard input"),
    ] = None
    pattern: Annotated[str, Field(description="files of a folder, as a glob relative to it")] = "**/*"
    field: Annotated[str, Field(description="jsonl and datasets: the field that holds the text")] = "text"
    valid_percent: Annotated[
        int,
        Field(ge=0, le=50, description="share of documents for valid, and for test, where files do not name a split"),
    ] = 5
    valid_pattern: Annotated[
        str | None, Field(description="regular expression: documents whose name matches are valid, whatever else says")
    ] = None
    test_pattern: Annotated[str | None, Field(description="likewise for test; what matches neither is train")] = None
    offsets: Annotated[
        list[int], Field(description="enwik8: bytes where valid and test begin; none: at 90 % and 95 %", max_length=2)
    ] = dataclasses.field(default_factory=list)
    image_size: Annotated[
        int | None, Field(ge=1, le=4096, description="images: resampled to this many pixels square; null: as they are")
    ] = None
    encoding: Annotated[
        Literal["mulaw", "pcm16"],
        Field(description="audio: mulaw: one token per sample, 8 bits; pcm16: two, the high byte first"),
    ] = "mulaw"
    expansion: Annotated[
        int,
        Field(
            ge=1, description="compressed input that grows more than so many times beyond 64 MB is refused as a bomb"
        ),
    ] = 250


@dataclass(kw_only=True)
class ChunkerOptions:
    """How documents are cut into chunks."""

    kind: Annotated[
        str,
        Field(
            description="words: a word with the white space after it; fixed: k bytes; pixels: k values of a raster; "
            "sentences; entropy: where a byte n-gram model is uncertain; or one of your own (docs/data.md)",
            json_schema_extra=_choices(CHUNKERS, "haed.chunkers"),
        ),
        AfterValidator(known(CHUNKERS, "haed.chunkers")),
    ] = "words"
    k: Annotated[int, Field(ge=1, le=LARGEST_CHUNK, description="tokens per chunk at most (paper: 12)")] = 12
    mean_length: Annotated[
        float,
        Field(ge=1, le=LARGEST_CHUNK, description="entropy: tokens per chunk to aim at; the threshold follows from it"),
    ] = 5.0


@dataclass(kw_only=True)
class ShardOptions:
    """How shards are written."""

    workers: Annotated[int, Field(ge=1, description="processes that write shards; changes no byte of them")] = 1
    megabytes: Annotated[
        int, Field(ge=1, le=128, description="source bytes per shard, about; one shard is one unit of work")
    ] = 16


@dataclass(kw_only=True)
class LoaderOptions:
    """How shards are read."""

    workers: Annotated[
        int, Field(ge=0, le=64, description="processes that make batches ahead; changes no batch. 0: none")
    ] = 0
    damaged: Annotated[
        Literal["stop", "skip"],
        Field(description="a damaged or missing shard: stop, or leave its windows empty and count them"),
    ] = "stop"
    cache_dir: Annotated[str, Field(description="where shards from http(s):// and s3:// are kept")] = "shards/.cache"
    cache_gigabytes: Annotated[
        float, Field(gt=0, description="bound on that folder; the longest unused goes first")
    ] = 50.0
