"""Options of sources, chunkers, shards and the loader. Importing this module imports nothing heavy."""

import dataclasses
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Unit
from pydantic import AfterValidator, Field

from data.urls import NO_SECRET

LARGEST_CHUNK = 255  # tokens; lengths are stored as bytes


@cache
def installed_names(group: str, *_search_path: str) -> list[str]:
    """Return the names of a group's entry points, which are those of the packages on the search path."""
    return sorted(entry.name for entry in entry_points(group=group))


class Kinds(dict[str, str]):
    """The kinds of sources or chunkers of this package: `module:name` of the class by kind.

    Args:
        group: entry points by which other packages add kinds.
        classes: the kinds of this package.
    """

    def __init__(self, group: str, classes: dict[str, str]) -> None:
        super().__init__(classes)
        self.group = group

    def list_names(self) -> list[str]:
        """Return the kinds of this package, then those that other packages add."""
        return [*self, *installed_names(self.group, *sys.path)]

    def check_name(self, name: str) -> str:
        """Return the name of a kind of this package or of an installed one.

        Raises:
            ValueError: there is no such kind.
        """
        if name not in self and name not in (names := self.list_names()):
            raise ValueError(f"expected one of {', '.join(names)}")
        return name

    def add_choices(self, schema: dict[str, Any]) -> None:
        """Add the names to a JSON schema, for forms. Entry points are listed only when a schema is made."""
        schema.update(enum=self.list_names())

    def load_class(self, name: str) -> Any:
        """Import the class of a kind.

        Raises:
            ValueError: there is none, or two packages have one each.
        """
        if self.check_name(name) in self:
            module, _, attribute = self[name].partition(":")
            return getattr(import_module(module), attribute)
        (entry, *others) = entry_points(group=self.group, name=name)
        if any(other.value != entry.value for other in others):
            values = ", ".join(each.value for each in (entry, *others))
            raise ValueError(f"{name!r} is in more than one package: {values}. Uninstall one of them")
        return entry.load()


SOURCES = Kinds(
    "haed.sources",
    {
        "stdlib": "data.sources.text:StdlibSource",
        "text": "data.sources.text:TextSource",
        "jsonl": "data.sources.text:JsonLinesSource",
        "wikitext": "data.sources.text:WikiTextSource",
        "enwik8": "data.sources.text:Enwik8Source",
        "stdin": "data.sources.text:TextSource",
        "images": "data.sources.images:ImageSource",
        "audio": "data.sources.audio:AudioSource",
        "datasets": "data.sources.huggingface:DatasetsSource",
        "webdataset": "data.sources.webdataset:WebDatasetSource",
        "shards": "",  # already sharded, nothing to read
    },
)
CHUNKERS = Kinds(
    "haed.chunkers",
    {
        "words": "data.chunkers:WordChunker",
        "fixed": "data.chunkers:FixedChunker",
        "pixels": "data.chunkers:PixelChunker",
        "sentences": "data.chunkers:SentenceChunker",
        "entropy": "data.chunkers:EntropyChunker",
    },
)


_OF_TEXT = ("stdlib", "text", "jsonl", "wikitext", "enwik8", "stdin", "datasets", "webdataset")


def _check_expression(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"this is not a regular expression: {error}") from None
    return pattern


def _check_glob(pattern: str) -> str:
    """Check that a glob is valid and relative, and return it."""
    if pattern.startswith("/"):
        raise ValueError("expected a glob relative to source.path, without a leading /")
    if not pattern or any("**" in part and part != "**" for part in pattern.split("/")):
        raise ValueError("this is not a glob such as *.txt or **/*.txt: ** stands alone between slashes")
    return pattern


