"""No Triton loop reassigns two names of one tensor: Triton 3.6.0 and 3.7.1 then carry neither, and report nothing.

After `b = a`, a loop that assigns both is compiled as if neither changed from one iteration to the next.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvq_kernels
import pytest

SOURCES = sorted(Path(kvq_kernels.__file__).parent.rglob("*.py"))
ALIASED = """
@triton.jit
def kernel(x, n, FRESH):
    a = tl.load(x)
    if FRESH:
        b = tl.load(x)
    else:
        b = a
    for t in range(n):
        {body}
"""


def is_compiled(node: ast.AST) -> bool:
    """Whether a function is Triton's: decorated with `triton.jit`, also as a call."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)


def assigned(node: ast.AST) -> set[str]:
    """Names that are bound anywhere below `node`."""
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def aliases(assignment: ast.Assign) -> Iterator[frozenset[str]]:
    """Pairs of names that an assignment makes equal: `b = a`, `b, c = a, d`, `b = c = ...`."""
    names = [target.id for target in assignment.targets if isinstance(target, ast.Name)]
    pairs = [(first, second) for first in names for second in names]
    for target in assignment.targets:
        sides = [(target, assignment.value)]
        if isinstance(target, ast.Tuple) and isinstance(assignment.value, ast.Tuple):
            sides = list(zip(target.elts, assignment.value.elts, strict=True))
        pairs += [(t.id, v.id) for t, v in sides if isinstance(t, ast.Name) and isinstance(v, ast.Name)]
    yield from map(frozenset, pairs)


def aliased_loops(tree: ast.AST) -> Iterator[tuple[int, frozenset[str]]]:
    """(line of a loop, two names of one tensor that the loop reassigns), in every function that Triton compiles."""
    for function in filter(is_compiled, ast.walk(tree)):
        assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
        for loop in ast.walk(function):
            if isinstance(loop, (ast.For, ast.While)):
                names = assigned(ast.Module(body=loop.body, type_ignores=[]))
                earlier = [node for node in assignments if node.end_lineno < loop.lineno]
                pairs = {pair for node in earlier for pair in aliases(node) if len(pair) == 2}
                yield from ((loop.lineno, pair) for pair in pairs if pair <= names)


def test_no_loop_reassigns_two_names_of_one_tensor():
    trees = {path.name: ast.parse(path.read_text()) for path in SOURCES}
    assert sum(is_compiled(node) for tree in trees.values() for node in ast.walk(tree)) > 50
    assert {name: found for name, tree in trees.items() if (found := list(aliased_loops(tree)))} == {}


@pytest.mark.parametrize(
    ("body", "found"), [("b = a; a = tl.load(x + t)", True), ("a = tl.load(x + t)", False), ("c = a + b", False)]
)
def test_the_pattern_is_recognized(body, found):
    assert bool(list(aliased_loops(ast.parse(ALIASED.format(body=body))))) == found
