import math
from pathlib import Path

import pytest
import torch

from data.vocabulary import count_distinct_chunks
from haed.base import TokenBatch
from haed.chunk.model import HAED
from haed.chunk.packing import Chunks
from pipeline.config import Options
from pipeline.evaluation import evaluate
from pipeline.evaluation.evaluate import evaluate_run, format_evaluation, score_closed_set
from pipeline.run.opened import Run
from pipeline.run.run_directory import RunFolder
from pipeline.run.windows import fixed_subset
from pipeline.training import stages
from tests.conftest import mostly_nightly


@pytest.mark.parametrize("similarity", mostly_nightly(["dot", "cosine"], "cosine"))
def test_the_softmax_over_all_chunks(options: Options, similarity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options.precision, options.iem.similarity, options.evaluate.baselines = "fp32", similarity, False
    options.iem.correction, options.model.mixture.known = "inclusion", 0
    options.evaluate.split = "valid"
    monkeypatch.setattr(evaluate, "_CLOSED_WINDOWS", 3)
    stages.pretrain(options)
    run = Run(RunFolder.find(Path(options.runs_dir) / options.name), options)
    corpus = run.folder.open_corpus()
    found = score_closed_set(run, corpus, "valid")
    assert found is not None and found.calibrated and found.chunks <= 3 * options.batch.context
    chunks = {
        bytes(tokens[:length])
        for split in ("train", "valid")
        for tokens, length in zip(*list(vars(count_distinct_chunks(corpus, split)).values())[:2], strict=True)
    }
    assert found.candidates == len(chunks)
    windows = fixed_subset(corpus, options.batch.context, 3)
    assert windows is not None
    names = sorted(chunks)
    rows = torch.zeros(len(names), 12, dtype=torch.long)
    for row, name in zip(rows, names, strict=True):
        row[: len(name)] = torch.tensor(list(name))
    model, bits, exact = run.system, 0.0, 0.0
    assert isinstance(model, HAED)
    with torch.no_grad():
        every = model.encode(Chunks(rows, torch.tensor([len(name) for name in names])))
        for tokens, lengths, starts in zip(windows.tokens, windows.lengths, windows.starts, strict=True):
            n = int((lengths > 0).sum())
            own = [bytes(t[:size].tolist()) for t, size in zip(tokens[:n], lengths[:n].tolist(), strict=True)]
            index = torch.tensor([names.index(name) for name in own])
            query = model.compute_query(model.main(every.vector[index][None], starts[None, :n])[0])
            scores = (query @ model.compute_key(every.vector).t() + every.bias).log_softmax(1)
            bits -= float(scores.gather(1, index[:, None]).sum()) / math.log(2)
            exact -= float(
                model.log_likelihood(TokenBatch(tokens[None, :n], lengths[None, :n], starts[None, :n])).sum()
            ) / math.log(2)
    assert found.bits_per_token == pytest.approx(bits / found.tokens, rel=1e-4)
    assert found.decoder_bits_per_token == pytest.approx(exact / found.tokens, rel=1e-4)
    result = evaluate_run(options)
    assert result.iem == found and "IEM softmax over all" in format_evaluation(result)
    options.evaluate.closed_set = 5
    assert evaluate_run(options).iem is None
    with pytest.raises(FileNotFoundError, match="no checkpoint of finetune"):
        options.evaluate.stage = "finetune"
        evaluate_run(options)


def test_the_score_of_a_mixture_is_none_by_itself(options: Options) -> None:
    """It was learned together with a prior of the chunks' counts, also where phase two had no part of it."""
    options.evaluate.baselines = False
    options.iem.correction, options.finetune.iem_weight = "inclusion", 0.0
    stages.pretrain(options)
    stages.finetune(options)
    assert evaluate_run(options).likelihood is None and evaluate_run(options).iem is None
