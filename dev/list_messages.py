"""List the messages of the code: raised errors, warnings, log lines and prints, each with its place.

`python dev/list_messages.py [FOLDER ...]` reads `haed`, `data`, `pipeline`, `flows` and `experiments` by default.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("haed", "data", "pipeline", "flows", "experiments")
CALLS = {"print", "warn", "debug", "info", "warning", "error", "exception", "critical", "log", "write", "refuse"}


def list_messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each message of a module; `{…}` stands for a value."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    inside = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in ast.walk(node)}
    calls = {id(text) for call in ast.walk(tree) if _is_message(call) for text in ast.walk(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | documentation:
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)
        else:
            continue
        if id(node) in calls or text.count(" ") > 2:
            yield node.lineno, " ".join(text.split())


def _is_message(node: ast.AST) -> bool:
    """Return whether a node raises an error, or calls a function that shows its text."""
    if isinstance(node, ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in CALLS or name.endswith("Error")


if __name__ == "__main__":
    for room in sys.argv[1:] or ROOMS:
        for path in sorted(Path(room).rglob("*.py")):
            for line, text in list_messages(ast.parse(path.read_text(encoding="utf-8"))):
                print(f"{path}:{line}: {text}")
