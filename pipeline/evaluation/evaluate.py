"""Stage `evaluate`: exact bits of a split or of any file, with baselines measured on the same bytes.

Legend: N chunks, K tokens of a chunk.
"""

import hashlib
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from data.corpus import Corpus
from data.filesystem import encode_checked_json, write_json
from data.sources.file_type import HEAD, LEAVE_OUT, check_head, detect_foreign_format
from data.sources.source import as_lf
from data.vocabulary import Occurrences, VocabularyOverflowError, count_distinct_chunks
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.config import Options, max_known_chunks, remembered_chunks, requested_likelihood
from pipeline.evaluation.baselines import HELD_OUT_LIMIT, TRAIN_LIMIT, measure_baselines, not_beaten
from pipeline.run.device import release_memory
from pipeline.run.files import MIXTURE_COLUMNS, Baseline, Breakdown, ClosedSet, Evaluation, Part, read_as, write_or_log
from pipeline.run.metrics import ProgressCounter
from pipeline.run.opened import Run, Score, compute_word_perplexity, count_words
from pipeline.run.run_directory import RunFolder, guard_results
from pipeline.run.sharding import check_split
from pipeline.run.trackers import publish_results
from pipeline.run.windows import ScoredWindows, fixed_subset, split_windows

log = logging.getLogger(__name__)
_FREQUENCIES = (0, 1, 2, 10, 100, 1000, 10_000)
_CLOSED_WINDOWS = 64  # in which scores over a closed set are held against the decoder


@guard_results
def evaluate_run(options: Options, text: Path | None = None) -> Evaluation:
    """Score a split of the run's corpus and write evaluation.json, or score any file as one document.

    Raises:
        FileNotFoundError: there are no such shards or file, or nothing was trained.
        ValueError: there is nothing to score.
    """
    run = Run(RunFolder.from_options(options), options)
    if text is not None:
        piped = str(text) == "-"
        content = sys.stdin.buffer.read() if piped else text.read_bytes()
        name = "standard input" if piped else str(text)
        if not content:
            raise ValueError(f"{name} is empty, so there is nothing to score")
        content = _read_as_source(run, name, content)
        return _score_documents(run, name, [run.split_text(content)], [content], [], None)
    corpus, limits, chunker = run.folder.open_corpus(), options.evaluate, run.chunker
    split, chunks = limits.split, corpus.split_counts(limits.split).chunks
    check_split(chunks, corpus.location, "evaluate.split", split)
    pictures = "height" in corpus.form
    reference = _load_or_measure_baselines(corpus, split) if limits.baselines and not pictures else []
    release_memory()
    # A mixture is scored on the whole split, with the chunks known to training.
    has_iem = options.pretrain.iem_weight and run.phase != "train" and not max_known_chunks(options)
    tally = Tally(chunker.k, Occurrences(corpus, "train", split), not chunker.fixed) if limits.breakdown else None
    log.info("scoring %s chunks of the %s split by %s step %s", f"{chunks:,}", split, run.phase, f"{run.step:,}")
    progress = ProgressCounter("evaluate", chunks, "chunks")
    texts = (corpus.iterate_documents(split), corpus.iterate_originals(split))
    result = _score_documents(run, split, *texts, reference, tally, progress)
    if has_iem and limits.closed_set:
        result.iem = score_closed_set(run, corpus, split)
    release_memory()
    path = run.folder.path / "evaluation.json"
    with suppress(OSError, ValueError):
        if (before := read_as(Evaluation, path)).split != split:
            figure = f"{before.headline.value:.3f} {before.headline.unit} of the {before.split} split"
            log.info("evaluation.json had %s. It is replaced by the %s split's", figure, split)
    if write_or_log(path, encode_checked_json(asdict(result))):
        publish_results(options)
    return result


def _read_as_source(run: Run, name: str, content: bytes) -> bytes:
    """Return the bytes of a file as the run's source would hand them to the model.

    Raises:
        ValueError: the file is not a text, or the model is not of text.
    """
    if run.of_values:
        raise ValueError(
            f"{name}: this run's model is of pictures or sound, and `--text` reads text alone. Score values in Python: "
            "`open_run(RUN).score(values.tobytes())`"
        )
    if foreign := detect_foreign_format(content[:HEAD]):
        raise ValueError(f"{name} is {foreign[0]}, not a text. Unpack it or save it as text")
    if odd := check_head(content[:HEAD], name, name):
        log.info("%s: %s; the bytes are scored as they are", name, odd.removesuffix(f"; {LEAVE_OUT}"))
    return as_lf(content) if run.options.source.newlines == "lf" else content


