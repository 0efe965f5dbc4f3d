"""Sampling speed: characters per second of a single text, with cached state."""

import math

from haed.options import SYSTEMS
from pipeline.config import SampleOptions
from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run

CHUNKS, BYTES, TURNS = 60, 300, 3  # of a text, in models of chunks and of tokens; about as long


def measure(run: Run) -> Measured:
    """Measure `characters/s, sampled`: the best of several turns after a warm-up. Higher is better."""
    own = SYSTEMS[run.options.model.kind].chunks
    how = SampleOptions(chunks=CHUNKS if own else math.ceil(BYTES / run.system.cut.k), temperature=1.0)
    rates = []
    for _ in range(1 + TURNS):
        found = run.continued(b"", 1, how)
        rates.append(len(found.texts[0].decode(errors="replace")) / found.seconds)
    return Measured({"characters/s, sampled": max(rates[1:])})
