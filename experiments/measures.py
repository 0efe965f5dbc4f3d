"""Measures of a finished run beside its bits, one function each. Results are kept in the run's folder.

    python -m experiments.measures NAME RUN [key=value …]

A measure raises ValueError if its split has too few words or no window, or if the model has no scales to compare.

Legend: B windows, T chunks of a window, N scored chunks or candidates, Q queries, W width.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.corpus import Corpus
from data.filesystem import write_json
from data.vocabulary import Occurrences
from experiments import activation_memory, memory_for_tokens
from experiments.catalogue import Measure
from haed.base import TokenBatch, length_mask
from haed.layers.transformer import TransformerBlock
from haed.options import SYSTEMS
from haed.token.base import TokenModel
from pipeline.config import SampleOptions
from pipeline.evaluation import baselines
from pipeline.run.index.queries import display_chunk
from pipeline.run.metrics import read_metrics
from pipeline.run.opened import Run
from pipeline.run.remembered import choose_held_out
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import DocumentWindows, WindowScorer, fixed_subset, split_windows
from pipeline.training.profile import SavedActivations, profile_phase

# Time and memory depend on no seed: they are of one run of a variant.
PER_VARIANT = {"layer", "memory", "profile", "speed"}


def require_subset(
    corpus: Corpus, context: int, windows: int, split: str = "valid", *, whole: bool = False
) -> TokenBatch:
    """Return `fixed_subset`, or raise if it is empty; with `whole`, only the windows that chunks fill completely.

    Raises:
        ValueError: there is no such window.
    """
    subset = fixed_subset(corpus, context, windows, split)
    if subset is None:
        raise ValueError(f"the {split} split is empty, so nothing can be measured")
    if whole and not len(subset := subset[subset.chunk_mask.all(1)]):
        raise ValueError(f"{split} has no window of {context} chunks. Lower batch.context")
    return subset


@dataclass
class Measurement:
    """Metrics of a run, and further results to show.

    Attributes:
        metrics: metrics by name; for those in a claim lower is better. The table shows means over seeds.
        axes: labels of the line's x- and y-axis.
        line: its points.
        examples: rows of cells, below a header row.
        notes: remarks on the results.
        untold: names of metrics that this kind of run has, but that nothing can be said of here.
    """

    metrics: dict[str, float]
    axes: tuple[str, str] = ("", "")
    line: list[tuple[float, float]] = field(default_factory=list)
    examples: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def measurement_path(run: Path, name: str) -> Path:
    """Return the path of a measure's results in a run."""
    return run / "measures" / f"{name}.json"


def measure_profile(run: Run) -> Measurement:
    """Profile a step of the last phase: its time, the decoder's share of it, and the MB saved for the backward pass.

    The linear cost is that of Nawrot et al. 2021, section 3.1, for the systems that have one.
    """
    profile = profile_phase(run.options, run.phase)
    milliseconds = sum(profile.milliseconds.values())
    metrics = {"milliseconds of a step": milliseconds, "MB kept": sum(profile.kept.values()) / 1e6}
    if "decoder" in profile.milliseconds:
        metrics["share of the decoder"] = profile.milliseconds["decoder"] / milliseconds
    if profile.linear_cost is not None:
        metrics["linear cost"] = profile.linear_cost
    return Measurement(metrics)


SPEED_CHUNKS, SPEED_BYTES, TURNS = 60, 300, 3  # of a text, in models of chunks and of tokens; about as long


def measure_speed(run: Run) -> Measurement:
    """Measure the characters per second of sampling a single text with cached state: the best turn after a warm-up."""
    chunks = SPEED_CHUNKS if SYSTEMS[run.options.model.kind].chunks else math.ceil(SPEED_BYTES / run.system.cut.k)
    options, rates = SampleOptions(chunks=chunks, temperature=1.0), []
    for _ in range(1 + TURNS):
        sampled = run.continued(b"", 1, options)
        rates.append(len(sampled.texts[0].decode(errors="replace")) / sampled.seconds)
    return Measurement({"characters/s, sampled": max(rates[1:])})


COPY_WINDOWS = 64


