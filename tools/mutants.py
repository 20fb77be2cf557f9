"""Mutate random lines of codecs, cache, attention and kernels; print which mutants a test command does not notice.

python tools/mutants.py --count 60 --seed 1 [--out FILE] [-- PYTEST ARGUMENTS]

Each mutant changes one operator, comparison, number or condition of a copy of the checkout. The tests of its room run
first, then all others, until one fails. A line of JSON per mutant goes to --out; run again to continue.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
ROOMS = {
    "kvq_cli/codecs": "tests/codecs",
    "kvq_cli/cache": "tests/cache",
    "kvq_cli/attention": "tests/attention",
    "kernels/kvq_kernels": "tests/kernels",
}
BINARY = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def changes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of functions that `mutate` can change; not annotations, defaults of arguments or messages of errors."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Raise)):
                    continue
                for node in ast.walk(statement):
                    if (
                        (isinstance(node, ast.BinOp) and type(node.op) in BINARY)
                        or (isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED)
                        or isinstance(node, (ast.BoolOp, ast.IfExp))
                        or (isinstance(node, ast.Constant) and type(node.value) is int)
                    ):
                        yield node


def mutate(node: ast.AST) -> None:
    """Change a node in place."""
    if isinstance(node, ast.BinOp):
        node.op = BINARY[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = COMPARED[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.Constant):
        node.value += 1


def mutant(path: Path, draw: random.Random) -> tuple[str, int, str, str] | None:
    """(mutated source, line, before, after) of one random change of a file; None without a node to change.

    Only the lines of the changed expression differ: Triton reads the source of its functions.
    """
    source = path.read_text()
    nodes = list(changes(ast.parse(source)))
    if not nodes:
        return None
    node = draw.choice(nodes)
    before, changed = ast.unparse(node), copy.deepcopy(node)
    mutate(changed)
    lines = source.splitlines(keepends=True)
    start = sum(len(line.encode()) for line in lines[: node.lineno - 1]) + node.col_offset
    stop = sum(len(line.encode()) for line in lines[: node.end_lineno - 1]) + node.end_col_offset
    data = source.encode()
    after = ast.unparse(changed)
    return (data[:start] + f"({after})".encode() + data[stop:]).decode(), node.lineno, before, after


def drawn(count: int, seed: int) -> Iterator[tuple[Path, str, int, str, str]]:
    """`count` mutants, by files as long as they are."""
    draw = random.Random(seed)
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    weights = [len(path.read_text().splitlines()) for path in paths]
    while count:
        path = draw.choices(paths, weights)[0]
        if (made := mutant(path, draw)) is not None:
            count -= 1
            yield path, *made


def killed(folder: Path, room: str, arguments: list[str], timeout: int) -> bool:
    """Whether a test fails, or hangs: those of the room first."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{folder / 'kernels'}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    for tests in ([ROOMS[room]], ["tests", "--ignore", ROOMS[room]]):
        try:
            done = subprocess.run([*command, *tests], cwd=folder, env=environment, capture_output=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 5):
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=1200, help="seconds of a run of tests")
    parser.add_argument("--out", type=Path, default=ROOT / "results/mutants.jsonl")
    parser.add_argument("arguments", nargs="*", help="of pytest", default=["-m", "not slow"])
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = len(given.out.read_text().splitlines()) if given.out.exists() else 0
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkout"
        skipped = shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache", ".hypothesis")
        shutil.copytree(ROOT, folder, ignore=skipped)
        for number, (path, source, line, before, after) in enumerate(drawn(given.count, given.seed)):
            if number < done:
                continue
            name = path.relative_to(ROOT)
            room = next(room for room in ROOMS if name.is_relative_to(room))
            (folder / name).write_text(source)
            row = {"file": str(name), "line": line, "before": before, "after": after}
            row["killed"] = killed(folder, room, given.arguments, given.timeout)
            shutil.copy(path, folder / name)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(number, "killed" if row["killed"] else "SURVIVED", f"{name}:{line}", before, "->", after, flush=True)


if __name__ == "__main__":
    main()
