"""Result files of a run, the dataclasses of their JSON, and the cache of checksums."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError

from data import filesystem
from data.filesystem import write_atomically
from data.statistics import Summary
from pipeline.suggestions import format_command

log = logging.getLogger(__name__)
T = TypeVar("T")
_WRITERS = {"evaluation.json": "evaluate", "samples.json": "sample", "analysis.json": "analyse"}  # by file of a run
_ADVICE = {  # what to do about another file that is damaged
    "environment.json": "Delete it to continue without it",
    "corpus.json": "Restore a copy, or train under another name=",
    "clock.json": "Delete it to measure again",
    "notes.json": "Delete it to begin anew",
}
NOTES = "notes.json"
MOST_WORD_BITS = 64  # a perplexity of words beyond 2 to the power of it is none: the text has no words


def write_or_log(path: Path, content: bytes) -> bool:
    """Write a file whose contents are also shown; log an error if it cannot be written.

    Its folder must exist: a removed folder is not created again.

    Returns:
        Whether the file was written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        log.error("%s could not be written: %s", path, error.strerror or error)
        return False
    return True


def read_as(kind: type[T], path: Path, inside: Path | None = None) -> T:
    """Read a JSON file with our checksum as a dataclass, or a container of dataclasses; ignore unknown keys.

    Args:
        kind: the dataclass or container type.
        path: path of the file.
        inside: folder of the run, out of which no link may lead; None is the file's own folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its content is damaged or does not fit the type.
    """
    inside, advice = inside or path.parent, _ADVICE.get(path.name, "")
    if writer := _WRITERS.get(path.name):
        advice = f"Run {format_command(writer, inside)} again"
    content = filesystem.read_json(path, inside=inside, advice=advice, several=True)
    try:
        return cast(T, type_adapter(cast(Any, kind)).validate_python(content))
    except ValidationError as error:
        problem = f"{describe_mistake(error)}{advice and f'. {advice}'}"
        raise ValueError(f"{path} is damaged or of another version: {problem}") from error


def describe_mistake(error: ValidationError) -> str:
    """Return the first mistake as its place and what is wrong."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])} {first['msg'].lower()}"


@dataclass
class RunNotes:
    """notes.json: what people write about a run on its page.

    Attributes:
        note: a text.
        tags: short words, by which runs are found.
        archived: whether the list of runs leaves the run out.
    """

    note: Annotated[str, Field(max_length=10_000)] = ""
    tags: Annotated[list[Annotated[str, Field(min_length=1, max_length=50)]], Field(max_length=20)] = field(
        default_factory=list
    )
    archived: bool = False

    @property
    def digest(self) -> str:
        """A hash of the note and the tags, by which a form tells whether they are those that it showed."""
        return hashlib.sha256(json.dumps([self.note, self.tags]).encode()).hexdigest()


def read_notes(run: Path) -> RunNotes:
    """Return the notes of a run, empty if there are none.

    Raises:
        ValueError: they are damaged.
    """
    try:
        return read_as(RunNotes, run / NOTES)
    except FileNotFoundError:
        return RunNotes()


@cache
def type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type, built once."""
    return TypeAdapter(kind)