@torch.no_grad()
def measure_copies(run: Run) -> Measurement:
    """Measure the share of symbols that the copy task leaves unknown (Nawrot et al. 2021, appendix A.1).

    Unknown is a symbol that is given at most half of the probability. The third symbols are the copies.
    """
    windows = require_subset(run.folder.open_corpus(), run.options.batch.context, COPY_WINDOWS, whole=True)
    wrong = (run.system.decision_log_likelihood(windows)[..., :3] <= math.log(0.5)).float()
    note = "wrong: given no more than half of the probability, so what is chance is always wrong"
    metrics = {"wrong": float(wrong.mean()), "wrong, of each third": float(wrong[..., 2].mean())}
    return Measurement(metrics, notes=[note])


BAG_WINDOWS, BAG_EXAMPLES, LIKELIEST, SHOWN_CONTEXT = 64, 4, 8, 64


@torch.no_grad()
def measure_bags(run: Run) -> Measurement:
    """Measure a coarse scale's bits of the next k tokens as a bag, as a share of a unigram model of the train split.

    See Subramanian et al. 2020, section 6.2. Examples are contexts, continuations and the likeliest tokens.

    Raises:
        ValueError: the valid split is empty.
    """
    corpus, vocabulary = run.folder.open_corpus(), run.system.cut.vocabulary
    windows = require_subset(corpus, run.options.batch.context, BAG_WINDOWS)
    counts = np.ones(vocabulary)
    for block in corpus.iterate_original_blocks("train"):
        counts += np.bincount(np.frombuffer(block, np.uint8), minlength=vocabulary)
    unigram = torch.from_numpy(counts / counts.sum()).log()
    nats = unigram_nats = 0.0
    with run.compute.use_precision():
        for part in split_windows(windows):
            nats -= float(run.system.decision_log_likelihood(part).sum())
            real = length_mask(part.lengths, part.tokens.shape[2])
            unigram_nats -= float(unigram[part.tokens[real].long()].sum())
        rows = [["context", "what follows", "likeliest, with their probabilities"]]
        some = windows[:BAG_EXAMPLES]
        inputs = run.system.prepare_inputs(some)
        for symbols, tokens in zip(inputs.symbols, some.lengths.sum(1), strict=True):  # type: ignore[attr-defined]
            rows.append(_bag_example(run, symbols[: 1 + int(tokens)]))
    return Measurement({"share of a unigram model's bits": nats / unigram_nats}, examples=rows)


def _bag_example(run: Run, symbols: Tensor) -> list[str]:
    """Return a row with the group in the middle of a window: its context, its tokens, and the likeliest ones."""
    k = min(int(each.split("@")[1]) for each in run.options.model.multiscale.layers.split())  # the finest scale
    at = len(symbols) // 2 // k * k
    shares, tokens = run.system(symbols[None])[0, at].float().softmax(-1).cpu().topk(LIKELIEST)
    context, following = symbols[max(1, at + 1 - SHOWN_CONTEXT) : at + 1], symbols[at + 1 : at + 1 + k]
    likeliest = [
        f"{_display_symbols(run, token[None]).replace(' ', '␣')} {share:.2f}"
        for token, share in zip(tokens, shares.tolist(), strict=True)
    ]
    return [_display_symbols(run, context), _display_symbols(run, following), " · ".join(likeliest)]


def _display_symbols(run: Run, symbols: Tensor) -> str:
    """Format tokens for display, without symbols of document starts."""
    tokens = bytes(token for token in symbols.tolist() if token < run.system.cut.vocabulary)
    return display_chunk(tokens, run.chunker.name)


DISTANCE_WINDOWS, NEAR, FAR = 48, 4, 32