def _score_documents(
    run: Run,
    split: str,
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    originals: Iterable[bytes],
    reference: list[Baseline],
    tally: "Tally | None",
    progress: ProgressCounter | None = None,
) -> Evaluation:
    began = time.perf_counter()
    limits = run.options.evaluate
    document_bits, tokens = defaultdict[int, float](float), 0  # in the order of documents
    sums, remembered = [], []
    for scored in run.score_documents(documents, run.stride, limits.sequences):
        if tally is not None:
            tally.add_windows(scored)
        if progress is not None:
            progress.add_done(int(scored.part.new.sum()))
        sums.append(scored.sum_parts())
        remembered.append(scored.sum_remembered())
        tokens += int(scored.part.windows.lengths[scored.part.new].sum())
        for document, bits in zip(scored.part.document.tolist(), scored.per_window().tolist(), strict=True):
            document_bits[document] += bits
    seconds = time.perf_counter() - began
    sizes, words, text = [], 0, 0
    for original in originals:
        sizes.append((run.size(original), len(original)))
        words += 0 if run.of_values else count_words(original)
        text += int.from_bytes(hashlib.sha256(original).digest())
    score = Score(
        bits=sum(document_bits.values()),
        tokens=tokens,
        characters=sum(size[0] for size in sizes),
        bytes=sum(size[1] for size in sizes),
        parts=run.parts(sums),
        remembered=run.remembered_parts(remembered),
    )
    reference = [replace(each, bits_per_char=each.bits / score.characters) for each in reference]
    memory = 0 if score.remembered is None else remembered_chunks(run.options, run.phase)
    return Evaluation(
        split=split,
        stage=run.phase,
        step=run.step,
        checkpoint=run.digest,
        fallback=run.checkpoint.fallback,
        **vars(score),
        text=f"{text % 2**256:064x}",
        bits_per_token=score.bits_per_token,
        bits_per_char=score.bits_per_char,
        bits_per_byte=score.bits_per_byte,
        word_perplexity=compute_word_perplexity(score.bits, words),
        bits_per_dim=score.bits_per_token if run.of_values else None,
        standard_error=_standard_error(list(document_bits.values()), [size for size, length in sizes if length]),
        context=run.options.batch.context,
        stride=run.stride,
        seconds=seconds,
        precision=run.compute.precision_name,
        processor=run.compute.processor_name,
        likelihood=requested_likelihood(run.options, run.phase),
        memory=memory,
        memory_parts=list(limits.parts) if memory else [],
        breakdown=tally.build_breakdown() if tally is not None else None,
        baselines=reference,
        not_beaten=not_beaten(score.bits_per_char, reference),
        options=asdict(limits),
    )


def _standard_error(bits: list[float], sizes: list[int]) -> float | None:
    """Return the standard error over documents of the ratio Σ bits / Σ sizes."""
    if len(bits) < 2:
        return None
    b, n = np.array(bits), np.array(sizes, float)
    residual = b - b.sum() / n.sum() * n
    return float(np.sqrt((residual**2).sum() * len(b) / (len(b) - 1)) / n.sum())


@dataclass
class _CachedBaselines:
    corpus: str  # its digest
    baselines: list[Baseline]


def _load_or_measure_baselines(corpus: Corpus, split: str) -> list[Baseline]:
    """Load the baselines of a split from the cache beside the shards, or measure them; none of a very long split."""
    cache = corpus.folder / f"baselines-{split}.json"
    try:
        kept = read_as(_CachedBaselines, cache)
        if kept.corpus == corpus.digest:
            return kept.baselines
        log.warning("%s belongs to another corpus. It is made again", cache)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s. It is made again", error)
    if corpus.split_counts(split).tokens > HELD_OUT_LIMIT:
        log.warning("the %s split has more than %d MiB, so no baselines are measured", split, HELD_OUT_LIMIT >> 20)
        return []
    log.info("measuring baselines on the %s split", split)
    train = bytearray()
    for text in corpus.iterate_originals("train"):
        train += text
        if len(train) > TRAIN_LIMIT:  # of more, no baseline makes use
            break
    baselines = measure_baselines(bytes(train[: TRAIN_LIMIT + 1]), b"".join(corpus.iterate_originals(split)))
    try:
        write_json(cache, asdict(_CachedBaselines(corpus.digest, baselines)))
    except OSError as error:
        log.warning("%s could not be stored: %s", cache, error.strerror or error)
    return baselines


