"""The questions of the pages to an opened run, each with bounds: neighbours, passages, next chunks, samples."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.config import ConfigError
from pipeline.options import SampleOptions
from pipeline.pages.examples import Example
from pipeline.run.files import Sample, pace
from pipeline.run.spaces.answers import PIXELS, Neighbour, Neighbours, spell
from pipeline.shown import meant

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.pages.warm import Opened
    from pipeline.run.opened import NextChunks

MOST_CHUNKS = 2000  # of all samples together
Prompt = Annotated[str, Field(max_length=4000)]


@dataclass(kw_only=True)
class Near:
    """A question for neighbours.

    Attributes:
        query: chunks; ␣ ↵ ⇥ ␍ stand for white space.
        hex: further ones, as their exact bytes in hexadecimal.
        count: neighbours of each.
        min_count: occurrences of a neighbour; None: the index's floor.
    """

    query: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)] = field(default_factory=list)
    hex: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)] = field(default_factory=list)
    count: Annotated[int, Field(ge=1, le=100)] = 8
    min_count: Annotated[int, Field(ge=1, le=10**12)] | None = None


@dataclass(kw_only=True)
class Like:
    """A question for passages whose context is like that after a text."""

    prompt: Prompt = ""
    count: Annotated[int, Field(ge=1, le=100)] = 8


@dataclass(kw_only=True)
class Next:
    """A question for next chunks after a prompt."""

    prompt: Prompt = ""
    count: Annotated[int, Field(ge=1, le=200)] = 12


@dataclass(kw_only=True)
class Sampling:
    """A question for continuations of a prompt; see `SampleOptions`."""

    prompt: Prompt = ""
    samples: Annotated[int, Field(ge=1, le=16)] = 1
    chunks: Annotated[int, Field(ge=1, le=500)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


@dataclass
class Placed(Neighbour):
    """A neighbour, and some places where it stands."""

    examples: list[Example] = field(default_factory=list)


@dataclass
class Asked:
    """A query and its answer.

    Attributes:
        query: for people.
        hex: its exact bytes.
        count: how often the split has it; None: it is no chunk of the index, and was embedded for this.
        pieces: the chunks that the text is cut into that was asked, if these are several.
        neighbours: the nearest first.
    """

    query: str
    hex: str
    count: int | None
    pieces: list[str]
    neighbours: list[Placed]


@dataclass
class NearBy:
    """What is near.

    Attributes:
        asked: each query.
        score: what the scores are.
        split: that was indexed.
        least: occurrences of the chunks that were searched.
        among: how many these are.
        indexed: of how many.
        where: examples were looked for, or why not.
    """

    asked: list[Asked]
    score: str
    split: str
    least: int
    among: int
    indexed: int
    where: str


@dataclass
class Written:
    """Continuations of a prompt, and how fast they came."""

    samples: list[Sample]
    pace: str


def neighbours(question: Near) -> Callable[["Opened"], NearBy]:
    """Nearest chunks to each query, with examples of each from the corpus."""
    try:
        exact = [bytes.fromhex(digits) for digits in question.hex if digits]
    except ValueError:
        raise ValueError(f"hex={question.hex[0][:40]}: not the bytes of a chunk in hexadecimal") from None

    def ask(opened: "Opened") -> NearBy:
        run, index = opened.run, opened.run.probe.index
        pictures = run.chunker.name == PIXELS  # which are asked for by colours and places, or in hexadecimal
        queries = [query.encode(errors="replace") if pictures else _exactly(query) for query in question.query if query]
        queries += [digits.encode() for digits in question.hex] if pictures else exact
        found = run.probe.neighbours(*queries, count=question.count, min_count=question.min_count)
        texts = [b""] * len(found) if pictures or not queries else queries
        asked = [_asked(opened, each, text) for each, text in zip(found, texts, strict=True)]
        meta, least = index.meta, question.min_count or index.meta.floor
        return NearBy(asked, found.score, meta.split, least, index.known(least), len(index), opened.examples.where)

    return ask


def _exactly(query: str) -> bytes:
    return meant(query).encode(errors="replace")


def _asked(opened: "Opened", found: Neighbours, text: bytes) -> Asked:
    run, index = opened.run, opened.run.probe.index
    tokens, lengths = run.chunker.split(text)
    ends = lengths.cumsum(dtype=int).tolist()
    pieces = [
        spell(text[end - length : end], run.chunker.name) for end, length in zip(ends, lengths.tolist(), strict=True)
    ]
    placed = [Placed(**asdict(near), examples=opened.examples.of(bytes.fromhex(near.hex))) for near in found.neighbours]
    row = index.find(bytes.fromhex(found.hex))
    count = None if row is None else int(index.chunks.counts[row])
    return Asked(found.query, found.hex, count, pieces if len(pieces) > 1 else [], placed)


def passages(question: Like) -> Callable[["Opened"], Neighbours]:
    """The places of the corpus where the model's state is nearest to that after a text."""
    return lambda opened: opened.run.probe.contexts(_text(question.prompt), count=question.count)[0]


def following(question: Next) -> Callable[["Opened"], "NextChunks"]:
    """The likeliest next chunks after a prompt."""
    return lambda opened: opened.run.next(_text(question.prompt), question.count)


def samples(question: Sampling) -> Callable[["Opened"], Written]:
    """Continuations of a prompt."""
    if question.samples * question.chunks > MOST_CHUNKS:
        raise ConfigError(f"samples × chunks: at most {MOST_CHUNKS:,} here; `haed sample` writes any number")

    def ask(opened: "Opened") -> Written:
        from pipeline.probe.sample import continuations

        run, prompt = opened.run, _text(question.prompt)
        if run.chunker.name == PIXELS:
            raise ValueError("this run's model is of pictures: `haed sample` draws its completions, samples.png")
        how = SampleOptions(
            chunks=question.chunks, temperature=question.temperature, top_p=question.top_p, seed=question.seed
        )
        written = continuations(run, prompt, question.samples, how)
        return Written(written, pace(written))

    return ask


def _text(prompt: str) -> bytes:
    """What was typed into a form, whose browsers end lines as HTTP does."""
    return prompt.replace("\r\n", "\n").encode(errors="replace")