def measure_distance(run: Run) -> Measurement:
    """Measure the loss of chunks when the chunks before them are shuffled, near, far, and by distance.

    After Khandelwal et al. 2018, and Subramanian et al. 2020, section 5.2. The first half of a window is shuffled. Every
    chunk of the second half is scored after it, after the true one, and after none. Only whole windows are used, and all
    systems that cut the corpus alike get the same ones. What the order of far chunks is worth is only told of a model
    that gains from far chunks at all, by twice the standard error over windows.

    Raises:
        ValueError: the valid split has no whole window.
    """
    windows = require_subset(run.folder.open_corpus(), run.options.batch.context, DISTANCE_WINDOWS, whole=True)
    half = windows.lengths.shape[1] // 2
    true = score_places(run, windows, half)
    added = (score_places(run, shuffle_first_half(windows), half) - true).mean(0)
    near, name = float(added[:NEAR].mean()), "far of near, where far context helps"
    metrics, notes = {f"bits more, 1 to {NEAR} chunks away": near}, []
    if len(added) > FAR:
        gains = (score_places(run, cut_first_half(windows), 0) - true)[:, FAR:].mean(1)  # of each window
        gain, error = float(gains.mean()), float(gains.std() / math.sqrt(len(gains)))
        far = float(added[FAR:].mean())
        metrics |= {f"bits more, beyond {FAR} chunks": far, f"bits less by context beyond {FAR} chunks": gain}
        if near > 0 and gain > 2 * error:
            metrics[name] = abs(far) / near
        else:
            notes = [
                f"{name} is not told of a model that does not gain from chunks beyond {FAR}, or loses nothing when the "
                "words just before are shuffled"
            ]
    axes = "chunks from the shuffled ones", "bits a chunk more"
    return Measurement(metrics, axes, average_doubling(added), notes=notes, untold=[name] * bool(notes))


def shuffle_first_half(windows: TokenBatch) -> TokenBatch:
    """Return the windows with the chunks of their first halves in random order, a different one in each window.

    Document starts stay in place.
    """
    count, half = len(windows), windows.lengths.shape[1] // 2
    order = torch.rand(count, half, generator=torch.Generator().manual_seed(0)).argsort(1)
    rows, tokens, lengths = torch.arange(count)[:, None], windows.tokens.clone(), windows.lengths.clone()
    tokens[:, :half], lengths[:, :half] = tokens[rows, order], lengths[rows, order]
    return replace(windows, tokens=tokens, lengths=lengths)


def cut_first_half(windows: TokenBatch) -> TokenBatch:
    """Return the second halves of windows, each as if it began a document."""
    half = windows.lengths.shape[1] // 2
    return TokenBatch.from_chunks(windows.tokens[:, half:], windows.lengths[:, half:])


@torch.no_grad()
def score_places(run: Run, windows: TokenBatch, first: int) -> Tensor:
    """Return the bits (B, T − first) of the chunks of whole windows from a place on, each given those before it."""
    bits = []
    with run.compute.use_precision():
        for part in split_windows(windows):
            mask = part.chunk_mask.clone()
            mask[:, :first] = False
            bits.append(_score_chunks(run, part, mask).view(len(part), -1))
    return torch.cat(bits)


def _score_chunks(run: Run, windows: TokenBatch, mask: Tensor) -> Tensor:
    """Return the bits (N,) of the chunks of windows where the mask (B, T) is set."""
    each = DocumentWindows(windows, mask, torch.arange(len(windows)))
    return WindowScorer(run.likelihood, remembers=False).score_windows(each).bits


def average_doubling(values: Tensor) -> list[tuple[float, float]]:
    """Return means over distances 1, 2, 3 to 4, 5 to 8, …, each at the middle of its distances."""
    line, first, end = [], 0, 1
    while first < len(values):
        end = min(end, len(values))
        line.append(((first + 1 + end) / 2, float(values[first:end].mean())))
        first, end = end, 2 * end
    return line


FREQUENCY_CHUNKS, BINS = 16_384, 10


@dataclass
class CountedChunks:
    """Scored chunks, their counts (N,) in the train split, and their bits (N,)."""

    chunks: list[bytes]
    counts: np.ndarray
    bits: np.ndarray


