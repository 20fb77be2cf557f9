"""Only four commands import kvq_cli.papers, and only inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "kvq_cli"
PAPERS, TRAINING = "kvq_cli.papers", "reference_model"
COMMANDS = {"analyze.py", "bits.py", "reproduce.py", "results.py"}


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield each imported module of a file, and whether the import is inside a function or for type checkers."""
    deferred = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node in deferred) for alias in node.names)


def below(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def test_only_four_commands_import_papers():
    importers = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        for module, deferred in imports(ast.parse(path.read_text(encoding="utf-8"))):
            assert not any(below(module, each) for each in (TRAINING, "tools", "lab")), f"{name} imports {module}"
            if below(module, PAPERS) and name.parts[0] != "papers":
                assert deferred, f"{name} imports {module} at its top"
                importers.add(name.as_posix())
    assert importers == {f"cli/{command}" for command in COMMANDS}
