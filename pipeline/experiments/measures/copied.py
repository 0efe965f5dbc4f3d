"""Share of symbols that the copy task leaves unknown (Nawrot et al. 2021, appendix A.1)."""

import math

import torch

from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run
from pipeline.run.windows import require_subset

_WINDOWS = 64


@torch.no_grad()
def measure(run: Run) -> Measured:
    """Measure `wrong`, the share of symbols given at most half of the probability, also for the third ones alone.

    The third symbols are the copies.
    """
    windows = require_subset(run.folder.open_corpus(), run.options.batch.context, _WINDOWS, whole=True)
    wrong = (run.system.decision_log_likelihood(windows)[..., :3] <= math.log(0.5)).float()
    note = "wrong: given no more than half of the probability, so what is chance is always wrong; for the paper 1 in 26 is right"
    figures = {"wrong": float(wrong.mean()), "wrong, of each third": float(wrong[..., 2].mean())}
    return Measured(figures, notes=[note])