def measure_frequency(run: Run) -> Measurement:
    """Measure the bits per byte of chunks in ten bins, from the rarest in training to the most frequent.

    After Baevski & Auli 2019, and Subramanian et al. 2020, appendix 6.1. The scored chunks are sorted by their counts in
    the train split, so bins have equal mass. Equal chunks are adjacent, and a frequent one may fill a bin.

    Raises:
        ValueError: the valid split is empty.
    """
    scored = count_chunks(run)
    rates, table = [], [["bin", "in training", "such as", "bits a byte"]]
    for number, rows in enumerate(divide_bins(scored), 1):
        rates.append(float(scored.bits[rows].sum() / sum(len(scored.chunks[row]) for row in rows)))
        counts = scored.counts[rows]
        names = [display_chunk(scored.chunks[row], run.chunker.name).strip() or "␣" for row in rows]
        examples = " · ".join(list(dict.fromkeys(names[:: max(1, len(names) // 12)]))[:6])
        table.append([str(number), f"{counts.min():,} to {counts.max():,}", examples, f"{rates[-1]:.3f}"])
    metrics = {
        "bits a byte, rarest": rates[0],
        "bits a byte, most frequent": rates[-1],
        "rarest less most frequent": rates[0] - rates[-1],
    }
    line = [(float(number), rate) for number, rate in enumerate(rates, 1)]
    return Measurement(metrics, ("tenths of the chunks, from the rarest", "bits a byte"), line, table)


@torch.no_grad()
def count_chunks(run: Run) -> CountedChunks:
    """Count and score a fixed subset of valid."""
    corpus, context = run.folder.open_corpus(), run.options.batch.context
    windows = require_subset(corpus, context, -(-FREQUENCY_CHUNKS // context))
    train, chunks, counts, bits = Occurrences(corpus, "train", "valid"), list[bytes](), [], []
    with run.compute.use_precision():
        for part in split_windows(windows):
            mask = part.chunk_mask
            bits.append(_score_chunks(run, part, mask).numpy())
            tokens, lengths = part.tokens[mask].numpy().astype(np.uint8), part.lengths[mask].numpy()
            joined = tokens[np.arange(tokens.shape[1]) < lengths[:, None]]
            counts.append(train.count_occurrences(joined, lengths.astype(np.uint8)))
            chunks += [row[:length].tobytes() for row, length in zip(tokens, lengths, strict=True)]
    return CountedChunks(chunks, np.concatenate(counts), np.concatenate(bits))


def divide_bins(scored: CountedChunks) -> list[list[int]]:
    """Return the chunk indices of each bin, the rarest first. Bin sizes differ by at most one."""
    order = sorted(range(len(scored.chunks)), key=lambda row: (scored.counts[row], scored.chunks[row]))
    return [part.tolist() for part in np.array_split(order, BINS)]


def measure_memory(run: Run) -> Measurement:
    """Measure the MB saved for the backward pass and compare the computed MB, by scale, and by part and kind.

    See Subramanian et al. 2020, appendix, Table 8.

    Raises:
        ValueError: there is nothing to train on.
    """
    options, system = run.options, run.system
    windows = require_subset(run.folder.open_corpus(), options.batch.context, options.batch.sequences, "train")
    measured, computed = activation_memory.measure_saved_bytes(system, windows), None
    if system.device.type == "cpu":
        sequences, length = system.prepare_inputs(windows).symbols.shape  # type: ignore[attr-defined]
        computed = activation_memory.compute_saved_bytes(options.model, system.cut.vocabulary, sequences, length)
    metrics = {"MB measured": sum(measured.values()) / 1e6}
    if computed is not None and run.compute.autocast is None:
        metrics["MB computed"] = sum(computed.values()) / 1e6
        metrics["share that the computed is off"] = abs(metrics["MB computed"] / metrics["MB measured"] - 1)
    line = activation_memory.megabytes_per_layer(system, measured)
    metrics |= {f"a layer at {scale:g}x, of one at 1x": size / line[0][1] for scale, size in line[1:]}
    rows = activation_memory.format_table(measured, computed)
    return Measurement(metrics, ("scale", "MB a layer"), line, rows)


LENGTHS = (256, 512, 1024, 2048, 4096)  # tokens


def measure_layer(run: Run) -> Measurement:
    """Measure a layer of the coarsest scale alone on a batch: the MB that it saves, and its forward time, by length.

    See Subramanian et al. 2020, Figure 2. A length is in tokens, of which a layer at 4x sees a fourth.

    Raises:
        ValueError: the model has no scales.
    """
    levels = {
        int(name.removeprefix("scale_")): module for name, module in run.system.named_children() if "scale_" in name
    }
    if not levels:
        raise ValueError(f"model.kind={run.system.kind} has no scales, so none of its layers is measured")
    scale, level = max(levels.items())
    block = next(each for each in level.modules() if isinstance(each, TransformerBlock))
    rows, line = [["tokens", "MB", "milliseconds"]], []
    for length in LENGTHS:
        shape = run.options.batch.sequences, length // scale, run.options.model.token.width
        vectors = torch.randn(shape, device=run.system.device)
        with run.compute.use_precision(), (saved := SavedActivations(block)):
            block.train()(vectors.requires_grad_())
        block.eval()
        seconds = []
        for _ in range(1 + TURNS):
            began = time.perf_counter()
            with run.compute.use_precision(), torch.no_grad():
                block(vectors)
            if vectors.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - began)
        milliseconds = 1000 * min(seconds[1:])
        line.append((float(length), saved.total_bytes / 1e6))
        rows.append([f"{length:,}", f"{line[-1][1]:.3f}", f"{milliseconds:.3f}"])
    metrics = {f"MB at {length:,} tokens": line[-1][1], f"milliseconds at {length:,} tokens": milliseconds}
    return Measurement(metrics, ("tokens", "MB that a layer saves"), line, rows)


QUERIES, CANDIDATES, NEAREST, PASSAGE_EXAMPLES, PASSAGE_LETTERS = 48, 512, 3, 2, 280


def measure_passages(run: Run) -> Measurement:
    """Measure the topic distance of nearest passages relative to random ones, by scale, with examples.

    See Subramanian et al. 2020, Table 6. A passage is a window. At each scale it is the mean of the outputs of the
    scale's last layer, centred by subtracting the mean over all candidates, and compared by cosine similarity. Topics
    agree by the cosine of the passages' tf-idf vectors, which do not depend on the model.

    Raises:
        ValueError: a split has no whole window, or the model no scales.
    """
    corpus, context = run.folder.open_corpus(), run.options.batch.context
    queries, candidates = (
        require_subset(corpus, context, count, split, whole=True)
        for count, split in ((QUERIES, "valid"), (CANDIDATES, "train"))
    )
    query_vectors, candidate_vectors = passage_vectors(run, queries), passage_vectors(run, candidates)
    texts, others = _display_windows(run, queries), _display_windows(run, candidates)
    agreement = topic_agreement(texts, others)
    metrics, rows = {}, [["scale", "passage", "nearest", "agreement of topics"]]
    for scale in sorted(query_vectors):
        nearest = nearest_passages(query_vectors[scale], candidate_vectors[scale])
        distance = (1 - agreement.gather(1, nearest)).mean() / (1 - agreement).mean()
        metrics[f"distance of topics at {scale}x, of random"] = float(distance)
        for query in range(min(PASSAGE_EXAMPLES, len(texts))):
            other = int(nearest[query, 0])
            shown = [texts[query][:PASSAGE_LETTERS], others[other][:PASSAGE_LETTERS]]
            rows.append([f"{scale}x", *shown, f"{float(agreement[query, other]):.2f}"])
    note = f"passages of {QUERIES} windows of valid are looked for among {CANDIDATES} of train, {NEAREST} each"
    return Measurement(metrics, examples=rows, notes=[note])


@torch.no_grad()
def passage_vectors(run: Run, windows: TokenBatch) -> dict[int, Tensor]:
    """Return the mean vectors (B, W) of the windows, by scale.

    Raises:
        ValueError: the model has no scales.
    """
    system, parts = run.system, dict[int, list[Tensor]]()
    with run.compute.use_precision():
        for part in split_windows(windows):
            for scale, outputs in system.collect_scale_outputs(part).items():
                outputs = outputs.float().cpu()
                real = torch.arange(outputs.shape[1]) * scale < part.lengths.sum(1)[:, None]  # the others are padding
                parts.setdefault(scale, []).append((outputs * real[..., None]).sum(1) / real.sum(1)[:, None])
    if not parts:
        raise ValueError(f"model.kind={system.kind} has no scales, so its passages cannot be compared")
    return {scale: torch.cat(vectors) for scale, vectors in parts.items()}


def nearest_passages(queries: Tensor, candidates: Tensor) -> Tensor:
    """Return the indices (Q, NEAREST) of the candidates (N, W) nearest to queries (Q, W), the nearest first."""
    mean = candidates.mean(0)
    cosines = F.normalize(queries - mean, dim=1) @ F.normalize(candidates - mean, dim=1).T
    return cosines.topk(min(NEAREST, len(candidates)), 1).indices


def topic_agreement(texts: list[str], others: list[str]) -> Tensor:
    """Return the cosines (Q, N) of the tf-idf vectors of texts and others."""
    bags = [Counter(re.findall(r"\w+", each.lower())) for each in (*texts, *others)]
    documents = Counter(word for bag in bags for word in bag)
    columns = {word: column for column, word in enumerate(documents)}
    weights = torch.zeros(len(bags), len(columns))
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            weights[row, columns[word]] = count * math.log(len(bags) / documents[word])
    weights = F.normalize(weights, dim=1)
    return weights[: len(texts)] @ weights[len(texts) :].T


def _display_windows(run: Run, windows: TokenBatch) -> list[str]:
    masks = length_mask(windows.lengths, windows.tokens.shape[2])
    rows = (bytes(tokens[mask].tolist()) for tokens, mask in zip(windows.tokens, masks, strict=True))
    return [display_chunk(row, run.chunker.name) for row in rows]


PROMPTS, SAMPLES, SAMPLE_WORDS, SAMPLE_BYTES = 32, 3, 64, 320  # bytes: about as many as so many words have
ORDER, GRAMS, SAMPLE_EXAMPLES, SAMPLE_LETTERS = 5, (1, 2, 3, 4), 3, 160


def measure_samples(run: Run) -> Measurement:
    """Measure samples: bits per character under an n-gram model, repeats, seconds per sample, and BLEU.

    See Subramanian et al. 2020, appendix 6.3. Prompts of 64 words are spread over the valid split. Three samples of each
    are drawn at temperature 0.7 from the 10 likeliest tokens (the paper does not state its number). The n-gram model is
    the Witten-Bell byte model that evaluations use as a baseline, fitted on the train split. Repeats are the share of
    word n-grams that occurred before in their sample. BLEU scores the true text with the samples as references. A note
    has the same metrics for the true text.

    Raises:
        ValueError: the valid split is shorter than a prompt and its continuation.
    """
    corpus = run.folder.open_corpus()
    prompts, truths = spread_prompts(b"".join(corpus.iterate_original_blocks("valid")))
    by_chunks = SYSTEMS[run.options.model.kind].chunks
    chunks = SAMPLE_WORDS if by_chunks else math.ceil(SAMPLE_BYTES / run.system.cut.k)
    options = SampleOptions(chunks=chunks, temperature=0.7, top_k=10, top_p=1.0)
    sampled = [run.continued(prompt, SAMPLES, options) for prompt in prompts]
    texts = [[text.decode(errors="replace") for text in each.texts] for each in sampled]
    train = b"".join(corpus.iterate_original_blocks("train"))
    metrics = _score_texts(train, [text for each in texts for text in each])
    of_truth = ", ".join(f"{name} {value:.2f}" for name, value in _score_texts(train, truths).items())
    notes = [f"of the text that samples stand for: {of_truth}"]
    metrics["seconds a sample"] = sum(each.seconds for each in sampled) / (SAMPLES * len(sampled))
    try:
        metrics["BLEU"] = compute_bleu(truths, texts)
    except ImportError:
        notes.append("no BLEU: pip install 'haed[experiments]', and delete measures/samples.json of the runs")
    rows = [["prompt, its end", "sample", "the text"]]
    for prompt, each, truth in list(zip(prompts, texts, truths, strict=True))[:SAMPLE_EXAMPLES]:
        rows.append([prompt.decode(errors="replace")[-SAMPLE_LETTERS:], each[0], truth])
    return Measurement(metrics, examples=rows, notes=notes)


def _score_texts(train: bytes, texts: Sequence[str]) -> dict[str, float]:
    """Return the bits per character under n-grams of `train`, and the texts' mean repeats."""
    (scored, *_) = baselines.measure_baselines(train, "".join(texts).encode(), [ORDER])
    repeats = {f"repeated {n}-grams": sum(share_repeated(each, n) for each in texts) / len(texts) for n in GRAMS}
    return {"bits/char of n-grams": scored.bits_per_char, **repeats}


def spread_prompts(text: bytes) -> tuple[list[bytes], list[str]]:
    """Return evenly spaced prompts of `SAMPLE_WORDS` words, and the words that follow each.

    Raises:
        ValueError: there are too few words.
    """
    words = [match.start() for match in re.finditer(rb"\S+", text)]
    first = len(words) - 2 * SAMPLE_WORDS
    if first <= 0:
        raise ValueError(f"the valid split has {len(words)} words, but samples need {2 * SAMPLE_WORDS + 1}")
    begins = [first * number // PROMPTS for number in range(PROMPTS)]
    parts = [[words[begin + skip] for skip in (0, SAMPLE_WORDS, 2 * SAMPLE_WORDS)] for begin in begins]
    return [text[a:b] for a, b, _ in parts], [text[b:c].decode(errors="replace") for _, b, c in parts]


def share_repeated(text: str, n: int) -> float:
    """Return the share of word n-grams that occurred before in a text."""
    words = text.split()
    grams = [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def compute_bleu(truths: Sequence[str], texts: Sequence[Sequence[str]]) -> float:
    """Return the BLEU of the truths with the sampled texts of each as its references, from 0 to 100.

    Raises:
        ImportError: sacrebleu is not installed.
    """
    import sacrebleu

    return float(sacrebleu.corpus_bleu(list(truths), [list(each) for each in zip(*texts, strict=True)]).score)


def measure_remembered(run: Run) -> Measurement:
    """Measure the bits of the test split by the model alone, and with what a memory of document and train split gives.

    What is fitted is fitted on the valid split. Models of chunks have their own memory, see
    docs/explanation/likelihood.md.

    Raises:
        ValueError: the test split is empty.
    """
    corpus = run.folder.open_corpus()
    if not corpus.split_counts("test").chunks:
        raise ValueError("the test split is empty, so nothing can be measured")
    characters = sum(run.size(original) for original in corpus.iterate_originals("test"))
    notes = []
    if isinstance(run.system, TokenModel):
        recall = memory_for_tokens.recall_tokens(tokens for tokens, _ in corpus.iterate_documents("train"))
        held_out = list(memory_for_tokens.read_documents(run, choose_held_out(corpus)))
        memory, sharpness = memory_for_tokens.fit_memory(recall, held_out)
        test = memory_for_tokens.read_documents(run, corpus.iterate_documents("test"))
        alone, remembering = memory_for_tokens.score_tokens(memory, test)
        notes = [f"{run.options.name}: sharpness of the cache {sharpness:g}"]
    else:
        scored = run.score_documents(corpus.iterate_documents("test"))
        each = [(x.bits if x.without_memory is None else x.without_memory, x.bits) for x in scored]
        alone, remembering = (sum(float(bits.sum()) for bits in column) for column in zip(*each, strict=True))
    return Measurement(memory_for_tokens.remembered_metrics(alone, remembering, characters), notes=notes)


def measure_phase_one(run: Run) -> Measurement:
    """Measure the IEM loss at the end of phase one: the mean of its last tenth, beside the loss of a uniform guess.

    A run without phase one has none. With `iem.duplicates` a guess is among all chunks of the batches, else among the
    distinct ones.
    """
    records = [each for each in read_metrics(run.folder.phase_folder("pretrain") / "metrics.jsonl") if "iem" in each]
    if not records:
        return Measurement({})
    last = records[-math.ceil(len(records) / 10) :]
    options = run.options
    chunks = options.batch.sequences * options.batch.context * (1 + options.iem.extra_batches)
    candidates = chunks if options.iem.duplicates else np.mean([each["candidates"] for each in last])
    loss = float(np.mean([each["iem"] for each in last]))
    return Measurement({"IEM loss, nats": loss, "IEM loss by chance": math.log(candidates)})


MEASURES: dict[Measure, Callable[[Run], Measurement]] = {
    "bags": measure_bags,
    "copies": measure_copies,
    "distance": measure_distance,
    "frequency": measure_frequency,
    "layer": measure_layer,
    "memory": measure_memory,
    "passages": measure_passages,
    "phase one": measure_phase_one,
    "profile": measure_profile,
    "remembered": measure_remembered,
    "samples": measure_samples,
    "speed": measure_speed,
}


def main(name: Measure, run: str, *words: str) -> None:
    """Measure a run and keep the results in its folder."""
    folder = RunFolder.find(run, "")
    options = folder.load_options(list(words), "profile")
    if name != "remembered":  # rows show the model alone, so it is timed alone too
        options.evaluate.memory = 0
    measurement = MEASURES[name](Run(folder, options))
    path = measurement_path(folder.path, name)
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(measurement))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
