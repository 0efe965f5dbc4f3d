"""Loss of a chunk when the chunks before it are shuffled, by its distance from them.

After Khandelwal et al. 2018, and Subramanian et al. 2020, section 5.2. The first half of a window is shuffled. Every
chunk of the second half is scored after it and after the true one. Only whole windows are used, and all systems that
cut the corpus alike get the same ones.

Legend: B windows, T chunks of a window, N chunks of its second half.
"""

from dataclasses import replace

import torch
from torch import Tensor

from haed.base import TokenBatch
from pipeline.experiments.measures import Measured
from pipeline.run.opened import Run
from pipeline.run.windows import DocumentWindows, ScoredWindows, require_subset, split_windows

WINDOWS, NEAR, FAR = 48, 4, 32


def measure(run: Run) -> Measured:
    """Measure the additional bits per chunk near the shuffled chunks, far from them, their ratio, and by distance.

    Raises:
        ValueError: the valid split has no whole window.
    """
    windows = require_subset(run.folder.open_corpus(), run.options.batch.context, WINDOWS, whole=True)
    more = increase(run, windows, shuffled(windows)).mean(0)
    near, far = float(more[:NEAR].mean()), float(more[FAR:].mean()) if len(more) > FAR else None
    figures = {f"bits more, 1 to {NEAR} chunks away": near}
    if far is not None:
        figures[f"bits more, beyond {FAR} chunks"] = far
        if near > 0:
            figures["far of near"] = abs(far) / near
    notes = (
        [] if near > 0 else ["far of near is not told where the order of the words just before counts for nothing yet"]
    )
    axes = "chunks from the shuffled ones", "bits a chunk more"
    return Measured(figures, axes, _doubling(more), notes=notes)


def shuffled(windows: TokenBatch) -> TokenBatch:
    """Return the windows with the chunks of their first halves in random order, a different one in each window.

    Document starts stay in place.
    """
    count, half = len(windows), windows.lengths.shape[1] // 2
    order = torch.rand(count, half, generator=torch.Generator().manual_seed(0)).argsort(1)
    rows, tokens, lengths = torch.arange(count)[:, None], windows.tokens.clone(), windows.lengths.clone()
    tokens[:, :half], lengths[:, :half] = tokens[rows, order], lengths[rows, order]
    return replace(windows, tokens=tokens, lengths=lengths)


def increase(run: Run, windows: TokenBatch, other: TokenBatch) -> Tensor:
    """Return the bits (B, N) of each chunk of the second halves in the other windows, minus those in the given ones."""
    return _second(run, other) - _second(run, windows)


@torch.no_grad()
def _second(run: Run, windows: TokenBatch) -> Tensor:
    parts = []
    with run.compute.use_precision():
        for part in split_windows(windows):
            new = part.chunk_mask.clone()
            new[:, : new.shape[1] // 2] = False
            scored = ScoredWindows.from_system(run.likelihood, DocumentWindows(part, new, torch.arange(len(part))))
            parts.append(scored.bits.view(len(part), -1))
    return torch.cat(parts)


def _doubling(more: Tensor) -> list[tuple[float, float]]:
    """Return means over distances 1, 2, 3 to 4, 5 to 8, …, each at the middle of its distances."""
    line, first, end = [], 0, 1
    while first < len(more):
        end = min(end, len(more))
        line.append(((first + 1 + end) / 2, float(more[first:end].mean())))
        first, end = end, 2 * end
    return line
