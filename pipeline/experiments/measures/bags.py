"""Predictions of a model with one coarse scale for the next k tokens as a bag (Subramanian et al. 2020, section 6.2).

Its bits are compared with those of a unigram model of the train split.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from haed.base import length_mask
from pipeline.experiments.measures import Measured
from pipeline.run.index import display_chunk
from pipeline.run.opened import Run
from pipeline.run.windows import require_subset, split_windows

WINDOWS, SHOWN, LIKELIEST, BEFORE = 64, 4, 8, 64


@torch.no_grad()
def measure(run: Run) -> Measured:
    """Measure the bits as a share of a unigram model's, with example contexts, continuations, and likeliest tokens.

    Raises:
        ValueError: the valid split is empty.
    """
    corpus, vocabulary = run.folder.open_corpus(), run.system.cut.vocabulary
    windows = require_subset(corpus, run.options.batch.context, WINDOWS)
    counts = np.ones(vocabulary)
    for block in corpus.iterate_original_blocks("train"):
        counts += np.bincount(np.frombuffer(block, np.uint8), minlength=vocabulary)
    unigram = torch.from_numpy(counts / counts.sum()).log()
    nats = frequencies = 0.0
    with run.compute.use_precision():
        for part in split_windows(windows):
            nats -= float(run.system.decision_log_likelihood(part).sum())
            real = length_mask(part.lengths, part.tokens.shape[2])
            frequencies -= float(unigram[part.tokens[real].long()].sum())
        rows = [["context", "what follows", "likeliest, with their probabilities"]]
        rows += [_example(run, symbols) for symbols in _symbols(run, windows[:SHOWN])]
    return Measured({"share of a unigram model's bits": nats / frequencies}, examples=rows)


def scale(run: Run) -> int:
    """Return k, the finest scale."""
    return min(int(each.split("@")[1]) for each in run.options.model.multiscale.layers.split())


def _symbols(run: Run, windows: Any) -> Tensor:
    laid: Any = run.system.prepare_inputs(windows)
    return laid.symbols


def _example(run: Run, symbols: Tensor) -> list[str]:
    """Return a row with the group in the middle of a window: its context, its tokens, and the likeliest ones."""
    k = scale(run)
    at = len(symbols) // 2 // k * k
    likely, which = run.system(symbols[None])[0, at].float().softmax(-1).cpu().topk(LIKELIEST)
    found = zip((_shown(run, each[None]) for each in which), likely.tolist(), strict=True)
    before, after = symbols[max(1, at + 1 - BEFORE) : at + 1], symbols[at + 1 : at + 1 + k]
    return [_shown(run, before), _shown(run, after), " · ".join(f"{token} {share:.2f}" for token, share in found)]


def _shown(run: Run, symbols: Tensor) -> str:
    """Format tokens for display, without symbols of document starts."""
    tokens = bytes(token for token in symbols.tolist() if token < run.system.cut.vocabulary)
    return (
        display_chunk(tokens, run.chunker.name).replace(" ", "␣")
        if len(symbols) == 1
        else display_chunk(tokens, run.chunker.name)
    )
