"""What the scripts in benchmarks/ name still exists: their own options, options of runs, and shards as a corpus has them."""

import re
import runpy
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.arguments import parse_arguments
from pipeline.commands import COMMANDS
from pipeline.config import Options, load_options
from pipeline.run.sharding import open_shards

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts put the root of the repository in the place of their own folder."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_command_of_a_script_names_its_options(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    usage, *described = capsys.readouterr().out.split("\n\n")
    accepted, named = (
        set(re.findall(r"(?<!\S)\[?(--[a-z]+)", text))
        for text in (usage, next(part for part in described if f"python benchmarks/{script.name}" in part))
    )
    assert named == accepted


def list_overrides() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the options of runs that scripts set: the script, a preset, and `key=value`."""
    from benchmarks import count_files, digests, dry_run_cuda, gpu, roundtrip, torture

    yield "count_files", "quickstart", count_files.SMALL
    yield "digests", "quickstart", [*digests.SMALL, *digests.LIMITS]
    for name, words in dry_run_cuda.MODELS.items():
        yield f"dry_run_cuda {name}", "quickstart", [*dry_run_cuda.SMALL, *words]
    for name, words in gpu.VARIANTS.items():
        yield f"gpu {name}", gpu.TEXT, [*gpu.TINY, *words]
    for name, (_, words) in roundtrip.CORPORA.items():
        yield f"roundtrip {name}", "quickstart", words
    for name, words in torture.CASES.items():
        yield f"torture {name}", "quickstart", [*torture.SMALL, *words]


def test_options_that_scripts_set_exist() -> None:
    from benchmarks import scaling_curves

    for script, preset, words in list_overrides():
        assert load_options(preset, words), script
    place = Namespace(folder="folder", output="output", rate=1.0)
    for system in scaling_curves.SYSTEMS:
        assert scaling_curves.load_system(system, 128, "name", place).name == "name"


def test_commands_of_the_dry_run_exist(tmp_path: Path) -> None:
    from benchmarks import dry_run_cuda

    for title, words in dry_run_cuda.list_commands(tmp_path):
        if title == "types":
            assert (ROOT / words[-1]).is_file()
        else:
            assert parse_arguments([*words, "--debug"], "pipeline", COMMANDS).debug


def test_written_samples_are_read_by_the_corpus(options: Options, tmp_path: Path) -> None:
    from benchmarks.data import HaedShards, drain_stream

    writer = HaedShards(open_shards(options).manifest)
    samples = [{"tokens": np.full(10, number, np.uint8), "lengths": np.full(2, 5, np.uint8)} for number in range(20)]
    (folder := tmp_path / "written").mkdir()
    writer.write(samples, folder)
    assert drain_stream(writer.read(folder)) == 200
    assert writer.resume(folder, 18).tokens[0] == 18


def test_kneser_ney_probabilities_sum_to_one() -> None:
    from benchmarks.word_ngrams import kneser_ney

    train = np.random.default_rng(0).integers(0, 5, 400)
    context = np.array([1, 2])
    each = [kneser_ney(train, np.array([*context, word]), 5, 3)[-1] for word in range(5)]
    assert sum(each) == pytest.approx(1)