@dataclass(kw_only=True)
class SourceOptions:
    """Options of a source: the documents to read, and their division into train, valid and test."""

    kind: Annotated[
        str,
        Field(
            description="Kind of the source. stdlib: .py files of the Python standard library. text: one document per file. "
            "jsonl: one document per line. wikitext: documents divided by ' = Title = ' headings. enwik8: one "
            "text, split by offset. stdin: standard input. images: PNG, JPEG, ImageNet32 or CIFAR-10. audio: WAV "
            "or FLAC. datasets: Hugging Face datasets. webdataset: tar files of samples. shards: an existing "
            "corpus, also behind a URL (http, https, s3, gs, az, file).",
            json_schema_extra=SOURCES.add_choices,
        ),
        AfterValidator(SOURCES.check_name),
    ] = "stdlib"
    path: Annotated[
        Annotated[str, Field(max_length=4096, json_schema_extra={"pattern": NO_SECRET})] | None,
        Field(
            description="File, folder or glob to read, such as texts, texts/*.txt or part-{000..012}.txt. Text may be "
            "compressed (.gz, .xz, .bz2, .zst). - is standard input. Null: source.kind=stdlib reads the installed "
            "standard library."
        ),
    ] = None
    pattern: Annotated[
        str,
        Field(
            description="Files to read in a folder, as a glob relative to it. datasets: names of the splits to read, such as "
            "{train,test}."
        ),
        AfterValidator(_check_glob),
    ] = "**/*"
    follow_links: Annotated[
        bool,
        Field(
            description="Follow links that lead out of the folder, and links to folders. If false, they are left out and "
            "reported."
        ),
    ] = False
    field: Annotated[
        str,
        Field(
            description="jsonl, datasets: field that holds the text. webdataset: extension of the member to read, such as "
            "txt, txt.gz or png. json.caption is a field of a .json member."
        ),
    ] = dataclasses.field(default="text", metadata={"kinds": ("jsonl", "datasets", "webdataset")})
    config: Annotated[str | None, Field(description="Configuration of the Hugging Face data set.")] = dataclasses.field(
        default=None, metadata={"kinds": ("datasets",)}
    )
    revision: Annotated[
        str | None, Field(description="Branch, tag or commit on the Hugging Face hub. Null: the newest.")
    ] = dataclasses.field(default=None, metadata={"kinds": ("datasets",)})
    valid_percent: Annotated[
        int,
        Field(
            ge=0,
            le=50,
            description="Share of documents for valid, and the same share for test, where file names state no split.",
        ),
        Unit("%"),
    ] = 5
    valid_pattern: Annotated[
        str | None,
        Field(
            description="Regular expression. Documents whose names match are in the valid split, whatever other rules say."
        ),
        AfterValidator(_check_expression),
    ] = None
    test_pattern: Annotated[
        str | None,
        Field(
            description="The same for the test split. Documents that match neither expression are in the train split."
        ),
        AfterValidator(_check_expression),
    ] = None
    cut: Annotated[
        bool | None,
        Field(
            description="How a text is split if its files state no split. true: each file is cut by source.valid_percent, "
            "90/5/5 by default. false: a hash of its contents assigns each whole file to a split. Null: files are cut only "
            "if the hash would leave a split empty."
        ),
    ] = dataclasses.field(default=None, metadata={"kinds": ("text", "stdin")})
    newlines: Annotated[
        Literal["keep", "lf"],
        Field(description="Line ends of texts. keep: as they are. lf: CRLF (Windows) and CR (old Mac) become LF."),
    ] = dataclasses.field(default="keep", metadata={"kinds": _OF_TEXT})
    offsets: Annotated[
        list[Annotated[int, Field(json_schema_extra={"minimum": 0, "maximum": 2**53})]],
        Field(
            description="Positions in the file where valid and test begin. An empty list: as source.valid_percent says, 90 % and "
            "95 % of the file by default.",
            max_length=2,
        ),
        Unit("bytes"),
    ] = dataclasses.field(default_factory=list, metadata={"kinds": ("enwik8",)})
    image_size: Annotated[
        int | None,
        Field(
            ge=1, le=4096, description="Side of the square to which images are resampled. Null: images keep their size."
        ),
        Unit("pixels"),
    ] = dataclasses.field(default=None, metadata={"kinds": ("images", "webdataset")})
    encoding: Annotated[
        Literal["mulaw", "pcm16"],
        Field(
            description="Encoding of audio. mulaw: 8 bits, one token per sample. pcm16: 16 bits, two tokens per sample, high "
            "byte first."
        ),
    ] = dataclasses.field(default="mulaw", metadata={"kinds": ("audio",)})
    expansion: Annotated[
        int,
        Field(
            ge=1,
            le=10**6,
            description="Maximum ratio of decompressed to compressed size, beyond 64 MB. Larger inputs are refused as "
            "decompression bombs.",
        ),
    ] = 250