class Tally:
    """Accumulator for the bits of scored windows by position in a chunk, chunk length, and count in the train split.

    A mixture scores whole chunks. Its bits by frequency are also given for each part of the mixture. Its bits by
    position are those of the decoder alone.

    Args:
        k: maximum number of tokens in a chunk.
        train: counts of the scored chunks in the train split.
        ends: whether the end of a chunk is decided, which it is not if chunks have a fixed size.
    """

    def __init__(self, k: int, train: Occurrences, ends: bool) -> None:
        self._train, self._decided = train, ends
        self._position, self._length = np.zeros((2, 3, k + 1))
        self._frequency, self._decoder, self._known = np.zeros((3, 3, len(_FREQUENCIES)))

    def add_windows(self, scored: ScoredWindows) -> None:
        """Add the newly scored chunks of these windows."""
        new = scored.part.new
        tokens, lengths = scored.part.windows.tokens[new].numpy(), scored.part.windows.lengths[new].numpy()
        decisions, bits = scored.decisions.numpy(), scored.bits.numpy()
        places, sizes = np.arange(decisions.shape[1]), lengths[:, None]
        real, reached = places < sizes, places < sizes + self._decided
        self._position += np.stack([reached.sum(0), real.sum(0), decisions.sum(0)])
        flat = tokens[real[:, : tokens.shape[1]]].astype(np.uint8)
        seen = np.digitize(self._train.count_occurrences(flat, lengths), _FREQUENCIES) - 1
        _add_to_groups(self._length, lengths, lengths, bits)
        _add_to_groups(self._frequency, seen, lengths, bits)
        if scored.known is not None:
            known = scored.known.numpy()
            hit = np.isfinite(known)
            _add_to_groups(self._decoder, seen, lengths, decisions.sum(1))
            _add_to_groups(self._known, seen[hit], lengths[hit], known[hit])

    def build_breakdown(self) -> Breakdown:
        """Return the breakdown of everything added so far."""
        ends = [*(f"{end - 1:,}" for end in _FREQUENCIES[1:]), ""]
        often = [f"{a:,}" if f"{a:,}" == b else f"{a:,}–{b}" for a, b in zip(_FREQUENCIES, ends, strict=True)]
        sizes = [str(size) for size in range(self._length.shape[1])]
        return Breakdown(
            _build_parts([str(place) for place in range(1, self._position.shape[1] + 1)], self._position),
            _build_parts(sizes, self._length),
            *(_build_parts(often, table) for table in (self._frequency, self._decoder, self._known)),
        )


def _add_to_groups(table: np.ndarray, group: np.ndarray, tokens: np.ndarray, bits: np.ndarray) -> None:
    """Add chunks, their tokens and bits, (N,) each, to the columns of their groups (N,) in a table (3, groups)."""
    for row, weight in zip(table, (np.ones_like(bits), tokens, bits), strict=True):
        row += np.bincount(group, weight, len(row))


def _build_parts(names: list[str], table: np.ndarray) -> list[Part]:
    return [
        Part(name, int(chunks), int(tokens), float(bits), float(bits / tokens) if tokens else None)
        for name, chunks, tokens, bits in zip(names, *table, strict=True)
        if chunks and (tokens or bits)  # no bits at certain ends, nor where the model cannot score
    ]


