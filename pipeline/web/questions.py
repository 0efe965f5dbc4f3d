"""The questions that pages ask an opened run, each with bounds: neighbours, passages, next chunks, samples, scores."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from pipeline.config import ConfigError, SampleOptions
from pipeline.console import unescape_query
from pipeline.run.files import Sample, describe_speed
from pipeline.run.index.queries import PIXELS, Neighbour, QueryResult, display_chunk
from pipeline.web.corpus_examples import Example

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.run.opened import NextChunks, ScoredChunk
    from pipeline.web.model_cache import LoadedRun

MOST_CHUNKS = 2000  # of all samples together
Prompt = Annotated[str, Field(max_length=4000)]


@dataclass(kw_only=True)
class NeighbourQuestion:
    """A question for the neighbours of chunks.

    Attributes:
        query: chunks; ␣ ↵ ⇥ ␍ stand for white space.
        hex: further chunks, as their exact bytes in hexadecimal.
        count: number of neighbours for each query.
        min_count: minimum number of occurrences of a neighbour; None: the index's floor.
    """

    query: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)] = field(default_factory=list)
    hex: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)] = field(default_factory=list)
    count: Annotated[int, Field(ge=1, le=100)] = 8
    min_count: Annotated[int, Field(ge=1, le=10**12)] | None = None


@dataclass(kw_only=True)
class PassageQuestion:
    """A question for passages whose context is similar to that after a text."""

    prompt: Prompt = ""
    count: Annotated[int, Field(ge=1, le=100)] = 8


@dataclass(kw_only=True)
class NextChunkQuestion:
    """A question for the next chunks after a prompt."""

    prompt: Prompt = ""
    count: Annotated[int, Field(ge=1, le=200)] = 12


@dataclass(kw_only=True)
class ScoreQuestion:
    """A question for the bits of each chunk of a text."""

    prompt: Prompt = ""


@dataclass(kw_only=True)
class SampleQuestion:
    """A question for continuations of a prompt; see `SampleOptions`."""

    prompt: Prompt = ""
    samples: Annotated[int, Field(ge=1, le=16)] = 1
    chunks: Annotated[int, Field(ge=1, le=500)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0


@dataclass
class NeighbourWithExamples(Neighbour):
    """A neighbour with some of its places in the corpus."""

    examples: list[Example] = field(default_factory=list)


@dataclass
class QueryResponse:
    """A query and its answer.

    Attributes:
        query: the query as text for people.
        hex: its exact bytes in hexadecimal.
        count: its number of occurrences in the split; None: it is not in the index and was embedded for this query.
        pieces: the chunks that the query's text is cut into, if there are several.
        neighbours: the neighbours, nearest first.
    """

    query: str
    hex: str
    count: int | None
    pieces: list[str]
    neighbours: list[NeighbourWithExamples]


@dataclass
class NeighbourResult:
    """The answer to a question for neighbours.

    Attributes:
        asked: each query with its answer.
        score: name of the score.
        split: the split that was indexed.
        least: minimum number of occurrences of the chunks that were searched.
        among: number of the chunks that were searched.
        indexed: number of chunks in the index.
        where: where examples were searched, or why they were not.
    """

    asked: list[QueryResponse]
    score: str
    split: str
    least: int
    among: int
    indexed: int
    where: str


@dataclass
class ScoreResult:
    """The bits of each chunk of a text, and of the text per character, by the model alone too.

    `shares` are the mean shares of the parts of the likelihood, weighted by characters.
    """

    chunks: list["ScoredChunk"]
    bits_per_char: float
    alone: float
    shares: dict[str, float]


@dataclass
class SampleResult:
    """Continuations of a prompt, and the speed of sampling."""

    samples: list[Sample]
    pace: str


def ask_neighbours(question: NeighbourQuestion) -> Callable[["LoadedRun"], NeighbourResult]:
    """Return a function that finds the nearest chunks to each query, with examples from the corpus.

    Raises:
        ValueError: a text is not hexadecimal.
    """
    try:
        exact = [bytes.fromhex(digits) for digits in question.hex if digits]
    except ValueError:
        raise ValueError(f"hex={question.hex[0][:40]} is not a chunk in hexadecimal") from None

    def ask(opened: "LoadedRun") -> NeighbourResult:
        run, index = opened.run, opened.run.probe.index
        pictures = run.chunker.name == PIXELS  # queries are colours, positions or hexadecimal
        queries = [
            query.encode(errors="replace") if pictures else _query_bytes(query) for query in question.query if query
        ]
        queries += [digits.encode() for digits in question.hex] if pictures else exact
        found = run.probe.neighbours(*queries, count=question.count, min_count=question.min_count)
        texts = [b""] * len(found) if pictures or not queries else queries
        asked = [_make_query_response(opened, each, text) for each, text in zip(found, texts, strict=True)]
        meta, least = index.meta, question.min_count or index.meta.floor
        return NeighbourResult(
            asked, found.score, meta.split, least, index.count_known(least), len(index), opened.corpus_examples.where
        )

    return ask


def _query_bytes(query: str) -> bytes:
    return unescape_query(query).encode(errors="replace")


def _make_query_response(opened: "LoadedRun", found: QueryResult, text: bytes) -> QueryResponse:
    run, index = opened.run, opened.run.probe.index
    pieces = [display_chunk(piece, run.chunker.name) for piece in run.chunker.cut_text(text)]
    placed = [
        NeighbourWithExamples(**asdict(near), examples=opened.corpus_examples.find_examples(bytes.fromhex(near.hex)))
        for near in found.neighbours
    ]
    row = index.find_row(bytes.fromhex(found.hex))
    count = None if row is None else int(index.chunks.counts[row])
    return QueryResponse(found.query, found.hex, count, pieces if len(pieces) > 1 else [], placed)


def ask_passages(question: PassageQuestion) -> Callable[["LoadedRun"], QueryResult]:
    """Return a function that finds the places of the corpus whose state is nearest to that after a text."""
    return lambda opened: opened.run.probe.contexts(_prompt_bytes(question.prompt), count=question.count)[0]


def ask_next_chunks(question: NextChunkQuestion) -> Callable[["LoadedRun"], "NextChunks"]:
    """Return a function that computes the most likely next chunks after a prompt."""
    return lambda opened: opened.run.next(_prompt_bytes(question.prompt), question.count)


def ask_score(question: ScoreQuestion) -> Callable[["LoadedRun"], ScoreResult]:
    """Return a function that scores a text chunk by chunk."""

    def ask(opened: "LoadedRun") -> ScoreResult:
        run, text = opened.run, _prompt_bytes(question.prompt)
        if run.chunker.name == PIXELS:
            raise ValueError("this run's model is of pictures. Use `haed evaluate` to score them")
        chunks, size = run.score_chunks(text), max(1, run.size(text))
        weighed = [(len(each.hex) / 2, each.parts) for each in chunks if each.parts is not None]
        total = sum(weight for weight, _ in weighed)
        names = weighed[0][1] if weighed else {}
        shares = {name: sum(weight * parts[name] for weight, parts in weighed) / total for name in names}
        bits, alone = sum(each.bits for each in chunks), sum(each.alone for each in chunks)
        return ScoreResult(chunks, bits / size, alone / size, shares)

    return ask


def ask_samples(question: SampleQuestion) -> Callable[["LoadedRun"], SampleResult]:
    """Return a function that samples continuations of a prompt.

    Raises:
        ConfigError: more than `MOST_CHUNKS` chunks are requested.
    """
    if question.samples * question.chunks > MOST_CHUNKS:
        raise ConfigError(f"samples × chunks must be at most {MOST_CHUNKS:,} here. `haed sample` has no such limit")

    def ask(opened: "LoadedRun") -> SampleResult:
        from pipeline.inference import continue_prompt

        run, prompt = opened.run, _prompt_bytes(question.prompt)
        if run.chunker.name == PIXELS:
            raise ValueError("this run's model is of pictures. `haed sample` draws completions into samples.png")
        how = SampleOptions(
            chunks=question.chunks, temperature=question.temperature, top_p=question.top_p, seed=question.seed
        )
        written = continue_prompt(run, prompt, question.samples, how)
        return SampleResult(written, describe_speed(written))

    return ask


def _prompt_bytes(prompt: str) -> bytes:
    """Return the bytes of a text from a form, whose line ends browsers send as CR LF."""
    return prompt.replace("\r\n", "\n").encode(errors="replace")
