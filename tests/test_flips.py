"""Bits that flip in what was made from something else: what is read is what was written, or it is an error that says where."""

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from data.corpus import MANIFEST, Corpus
from pipeline.cli import main
from pipeline.evaluation import evaluate
from pipeline.run import metrics
from pipeline.run.analysis_results import Analysis
from pipeline.run.checkpoints import read_state
from pipeline.run.files import Baseline, CorpusRecord, Environment, Evaluation, KeptSample, read_as
from pipeline.run.index.storage import IndexMetadata

FLIPS = 150
STEP = "finetune/checkpoints/step-00000004"
READERS: dict[str, Callable[[Path], Any]] = {
    "evaluation.json": lambda path: read_as(Evaluation, path),
    "samples.json": lambda path: read_as(list[KeptSample], path),
    "environment.json": lambda path: read_as(Environment, path),
    "corpus.json": lambda path: read_as(CorpusRecord, path),
    "index/chunks/meta.json": lambda path: read_as(IndexMetadata, path),
    "pretrain/metrics.jsonl": metrics.read_metrics,
    f"{STEP}/state.json": lambda path: read_state(path.parent),
}


def flipped(content: bytes, chance: random.Random) -> bytes:
    """With a bit changed, or a digit for another."""
    found = bytearray(content)
    digits = [at for at, each in enumerate(content) if chr(each).isdigit()]
    if chance.random() < 0.5:
        at = chance.choice(digits)
        found[at] = ord(str((int(chr(found[at])) + chance.randrange(1, 10)) % 10))
    else:
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def held_against(path: Path, read: Callable[[Path], Any], chance: random.Random) -> int:
    """How many of some flips were refused; all others left what is read as it was."""
    whole, content, refused = read(path), path.read_bytes(), 0
    for _ in range(FLIPS):
        path.write_bytes(changed := flipped(content, chance))
        try:
            found = read(path)
        except (ValueError, OSError) as error:
            refused += 1
            assert path.name in str(error) and len(str(error)) < 1000
        else:
            assert found == whole, changed
    path.write_bytes(content)
    assert read(path) == whole
    return refused


@pytest.mark.parametrize("name", READERS)
def test_no_flip_in_a_run_is_read_as_something_else(run: Path, name: str, chance: random.Random) -> None:
    assert held_against(run / name, READERS[name], chance) > FLIPS / 2


@pytest.mark.slow
def test_no_flip_in_an_analysis_is_read_as_something_else(run: Path, chance: random.Random) -> None:
    few = ["analyse.max_chunks=50", "analyse.corpus_chunks=100", "analyse.projector=0", "analyse.passages=0"]
    assert main(["analyse", str(run), *few, "analyse.map=pca"]) == 0
    path = run / "analysis" / "analysis.json"
    assert held_against(path, lambda path: read_as(Analysis, path), chance) > FLIPS / 2


def test_no_flip_in_a_manifest_is_read_as_something_else(sharded: Path, tmp_path: Path, chance: random.Random) -> None:
    (folder,) = (path.parent for path in sharded.glob(f"*/{MANIFEST}"))
    place = Path(shutil.copytree(folder, tmp_path / "corpus"))
    assert held_against(place / MANIFEST, lambda path: Corpus.open(path.parent).manifest, chance) > FLIPS / 2


def test_baselines_are_measured_anew_when_they_were_changed_and_not_on_a_very_long_split(
    sharded: Path,
    tmp_path: Path,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder,) = (path.parent for path in sharded.glob(f"*/{MANIFEST}"))
    corpus = Corpus.open(Path(shutil.copytree(folder, tmp_path / "corpus")))
    true = [Baseline("xz -9", 800.0, 2.0, 2.0)]
    monkeypatch.setattr(evaluate, "measure_baselines", lambda *_: true)  # which takes a second
    cache = corpus.folder / "baselines-test.json"
    assert evaluate._load_or_measure_baselines(corpus, "test") == true
    content = cache.read_bytes()
    for _ in range(FLIPS):
        cache.write_bytes(flipped(content, chance))
        assert evaluate._load_or_measure_baselines(corpus, "test") == true
    assert "baselines-test.json is damaged or was edited" in caplog.text and "It is made again" in caplog.text
    cache.write_bytes(content)
    corpus.digest = "0" * 12
    caplog.clear()
    assert evaluate._load_or_measure_baselines(corpus, "test") == true
    assert "belongs to another corpus. It is made again" in caplog.text
    cache.unlink()
    monkeypatch.setattr(evaluate, "HELD_OUT_LIMIT", corpus.split_counts("test").tokens - 1)
    assert evaluate._load_or_measure_baselines(corpus, "test") == [] and not cache.exists()
    assert "so no baselines are measured" in caplog.text


def test_a_result_that_was_edited_is_printed_by_nobody(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "evaluation.json"
    figure = asdict(read_as(Evaluation, path))["bits_per_char"]
    path.write_text(path.read_text().replace(f'"bits_per_char": {figure}', '"bits_per_char": 0.5', 1))
    for command in (["compare", "run", f"runs_dir={run.parent}"], ["report", str(run)]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert "evaluation.json is damaged or was edited" in said.err and f"Run `haed evaluate {run}` again" in said.err
        assert "0.5" not in said.out
    assert main(["evaluate", str(run)]) == 0 and main(["report", str(run)]) == 0  # as the message advises


def test_a_line_of_metrics_that_was_edited_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "finetune" / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + rest[0].replace(b'"step"', b'"stop"') + b"".join(rest[1:]))
    for command in (["compare", "run", f"runs_dir={run.parent}"], ["report", str(run)]):
        assert main(command) == 1
        assert "finetune/metrics.jsonl, line 2 is damaged or was edited" in capsys.readouterr().err
    path.write_bytes(first + b"".join(rest[1:]))  # as the message advises
    assert main(["report", str(run)]) == 0