@torch.no_grad()
def score_closed_set(run: Run, corpus: Corpus, split: str) -> ClosedSet | None:
    """Score some windows of a split by the IEM score as a likelihood, a softmax over *all* distinct chunks, and the decoder.

    The IEM loss is a sampled softmax, so its value is not a likelihood. Over a closed set, exp(s) can be normalised. The
    set holds the distinct chunks of the train split and of the scored split. A calibrated encoder and main model then
    give a likelihood of chunks that is comparable with that of the decoder. The comparison favours the encoder: the
    decoder gives some probability to all other chunks as well.

    The windows are the first of a fixed shuffle. Each is scored from its first chunk on.
    Return None if there are too many distinct chunks, or no window.
    """
    limits = run.options.evaluate
    windows = fixed_subset(corpus, run.options.batch.context, _CLOSED_WINDOWS, split)
    if windows is None:
        return None
    try:
        distinct = count_distinct_chunks(corpus, *dict.fromkeys(["train", split]), limit=limits.closed_set)
    except VocabularyOverflowError as error:
        log.info("%s. The limit is evaluate.closed_set, so the IEM loss is not measured", error)
        return None
    assert isinstance(run.system, HAED), "only chunk models have a phase one"
    nats, decoder = [], []
    with run.compute.use_precision():
        lexicon = ChunkVocabulary(Chunks(torch.from_numpy(distinct.tokens), torch.from_numpy(distinct.lengths)))
        closed = run.system.embed_vocabulary(lexicon)
        for some in split_windows(windows):
            nats.append(run.system.closed_log_prob(some, closed).double().sum())
            decoder.append(run.system.log_likelihood(some).double().sum())
    tokens = int(windows.lengths.sum())
    iem, exact = (-float(torch.stack(each).sum()) / math.log(2) / tokens for each in (nats, decoder))
    calibrated = run.options.iem.correction == "inclusion"
    return ClosedSet(iem, exact, len(closed), int(windows.chunk_mask.sum()), tokens, calibrated)


def format_evaluation(result: Evaluation) -> str:
    """Format the evaluation as text."""
    headline, error = result.headline, result.standard_error
    uncertainty = "" if error is None else f" ± {error:.4f} (standard error over documents)"
    lines = [
        f"{result.split}: {headline.value:.4f} {headline.unit}{uncertainty}",
        f"  {result.bits_per_byte:.4f} bits/byte, {result.bits_per_token:.4f} bits/token, "
        f"{result.characters:,} {headline.over}, {result.bytes:,} bytes; "
        f"{result.stage} step {result.step:,}, context {result.context:,} chunks, stride {result.stride:,}, "
        f"{result.precision} on {result.processor}",
    ]
    if result.remembered is not None:
        alone = f"{result.alone.value:.4f} {result.alone.unit} by the model alone (evaluate.memory=0)"
        alone += {
            "valid": "; the gate of the memory was fitted on a part of this split",
            "train": "; the recalled chunks are those of this split",
        }.get(result.split, "")
        lines.append(
            f"  {alone}. Memory: {', '.join(result.memory_parts)}, {result.memory:,} chunks. Share of the "
            f"text by part: {result.remembered}"
        )
    if result.perplexity_note:
        lines.append(f"  {result.perplexity_note}")
    if result.fallback:
        lines.append(f"  {result.fallback}")
    if result.iem is not None:
        lines.append(
            f"  IEM softmax over all {result.iem.candidates:,} chunks: {result.iem.bits_per_token:.4f} "
            f"bits/token; decoder: {result.iem.decoder_bits_per_token:.4f} "
            f"({result.iem.chunks:,} chunks{'' if result.iem.calibrated else ', uncalibrated'})"
        )
    if result.likelihood_note:
        lines.append(f"  {result.likelihood_note}")
    if result.breakdown is not None:
        lines += _format_breakdown(result.breakdown, result.remembered is not None)
    if result.baselines:
        lines.append(f"baselines on the same bytes ({headline.unit}):")
        for item in sorted(result.baselines, key=lambda item: -item.bits_per_char):
            beaten = "not beaten" if item.name in result.not_beaten else "beaten"
            lines.append(f"  {item.name:<28} {item.bits_per_char:7.4f}  {beaten}")
    return "\n".join(lines)


def _format_breakdown(breakdown: Breakdown, remembers: bool) -> Iterator[str]:
    """Yield lines with the shares of the bits, and for a mixture with the bits per token of its parts."""
    mixed = breakdown.mixture_rows()
    position = "the decoder's bits" if mixed or remembers else "bits"  # a mixture and a memory score whole chunks
    partitions = {
        f"{position} by position": breakdown.by_position,
        "bits by length": breakdown.by_length,
        "bits by frequency": breakdown.by_frequency,
    }
    for name, parts in partitions.items():
        total = max(sum(part.bits for part in parts), 1e-9)
        yield f"  {name}: {', '.join(f'{part.of}: {part.bits / total:.0%}' for part in parts)}"
    if mixed:
        lines = [MIXTURE_COLUMNS, *mixed]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        yield from (f"    {'  '.join(map(str.rjust, line, widths))}" for line in lines)
