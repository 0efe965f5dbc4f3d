"""All questions from Python, as docs/how-to/probing.ipynb asks them."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import open_run
from pipeline.cli import main
from pipeline.config import Options
from pipeline.inference import next_chunks, sample
from pipeline.run.index.queries import Passage

NOTEBOOK = Path(__file__).resolve().parents[4] / "docs" / "how-to" / "probing.ipynb"


def test_the_notebook_runs(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(run), "--space", "contexts", "index.max_contexts=500"]) == 0
    monkeypatch.setenv("HAED_RUN", str(run))
    capsys.readouterr()
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 6
    scope: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
        assert cell["outputs"] and capsys.readouterr().out, f"cell {number} shows nothing"


DOCUMENT = NOTEBOOK.with_name("vectors-in-faiss-and-pandas.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("here")
def test_the_questions_of_the_page_are_answered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    assert main(["index", str(run), "--space", "contexts", "index.max_contexts=500"]) == 0
    run.rename(run.with_name("quickstart"))
    capsys.readouterr()
    scope: dict[str, Any] = {}
    exec(re.findall("```python\n(.*?)```", DOCUMENT, re.DOTALL)[0], scope)
    assert capsys.readouterr().out.startswith("(2, 16)\n") and len(scope["table"]) == 6


@pytest.mark.parametrize("number", [1, 2], ids=["run.probe.vectors", "the files themselves"])
@pytest.mark.usefixtures("here")
def test_searching_in_ones_own_faiss_gives_the_neighbours(number: int, run: Path) -> None:
    """The examples of the page as they stand there."""
    pytest.importorskip("pandas")
    (run.parent / "quickstart").symlink_to(run)
    scope: dict[str, Any] = {}
    exec(re.findall("```python\n(.*?)```", DOCUMENT, re.DOTALL)[number], scope)
    least = 10 if number == 1 else None
    (wanted,) = open_run(run).probe.neighbours("return ", count=8, min_count=least)
    found = scope["table"].iloc[scope["rows"][0]].assign(score=scope["scores"][0])
    rest = found[found["text"] != "return "][:8]
    assert rest["text"].tolist() == [near.text for near in wanted.neighbours]
    assert rest["count"].tolist() == [near.count for near in wanted.neighbours]
    assert rest["score"].tolist() == pytest.approx([near.score for near in wanted.neighbours], abs=1e-5)


@pytest.mark.parametrize("metric", ["centred", "cosine", "ip", "l2"])
def test_vectors_are_those_that_questions_are_answered_from(metric: str, run: Path) -> None:
    pytest.importorskip("pandas")
    assert main(["index", str(run), f"index.metric={metric}"]) == 0
    probe = open_run(run).probe
    for least in (None, 1, 3):
        vectors, table = probe.vectors(least)
        assert vectors.shape == (probe.index.count_known(least), 16) and vectors.dtype == np.float32
        assert list(table) == ["row", "text", "hex", "count", "length", "norm"]
        assert table["row"].tolist() == list(range(len(vectors)))
        assert table["hex"].tolist() == [probe.index.chunk_at(row).hex() for row in range(len(vectors))]
        assert table["count"].min() >= (least or probe.index.meta.floor)
        asked = probe.query_vectors(["return ", "zqzq", b"def "])
        found = probe.neighbours("return ", "zqzq", "def ", count=5, min_count=least)
        for query, item in zip(asked, found, strict=True):
            scores = np.linalg.norm(vectors - query, axis=1) if metric == "l2" else vectors @ query
            order = np.argsort(scores if metric == "l2" else -scores, kind="stable")
            order = [row for row in order if table["hex"][row] != item.hex][:5]
            np.testing.assert_allclose(scores[order], [near.score for near in item.neighbours], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="no chunk of the index occurs"):
        probe.vectors(10**6)
    with pytest.raises(ValueError, match="space='predictions' has no vectors"):
        probe.vectors(space="predictions")  # type: ignore[arg-type]
    assert probe.query_vectors([]).shape == (0, 16)
    assert (probe.query_vectors("return ") == asked[:1]).all()


def test_vectors_of_places_are_those_that_questions_are_answered_from(run: Path) -> None:
    pytest.importorskip("pandas")
    assert main(["index", str(run), "--space", "contexts", "index.max_contexts=200"]) == 0
    probe = open_run(run).probe
    vectors, table = probe.vectors(space="contexts")
    assert len(vectors) == len(table) == len(probe.places) and not {"score", "count"} & set(table)
    (query,) = probe.query_vectors(["import "], space="contexts")
    (wanted,) = probe.contexts("import ", count=5)
    best = np.argsort(-(vectors @ query), kind="stable")[:5]
    np.testing.assert_allclose((vectors @ query)[best], [near.score for near in wanted.neighbours], atol=1e-5)
    assert {(row.document, row.chunk) for row in table.iloc[best].itertuples()} == {
        (near.document, near.chunk) for near in wanted.neighbours if isinstance(near, Passage)
    }
    with pytest.raises(ValueError, match="min_count applies to chunks"):
        probe.vectors(min_count=2, space="contexts")


def test_data_frames_without_pandas_say_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    probe = open_run(run).probe
    for ask in (probe.vectors, probe.neighbours("def ").to_frame):
        with pytest.raises(ImportError, match=r"pip install 'haed\[pandas\]'"):
            ask()


@pytest.mark.slow
def test_text_is_taken_as_str_or_bytes_wherever_there_is_a_question(run: Path) -> None:
    assert main(["index", str(run), "--space", "contexts", "index.max_contexts=200"]) == 0
    opened = open_run(run)
    probe = opened.probe
    text = "naïve "
    kinds = [text, np.str_(text), *(kind(text.encode()) for kind in (bytes, bytearray, memoryview))]
    asks: dict[str, Callable[[Any], Any]] = {
        "run.embed": lambda text: opened.embed([text]).tolist(),
        "run.score": lambda text: opened.score(text).bits,
        "run.sample": lambda text: opened.sample(text),
        "run.next": lambda text: opened.next(text, 3).chunks,
        "run.context": lambda text: opened.context(text).tolist(),
        "run.expected": lambda text: opened.expected(text).tolist(),
        "run.neighbours": lambda text: opened.neighbours(text),
        "analogy": lambda text: probe.analogy(text, minus=text, plus=[text, text]),
        "probe.expected": lambda text: probe.expected(text),
        "probe.contexts": lambda text: probe.contexts(text),
        "query_vectors": lambda text: probe.query_vectors([text]).tolist(),
        "contexts' query_vectors": lambda text: probe.query_vectors([text], space="contexts").tolist(),
        "sample": lambda text: [item.hex for item in sample(opened.options, [text])],
        "following": lambda text: next_chunks(opened.options, [text]),
    }
    for name, ask in asks.items():
        first, *others = (ask(kind) for kind in kinds)
        assert all(other == first for other in others), name
        for wrong in (1, None, [["a list"]], 1.5):
            with pytest.raises(TypeError, match=r"must be .* not (int|NoneType|list|float)\. Use \w+.*\."):
                ask(wrong)
        with pytest.raises(ValueError, match="is not a text: surrogates not allowed"):
            ask("\ud800")
        assert ask("\udcff") == ask(b"\xff"), name  # as Python has bytes in names of files
    for question in (opened.neighbours, probe.neighbours, probe.expected, probe.contexts):
        assert question(["return ", b"for "]) == question("return ", "for ") == question(("return ",), "for ")
    for question in (probe.neighbours, probe.expected, probe.contexts):
        with pytest.raises(TypeError, match=rf"Use run\.probe\.{question.__name__}\("):
            question(None)
    assert (opened.embed("return ") == opened.embed(["return "])).all() and opened.embed([]).shape == (0, 16)
    for count in ("3", 2.5, True, None):
        if count is not None:
            with pytest.raises(TypeError, match="count must be a whole number"):
                opened.neighbours("def ", count=count)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="count must be a whole number"):
            opened.next("def ", count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count=0: must be at least 1"):
        probe.contexts("def ", count=0)


def test_of_pictures_a_str_is_a_colour_or_no_text(pictures: Options) -> None:
    opened = open_run(Path(pictures.runs_dir) / pictures.name)
    assert (opened.embed("#3c3c3c") == opened.embed([bytes([60] * 12)])).all()
    with pytest.raises(ValueError, match="is not a chunk of pixels"):
        opened.embed(["return "])
    for ask in (opened.score, opened.sample, opened.context, opened.expected):
        with pytest.raises(ValueError, match="not of text. Give the values as bytes"):
            ask("#3c3c3c")
    assert opened.sample("")
