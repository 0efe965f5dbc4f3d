"""Neighbours: cosines by brute force, what a query may be, and pictures of chunks of pixels."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.cli import main
from pipeline.options import Options
from pipeline.probe.index import index
from pipeline.probe.neighbours import neighbours
from pipeline.run.files import read_json
from pipeline.run.folder import RunFolder
from pipeline.run.opened import open_run
from pipeline.show import plots
from pipeline.show.report import report
from pipeline.train.stages import train


@pytest.mark.parametrize("encoder", ["mlp", "linear", "lstm", "transformer"])
def test_neighbours_are_those_of_the_highest_cosine(options: Options, encoder: str) -> None:
    options.model.encoder.kind = encoder  # type: ignore[assignment]
    options.model.encoder.rows = 50 if encoder == "linear" else 0
    train(options)
    index(options)
    folder = RunFolder.of(options)
    found = neighbours(options, count=5)
    assert len(found) == 6 and len({item.query for item in found}) == 6
    run, table = open_run(folder.path), np.load(folder.path / "index" / "chunks.npz")
    vectors = run.embed_rows(table["tokens"], table["lengths"]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = [row.tobytes()[:length] for row, length in zip(table["tokens"], table["lengths"], strict=True)]
    counts = [table["counts"][rows.index(bytes.fromhex(item.hex))] for item in found]
    assert sorted(counts, reverse=True) == counts and counts[-1] > 1
    words = [count for row, count in zip(rows, table["counts"], strict=True) if any(map(str.isalnum, row.decode()))]
    assert counts[0] == max(words)  # though blanks are more frequent
    for item in [*found, *neighbours(options, ["zq"], 5)]:
        query = bytes.fromhex(item.hex)
        (vector,) = run.embed([query]).astype(np.float64)
        scores = vectors @ vector / np.linalg.norm(vector)
        if query in rows:
            scores[rows.index(query)] = -2
        best = np.sort(scores)[: -len(item.neighbours) - 1 : -1]
        np.testing.assert_allclose([n.score for n in item.neighbours], best, atol=1e-5)
        assert len(item.neighbours) == 5
    assert plots.neighbours(neighbours(options, ["#if"])) is None  # text, though it looks like a colour


def test_an_index_of_the_most_frequent_chunks_says_how_many_it_leaves_out(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    train(options)
    folder = RunFolder.of(options)
    tables = []
    for most in ("null", "20"):
        assert main(["index", str(folder.path), f"index.max_chunks={most}"]) == 0
        with np.load(folder.path / "index" / "chunks.npz") as archive:
            tables.append(dict(archive))
    rest = len(tables[0]["counts"]) - 20
    assert rest > 100 and all((tables[1][name] == tables[0][name][:20]).all() for name in tables[0])
    meta = read_json(folder.path / "index" / "meta.json")
    assert (meta["chunks"], meta["max_chunks"], meta["left_out"]) == (20, 20, rest)
    shown = capsys.readouterr()
    assert f"20 chunks ({rest:,} rarer ones left out by index.max_chunks)" in shown.out
    assert f"of the distinct chunks {rest:,} rarer" in shown.err
    assert len(neighbours(options, ["zq"], 5)[0].neighbours) == 5  # what is not in it is embedded


def test_beside_a_table_rare_chunks_are_left_out_if_enough_are_frequent(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They would share rows with frequent ones."""
    options.model.encoder.rows = 50
    train(options)
    folder = RunFolder.of(options)
    found = {}
    for enough, asked in ((5, "null"), (5, "1"), (10**6, "null")):
        monkeypatch.setattr("pipeline.probe.index._ENOUGH", enough)
        assert main(["index", str(folder.path), f"index.min_count={asked}"]) == 0
        found[enough, asked] = np.load(folder.path / "index" / "chunks.npz")["counts"]
        said = "less than 10 times are left out" in capsys.readouterr().err
        meta = read_json(folder.path / "index" / "meta.json")
        assert said == (meta["least"] == 10) == ((enough, asked) == (5, "null"))
    every = found[5, "1"]
    assert every.min() == 1 and found[10**6, "null"].tolist() == every.tolist()
    assert found[5, "null"].tolist() == every[every >= 10].tolist()


def test_chunks_of_pixels_are_asked_for_by_colour_and_drawn(
    pictures: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    index(pictures)
    folder = RunFolder.of(pictures)
    (item,) = neighbours(pictures, ["#3c3c3c"], 2)  # a chunk of the corpus: all its values are 60
    assert item.hex == "3c" * 12 and item.query == ",".join(["#3c3c3c"] * 4) and len(item.neighbours) == 2
    assert {n.hex[:2] for n in item.neighbours} < {"00", "78", "b4"}
    assert neighbours(pictures, [item.hex], 2) == [item]
    assert main(["neighbours", str(folder.path)]) == 0  # the four chunks that there are
    assert "neighbours.png" in capsys.readouterr().out
    drawn = np.asarray(Image.open(io.BytesIO((folder.path / "neighbours.png").read_bytes())).convert("RGB"))
    assert all((drawn == value).all(-1).any() for value in (0, 60, 120, 180))
    assert main(["neighbours", str(folder.path), "def "]) == 1
    assert "give a colour such as #4080c0, or 12 values in hexadecimal" in capsys.readouterr().err
    page = Path(report(pictures)).read_text()  # whose queries are meant for text
    assert "neighbours.png" in page and "def " not in page.split("Configuration and versions")[0]
