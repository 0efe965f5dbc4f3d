"""Exact bits of a split, or of any file, beside yardsticks measured on the same bytes."""

import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data.corpus import Corpus, distinct_chunks
from pipeline.breakdown import Breakdown, Tally
from pipeline.closed_set import ClosedSet, closed_set
from pipeline.device import release_memory
from pipeline.files import write_atomically
from pipeline.inference import Run, Score, characters
from pipeline.options import Options
from pipeline.runs import RunFolder
from pipeline.yardsticks import Yardstick, measure, not_beaten

log = logging.getLogger(__name__)


@dataclass
class Evaluation:
    """Result of an evaluation; the fields of evaluation.json.

    Attributes:
        split: the split, or the file that was scored.
        stage: phase whose checkpoint was used; `step` is its step.
        step: see above.
        checkpoint: digest of that checkpoint.
        bits: of all tokens and ends of chunks.
        tokens: source tokens; likewise `characters` (of pictures: values) and `bytes` of the original.
        characters: see above.
        bytes: see above.
        bits_per_token: with `bits_per_char` and `bits_per_byte` the same bits over each of the three.
        bits_per_char: see above.
        bits_per_byte: see above.
        bits_per_dim: bits per value of a raster, for images, else None.
        standard_error: of bits_per_char over documents (None if there is one).
        context: chunks of a window; `stride` of them are newly scored by each.
        stride: see above.
        seconds: time of scoring.
        iem: the IEM score as a likelihood over a closed set of chunks, if the run was trained with that loss.
        breakdown: bits by position in a chunk, by its length, and by how often the train split has it.
        yardsticks: other models on the same bytes.
        not_beaten: names of the yardsticks that need no more bits.
    """

    split: str
    stage: str
    step: int
    checkpoint: str
    bits: float
    tokens: int
    characters: int
    bytes: int
    bits_per_token: float
    bits_per_char: float
    bits_per_byte: float
    bits_per_dim: float | None
    standard_error: float | None
    context: int
    stride: int
    seconds: float
    iem: ClosedSet | None
    breakdown: Breakdown | None
    yardsticks: list[Yardstick]
    not_beaten: list[str]


def evaluate(options: Options, text: Path | None = None) -> Evaluation:
    """Scores a split of the run's corpus and writes evaluation.json, or scores any file as one document.

    Raises:
        FileNotFoundError: no such run, shards or file.
        ValueError: nothing to score.
    """
    run = Run(RunFolder.find(Path(options.runs_dir) / options.name), options)
    if text is not None:
        content = text.read_bytes()
        if not content:
            raise ValueError(f"{text} is empty: nothing to score")
        return _score(run, str(text), [run.chunker.split(content)], [content], [], None)
    corpus, split = run.folder.corpus(), options.evaluate.split
    if corpus.counts(split).chunks == 0:
        raise ValueError(f"the split {split} of {corpus.folder} is empty; choose another with evaluate.split=")
    reference = _yardsticks(corpus, split) if options.evaluate.yardsticks and not _is_raster(corpus) else []
    release_memory()
    limits = options.evaluate
    iem = bool(options.pretrain.iem_weight and run.phase != "train" and limits.closed_set and limits.closed_windows)
    train = distinct_chunks(corpus, "train") if iem or limits.breakdown else None
    tally = Tally(run.chunker.k, train) if train is not None and limits.breakdown else None
    result = _score(run, split, corpus.documents(split), corpus.originals(split), reference, tally)
    if iem and train is not None:
        result.iem = closed_set(run, corpus, split, train)
    release_memory()
    run.folder.write_json("evaluation.json", asdict(result))
    return result