@dataclass(kw_only=True)
class ChunkerOptions:
    """Options of a chunker, which splits documents into chunks."""

    kind: Annotated[
        str,
        Field(
            description="How documents are cut into chunks. words: a word with the white space after it. fixed: k bytes. "
            "pixels: k values of a raster. sentences: a sentence. entropy: a chunk begins where a byte n-gram "
            "model is uncertain.",
            json_schema_extra=CHUNKERS.add_choices,
        ),
        AfterValidator(CHUNKERS.check_name),
    ] = "words"
    k: Annotated[
        int,
        Field(
            ge=1, le=LARGEST_CHUNK, description="Maximum length of a chunk (paper: 12). A token of a text is a byte."
        ),
        Unit("tokens"),
    ] = 12
    mean_length: Annotated[
        float,
        Field(
            ge=1,
            le=LARGEST_CHUNK,
            description="Mean length of a chunk to aim at. The entropy threshold follows from it.",
        ),
        Unit("tokens"),
    ] = dataclasses.field(default=5.0, metadata={"kinds": ("entropy",)})


@dataclass(kw_only=True)
class ShardOptions:
    """Options for writing shards."""

    workers: Annotated[
        int,
        Field(ge=1, le=1024, description="Processes that write shards. The shards do not depend on it."),
        Unit("processes"),
    ] = 1
    megabytes: Annotated[
        int,
        Field(ge=1, le=128, description="Approximate size of the source data in a shard. A shard is one unit of work."),
        Unit("MB"),
    ] = 16
    verify: Annotated[
        bool, Field(description="Check the sha256 of a finished corpus's shards, not only their sizes.")
    ] = False


@dataclass(kw_only=True)
class LoaderOptions:
    """Options for reading shards."""

    workers: Annotated[
        int,
        Field(
            ge=0, le=64, description="Processes that prepare batches ahead. The batches do not depend on it. 0: none."
        ),
        Unit("processes"),
    ] = 0
    damaged: Annotated[
        Literal["stop", "skip"],
        Field(
            description="What happens at a damaged or missing shard. stop: an error. skip: its windows are empty and "
            "counted. What is read before the first step needs whole shards: "
            "known chunks, frequent words and the windows of validation."
        ),
    ] = "stop"
    cache_dir: Annotated[str, Field(description="Folder in which a folder haed-cache keeps fetched shards.")] = (
        "shards/.cache"
    )
    cache_gigabytes: Annotated[
        float,
        Field(
            gt=0,
            le=1e6,
            description="Maximum size of the shards in the cache. The least recently used are removed first.",
        ),
        Unit("GB"),
    ] = 50.0


_Options = TypeVar("_Options", SourceOptions, ChunkerOptions)


def restore_options(record: dict[str, Any], base: type[_Options], table: Kinds) -> _Options:
    """Return the options that a manifest records, as the `options_class` of their kind.

    Without the package of the kind, they are of the base class. Recorded options that the class lacks are left out.
    """
    options_class = base
    if record["kind"] not in table:
        with suppress(ValueError, ImportError, AttributeError):
            options_class = getattr(table.load_class(record["kind"]), "options_class", base)
    names = {field.name for field in dataclasses.fields(options_class)}
    return options_class(**{name: value for name, value in record.items() if name in names})