class ChecksumCache:
    """Checksums of files below a folder, so that large files are hashed once.

    `.checked` holds the sha256 of each file with the device, inode, size and times of the file. An entry counts only if
    these are unchanged and `.checked` belongs to the current user. Nobody can supply one that matches: inode and change
    time are set when a file is unpacked. In a folder that cannot be written, each process hashes a file once.
    """

    NAME = ".checked"
    _hashed: ClassVar[dict[Path, tuple[list[int], str]]] = {}  # by this process

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compute_sha256(self, name: str, fresh: bool = False) -> str:
        """Return the sha256 of a file, by its path below the folder; with `fresh`, whatever is cached.

        Raises:
            OSError: the file cannot be read.
        """
        path = self.folder / name
        stamp = filesystem.stamp_file(path)
        noted = self._read_entries().get(name)
        for entry in (self._hashed.get(path), noted):
            if not fresh and entry is not None and entry[0] == stamp:
                return entry[1]
        with filesystem.add_path_to_errors(path), filesystem.open_file(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if noted is None or noted[:2] != (stamp, digest):
            self.note_sums({name: digest})
        self._hashed[path] = (stamp, digest)
        return digest

    def note_sums(self, sums: Mapping[str, str], is_built: bool = False) -> None:
        """Cache the sha256 of files, unless the folder cannot be written; `is_built` if this user built them here."""
        with suppress(OSError):
            kept = {name: entry for name, entry in self._read_entries().items() if (self.folder / name).exists()}
            new = {name: (filesystem.stamp_file(self.folder / name), digest, is_built) for name, digest in sums.items()}
            write_atomically(self.folder / self.NAME, json.dumps(kept | new).encode())

    def is_built_here(self, name: str) -> bool:
        """Return whether this user built the file here, and it is unchanged."""
        entry = self._read_entries().get(name)
        return entry is not None and entry[2] and entry[0] == filesystem.stamp_file(self.folder / name)

    def _read_entries(self) -> dict[str, tuple[list[int], str, bool]]:
        """Return the entries of `.checked`; none if another user wrote it or it is damaged."""
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            path = self.folder / self.NAME
            content = filesystem.parse_json(filesystem.read_bytes(path, filesystem.RESULT), path)
            if path.lstat().st_uid == os.getuid():
                return {
                    name: (list(stamp), str(digest), is_built is True)
                    for name, (stamp, digest, is_built) in content.items()
                }
        return {}


@dataclass
class Environment:
    """environment.json: everything besides the configuration that a result depends on.

    Attributes:
        precision: fp32 or bf16 for the weights, and for matrix products in training and in scoring.
        processes: number of processes that train together.
    """

    versions: dict[str, str]
    commit: str | None
    machine: str
    seed: int
    device: str
    processor: str
    precision: dict[str, str]
    threads: int | None
    processes: int


@dataclass(kw_only=True)
class CorpusRecord:
    """corpus.json: the corpus that a run is trained on.

    Attributes:
        location: folder or URL of its shards.
        beside: that folder relative to the run's folder; None for a URL.
        digest: digest of source, chunker and settings.
        fitted: state that its chunker learned from it.
        frequent: frequent chunks, used as prompts.
        form: common format of its documents, if they are pictures or sound; empty for text.
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
    """Result of a simple model: bits of the held-out data, in total, per byte and per Unicode character."""

    name: str
    bits: float
    bits_per_byte: float
    bits_per_char: float


@dataclass
class ClosedSet:
    """Bits per token of some windows, by the IEM softmax over a closed set of chunks and by the decoder.

    Attributes:
        bits_per_token: by the softmax over all candidates.
        decoder_bits_per_token: by the decoder, on the same chunks.
        candidates: size of the closed set.
        calibrated: the loss was corrected for candidate sampling, so the softmax should be a likelihood; without a
            correction the result measures how far it is from one.
    """

    bits_per_token: float
    decoder_bits_per_token: float
    candidates: int
    chunks: int
    tokens: int
    calibrated: bool


@dataclass
class Part:
    """A subset of chunks or decisions: `bits` for `decisions` (tokens and ends) in `chunks` with `tokens`.

    `bits_per_token` is None if there is no token. At a position, a decision is the token there or the end of the chunk.
    """

    of: str
    chunks: int
    tokens: int
    bits: float
    bits_per_token: float | None


@dataclass
class Breakdown:
    """Bits of a split in several partitions, each of which adds up to the total.

    Attributes:
        by_position: of the decoder's decisions; for a mixture, these add up to the bits of its decoder alone.
        by_length: of whole chunks, by length.
        by_frequency: of whole chunks, by count in train.
        decoder_by_frequency: for a mixture, by its decoder alone.
        known_by_frequency: for a mixture, by its softmax alone, over the known chunks only.
    """

    by_position: list[Part]
    by_length: list[Part]
    by_frequency: list[Part]
    decoder_by_frequency: list[Part] = field(default_factory=list)
    known_by_frequency: list[Part] = field(default_factory=list)

    def mixture_rows(self) -> list[tuple[str, ...]]:
        """Return a table of bits per token by frequency: of all parts, which a memory adds to, and of each of a mixture's.

        See `MIXTURE_COLUMNS`.
        """
        tables = (self.by_frequency, self.decoder_by_frequency, self.known_by_frequency)
        columns = [{part.of: part.bits_per_token for part in table} for table in tables]
        return [
            (part.of, f"{part.chunks:,}", *(_format_bits(each.get(part.of)) for each in columns))
            for part in (self.by_frequency if self.decoder_by_frequency else [])
        ]


MIXTURE_COLUMNS = ("times in train", "chunks", "all parts, bits/token", "decoder alone", "known chunks alone")


@dataclass
class MixtureParts:
    """Results of the two parts of a mixture on the same chunks, and their weights.

    Attributes:
        known: number of known chunks, |S|.
        unknown_share: share of the scored chunks that are not known.
        gate: mean of g over the scored chunks.
        decoder_bits_per_token: the decoder alone, on all chunks.
        known_bits_per_token: the softmax over the known chunks alone, q, on the known chunks among the scored ones;
            None if there are none.
        known_decoder_bits_per_token: the decoder alone on the same chunks, for comparison.
        known_flops_per_token: FLOPs of scoring all known chunks, for each chunk that is known, divided by all tokens.
    """

    known: int
    unknown_share: float
    gate: float
    decoder_bits_per_token: float
    known_bits_per_token: float | None
    known_decoder_bits_per_token: float | None
    known_flops_per_token: float

    def __str__(self) -> str:
        """Return a sentence for people."""
        return (
            f"{self.known:,} known chunks need {_format_bits(self.known_bits_per_token)} bits/token by "
            f"the vocabulary alone, {_format_bits(self.known_decoder_bits_per_token)} by the decoder alone. "
            f"The decoder alone needs {_format_bits(self.decoder_bits_per_token)} on all chunks. {self.unknown_share:.2%} "
            f"of the chunks are unknown. The mean gate is {self.gate:.3f}. The products with known chunks cost "
            f"{self.known_flops_per_token / 1e6:.3g} MFLOP per token"
        )


def _format_bits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


@dataclass
class RememberedParts:
    """Results of a memory beside those of the model alone, on the same chunks.

    Attributes:
        bits_without: total bits of the model alone.
        weights: mean weight of each part over the scored chunks, from the gate, before it is seen.
        shares: mean probability that each part produced the scored chunk.
    """

    bits_without: float
    weights: dict[str, float]
    shares: dict[str, float]

    def __str__(self) -> str:
        """Return a phrase for people: the shares of the parts."""
        return ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.shares.items())


def format_number(value: float) -> str:
    """Return a number with four digits, or with all before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:,.4g}"


