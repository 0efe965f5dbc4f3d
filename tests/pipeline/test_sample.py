"""Sampling: the same seed gives the same text, prompts are kept, pictures are completed."""

import io
import json
import os
import random
import wave
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from data.filesystem import write_json
from pipeline.cli import main
from pipeline.config import Options, load_options
from pipeline.inference import decode_whole_characters, sample
from pipeline.reporting.report import write_report
from pipeline.run.index.build import build_index
from pipeline.run.opened import open_run
from pipeline.run.run_directory import RunFolder
from pipeline.run.sharding import shard_source
from pipeline.training.stages import train
from pipeline.web.app import _tools_of
from pipeline.web.questions import SampleQuestion
from tests.conftest import find_neighbours


def test_the_same_seed_gives_the_same_text(run: Path) -> None:
    options = RunFolder(run).load_options()
    options.sample.prompts = ["def ", ""]
    one, two = (sample(options, samples=2) for _ in range(2))
    assert one == two and [item.prompt for item in one] == ["def ", "def ", "", ""]
    options.sample.seed = 1
    assert sample(options, samples=2) != one


def test_the_report_says_of_which_checkpoint_samples_are(run: Path) -> None:
    folder, options = RunFolder(run), RunFolder(run).load_options()
    sample(options)
    assert "samples belong to another" not in write_report(options).read_text()
    written = json.loads((folder.path / "samples.json").read_text())
    assert written[0]["checkpoint"] == folder.select_checkpoint().digest
    write_json(folder.path / "samples.json", [written[0] | {"checkpoint": "other"}])
    assert "samples belong to another" in write_report(options).read_text()


def test_prompts_and_queries_are_those_of_the_corpus_and_shown_whole(tiny: list[str], tmp_path: Path) -> None:
    chance = random.Random(0)
    words = ["и", "в", "достопримечательность", "мороз", "солнце", "中文字符的一行很长很长"]
    (tmp_path / "novel").mkdir()
    for name in ("train", "valid", "test"):
        text = " ".join(chance.choices(words, [9, 5, 2, 2, 1, 1], k=3000))
        (tmp_path / "novel" / f"{name}.txt").write_text(text)
    made = load_options("quickstart", [*tiny, f"source.path={tmp_path / 'novel'}", "name=novel"])
    shard_source(made)
    train(made)
    build_index(made)
    written = sample(made)
    assert [item.prompt for item in written][::3] == ["и ", ""] and len(written) == 4
    queries = find_neighbours(made)
    assert queries[0].query == "и " and "достоп" in {n.text for item in queries for n in item.neighbours}
    page = write_report(made).read_text(encoding="utf-8").split("Configuration and versions")[0]
    assert "достоп" in page and "def " not in page and "\N{REPLACEMENT CHARACTER}" not in page


def test_what_is_written_is_shown_whole() -> None:
    assert decode_whole_characters("中文".encode()[:-1]) == "中"
    assert decode_whole_characters(b"\x96\xe4a") == "\\x96\\xe4a"


def test_a_picture_may_end_within_a_chunk(drawn: Options, tmp_path: Path) -> None:
    made = replace(deepcopy(drawn), runs_dir=str(tmp_path), name="nines")
    made.chunker.k, made.train.steps, made.sample.pictures = 9, 2, 3  # 48 values are five chunks and a third
    shard_source(made)
    train(made)
    assert len(sample(made, samples=2)) == 3 and (tmp_path / "nines" / "samples.png").is_file()


def test_oblong_pictures_are_drawn_as_they_are(drawn: Options, tmp_path: Path) -> None:
    """2×8, which has as many pixels as 4×4."""
    for number in range(6):
        place = tmp_path / "pictures" / ("train" if number % 2 else "valid")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 2), (9 * number, 0, 0)).save(place / f"{number}.png")
    made = replace(deepcopy(drawn), runs_dir=str(tmp_path), shards_dir=str(tmp_path / "shards"), name="oblong")
    made.source.path, made.source.pattern = str(tmp_path / "pictures"), "**/*"
    made.train.steps = made.sample.pictures = 2
    shard_source(made)
    train(made)
    sample(made, samples=2)
    with Image.open(tmp_path / "oblong" / "samples.png") as grid:
        assert grid.width > 3 * grid.height  # two rows of four


def test_lower_halves_of_pictures(pictures: Options) -> None:
    pictures.sample.pictures, pictures.sample.temperature = 3, 0.0
    found = sample(pictures, samples=2)
    assert len(found) == 3 and found[0].text.endswith("samples.png")
    grid = np.asarray(Image.open(io.BytesIO(Path(found[0].text).read_bytes())))
    assert grid.shape[1] > grid.shape[0] * 1.1  # four columns of three
    run = open_run(pictures.name, pictures.runs_dir)
    upper = np.array([[0] * 12 + [60] * 12])
    assert run.complete(upper, 2, pictures.sample).tolist() == [[120] * 12 + [180] * 12]
    assert "lower halves the model completed" in write_report(pictures).read_text()
    with pytest.raises(ValueError, match=r"sample.pictures= instead of `--prompt`"):
        sample(pictures, ["x"])
    before = Path(found[0].text).stat().st_mtime_ns
    folder = str(Path(pictures.runs_dir) / pictures.name)
    assert main(["sample", folder, "--raw"]) == 2 and Path(found[0].text).stat().st_mtime_ns == before
    assert run.next().chunks[0].hex == "00" * 12 and run.next().gate is None
    with pytest.raises(ValueError, match="takes no prompt"):
        run.next("x")


def test_sound_is_written_as_haed_cat_writes_it(
    tiny: list[str], tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Tokens of pcm16 are the high byte first, of the value plus 2¹⁵. What is no whole value is left out."""
    values = np.random.default_rng(0).integers(-9000, 9000, 3000).astype("<i2")
    for split in ("train", "valid", "test"):
        with wave.open(str(tmp_path / f"{split}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(values.tobytes())
    words = ["chunker.kind=fixed", "chunker.k=6", "train.steps=2", "validation.times=0", "source.encoding=pcm16"]
    made = load_options(
        "quickstart", [*tiny, *words, "source.kind=audio", f"source.path={tmp_path}", "source.pattern=*", "name=sound"]
    )
    shard_source(made)
    train(made)
    run = str(RunFolder.from_options(made).path)
    prompt = (values[:4].astype(int) + (1 << 15)).astype(">u2").tobytes()
    made.sample.chunks = 5
    capsysbinary.readouterr()
    assert main(["sample", run, "sample.chunks=5", "--prompt", os.fsdecode(prompt), "--raw"]) == 0
    found = np.frombuffer(capsysbinary.readouterr().out, "<i2")
    (drawn,) = sample(made, [prompt])
    assert found.tolist() == (np.frombuffer(bytes.fromhex(drawn.hex or ""), ">u2").astype(int) - (1 << 15)).tolist()
    assert found[:4].tolist() == values[:4].tolist() and len(found) == 18  # five chunks, of which the first was begun
    corpus = RunFolder(Path(run)).open_corpus()
    assert corpus.restore_original(prompt + b"\x80") == values[:4].tobytes()
    continued = open_run(run).continued(prompt, 2, made.sample)
    assert continued.characters_per_second * continued.seconds == pytest.approx(2 * 28)
    answer = SampleQuestion(prompt="abc", chunks=2).answer(cast(Any, SimpleNamespace(run=open_run(run))))
    assert [len(bytes.fromhex(each.hex or "")) for each in answer["samples"]] == [12]
    assert {"samples", "score"} & set(_tools_of(RunFolder(Path(run)))) == {"samples"}
