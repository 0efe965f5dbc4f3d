"""Who may import whom, and what options may cost to import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {"haed": set(), "data": set(), "pipeline": {"haed", "data"}, "flows": {"haed", "data", "pipeline"}}

# The rooms of each package (its folders, and the modules beside them) from the lowest up. A module may import those of its
# own room and of all below; rooms of one line do not import each other.
ORDER = {
    "haed": ["options hashing", "layers", "distributed", "base", "chunk token", "iem sampling fsdp", "registry"],
    "data": [
        "urls filesystem processes statistics",
        "options",
        "sources",
        "chunkers",
        "shards",
        "remote",
        "corpus",
        "vocabulary loader parts",
        "corpora",
        "build",
    ],
    "pipeline": [
        "console signals suggestions",
        "config",
        "run",
        "training evaluation reporting",
        "analysis inference",
        "web",
        "arguments",
        "commands",
        "cli",
        "__main__",
    ],
    "flows": [
        "environment mappers artifacts",
        "middleware",
        "server",
        "lifecycle",
        "forms dispatcher",
        "sweep",
        "flows",
        "deployments",
        "serve",
        "commands",
        "cli",
    ],
}
# What of haed is open to pipeline: the protocol to all of it, the layout of chunks to some.
OPEN = {"base", "registry", "sampling", "distributed", "fsdp", "options", "hashing"}
TO_SOME, SOME = "haed.chunk", {"run", "training", "evaluation", "analysis"}


def modules() -> dict[str, Path]:
    paths = [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """All that a file imports, also within functions and for type checkers alone: our modules, and names of others."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


@cache
def graph() -> dict[str, set[str]]:
    """What each module imports."""
    return {name: set(imported(path)) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return (module.split(".") + [""])[1]


def level(module: str) -> int:
    """Of a module in its package; what is open to all of it, at the top, has the lowest."""
    package, own = module.split(".")[0], room(module)
    levels = {each: number for number, rooms in enumerate(ORDER[package]) for each in rooms.split()}
    assert not own or own in levels, f"{module} has no room: put it into ORDER"
    return levels.get(own, -1)


def is_allowed(name: str, other: str) -> bool:
    package, of = name.split(".")[0], other.split(".")[0]
    if package != of:
        inside = package == "pipeline" and of == "haed" and room(other)
        if inside and room(other) not in OPEN and not (other.startswith(TO_SOME) and room(name) in SOME):
            return False
        return of in ALLOWED[package]
    if not room(name):  # `pipeline` itself has `open_run`
        return True
    return room(name) == room(other) or level(name) > level(other)


def test_every_module_has_its_room() -> None:
    assert len(MODULES) > 100
    for name in MODULES:
        assert level(name) >= -1


@pytest.mark.parametrize(
    ("name", "other", "right"),
    [
        ("pipeline.reporting.report", "pipeline.run.index.probe", True),
        ("pipeline.reporting.report", "pipeline.inference", False),
        ("pipeline.run.sharding", "pipeline.training.stages", False),
        ("pipeline.web.questions", "pipeline.inference", True),
        ("pipeline.reporting.report", "pipeline.web.details", False),
        ("pipeline.evaluation.evaluate", "haed.chunk.packing", True),
        ("pipeline.reporting.report", "haed.chunk.packing", False),
        ("pipeline.training.trainer", "haed.iem.objective", False),
        ("haed.registry", "haed.iem.objective", True),
        ("haed.iem.objective", "haed.sampling", False),
        ("data.corpus", "pipeline.config", False),
        ("flows.artifacts", "flows.lifecycle", False),
    ],
)
def test_what_the_rules_say(name: str, other: str, right: bool) -> None:
    assert is_allowed(name, other) == right


def test_arrows_go_down() -> None:
    arrows = [(name, other) for name, found in graph().items() for other in found if other in MODULES]
    wrong = {f"{name} -> {other}" for name, other in arrows if not is_allowed(name, other)}
    assert sorted(wrong) == []


def test_there_is_no_circle() -> None:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_prefect_is_for_flows_alone() -> None:
    using = [name for name, found in graph().items() if any(other.split(".")[0] == "prefect" for other in found)]
    assert {name.split(".")[0] for name in using} == {"flows"}


@pytest.mark.parametrize(
    "module",
    ["haed.options", "data.options", "pipeline.config", "flows.cli", "flows.flows", "experiments.catalogue"],
)
def test_what_needs_no_model_is_cheap_to_import(module: str) -> None:
    dear = {"torch", "webdataset", "faiss", "prefect"} - ({"prefect"} if module == "flows.flows" else set())
    code = f"import sys, {module}; print({dear} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
