"""The files of a run that are read back or shown, and what those in JSON hold."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from data import checked
from data.durable import write_atomically
from data.statistics import Summary

log = logging.getLogger(__name__)
T = TypeVar("T")
AGAIN = {  # what to do about a file that is damaged
    "evaluation.json": "run `haed evaluate` again",
    "samples.json": "run `haed sample` again",
    "analysis.json": "run `haed analyse` again",
    "environment.json": "remove it to go on without it",
    "corpus.json": "bring a copy of it back, or train under another name=",
    "clock.json": "remove it to have it measured anew",
}


def write_or_say(path: Path, content: bytes) -> bool:
    """Writes a file whose contents are shown as well: they are not lost if it cannot be written, which is logged as an error.

    Its folder must be there: one that was removed is not made anew.

    Returns:
        Whether it is there.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        log.error("%s could not be written: %s", path, error.strerror or error)
        return False
    return True


def read_json(path: Path, keys: tuple[str, ...] = (), inside: Path | None = None) -> dict[str, Any]:
    """Reads a JSON object that has these keys, and our checksum.

    Args:
        path: of the file.
        keys: that it must have.
        inside: folder out of which no link may lead; None: its own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    found = checked.read_json(path, inside=inside or path.parent, advice=AGAIN.get(path.name, ""))
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"{path} is damaged, or of another version: it lacks {', '.join(missing[:5])}")
    return dict(found)


def read_as(kind: type[T], path: Path, inside: Path | None = None) -> T:
    """Reads a JSON file with our checksum as a dataclass, or what is made of them; keys that it does not have are left out.

    Args:
        kind: the dataclass.
        path: of the file.
        inside: folder out of which no link may lead; None: its own.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    found = checked.read_json(path, inside=inside or path.parent, advice=AGAIN.get(path.name, ""), several=True)
    try:
        return cast(T, _adapter(cast(Any, kind)).validate_python(found))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged, or of another version: {place} {first['msg'].lower()}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@dataclass
class Environment:
    """environment.json: what a result depends on beside the configuration."""

    versions: dict[str, str]
    commit: str | None
    machine: str
    seed: int
    device: str
    threads: int | None


@dataclass(kw_only=True)
class Remembered:
    """corpus.json: the corpus that a run is trained on.

    Attributes:
        location: folder or URL of its shards.
        beside: that folder, as it lies from the run; None: a URL.
        digest: of source, chunker and settings.
        fitted: what its chunker learned from it.
        chunker_version: of that chunker.
        frequent: frequent chunks, as prompts.
        statistics: of its splits.
        form: of its documents, if they are pictures or sound; of texts nothing.
    """

    location: str
    beside: str | None = None
    digest: str
    fitted: dict[str, Any] | None
    chunker_version: int
    frequent: list[str]
    statistics: dict[str, Summary]
    form: dict[str, int]


@dataclass
class Baseline:
    """What a simple model needs: all bits of the held-out bytes, and the same over bytes and over Unicode characters."""

    name: str
    bits: float
    bits_per_byte: float
    bits_per_char: float


@dataclass
class ClosedSet:
    """Bits per token of some windows by both, and how many chunks there were to choose from.

    Attributes:
        bits_per_token: by the softmax over all candidates.
        decoder_bits_per_token: by the decoder, of the same chunks.
        candidates: size of the closed set.
        chunks: number of chunks scored.
        tokens: number of tokens in them.
        calibrated: the loss was corrected so that this ought to be a likelihood; without a correction this is the
            measurement of what it gives instead.
    """

    bits_per_token: float
    decoder_bits_per_token: float
    candidates: int
    chunks: int
    tokens: int
    calibrated: bool


@dataclass
class Part:
    """Some of the chunks, or of the decisions: `bits` of `decisions` (tokens and ends) in `chunks` with `tokens`.

    `bits_per_token` is None where there is no token; at a position, the decision is the token there or the end.
    """

    of: str
    chunks: int
    tokens: int
    bits: float
    bits_per_token: float | None


@dataclass
class Breakdown:
    """Bits of a split in partitions, each of which adds up to all of them.

    Attributes:
        by_position: of the decoder's decisions; of a mixture, to the bits of its decoder alone.
        by_length: of whole chunks.
        by_frequency: likewise.
        decoder_by_frequency: of a mixture, by its decoder alone.
        known_by_frequency: of a mixture, by its softmax alone, of the known chunks only.
    """

    by_position: list[Part]
    by_length: list[Part]
    by_frequency: list[Part]
    decoder_by_frequency: list[Part] = field(default_factory=list)
    known_by_frequency: list[Part] = field(default_factory=list)

    def of_parts(self) -> list[tuple[str, ...]]:
        """Bits per token by frequency of a mixture and of its parts alone, as a table; see `OF_PARTS`."""
        tables = (self.by_frequency, self.decoder_by_frequency, self.known_by_frequency)
        found = [{part.of: part.bits_per_token for part in table} for table in tables]
        return [
            (part.of, f"{part.chunks:,}", *(_bits(each.get(part.of)) for each in found))
            for part in (self.by_frequency if self.decoder_by_frequency else [])
        ]


@dataclass
class Analysed:
    """What of analysis/analysis.json a report shows: the checkpoint, and what was found, in sentences."""

    stage: str
    step: int
    checkpoint: str
    findings: list[str]


OF_PARTS = ("times in train", "chunks", "mixture, bits/token", "decoder alone", "known chunks alone")


