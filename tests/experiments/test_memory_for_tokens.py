"""Memory for models of tokens: probabilities that sum to one, and tokens that are read as the run scores them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import external_models
from experiments.external_models import Package, read_tokens
from experiments.measures import measure_remembered
from experiments.memory_for_tokens import (
    ReadTokens,
    fit_memory,
    join_parts,
    read_documents,
    read_pieces,
    recall_tokens,
)
from haed.chunk.packing import Chunks
from haed.chunk.recalled import Recalled
from pipeline.config import load_options
from pipeline.run.device import setup_compute
from pipeline.run.sharding import open_shards
from tests.conftest import TINY, mostly_nightly
from tests.experiments.conftest import train_tokens

SYMBOLS = 4


def read_text(tokens: torch.Tensor, document: int = 0) -> ReadTokens:
    """Tokens as a model of states and probabilities that follow from what is before read them."""
    states, log_prob = [], []
    for place in range(len(tokens)):
        chance = torch.Generator().manual_seed(hash(tuple(tokens[:place].tolist())) % 2**31)
        states.append(torch.randn(5, generator=chance).double())
        log_prob.append(torch.randn(SYMBOLS, generator=chance).double().log_softmax(0)[tokens[place]])
    return ReadTokens(document, tokens, torch.stack(states), torch.stack(log_prob))


def test_probabilities_of_all_tokens_sum_to_one_also_of_those_that_train_lacks() -> None:
    chance = torch.Generator().manual_seed(0)
    recall = recall_tokens([np.array([0, 1, 0, 2, 0, 1, 0, 2, 2], np.uint8), np.array([1, 0, 1], np.uint8)])
    held_out = [read_text(torch.randint(SYMBOLS, (60,), generator=chance), document) for document in range(3)]
    memory, _ = fit_memory(recall, held_out, cached=7)
    text = torch.randint(SYMBOLS, (12,), generator=chance)
    for place in range(len(text)):
        total = 0.0
        for symbol in range(SYMBOLS):
            some = read_text(torch.cat([text[:place], torch.tensor([symbol])]))
            (read,) = read_pieces(memory.start_document, [some])
            total += float(join_parts(memory, read).joint_log_prob[-1].exp())
        assert total == pytest.approx(1, abs=1e-12)


def test_a_text_of_train_is_recalled_by_counting() -> None:
    recall = recall_tokens([np.array([7, 9, 7, 9, 7, 8], np.uint8)])
    text = Chunks(torch.tensor([[7], [9]]), torch.ones(2).long())
    found = Recalled(recall).score(torch.zeros(2, 1), text)
    assert found.log_prob.exp()[0] == pytest.approx((1 + 1 * 3 / 6) / 2)  # 7 begins the only document
    after_7 = (2 + 2 * 2 / 6) / (3 + 2)  # twice of three times; two different ones follow
    assert found.log_prob.exp()[1] == pytest.approx((1 + 1 * after_7) / 2)  # once after a 7 that begins a document
    with pytest.raises(ValueError, match="nothing can be recalled"):
        recall_tokens([])


@pytest.mark.slow
@pytest.mark.parametrize("preset", mostly_nightly(["spacebyte", "hourglass"], "spacebyte"))
def test_tokens_are_read_as_the_run_scores_them_and_memory_helps(
    preset: str, text: Path, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.memory_for_tokens.SHARPNESS", (12.0,))
    run = train_tokens(preset, text, sharded, tmp_path)
    documents = list(run.folder.open_corpus().iterate_documents("test"))
    read = list(read_documents(run, documents))
    for number, (tokens, _) in enumerate(documents):
        mine = torch.cat([piece.tokens for piece in read if piece.document == number])
        assert mine.tolist() == tokens.tolist()
    bits = sum(float(scored.bits.sum()) for scored in run.score_documents(documents))
    found = measure_remembered(run).metrics
    assert found["test, bits/char"] == pytest.approx(bits / sum(len(tokens) for tokens, _ in documents), rel=1e-6)
    assert found["test, with memory"] < found["test, bits/char"]


@pytest.mark.nightly
def test_bytes_of_a_package_are_read_once_and_memory_helps(
    text: Path, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.memory_for_tokens.SHARPNESS", (12.0,))
    options = load_options("quickstart", ["source.kind=text", f"source.path={text}", f"shards_dir={sharded}", *TINY])
    corpus, machine = open_shards(options), setup_compute(options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
    package = Package(lambda: model, "torch", 64, output="1")
    test = external_models.read_split(corpus, "test")
    read = list(read_tokens(model, package, test, machine, model[1]))
    assert torch.cat([piece.tokens for piece in read]).tolist() == test[1:].tolist()
    states = model[0](test[:-1].long())
    torch.testing.assert_close(torch.cat([piece.states for piece in read]), states.detach())
    found = external_models.measure_remembered(package, model, corpus, machine).metrics
    bits = external_models.score_bits(model, package, test, machine) / len(test)
    assert found["test, with memory"] < found["test, bits/char"] == pytest.approx(bits)
    with pytest.raises(ValueError, match="so it has no memory"):
        external_models.measure_remembered(Package(lambda: model, "torch"), model, corpus, machine)
