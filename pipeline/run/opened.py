r"""A trained run, opened from Python: score a text, sample, ask for neighbours and for what comes next.

from pipeline import open_run
run = open_run("runs/quickstart")
run.score("def f(x):\n").bits_per_char
run.sample("import ")
run.next("import ").chunks[0].text
run.neighbours("def ")
"""

import io
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.chunkers import Chunker
from haed.base import SequenceModel, TokenBatch, check_finite
from haed.chunk.model import HAED
from haed.registry import make_sampler
from haed.sampling import ChunkSampler, Draw, find_likeliest_chunks
from pipeline.config import (
    ConfigError,
    Options,
    SampleOptions,
    check_options,
    max_known_chunks,
    remembered_chunks,
    requested_likelihood,
)
from pipeline.console import escape_control_characters, warn_once
from pipeline.run.checkpoints import Checkpoint, load_weights
from pipeline.run.device import Compute, setup_compute
from pipeline.run.files import MOST_WORD_BITS, MixtureParts, RememberedParts
from pipeline.run.index.probe import Probe
from pipeline.run.index.queries import (
    PIXELS,
    SearchResults,
    Text,
    Texts,
    check_count,
    display_chunk,
    parse_chunk,
    to_bytes,
    to_texts,
)
from pipeline.run.known import embed_known_chunks
from pipeline.run.remembered import load_memory
from pipeline.run.run_directory import RunFolder
from pipeline.run.system import build_system, check_memory, estimate_memory, free_memory
from pipeline.run.windows import ScoredWindows, WindowScorer, cut_documents, pad_chunks
from pipeline.signals import check_abandoned
from pipeline.suggestions import format_command

log = logging.getLogger(__name__)
EMBEDDED_AT_ONCE = 8192  # chunks
MOST_NEXT = 10_000  # chunks that `Run.next` lists
_SHOWN = 40  # bytes of a text


@dataclass
class Score:
    """Exact bits of a text as the chunker cuts it: of its tokens and of the ends of its chunks.

    `parts` are the results of a mixture's parts, `remembered` those of a memory's; or None.
    """

    bits: float
    tokens: int
    characters: int
    bytes: int
    parts: MixtureParts | None = None
    remembered: RememberedParts | None = None

    @property
    def bits_per_token(self) -> float:
        """Bits over source tokens."""
        return self.bits / max(self.tokens, 1)

    @property
    def bits_per_char(self) -> float:
        """Bits over Unicode characters; an invalid byte counts as one."""
        return self.bits / max(self.characters, 1)

    @property
    def bits_per_byte(self) -> float:
        """Bits over bytes of the original."""
        return self.bits / max(self.bytes, 1)


@dataclass
class ScoredChunk:
    """A chunk of a scored text.

    Attributes:
        text, hex: the chunk as readable text, and its exact bytes.
        bits: bits that it costs.
        alone: bits by the model alone; equal to `bits` without a memory.
        parts: probability that each part of the likelihood produced it, see `NextChunk.parts`; None for one part alone.
    """

    text: str
    hex: str
    bits: float
    alone: float
    parts: dict[str, float] | None


@dataclass
class Continuations:
    """Continuations of a prompt.

    Attributes:
        texts: the continuations.
        parts: for each, the share of its chunks by each part of the likelihood, *spelled* by the decoder the last; None for
            a model of tokens or of a decoder alone.
        seconds: time for all of them together.
        characters_per_second: speed over all of them, by the characters of `Run.size`.
    """

    texts: list[bytes]
    parts: list[dict[str, float]] | None
    seconds: float
    characters_per_second: float


@dataclass
class NextChunk:
    """A possible next chunk.

    Attributes:
        text, hex: the chunk as readable text, and its exact bytes.
        probability: probability that it is next, by all parts of the likelihood.
        parts: share of that probability by each part: `known` from the vocabulary, `copied` and `repeated` from
            the prompt, `recalled` from the train split, `spelled` by the decoder.
        count: its count in the train split; None if the chunk is not known.
    """

    text: str
    hex: str
    probability: float
    parts: dict[str, float]
    count: int | None


