"""What a trained run says of a chunk is the same whoever is asked, whatever the precision of training was."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.config import Options, SampleOptions, load_options
from pipeline.evaluation.evaluate import evaluate_run
from pipeline.run import opened
from pipeline.run.opened import Run, open_run
from pipeline.run.run_directory import RunFolder
from pipeline.training.stages import train
from tests.conftest import of_kind
from tests.pipeline.conftest import CommandLine

TEXT = b"def f(x):\n    return x\n"
CLOSE = {"abs": 1e-4, "rel": 1e-6}


class Forced:
    """Draws what is told, and notes the log-probability of that: known chunks as whole ones, or every chunk spelled."""

    is_plain, cuts_off = False, True

    def __init__(self, run: Run, summons: bool = False) -> None:
        tokens, lengths = run.chunker.split(TEXT)
        self.known = getattr(run.likelihood, "known", None)
        self.chunks = np.split(tokens, np.cumsum(lengths, dtype=int)[:-1])
        self.k, self.has_ends = run.chunker.k, run.system.kind == "haed"
        self.rows = [
            self._row(number) if summons and self.known is not None else -1 for number in range(len(self.chunks))
        ]
        self.told, self.nats = self._outcomes(), [0.0 for _ in self.chunks]

    def _outcomes(self) -> Iterator[tuple[int, int]]:
        """Chunk and outcome of each draw: of a mixture first whether the chunk is whole (0) or spelled (1)."""
        for number, (chunk, row) in enumerate(zip(self.chunks, self.rows, strict=True)):
            if self.known is not None:
                yield number, int(row < 0)
            if row >= 0:
                yield number, row
                continue
            for symbol in chunk.tolist():
                yield number, symbol
            if self.has_ends and len(chunk) < self.k:
                yield number, 256
        while True:
            yield -1, 0

    def __call__(self, logits: Tensor) -> Tensor:
        number, outcome = next(self.told)
        if number >= 0:
            self.nats[number] += float(logits.double().log_softmax(-1)[0][outcome])
        return torch.tensor([outcome])

    def _row(self, number: int) -> int:
        assert self.known is not None
        lexicon, chunk = self.known.lexicon, self.chunks[number]
        same = (lexicon.chunks.lengths == len(chunk)) & lexicon.prefix_mask(torch.from_numpy(chunk.astype(int)))
        return int(same.int().argmax()) if same.any() else -1


def of_sampling(run: Run, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Bits of the text's chunks as `run.sample` draws them."""
    ways = [Forced(run), Forced(run, summons=True)]
    for draw in ways:
        with monkeypatch.context() as patch:
            patch.setattr(opened, "Draw", lambda *_, draw=draw: draw)
            run.sample("", options=SampleOptions(chunks=len(draw.chunks)))
    assert ways[1].known is None or max(ways[1].rows) >= 0
    spelled, whole = (np.array(draw.nats) for draw in ways)
    return -np.where(np.array(ways[1].rows) < 0, spelled, np.logaddexp(spelled, whole)) / math.log(2)


def of_scoring(run: Run) -> np.ndarray:
    (scored,) = run.score_documents([run.chunker.split(TEXT)])
    return scored.bits.double().cpu().numpy()


def of_next(run: Run) -> tuple[list[float], list[float]]:
    """Bits of the likeliest next chunks behind beginnings of the text that end where a chunk does, and as they are scored."""
    listed, scored = [], []
    chunks = Forced(run).chunks
    for number in range(len(chunks)):
        there = run.next(b"".join(map(bytes, chunks[:number])), count=5)
        for each in there.chunks if there.opened is None else ():
            whole = [*chunks[:number], np.frombuffer(bytes.fromhex(each.hex), np.uint8)]
            document = np.concatenate(whole), np.array([len(chunk) for chunk in whole], np.uint8)
            (found,) = run.score_documents([document])
            scored.append(float(found.bits[-1]))
            listed.append(-math.log2(each.probability))
    return listed, scored