@dataclass
class MixtureParts:
    """What the parts of a mixture say of the same chunks, and how they are weighed.

    Attributes:
        known: number of known chunks, |S|.
        unknown_share: of the scored chunks, those that are not among them.
        gate: mean of g over the scored chunks.
        decoder_bits_per_token: the decoder alone, on all chunks.
        known_bits_per_token: the softmax over the known chunks alone, q, on the scored ones among them; None if there is none.
        known_decoder_bits_per_token: the decoder alone on the same, to compare with.
        known_flops_per_token: operations of the products with all known chunks, over all tokens.
    """

    known: int
    unknown_share: float
    gate: float
    decoder_bits_per_token: float
    known_bits_per_token: float | None
    known_decoder_bits_per_token: float | None
    known_flops_per_token: float

    def __str__(self) -> str:
        """For people."""
        return (
            f"{self.known:,} known chunks, alone {_bits(self.known_bits_per_token)} bits/token where the decoder has "
            f"{_bits(self.known_decoder_bits_per_token)}; the decoder alone on all {_bits(self.decoder_bits_per_token)}; "
            f"{self.unknown_share:.2%} of the chunks unknown, gate {self.gate:.3f}, "
            f"{self.known_flops_per_token / 1e6:.3g} MFLOP per token"
        )


def _bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


@dataclass
class Figure:
    """A figure, its unit, and what it is over."""

    value: float
    unit: Literal["bits/char", "bits/dim"]
    over: Literal["characters", "values"]


@dataclass(kw_only=True)
class Evaluation:
    """evaluation.json: the result of an evaluation.

    Attributes:
        split: the split, or the file that was scored.
        stage: phase whose checkpoint was used.
        step: of that checkpoint.
        checkpoint: its digest.
        fallback: why it was used though it is not the best, see `pipeline.run.checkpoints.Saved`; None: nothing was wrong.
        bits: of all tokens and ends of chunks.
        tokens: number of source tokens.
        characters: of the original; of pictures and sound, their values.
        bytes: of the original.
        text: digest of them, whatever the order of the documents; None: of a model of another package.
        bits_per_token: `bits` over tokens.
        bits_per_char: over characters.
        bits_per_byte: over bytes.
        bits_per_dim: of pictures and sound, bits per value: a token, so a channel of a pixel, a µ-law code, a byte of pcm16.
        standard_error: of bits_per_char over documents (None if there is one).
        context: chunks of a window.
        stride: how many of them are newly scored by each.
        seconds: time of scoring.
        precision: fp32 or bf16, in which the model was computed.
        processor: kind of CPU or GPU that computed it.
        likelihood: whose bits they are, where a run has two: its mixture's, or its decoder's alone; else None.
        parts: of the mixture, else None.
        iem: the IEM score as a likelihood over a closed set of chunks, if the run was trained with that loss.
        breakdown: bits by position in a chunk, by its length, and by how often the train split has it.
        yardsticks: other models on the same bytes.
        not_beaten: names of those that need no more bits.
    """

    split: str
    stage: str
    step: int
    checkpoint: str
    fallback: str | None = None
    bits: float
    tokens: int
    characters: int
    bytes: int
    text: str | None
    bits_per_token: float
    bits_per_char: float
    bits_per_byte: float
    bits_per_dim: float | None
    standard_error: float | None = None
    context: int
    stride: int
    seconds: float
    precision: Literal["fp32", "bf16"]
    processor: str
    likelihood: Literal["mixture", "decoder"] | None = None
    parts: MixtureParts | None = None
    iem: ClosedSet | None = None
    breakdown: Breakdown | None = None
    yardsticks: list[Baseline]
    not_beaten: list[str]

    @property
    def headline(self) -> Figure:
        """What is looked at first: bits/dim of pictures and sound, else bits/char."""
        if self.bits_per_dim is not None:
            return Figure(self.bits_per_dim, "bits/dim", "values")
        return Figure(self.bits_per_char, "bits/char", "characters")

    @property
    def whose(self) -> str:
        """One sentence on whose bits they are, where a run has a mixture, and what its parts have; else nothing."""
        if self.likelihood == "decoder":
            return "By the decoder alone (evaluate.likelihood=decoder), not by the run's mixture."
        return f"A mixture. {self.parts}." if self.parts is not None else ""

    @property
    def decoder(self) -> float | None:
        """What the decoder of a mixture has alone, in the unit of `headline`."""
        return None if self.parts is None else self.parts.decoder_bits_per_token * self.tokens / self.characters


@dataclass
class Sample:
    """A prompt and its continuation.

    Attributes:
        prompt: as text for people.
        text: its continuation, likewise; of pictures, the file in which they are drawn.
        hex: the exact bytes of both; None of pictures.
        summoned: the share of its chunks that needed no decoder; None where no chunks are known.
        characters_per_second: of all continuations of the prompt together; None of pictures.
    """

    prompt: str
    text: str
    hex: str | None = None
    summoned: float | None = None
    characters_per_second: float | None = field(default=None, compare=False)


@dataclass
class KeptSample(Sample):
    """An entry of samples.json, with the digest of the checkpoint it is of, and why that was used if it is not the best."""

    checkpoint: str | None = None
    fallback: str | None = None


def pace(samples: Sequence[Sample]) -> str:
    """How fast texts were written, and how much of them without the decoder; of pictures nothing."""
    speeds = [item.characters_per_second for item in samples if item.characters_per_second is not None]
    shares = [item.summoned for item in samples if item.summoned is not None]
    summoned = f"; {100 * fmean(shares):.1f} % of the chunks were summoned, without the decoder" if shares else ""
    return f"{fmean(speeds):,.0f} characters/s{summoned}" if speeds else ""
