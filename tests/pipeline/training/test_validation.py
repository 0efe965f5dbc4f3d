"""Validation of a mixture: the figure of an evaluation of the same windows; the IEM loss with its prior, by the formula."""

import math

import pytest
import torch

from haed.base import TokenBatch
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.config import Options
from pipeline.run.known import make_vocabulary
from pipeline.run.metrics import read_metrics
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import DocumentWindows, WindowScorer, fixed_subset
from pipeline.training.trainer import Validation


@pytest.fixture
def run(mixed: Options) -> Run:
    return Run(RunFolder.from_options(mixed), mixed)


@pytest.fixture
def windows(run: Run) -> TokenBatch:
    found = fixed_subset(run.folder.open_corpus(), run.options.batch.context, run.options.validation.windows)
    assert found is not None
    return found


def test_it_is_the_evaluation_of_the_same_windows(run: Run, windows: TokenBatch) -> None:
    """By the model as it was in training, and as it is read with its cache of known chunks."""
    given = make_vocabulary(run.folder.open_corpus(), 100)
    name = "validation/bits_per_token"
    found = Validation(windows, True, given).score(run.system, run.compute)[name]
    trained = read_metrics(run.folder.phase_folder("finetune") / "metrics.jsonl")
    assert found == pytest.approx(next(r[name] for r in trained if r["step"] == run.step and name in r), rel=1e-5)
    with torch.no_grad():
        scored = WindowScorer(run.likelihood, remembers=False).score_windows(
            DocumentWindows(windows, windows.chunk_mask, torch.arange(len(windows)))
        )
    assert scored.known is not None and scored.known.isfinite().any()
    assert found == pytest.approx(float(scored.bits.sum() / windows.lengths.sum()), rel=1e-6)


def test_the_iem_loss_has_the_prior(run: Run, windows: TokenBatch) -> None:
    """A softmax over the distinct chunks of the windows, with the counts that train has of them, one at least."""
    given, model = make_vocabulary(run.folder.open_corpus(), 100), run.system
    assert isinstance(model, HAED) and model.mixture is not None
    found = Validation(windows, False, given).score(model, run.compute)["validation/iem"]
    counts = {bytes(t[:n].tolist()): int(c) for t, n, c in zip(*vars(given.chunks).values(), given.counts, strict=True)}
    own = [
        bytes(t[:n].tolist())
        for t, n in zip(windows.tokens[windows.chunk_mask], windows.lengths[windows.chunk_mask], strict=True)
    ]
    names = sorted(set(own))
    rows = torch.tensor([[*name, *[0] * (12 - len(name))] for name in names])
    model = model.double()
    with torch.no_grad():
        embedded = model.encode(Chunks(rows, torch.tensor([len(name) for name in names])))
        logarithms = torch.tensor([math.log(counts.get(name, 1)) for name in names])
        prior = model.mixture.prior * logarithms.to(model.device)
        query, key = model.compute_query(model.predict_vectors(windows)), model.compute_key(embedded.vector)
        scores = query @ key.t() + embedded.bias + prior
    target = torch.tensor([names.index(name) for name in own], device=model.device)
    assert 0 < sum(name in counts for name in names) < len(names)
    assert found == pytest.approx(float(torch.nn.functional.cross_entropy(scores, target)), rel=1e-5)


def test_one_window_has_no_standard_error(run: Run, windows: TokenBatch) -> None:
    alone = Validation(windows[:1]).score(run.system, run.compute)
    assert list(alone) == ["validation/bits_per_token"] and len(Validation(windows).score(run.system, run.compute)) == 2
