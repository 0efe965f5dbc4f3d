"""Options of sources, chunkers and shards. Importing this module imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(kw_only=True)
class SourceOptions:
    """What is read, and how it is split into train, valid and test."""

    kind: Annotated[
        Literal["stdlib", "text", "wikitext", "images"],
        Field(
            description="stdlib: the Python standard library's own .py files; text: a file, folder or glob, one document "
            "per file; wikitext: documents by ' = Title = ' headings; images: ImageNet32 batch files (.npz)"
        ),
    ] = "stdlib"
    path: Annotated[str | None, Field(description="file or folder (stdlib: null, this Python's own)")] = None
    pattern: Annotated[str, Field(description="files of a folder, as a glob relative to it")] = "**/*"
    valid_percent: Annotated[
        int,
        Field(ge=0, le=50, description="share of documents for valid, and for test, where files do not name a split"),
    ] = 5


@dataclass(kw_only=True)
class ChunkerOptions:
    """How documents are cut into chunks."""

    kind: Annotated[
        Literal["words", "fixed", "pixels"],
        Field(description="words: a word with the white space after it; fixed: k bytes; pixels: k values of a raster"),
    ] = "words"
    k: Annotated[int, Field(ge=1, le=255, description="tokens per chunk at most (paper: 12)")] = 12


@dataclass(kw_only=True)
class ShardOptions:
    """How shards are written."""

    workers: Annotated[int, Field(ge=1, description="processes that write shards; changes no byte of them")] = 1
    megabytes: Annotated[
        int, Field(ge=1, description="source bytes per shard, about; one shard is one unit of work")
    ] = 16