def check(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scored = of_scoring(run)
    sampled = of_sampling(run, monkeypatch)
    if run.system.kind == "haed":
        assert sampled == pytest.approx(scored, **CLOSE)
        listed, wanted = of_next(run)
        assert len(listed) >= 5 and listed == pytest.approx(wanted, **CLOSE)
    assert sampled.sum() == pytest.approx(scored.sum(), **CLOSE)
    assert run.score(TEXT).bits == pytest.approx(scored.sum(), **CLOSE)
    (tmp_path / "text.txt").write_bytes(TEXT)
    result = evaluate_run(run.options, tmp_path / "text.txt")
    assert result.bits == pytest.approx(scored.sum(), **CLOSE)
    assert result.precision == "fp32" and result.processor


@pytest.mark.parametrize("likelihood", ["mixture", "decoder"])
def test_a_mixture_gives_one_answer(
    mixed: Options, likelihood: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = Path(mixed.runs_dir) / "mixed" / "config.yaml"
    config.write_text(config.read_text().replace("precision: fp32", "precision: bf16", 1))
    run = Run(RunFolder(config.parent), RunFolder(config.parent).load_options([f"evaluate.likelihood={likelihood}"]))
    assert run.options.precision == "bf16"
    check(run, monkeypatch, tmp_path)
    with torch.no_grad():  # outside of every context of a precision
        for chunk in (b"def ", b"return "):
            tokens = run._make_window(np.frombuffer(chunk, np.uint8), np.array([len(chunk)], np.uint8))
            vectors = run.system.extract_vectors(tokens, "chunks").cpu()
            assert run.embed([chunk]) == pytest.approx(vectors.numpy(), **CLOSE)
        given = run._make_window(*run.chunker.split(TEXT + b"x"))
        for space, found in (("predictions", run.expected(TEXT)), ("contexts", run.context(TEXT))):
            assert found == pytest.approx(run.system.extract_vectors(given, space)[-1].cpu().numpy(), **CLOSE)


@pytest.mark.parametrize(
    ("kind", "preset"), [("haed", "quickstart"), ("haed", "hred"), ("hourglass", None), ("spacebyte", None)]
)
def test_every_system_gives_one_answer(
    kind: str, preset: str | None, options: Options, tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = [*of_kind(kind, tiny), "name=narrow", "precision=bf16", "train.steps=2"]
    made = load_options(preset, [*asked, "model.mixture.known=0"] if kind == "haed" else asked)
    train(made)
    check(open_run(Path(made.runs_dir) / "narrow"), monkeypatch, tmp_path)


def test_another_precision_is_asked_for_and_said(mixed: Options, haed: CommandLine) -> None:
    folder = Path(mixed.runs_dir) / "mixed"
    exact = open_run(folder).score(TEXT).bits
    keys = folder / "known" / "keys.safetensors"
    of_exact = keys.read_bytes()
    narrow = Run(RunFolder(folder), RunFolder(folder).load_options(["evaluate.precision=bf16"], "evaluate"))
    assert 1e-5 < abs(narrow.score(TEXT).bits / exact - 1) < 0.1
    assert len(narrow.sample("def ")[0]) and narrow.next("def ").chunks and narrow.embed([b"def "]).dtype == np.float32
    assert keys.read_bytes() != of_exact and open_run(folder).score(TEXT).bits == exact
    for words, precision in ((["evaluate.precision=bf16"], "bf16"), ([], "fp32")):
        assert f"{precision} on " in haed.output("evaluate", folder, "evaluate.baselines=false", *words)
        found = json.loads((folder / "evaluation.json").read_text())
        assert found["precision"] == precision and found["processor"]
    assert "Use evaluate.precision=bf16" in haed.error("evaluate", folder, "precision=bf16", status=2)


@pytest.mark.parametrize("memory", [0, 4096])
def test_an_evaluation_of_a_split_agrees_with_scores_of_its_documents(memory: int, mixed: Options) -> None:
    """No document sees another, whichever batch its windows came in."""
    made = replace(mixed, precision="bf16", evaluate=replace(mixed.evaluate, memory=memory))
    result = evaluate_run(made)
    run = Run(RunFolder.from_options(made), made)
    total = sum(run.score(text).bits for text in run.folder.open_corpus().iterate_originals("test"))
    assert result.bits == pytest.approx(total, rel=1e-6)
