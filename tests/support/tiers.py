"""Which parametrized cases `make test` leaves to `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Values of one argument, marked slow: `parametrize("bits", [2, *slow(1, 3, 4)])`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases: tuple[Any, ...]) -> list[Any]:
    """Values of several arguments, marked slow: `parametrize(("bits", "dim"), [(2, 64), *slow_cases((4, 128))])`."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def fast(names: Container[Any], values: Iterable[Any]) -> list[Any]:
    """All values of one argument, or tuples of several, of which only those in `names` are not slow."""

    def marked(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in names else marked(value) for value in values]


def first_of_each(cases: Iterable[tuple[Any, ...]], ids: Iterable[str]) -> list[Any]:
    """Cases of several arguments with their ids, of which only the first of each method (first word of its id) is not
    slow."""
    seen: set[str] = set()
    params = []
    for case, name in zip(cases, ids, strict=True):
        method = name.partition("-")[0]
        params.append(pytest.param(*case, id=name, marks=[pytest.mark.slow] if method in seen else []))
        seen.add(method)
    return params
