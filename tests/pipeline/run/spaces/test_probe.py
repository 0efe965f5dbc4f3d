"""All questions from Python, as docs/probing.ipynb asks them."""

import json
from pathlib import Path

import pytest

from pipeline.cli import main

NOTEBOOK = Path(__file__).resolve().parents[4] / "docs" / "probing.ipynb"


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
