"""Sampling: the same seed gives the same text, prompts are kept, pictures are completed."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.inference import open_run
from pipeline.options import Options
from pipeline.report import report
from pipeline.sampling import sample
from pipeline.training import train


def test_the_same_seed_gives_the_same_text(options: Options) -> None:
    train(options)
    options.sample.prompts = ["def ", ""]
    one, two = (sample(options, samples=2) for _ in range(2))
    assert one == two and [item.prompt for item in one] == ["def ", "def ", "", ""]
    options.sample.seed = 1
    assert sample(options, samples=2) != one


def test_lower_halves_of_pictures(pictures: Options) -> None:
    pictures.sample.pictures, pictures.sample.temperature = 3, 0.0
    found = sample(pictures, samples=2)
    assert len(found) == 3 and found[0].text.endswith("samples.png")
    grid = np.asarray(Image.open(io.BytesIO(Path(found[0].text).read_bytes())))
    assert grid.shape[1] > grid.shape[0] * 1.1  # four columns of three
    run = open_run(pictures.name, pictures.runs_dir)
    upper = np.array([[0] * 12 + [60] * 12])
    assert run.complete(upper, 2, pictures.sample).tolist() == [[120] * 12 + [180] * 12]
    assert "lower halves completed" in report(pictures).read_text()
    with pytest.raises(ValueError, match=r"takes no --prompt"):
        sample(pictures, ["x"])