@dataclass
class NextChunks:
    """The likeliest chunks after a prompt.

    Attributes:
        prompt: the prompt as readable text.
        before: its last whole chunk as readable text; None if it has none.
        opened: the beginning of the next chunk, if the prompt ends inside one; else None.
        gate: probability that each part produces the next chunk, whichever it is; None for a decoder alone.
        chunks: the likeliest chunks, in descending order; all begin with `opened`, and their probabilities are given
            that beginning.
        rest: total probability of all other chunks.
    """

    prompt: str
    before: str | None
    opened: str | None
    gate: dict[str, float] | None
    chunks: list[NextChunk]
    rest: float


class Run:
    """A trained run: its model, chunker and folder.

    Attributes:
        phase, step, digest: phase, step and digest of the checkpoint that was opened.
        system: the system, in evaluation mode.
        chunker: as in training.
        compute: device and precision, the same for all results so that they can be compared.
        of_values: documents are pictures or sound, whose values are counted as the characters of a text are.
    """

    def __init__(self, folder: RunFolder, options: Options | None = None) -> None:
        self.folder, self.options = folder, deepcopy(options) if options else folder.load_options()
        checkpoint = folder.select_checkpoint(self.options.evaluate.stage, load=True)
        self.phase = checkpoint.phase
        folder.check_unchanged(self.options, checkpoint)
        trained = checkpoint.state["options"].get(self.phase, {})  # config.yaml may say otherwise since
        of_phase = getattr(self.options, self.phase)
        of_phase.iem_weight = trained.get("iem_weight", of_phase.iem_weight)
        self._guesses = self.phase == "pretrain" and trained.get("decode_fraction") == 0
        self.step, self.digest = checkpoint.step, checkpoint.digest
        self.compute: Compute = setup_compute(self.options, self.options.evaluate.precision)
        self.chunker: Chunker = folder.load_chunker()
        self.of_values = bool(folder.read_corpus_record().form)
        self.checkpoint = Checkpoint(checkpoint.path, checkpoint.state, checkpoint.fallback)
        self._has_memory = False
        windows = replace(self.options.batch, **self.checkpoint.identity["batch"])  # may be read with others
        as_trained = replace(self.options, batch=windows)
        check_memory(estimate_memory(as_trained, self.chunker), free_memory(self.compute.device))
        self.system: SequenceModel = build_system(as_trained, self.chunker)
        load_weights(self.system, checkpoint)
        self.system.to(self.compute.device).eval()
        self.system.cut = replace(self.system.cut, context=self.options.batch.context)

    @property
    def likelihood(self) -> SequenceModel:
        """The system, with the known chunks of a mixture and its memory, which are loaded at first use."""
        if self._guesses:
            self._guesses = False  # said once
            log.warning(
                "%s was trained without its decoder (pretrain.decode_fraction=0). Whatever the decoder spells "
                "comes from random weights. Run %s first",
                self.folder.path,
                format_command("finetune", self.folder.path),
            )
        options, system, precision = self.options, self.system, self.compute.precision_name
        mixed = requested_likelihood(options, self.phase) == "mixture"
        if mixed and isinstance(system, HAED) and system.known is None:
            with torch.no_grad(), self.compute.use_precision():
                system.known = embed_known_chunks(
                    self.folder, system, max_known_chunks(options), self.checkpoint, precision
                )
        if isinstance(system, HAED) and not self._has_memory and remembered_chunks(options, self.phase):
            with torch.no_grad(), self.compute.use_precision():
                system.memory = load_memory(
                    self.folder, system, options.evaluate, self.checkpoint, precision, self.stride
                )
            self._has_memory = True
        return system

    @property
    def stride(self) -> int:
        """Number of chunks that each window newly scores."""
        context, stride = self.options.batch.context, self.options.evaluate.stride
        if stride is not None and stride > context:
            warn_once(f"evaluate.stride={stride} is more than a window (batch.context={context}). Using {context}")
        return min(stride or max(1, context // 2), context)

    def score(self, text: Text) -> Score:
        """Return the exact bits of one document."""
        document = self._encode_document(text, 'run.score("def f(x):")')
        bits, sums, remembered = 0.0, [], []
        for scored in self.score_documents([self.split_text(document)]):
            bits += float(scored.bits.sum())
            sums.append(scored.sum_parts())
            remembered.append(scored.sum_remembered())
        parts = (self.parts(sums), self.remembered_parts(remembered))
        return Score(bits, len(document), self.size(document), len(document), *parts)

    def score_chunks(self, text: Text) -> list[ScoredChunk]:
        """Return the bits of each chunk of one document, and the parts of the likelihood that they came from."""
        document = self._encode_document(text, 'run.score_chunks("def f(x):")')
        kind, result = self.chunker.name, list[ScoredChunk]()
        for scored in self.score_documents([self.split_text(document)]):
            new = scored.part.new
            alone = scored.bits if scored.without_memory is None else scored.without_memory
            names, shares = scored.part_shares()
            columns = (scored.part.windows.tokens[new], scored.part.windows.lengths[new], scored.bits, alone)
            for row, (tokens, length, bits, model_bits) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
                chunk = bytes(tokens[:length])
                parts = dict(zip(names, shares[row].tolist(), strict=True)) if names else None
                result.append(ScoredChunk(display_chunk(chunk, kind), chunk.hex(), bits, model_bits, parts))
        return result

    def _encode_document(self, text: Text, example: str) -> bytes:
        """Return the bytes of a text; for pictures and sound, a str is refused."""
        if self.of_values and isinstance(text, str) and text:
            raise ValueError(f"this run's model is not of text. Give the values as bytes, not {text[:40]!r}")
        return to_bytes(text, "run.score(values.tobytes())" if self.of_values else example)

    def split_text(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the lengths of the chunks of a document, as `Chunker.split` does.

        Raises:
            ValueError: a token is not among those that the run's chunker promised, so the model does not know it.
        """
        tokens, lengths = self.chunker.split(text)
        self._check_tokens(int(tokens.max(initial=0)))
        return tokens, lengths

    def _check_tokens(self, largest: int) -> None:
        if largest >= (known := self.system.cut.vocabulary):
            raise ValueError(
                f"a token is {largest}, but this run's model knows those below {known} alone. Leave it out"
            )

    def size(self, document: bytes) -> int:
        """Return the divisor of bits: the characters of a text, or the values of a picture or a sound."""
        return len(document) if self.of_values else count_characters(document)

    def parts(self, sums: Sequence[Tensor | None]) -> MixtureParts | None:
        """Return the results of the mixture's parts from the sums of `ScoredWindows.sum_parts`; None for other systems."""
        known_sums = [each for each in sums if each is not None]
        if not known_sums or not isinstance(self.system, HAED) or self.system.known is None:
            return None
        (chunks, tokens, decoder, _, gate), (hits, hit_tokens, own_decoder, known, _) = (
            torch.stack(known_sums).sum(0).tolist()
        )
        size, width = self.system.known.keys.shape
        return MixtureParts(
            known=size,
            unknown_share=1 - hits / chunks,
            gate=gate / chunks,
            decoder_bits_per_token=decoder / tokens,
            known_bits_per_token=known / hit_tokens if hit_tokens else None,
            known_decoder_bits_per_token=own_decoder / hit_tokens if hit_tokens else None,
            known_flops_per_token=2.0 * size * width * hits / tokens,
        )

    def remembered_parts(self, sums: Sequence[Tensor | None]) -> RememberedParts | None:
        """Return the results of a memory's parts from the sums of `ScoredWindows.sum_remembered`; None without a memory."""
        present = [each for each in sums if each is not None]
        if not present or not isinstance(self.system, HAED) or self.system.memory is None:
            return None
        names = self.system.memory.names
        bits, *means = torch.stack(present).sum(0).tolist()
        chunks = sum(means[: len(names)])  # the weights of each chunk sum to one
        weights, shares = (
            {name: value / chunks for name, value in zip(names, part, strict=True)}
            for part in (means[: len(names)], means[len(names) :])
        )
        return RememberedParts(bits, weights, shares)

    def score_documents(
        self, documents: Iterable[tuple[np.ndarray, np.ndarray]], stride: int | None = None, at_once: int = 32
    ) -> Iterator[ScoredWindows]:
        """Score every chunk of documents, given as flat tokens and lengths, exactly and in batches of windows.

        Each window scores `stride` new chunks after their context in it; the first window of a document scores all its
        chunks.
        """
        with torch.no_grad(), self.compute.use_precision():
            scorer = WindowScorer(self.likelihood)
            context = self.options.batch.context
            for part in cut_documents(documents, self.chunker.k, context, stride or self.stride, at_once):
                check_abandoned()
                yield scorer.score_windows(part)

    def sample(self, prompt: Text = "", samples: int = 1, options: SampleOptions | None = None) -> list[bytes]:
        """Return continuations of a prompt, without the prompt; the same seed gives the same ones on one machine."""
        return self.continued(prompt, samples, options).texts

    def continued(self, prompt: Text = "", samples: int = 1, options: SampleOptions | None = None) -> Continuations:
        """Return continuations of a prompt with their share of known chunks and their time.

        Raises:
            ConfigError: an option is out of bounds.
            TypeError: `samples` is no whole number, or `options` are no SampleOptions.
            ValueError: `samples` is less than 1, or the prompt is not a text of this run.
        """
        sampling, samples = _within_bounds(options), check_count("samples", samples)
        system = self.likelihood
        prompt = self._encode_document(prompt, 'run.sample("import ")')
        began = time.perf_counter()
        closed, opened = self._split_prompt(prompt)
        draw = Draw(sampling.temperature, sampling.top_k, sampling.top_p, torch.Generator().manual_seed(sampling.seed))
        written = [bytearray() for _ in range(samples)]
        with torch.no_grad(), self.compute.use_precision():
            sampler = make_sampler(system, closed, samples)
            self._warn_if_cut(prompt, sampler.unread)
            for _ in range(sampling.chunks):
                check_abandoned()
                new = sampler.draw_chunk(draw, opened if len(opened) else None)
                skip, opened = len(opened), opened[:0]
                for text, row, end in zip(written, new.tokens.numpy(), new.lengths.tolist(), strict=True):
                    text += self.chunker.join(row[:end].astype(np.uint8), np.array([end], np.uint8))[skip:]
        means = {name: (number / sampling.chunks).tolist() for name, number in sampler.parts.items()}
        shares = [dict(zip(means, each, strict=True)) for each in zip(*means.values(), strict=True)]
        parts = [_add_spelled(share) for share in shares] or None
        texts, seconds = [bytes(text) for text in written], time.perf_counter() - began
        return Continuations(texts, parts, seconds, sum(map(self.size, texts)) / seconds)

    def next(self, prompt: Text = "", count: int = 10) -> NextChunks:
        """Return the likeliest next chunks after a prompt, with their exact probabilities; see `haed.sampling`.

        Raises:
            ConfigError: the model predicts tokens, not chunks.
            ValueError: the model is of pictures and a prompt is given, or the count is not 1 to 10,000.
        """
        if not 1 <= check_count("count", count) <= MOST_NEXT:
            raise ValueError(f"count {count}: must be 1 to {MOST_NEXT:,}")
        system = self.likelihood
        if not isinstance(system, HAED):
            command = format_command("sample", self.folder.path)
            raise ConfigError(
                f"model.kind={system.kind} predicts tokens, not chunks. Use {command} to continue prompts"
            )
        kind = self.chunker.name
        if prompt and kind == PIXELS:
            raise ValueError(
                "this run's model is of pictures and takes no prompt. Leave it empty for the first chunks of a picture"
            )
        prompt = self._encode_document(prompt, 'run.next("import ")')
        closed, opened = self._split_prompt(prompt)
        with torch.no_grad(), self.compute.use_precision():
            sampler = ChunkSampler(system, closed)
            self._warn_if_cut(prompt, sampler.unread)
            document = sampler.documents[0] if sampler.documents else None
            likeliest = find_likeliest_chunks(system, sampler.prediction, sampler.last, opened, count, document)
        if (returned := len(likeliest.probability)) < count:
            log.warning("%d of %d chunks were found: no other chunk is possible there", returned, count)
        known = None if system.known is None else system.known.lexicon
        counts = [0] * len(likeliest.chunks) if known is None else known.counts_of(likeliest.chunks)[0].tolist()
        columns = (likeliest.chunks.tokens, likeliest.chunks.lengths, likeliest.probability)
        chunks = []
        for row, (tokens, length, probability) in enumerate(zip(*(x.tolist() for x in columns), strict=True)):
            text = bytes(tokens[:length])
            shares = _add_spelled({name: float(share[row]) for name, share in likeliest.parts.items()})
            chunks.append(NextChunk(display_chunk(text, kind), text.hex(), probability, shares, counts[row] or None))
        last = bytes(sampler.last.tokens[0, : int(sampler.last.lengths[0])].tolist())
        return NextChunks(
            prompt=display_chunk(prompt, kind),
            before=display_chunk(last, kind) if last else None,
            opened=display_chunk(bytes(opened.tolist()), kind) if len(opened) else None,
            gate=_add_spelled(likeliest.gate) if likeliest.gate else None,
            chunks=chunks,
            rest=max(0.0, 1 - float(likeliest.probability.sum())),
        )

    def complete(self, beginnings: np.ndarray, chunks: int, options: SampleOptions | None = None) -> np.ndarray:
        """Continue beginnings (n, P·K) of whole chunks of a fixed size by this many chunks: (n, chunks·K).

        All are continued at once.

        Raises:
            ConfigError: the chunks have no fixed size, or an option is out of bounds.
            TypeError: `chunks` or a beginning is no whole number.
            ValueError: `chunks` is less than 1, or the beginnings are not whole chunks of this run's tokens.
        """
        sampling, chunks, k = _within_bounds(options), check_count("chunks", chunks), self.chunker.k
        if not self.chunker.fixed:
            raise ConfigError(f"chunker.kind={self.chunker.name} has chunks of any size. Use run.sample instead")
        beginnings = np.asarray(beginnings)
        if beginnings.size and not np.issubdtype(beginnings.dtype, np.integer):
            raise TypeError(f"beginnings of {beginnings.dtype}: must be whole numbers, the tokens")
        if beginnings.ndim != 2 or beginnings.shape[1] % k:
            raise ValueError(f"beginnings of shape {beginnings.shape}: must be (n, P·{k}), whole chunks of {k} tokens")
        if beginnings.size and not 0 <= beginnings.min() <= beginnings.max() < self.system.cut.vocabulary:
            raise ValueError(f"beginnings: tokens must be 0 to {self.system.cut.vocabulary - 1}")
        if not len(beginnings):
            return np.zeros((0, chunks * k), np.uint8)
        draw = Draw(sampling.temperature, sampling.top_k, sampling.top_p, torch.Generator().manual_seed(sampling.seed))
        tokens = torch.from_numpy(beginnings.astype(np.int64)).unflatten(1, (beginnings.shape[1] // k, k))
        with torch.no_grad(), self.compute.use_precision():
            prompt = TokenBatch.from_chunks(tokens, torch.full(tokens.shape[:2], k))
            sampler = make_sampler(self.likelihood, prompt, len(tokens))
            return torch.cat([sampler.draw_chunk(draw).tokens for _ in range(chunks)], 1).numpy().astype(np.uint8)

    def embed(self, chunks: Texts) -> np.ndarray:
        """Return embeddings (n, E) float32 of one or several chunks of at most K bytes, seen in training or not.

        These are the model's own embeddings. A centred index holds them without their mean: see `Probe.vectors`.

        Args:
            chunks: str or bytes, `run.embed(["return "])`. For pictures, a str is a colour or a place, as in
                `neighbours`.

        Raises:
            TypeError: a chunk is neither a str nor bytes.
            ValueError: a chunk is empty or too long.
        """
        if self.chunker.name == PIXELS:
            several = [chunks] if isinstance(chunks, Text) else chunks
            chunks = [
                parse_chunk(each, self.chunker, self.folder.open_corpus, "train")[0] if isinstance(each, str) else each
                for each in several
            ]
        chunks = to_texts(chunks, 'run.embed(["return "])')
        for chunk in chunks:
            if not 1 <= len(chunk) <= self.chunker.k:
                raise ValueError(f"{chunk!r} has {len(chunk)} bytes. A chunk of this run has 1 to {self.chunker.k}")
            self._check_tokens(max(chunk))
        flat = np.frombuffer(b"".join(chunks), np.uint8)
        return self._embed_window(self._make_window(flat, np.array([len(chunk) for chunk in chunks], np.uint8)))

    def embed_rows(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return embeddings (n, E) float32 of chunks given as tokens (n, K) and lengths (n,), computed in batches."""
        return np.concatenate([vectors for _, vectors in self.embed_batches(tokens, lengths)])

    def embed_batches(self, tokens: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Embed chunks as `embed_rows` does; yield the rows and the embeddings of each batch."""
        for begin in range(0, max(1, len(lengths)), EMBEDDED_AT_ONCE):
            part = slice(begin, begin + EMBEDDED_AT_ONCE)
            rows, ends = (torch.from_numpy(x[part].astype(np.int64))[None] for x in (tokens, lengths))
            yield part, self._embed_window(TokenBatch.from_chunks(rows, ends))

    @torch.no_grad()
    def _embed_window(self, chunks: TokenBatch) -> np.ndarray:
        with self.compute.use_precision():
            return check_finite(self.system.extract_vectors(chunks, "chunks").float().cpu(), "vectors").numpy()

    def _split_prompt(self, prompt: bytes) -> tuple[TokenBatch, Tensor]:
        """Return the window of a prompt's finished chunks, and the tokens (n,) of its open chunk; n is 0 if it has none.

        A prompt ends inside a chunk if a letter after it would belong to its last chunk.
        """
        window = self._make_window(*self.split_text(prompt))
        whole = len(self.chunker.split(prompt + b"a")[1]) - 1 if prompt else 0
        opened = window.tokens[0, whole:].flatten()[: int(window.lengths[0, whole:].sum())]
        return TokenBatch.from_chunks(window.tokens[:, :whole], window.lengths[:, :whole]), opened

    def _make_window(self, tokens: np.ndarray, lengths: np.ndarray) -> TokenBatch:
        """Return one window of all chunks, given as flat tokens and lengths."""
        rows = torch.from_numpy(pad_chunks(tokens, lengths, self.chunker.k))
        return TokenBatch.from_chunks(rows[None], torch.from_numpy(lengths.astype(np.int64))[None])

    def context(
        self, text: Text, layer: int | None = None, scale: int | None = None, seen: int | None = None
    ) -> np.ndarray:
        """Return the main model's state (W,) after a text, as far as its window reaches; see `SequenceModel.extract_vectors`.

        Args:
            text: a text of any length.
            layer: layer of the main model; None is its output.
            scale: scale of a model of several scales; None is its output.
            seen: chunks of the window; None is `batch.context`.

        Raises:
            TypeError: `layer`, `scale` or `seen` is no whole number.
            ValueError: the model has no such layer or scale, or `seen` is less than 1.
        """
        for name, value, least in (("layer", layer, 0), ("scale", scale, 1), ("seen", seen, 1)):
            if value is not None:
                check_count(name, value, least)
        document = self._encode_document(text, 'run.context("for i in ")')
        return self._vector_after(document, "contexts", layer, scale, seen)

    def expected(self, text: Text) -> np.ndarray:
        """Return the predicted vector (E,) after a text in the space of chunk embeddings: ŷ as in the IEM loss.

        Raises:
            ConfigError: the model predicts tokens, not chunks.
        """
        if not isinstance(self.system, HAED):
            raise ConfigError(
                f"model.kind={self.system.kind} predicts tokens, so it expects no chunk. Use run.context instead"
            )
        if not getattr(self.options, self.phase).iem_weight:
            log.warning(
                "%s was trained without the IEM loss, so its predictions may be far from all chunks", self.phase
            )
        return self._vector_after(self._encode_document(text, 'run.expected("for i in ")'), "predictions")

    @torch.no_grad()
    def _vector_after(
        self, text: bytes, space: str, layer: int | None = None, scale: int | None = None, seen: int | None = None
    ) -> np.ndarray:
        """Return a vector for the chunk after a text, which depends on that chunk's place alone.

        So a dummy chunk stands there.
        """
        tokens, lengths = self.split_text(text)
        window = self._make_window(np.append(tokens, 0).astype(np.uint8), np.append(lengths, 1).astype(np.uint8))
        seen = seen or self.options.batch.context
        if len(lengths) >= seen:
            self._warn_if_cut(text, int(lengths[: len(lengths) - seen + 1].sum()))
            window = TokenBatch.from_chunks(window.tokens[:, -seen:], window.lengths[:, -seen:])
        with self.compute.use_precision():
            vectors = self.system.extract_vectors(window, space, layer, scale)
            return check_finite(vectors[-1].float().cpu(), "vectors").numpy()

    def _warn_if_cut(self, text: bytes, unread: int) -> None:
        """Warn that the main model does not read the beginning of a text, and from where it reads it."""
        if unread:
            first = escape_control_characters(display_chunk(text[unread : unread + _SHOWN], self.chunker.name))
            read = f"{len(text):,} bytes. The main model reads the last {len(text) - unread:,}"
            log.warning("the text has %s, from %s … on (batch.context)", read, first)

    @cached_property
    def probe(self) -> Probe:
        """Queries to this checkpoint's indexes, each of which is opened once."""
        return Probe(self.folder, self.digest, lambda phase: self)

    def neighbours(self, *queries: Texts, count: int | None = None) -> SearchResults:
        """Find the nearest chunks of the corpus to each query; see `Probe`, which has more kinds of queries."""
        return self.probe.neighbours(*queries, count=count)


def open_run(run: str | Path, runs_dir: str = "runs") -> Run:
    """Open a trained run by folder, or by name under `runs_dir`: its best checkpoint, else its newest.

    Raises:
        FileNotFoundError: there is no such run, or it has no checkpoint.
    """
    return Run(RunFolder(RunFolder.find(run, runs_dir).path.absolute()))  # for a notebook that changes its folder


def _within_bounds(options: SampleOptions | None) -> SampleOptions:
    """Return sampling options, by default the standard ones; raise ConfigError if one is out of bounds, or TypeError."""
    if not isinstance(options, SampleOptions | None):
        raise TypeError(f"options must be SampleOptions, not {type(options).__name__}. Use SampleOptions(chunks=100)")
    return check_options(Options(sample=options or SampleOptions())).sample


def _add_spelled(shares: dict[str, float]) -> dict[str, float]:
    """Return the shares of the parts that draw whole chunks, with that of the decoder, which spells the rest."""
    return shares | {"spelled": max(0.0, 1 - sum(shares.values()))}


def count_characters(document: bytes) -> int:
    """Return the number of Unicode characters of a document; every invalid byte counts as one."""
    return len(document.decode("utf-8", errors="surrogateescape"))


def count_words(document: bytes) -> int:
    """Return the number of words of a document as WikiText counts them: what is between white space, and line ends.

    The end of a document ends its last line.
    """
    return sum(len(line.split()) + 1 for line in io.BytesIO(document))


def compute_word_perplexity(bits: float, words: int) -> float | None:
    """Return 2 to the power of the bits for a word; None where white space does not divide the text into words."""
    return 2 ** (bits / words) if words and bits / words < MOST_WORD_BITS else None
