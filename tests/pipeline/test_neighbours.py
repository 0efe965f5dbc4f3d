"""Neighbours: cosines by brute force, what a query may be, and pictures of chunks of pixels."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.cli import main
from pipeline.index import index
from pipeline.inference import open_run
from pipeline.neighbours import neighbours, parse, picture
from pipeline.options import Options
from pipeline.report import report
from pipeline.runs import RunFolder
from pipeline.training import train


def test_neighbours_are_those_of_the_highest_cosine(options: Options) -> None:
    train(options)
    index(options)
    folder = RunFolder.find(options.name, options.runs_dir)
    found = neighbours(folder, count=5)
    assert len(found) == 6 and len({item["query"] for item in found}) == 6
    run, table = open_run(folder.path), np.load(folder.path / "index" / "chunks.npz")
    vectors = run.embed_rows(table["tokens"], table["lengths"]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = [row.tobytes()[:length] for row, length in zip(table["tokens"], table["lengths"], strict=True)]
    most = table["counts"][rows.index(bytes.fromhex(found[0]["hex"]))]
    assert most == table["counts"].max()
    for item in [*found, *neighbours(folder, ["zq"], 5)]:
        query = bytes.fromhex(item["hex"])
        (vector,) = run.embed([query]).astype(np.float64)
        scores = vectors @ vector / np.linalg.norm(vector)
        if query in rows:
            scores[rows.index(query)] = -2
        best = np.sort(scores)[: -len(item["neighbours"]) - 1 : -1]
        np.testing.assert_allclose([n["score"] for n in item["neighbours"]], best, atol=1e-5)
        assert len(item["neighbours"]) == 5
    assert picture(neighbours(folder, ["#if"])) is None  # text, though it looks like a colour


def test_chunks_of_pixels_are_asked_for_by_colour_and_drawn(
    pictures: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    index(pictures)
    folder = RunFolder.find(pictures.name, pictures.runs_dir)
    (item,) = neighbours(folder, ["#3c3c3c"], 2)  # a chunk of the corpus: all its values are 60
    assert item["hex"] == "3c" * 12 and item["query"] == ",".join(["#3c3c3c"] * 4) and len(item["neighbours"]) == 2
    assert {n["hex"][:2] for n in item["neighbours"]} < {"00", "78", "b4"}
    assert neighbours(folder, [item["hex"]], 2) == [item]
    assert main(["neighbours", str(folder.path)]) == 0  # the four chunks that there are
    assert "neighbours.png" in capsys.readouterr().out
    drawn = np.asarray(Image.open(io.BytesIO((folder.path / "neighbours.png").read_bytes())).convert("RGB"))
    assert all((drawn == value).all(-1).any() for value in (0, 60, 120, 180))
    assert main(["neighbours", str(folder.path), "def "]) == 1
    assert "give a colour such as #4080c0, or 12 values in hexadecimal" in capsys.readouterr().err
    page = Path(report(pictures)).read_text()  # whose queries are meant for text
    assert "neighbours.png" in page and "def " not in page.split("Configuration and versions")[0]


@pytest.mark.parametrize("query", ["#12345", "12345g", "00" * 11, ""])
def test_what_is_no_chunk_of_pixels(query: str) -> None:
    with pytest.raises(ValueError, match="is no chunk of pixels"):
        parse(query, "pixels", 12)
    assert parse("#FF0080", "pixels", 8) == bytes.fromhex("ff0080ff0080ff00")
