"""The questions that pages ask an opened run, each with bounds: neighbours, passages, next chunks, samples, scores.

A question is read from the parameters of an address. What is wrong with one is told for each of its boxes.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, ValidationError
from starlette.datastructures import QueryParams

from pipeline.config import SampleOptions
from pipeline.console import escape_control_characters, format_error, unescape_query
from pipeline.run.files import describe_speed, type_adapter
from pipeline.run.index.queries import PIXELS, QueryResult, display_chunk
from pipeline.suggestions import format_command

if TYPE_CHECKING:  # torch costs two seconds
    from pipeline.run.opened import NextChunks
    from pipeline.web.model_cache import LoadedRun

MOST_CHUNKS = 2000  # of all samples together
MOST_PROMPTS = 16
_HEX = r"^[\t-\r ]*([0-9A-Fa-f]{2}[\t-\r ]*)*$"  # what bytes.fromhex reads, white space of ASCII alone
_LONGER = 8  # proposed chunks that begin with a query
_UNTYPEABLE = re.compile("[\x00\x80-\x9f]")  # HTML has no way to write these in a box
Prompt = Annotated[str, Field(max_length=4000)]
T = TypeVar("T")


class InvalidQuestionError(ValueError):
    """A question that cannot be answered.

    Args:
        troubles: what is wrong, by the name of a box.
        typed: the question as it was typed, for the boxes; None: it was valid by itself.
    """

    def __init__(self, troubles: dict[str, str], typed: Any = None) -> None:
        super().__init__(". ".join(troubles.values()))
        self.troubles, self.typed = troubles, typed


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
    hex: Annotated[list[Annotated[str, Field(max_length=1000, pattern=_HEX)]], Field(max_length=16)] = field(
        default_factory=list
    )
    count: Annotated[int, Field(ge=1, le=100)] = 8
    min_count: Annotated[int, Field(ge=1, le=10**12)] | None = None

    def answer(self, opened: "LoadedRun") -> dict[str, Any]:
        """Return the nearest chunks to each query, with examples from the corpus.

        Returns:
            `asked`: each query with its answer. `least`: minimum count of the chunks that were searched. `among`: their
            number, of all `indexed` ones. `where`: where examples were searched, or why they were not. `chance`: scores of
            random pairs of chunks, None if there are too few. Also the name of the `score`, and the `split`.

        Raises:
            InvalidQuestionError: a query is not one of this run's chunks.
        """
        run, index = opened.run, opened.run.probe.index
        pictures = run.chunker.name == PIXELS  # queries are colours, positions or hexadecimal
        queries = [query.encode(errors="replace") if pictures else _query_bytes(query) for query in self.query if query]
        queries += [digits.encode() if pictures else bytes.fromhex(digits) for digits in self.hex]
        with blame_box("min_count"):
            among, least = index.searched_rows(self.min_count)
        with blame_box("query"):
            results = run.probe.neighbours(*queries, count=self.count, min_count=self.min_count)
        texts = [b""] * len(results) if pictures or not queries else queries
        return {
            "asked": [_describe_result(opened, each, text) for each, text in zip(results, texts, strict=True)],
            "score": results.score,
            "split": index.meta.split,
            "least": least,
            "among": among,
            "indexed": len(index),
            "where": opened.corpus_examples.where,
            "chance": index.meta.chance,
        }


@dataclass(kw_only=True)
class PromptQuestion:
    """A question about a text, or about several.

    Attributes:
        prompt: the text.
        lines: each line of it is a text of its own, in which ␣ ↵ ⇥ ␍ stand for white space.
    """

    prompt: Prompt = ""
    lines: bool = False

    def split_prompts(self) -> list[bytes]:
        """Return the texts."""
        if not self.lines:
            return [self.prompt.encode(errors="replace")]
        return [_query_bytes(line) for line in self.prompt.split("\n") if line] or [b""]

    def find_excess(self) -> dict[str, str]:
        """Return what exceeds the limits of all boxes together, by box."""
        if (number := len(self.split_prompts())) <= MOST_PROMPTS:
            return {}
        return {"prompt": f"{number} lines were given. Ask at most {MOST_PROMPTS} at once"}

    def answer_each(self, ask: Callable[[bytes], T]) -> T | list[T]:
        """Return the answer about the text; a list of them with `lines`."""
        with blame_box("prompt"):
            results = [ask(prompt) for prompt in self.split_prompts()]
        return results if self.lines else results[0]


@dataclass(kw_only=True)
class PassageQuestion(PromptQuestion):
    """A question for passages whose context is similar to that after a text."""

    count: Annotated[int, Field(ge=1, le=100)] = 8

    def answer(self, opened: "LoadedRun") -> dict[str, Any] | list[dict[str, Any]]:
        """Return the places of the corpus whose state is nearest to that after each text, and the chance level of scores."""
        probe, chance = opened.run.probe, opened.run.probe.places.meta.chance

        def find(prompt: bytes) -> dict[str, Any]:
            results = probe.contexts(prompt, count=self.count)
            return vars(results[0]) | {"score": results.score, "chance": chance}

        return self.answer_each(find)


@dataclass(kw_only=True)
class NextChunkQuestion(PromptQuestion):
    """A question for the next chunks after a prompt."""

    count: Annotated[int, Field(ge=1, le=200)] = 12

    def answer(self, opened: "LoadedRun") -> "NextChunks | list[NextChunks]":
        """Return the most likely next chunks after each prompt."""
        return self.answer_each(lambda prompt: opened.run.next(prompt, self.count))


@dataclass(kw_only=True)
class ScoreQuestion:
    """A question for the bits of each chunk of a text."""

    prompt: Prompt = ""

    def answer(self, opened: "LoadedRun") -> dict[str, Any]:
        """Return the bits of a text, chunk by chunk.

        Returns:
            `chunks` with their bits; `bits_per_char`, also by the model `alone`, and `uniform`: if all bytes were equally
            likely; `shares`: mean shares of the parts of the likelihood, weighted by characters.

        Raises:
            InvalidQuestionError: the text is empty.
            ValueError: the model is of pictures or sound.
        """
        run, text = opened.run, self.prompt.encode(errors="replace")
        if run.of_values:
            again = format_command("evaluate", run.folder.path)
            raise ValueError(f"this run's model is of pictures or sound. Run {again} to score them")
        if not text:
            raise InvalidQuestionError({"prompt": "the text is empty. Give one to score, such as import os"})
        chunks, size = run.score_chunks(text), max(1, run.size(text))
        weighed = [(run.size(bytes.fromhex(each.hex)), each.parts) for each in chunks if each.parts is not None]
        total = sum(weight for weight, _ in weighed)
        names = weighed[0][1] if weighed else {}
        shares = {name: sum(weight * parts[name] for weight, parts in weighed) / max(1, total) for name in names}
        bits, alone = sum(each.bits for each in chunks), sum(each.alone for each in chunks)
        per_char = {"bits_per_char": bits / size, "alone": alone / size, "uniform": 8 * len(text) / size}
        return {"chunks": chunks, **per_char, "shares": shares}


@dataclass(kw_only=True)
class SampleQuestion(PromptQuestion):
    """A question for continuations of a prompt; see `SampleOptions`."""

    samples: Annotated[int, Field(ge=1, le=16)] = 1
    chunks: Annotated[int, Field(ge=1, le=500)] = 16
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    def find_excess(self) -> dict[str, str]:
        """Return what exceeds the limits of all boxes together, by box."""
        wanted = len(self.split_prompts()) * self.samples * self.chunks
        advice = f"A page draws at most {MOST_CHUNKS:,}, so lower one of them"
        too_many = {"chunks": f"prompts × samples × chunks is {wanted:,}. {advice}"} if wanted > MOST_CHUNKS else {}
        return super().find_excess() or too_many

    def answer(self, opened: "LoadedRun") -> dict[str, Any]:
        """Return continuations of each prompt, and the speed of sampling.

        Raises:
            ValueError: the model is of pictures.
        """
        from pipeline.inference import continue_prompt

        run, prompts = opened.run, self.split_prompts()
        if run.chunker.name == PIXELS:
            again = format_command("sample", run.folder.path)
            raise ValueError(f"this run's model is of pictures. Run {again} to draw completions into samples.png")
        sampling = SampleOptions(chunks=self.chunks, temperature=self.temperature, top_p=self.top_p, seed=self.seed)
        with blame_box("prompt"):
            written = [each for prompt in prompts for each in continue_prompt(run, prompt, self.samples, sampling)]
        return {"samples": written, "pace": describe_speed(written)}


def parse_question(kind: Any, parameters: QueryParams) -> Any:
    """Return the question of an address. Empty numbers have their defaults.

    Raises:
        InvalidQuestionError: values are out of their bounds or of the wrong type, or hold characters that no box can,
            or it asks for more than is answered at once.
        ValueError: a parameter is no box of the question, and not `format`.
    """
    default = kind()
    if unknown := [name for name in parameters if name not in (*vars(default), "format")]:
        boxes = ", ".join(vars(default))
        raise ValueError(f"there is no parameter {escape_control_characters(unknown[0])}. Use {boxes} or format")
    typed: dict[str, Any] = {}
    for name, value in vars(default).items():
        values = [each.replace("\r\n", "\n") for each in parameters.getlist(name)]
        if isinstance(value, list):
            typed[name] = [each for each in values if each]
        elif values and (values[-1] or isinstance(value, str)):
            typed[name] = values[-1]
    try:
        question = type_adapter(kind).validate_python(typed)
        wrong: dict[str, Any] = {}
    except ValidationError as error:
        wrong = {str(each["loc"][0]): each for each in reversed(error.errors(include_url=False))}
    bounds = describe_bounds(kind)
    troubles = {name: _explain_value(name, each, bounds[name]) for name, each in wrong.items()}
    for name, value in typed.items():
        if control := _UNTYPEABLE.search("\n".join([value] if isinstance(value, str) else value)):
            shown = escape_control_characters(control[0])
            troubles.setdefault(name, f"{name} has the control character {shown}. Remove it")
    if troubles:
        raise InvalidQuestionError(troubles, SimpleNamespace(**vars(default) | typed))
    if isinstance(question, PromptQuestion) and (troubles := question.find_excess()):
        raise InvalidQuestionError(troubles, question)
    return question


@cache
def describe_bounds(kind: Any) -> dict[str, dict[str, Any]]:
    """Return the type, bounds and default of each box of a question, as in JSON Schema."""
    fields = type_adapter(kind).json_schema()["properties"]
    return {name: {**each, **each.get("anyOf", [{}])[0]} for name, each in fields.items()}


def _explain_value(name: str, wrong: Any, bounds: dict[str, Any]) -> str:
    if bounds["type"] == "array" and wrong["type"] == "too_long":
        return f"{len(wrong['input'])} chunks were given. Ask for at most {bounds['maxItems']} at once"
    if "max_length" in wrong.get("ctx", {}):
        most = wrong["ctx"]["max_length"]
        return f"{name} has {len(wrong['input']):,} characters. Use at most {most:,}"
    if bounds["type"] == "boolean":
        return f"{name}={str(wrong['input'])[:40]}: use on, or leave it out"
    if wrong["type"] == "string_pattern_mismatch":
        return f"{name}={wrong['input'][:40]}: this is no chunk in hexadecimal. Give pairs of digits, such as 6465662a"
    least = f"above {bounds['exclusiveMinimum']:g}" if "exclusiveMinimum" in bounds else f"from {bounds['minimum']:,}"
    whole = "whole number" if bounds["type"] == "integer" else "number"
    such = bounds["default"] if bounds["default"] is not None else 10
    return f"{name}={str(wrong['input'])[:40]}: use a {whole} {least} to {bounds['maximum']:,}, such as {such}"


@contextmanager
def blame_box(name: str) -> Iterator[None]:
    """Turn a ValueError into one about a box."""
    try:
        yield
    except ValueError as error:
        raise InvalidQuestionError({name: format_error(error)}) from error


def _query_bytes(query: str) -> bytes:
    return unescape_query(query).encode(errors="replace")


def _describe_result(opened: "LoadedRun", result: QueryResult, text: bytes) -> dict[str, Any]:
    """Return a query and its answer.

    `count`: its occurrences; None: it is not in the index and was embedded for this query. `pieces`: the chunks that its
    text is cut into, if there are several. `longer`: if it is not in the index, the most frequent chunks there that begin
    with it.
    """
    index, examples = opened.run.probe.index, opened.corpus_examples

    def show(chunk: bytes) -> dict[str, Any]:
        return {"text": display_chunk(chunk, index.meta.chunker), "hex": chunk.hex()}

    chunk, pieces = bytes.fromhex(result.hex), opened.run.chunker.cut_text(text)
    row = index.find_row(chunk)
    longer = index.find_longer(chunk, _LONGER) if row is None else []
    return {
        "query": result.query,
        "hex": result.hex,
        "count": None if row is None else int(index.chunks.counts[row]),
        "pieces": [show(piece) for piece in pieces] if len(pieces) > 1 else [],
        "longer": [show(each) | {"count": count} for each, count in longer],
        "neighbours": [
            asdict(near) | {"examples": examples.find_examples(bytes.fromhex(near.hex))} for near in result.neighbours
        ],
    }


def complete_chunk(typed: str, opened: "LoadedRun") -> list[dict[str, Any]]:
    """Return the most frequent chunks that begin with what was typed, to complete it."""
    beginning, proposed = _query_bytes(typed), []
    for chunk, count in opened.run.probe.index.find_longer(beginning, _LONGER):
        rest = chunk[len(beginning) :].decode(errors="surrogateescape")
        shown = escape_control_characters(rest)
        if unescape_query(shown) == rest:  # else it cannot be typed
            proposed.append({"text": typed + shown, "count": count})
    return proposed
