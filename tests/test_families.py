"""A model family is its own file and a line in `haed.options` and `haed.registry`: one registered here goes through the stages."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from haed import registry
from haed.base import ChunkingSpec, SequenceModel, TokenBatch
from haed.chunk.packing import Chunks
from haed.options import SYSTEMS, Family, IEMOptions, ModelOptions
from haed.sampling import Draw, Sampler
from pipeline import open_run
from pipeline.config import ConfigError, Options, load_options
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.inference import sample
from pipeline.reporting.comparison import compare_runs
from pipeline.training.profile import profile_phase
from pipeline.training.stages import pretrain, train
from tests.conftest import of_kind


class Unigram(SequenceModel):
    """Every token alone: the simplest system of tokens."""

    submodules = ("logits",)

    def __init__(self, options: ModelOptions, iem: IEMOptions, cut: ChunkingSpec) -> None:
        super().__init__(cut)
        self.logits = nn.Linear(1, cut.vocabulary, bias=False)
        self.initialise_parameters()

    def initialise_parameters(self) -> None:
        nn.init.zeros_(self.logits.weight)

    def distribution(self) -> Tensor:
        return self.logits.weight[:, 0].float().log_softmax(0)

    def decision_log_likelihood(self, windows: TokenBatch) -> Tensor:
        tokens = windows.tokens.long().to(self.device)
        real = torch.arange(self.cut.k) < windows.lengths.cpu()[..., None]
        found = torch.where(real.to(self.device), self.distribution()[tokens], 0.0)
        return torch.nn.functional.pad(found, (0, 1))


class UnigramSampler(Sampler):
    def __init__(self, system: Unigram, prompt: TokenBatch, samples: int) -> None:
        self.system, self.samples = system, samples

    def draw_chunk(self, draw: Draw, opened: Tensor | None = None) -> Chunks:
        k, known = self.system.cut.k, torch.zeros(0) if opened is None else opened
        rows = [draw(self.system.distribution().detach().expand(k, -1)) for _ in range(self.samples)]
        tokens = torch.stack(rows)
        tokens[:, : len(known)] = known
        return Chunks(tokens, torch.full((self.samples,), k))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SYSTEMS, "unigram", Family("every token alone"))
    monkeypatch.setitem(registry.KINDS, "unigram", registry.Kind(Unigram, UnigramSampler))


@pytest.fixture
def trained(registered: None, options: Options, tiny: list[str]) -> Options:
    words = [*of_kind("unigram", tiny), "name=unigram", "train.steps=60", "validation.times=1"]
    made = load_options("quickstart", words)
    made.optimizer.learning_rate = 0.3
    train(made)
    return made


@pytest.mark.slow
def test_a_registered_family_goes_through_every_stage(trained: Options, options: Options, tmp_path: Path) -> None:
    corpus = open_run("unigram", trained.runs_dir).folder.open_corpus()
    train_text, test_text = (
        np.concatenate([tokens for tokens, _ in corpus.iterate_documents(split)]) for split in ("train", "test")
    )
    counts = np.bincount(train_text, minlength=256) + 1
    fitted = -np.log2(counts / counts.sum())[test_text].mean()
    found = evaluate_run(trained)
    assert found.stage == "train" and found.bits_per_token == pytest.approx(float(fitted), abs=0.25)

    written = sample(trained, ["def "], 2)
    assert len(written) == 2 and all(bytes.fromhex(each.hex or "").startswith(b"def ") for each in written)

    measured = profile_phase(trained, "train", 2)
    assert measured.milliseconds["system"] > 0 and measured.flops == 0  # it multiplies nothing

    train(options)
    evaluate_run(options)
    both = compare_runs([trained.name, options.name], trained.runs_dir, tmp_path)
    assert {row.run for row in both.rows} == {"unigram", "tiny"}


def test_what_only_models_of_chunks_can_is_refused_by_name(registered: None, tiny: list[str], options: Options) -> None:
    made = load_options("quickstart", [*of_kind("unigram", tiny), "name=unigram"])
    with pytest.raises(ConfigError, match="unigram has no phase one and no phase two. .* with `haed train`"):
        pretrain(made)
    assert not (Path(made.runs_dir) / "unigram").exists()
    with pytest.raises(ValueError, match="Unigram has no space 'chunks'. Its spaces are: none"):
        open_run(train(made).run).embed([b"a"])
