"""The files of a run that are read back or shown, and what those in JSON hold.

`data.durable` writes them whole or not at all. Fields with a default are missing in files of earlier versions.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from data.durable import write_atomically
from data.statistics import Summary

log = logging.getLogger(__name__)
T = TypeVar("T")


def write_or_say(path: Path, content: bytes) -> bool:
    """Writes a file whose contents are shown as well: they are not lost if it cannot be written, which is logged as an error.

    Returns:
        Whether it is there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        log.error("%s could not be written: %s", path, error.strerror or error)
        return False
    return True


def read_json(path: Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Reads a JSON object that has these keys.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
        missing = [key for key in keys if key not in found] if isinstance(found, dict) else ["everything"]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if missing:
        raise ValueError(f"{path} is damaged, or of another version: it lacks {', '.join(missing[:5])}")
    return dict(found)


def read_as(kind: type[T], path: Path) -> T:
    """Reads a JSON file as a dataclass, or what is made of them; keys that it does not have are left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path} is damaged, or of another version: {place} {first['msg'].lower()}") from error


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
    """

    location: str
    beside: str | None = None
    digest: str
    fitted: dict[str, Any] | None
    chunker_version: int = 1
    frequent: list[str] | None = None
    statistics: dict[str, Summary] | None = None


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
    """Bits of a split in three partitions; each adds up to all of them."""

    by_position: list[Part]
    by_length: list[Part]
    by_frequency: list[Part]


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
        bits: of all tokens and ends of chunks.
        tokens: number of source tokens.
        characters: of the original; of pictures, their values.
        bytes: of the original.
        bits_per_token: `bits` over tokens.
        bits_per_char: over characters.
        bits_per_byte: over bytes.
        bits_per_dim: bits per value of a raster, for images, else None.
        standard_error: of bits_per_char over documents (None if there is one).
        context: chunks of a window.
        stride: how many of them are newly scored by each.
        seconds: time of scoring.
        iem: the IEM score as a likelihood over a closed set of chunks, if the run was trained with that loss.
        breakdown: bits by position in a chunk, by its length, and by how often the train split has it.
        yardsticks: other models on the same bytes.
        not_beaten: names of those that need no more bits.
    """

    split: str
    stage: str
    step: int
    checkpoint: str = ""
    bits: float
    tokens: int
    characters: int
    bytes: int
    bits_per_token: float
    bits_per_char: float
    bits_per_byte: float
    bits_per_dim: float | None
    standard_error: float | None = None
    context: int
    stride: int = 0
    seconds: float
    iem: ClosedSet | None = None
    breakdown: Breakdown | None = None
    yardsticks: list[Baseline]
    not_beaten: list[str]

    @property
    def headline(self) -> Figure:
        """What is looked at first: bits/dim of pictures, else bits/char."""
        if self.bits_per_dim is not None:
            return Figure(self.bits_per_dim, "bits/dim", "values")
        return Figure(self.bits_per_char, "bits/char", "characters")


@dataclass
class Sample:
    """A prompt and its continuation.

    Attributes:
        prompt: as text for people.
        text: its continuation, likewise; of pictures, the file in which they are drawn.
        hex: the exact bytes of both; None of pictures.
    """

    prompt: str
    text: str
    hex: str | None = None


@dataclass
class KeptSample(Sample):
    """An entry of samples.json, with the digest of the checkpoint it is of."""

    checkpoint: str | None = None