@dataclass
class HeadlineMetric:
    """A metric's value, its unit, and the unit it is averaged over."""

    value: float
    unit: Literal["bits/char", "bits/dim"]
    over: Literal["characters", "values"]


@dataclass(kw_only=True)
class Evaluation:
    """evaluation.json: the result of an evaluation.

    Attributes:
        split: the split or file that was scored.
        stage, step, checkpoint: phase, step and digest of the checkpoint.
        fallback: why it was used although it is not the best, see `pipeline.run.checkpoints.Checkpoint`; None if nothing was
            wrong.
        bits: total of all tokens and ends of chunks.
        tokens: number of source tokens.
        characters: characters of the original; for pictures and sound, their values.
        bytes: bytes of the original.
        text: digest of the original, independent of the order of documents; None for a model of another package.
        word_perplexity: 2 to the power of the bits for a word of a text, see `pipeline.run.opened.count_words`; None for
            pictures and sound, and where white space does not divide the text into words.
        bits_per_dim: for pictures and sound, bits per value: a token, so a channel of a pixel, a µ-law code or a byte
            of pcm16.
        standard_error: standard error of bits_per_char over documents; None if there is one document.
        context: chunks of a window.
        stride: number of chunks that each window newly scores.
        seconds: time of scoring.
        precision: fp32 or bf16, in which the model was computed.
        processor: model of CPU or GPU that computed it.
        likelihood: for a run with a mixture, whether the bits are the mixture's or its decoder's alone; else None.
        parts: results of the mixture's parts; else None.
        memory: number of chunks of a document that are remembered; 0: the bits are of the model alone.
        memory_parts: what remembers, see `evaluate.parts`.
        remembered: results of a memory's parts; else None.
        iem: the IEM score as a likelihood over a closed set of chunks, if the run was trained with that loss.
        breakdown: bits by position in a chunk, by its length, and by its count in the train split.
        baselines: baselines on the same bytes.
        not_beaten: names of the baselines that need no more bits.
        options: the options of the section `evaluate`, as requested; empty for a model of another package.
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
    word_perplexity: float | None = None
    bits_per_dim: float | None
    standard_error: float | None = None
    context: int
    stride: int
    seconds: float
    precision: Literal["fp32", "bf16"]
    processor: str
    likelihood: Literal["mixture", "decoder"] | None = None
    parts: MixtureParts | None = None
    memory: int = 0
    memory_parts: list[str] = field(default_factory=list)
    remembered: RememberedParts | None = None
    iem: ClosedSet | None = None
    breakdown: Breakdown | None = None
    baselines: list[Baseline]
    not_beaten: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> HeadlineMetric:
        """The main metric: bits/dim for pictures and sound, else bits/char."""
        if self.bits_per_dim is not None:
            return HeadlineMetric(self.bits_per_dim, "bits/dim", "values")
        return HeadlineMetric(self.bits_per_char, "bits/char", "characters")

    @property
    def bits_alone(self) -> float:
        """The total bits of the model alone, without memory."""
        return self.bits if self.remembered is None else self.remembered.bits_without

    @property
    def alone(self) -> HeadlineMetric:
        """The main metric of the model alone, without memory."""
        return replace(self.headline, value=self.headline.value * self.bits_alone / self.bits if self.bits else 0.0)

    @property
    def word_perplexity_alone(self) -> float | None:
        """The perplexity of words of the model alone, without memory; None if it is beyond what words have."""
        if self.word_perplexity is None or self.remembered is None or not self.bits:
            return self.word_perplexity
        bits = math.log2(self.word_perplexity) * self.bits_alone / self.bits
        return 2**bits if bits < MOST_WORD_BITS else None

    @property
    def perplexity_note(self) -> str:
        """A phrase with the perplexity of words, also of the model alone if there is a memory; empty where there is none."""
        if self.word_perplexity is None:
            return ""
        alone = ""
        if self.remembered is not None:
            by_model = self.word_perplexity_alone
            alone = f", {'–' if by_model is None else format_number(by_model)} by the model alone"
        return f"perplexity of words {format_number(self.word_perplexity)}{alone}"

    @property
    def likelihood_note(self) -> str:
        """A sentence on which part of a mixture the bits are of, with results of its parts; empty for other runs."""
        if self.likelihood == "decoder":
            return "These bits are of the decoder alone (evaluate.likelihood=decoder), not of the run's mixture."
        return f"A mixture. {self.parts}." if self.parts is not None else ""

    @property
    def decoder_metric(self) -> float | None:
        """The metric of a mixture's decoder alone, in the unit of `headline`; None without a mixture."""
        return None if self.parts is None else self.parts.decoder_bits_per_token * self.tokens / self.characters


