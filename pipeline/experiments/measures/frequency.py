"""Bits of chunks by their frequency in training: ten bins of equally many chunks, from the rarest to the most frequent.

After Baevski & Auli 2019, and Subramanian et al. 2020, appendix 6.1. The scored chunks are sorted by their counts in
the train split, so bins have equal mass. Equal chunks are adjacent, and a frequent one may fill a bin.

Legend: N scored chunks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from data.vocabulary import Occurrences
from pipeline.experiments.measures import Measured
from pipeline.run.index import display_chunk
from pipeline.run.opened import Run
from pipeline.run.windows import DocumentWindows, ScoredWindows, require_subset, split_windows

CHUNKS, BINS = 16_384, 10


@dataclass
class Counted:
    """Scored chunks.

    Attributes:
        chunks: N of them.
        counts: (N,) their counts in the train split.
        bits: (N,) bits of each.
    """

    chunks: list[bytes]
    counts: np.ndarray
    bits: np.ndarray


def measure(run: Run) -> Measured:
    """Measure the bits per byte in the rarest and the most frequent bin, their difference, a line, and a table of bins.

    Raises:
        ValueError: the valid split is empty.
    """
    scored = count(run)
    rates, table = [], [["bin", "in training", "such as", "bits a byte"]]
    for number, bin in enumerate(bins(scored), 1):
        rates.append(float(scored.bits[bin].sum() / sum(len(scored.chunks[at]) for at in bin)))
        often, names = (
            scored.counts[bin],
            [display_chunk(scored.chunks[at], run.chunker.name).strip() or "␣" for at in bin],
        )
        shown = list(dict.fromkeys(names[:: max(1, len(names) // 12)]))[:6]
        table.append(
            [
                str(number),
                f"{often.min():,} to {often.max():,}",
                " · ".join(shown),
                f"{rates[-1]:.3f}",
            ]
        )
    figures = {
        "bits a byte, rarest": rates[0],
        "bits a byte, most frequent": rates[-1],
        "rarest less most frequent": rates[0] - rates[-1],
    }
    line = [(float(number), rate) for number, rate in enumerate(rates, 1)]
    return Measured(figures, ("tenths of the chunks, from the rarest", "bits a byte"), line, table)


@torch.no_grad()
def count(run: Run) -> Counted:
    """Count and score a fixed subset of valid."""
    corpus, context = run.folder.open_corpus(), run.options.batch.context
    windows = require_subset(corpus, context, -(-CHUNKS // context))
    train, chunks, counts, bits = Occurrences(corpus, "train", "valid"), list[bytes](), [], []
    with run.compute.use_precision():
        for part in split_windows(windows):
            real = part.chunk_mask
            bits.append(
                ScoredWindows.from_system(
                    run.likelihood, DocumentWindows(part, real, torch.arange(len(part)))
                ).bits.numpy()
            )
            rows, lengths = part.tokens[real].numpy().astype(np.uint8), part.lengths[real].numpy()
            counts.append(
                train.count_occurrences(rows[np.arange(rows.shape[1]) < lengths[:, None]], lengths.astype(np.uint8))
            )
            chunks += [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
    return Counted(chunks, np.concatenate(counts), np.concatenate(bits))


def bins(scored: Counted) -> list[list[int]]:
    """Return the chunk indices of each bin, the rarest first. Bin sizes differ by at most one."""
    order = sorted(range(len(scored.chunks)), key=lambda at: (scored.counts[at], scored.chunks[at]))
    return [part.tolist() for part in np.array_split(order, BINS)]
