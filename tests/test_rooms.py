"""Who may import whom, what options may cost to import, and how long a module may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {"haed": set(), "data": set(), "pipeline": {"haed", "data"}, "flows": {"haed", "data", "pipeline"}}
LONGEST = 400


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_import_only_what_they_may(room: str) -> None:
    modules = sorted((ROOT / room).rglob("*.py"))
    assert modules
    for path in modules:
        source = path.read_text()
        assert source.count("\n") <= LONGEST, f"{path} has more than {LONGEST} lines"
        for node in ast.walk(ast.parse(source)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno} imports relatively"
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names}:
                assert top not in ALLOWED or top == room or top in ALLOWED[room], f"{path}:{node.lineno} imports {top}"
                assert top != "prefect" or room == "flows", f"{path}:{node.lineno} imports prefect"


@pytest.mark.parametrize("module", ["haed.options", "data.options", "pipeline.options", "pipeline.config", "flows.cli"])
def test_options_are_cheap_to_import(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'webdataset', 'prefect', 'faiss'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