def _score(
    run: Run,
    split: str,
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    originals: Iterable[bytes],
    reference: list[Yardstick],
    tally: Tally | None,
) -> Evaluation:
    began = time.perf_counter()
    limits = run.options.evaluate
    stride = min(limits.stride or max(1, run.options.batch.context // 2), run.options.batch.context)
    per_document: dict[int, tuple[float, int]] = {}
    for scored in run.score_documents(documents, stride, limits.sequences):
        if tally is not None:
            tally.add(scored)
        lengths = (scored.windows.lengths * scored.windows.new).sum(1)
        rows = zip(scored.windows.document.tolist(), scored.bits.sum(1).tolist(), lengths.tolist(), strict=True)
        for document, bits, tokens in rows:
            before = per_document.get(document, (0.0, 0))
            per_document[document] = (before[0] + bits, before[1] + tokens)
    seconds = time.perf_counter() - began
    raster = run.chunker.name == "pixels"
    count = len if raster else characters  # of a picture, each value is one
    sizes = [(count(original), len(original)) for original in originals]
    score = Score(
        bits=sum(bits for bits, _ in per_document.values()),
        tokens=sum(tokens for _, tokens in per_document.values()),
        characters=sum(size[0] for size in sizes),
        bytes=sum(size[1] for size in sizes),
    )
    return Evaluation(
        split=split,
        stage=run.phase,
        step=run.step,
        checkpoint=run.digest,
        **asdict(score),
        bits_per_token=score.bits_per_token,
        bits_per_char=score.bits_per_char,
        bits_per_byte=score.bits_per_byte,
        bits_per_dim=score.bits_per_token if raster else None,
        standard_error=_standard_error(
            [per_document[i][0] for i in sorted(per_document)], [s[0] for s in sizes if s[1]]
        ),
        context=run.options.batch.context,
        stride=stride,
        seconds=seconds,
        iem=None,
        breakdown=tally.result() if tally is not None else None,
        yardsticks=reference,
        not_beaten=not_beaten(score.bits_per_char, reference),
    )


def _standard_error(bits: list[float], sizes: list[int]) -> float | None:
    """Of the ratio Σ bits / Σ sizes, over documents."""
    if len(bits) < 2:
        return None
    b, n = np.array(bits), np.array(sizes, float)
    residual = b - b.sum() / n.sum() * n
    return float(np.sqrt((residual**2).sum() * len(b) / (len(b) - 1)) / n.sum())


def _is_raster(corpus: Corpus) -> bool:
    return corpus.chunker().name == "pixels"


def _yardsticks(corpus: Corpus, split: str) -> list[Yardstick]:
    """N-gram models fitted on the train split and xz, on the split's bytes; kept beside the shards."""
    cache = corpus.folder / f"yardsticks-{split}.json"
    try:
        return [Yardstick(**item) for item in json.loads(cache.read_text())]
    except (OSError, ValueError, TypeError):
        pass
    log.info("measuring yardsticks on the %s split", split)
    found = measure(_joined(corpus.originals("train")), _joined(corpus.originals(split)))
    try:
        write_atomically(cache, json.dumps([asdict(item) for item in found], indent=2).encode())
    except OSError as error:
        log.warning("yardsticks are not kept: %s", error)
    return found


def _joined(documents: Iterator[bytes]) -> bytes:
    return b"".join(documents)


def table(result: Evaluation) -> str:
    """What a person wants to know, plainly."""
    unit, whole = ("dim", "values") if result.bits_per_dim is not None else ("char", "characters")
    lines = [
        f"{result.split}: {result.bits_per_char:.4f} bits/{unit}"
        + (
            f" ± {result.standard_error:.4f} (standard error over documents)"
            if result.standard_error is not None
            else ""
        ),
        f"  {result.bits_per_byte:.4f} bits/byte, {result.bits_per_token:.4f} bits/token, "
        f"{result.characters:,} {whole}, {result.bytes:,} bytes; "
        f"{result.stage} step {result.step}, context {result.context} chunks, stride {result.stride}",
    ]
    if result.iem is not None:
        lines.append(
            f"  as a softmax over all {result.iem.candidates:,} chunks: {result.iem.bits_per_token:.4f} bits/token, where the "
            f"decoder needs {result.iem.decoder_bits_per_token:.4f} ({result.iem.chunks:,} chunks"
            f"{'' if result.iem.calibrated else ', uncalibrated'})"
        )
    for name, parts in vars(result.breakdown).items() if result.breakdown is not None else ():
        spent = ", ".join(f"{part.of}: {part.bits / max(result.bits, 1e-9):.0%}" for part in parts)
        lines.append(f"  bits {name.replace('_', ' ')}: {spent}")
    if result.yardsticks:
        lines.append("yardsticks on the same bytes (bits/char):")
        for item in sorted(result.yardsticks, key=lambda item: -item.bits_per_char):
            beaten = "not beaten" if item.name in result.not_beaten else "beaten"
            lines.append(f"  {item.name:<28} {item.bits_per_char:7.4f}  {beaten}")
    return "\n".join(lines)
