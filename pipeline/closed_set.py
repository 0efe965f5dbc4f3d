"""The IEM score as a likelihood: a softmax over *all* distinct chunks, beside the decoder's exact one of the same chunks.

The loss is a sampled softmax, so it says nothing by itself. Over a closed set, the distinct chunks of the train split and of
the split that is scored, exp(s) can be normalised; a calibrated encoder and main model then give a likelihood of chunks
that can be held against the decoder's. It is in the encoder's favour: the decoder gives some probability to all other chunks
as well.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch

from data.corpus import Corpus, DistinctChunks, distinct_chunks
from haed.chunks import chunk_keys
from haed.iem import log_likelihood
from pipeline.inference import Run
from pipeline.validation import Validation

log = logging.getLogger(__name__)
_AT_ONCE = 1 << 13


@dataclass
class ClosedSet:
    """Bits per token of some windows by both, and how many chunks there were to choose from.

    Attributes:
        bits_per_token: by the softmax over all candidates.
        decoder_bits_per_token: by the decoder, of the same chunks.
        candidates: size of the closed set.
        chunks: number of chunks scored; `tokens` in them.
        tokens: see above.
        calibrated: the loss was corrected so that this ought to be a likelihood; mined negatives and other corrections
            give none by construction, and this is then the measurement of what they give.
    """

    bits_per_token: float
    decoder_bits_per_token: float
    candidates: int
    chunks: int
    tokens: int
    calibrated: bool


@torch.no_grad()
def closed_set(run: Run, corpus: Corpus, split: str, train: DistinctChunks) -> ClosedSet | None:
    """Scores `evaluate.closed_windows` windows of a split both ways; None if there are too many distinct chunks, or no window.

    The windows are the first of a fixed shuffle, each scored from its own first chunk on.
    """
    limits = run.options.evaluate
    windows = Validation.of(corpus, run.options.batch.context, limits.closed_windows, split)
    if windows is None:
        return None
    found = [train] if split == "train" else [train, distinct_chunks(corpus, split)]
    rows = torch.from_numpy(np.concatenate([np.concatenate([x.tokens, x.lengths[:, None]], 1) for x in found]))
    keys, first = np.unique(chunk_keys(rows[:, :-1], rows[:, -1]).numpy(), return_index=True)
    if len(keys) > limits.closed_set:
        log.info("%s distinct chunks are more than evaluate.closed_set: IEM is not measured", f"{len(keys):,}")
        return None
    model, device = run.model, run.compute.device
    nats, decoder = [], []
    with run.compute.precision():
        parts = [model.embed(part[:, :-1].to(device), part[:, -1].to(device)) for part in rows[first].split(_AT_ONCE)]
        candidates, bias = torch.cat([model.key(x.vector) for x in parts]), torch.cat([x.bias for x in parts]).float()
        for batch in windows.batches():
            query = model.query(model.predictions(*batch))
            real = batch[1] > 0
            target = np.searchsorted(keys, chunk_keys(batch[0][real], batch[1][real]).numpy())
            targets = torch.from_numpy(target).to(device)
            nats.append(log_likelihood(query, candidates.to(query.dtype), bias, targets).double().sum())
            decoder.append(model.log_likelihood(*batch).double().sum())
    tokens = int(windows.lengths.sum())
    iem, exact = (-float(torch.stack(each).sum()) / math.log(2) / tokens for each in (nats, decoder))
    calibrated = run.options.iem.correction == "inclusion" and not run.options.iem.mined
    return ClosedSet(iem, exact, len(keys), int((windows.lengths > 0).sum()), tokens, calibrated)
