"""IEM score as a likelihood: a softmax over *all* distinct chunks, beside the exact likelihood of the decoder.

The IEM loss is a sampled softmax, so its value is not a likelihood. Over a closed set, exp(s) can be normalised. The
set holds the distinct chunks of the train split and of the scored split. A calibrated encoder and main model then
give a likelihood of chunks that is comparable with that of the decoder. The comparison favours the encoder: the
decoder gives some probability to all other chunks as well.
"""

import logging
import math

import torch

from data.corpus import Corpus
from data.vocabulary import VocabularyOverflowError, count_distinct_chunks
from haed.chunk.mixture import ChunkVocabulary
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.run.files import ClosedSet
from pipeline.run.opened import Run
from pipeline.run.windows import fixed_subset, split_windows

log = logging.getLogger(__name__)


@torch.no_grad()
def score_closed_set(run: Run, corpus: Corpus, split: str) -> ClosedSet | None:
    """Score `evaluate.closed_windows` windows of a split by the IEM softmax and by the decoder.

    The windows are the first of a fixed shuffle. Each is scored from its first chunk on. Return None if there are too
    many distinct chunks, or no window.
    """
    limits = run.options.evaluate
    windows = fixed_subset(corpus, run.options.batch.context, limits.closed_windows, split)
    if windows is None:
        return None
    try:
        found = count_distinct_chunks(corpus, *dict.fromkeys(["train", split]), limit=limits.closed_set)
    except VocabularyOverflowError as error:
        log.info("%s, which is evaluate.closed_set: IEM is not measured", error)
        return None
    assert isinstance(run.system, HAED), "only chunk models have a phase one"
    nats, decoder = [], []
    with run.compute.use_precision():
        lexicon = ChunkVocabulary(Chunks(torch.from_numpy(found.tokens), torch.from_numpy(found.lengths)))
        closed = run.system.embed_vocabulary(lexicon)
        for some in split_windows(windows):
            rows = lexicon.find_rows(Chunks(some.tokens, some.lengths)[some.chunk_mask])
            nats.append(
                closed.log_softmax(run.system.compute_query(run.system.predict_vectors(some)), rows).double().sum()
            )
            decoder.append(run.system.log_likelihood(some).double().sum())
    tokens = int(windows.lengths.sum())
    iem, exact = (-float(torch.stack(each).sum()) / math.log(2) / tokens for each in (nats, decoder))
    calibrated = run.options.iem.correction == "inclusion"
    return ClosedSet(iem, exact, len(closed), int(windows.chunk_mask.sum()), tokens, calibrated)