@dataclass
class Sample:
    """A prompt and its continuation.

    Attributes:
        prompt: the prompt as readable text.
        text: its continuation as readable text; for pictures, the file in which they are drawn.
        hex: the exact bytes of both; None for pictures.
        parts: share of its chunks by each part of the likelihood, see `NextChunk.parts`; None for a decoder alone.
        characters_per_second: speed over all continuations of the prompt, for sound in values; None for pictures.
        unit: what the speed counts, characters or values.
    """

    prompt: str
    text: str
    hex: str | None = None
    parts: dict[str, float] | None = None
    characters_per_second: float | None = field(default=None, compare=False)
    unit: str = "characters"


@dataclass
class KeptSample(Sample):
    """An entry of samples.json: a sample with its checkpoint's digest, and why that was used if it is not the best."""

    checkpoint: str | None = None
    fallback: str | None = None


def describe_speed(samples: Sequence[Sample]) -> str:
    """Describe the speed of sampling, and the share of chunks made without the decoder; empty for pictures."""
    speeds = [item.characters_per_second for item in samples if item.characters_per_second is not None]
    shares = [item.parts for item in samples if item.parts is not None]
    parts = "".join(
        f"{'; chunks' if not number else ','} {name} {100 * fmean(share.get(name, 0.0) for share in shares):.1f} %"
        for number, name in enumerate(shares[0] if shares else ())
    )
    return f"{fmean(speeds):,.0f} {samples[0].unit}/s{parts}" if speeds else ""
