"""List the messages of the code: raised errors, warnings, log lines and prints, each with its place.

`python dev/list_messages.py [FOLDER ...]` reads `haed`, `data`, `pipeline`, `flows` and `experiments` by default.
Descriptions of options and arguments are left out: `haed CMD --help` and docs/reference list them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("haed", "data", "pipeline", "flows", "experiments")
CALLS = {"print", "warn", "debug", "info", "warning", "error", "exception", "critical", "log"}
DESCRIBED = {"help", "description", "epilog"}


def list_messages(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yield the node and the text of each message of a module; `{…}` stands for a value.

    Args:
        tree: the parsed module.
    """
    skipped = {id(node) for parent in ast.walk(tree) for each in _skipped(parent) for node in ast.walk(each)}
    shown = {id(node) for call in ast.walk(tree) if _shows_text(call) for node in ast.walk(call)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)
        else:
            continue
        if text.count(" ") > 2 or (id(node) in shown and " " in text.strip()):
            yield node, " ".join(text.split())


def _skipped(parent: ast.AST) -> list[ast.AST]:
    """Return children that are no messages: docstrings, parts of an f-string, descriptions of options."""
    if isinstance(parent, ast.JoinedStr):
        return list(parent.values)
    if isinstance(parent, ast.keyword) and parent.arg in DESCRIBED:
        return [parent.value]
    if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [parent.body[0]] if ast.get_docstring(parent) else []
    return []


def _shows_text(node: ast.AST) -> bool:
    """Return whether a node raises an error, or calls a function that shows its text."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return name in CALLS or name.endswith("Error")
    return isinstance(node, ast.Raise)


if __name__ == "__main__":
    for room in sys.argv[1:] or ROOMS:
        for path in sorted(Path(room).rglob("*.py")):
            for node, text in list_messages(ast.parse(path.read_text(encoding="utf-8"))):
                print(f"{path}:{node.lineno}: {text}")
