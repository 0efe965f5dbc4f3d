"""Nearest passages by the vectors of a model at each scale, and whether they share a topic.

Subramanian et al. 2020, Table 6. A passage is a window. At each scale it is the mean of the outputs of the scale's last
layer, centred by subtracting the mean over all candidates, and compared by cosine similarity. Topics agree by the
cosine of the passages' tf-idf vectors, which do not depend on the model.

Legend: Q queries, of valid, N candidates, of train, W width.
"""

import math
import re
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from haed.base import TokenBatch, length_mask
from pipeline.experiments.measures import Measured
from pipeline.run.index import display_chunk
from pipeline.run.opened import Run
from pipeline.run.windows import require_subset, split_windows

QUERIES, CANDIDATES, NEAREST = 48, 512, 3
_SHOWN, _LETTERS = 2, 280


def measure(run: Run) -> Measured:
    """Measure the topic distance of nearest passages relative to random ones, by scale, with examples.

    Raises:
        ValueError: a split has no whole window, or the model no scales.
    """
    corpus, context = run.folder.open_corpus(), run.options.batch.context
    queries, candidates = (
        require_subset(corpus, context, count, split, whole=True)
        for count, split in ((QUERIES, "valid"), (CANDIDATES, "train"))
    )
    asked, known = vectors(run, queries), vectors(run, candidates)
    texts, others = _texts(run, queries), _texts(run, candidates)
    agreement = topics(texts, others)
    figures, rows = {}, [["scale", "passage", "nearest", "agreement of topics"]]
    for scale in sorted(asked):
        nearest = near(asked[scale], known[scale])
        own = agreement.gather(1, nearest)
        figures[f"distance of topics at {scale}x, of random"] = float((1 - own).mean() / (1 - agreement).mean())
        for query in range(min(_SHOWN, len(texts))):
            found = int(nearest[query, 0])
            shown = [texts[query][:_LETTERS], others[found][:_LETTERS]]
            rows.append([f"{scale}x", *shown, f"{float(agreement[query, found]):.2f}"])
    note = f"passages of {QUERIES} windows of valid are looked for among {CANDIDATES} of train, {NEAREST} each"
    return Measured(figures, examples=rows, notes=[note])


@torch.no_grad()
def vectors(run: Run, windows: TokenBatch) -> dict[int, Tensor]:
    """Return the mean vectors (n, W) of the windows, by scale.

    Raises:
        ValueError: the model has no scales.
    """
    system, parts = run.system, dict[int, list[Tensor]]()
    with run.compute.use_precision():
        for part in split_windows(windows):
            for scale, found in system.collect_scale_outputs(part).items():
                given = found.float().cpu()
                real = torch.arange(given.shape[1]) * scale < part.lengths.sum(1)[:, None]  # the others are padding
                parts.setdefault(scale, []).append((given * real[..., None]).sum(1) / real.sum(1)[:, None])
    if not parts:
        raise ValueError(f"model.kind={system.kind} has no scales: passages cannot be compared by them")
    return {scale: torch.cat(found) for scale, found in parts.items()}


def near(queries: Tensor, candidates: Tensor) -> Tensor:
    """Return the indices (Q, NEAREST) of the candidates (N, W) nearest to queries (Q, W), the nearest first."""
    mean = candidates.mean(0)
    cosines = F.normalize(queries - mean, dim=1) @ F.normalize(candidates - mean, dim=1).T
    return cosines.topk(min(NEAREST, len(candidates)), 1).indices


def topics(texts: list[str], others: list[str]) -> Tensor:
    """Return the cosines (Q, N) of the tf-idf vectors of texts and others."""
    bags = [Counter(re.findall(r"\w+", each.lower())) for each in (*texts, *others)]
    documents = Counter(word for bag in bags for word in bag)
    columns = {word: column for column, word in enumerate(documents)}
    found = torch.zeros(len(bags), len(columns))
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            found[row, columns[word]] = count * math.log(len(bags) / documents[word])
    found = F.normalize(found, dim=1)
    return found[: len(texts)] @ found[len(texts) :].T


def _texts(run: Run, windows: TokenBatch) -> list[str]:
    real = length_mask(windows.lengths, windows.tokens.shape[2])
    rows = (bytes(tokens[own].tolist()) for tokens, own in zip(windows.tokens, real, strict=True))
    return [display_chunk(row, run.chunker.name) for row in rows]
